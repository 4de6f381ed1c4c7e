"""Checks on Slurm's configuration of GPUs on this node."""

from collections.abc import Iterator, Mapping

from packaging.version import Version

from gpunode.checks.compare import Scale, at_most, failed, passed, skipped, warned
from gpunode.checks.machine import too_few
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.facts.node import NodeFacts
from gpunode.text import counted

MANUAL = "gres.conf(5), cgroup.conf(5)"
NO_SLURM = "Slurm is not configured here"
UPGRADES = "https://slurm.schedmd.com/upgrades.html (2026-11-28)"
OLDEST: Mapping[str, str] = {
    "23.02": "21.08",
    "23.11": "22.05",
    "24.05": "23.02",
    "24.11": "23.02",
    "25.05": "23.11",
    "25.11": "24.05",
}
"""Release of the controller, and the oldest one that it accepts messages of; of others only the order is known."""


def _daemon(node: NodeFacts) -> float | None:
    """Return when slurmd was started, in seconds from the boot; None if it does not run."""
    unit = next((unit for unit in node.units or () if unit.name == "slurmd.service"), None)
    return unit.started_s if unit is not None and unit.active == "active" else None


@registry.check(
    "slurm.gres",
    needs=("slurm", "pci", "units"),
    needs_gpu=True,
    means="Slurm gives out the GPUs that the node has: the number in slurm.conf is that on the bus, gres.conf names as "
    "many device files, and ConstrainDevices keeps jobs from the GPUs of others.",
    remedy="Set NodeName=HOST Gres=gpu:NUMBER in slurm.conf, Name=gpu File=/dev/nvidia[0-7] or AutoDetect=nvml in "
    "gres.conf, ConstrainDevices=yes in cgroup.conf (with TaskPlugin=task/cgroup); then scontrol reconfigure and "
    "systemctl restart slurmd.",
    state="drain",
    actions=("fix_configuration", "restart_service:slurmd.service"),
)
def gres(node: NodeFacts) -> Iterator[CheckResult]:
    slurm, gpus = node.slurm, len(node.gpus_on_bus or ())
    if slurm is None:
        raise Skip(NO_SLURM)
    if slurm.configured is None:
        if _daemon(node) is None:
            raise Skip("Slurm gives this node no GPU, and slurmd does not run")
        raise Undetermined(f"{slurm.folder}slurm.conf names no Gres=gpu of this node (in a file that it includes?)")
    of_gpus: Scale = {"unit": "GPUs", "source": MANUAL}
    if any(gpu.mig_mode for gpu in node.smi_gpus):
        yield skipped("MIG is on: the number of instances is not that of GPUs")
    elif slurm.configured > gpus and too_few(node) is not None:
        message = f"Slurm gives out {slurm.configured} GPUs, the bus has {gpus} (gpu.present reports the cause)"
        yield skipped(message)
    elif slurm.configured != gpus:
        message = f"slurm.conf gives this node {counted(slurm.configured, 'GPU')}, the bus has {gpus}"
        yield failed(message, expected=gpus, measured=slurm.configured, **of_gpus)
    elif slurm.autodetect is None and slurm.device_files not in (None, gpus):
        message = f"gres.conf names {counted(slurm.device_files or 0, 'device file')}, slurm.conf {slurm.configured}"
        yield failed(message, expected=gpus, measured=slurm.device_files, **of_gpus)
    else:
        yield passed(f"Slurm gives out {counted(gpus, 'GPU')}", expected=gpus, measured=gpus, **of_gpus)
    if not slurm.constrains_devices:
        message = "jobs can open the GPUs of others: ConstrainDevices is not set in cgroup.conf"
        yield warned(message, component="cgroup.conf", expected="yes", measured="no", source=MANUAL)


@registry.check(
    "slurm.devices",
    needs=("slurm", "units", "device_nodes"),
    needs_gpu=True,
    means="slurmd was started after the GPUs' device files exist: it looks for them once, at its start.",
    remedy="systemctl restart slurmd (running jobs go on); for every boot: systemctl edit slurmd, with [Unit] "
    "Wants=nvidia-persistenced.service After=nvidia-persistenced.service.",
    state="observe",
    actions=("restart_service:slurmd.service",),
)
def devices(node: NodeFacts) -> Iterator[CheckResult]:
    if node.slurm is None:
        raise Skip(NO_SLURM)
    started = _daemon(node)
    if started is None:
        raise Skip("slurmd does not run")
    gpus = [device for device in node.device_nodes or () if device.path.removeprefix("/dev/nvidia").isdigit()]
    times = [device.created_s for device in gpus if device.created_s is not None]
    if not times:
        raise Undetermined("the times of /dev/nvidia* are unknown")
    late = max(times) - started
    # The files' times have whole seconds.
    bad = f"slurmd was started {late:.0f} s before the newest of {counted(len(gpus), 'GPU device file')}"
    yield at_most(
        late,
        1,
        "slurmd was started after the GPUs' device files",
        bad,
        fault=Status.WARN,
        expected=None,
        measured=round(late, 1),
        unit="s",
        source="awslabs/awsome-distributed-ai issue 195",
    )


@registry.check(
    "slurm.version",
    needs=("slurm_versions",),
    means="slurmd has a release that its controller accepts: not a newer one, and none older than the two (from "
    "24.11 on three) before the controller's. With another one, the node cannot register.",
    remedy="Upgrade slurmdbd first, then slurmctld, then slurmd: slurm_node_version of the role slurm_node sets the "
    "version on the nodes.",
    state="drain",
    actions=("fix_configuration",),
)
def version(node: NodeFacts) -> Iterator[CheckResult]:
    slurm = node.slurm_versions
    if slurm is None:
        raise Skip("Slurm is not configured here, or slurmd is not installed")
    if slurm.controller is None:
        raise Skip("the controller was not asked for its version")
    daemon, controller = (".".join(text.split(".")[:2]) for text in (slurm.daemon, slurm.controller))
    oldest = OLDEST.get(controller)
    if Version(daemon) > Version(controller):
        judged, message = failed, f"slurmd {slurm.daemon} is newer than its controller, {slurm.controller}"
    elif oldest is not None and Version(daemon) < Version(oldest):
        message = f"slurmd {slurm.daemon} is too old: the controller, {slurm.controller}, accepts {oldest} and newer"
        judged = failed
    else:
        judged, message = passed, f"slurmd {slurm.daemon} fits its controller, {slurm.controller}"
    yield judged(message, expected=slurm.controller, measured=slurm.daemon, source=UPGRADES)
