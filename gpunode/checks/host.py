"""Checks on settings and size of the host: clock, disks, memory, processors, limits, environment."""

from collections.abc import Iterator

from gpunode.checks.compare import Scale, failed, passed, skipped, warned
from gpunode.checks.declared import declare
from gpunode.checks.machine import is_container, is_guest
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.disks import FileSystem
from gpunode.facts.node import NodeFacts
from gpunode.facts.settings import EnvironmentSetting
from gpunode.text import counted, is_whole, listed
from gpunode.tuning.network import debugs

GUIDES = "training guides: node sizes"
FULL_SOURCE = "imbue cluster-health, health_checks.py"
OFFSET_MOST = Threshold("host.time.offset-most", 0.1, "s", "A clock that is further off warns.", source="our choice")
FULL = Threshold(
    "host.disk-space.full", 95, "% used", "A file system this full is a failure.", source=FULL_SOURCE, most=100
)
NEARLY_FULL = Threshold(
    "host.disk-space.nearly-full", 90, "% used", "A file system this full warns.", source=FULL_SOURCE, most=100
)
INODES_LEAST = Threshold(
    "host.disk-space.inodes-least", 5, "% free", "Fewer free inodes are a failure.", source="our choice", most=100
)
MEMORY_LEAST = Threshold(
    "host.memory-free.least", 5, "% available", "Less available memory warns.", source="our choice", most=100
)
FILES_LEAST = Threshold(
    "host.limits.files-least", 65536, "open files", "A lower limit warns.", source="our choice: data loaders open many"
)
CORES_PER_GPU = Threshold("host.sized-for-gpus.cores", 8, "cores per GPU", "Fewer are noted.", source=GUIDES)
MEMORY_OF_ONE = Threshold(
    "host.sized-for-gpus.memory-of-one", 32, "GiB", "Less is noted on a node with one GPU.", source=GUIDES
)
MEMORY_PER_GPU = Threshold(
    "host.sized-for-gpus.memory", 64, "GiB per GPU", "Less is noted on a node with several GPUs.", source=GUIDES
)
LOCAL_DISK = Threshold(
    "host.sized-for-gpus.disk",
    900,
    "GB per GPU",
    "Less is noted, for the first four GPUs: 1 TB as makers count, with room for what they round.",
    source=GUIDES,
)
MOST_WITH_DISK = 4
"""The guides name disks for up to this many GPUs."""
NETWORK = Threshold(
    "host.sized-for-gpus.network",
    25,
    "Gbit/s",
    "A slower fastest link is noted on a node with several GPUs.",
    source=GUIDES,
)
SIZE_TOLERANCE = Threshold(
    "host.sized-for-gpus.tolerance",
    0.9,
    "of the size",
    "A smaller difference is ignored: firmware and kernel reserve some of the memory.",
    source="our choice",
    most=1,
)
PERFORMANCE = ("performance",)
UNLIMITED = ("infinity", "unlimited", "-1", "18446744073709551615", "9223372036854775807")


@registry.check(
    "host.time",
    needs=("time_sync",),
    means="The clock is synchronized: certificates, logs and distributed jobs depend on it.",
    remedy="Install and start chrony, or systemctl enable --now systemd-timesyncd; chronyc tracking shows the state.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(OFFSET_MOST,),
)
def time(node: NodeFacts) -> Iterator[CheckResult]:
    sync = node.time_sync
    if is_container(node):
        raise Skip("in a container the clock is the host's")
    if sync is None or sync.synchronized is None:
        raise Undetermined("timedatectl does not report whether the clock is synchronised")
    by = f" by {sync.service}" if sync.service else ""
    if not sync.synchronized:
        yield failed(f"the clock is not synchronised{by}", expected=True, measured=False)
    elif sync.offset_s is not None and abs(sync.offset_s) > OFFSET_MOST.value:
        message = f"the clock is {abs(sync.offset_s):g} s off{by}"
        yield warned(message, expected=OFFSET_MOST.value, measured=sync.offset_s, unit="s")
    else:
        yield passed(f"the clock is synchronised{by}", expected=True, measured=True)


