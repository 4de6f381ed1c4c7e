"""The role ml_environment: NCCL's file, variables for all users, the launcher for jobs, and logind's clean-up."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Literal

from gpunode.checks.host import DEBUGGING
from gpunode.checks.host_settings import LISTS, missing_names, names_on
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.onnode import program_text
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, Manifest
from gpunode.provisioning.role import PackageSettings, Role, Value, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import around, completed
from gpunode.provisioning.transaction import Transaction
from gpunode.tuning import Setting, nccl_conf, node_shell, tune, tune_node
from gpunode.tuning.network import debugs

NCCL = "/etc/nccl.conf"
PROFILE = "/etc/profile.d/gpunode-ml.sh"
ENVIRONMENT = "/etc/environment.d/90-gpunode-ml.conf"
JOB = "/etc/gpunode/job.json"
LAUNCHER = "/usr/local/bin/gpunode-run"
EXAMPLE = "/usr/local/share/doc/gpunode/torchrun.sh"
LOGIND_UNIT = "systemd-logind.service"
"""It keeps sessions over its restart."""
LOGIND = "/etc/systemd/logind.conf.d/90-gpunode.conf"
TOPOLOGIES = "/opt/microsoft/*-topo.xml"
"""Azure's images contain the topology that their hypervisor hides (Azure/azhpc-images)."""
MARK = "Managed by gpunode (role ml_environment)"
BEGIN, END = f"# BEGIN {MARK}", "# END gpunode (role ml_environment)"
MALLOC_PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}
"""Debian's and Ubuntu's names."""
OF_JOBS = re.compile(
    r"(PYTORCH_\w+|XLA_\w+|TF_XLA_FLAGS|LD_PRELOAD|CUDA_VISIBLE_DEVICES|MASTER_(ADDR|PORT)|(LOCAL_)?(RANK|WORLD_SIZE))"
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class MlEnvironmentSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): the files are deployed. V(absent): they are removed; other lines of C(/etc/nccl.conf) remain.",
    )
    nccl: dict[str, Value] = option(
        {},
        "Lines of C(/etc/nccl.conf) that extend or override the derived ones (NCCL_IB_TC: 106). V(null) removes a "
        "derived one.",
    )
    nccl_topology_file: str = option(
        "auto", "NCCL's topology file: V(auto) (that of Azure's images), V(none), or its path."
    )
    variables: dict[str, Value] = option(
        {},
        "Variables for logins and user services that extend or override the derived ones. V(null) removes a derived "
        "one.",
    )
    shared_threads: bool = option(
        False, "Set a default number of OpenMP and MKL threads on a shared node: cores per GPU."
    )
    malloc: Literal["none", "jemalloc", "tcmalloc"] = option(
        "none", "Library that C(gpunode-run --malloc) preloads: V(none), V(jemalloc) or V(tcmalloc)."
    )
    remove_ipc: bool = option(
        False,
        "Let logind remove shared memory and semaphores of a user at the last logout: that ends jobs which outlive "
        "their login.",
    )


ROLE = Role(
    name="ml_environment",
    title="Deploy NCCL's configuration, environment variables and a launcher for jobs",
    about=(
        "Writes node-wide settings as C(gpunode env) derives them, and C(gpunode-run) for the settings of a job.",
        "Removes it with O(ml_environment_state=absent).",
    ),
    settings=MlEnvironmentSettings,
    reads=("engines", "topology"),
    files=(PROFILE, ENVIRONMENT, JOB, LAUNCHER, EXAMPLE, LOGIND),
    folders=("/etc/gpunode", EXAMPLE.rpartition("/")[0], LOGIND.rpartition("/")[0]),
    packages=tuple(MALLOC_PACKAGES.values()),
    more=Look(globs=(TOPOLOGIES,), contents=(NCCL,)),
)


