"""Checks on the host's memory, disks, mounts, PCI Express, and processes that are stuck, killed or hung."""

from collections import Counter
from collections.abc import Iterator

from gpunode.checks.compare import at_least, at_most, failed, passed, skipped, undetermined, warned
from gpunode.checks.declared import declare
from gpunode.checks.links import gpus_of
from gpunode.checks.registry import CheckResult, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.checks.xids import logged, nothing_found, reach
from gpunode.facts.disks import Nvme, StoredMount
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

VFORK = ("kernel_clone", "_do_fork", "do_fork")
"""Where a process waits for a child that vfork made, in state D. It can be killed."""
DRIVER_NAMES = ("nvidia", "nv_", "nv-", "rm_", "uvm_", "os_acquire")
CORRECTED_MOST = Threshold(
    "host.memory-errors.corrected-most", 0, "errors", "More corrected errors since the boot warn.", source="our choice"
)
MEDIA_ERRORS_MOST = Threshold("host.nvme.media-errors-most", 0, "errors", "More warn.", source="our choice")
WORN = Threshold(
    "host.nvme.worn",
    100,
    "% used",
    "From here on a disk warns: its maker's estimate of its life is over.",
    source="NVMe specification, SMART log, Percentage Used",
    most=255,
)
SPARE_LEAST = Threshold(
    "host.nvme.spare-least", 10, "% left", "Fewer spare blocks warn.", source="our choice", most=100
)
PCIE_MOST = Threshold(
    "host.pcie-errors.most", 0, "lines", "More lines about corrected errors since the boot warn.", source="our choice"
)
MACHINE_CHECKS_MOST = Threshold(
    "host.machine-checks.most", 0, "lines", "More lines since the boot warn.", source="our choice"
)
KILLED_MOST = Threshold("host.killed-processes.most", 0, "processes", "More since the boot warn.", source="our choice")


ERRORS = "{uncorrected} uncorrected and {corrected:corrected error} since the boot"

declare(
    "host.memory-errors",
    fact="memory_controllers[].corrected",
    first=({"fact": "uncorrected", "comparison": "equals", "value": 0, "message": ERRORS},),
    comparison="at_most",
    limit=CORRECTED_MOST,
    status="warn",
    component="{name}",
    good=ERRORS,
    message=ERRORS,
    nothing="the kernel counts no memory errors here (no EDAC)",
    unknown="the kernel does not report its error counts",
    expected=0,
    unit="errors",
    means="The host's memory had no error since the boot: uncorrected ones destroy data, corrected ones announce them.",
    remedy="Find the module with ras-mc-ctl --errors and the firmware's log; replace it.",
    state="drain",
    actions=("replace_hardware",),
)


WITHOUT_HEALTH = {
    "no-program": "the program nvme is not installed, so its health is not read",
    "no-permission": "the node refused to read its health without root",
}


