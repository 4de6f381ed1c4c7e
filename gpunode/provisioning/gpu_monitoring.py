"""The role gpu_monitoring: a timer that validates the node and writes metrics, node_exporter, and DCGM's exporter."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from gpunode.errors import UsageError
from gpunode.frozen import Frozen
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.role import PackageSettings, Role, option
from gpunode.provisioning.state import Look, NodeState

SERVICE, TIMER = "gpunode-verdict.service", "gpunode-verdict.timer"
SERVICE_FILE, TIMER_FILE = f"/etc/systemd/system/{SERVICE}", f"/etc/systemd/system/{TIMER}"
PROGRAM = "/usr/local/lib/gpunode/gpunode.pyz"
CACHE = "/var/cache/gpunode"
"""Where the program unpacks itself, a folder for each build."""
INSTALLED = "/usr/local/bin/gpunode"
DIRECTORY = "/var/lib/prometheus/node-exporter"
"""Read by Debian's and Ubuntu's node_exporter: file list of prometheus-node-exporter 1.5.0-1+b6 (2026-11-23)."""
EXPORTER, EXPORTER_UNIT = "prometheus-node-exporter", "prometheus-node-exporter.service"
DCGM_EXPORTER, DCGM_UNIT = "datacenter-gpu-manager-exporter", "nvidia-dcgm-exporter.service"
COUNTERS = "/etc/gpunode/dcgm-metrics.csv"
DROP_IN = f"/etc/systemd/system/{DCGM_UNIT}.d/gpunode.conf"
_PATH = re.compile(r"/[\w.+@/-]*", re.ASCII)
STARTUP_S = 60
"""Seconds beyond the budget until the service is stopped: the first run unpacks the program."""


class DcgmMetric(NamedTuple):
    """A field of DCGM that its exporter reads."""

    field: str
    type: Literal["gauge", "counter"]
    help: str
    reason: str


DCGM_METRICS = (
    DcgmMetric("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (%)", "GPUs that are allocated and idle"),
    DcgmMetric("DCGM_FI_DEV_FB_USED", "gauge", "Memory in use (MiB)", "jobs near the memory limit, left processes"),
    DcgmMetric("DCGM_FI_DEV_FB_FREE", "gauge", "Free memory (MiB)", "the memory limit itself, which MIG changes"),
    DcgmMetric("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock (MHz)", "a GPU that is slower than its siblings"),
    DcgmMetric(
        "DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (C)", "cooling that becomes worse before it throttles"
    ),
    DcgmMetric("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature (C)", "HBM throttles before the GPU does"),
    DcgmMetric("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (W)", "full use at idle power is a job that hangs"),
    DcgmMetric(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "counter",
        "Energy since boot (mJ)",
        "the cost of jobs, between samples too",
    ),
    DcgmMetric("DCGM_FI_DEV_XID_ERRORS", "gauge", "Last Xid", "a fault within seconds, before the next verdict"),
    DcgmMetric("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "PCIe retries", "a bad riser, cable or slot"),
    DcgmMetric(
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "counter",
        "NVLink traffic of all lanes",
        "collectives that do not use NVLink",
    ),
    DcgmMetric(
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows remapped after uncorrectable errors",
        "memory that wears out",
    ),
    DcgmMetric(
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows remapped after correctable errors",
        "the same, earlier",
    ),
    DcgmMetric("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "Whether a remapping failed", "the GPU has to be replaced"),
)
"""Fields of etc/default-counters.csv of github.com/NVIDIA/dcgm-exporter (read 2026-11-23), each with its reason."""


class GpuMonitoringSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): nothing is changed. V(present): the node validates itself on a timer. V(absent): what the role "
        "installed is removed.",
    )
    program: str = option(
        "",
        "File on the controller with gpunode as one program, built by gpunode zipapp for the node's Python; it is "
        f"copied to the node. Empty: C({INSTALLED}) of the node.",
    )
    python: str = option(
        "/usr/bin/python3", "Interpreter on the node for O(gpu_monitoring_program): Python 3.11 or later."
    )
    interval_s: int = option(300, "Seconds between two validations, 60 or more.")
    budget_s: int = option(30, "Seconds for one validation, 2 or more, and less than the interval.")
    policy: str = option("", "Policy file on the node. Empty: gpunode's own limits.")
    textfile_directory: str = option(
        DIRECTORY,
        "Directory of node_exporter's textfile collector; it must exist unless the role installs node_exporter.",
    )
    node_exporter: bool = option(
        True, "Install node_exporter from the archive of Debian or Ubuntu. On other systems the site provides it."
    )
    dcgm_exporter: bool = option(
        False, "Install DCGM's exporter from NVIDIA's repository (role dcgm), with a metric set of the role."
    )


class GpuMonitoringResult(Frozen):
    """What the role's own tasks do."""

    program: str = ""
    """File on the controller to be copied to the node; empty: none."""
    leaving: tuple[str, ...] = ()
    """Files and folders to be removed."""