@registry.check(
    "host.disk-space",
    needs=("file_systems",),
    means="No local file system is full, of bytes or of inodes.",
    remedy="du -xh --max-depth=2 MOUNT finds what fills it; docker system df and journalctl --disk-usage are a start.",
    state="drain",
    actions=("fix_configuration",),
    thresholds=(FULL, NEARLY_FULL, INODES_LEAST),
)
def disk_space(node: NodeFacts) -> Iterator[CheckResult]:
    if not node.file_systems:
        inside = "a container without its own local file system" if is_container(node) else None
        yield CheckResult(Status.SKIP if inside else Status.ERROR, inside or "df lists no local file system")
    for file_system in node.file_systems or ():
        yield _space(file_system).at(file_system.mount)


def _space(file_system: FileSystem) -> CheckResult:
    size, free, inodes = file_system.size_mib, file_system.free_mib, file_system.inodes_free_percent
    used = round(100 * (1 - free / size)) if size else 100
    about: Scale = {"unit": "% used", "source": FULL_SOURCE}
    message = f"{used} % used, {free} MiB free"
    # File systems that are always full and read-only: squashfs, ISO images, firmware variables.
    if file_system.type in ("squashfs", "iso9660", "erofs", "efivarfs"):
        return passed(f"{file_system.type} is always full", expected=FULL.value, measured=used, **about)
    few_inodes = inodes is not None and inodes < INODES_LEAST.value
    if used < FULL.value and few_inodes:
        return failed(f"{inodes} % of its inodes are free", expected=INODES_LEAST.value, measured=inodes, **about)
    status = Status.FAIL if used >= FULL.value else Status.WARN if used >= NEARLY_FULL.value else Status.PASS
    return CheckResult(status, message, expected=FULL.value, measured=used, **about)


declare(
    "host.memory-free",
    fact="memory.available_mib",
    percent_of="total_mib",
    comparison="at_least",
    limit=MEMORY_LEAST,
    status="warn",
    good="{available_mib} of {total_mib} MiB are available",
    message="{available_mib} of {total_mib} MiB are available",
    unknown="/proc/meminfo does not report the available memory",
    unit="% available",
    means="The host has free memory for a job.",
    remedy="Run ps --sort=-rss aux to list the processes that use it; also check tmpfs (df -t tmpfs) and "
    "reserved huge pages.",
    state="observe",
    actions=("fix_configuration",),
)


@registry.check(
    "host.cpu-governor",
    needs=("cpu_frequency",),
    means="Processors run at full clock under load (governor or energy preference: performance), so that GPUs "
    "do not wait for them.",
    remedy="cpupower frequency-set -g performance, or tuned-adm profile accelerator-performance to keep it.",
    state="observe",
    actions=("fix_configuration",),
)
def cpu_governor(node: NodeFacts) -> Iterator[CheckResult]:
    frequency = node.cpu_frequency
    if frequency is None or not frequency.governors:
        raise Skip("the kernel does not choose the processors' clock here (firmware or hypervisor does)")
    slow = {name: number for name, number in frequency.governors.items() if name not in PERFORMANCE}
    preferences = {name: number for name, number in frequency.preferences.items() if name not in PERFORMANCE}
    words = listed([f"{name}: {number} processors" for name, number in frequency.governors.items()])
    # With intel_pstate and amd-pstate, governor powersave with preference performance is full clock as well.
    fast = not slow or (frequency.preferences and not preferences)
    hint = f", preference {listed(sorted(preferences))}" if preferences else ""
    yield (passed if fast else warned)(
        f"processors run for performance ({words})" if fast else f"processors save power: {words}{hint}",
        expected="performance",
        measured=listed(sorted(frequency.governors)),
    )