@registry.check(
    "host.nvme",
    needs=("nvmes",),
    means="NVMe disks are live, report no warning, and are not worn out.",
    remedy="nvme smart-log /dev/DISK shows its health; move the data and replace the disk.",
    state="drain",
    actions=("replace_hardware",),
    thresholds=(MEDIA_ERRORS_MOST, WORN, SPARE_LEAST),
)
def nvme(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.nvmes:
        yield skipped("the node has no NVMe disk")
    for disk in node.nvmes or ():
        yield _nvme(disk).at(disk.name)


def _nvme(disk: Nvme) -> CheckResult:
    if disk.state not in (None, "live"):
        return failed(f"its state is {disk.state}", expected="live", measured=disk.state)
    if disk.critical_warning is None:
        return _without_health(disk)
    if disk.critical_warning:
        message = f"it warns: {listed(_warnings(disk.critical_warning))}"
        return failed(message, expected=0, measured=disk.critical_warning)
    if (disk.media_errors or 0) > MEDIA_ERRORS_MOST.value:
        message = counted(disk.media_errors or 0, "media error")
        return warned(message, expected=MEDIA_ERRORS_MOST.value, measured=disk.media_errors, unit="errors")
    if (disk.percentage_used or 0) >= WORN.value:
        message = f"{disk.percentage_used} % of its life are used"
        return warned(message, expected=WORN.value, measured=disk.percentage_used, unit="%")
    if disk.available_spare_percent is not None and disk.available_spare_percent < SPARE_LEAST.value:
        message = f"{disk.available_spare_percent} % of its spare blocks remain"
        return warned(message, expected=SPARE_LEAST.value, measured=disk.available_spare_percent, unit="%")
    used = f", {disk.percentage_used} % of its life used" if disk.percentage_used is not None else ""
    return passed(f"healthy{used}", expected=0, measured=0)


def _without_health(disk: Nvme) -> CheckResult:
    """Return the result for a disk without health: skip if it is live and cannot be queried, error for other gaps."""
    if disk.state is not None and disk.health in WITHOUT_HEALTH:
        return skipped(f"{disk.state}; {WITHOUT_HEALTH[disk.health]}", measured=disk.state)
    unknown = "its health" if disk.state is not None else "its state and health"
    return undetermined(f"{unknown} could not be read", measured=disk.state)


def _warnings(bits: int) -> list[str]:
    """Return the bits of NVMe's critical warning as messages."""
    words = ("spare blocks low", "too hot or cold", "unreliable", "read-only", "backup of its memory failed", "other")
    return [word for bit, word in enumerate(words) if bits & 1 << bit] or [f"bits {bits:#x}"]


@registry.check(
    "host.stuck-processes",
    needs=("stuck_processes",),
    means="No process hangs in the kernel (state D), where it cannot be killed. One that hangs in NVIDIA's "
    "driver blocks its GPU until a reboot.",
    remedy="cat /proc/PID/stack as root shows where it hangs; for the GPU's driver, drain the node and restart it.",
    state="drain",
    actions=("restart_os",),
)
def stuck_processes(node: NodeFacts) -> Iterator[CheckResult]:
    stuck = [process for process in node.stuck_processes or () if process.waits_in not in VFORK]
    if not stuck:
        yield passed("no process hangs in the kernel", expected=0, measured=0, unit="processes")
        return
    in_driver = [
        process
        for process in stuck
        # Users choose the names of their processes: a name counts only if the function is unknown.
        if (process.waits_in or process.name).startswith(DRIVER_NAMES if process.waits_in else "nvidia")
    ]
    words = listed(
        [
            f"{process.name} ({process.pid}{', in ' + process.waits_in if process.waits_in else ''})"
            for process in (in_driver or stuck)
        ]
    )
    yield CheckResult(
        Status.FAIL if in_driver else Status.WARN,
        f"{counted(len(stuck), 'process hangs', 'processes hang')} in the kernel: {words}",
        expected=0,
        measured=len(stuck),
        unit="processes",
    )


@registry.check(
    "host.pcie-errors",
    needs=("kernel_log",),
    means="The kernel saw no error on PCI Express (AER) since the boot.",
    remedy="lspci -vv -s SLOT names the device; reseat it, check riser and cable.",
    state="drain",
    actions=("power_cycle", "replace_hardware"),
    category="pcie",
    thresholds=(PCIE_MOST,),
)
def pcie_errors(node: NodeFacts) -> Iterator[CheckResult]:
    events = logged(node, "aer")
    if not events:
        yield nothing_found(node, "error on PCI Express")
        return
    gpus = {device.slot: component for component, device in gpus_of(node)}
    places = Counter(event.pci_bus_id or "an unknown location" for event in events)
    fatal = any(event.fatal for event in events)
    words = listed([f"{gpus.get(slot, slot)}: {number}" for slot, number in places.most_common()])
    uncorrected = ", uncorrected ones among them" if fatal else ""
    yield CheckResult(
        Status.FAIL if fatal else Status.WARN if len(events) > PCIE_MOST.value else Status.PASS,
        f"{counted(len(events), 'line')} about errors {reach(node)}{uncorrected}: {words}",
        expected=PCIE_MOST.value,
        measured=len(events),
        unit="lines",
    )


@registry.check(
    "host.machine-checks",
    needs=("kernel_log",),
    means="The processors reported no hardware error (machine check) since the boot.",
    remedy="ras-mc-ctl --errors and the firmware's log name the part that fails.",
    state="observe",
    actions=("open_support_case",),
    thresholds=(MACHINE_CHECKS_MOST,),
)
def machine_checks(node: NodeFacts) -> Iterator[CheckResult]:
    events = logged(node, "mce")
    if not events:
        yield nothing_found(node, "machine check")
        return
    message = f"{counted(len(events), 'line')} {reach(node)}: {events[-1].message}"
    yield at_most(len(events), MACHINE_CHECKS_MOST.value, message, fault=Status.WARN, unit="lines")


@registry.check(
    "host.killed-processes",
    needs=("kernel_log",),
    means="No process was killed by the out-of-memory killer since the boot.",
    remedy="Set a memory limit for jobs, or add memory; journalctl -k -b shows the memory use of processes.",
    state="none",
    actions=("none",),
    thresholds=(KILLED_MOST,),
)
def killed_processes(node: NodeFacts) -> Iterator[CheckResult]:
    events = [event for event in logged(node, "oom") if event.process is not None or "Out of memory" in event.message]
    if not events:
        yield nothing_found(node, "process killed by the out-of-memory killer")
        return
    killed = Counter(event.process or "unknown" for event in events)
    message = f"killed {reach(node)}: {listed([f'{name} ({number}x)' for name, number in killed.most_common()])}"
    yield at_most(len(events), KILLED_MOST.value, message, fault=Status.WARN, unit="processes")


FREE_LEAST = Threshold("host.scratch.free-least", 5, "% free", "Less free space warns.", source="our choice", most=100)
NO_STORAGE = "the role storage set up nothing here"


@registry.check(
    "host.scratch",
    needs=("storage",),
    means="The scratch space of the role storage is mounted from its own disks, can be written to, and has room. "
    "Jobs that write to the folder below it fill the system's disk.",
    remedy="systemctl status of the mount unit shows why it is not mounted; role storage, tag storage_service.",
    state="drain",
    actions=("run_role:storage:storage_service", "fix_configuration"),
    category="host",
    thresholds=(FREE_LEAST,),
)
def scratch(node: NodeFacts) -> Iterator[CheckResult]:
    mounts = [mount for mount in node.storage or () if not mount.remote]
    if not mounts:
        yield skipped("the role storage set up no scratch space" if node.storage else NO_STORAGE)
    for mount in mounts:
        yield _scratch(mount).at(mount.path)


def _scratch(mount: StoredMount) -> CheckResult:
    lost = [option for option in mount.options if option not in mount.mounted_options]
    if mount.mounted_type is None:
        return failed("nothing is mounted", expected=mount.type, measured="nothing")
    if mount.mounted_type != mount.type or mount.same_device is False:
        message = f"{mount.mounted_type} of another device is mounted, not {mount.source}"
        return failed(message, expected=mount.type, measured=mount.mounted_type)
    if "rw" not in mount.mounted_options and "ro" not in mount.options:
        return failed("is mounted read-only: the kernel does that after errors", expected="rw")
    if mount.problem is not None:
        return failed(f"does not answer: {mount.problem}")
    if mount.same_device is None or not mount.size_mib or mount.free_mib is None:
        return undetermined("its device or its size is unknown")
    free = 100 * mount.free_mib // mount.size_mib
    if free >= FREE_LEAST.value and lost:
        return warned(
            f"is mounted without {listed(lost)}", expected=listed(lost), measured=listed(mount.mounted_options, 12)
        )
    good = f"{mount.mounted_type}, {free} % free"
    return at_least(free, FREE_LEAST.value, good, f"{free} % are free", fault=Status.WARN, unit="%")


@registry.check(
    "host.remote-data",
    needs=("storage",),
    means="Each remote file system of the role storage responds; reading it mounts it if necessary.",
    remedy="Check the server and the network; systemctl status and journalctl -u of the mount unit show its messages.",
    state="observe",
    actions=("fix_configuration",),
    category="host",
)
def remote_data(node: NodeFacts) -> Iterator[CheckResult]:
    mounts = [mount for mount in node.storage or () if mount.remote]
    if not mounts:
        yield skipped("the role storage mounts no remote data" if node.storage else NO_STORAGE)
    for mount in mounts:
        yield _remote(mount).at(mount.path)


def _remote(mount: StoredMount) -> CheckResult:
    if mount.problem is not None:
        return failed(f"{mount.source} does not answer: {mount.problem}")
    if mount.mounted_type is None:
        return failed(f"{mount.source} is not mounted", expected=mount.type, measured="nothing")
    if mount.size_mib is None:
        return undetermined("whether it answers is unknown")
    return passed(f"{mount.source} answers ({mount.mounted_type})", measured=mount.mounted_type)
