"""Network settings of GPUs on several nodes, derived from the node's own network cards; NCCL's kinds of variables."""

import re
from collections.abc import Iterator, Mapping, Sequence

from gpunode.facts import NodeFacts
from gpunode.facts.network import IbDevice, IbPort
from gpunode.tuning.model import LeftAlone, Setting

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A name that NCCL's lists, a shell and Docker treat as one word."""
NCCL = "catalog (sources.yml, nccl_env)"
FINDS_GID = (2, 21)
FAST_MBIT_PER_S = 100_000
"""The lowest speed of networks for which NCCL's documentation has special values."""
_ONE_SWITCH = frozenset({"PIX", "PXB"})
"""Cells of ``nvidia-smi topo -m``: the path crosses only PCIe bridges, not the processor's."""
_MOST_DEVICES = 32
"""MAX_IB_DEVS of NCCL: it does not read longer lists."""
_OF_CONTAINERS = re.compile(
    r"lo$|docker|br-[0-9a-f]{12}$|virbr|vnet|veth|cni|cali|flannel|cilium|lxc|lxd|incus|podman|nerdctl|kube|"
    r"tun|tap|wg|tailscale|zt"
)
"""Bridges and tunnels of container engines, hypervisors and VPNs: other nodes have the same addresses on them."""
NCCL_SYSTEM = frozenset(
    f"NCCL_{name}"
    for name in (
        *("SOCKET_IFNAME", "SOCKET_FAMILY", "SOCKET_MAGIC", "SOCKET_RETRY_CNT", "SOCKET_RETRY_SLEEP_MSEC"),
        *("SOCKET_POLL_TIMEOUT_MSEC", "SOCKET_NTHREADS", "NSOCKS_PERTHREAD", "CROSS_NIC"),
        *("IB_HCA", "IB_TIMEOUT", "IB_RETRY_CNT", "IB_GID_INDEX", "IB_ADDR_FAMILY", "IB_ADDR_RANGE"),
        *("IB_ROCE_VERSION_NUM", "IB_SL", "IB_TC", "IB_FIFO_TC", "IB_RETURN_ASYNC_EVENTS"),
        *("OOB_NET_ENABLE", "OOB_NET_IFNAME", "UID_STAGGER_THRESHOLD", "UID_STAGGER_RATE"),
        *("NET", "NET_PLUGIN", "TUNER_PLUGIN", "PROFILER_PLUGIN", "ENV_PLUGIN", "IGNORE_CPU_AFFINITY", "CONF_FILE"),
        *("COLLNET_ENABLE", "COLLNET_NODE_THRESHOLD", "CTA_POLICY", "NETDEVS_POLICY", "MULTI_RANK_GPU_ENABLE"),
        *("TOPO_FILE", "TOPO_DUMP_FILE", "SET_THREAD_NAME"),
        *("DEBUG_FILE", "DEBUG_SUBSYS", "DEBUG_TIMESTAMP_FORMAT", "DEBUG_TIMESTAMP_LEVELS"),
    )
)
"""Variables of NVIDIA's kind "description of a system". Those that are not in it count as debugging: they are not to be
kept in production.

Source: env.rst of NCCL 2.30.7 (sources.yml, nccl_env), section "System configuration", which also has those that set
where and how NCCL logs.
"""
NCCL_QUIET = ("VERSION", "WARN")
"""Values of NCCL_DEBUG that may stay: INFO floods every job's log."""


def nccl(node: NodeFacts, *, multi_node: bool) -> Iterator[Setting | LeftAlone]:
    """Yield NCCL's variables of the kind "system configuration", and none for debugging."""
    yield Setting(
        name="NCCL_DEBUG",
        value="WARN",
        reason="prints the cause of failures, and NCCL's version at start",
        source=NCCL,
    )
    yield _hca(node)
    if multi_node:
        yield _interface(node)
    else:
        yield LeftAlone(
            name="NCCL_SOCKET_IFNAME",
            reason="names an interface of the host, but a container on a single node has its own",
        )
    yield LeftAlone(
        name="NCCL_IB_DISABLE",
        reason="debugging only: without RDMA NCCL uses sockets automatically, with RDMA 1 only slows it down",
    )
    yield LeftAlone(name="NCCL_P2P_LEVEL", reason="debugging only: NCCL detects the topology itself")
    yield _gid_index(node)


