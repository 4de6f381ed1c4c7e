"""The role gpu_tools: programs for monitoring and profiling a training node, and access to GPU counters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.provisioning.context import Context
from gpunode.provisioning.cuda import DRIVER_PACKAGES
from gpunode.provisioning.departures import departures
from gpunode.provisioning.manifest import (
    AptChange,
    DnfChange,
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeQuestion,
    no_package_manager,
)
from gpunode.provisioning.state import Look, NodeState


class Tool(NamedTuple):
    """A tool: the possible names of its package, of which the first available is used, and its program."""

    apt: tuple[str, ...]
    dnf: tuple[str, ...]
    program: str


ROLE = "gpu_tools"
RECORD = "/etc/gpunode/tools.json"
OPTIONS = "/etc/modprobe.d/gpunode-profiling.conf"
MEMORY = "/var/lib/gpunode/gpu_tools"
BEFORE = f"{MEMORY}/packages-before"
FOLDER = "/opt/gpunode/tools"
LINKS = "/usr/local/bin"
PYTHON = {"py-spy": ("py-spy",), "tensorboard": ("tensorboard",)}
"""Tools from PyPI, each in a virtual environment of its own, and their programs."""
_VENVS = tuple(f"{FOLDER}/{name}" for name in PYTHON)
LOOK = Look(
    paths=(
        RECORD,
        OPTIONS,
        MEMORY,
        "/etc/gpunode",
        FOLDER,
        *_VENVS,
        *(f"{LINKS}/{program}" for programs in PYTHON.values() for program in programs),
        *(f"{FOLDER}/{name}/bin/{program}" for name, programs in PYTHON.items() for program in programs),
    ),
    contents=(BEFORE, RECORD, *(f"{venv}/gpunode-version" for venv in _VENVS)),
)
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
_VERSION = re.compile(r"[0-9]+(\.[0-9a-z]+){0,4}")


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for an unknown tool or an invalid version."""
    if state.manager is None:
        return no_package_manager(ROLE)
    if settings["state"] == "keep":
        return Manifest(role=ROLE)
    if settings["state"] == "absent":
        return _absent(state, settings)
    tools = _tools(settings["tools"])
    python = _python(settings["python"])
    candidates = {tool: _candidates(state, tool) for tool in tools}
    if python and state.manager == "apt":
        candidates["python3-venv"] = ("python3-venv",)
    missing = {tool: names for tool, names in candidates.items() if not _installed(state, names)}
    nsight = _nsight_there(state) if settings["nsight"] else []
    asked = [
        *(name for names in missing.values() for name in names),
        *(NSIGHT if settings["nsight"] and not nsight else ()),
    ]
    offered: Mapping[str, Any] = {}
    if asked:
        if "offers" not in context.answers:
            return Manifest(role=ROLE, questions={"offers": NodeQuestion(kind="package_offers", body={"names": asked})})
        answer = context.answers["offers"]
        if answer.get("error"):
            return Manifest(role=ROLE, refusals=(f"package-manager: {answer['error']}",))
        offered = answer.get("offered") or {}
    notes = []
    install = []
    for tool, names in candidates.items():
        chosen = _installed(state, names) or next((name for name in names if name in offered), None)
        if chosen is not None:
            install.append(chosen)
        else:
            notes.append(f"{tool}: no configured repository has {' or '.join(names)}; the other tools were installed")
    if settings["nsight"]:
        newest = nsight or [name for pattern in NSIGHT if (name := _newest(offered, pattern))]
        install += newest
        if len(newest) < len(NSIGHT):
            notes.append("nsight: no configured repository has it: the role nvidia_repository adds NVIDIA's")
    have = set(install)
    programs = [TOOLS[tool].program for tool in tools if have.intersection(candidates[tool])]
    record = {"programs": sorted([*programs, *(program for name in python for program in PYTHON[name])])}
    profiling = str(settings["profiling"])
    files = [
        ManagedFile(path=RECORD, content=json.dumps(record, indent=1) + "\n", phase="after"),
        ManagedFile(path=OPTIONS, content=_options(profiling), phase="after"),
    ]
    locks = {name: _locked(name) for name in python}
    wanted = {name: version or locks[name] for name, version in python.items()}
    venvs = {name: {"version": version, "due": _venv_due(state, name, version)} for name, version in wanted.items()}
    notes += [
        f"gpu_tools_python: {name} {version} is installed without hashes; {locks[name]} has them"
        for name, version in wanted.items()
        if version != locks[name] and venvs[name]["due"]
    ]
    leaving = [name for name in PYTHON if name not in python and _kind(state, f"{FOLDER}/{name}") == "folder"]
    return Manifest(
        role=ROLE,
        files=tuple(files),
        folders=(ManagedFolder(path=MEMORY),),
        packages=_change(state, install, int(settings["lock_wait_s"])),
        notes=tuple(notes),
        reboot_reasons=_reboot(state, profiling),
        due_reasons=(
            *(why for name in venvs if (why := venvs[name]["due"])),
            *(f"{FOLDER}/{name} must be removed" for name in leaving),
        ),
        values={
            "state": "present",
            "folder": FOLDER,
            "venvs": [
                {
                    "name": name,
                    "version": one["version"],
                    "locked": one["version"] == locks[name],
                    "programs": list(PYTHON[name]),
                }
                for name, one in venvs.items()
                if one["due"]
            ],
            "leaving": leaving,
            "programs": [program for name in leaving for program in PYTHON[name]],
        },
    )


