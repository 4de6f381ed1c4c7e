"""Checks on the host's state and services: kernel faults, failed units, read-only file systems, restarts."""

from collections import Counter
from collections.abc import Iterator

from gpunode.checks.compare import at_most, failed, faultless, passed, warned
from gpunode.checks.declared import declare
from gpunode.checks.machine import is_container
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry, why_unknown
from gpunode.checks.thresholds import Threshold
from gpunode.checks.xids import nothing_found, reach
from gpunode.facts.node import NodeFacts
from gpunode.facts.running import NO_SYSTEMD
from gpunode.text import counted, listed


@registry.check(
    "node.reachable",
    means="The node was reached and its data collected. An unreachable host has only this finding, as an error.",
    remedy="Try: ansible -m ping HOST",
    state="none",
    actions=("none",),
)
def reachable(node: NodeFacts) -> Iterator[CheckResult]:
    simulated = " on a simulated node" if node.simulated else ""
    yield passed(f"data collected at {node.collected_at}{simulated}")


declare(
    "node.units-failed",
    fact="units[active=failed].name",
    count=True,
    comparison="equals",
    value=0,
    good="no unit is failed",
    message="{measured:failed unit}: {items}",
    nothing=NO_SYSTEMD,
    unit="failed units",
    means="No systemd unit is in state failed.",
    remedy="systemctl status UNIT and journalctl -u UNIT show the cause; run systemctl reset-failed after "
    "repairing it.",
    state="observe",
    actions=("fix_configuration",),
)


declare(
    "node.reboot-pending",
    fact="reboot_required[]",
    count=True,
    comparison="equals",
    value=0,
    status="warn",
    good="no reboot is pending",
    message="a reboot is pending: {items}",
    means="No installed package waits for a reboot.",
    remedy="Reboot the node when it is idle: gpunode provision -i INVENTORY -l HOST -e gpunode_reboot=when_needed",
    state="observe",
    actions=("restart_os",),
)


MONITOR = "node-problem-detector, config/kernel-monitor.json"
FAULTS = {
    "lockup": (Status.FAIL, "a processor was locked up"),
    "oops": (Status.FAIL, "the kernel hit an error of its own (Oops)"),
    "file-system": (Status.FAIL, "a file system failed"),
    "module-rejected": (Status.FAIL, "a module was rejected: its key is not enrolled"),
    "hung-task": (Status.WARN, "a task was blocked for minutes"),
}
"""Kinds of kernel events. A task can be blocked by a slow server, and go on: node-problem-detector's temporary rule."""
RESTARTS_MOST = Threshold(
    "node.units-restarting.most",
    3,
    "restarts",
    "A running unit with more automatic restarts since it was last started warns.",
    source="our choice: systemd gives up after 5 restarts within 10 s by default; slower loops go on for ever",
)
KEPT_RUNNING = (
    "docker.service",
    "containerd.service",
    "slurmd.service",
    "kubelet.service",
    "k3s.service",
    "rke2-agent.service",
    "nvidia-fabricmanager.service",
    "nvidia-dcgm.service",
    "nvidia-imex.service",
    "nvidia-persistenced.service",
)
"""Services of which a restart ends jobs or makes GPUs unusable for a moment."""


@registry.check(
    "host.kernel-faults",
    needs=("kernel_log", "loaded_driver"),
    means="The kernel reported no lockup, no error of its own (Oops), no failed file system and no rejected module "
    "since the boot, and no task was blocked for minutes.",
    remedy="journalctl -k -b shows the lines around it; reboot the drained node (fsck checks its file systems then), "
    "and update kernel and firmware if it recurs.",
    state="drain",
    actions=("restart_os",),
)
def kernel_faults(node: NodeFacts) -> Iterator[CheckResult]:
    log = node.kernel_log
    if log is not None and is_container(node) and not log.simulated:
        raise Skip("in a container the kernel is the host's")
    faults = [event for event in log.events if event.kind in FAULTS] if log else []
    if not faults:
        yield nothing_found(node, "fault of the kernel")
    for kind, number in Counter(event.kind for event in faults).items():
        status, words = FAULTS[kind]
        # Another module than the GPU's driver: that one is loaded.
        status = Status.WARN if kind == "module-rejected" and node.loaded_driver is not None else status
        last = next(event.message for event in reversed(faults) if event.kind == kind)
        message = f"{words} ({counted(number, 'line')} {reach(node)}): {last}"
        yield CheckResult(status, message, kind, expected=0, measured=number, unit="lines", source=MONITOR)


@registry.check(
    "host.read-only",
    needs=("local_mounts",),
    means="No local file system became read-only: the kernel does that to protect one after an error.",
    remedy="journalctl -k -b | grep -iE 'read-only|I/O error|Shutting down' names the error. Drain the node, check the "
    "disk (smartctl -a, nvme smart-log) and reboot: fsck repairs the file system at boot.",
    state="drain",
    actions=("restart_os", "replace_hardware"),
)
def read_only(node: NodeFacts) -> Iterator[CheckResult]:
    mounts = node.local_mounts or ()
    stuck = [mount for mount in mounts if mount.read_only and mount.fstab_read_only is False]
    for mount in stuck:
        yield failed(
            f"{mount.source} ({mount.type}) is read-only, /etc/fstab requests rw",
            component=mount.path,
            expected="rw",
            measured="ro",
            source="node-problem-detector, config/plugin/check_ro_filesystem.sh",
        )
    if not stuck:
        yield passed(f"{counted(len(mounts), 'file system')} as /etc/fstab requests", expected="rw")