def nccl_conf(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    """Yield the settings in ``/etc/nccl.conf`` for this node's fabric: InfiniBand, RoCE, or Ethernet only.

    Programs in containers do not read the host's file, so that it may name the host's interfaces.
    """
    yield _interface(node)
    yield _hca(node)
    yield _gid_index(node)
    yield from _sockets(node)


def _gid_index(node: NodeFacts) -> Setting | LeftAlone:
    """Return the GID index of RoCE v2 over IPv4 for NCCL before 2.21; later versions find it themselves."""
    name = "NCCL_IB_GID_INDEX"
    if node.infiniband is None:
        return LeftAlone(name=name, reason=f"RDMA devices could not be read: {node.gap('infiniband')}")
    ports = [port for _, port in active_ports(node) if port.link_layer == "Ethernet"]
    if not ports:
        return LeftAlone(name=name, reason="no RoCE port is active")
    nccls = [library for library in node.libraries or () if library.version and "libnccl" in library.path]
    old = sorted({library.version for library in nccls if library.version and _release(library.version) < FINDS_GID})
    if not old:
        return LeftAlone(name=name, reason="NCCL finds the GID of RoCE v2 by itself since 2.21")
    indices = [{gid.index for gid in port.gids if gid.type == "RoCE v2" and gid.ipv4} for port in ports]
    shared = set.intersection(*indices)
    if not shared:
        return LeftAlone(
            name=name,
            reason=f"libnccl {', '.join(old)} on the node does not find it, and the RoCE ports share no index for RoCE "
            "v2 over IPv4: see show_gids",
        )
    return Setting(
        name=name,
        value=str(min(shared)),
        reason=f"libnccl {', '.join(old)} on the node does not find it, as 2.21 does: RoCE v2 over IPv4 on every port",
        source=NCCL,
    )


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d{1,3})\.(\d{1,3})", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _sockets(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    """Yield threads and sockets of a fast Ethernet without RDMA, for which NCCL has no default of its own in the
    cloud."""
    names = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
    speed = max((nic.speed_mbit_per_s or 0 for nic in node.nics or () if nic.state == "up"), default=0)
    vendor = (node.machine.vendor if node.machine else None) or ""
    if node.infiniband is None or active_ports(node):
        reason = "RDMA transports the data" if node.infiniband else "RDMA devices could not be read"
    elif node.nics is None:
        reason = f"network interfaces could not be read: {node.gap('nics')}"
    elif speed < FAST_MBIT_PER_S:
        reason = "no interface reports 100 Gbit/s or more"
    elif vendor.startswith(("Amazon", "Google")):
        reason = f"NCCL has its own defaults for {vendor}"
    else:
        for name in names:
            yield Setting(
                name=name,
                value="4",
                reason=f"{speed // 1000} Gbit/s of Ethernet without RDMA: one socket of one thread does not fill it",
                source=NCCL,
            )
        return
    yield from (LeftAlone(name=name, reason=reason) for name in names)


def active_ports(node: NodeFacts) -> list[tuple[IbDevice, IbPort]]:
    """Return ports of RDMA devices that are up, in the order of the devices' names."""
    return [
        (device, port)
        for device in sorted(filter(_is_plain, node.infiniband or ()), key=lambda device: _natural(device.name))
        for port in device.ports
        if port.state == "ACTIVE"
    ]


def near_gpus(node: NodeFacts) -> set[str] | None:
    """Return the RDMA devices that share a PCIe switch with a GPU; None without ``nvidia-smi topo -m``."""
    document = node.topology.document if node.topology else None
    if not document:
        return None
    names = document.nic_names
    return {
        names.get(label, label)
        for gpu in document.gpus
        for label, link in document.links.get(gpu, {}).items()
        if label in document.nics and link in _ONE_SWITCH
    }


def _is_plain(device: IbDevice) -> bool:
    return _PLAIN.fullmatch(device.name) is not None


def _listed(devices: Sequence[str]) -> str:
    """Return the devices' names for a reason, which becomes a comment; invalid names are only counted."""
    plain = [name for name in devices if _PLAIN.fullmatch(name)]
    invalid = len(devices) - len(plain)
    return ", ".join([*plain, *([f"{invalid} with an invalid name"] if invalid else [])])


def _natural(name: str) -> tuple[str, int]:
    """Return a sort key with ``mlx5_2`` before ``mlx5_10``."""
    stem = name.rstrip("0123456789")
    # A node may send a name of any length; nine digits are more than it has devices.
    return stem, int(name[len(stem) :][:9] or 0)