def _tools(given: Any) -> list[str]:
    unknown = [tool for tool in given or () if tool not in TOOLS]
    if unknown:
        raise UsageError(f"gpu_tools_tools: {unknown[0]} is not a tool of the role (known: {', '.join(TOOLS)})")
    return list(dict.fromkeys(given or ()))


def _python(given: Any) -> dict[str, str]:
    found = {}
    for name, version in (given or {}).items():
        if name not in PYTHON:
            raise UsageError(f"gpu_tools_python: {name} is not a tool of the role (known: {', '.join(PYTHON)})")
        text = str(version or "")
        if text and _VERSION.fullmatch(text) is None:
            raise UsageError(f"gpu_tools_python: {name}: {text} is not a version (example: 2.19.0)")
        found[name] = text
    return found


def _candidates(state: NodeState, tool: str) -> tuple[str, ...]:
    """Return a tool's packages for this node, in order of preference."""
    running = state.facts.running_kernel or ""
    names = TOOLS[tool].apt if state.manager == "apt" else TOOLS[tool].dnf
    return tuple(name.replace("KERNEL", running) for name in names if running or "KERNEL" not in name)


def _installed(state: NodeState, names: Iterable[str]) -> str | None:
    return next((name for name in names if name in state.installed), None)


def _nsight_there(state: NodeState) -> list[str]:
    """Return the installed profilers; none unless both are installed."""
    found = [name for pattern in NSIGHT if (name := _newest(state.installed, pattern))]
    return found if len(found) == len(NSIGHT) else []


def _newest(names: Iterable[str], pattern: str) -> str | None:
    """Return the package of the newest CUDA series: ``cuda-nsight-systems-13-2``."""
    series = {
        tuple(int(number) for number in match[1].split("-")): name
        for name in names
        if (match := re.fullmatch(re.escape(pattern[:-1]) + r"([0-9]+-[0-9]+)", name))
    }
    return series[max(series)] if series else None


def _options(profiling: str) -> str | None:
    if profiling == "keep":
        return None
    value = PROFILING[profiling]
    who = "every user" if profiling == "everybody" else "administrators alone"
    names = ("nvidia", "nvidia-current")
    lines = "".join(f"options {name} NVreg_RestrictProfilingToAdminUsers={value}\n" for name in names)
    return f"# Managed by gpunode (role gpu_tools): {who} may read the performance counters of GPUs.\n{lines}"


def _reboot(state: NodeState, profiling: str) -> tuple[str, ...]:
    now = (state.facts.driver_parameters or {}).get(PARAMETER)
    if profiling == "keep" or state.facts.loaded_driver is None or now in (None, PROFILING[profiling]):
        return ()
    return ("the new permission takes effect when the NVIDIA module is reloaded",)


def _kind(state: NodeState, path: str) -> str:
    return state.files[path].kind if path in state.files else "unknown"


def _venv_due(state: NodeState, name: str, version: str) -> str:
    """Return why a virtual environment has to be built; empty if it is as requested."""
    venv = f"{FOLDER}/{name}"
    for program in PYTHON[name]:
        if _kind(state, f"{venv}/bin/{program}") != "file":
            return f"{venv}/bin/{program} is missing"
        link = state.files.get(f"{LINKS}/{program}")
        if link is None or link.kind != "link" or link.target != f"{venv}/bin/{program}":
            return f"{LINKS}/{program} is not a link to {venv}/bin/{program}"
    there = (state.contents.get(f"{venv}/gpunode-version") or "").strip()
    return f"{venv} was created for version {there or 'unknown'}" if there != version else ""


def _locked(name: str) -> str:
    """Return the version of a Python tool for which the role has the hashes of all files."""
    text = (collection_root() / "roles" / ROLE / "files" / f"{name}.txt").read_text(encoding="utf-8")
    match = re.search(rf"^{re.escape(name)}==([^\s;]+)", text, re.MULTILINE)
    assert match is not None  # noqa: S101 - a file of the collection
    return match[1]


def _change(state: NodeState, install: Iterable[str], wait: int) -> AptChange | DnfChange:
    change = AptChange if state.manager == "apt" else DnfChange
    return change(install=tuple(install), never=DRIVER_PACKAGES, memory=BEFORE, lock_wait_s=wait)


def _absent(state: NodeState, settings: Mapping[str, Any]) -> Manifest:
    names = [name for tool in TOOLS for name in _candidates(state, tool)]
    packages, leaving = departures(
        state, (*names, *NSIGHT, "python3-venv"), memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"])
    )
    venvs = [name for name in PYTHON if _kind(state, f"{FOLDER}/{name}") == "folder"]
    ours = _kind(state, RECORD) != "absent"
    paths = ("/etc/gpunode", MEMORY, FOLDER, FOLDER.rpartition("/")[0])
    return Manifest(
        role=ROLE,
        files=tuple(ManagedFile(path=path, content=None, phase="after") for path in (RECORD, OPTIONS, BEFORE)),
        folders=tuple(ManagedFolder(path=path, state="absent_if_empty", phase="after") for path in paths if ours),
        packages=packages,
        due_reasons=(*leaving, *(f"{FOLDER}/{name} must be removed" for name in venvs)),
        values={
            "state": "absent",
            "folder": FOLDER,
            "leaving": venvs,
            "programs": [program for name in venvs for program in PYTHON[name]],
        },
    )
