"""The role gpu_tools: programs for monitoring and profiling a training node, and access to GPU counters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.cuda import DRIVER_PACKAGES
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, NodeQuery
from gpunode.provisioning.role import PackageSettings, Role, option
from gpunode.provisioning.site_files import RECORD as SITE_FILES
from gpunode.provisioning.site_files import SiteFile, bad_files, recorded, removed, site_files
from gpunode.provisioning.state import Look, NodeState
from gpunode.text import matches_any


class Tool(NamedTuple):
    """A tool: the possible names of its package, of which the first available is used, and its program."""

    apt: tuple[str, ...]
    dnf: tuple[str, ...]
    program: str


RECORD = "/etc/gpunode/tools.json"
OPTIONS = "/etc/modprobe.d/gpunode-profiling.conf"
FOLDER = "/opt/gpunode/tools"
LINKS = "/usr/local/bin"
PYTHON = {"py-spy": ("py-spy",), "tensorboard": ("tensorboard",), "xprof": ("xprof",)}
"""Tools from PyPI, each in a virtual environment of its own, and their programs."""
_VENVS = tuple(f"{FOLDER}/{name}" for name in PYTHON)
TOOLS = {
    "nvtop": Tool(("nvtop",), ("nvtop",), "nvtop"),
    "htop": Tool(("htop",), ("htop",), "htop"),
    "iotop": Tool(("iotop",), ("iotop",), "iotop"),
    "sysstat": Tool(("sysstat",), ("sysstat",), "iostat"),
    "perf": Tool(("linux-perf", "linux-tools-KERNEL", "linux-tools-generic"), ("perf",), "perf"),
    "strace": Tool(("strace",), ("strace",), "strace"),
    "numactl": Tool(("numactl",), ("numactl",), "numactl"),
    "hwloc": Tool(("hwloc-nox", "hwloc"), ("hwloc",), "lstopo-no-graphics"),
    "pciutils": Tool(("pciutils",), ("pciutils",), "lspci"),
    "infiniband-diags": Tool(("infiniband-diags",), ("infiniband-diags",), "ibstat"),
    "perftest": Tool(("perftest",), ("perftest",), "ib_write_bw"),
    "fio": Tool(("fio",), ("fio",), "fio"),
    "nvme-cli": Tool(("nvme-cli",), ("nvme-cli",), "nvme"),
}
NSIGHT = ("cuda-nsight-systems-*", "cuda-nsight-compute-*")
"""NVIDIA's packages of the profilers of a CUDA series."""
PROFILING = {"everybody": "0", "admins": "1"}
PARAMETER = "RmProfilingAdminOnly"
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]{0,120}(=[A-Za-z0-9+.:~*^-]{1,120})?")
_VERSION = re.compile(r"[0-9]+(\.[0-9a-z]+){0,4}")


class GpuToolsSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is changed. V(present): the tools are installed. V(absent): tools installed by the role are "
        "removed.",
    )
    tools: tuple[str, ...] = option(
        tuple(TOOLS), "Tools from the distribution's packages. Unavailable ones are reported, the others installed."
    )
    python: dict[str, str | float | None] = option(
        {},
        "Tools from PyPI (V(py-spy), V(tensorboard), V(xprof)), each in its own virtual environment, with its version; "
        "an empty version is the one with hashes in files/.",
    )
    nsight: bool = option(
        False, "Install Nsight Systems and Nsight Compute from NVIDIA's repository (role nvidia_repository)."
    )
    profiling: Literal["keep", "everybody", "admins"] = option(
        "keep",
        "Who may read the performance counters of GPUs; V(keep): no change. Takes effect when the module is reloaded.",
    )
    gpunode_extra_packages: tuple[str, ...] = option(
        (), "Packages of the site, each as NAME or NAME=VERSION with C(*) as a wildcard. Names differ between systems."
    )
    gpunode_extra_files: tuple[SiteFile, ...] = option(
        (), 'Files of the site, such as [{ path: /etc/motd, content: "..." }].'
    )


class Venv(Frozen):
    """A virtual environment to be built."""

    name: str
    path: str
    version: str
    locked: bool
    """The role has the hashes of its files."""
    programs: tuple[str, ...]


class GpuToolsResult(Frozen):
    """What the role's own tasks do."""

    venvs: tuple[Venv, ...] = ()
    leaving: tuple[str, ...] = ()
    """Virtual environments, and links to their programs, to be removed."""


