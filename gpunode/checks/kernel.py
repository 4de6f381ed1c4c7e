"""Checks on settings at boot: kernel settings, the command line, and the interfaces in NCCL's file."""

from collections.abc import Iterator

from gpunode.checks.compare import at_most, equals, skipped
from gpunode.checks.machine import is_container
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.facts.node import NodeFacts
from gpunode.facts.settings import EnvironmentSetting
from gpunode.text import listed

SYSCTL_D = "sysctl.d(5), tmpfiles.d(5)"
NCCL_FILE = "/etc/nccl.conf"
NCCL_SOURCE = "catalog (sources.yml, nccl_env)"
LISTS = {"NCCL_SOCKET_IFNAME": "interface", "NCCL_OOB_NET_IFNAME": "interface", "NCCL_IB_HCA": "HCA"}


@registry.check(
    "host.kernel-settings",
    needs=("boot_settings", "boot_arguments", "sysctl", "transparent_hugepages", "command_line", "virtualization"),
    means="What files set at the next boot is what the running kernel has: nothing was typed in that is lost with the "
    "next boot, and nothing waits for one.",
    remedy="sysctl --system and systemd-tmpfiles --create apply the files; a value that is to stay belongs in "
    "kernel_tuning_sysctl (role kernel_tuning).",
    state="observe",
    actions=("fix_configuration",),
)
def kernel_settings(node: NodeFacts) -> Iterator[CheckResult]:
    if is_container(node):
        raise Skip("in a container the kernel is the host's")
    last = {setting.name: setting for setting in node.boot_settings or ()}
    live = {**(node.sysctl or {}), "transparent_hugepage": node.transparent_hugepages}
    judged = False
    for name, setting in last.items():
        now = live.get(name)
        if now is None:
            continue
        judged = True
        good = f"{now}, as {setting.path} sets it at boot"
        bad = f"{now} now, and {setting.value} after the next boot ({setting.path})"
        yield equals(now, setting.value, good, bad, fault=Status.WARN, component=name, source=SYSCTL_D)
    if node.boot_arguments:
        judged = True
        booted = (node.command_line or "").split()
        missing = [word for word in node.boot_arguments if word not in booted]
        yield at_most(
            len(missing),
            0,
            f"the kernel was booted with {listed(list(node.boot_arguments))}",
            f"the kernel was booted without {listed(missing)}: a reboot is pending",
            fault=Status.WARN,
            component="command line",
            expected=" ".join(node.boot_arguments),
            measured=node.command_line,
        )
    if not judged:
        yield skipped("no file sets a relevant kernel setting")


@registry.check(
    "host.nccl-conf",
    needs=("environment", "nics", "addressed", "infiniband"),
    means="The interfaces and HCAs in /etc/nccl.conf exist: NCCL does not start if none of a list exists, and "
    "silently ignores missing ones.",
    remedy="gpunode env -v shows what the node has; role ml_environment writes it (ml_environment_nccl).",
    state="drain",
    actions=("fix_configuration",),
)
def nccl_conf(node: NodeFacts) -> Iterator[CheckResult]:
    settings = [setting for setting in node.environment or () if setting.path == NCCL_FILE]
    named = [setting for setting in settings if setting.name in LISTS and not setting.value.startswith("^")]
    if not named:
        yield skipped(f"{NCCL_FILE} lists no interface and no HCA")
    for setting in named:
        yield _names(setting, names_on(node, setting.name))


def names_on(node: NodeFacts, name: str) -> list[str]:
    """Return the interfaces or HCAs of a node that a list of NCCL can name."""
    if LISTS[name] == "HCA":
        return sorted(device.name for device in node.infiniband or ())
    return sorted({nic.name for nic in node.nics or ()} | set(node.addressed or ()))


def missing_names(value: str, existing: list[str]) -> list[str]:
    """Return the names in a list of NCCL that match nothing. Without ``=`` a name is a prefix; ports are ignored."""
    exact = value.startswith("=")
    words = [word.split(":")[0] for word in value.removeprefix("=").split(",")]
    return [word for word in words if not any(name == word if exact else name.startswith(word) for name in existing)]


def _names(setting: EnvironmentSetting, existing: list[str]) -> CheckResult:
    gone = missing_names(setting.value, existing)
    has = listed(existing) or "none"
    return at_most(
        len(gone),
        0,
        f"{setting.value}: all exist",
        f"{setting.value} in {setting.path}: the node has no {LISTS[setting.name]} {listed(gone)}, it has {has}",
        fault=Status.FAIL if len(gone) == len(setting.value.split(",")) else Status.WARN,
        component=setting.name,
        expected=setting.value,
        measured=has,
        source=NCCL_SOURCE,
    )