def _hca(node: NodeFacts) -> Setting | LeftAlone:
    """Return devices by their location, never by their state: the value may be stored in a file.

    A port that was down at that time would be missing from it permanently, and NCCL itself skips such ports.
    """
    name = "NCCL_IB_HCA"
    if node.infiniband is None:
        return LeftAlone(name=name, reason=f"RDMA devices could not be read: {node.gap('infiniband')}")
    active = active_ports(node)
    if not active:
        return LeftAlone(name=name, reason="no RDMA port is active")
    if all(port.of_provider for _, port in active):
        reason = "EFA: NCCL reaches it through libfabric (aws-ofi-nccl), which selects its devices itself"
        return LeftAlone(name=name, reason=reason)
    near = near_gpus(node)
    if near is None:
        return LeftAlone(name=name, reason="nvidia-smi topo -m could not be read: NCCL uses every active port")
    rdma_devices = [device for device in node.infiniband if not any(port.of_provider for port in device.ports)]
    known = sorted((device.name for device in rdma_devices), key=_natural)
    chosen = [device for device in known if device in near]
    others = [device for device in known if device not in near]
    if not chosen or not others:
        which = "none shares" if not chosen else "all share"
        return LeftAlone(name=name, reason=f"{which} a PCIe switch with a GPU: NCCL uses every active port")
    if not any(device.name in chosen for device, _ in active):
        reason = f"no port of {_listed(chosen)} is active, and the others share no PCIe switch with a GPU"
        return LeftAlone(name=name, reason=reason)
    if len(chosen) > _MOST_DEVICES or not all(map(_PLAIN.fullmatch, chosen)):
        return LeftAlone(name=name, reason=f"{len(chosen)} devices near GPUs: more, or other names, than NCCL supports")
    # Without "=" a name is a prefix: mlx5_1 would also be mlx5_10. Without ":PORT" all ports are meant.
    return Setting(
        name=name,
        value="=" + ",".join(chosen),
        reason=f"{len(chosen)} of {len(known)} RDMA devices share a PCIe switch with a GPU, active or not; excluded: "
        f"{_listed(others)} (storage or management)",
        source=NCCL,
    )


def _interface(node: NodeFacts) -> Setting | LeftAlone:
    name = "NCCL_SOCKET_IFNAME"
    if node.nics is None:
        return LeftAlone(name=name, reason=f"network interfaces could not be read: {node.gap('nics')}")
    if node.addressed is None:
        return LeftAlone(name=name, reason=f"addresses of interfaces could not be read: {node.gap('addressed')}")
    over_rdma = {interface for _, port in active_ports(node) for interface in port.interfaces}
    down = {nic.name for nic in node.nics if nic.state != "up"}
    usable = [
        interface
        for interface in node.addressed
        if interface not in over_rdma | down and _PLAIN.fullmatch(interface) and not _OF_CONTAINERS.match(interface)
    ]
    if not usable:
        return LeftAlone(name=name, reason="no interface of the host is up with an IPv4 address beside those of RDMA")
    chosen = _fastest(usable, {nic.name: nic.speed_mbit_per_s for nic in node.nics})
    if len(chosen) > 1:
        names = ", ".join(chosen)
        return LeftAlone(name=name, reason=f"{names} have addresses: set the one that connects the nodes")
    why = "the only interface of the host" if len(usable) == 1 else f"the fastest of {len(usable)} interfaces"
    return Setting(name=name, value=f"={chosen[0]}", reason=f"{why} that is up with an address", source=NCCL)


def _fastest(names: Sequence[str], speeds: Mapping[str, int | None]) -> list[str]:
    """Return the names with the highest speed; all if the speed of one is unknown (a bond, a bridge, a VLAN)."""
    known = [speed for name in names if (speed := speeds.get(name)) is not None]
    if len(known) < len(names):
        return list(names)
    return [name for name in names if speeds[name] == max(known)]


def devices(node: NodeFacts, *, multi_node: bool) -> Iterator[Setting | LeftAlone]:
    """Yield the arguments for a container's network."""
    name = "--device /dev/infiniband"
    if node.infiniband is None:
        yield LeftAlone(name=name, reason=f"RDMA devices could not be read: {node.gap('infiniband')}")
    elif active_ports(node):
        number = len(node.infiniband)
        yield Setting(
            name="--device",
            value="/dev/infiniband",
            reason=f"{number} RDMA device{'s' if number > 1 else ''}, at least one port active: NCCL opens their verbs",
            source=NCCL,
        )
    else:
        yield LeftAlone(name=name, reason="no RDMA port is active")
    if multi_node:
        yield Setting(
            name="--network",
            value="host",
            reason="processes on several nodes connect through the host's addresses",
            source=NCCL,
        )
    else:
        yield LeftAlone(name="--network host", reason="needed by training over several nodes only (--multi-node)")


def debugs(name: str, value: str) -> bool:
    """Return whether a variable of NCCL is for debugging, so that it must not be set for all users."""
    if name == "NCCL_DEBUG":
        return value.strip().upper() not in NCCL_QUIET
    return name.startswith("NCCL_") and name not in NCCL_SYSTEM