ROLE = Role(
    name="gpu_tools",
    title="Install monitoring and profiling tools for training nodes",
    about=(
        "Programs of the distribution, Python tools in separate virtual environments, NVIDIA's profilers.",
        "Removes what it installed with O(gpu_tools_state=absent). By default the node is not changed.",
    ),
    settings=GpuToolsSettings,
    for_images=True,
    result=GpuToolsResult,
    files=(RECORD, OPTIONS, SITE_FILES),
    folders=("/etc/gpunode", FOLDER, FOLDER.rpartition("/")[0]),
    packages=(
        *dict.fromkeys(name.replace("KERNEL", "[0-9]*") for tool in TOOLS.values() for name in (*tool.apt, *tool.dnf)),
        *NSIGHT,
        "python3-venv",
    ),
    more=Look(
        paths=(
            *_VENVS,
            *(f"{LINKS}/{program}" for programs in PYTHON.values() for program in programs),
            *(f"{FOLDER}/{name}/bin/{program}" for name, programs in PYTHON.items() for program in programs),
        ),
        contents=(RECORD, SITE_FILES, *(f"{venv}/gpunode-version" for venv in _VENVS)),
    ),
)


@ROLE.present
def present(state: NodeState, settings: GpuToolsSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for an unknown tool or an invalid version."""
    refusals = [*_bad_packages(settings.gpunode_extra_packages), *bad_files(settings.gpunode_extra_files)]
    if refusals:
        return Manifest(role=ROLE.name, refusals=tuple(refusals))
    tools = _tools(settings.tools)
    extra = {entry: entry.partition("=")[0] for entry in settings.gpunode_extra_packages}
    python = _python(settings.python)
    candidates = {tool: _candidates(state, tool) for tool in tools}
    if python and state.manager == "apt":
        candidates["python3-venv"] = ("python3-venv",)
    missing = {tool: names for tool, names in candidates.items() if not _installed(state, names)}
    nsight = _nsight_there(state) if settings.nsight else []
    queried = [
        *(name for names in missing.values() for name in names),
        *(NSIGHT if settings.nsight and not nsight else ()),
        *(name for name in extra.values() if name not in state.installed),
    ]
    offered: Mapping[str, object] = {}
    if queried:
        if "offers" not in context.answers:
            return Manifest(
                role=ROLE.name, questions={"offers": NodeQuery(kind="package_offers", body={"names": queried})}
            )
        answer = context.answers["offers"]
        if answer.get("error"):
            return Manifest(role=ROLE.name, refusals=(f"package-manager: {answer['error']}",))
        offered = answer.get("offered") or {}
    unknown = [name for name in extra.values() if name not in state.installed and name not in offered]
    if unknown:
        refusals = [f"gpunode_extra_packages: no configured repository has {', '.join(unknown)}"]
        return Manifest(role=ROLE.name, refusals=tuple(refusals))
    site = site_files(state, settings.gpunode_extra_files)
    notes = [*site.notes]
    install = [*extra]
    for tool, names in candidates.items():
        chosen = _installed(state, names) or next((name for name in names if name in offered), None)
        if chosen is not None:
            install.append(chosen)
        else:
            notes.append(f"{tool}: no configured repository has {' or '.join(names)}; the other tools were installed")
    if settings.nsight:
        newest = nsight or [name for pattern in NSIGHT if (name := _newest(offered, pattern))]
        install += newest
        if len(newest) < len(NSIGHT):
            notes.append("nsight: no configured repository has it: the role nvidia_repository adds NVIDIA's")
    have = set(install)
    programs = [TOOLS[tool].program for tool in tools if have.intersection(candidates[tool])]
    record = {"programs": sorted([*programs, *(program for name in python for program in PYTHON[name])])}
    options = ROLE.texts(context)("modprobe.conf.j2", everybody=settings.profiling == "everybody")
    files = [
        ManagedFile(path=RECORD, content=json.dumps(record, indent=1) + "\n", phase="after"),
        ManagedFile(path=OPTIONS, content=None if settings.profiling == "keep" else options, phase="after"),
        *site.files,
    ]
    locks = {name: _locked(name) for name in python}
    wanted = {name: version or locks[name] for name, version in python.items()}
    why = {name: _venv_reason(state, name, version) for name, version in wanted.items()}
    venvs = tuple(
        Venv(name=name, path=f"{FOLDER}/{name}", version=version, locked=version == locks[name], programs=PYTHON[name])
        for name, version in wanted.items()
        if why[name]
    )
    notes += [
        f"gpu_tools_python: {venv.name} {venv.version} is installed without hashes; {locks[venv.name]} has them"
        for venv in venvs
        if not venv.locked
    ]
    leaving = [name for name in PYTHON if name not in python and state.kind(f"{FOLDER}/{name}") == "folder"]
    return Manifest(
        role=ROLE.name,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(state, settings, install, never=DRIVER_PACKAGES),
        notes=tuple(notes),
        reboot_reasons=_reboot(state, settings.profiling),
        pending_reasons=(*filter(None, why.values()), *(f"{FOLDER}/{name} must be removed" for name in leaving)),
        result=GpuToolsResult(venvs=venvs, leaving=_paths(leaving)),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the virtual environments."""
    leaving = [name for name in PYTHON if state.kind(f"{FOLDER}/{name}") == "folder"]
    reasons = (*manifest.pending_reasons, *(f"{FOLDER}/{name} must be removed" for name in leaving))
    files, notes = removed(recorded(state))
    more = {"files": (*manifest.files, *files), "notes": notes, "pending_reasons": reasons}
    return manifest.updated(**more, result=GpuToolsResult(leaving=_paths(leaving)))


def _paths(tools: Iterable[str]) -> tuple[str, ...]:
    return tuple(path for name in tools for path in (*(f"{LINKS}/{link}" for link in PYTHON[name]), f"{FOLDER}/{name}"))


def _bad_packages(packages: Iterable[str]) -> Iterator[str]:
    for entry in packages:
        if _PACKAGE.fullmatch(entry) is None:
            yield f"gpunode_extra_packages: {entry!r} is not a package (examples: bpftrace, bpftrace=0.17*)"
        elif matches_any(entry.partition("=")[0], DRIVER_PACKAGES):
            yield f"gpunode_extra_packages: {entry} belongs to the role nvidia_driver"


def _tools(tools: Iterable[str]) -> list[str]:
    unknown = [tool for tool in tools if tool not in TOOLS]
    if unknown:
        raise UsageError(f"gpu_tools_tools: {unknown[0]} is not a tool of the role (known: {', '.join(TOOLS)})")
    return list(dict.fromkeys(tools))


def _python(requested: Mapping[str, str | float | None]) -> dict[str, str]:
    versions = {}
    for name, version in requested.items():
        if name not in PYTHON:
            raise UsageError(f"gpu_tools_python: {name} is not a tool of the role (known: {', '.join(PYTHON)})")
        text = str(version or "")
        if text and _VERSION.fullmatch(text) is None:
            raise UsageError(f"gpu_tools_python: {name}: {text} is not a version (example: 2.19.0)")
        versions[name] = text
    return versions


def _candidates(state: NodeState, tool: str) -> tuple[str, ...]:
    """Return a tool's packages for this node, in order of preference."""
    running = state.facts.running_kernel or ""
    names = state.by_manager(apt=TOOLS[tool].apt, dnf=TOOLS[tool].dnf)
    return tuple(name.replace("KERNEL", running) for name in names if running or "KERNEL" not in name)


def _installed(state: NodeState, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in state.installed), None)


