"""How the GPUs of several nodes reach each other, as far as the node's own network cards tell."""

import re
from collections.abc import Iterator, Sequence

from gpunode.facts import NodeFacts
from gpunode.facts.node import IbDevice, IbPort, Nic
from gpunode.tuning.model import LeftAlone, Setting

_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A name that a list of NCCL, a shell and Docker take as one word."""
NCCL = "catalog (sources.yml, nccl_env)"


def nccl(node: NodeFacts, *, multi_node: bool) -> Iterator[Setting | LeftAlone]:
    """NCCL's variables of the kind that NVIDIA calls system configuration; none of those for debugging."""
    yield Setting(
        name="NCCL_DEBUG", value="WARN", reason="a failure says why; nothing is printed otherwise", source=NCCL
    )
    yield _hca(node)
    if multi_node:
        yield _interface(node)
    else:
        yield LeftAlone(
            name="NCCL_SOCKET_IFNAME", reason="names an interface of the host, and a container of one node has its own"
        )
    yield LeftAlone(
        name="NCCL_IB_DISABLE", reason="for debugging: without RDMA NCCL takes sockets by itself, with it 1 only slows"
    )
    yield LeftAlone(name="NCCL_P2P_LEVEL", reason="for debugging: NCCL reads the topology itself")
    yield LeftAlone(name="NCCL_IB_GID_INDEX", reason="found by NCCL itself since 2.21")


def active_ports(node: NodeFacts) -> list[tuple[IbDevice, IbPort]]:
    """Ports of RDMA devices that are up, in the order of the devices' names."""
    return [
        (device, port)
        for device in sorted(filter(_is_plain, node.infiniband or ()), key=lambda device: _natural(device.name))
        for port in device.ports
        if port.state == "ACTIVE"
    ]


def _is_plain(device: IbDevice) -> bool:
    return _PLAIN.fullmatch(device.name) is not None


def _natural(name: str) -> tuple[str, int]:
    """``mlx5_2`` before ``mlx5_10``."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _hca(node: NodeFacts) -> Setting | LeftAlone:
    name = "NCCL_IB_HCA"
    if node.infiniband is None:
        return LeftAlone(name=name, reason=f"RDMA devices were not seen: {node.gap('infiniband')}")
    active = active_ports(node)
    if not active:
        return LeftAlone(name=name, reason="no RDMA port is active")
    rates = [port.rate_gbit_per_s for _, port in active]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return LeftAlone(name=name, reason="an active port does not tell its rate: which ones to take is not known")
    chosen = [(device, port) for device, port in active if port.rate_gbit_per_s == max(known)]
    words = [f"{device.name}:{port.port}" for device, port in chosen]
    slower = len(active) - len(chosen)
    which = f"the {len(chosen)} active ports" if not slower else f"the {len(chosen)} fastest of {len(active)} ports"
    # Without "=" a name is a prefix: mlx5_1 would also be mlx5_10.
    return Setting(
        name=name, value="=" + ",".join(words), reason=f"{which} at {max(known):g} Gbit/s, named exactly", source=NCCL
    )


def _interface(node: NodeFacts) -> Setting | LeftAlone:
    name = "NCCL_SOCKET_IFNAME"
    if node.nics is None:
        return LeftAlone(name=name, reason=f"network interfaces were not seen: {node.gap('nics')}")
    over_rdma = {interface for _, port in active_ports(node) for interface in port.interfaces}
    up = [nic for nic in node.nics if nic.state == "up" and nic.name not in over_rdma and _PLAIN.fullmatch(nic.name)]
    if not up:
        return LeftAlone(name=name, reason="no interface of the host is up beside those of RDMA")
    chosen = _fastest(up)
    if len(chosen) > 1:
        names = ", ".join(nic.name for nic in chosen)
        return LeftAlone(name=name, reason=f"{names} are up alike: name the one over which the nodes reach each other")
    why = "the only interface of the host that is up" if len(up) == 1 else f"the fastest of {len(up)} that are up"
    return Setting(name=name, value=f"={chosen[0].name}", reason=f"{why}, named exactly", source=NCCL)


def _fastest(nics: Sequence[Nic]) -> list[Nic]:
    """Those with the highest speed; all where one of them does not tell."""
    speeds = [nic.speed_mbit_per_s for nic in nics if nic.speed_mbit_per_s is not None]
    if len(speeds) < len(nics):
        return list(nics)
    return [nic for nic in nics if nic.speed_mbit_per_s == max(speeds)]


def devices(node: NodeFacts, *, multi_node: bool) -> Iterator[Setting | LeftAlone]:
    """What a container is given of the network."""
    name = "--device /dev/infiniband"
    if node.infiniband is None:
        yield LeftAlone(name=name, reason=f"RDMA devices were not seen: {node.gap('infiniband')}")
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
            reason="the processes of several nodes reach each other by the host's own addresses",
            source=NCCL,
        )
    else:
        yield LeftAlone(name="--network host", reason="wanted for training over several nodes alone (--multi-node)")
