"""The role slurm_node: slurmd after the GPUs' devices, gres.conf from facts, and the programs that Slurm calls."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gpunode.facts.errors import ParseError
from gpunode.facts.slurm import gpus_of, of_node, types_of
from gpunode.frozen import Frozen
from gpunode.provisioning.base_settings import HOST, like
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.role import PackageSettings, Role, Texts, Value, option
from gpunode.provisioning.running_driver import gpus_in_use
from gpunode.provisioning.slurm_gres import Gres, gpu_lines
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.templates import mark_of
from gpunode.text import counted

FOLDER = "/etc/slurm"
CONF, GRES, CGROUP = (f"{FOLDER}/{name}.conf" for name in ("slurm", "gres", "cgroup"))
KEY = "/etc/munge/munge.key"
DROP_IN = "/etc/systemd/system/slurmd.service.d/gpunode.conf"
PROLOG, REBOOT = "/usr/local/sbin/gpunode-prolog", "/usr/local/sbin/gpunode-reboot"
PROLOG_SETTINGS = "/etc/default/gpunode-prolog"
NEEDRESTART = "/etc/needrestart/conf.d/gpunode-slurm.conf"
SLURMD, MUNGE = "slurmd.service", "munge.service"
PACKAGES = {"apt": ("slurmd", "slurm-client"), "dnf": ("slurm-slurmd", "slurm")}
"""Of Debian and Ubuntu; of EPEL and of SchedMD's own build (slurm.spec), which have the same names."""
HEAD = f"# {mark_of('slurm_node')}"
CGROUP_SETTINGS: dict[str, Value] = {"ConstrainCores": "yes", "ConstrainDevices": "yes", "ConstrainRAMSpace": "yes"}
"""``cgroup.conf(5)``; the version of the control groups is detected."""
KEY_BYTES = (32, 1024)
_VERSION = re.compile(r"keep|[0-9][\w.*:~+-]{0,60}")
_LINE = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f]*")


class SlurmNodeSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is changed. V(present): slurmd runs with this node's GPUs. V(absent): what the role deployed "
        "is removed.",
    )
    conf: str = option(
        "",
        "Text of C(slurm.conf), the same on all nodes, such as the result of the lookup V(file). Empty: the file that "
        "the node has.",
        no_log=False,
    )
    controllers: Annotated[tuple[str, ...], Field(max_length=8)] = option(
        (), "Controllers, HOST or HOST:PORT, from which slurmd fetches its configuration (configless). Empty: files."
    )
    gres: str = option("", "Text of C(gres.conf) in place of the one from facts, as for MIG.")
    cgroup: dict[str, Value] = option(
        {}, "Settings of C(cgroup.conf) that replace or extend the role's; V(null) leaves one out."
    )
    munge_key: str = option("", "Munge's key: base64, or a file on the controller. Empty: not changed.", no_log=True)
    version: str = option(
        "keep", "V(keep): the installed version, the newest on a bare node; or a shell pattern such as V(23.11.*)."
    )
    extra_packages: tuple[str, ...] = option((), "Packages to install beside slurmd, such as a site's plugins.")
    prolog: bool = option(
        True, "Deploy the programs for Prolog, HealthCheckProgram and RebootProgram; slurm.conf has to name them."
    )
    prolog_settings: dict[str, Value] = option(
        {}, "Settings of these programs, such as { GPUNODE_BUDGET: 5s, GPUNODE: /usr/local/lib/gpunode/gpunode.pyz }."
    )
    wait_s: Annotated[int, Field(ge=0, le=3600)] = option(
        120, "How long slurmd's start waits for the GPUs' device files, in seconds."
    )

    @field_validator("controllers")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for controller in value:
            host, _, port = controller.partition(":")
            if HOST.fullmatch(host) is None or (port and not port.isdigit()):
                raise ValueError(f"{controller!r} is not HOST or HOST:PORT")
        return value

    @field_validator("conf", "gres")
    @classmethod
    def _text(cls, value: str) -> str:
        if _LINE.fullmatch(value) is None:
            raise ValueError("not the text of a configuration file")
        return value if not value or value.endswith("\n") else f"{value}\n"

    @field_validator("cgroup", "prolog_settings")
    @classmethod
    def _names(cls, value: dict[str, Value]) -> dict[str, Value]:
        for name, text in value.items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,60}", name) or re.search(r"[\n'\"\\$`]", str(text)):
                raise ValueError(f"{name!r} is not a setting with one line of text")
        return value

    @field_validator("munge_key")
    @classmethod
    def _key(cls, value: str) -> str:
        if not value:
            return value
        try:
            data = Path(value).read_bytes() if value.startswith("/") else b64decode(value, validate=True)
        except (OSError, Base64Error):
            raise ValueError("neither base64 nor a file on the controller") from None
        if not KEY_BYTES[0] <= len(data) <= KEY_BYTES[1]:
            raise ValueError(f"a key of {len(data)} bytes; munge takes {KEY_BYTES[0]} to {KEY_BYTES[1]}")
        return b64encode(data).decode()

    @field_validator("version")
    @classmethod
    def _version(cls, value: str) -> str:
        return like(_VERSION, value, "version (examples: keep, 23.11.*)")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.controllers and (self.conf or self.gres or self.cgroup):
            raise ValueError(
                "slurm_node_controllers: a configless slurmd takes all files from its controller: set slurm.conf, "
                "gres.conf and cgroup.conf there"
            )
        return self


class SlurmNodeResult(Frozen):
    """What the role's own tasks read."""

    compares: bool = False
    """The version of slurmd is compared with the controller's."""


ROLE = Role(
    name="slurm_node",
    title="Run slurmd with the node's GPUs",
    about=(
        "Installs slurmd, writes gres.conf from the node's GPUs (device files, models, near cores, NVLinks) and "
        "cgroup.conf, so that jobs open only their own GPUs, and starts slurmd after the device files exist.",
        "Deploys the programs that validate the node before jobs and in health checks, and that reboot it.",
        "Removes what it deployed with O(slurm_node_state=absent). By default the node is not changed.",
    ),
    settings=SlurmNodeSettings,
    for_images=True,
    reads=("gpus", "topology"),
    result=SlurmNodeResult,
    files=(DROP_IN, PROLOG, REBOOT, PROLOG_SETTINGS, NEEDRESTART),
    folders=(DROP_IN.rpartition("/")[0],),
    packages=("slurmd", "slurm", "slurm-*", "libslurm*", "munge", "libmunge*"),
    more=Look(paths=(KEY,), contents=(CONF, GRES, CGROUP)),
)


@ROLE.present
def present(state: NodeState, settings: SlurmNodeSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    text = None if settings.controllers else settings.conf or state.contents.get(CONF)
    if text is None and not settings.controllers:
        reason = f"the node has no {CONF}: set slurm_node_conf, or slurm_node_controllers for a configless slurmd"
        return Manifest(role=ROLE.name, refusals=(f"slurm-conf: {reason}",))
    name = _name(state)
    rows = list[dict[str, str]]()
    try:
        rows = list(of_node(text or "", name))
    except ParseError as err:
        return Manifest(role=ROLE.name, refusals=(f"slurm-conf: {err}",))
    gres = _gres(state, settings, rows, known=text is not None)
    if gres.waits:
        # In check mode it may be the role nvidia_driver that comes first; after it, a reboot.
        note = f"slurmd waits for the driver: {gres.problem} until it is loaded; then run this again"
        return Manifest(role=ROLE.name, notes=(note,))
    refusals = [*_contradictions(state, rows, name, known=text is not None), *_counts(state, gres, context)]
    if gres.problem and not settings.controllers:
        refusals.append(f"gres: {gres.problem}")
    render = ROLE.texts(context)
    files = [*_configuration(state, settings, gres, render), *_files(settings, gres, render)]
    read = [file for file in files if file.path in (CONF, GRES, CGROUP, DROP_IN, KEY)]
    manager = state.package_manager
    return Manifest(
        role=ROLE.name,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(state, settings, _packages(settings, manager)),
        units=tuple(_units(state, read, context)),
        refusals=tuple(refusals),
        notes=(*gres.notes, *_notes(settings, rows, gres, name, text)),
        result=SlurmNodeResult(compares=not context.image),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with slurmd stopped first, and with the files of Slurm that the role wrote."""
    settings = ROLE.of(context)
    if gpus_in_use(state.facts) and not context.allow_busy:
        reason = "GPUs are in use: drain the node first (scontrol update nodename=NODE state=drain)"
        return Manifest(role=ROLE.name, refusals=(f"busy: {reason}",))
    paths = [path for path in (GRES, CGROUP) if (state.contents.get(path) or "").startswith(HEAD)]
    if settings.conf and state.contents.get(CONF) == settings.conf:
        paths.append(CONF)
    leaves = "munge" in {reason.partition(" ")[0] for reason in manifest.pending_reasons}
    gone = [ManagedFile(path=path, content=None, phase="after") for path in [*paths, *([KEY] if leaves else [])]]
    stopped = (
        ROLE.stopped(state, SLURMD)
        if any(reason.endswith("must be removed") for reason in manifest.pending_reasons)
        else ()
    )
    restarted = () if stopped or state.unit(SLURMD) is None else ROLE.restarted(state, SLURMD, *gone)
    return manifest.updated(files=(*manifest.files, *gone), units=(*stopped, *restarted), result=SlurmNodeResult())


def _name(state: NodeState) -> str:
    """Return the node's name for Slurm: the host name without its domain."""
    host = state.facts.own_name
    return host.name.partition(".")[0] if host is not None else ""


def _merged(rows: list[dict[str, str]]) -> dict[str, str]:
    """Return the settings of slurm.conf for this node; a later line takes precedence."""
    return {key: value for row in rows for key, value in row.items()}


def _gres(state: NodeState, settings: SlurmNodeSettings, rows: list[dict[str, str]], *, known: bool) -> Gres:
    """Return the lines of gres.conf."""
    if settings.gres:
        return Gres(tuple(settings.gres.rstrip("\n").split("\n")))
    row = _merged(rows)
    types = types_of(row["gres"]) if known and "gres" in row else None
    return gpu_lines(state.facts, types, cores=_describes(state, row) if known else True)


def _describes(state: NodeState, row: dict[str, str]) -> bool:
    """Return whether slurm.conf has the sockets and cores of this node: cores are counted by them."""
    cpu = state.facts.cpu
    if cpu is None or cpu.sockets is None or cpu.cores_per_socket is None:
        return False
    sockets = row.get("sockets") or row.get("socketsperboard") or row.get("sockets_per_board") or ""
    return (sockets, row.get("corespersocket")) == (str(cpu.sockets), str(cpu.cores_per_socket))


def _contradictions(state: NodeState, rows: list[dict[str, str]], name: str, *, known: bool) -> Iterator[str]:
    """Yield how slurm.conf contradicts this node."""
    if not known:
        return
    if not any(row.get("nodename", "DEFAULT").upper() != "DEFAULT" for row in rows):
        yield f"slurm-conf: {CONF} has no NodeName line for {name or 'this node'} (scontrol show hostnames LIST)"
        return
    configured = gpus_of(_merged(rows).get("gres", ""))
    on_bus = len(state.facts.gpus_on_bus or ())
    if configured != on_bus and not any(gpu.mig_mode for gpu in state.facts.smi_gpus):
        yield (
            f"slurm-conf: {CONF} gives {name} {counted(configured, 'GPU')}, the bus has {on_bus}: "
            f"set Gres=gpu:{on_bus} in its NodeName line"
        )


def _counts(state: NodeState, gres: Gres, context: Context) -> Iterator[str]:
    """Yield if the number of GPUs changes under jobs, which Slurm then aborts (``gres.conf(5)``, File)."""
    now = state.facts.slurm.device_files if state.facts.slurm is not None else None
    new = len(gres.lines)
    if now is not None and new and now != new and gpus_in_use(state.facts) and not context.allow_busy:
        yield f"busy: gres.conf changes from {now} to {new} GPUs, and Slurm would abort the jobs: drain the node first"


def _configuration(state: NodeState, settings: SlurmNodeSettings, gres: Gres, render: Texts) -> Iterator[ManagedFile]:
    """Yield the files of Slurm; a file of others is kept beside the role's."""
    if settings.controllers:
        return
    if settings.conf:
        first = not (state.contents.get(GRES) or "").startswith(HEAD)
        yield ManagedFile(path=CONF, content=settings.conf, phase="after", backup=first)
    rows = {**CGROUP_SETTINGS, **settings.cgroup}
    cgroup = {name: _word(value) for name, value in rows.items() if value is not None}
    texts = {GRES: render("gres.conf.j2", lines=gres.lines), CGROUP: render("cgroup.conf.j2", rows=cgroup)}
    for path, text in texts.items():
        marked = (state.contents.get(path) or HEAD).startswith(HEAD)
        yield ManagedFile(path=path, content=text, phase="after", backup=not marked)


def _word(value: Value) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _files(settings: SlurmNodeSettings, gres: Gres, render: Texts) -> Iterator[ManagedFile]:
    devices = re.findall(r"File=(/dev/nvidia\d+)(?!\S)", "\n".join(gres.lines))
    values = {"controllers": settings.controllers, "devices": devices, "wait_s": settings.wait_s}
    yield ManagedFile(path=DROP_IN, content=render("slurmd.conf.j2", **values), phase="after")
    content = render("needrestart.conf.j2", services=("slurmd", "munge"))
    yield ManagedFile(path=NEEDRESTART, content=content, phase="after")
    rows = {name: _word(value) for name, value in settings.prolog_settings.items() if value is not None}
    for path, program in (
        (PROLOG, ROLE.program("gpunode-prolog")),
        (REBOOT, ROLE.program("gpunode-reboot")),
    ):
        yield ManagedFile(path=path, content=program if settings.prolog else None, mode="0755", phase="after")
    prolog = render("gpunode-prolog.j2", rows=rows) if settings.prolog and rows else None
    yield ManagedFile(path=PROLOG_SETTINGS, content=prolog, phase="after")
    if settings.munge_key:
        yield ManagedFile(
            path=KEY,
            content=settings.munge_key,
            encoding="base64",
            mode="0400",
            owner="munge",
            group="munge",
            phase="after",
            private=True,
        )


def _packages(settings: SlurmNodeSettings, manager: str) -> list[str]:
    pattern = "" if settings.version == "keep" else f"={settings.version}"
    return [*(f"{name}{pattern}" for name in PACKAGES[manager]), "munge", *settings.extra_packages]


def _units(state: NodeState, read: list[ManagedFile], context: Context) -> Iterator[UnitState]:
    """Yield munge and slurmd; jobs go on while slurmd restarts (KillMode=process in its unit)."""
    installed = context.planned.installed(state.installed)
    if state.unit(MUNGE) is not None or "munge" in installed:
        key = [file for file in read if file.path == KEY]
        (unit,) = ROLE.restarted(state, MUNGE, *key) or (UnitState(name=MUNGE, state="started"),)
        yield unit.model_copy(update={"enabled": True})
    if state.unit(SLURMD) is not None or any(name in installed for names in PACKAGES.values() for name in names[:1]):
        (unit,) = ROLE.restarted(state, SLURMD, *read) or (UnitState(name=SLURMD, state="started"),)
        yield unit.model_copy(update={"enabled": True})


def _notes(
    settings: SlurmNodeSettings, rows: list[dict[str, str]], gres: Gres, name: str, text: str | None
) -> Iterator[str]:
    if text is None:
        if gres.lines:
            lines = "; ".join(f"NodeName={name} {line}" for line in gres.lines)
            yield f"gres.conf on the controller has to have: {lines}"
        elif gres.problem:
            yield f"gres.conf on the controller cannot be compared: {gres.problem}"
        return
    row = _merged(rows)
    if "task/cgroup" not in row.get("taskplugin", ""):
        yield f"{CONF}: TaskPlugin is not task/cgroup: jobs can open the GPUs of others"
    if "gpu" not in row.get("grestypes", "").split(","):
        yield f"{CONF}: GresTypes does not name gpu: Slurm gives out none"
    called = {"Prolog": PROLOG, "HealthCheckProgram": PROLOG, "RebootProgram": REBOOT}
    missing = [f"{key}={path}" for key, path in called.items() if row.get(key.lower()) != path]
    if settings.prolog and missing:
        yield f"{CONF} does not call the role's programs: {', '.join(missing)}"