def _nsight_there(state: NodeState) -> list[str]:
    """Return the installed profilers; none unless both are installed."""
    profilers = [name for pattern in NSIGHT if (name := _newest(state.installed, pattern))]
    return profilers if len(profilers) == len(NSIGHT) else []


def _newest(names: Iterable[str], pattern: str) -> str | None:
    """Return the package of the newest CUDA series: ``cuda-nsight-systems-13-2``."""
    series = {
        tuple(int(number) for number in match[1].split("-")): name
        for name in names
        if (match := re.fullmatch(re.escape(pattern[:-1]) + r"([0-9]+-[0-9]+)", name))
    }
    return series[max(series)] if series else None


def _reboot(state: NodeState, profiling: str) -> tuple[str, ...]:
    now = (state.facts.driver_parameters or {}).get(PARAMETER)
    if profiling == "keep" or state.facts.loaded_driver is None or now in (None, PROFILING[profiling]):
        return ()
    return ("the new permission takes effect when the NVIDIA module is reloaded",)


def _venv_reason(state: NodeState, name: str, version: str) -> str:
    """Return why a virtual environment has to be built; empty if it is as requested."""
    venv = f"{FOLDER}/{name}"
    for program in PYTHON[name]:
        if state.kind(f"{venv}/bin/{program}") != "file":
            return f"{venv}/bin/{program} is missing"
        link = state.files.get(f"{LINKS}/{program}")
        if link is None or link.kind != "link" or link.target != f"{venv}/bin/{program}":
            return f"{LINKS}/{program} is not a link to {venv}/bin/{program}"
    installed = (state.contents.get(f"{venv}/gpunode-version") or "").strip()
    return f"{venv} was created for version {installed or 'unknown'}" if installed != version else ""


def _locked(name: str) -> str:
    """Return the version of a Python tool for which the role has the hashes of all files."""
    text = (collection_root() / "roles" / ROLE.name / "files" / f"{name}.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(name)}==([^\s;]+)", text, re.MULTILINE)
    assert match is not None  # noqa: S101 - a file of the collection
    return match[1]