ROLE = Role(
    name="gpu_monitoring",
    title="Validate the node on a timer, with metrics for Prometheus",
    about=(
        "A systemd timer validates the node within a budget and writes a file for node_exporter's textfile collector; "
        "a failed validation removes the file.",
        "Removes what it installed with O(gpu_monitoring_state=absent). By default the node is not changed.",
    ),
    settings=GpuMonitoringSettings,
    for_gpus=True,
    result=GpuMonitoringResult,
    files=(TIMER_FILE, SERVICE_FILE, PROGRAM, COUNTERS, DROP_IN),
    folders=(*(path.rpartition("/")[0] for path in (PROGRAM, COUNTERS, DROP_IN)),),
    packages=(EXPORTER, DCGM_EXPORTER),
    more=Look(paths=(INSTALLED, CACHE)),
)


@ROLE.present
def present(state: NodeState, settings: GpuMonitoringSettings, context: Context) -> Manifest:
    """Return the manifest of the role. Raises UsageError for invalid settings and an unreadable program."""
    _must_be_valid(settings)
    digest = _digest(settings.program)
    refusals = []
    if not settings.program and state.kind(INSTALLED) in ("absent", "unknown"):
        refusals.append(
            f"{INSTALLED} is missing: install gpunode there, or set gpu_monitoring_program to a file of gpunode zipapp"
        )
    actual = state.files.get(PROGRAM)
    copies = digest is not None and (actual is None or actual.sha256 != digest or actual.mode != "0755")
    names = _packages(state, settings)
    installed = context.planned.installed(state.installed)
    text, exports = ROLE.texts(context), settings.dcgm_exporter
    service = text(
        "validate.service.j2",
        program=f"{settings.python} -I {PROGRAM}" if settings.program else INSTALLED,
        policy=settings.policy,
        metrics=f"{settings.textfile_directory}/gpunode.prom",
        budget_s=settings.budget_s,
        startup_s=STARTUP_S,
        cache=CACHE,
    )
    counters = text("dcgm-metrics.csv.j2", metrics=DCGM_METRICS) if exports else None
    exporter = text("nvidia-dcgm-exporter.conf.j2", counters=COUNTERS) if exports else None
    files = [
        ManagedFile(path=SERVICE_FILE, content=service, phase="after"),
        ManagedFile(path=TIMER_FILE, content=text("validate.timer.j2", interval_s=settings.interval_s), phase="after"),
        *([] if settings.program else [ManagedFile(path=PROGRAM, content=None, phase="after")]),
        ManagedFile(path=COUNTERS, content=counters, phase="after"),
        ManagedFile(path=DROP_IN, content=exporter, phase="after"),
    ]
    restarted = ROLE.restarted(state, TIMER, files[1])
    units = [*(restarted or [UnitState(name=TIMER, state="started")])]
    units = [unit.model_copy(update={"enabled": True}) for unit in units]
    units += [UnitState(name=EXPORTER_UNIT, enabled=True, state="started") for name in names if name == EXPORTER
              and (state.unit(EXPORTER_UNIT) or name in installed)]  # fmt: skip
    if settings.dcgm_exporter and (state.unit(DCGM_UNIT) or DCGM_EXPORTER in installed):
        changed = ROLE.restarted(state, DCGM_UNIT, *files[-2:])
        units.append(UnitState(name=DCGM_UNIT, enabled=True, state=changed[0].state if changed else _runnable(state)))
    leaving = (CACHE,) if copies and state.kind(CACHE) not in ("absent", "unknown") else ()
    return Manifest(
        role=ROLE.name,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(state, settings, names),
        units=tuple(units),
        refusals=tuple(refusals),
        notes=tuple(_notes(state, settings)),
        pending_reasons=(f"{PROGRAM} is not {settings.program}",) if copies else (),
        result=GpuMonitoringResult(program=settings.program if copies else "", leaving=leaving),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with the timer stopped first, then the metrics and the unpacked program."""
    metrics = f"{ROLE.of(context).textfile_directory}/gpunode.prom"
    cached = [f"{CACHE} must be removed"] if state.kind(CACHE) not in ("absent", "unknown") else []
    return manifest.updated(
        units=(
            *ROLE.stopped(state, TIMER),
            # Started by its timer alone, a run of it may be under way.
            *(unit.model_copy(update={"enabled": None}) for unit in ROLE.stopped(state, SERVICE)),
        ),
        pending_reasons=(*manifest.pending_reasons, *cached),
        result=GpuMonitoringResult(leaving=(metrics, CACHE)),
    )


def _must_be_valid(settings: GpuMonitoringSettings) -> None:
    if settings.interval_s < 60:
        raise UsageError(f"gpu_monitoring_interval_s: {settings.interval_s} is less than 60")
    if not 2 <= settings.budget_s < settings.interval_s:
        raise UsageError(
            f"gpu_monitoring_budget_s: {settings.budget_s} is not between 2 and the interval of {settings.interval_s} s"
        )
    for name in ("python", "policy", "textfile_directory"):
        path = getattr(settings, name)
        if (path or name != "policy") and (not _PATH.fullmatch(path) or ".." in path.split("/")):
            raise UsageError(
                f'gpu_monitoring_{name}: "{path}" is not an absolute path of letters, digits and . _ + @ - /'
            )


def _digest(program: str) -> str | None:
    """Return the digest of the program on the controller. Raises UsageError."""
    if not program:
        return None
    if not program.startswith("/"):
        raise UsageError(f"gpu_monitoring_program: {program} is not an absolute path on the controller")
    try:
        return hashlib.sha256(Path(program).read_bytes()).hexdigest()
    except OSError as err:
        raise UsageError(
            f"gpu_monitoring_program: {program}: {err.strerror} (build it: gpunode zipapp {program})"
        ) from None


def _packages(state: NodeState, settings: GpuMonitoringSettings) -> list[str]:
    exporter = settings.node_exporter and state.manager == "apt"
    return [*([EXPORTER] if exporter else []), *([DCGM_EXPORTER] if settings.dcgm_exporter else [])]


def _runnable(state: NodeState) -> Literal["started"] | None:
    return "started" if state.facts.loaded_driver is not None and state.facts.gpus_on_bus else None


def _notes(state: NodeState, settings: GpuMonitoringSettings) -> Iterator[str]:
    if settings.node_exporter and state.manager != "apt":
        yield (
            "node_exporter is not installed on this system: provide one that reads "
            f"{settings.textfile_directory} (--collector.textfile.directory)"
        )
    elif settings.node_exporter and settings.textfile_directory != DIRECTORY:
        yield (
            f"gpu_monitoring_textfile_directory: the packaged node_exporter reads {DIRECTORY}: set its "
            "--collector.textfile.directory in /etc/default/prometheus-node-exporter"
        )