@registry.check(
    "host.nfs-soft",
    needs=("remote_mounts",),
    means="No writable NFS mount has the option soft or softerr: a server that is slow for a moment would fail a write "
    "of a job, and a file can then be damaged without a message.",
    remedy="Replace soft or softerr by hard in /etc/fstab or in the automounter's map, then umount MOUNT && mount "
    "MOUNT on the drained node; read-only data may stay soft.",
    state="observe",
    actions=("fix_configuration",),
)
def nfs_soft(node: NodeFacts) -> Iterator[CheckResult]:
    mounts = [mount for mount in node.remote_mounts or () if mount.type in ("nfs", "nfs4")]
    if not mounts:
        raise Skip("no NFS mount")
    for mount in mounts:
        soft = next((name for name in ("soft", "softerr") if name in mount.options and not mount.read_only), None)
        yield faultless(
            f"{mount.source} is {'read-only' if mount.read_only else 'hard'}",
            {f"{mount.source} ({mount.type}) is writable and {soft}": soft},
            fault=Status.WARN,
            component=mount.path,
            expected="hard",
            measured=soft,
            source="nfs(5), soft / softerr / hard",
        )


@registry.check(
    "host.name",
    needs=("own_name", "infiniband"),
    means="On a node with RDMA, its own name does not lead to a loopback address: Gloo and torchrun publish the "
    "address of the name, and other nodes then connect to themselves.",
    remedy="sed -i.bak 's/^127\\.0\\.1\\.1/#&/' /etc/hosts && getent ahostsv4 $(hostname) must then print the node's "
    "address (of nss-myhostname or DNS); with cloud-init also manage_etc_hosts: false. For one job: "
    "GLOO_SOCKET_IFNAME=INTERFACE.",
    state="observe",
    actions=("fix_configuration",),
)
def name(node: NodeFacts) -> Iterator[CheckResult]:
    host = node.own_name
    if host is None:
        return
    loopback = [address for address in host.addresses if address.startswith("127.") or address == "::1"]
    active = any(port.state == "ACTIVE" for device in node.infiniband or () for port in device.ports)
    alone = bool(loopback) and len(loopback) == len(host.addresses) and active
    message = f"{host.name} does not lead to a loopback address"
    if alone:
        message = f"{host.name} is {listed(loopback)} in /etc/hosts, and RDMA is active here"
    elif loopback:
        message = f"{host.name} is {listed(host.addresses)} in /etc/hosts; a single node is not affected"
    source = "sgl-project/sglang issue 3226"
    yield (warned if alone else passed)(message, measured=listed(host.addresses) or None, source=source)


@registry.check(
    "host.needrestart",
    needs=("needrestart",),
    means="needrestart does not restart services under jobs after an upgrade (Slurm, Kubernetes, engines, daemons of "
    "the GPUs).",
    remedy="Role updates lists them in /etc/needrestart/conf.d/gpunode.conf. For one by hand: echo "
    "'$nrconf{override_rc}{qr(^slurmd)} = 0;' > /etc/needrestart/conf.d/slurmd.conf",
    state="observe",
    actions=("run_role:updates",),
)
def needrestart(node: NodeFacts) -> Iterator[CheckResult]:
    if node.needrestart is None:
        raise Skip("needrestart is not installed")
    if node.needrestart.mode != "a":
        mode = {"i": "asks", "l": "lists"}.get(node.needrestart.mode or "", "has no mode set")
        yield passed(f"needrestart {mode}: it restarts no service by itself")
        return
    if gap := why_unknown(node, "units"):
        raise Undetermined(gap)
    if node.units is None:
        raise Skip(NO_SYSTEMD)
    active = {unit.name for unit in node.units if unit.active == "active"}
    services = [unit for unit in KEPT_RUNNING if unit in active]
    loose = [unit for unit in services if not any(_spares(pattern, unit) for pattern in node.needrestart.spared)]
    if loose:
        message = f"needrestart restarts {listed(loose)} after an upgrade of a library"
        source = "awslabs/awsome-distributed-ai issue 1165"
        yield warned(message, expected=0, measured=len(loose), unit="services", source=source)
    else:
        yield passed(f"needrestart spares {listed(services) or 'all services here'}", measured=0)


def _spares(pattern: str, service: str) -> bool:
    """Return True if one of needrestart's patterns has the service: Perl's, so only their literal text is used."""
    literal = pattern.strip().removeprefix("^").removesuffix("$").replace("\\.", ".")
    return bool(literal) and service.startswith(literal)


@registry.check(
    "node.units-restarting",
    needs=("units",),
    means="systemd did not restart a running unit again and again: such a unit crashes in a loop, and is active "
    "between crashes.",
    remedy="journalctl -u UNIT -b shows why it ends; systemctl restart UNIT sets the count to 0 after the repair.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(RESTARTS_MOST,),
)
def units_restarting(node: NodeFacts) -> Iterator[CheckResult]:
    if node.units is None:
        raise Skip(NO_SYSTEMD)
    running = [unit for unit in node.units if unit.active in {"active", "activating", "reloading"}]
    counts = {unit.name: unit.restarts or 0 for unit in running}
    often = {name: number for name, number in counts.items() if number > RESTARTS_MOST.value}
    most = max(counts.values(), default=0)
    words = listed([f"{name} ({number} times)" for name, number in sorted(often.items())])
    good = f"{counted(len(counts), 'unit')} running, none restarted again and again"
    bad = f"restarted by systemd: {words}"
    yield at_most(most, RESTARTS_MOST.value, good, bad, fault=Status.WARN, unit="restarts")


declare(
    "node.cloud-init",
    fact="cloud_init_running",
    comparison="equals",
    value=False,
    status="warn",
    good="cloud-init does not run",
    message="cloud-init still runs",
    means="cloud-init is done: until then it installs packages, holds their locks and may reboot the node.",
    remedy="cloud-init status --wait returns when it is done; cloud-init status --long shows an error.",
    state="observe",
    actions=("fix_configuration",),
)