@registry.check(
    "host.limits",
    needs=("limits", "infiniband"),
    means="Processes may open enough files and, on nodes with RDMA, lock unlimited memory, which NCCL and MPI need.",
    remedy="Lines `* - memlock unlimited` and `* - nofile 1048576` in a file of /etc/security/limits.d, and "
    "DefaultLimitMEMLOCK=infinity in a drop-in of /etc/systemd/system.conf.d; then log in again (role kernel_tuning).",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(FILES_LEAST,),
)
def limits(node: NodeFacts) -> Iterator[CheckResult]:
    files = _limit(node, "nofile")
    if files is None:
        yield skipped("no limit of open files is set by systemd or limits.conf", component="nofile")
    else:
        enough = files in UNLIMITED or (is_whole(files) and int(files) >= FILES_LEAST.value)
        status = Status.PASS if enough else Status.WARN
        yield CheckResult(status, f"{files} open files", "nofile", expected=FILES_LEAST.value, measured=files)
    yield from _of_services(node)
    if not node.infiniband:
        return
    memory = _limit(node, "memlock", per_unit=1024)
    is_number = memory is not None and is_whole(memory)
    amount = f"{int(memory or 0) // 1024} KiB" if is_number else memory or "the default amount"
    yield (passed if memory in UNLIMITED else warned)(
        f"{amount} of memory may be locked",
        component="memlock",
        expected="unlimited",
        measured=memory,
        unit="bytes" if is_number else None,
    )


def _of_services(node: NodeFacts) -> Iterator[CheckResult]:
    """Yield results for services, which do not use PAM: a limit for logins does not apply to Docker, slurmd and their
    jobs."""
    limits = node.limits
    services = (limits.defaults or {}).get("memlock") if limits is not None else None
    if limits is None or services is None or _limit(node, "memlock") not in UNLIMITED:
        return
    lines = [line for line in limits.settings if line.item == "memlock" and line.domain == "*" and line.type != "soft"]
    if not lines:
        return
    bad = f"logins may lock memory without limit, services {services} bytes: DefaultLimitMEMLOCK is not set"
    yield (passed if services in UNLIMITED else warned)(
        "services may lock memory as logins may" if services in UNLIMITED else bad,
        component="memlock of services",
        expected="infinity",
        measured=services,
    )


def _limit(node: NodeFacts, item: str, per_unit: int = 1) -> str | None:
    """Return the hard limit for users by limits.conf, else systemd's default; the last line of a kind applies.

    Memory is in KiB in limits.conf and in bytes in systemd's settings: ``per_unit`` multiplies the former. Source:
    limits.conf(5), systemd.exec(5).
    """
    limits = node.limits
    if limits is None:
        return None
    lines = [
        limit.value
        for limit in limits.settings
        if limit.item == item and limit.domain == "*" and limit.type in ("hard", "-")
    ]
    if not lines:
        return (limits.defaults or {}).get(item)
    return str(int(lines[-1]) * per_unit) if is_whole(lines[-1]) else lines[-1]


DEBUGGING: dict[str, tuple[str, ...]] = {
    # Variables with the values that are harmless.
    "CUDA_LAUNCH_BLOCKING": ("0", ""),
    "CUDA_CACHE_DISABLE": ("0", ""),
    "CUDA_FORCE_PTX_JIT": ("0", ""),
    "CUDA_INJECTION64_PATH": ("",),
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": ("0", ""),
    "CUDA_VISIBLE_DEVICES": (),
    "LD_PRELOAD": ("",),
    "NCCL_DEBUG": ("", "VERSION", "WARN"),
    "NCCL_P2P_DISABLE": ("0", ""),
    "NCCL_SHM_DISABLE": ("0", ""),
    "NCCL_IB_DISABLE": ("0", ""),
    "NCCL_NVLS_ENABLE": ("1", "2", ""),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", ""),
    "TORCH_CUDA_SANITIZER": ("0", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", ""),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", ""),
    "TORCH_USE_CUDA_DSA": ("0", ""),
}