@ROLE.present
def present(state: NodeState, settings: MlEnvironmentSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for malformed settings."""
    notes: list[str] = []
    profile = context.settings_of("preflight")["gpunode_profile"]
    node = tune_node(state.facts, profile, shared=settings.shared_threads)
    job = tune(state.facts, "pytorch", profile=profile)
    wide = _variables(node.environment, settings.variables)
    nccl = _nccl(node.nccl, settings, state, notes)
    document = {
        "profile": profile,
        "environment": {
            setting.name: setting.value for setting in job.environment if not setting.name.endswith("_NUM_THREADS")
        },
        "docker": [word for setting in job.docker for word in (setting.name, setting.value) if word],
    }
    environment = "".join(f"{setting.name}=${{{setting.name}:-{setting.value}}}\n" for setting in wide)
    text = ROLE.texts(context)
    contents = {
        PROFILE: node_shell(wide, MARK) if wide else None,
        ENVIRONMENT: f"# {MARK}\n{environment}" if wide else None,
        JOB: json.dumps(document, indent=1) + "\n",
        LAUNCHER: f"#!/usr/bin/python3 -I\n# {MARK}\n{program_text('launcher')}",
        EXAMPLE: text("torchrun.sh.j2", launcher=LAUNCHER),
        LOGIND: None if settings.remove_ipc else text("logind.conf.j2"),
    }
    modes = {LAUNCHER: "0755", EXAMPLE: "0755"}
    files = {
        path: ManagedFile(path=path, content=text, mode=modes.get(path, "0644"), phase="after")
        for path, text in contents.items()
    }
    return Manifest(
        role=ROLE.name,
        files=(*files.values(), _shared(state, nccl)),
        packages=_packages(state, settings, notes),
        units=ROLE.restarted(state, LOGIND_UNIT, files[LOGIND]),
        notes=tuple(notes),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the role's lines of nccl.conf."""
    (logind,) = (file for file in manifest.files if file.path == LOGIND)
    more = {"files": (*manifest.files, _shared(state, [])), "units": ROLE.restarted(state, LOGIND_UNIT, logind)}
    return manifest.updated(**more)


def _variables(derived: Iterable[Setting], requested: Mapping[str, Value]) -> list[Setting]:
    """Return the variables for all users; those for jobs or debugging are refused."""
    variables = {setting.name: setting for setting in derived}
    for name, value in requested.items():
        if NAME.fullmatch(name) is None:
            raise UsageError(f"ml_environment_variables: {name!r} is not the name of a variable")
        if OF_JOBS.fullmatch(name) or name in DEBUGGING or name.startswith("NCCL_"):
            where = "ml_environment_nccl has NCCL's" if name.startswith("NCCL_") else "gpunode-run sets a job's"
            raise UsageError(f"ml_environment_variables: {name} must not be set for all users of a node: {where}")
        variables.pop(name, None)
        if value is not None:
            text = _line("ml_environment_variables", name, value)
            variables[name] = Setting(name=name, value=text, reason="ml_environment_variables", source="the inventory")
    return list(variables.values())


def _line(variable: str, name: str, value: Value) -> str:
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if not text or not text.isprintable() or len(text) > 1000 or set(text) & set("'\"$`\\{}"):
        raise UsageError(f"{variable}: the value of {name} is not one line of plain text")
    return text


def _nccl(
    derived: Iterable[Setting], settings: MlEnvironmentSettings, state: NodeState, notes: list[str]
) -> list[Setting]:
    """Return the role's lines for nccl.conf: derived, with the user's additions, changes or removals."""
    variables = {setting.name: setting for setting in derived}
    topology = _topology(settings.nccl_topology_file, state, notes)
    if topology is not None:
        variables["NCCL_TOPO_FILE"] = Setting(
            name="NCCL_TOPO_FILE", value=topology, reason="the hypervisor hides the topology", source="azhpc-images"
        )
    for name, value in settings.nccl.items():
        if not name.startswith("NCCL_") or NAME.fullmatch(name) is None:
            raise UsageError(f"ml_environment_nccl: {name!r} is not a variable of NCCL (example: NCCL_IB_TC)")
        variables.pop(name, None)
        if value is None:
            continue
        text = _line("ml_environment_nccl", name, value)
        wrong = _missing(state.facts, name, text)
        if wrong is not None:
            notes.append(f"{NCCL}: {name}={text}: {wrong}: skipped, the others are set")
            continue
        if debugs(name, text):
            notes.append(
                f"{NCCL}: {name}={text} is for debugging (requested by ml_environment_nccl): remove it afterwards"
            )
        variables[name] = Setting(name=name, value=text, reason="ml_environment_nccl", source="the inventory")
    for name, value in _foreign(state):
        wrong = _missing(state.facts, name, value)
        if wrong is not None:
            notes.append(f"{NCCL}: {name}={value}, which is not the role's: {wrong}")
        if debugs(name, value):
            notes.append(f"{NCCL}: {name}={value}, which is not the role's, is for debugging")
        if variables.pop(name, None) is not None:
            notes.append(f"{NCCL}: {name}={value} is not the role's and stays")
    return list(variables.values())


def _missing(node: NodeFacts, name: str, value: str) -> str | None:
    """Return which interfaces or HCAs of a list do not exist; None if all do, or it is unknown."""
    if name not in LISTS or value.startswith("^") or None in (node.nics, node.addressed, node.infiniband):
        return None
    has = names_on(node, name)
    gone = missing_names(value, has)
    return f"the node has no {LISTS[name]} {', '.join(gone)}, it has {', '.join(has) or 'none'}" if gone else None


def _topology(setting: str, state: NodeState, notes: list[str]) -> str | None:
    paths = sorted(path for path in state.files if re.fullmatch(r"/opt/microsoft/[^/]+-topo\.xml", path))
    if setting == "none":
        return None
    if setting == "auto":
        if len(paths) > 1:
            notes.append(
                f"several topology files: select one with ml_environment_nccl_topology_file: {', '.join(paths)}"
            )
        return paths[0] if len(paths) == 1 else None
    if not setting.startswith("/") or not re.fullmatch(r"[\w./-]{2,400}", setting):
        raise UsageError(f"ml_environment_nccl_topology_file: {setting!r} is not auto, none or an absolute path")
    return setting


def _foreign_text(state: NodeState) -> str:
    """Return the foreign lines of nccl.conf."""
    return around(NCCL, state.contents.get(NCCL) or "", BEGIN, END)


def _foreign(state: NodeState) -> list[tuple[str, str]]:
    lines = (line.partition("=") for line in _foreign_text(state).split("\n") if not line.lstrip().startswith("#"))
    return [(name.strip(), value.strip()) for name, equals, value in lines if equals]


def _shared(state: NodeState, settings: list[Setting]) -> ManagedFile:
    """Return nccl.conf with foreign lines unchanged and the role's in a section of their own."""
    others = _foreign_text(state)
    block = nccl_conf(settings, BEGIN.removeprefix("# ")) + f"{END}\n" if settings else ""
    actual = state.files[NCCL]
    return ManagedFile(
        path=NCCL,
        content=(completed(others) if block else others) + block or None,
        phase="after",
        expect_sha256=actual.sha256 if actual.kind == "file" else None,
    )


def _packages(state: NodeState, settings: MlEnvironmentSettings, notes: list[str]) -> Transaction | None:
    malloc = settings.malloc
    if malloc == "none":
        return None
    if state.manager == "dnf":
        notes.append(
            f"ml_environment_malloc: {malloc}: install its library by hand: the role knows only the apt package"
        )
        return None
    return ROLE.transaction(state, settings, (MALLOC_PACKAGES[malloc],))