@registry.check(
    "host.environment",
    needs=("environment",),
    means="No debugging variable is set globally: CUDA_LAUNCH_BLOCKING and similar ones slow down every job, "
    "or hide GPUs.",
    remedy="Remove the line from the reported file; set the variable only in a debugging session.",
    state="observe",
    actions=("fix_configuration",),
)
def environment(node: NodeFacts) -> Iterator[CheckResult]:
    left = [setting for setting in node.environment or () if _slows(setting)]
    if left:
        words = listed([f"{setting.name}={setting.value} in {setting.path}" for setting in left])
        yield warned(words, expected=0, measured=len(left), unit="variables")
    else:
        yield passed("no debugging variable is set globally", expected=0, measured=0)


def _slows(setting: EnvironmentSetting) -> bool:
    harmless = DEBUGGING.get(setting.name)
    if harmless is None:
        # NVIDIA: variables outside its section "System configuration" are not to be kept in production.
        return bool(setting.value.strip()) and debugs(setting.name, setting.value)
    return setting.value.strip().upper() not in harmless


@registry.check(
    "host.sized-for-gpus",
    needs=("pci", "cpu", "memory", "disks", "nics", "infiniband", "virtualization"),
    needs_gpu=True,
    means="The host can feed its GPUs: cores, memory and fast local disk for each of them, and a fast network for "
    "several. A smaller host is only noted (-v shows it).",
    remedy="Nothing to repair: plan with fewer loader processes and smaller batches, or another machine.",
    state="none",
    actions=("none",),
    thresholds=(CORES_PER_GPU, MEMORY_OF_ONE, MEMORY_PER_GPU, LOCAL_DISK, NETWORK, SIZE_TOLERANCE),
)
def sized_for_gpus(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = len(node.gpus_on_bus or ())
    if node.cpu is None or node.memory is None:
        return
    cores = node.cpu.cpus // (node.cpu.threads_per_core or 1)
    gib = round(node.memory.total_mib / 1024)
    yield _enough("cores", cores, CORES_PER_GPU.value * gpus, "cores", f"{cores} cores for {counted(gpus, 'GPU')}")
    needed = MEMORY_PER_GPU.value * gpus if gpus > 1 else MEMORY_OF_ONE.value
    yield _enough("memory", gib, needed, "GiB", f"{gib} GiB for {counted(gpus, 'GPU')}")
    # The hardware of a guest's disks is known only to its host.
    kind = "disk" if is_guest(node) else "NVMe disk"
    fast = [disk for disk in node.disks or () if is_guest(node) or disk.name.startswith("nvme")]
    gigabytes = round(sum(disk.size_bytes for disk in fast if not disk.read_only) / 1e9)
    message = f"{gigabytes} GB on {counted(len(fast), kind)}"
    yield _enough("disk", gigabytes, LOCAL_DISK.value * min(gpus, MOST_WITH_DISK), "GB", message)
    if gpus > 1:
        yield _fastest_link(node)


def _fastest_link(node: NodeFacts) -> CheckResult:
    """Return the result for the fastest link; a virtual adapter mostly reports no speed."""
    rates = [nic.speed_mbit_per_s / 1000 for nic in node.nics or () if nic.speed_mbit_per_s]
    ports = [port for device in node.infiniband or () for port in device.ports if port.state == "ACTIVE"]
    rates += [port.rate_gbit_per_s for port in ports if port.rate_gbit_per_s]
    if not rates:
        return skipped("no link reports its speed", component="network")
    return _enough("network", max(rates), NETWORK.value, "Gbit/s", f"the fastest link has {max(rates):g} Gbit/s")


def _enough(component: str, has: float, expected: float, unit: str, message: str) -> CheckResult:
    status = Status.PASS if has >= SIZE_TOLERANCE.value * expected else Status.NOTE
    return CheckResult(status, message, component, expected=expected, measured=has, unit=unit, source=GUIDES)
