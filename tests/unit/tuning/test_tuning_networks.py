"""NCCL's settings for a node's network: over made-up networks and the machines of the bench, nothing that it refuses.

NCCL's own reading of its lists is restated here from its documentation (env.rst) and socket.cc, ibvwrap and utils.cc of
2.27: a value is refused where no interface of the name has an address, and ignored where no active port matches.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_tuning_rules import environment, gpus, left, node

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.driver import LibraryFile
from gpunode.facts.models.smi import Smi, Topology
from gpunode.facts.network import Gid, IbDevice, IbPort, Nic
from gpunode.facts.parsers.kinds import parsed
from gpunode.probe.bundle import Bundle
from gpunode.tuning import WORKLOADS, tune, tune_node

sys.path += [str(Path(__file__).parents[2] / name) for name in ("bench", "contract")]
from bench_machines import MACHINES
from machines import bundle

GPUS = 8


@dataclass(frozen=True)
class Hca:
    """One RDMA device: how it is linked to the GPUs, and its port."""

    name: str
    link: str | None = "NODE"
    """To the GPU of its place; SYS to the others. None: it is missing in the topology."""
    state: str = "ACTIVE"
    rate: float | None = 400.0
    layer: str = "Ethernet"
    interface: str | None = None


@dataclass(frozen=True)
class Network:
    """A node's network, and the expected settings of NCCL for it; None: nothing."""

    nics: dict[str, tuple[str, int | None]]
    """Hardware alone: state, Mbit/s."""
    addressed: tuple[str, ...]
    interface: str | None
    hcas: tuple[Hca, ...] = ()
    hca: str | None = None


def rails(layer: str, **changes: Any) -> tuple[Hca, ...]:
    """Eight compute devices, each below its GPU's switch."""
    return tuple(Hca(f"mlx5_{index}", "PIX", layer=layer, **changes) for index in range(GPUS))


STORAGE = (Hca("mlx5_8", "NODE", rate=200.0), Hca("mlx5_9", "SYS", rate=400.0))
RAILS = "=" + ",".join(f"mlx5_{index}" for index in range(GPUS))
UP = ("up", 25000)
NETWORKS = {
    "one card": Network({"eth0": UP}, ("eth0", "docker0"), "=eth0"),
    "bond": Network({"eno1": UP, "eno2": UP}, ("bond0", "docker0"), "=bond0"),
    "bond and a management card": Network({"eno1": ("up", 1000), "ens1": UP, "ens2": UP}, ("bond0", "eno1"), None),
    "bridge": Network({"eno1": UP}, ("br0", "virbr0", "br-eb3b8d3c84ee"), "=br0"),
    "VLAN on a card without an address": Network({"ens1": UP}, ("ens1.120",), "=ens1.120"),
    "two cards, one faster": Network({"eno1": ("up", 1000), "ens1": UP}, ("eno1", "ens1"), "=ens1"),
    "two cards alike": Network({"ens1": UP, "ens2": UP}, ("ens1", "ens2"), None),
    "the card with the address is down": Network({"ens1": ("down", None)}, ("ens1", "tailscale0"), None),
    "InfiniBand rails, one down, and storage": Network(
        {"eno1": UP, "ib0": ("up", 400000)},
        ("eno1", "ib0"),
        "=eno1",
        (*rails("InfiniBand")[:7], Hca("mlx5_7", "PXB", "DOWN"), *STORAGE, Hca("mlx5_10", None, interface="ib0")),
        RAILS,
    ),
    "RoCE rails with storage on RoCE": Network({"eno1": UP}, ("eno1",), "=eno1", (*rails("Ethernet"), *STORAGE), RAILS),
    "RoCE rails alone": Network({"eno1": UP}, ("eno1",), "=eno1", rails("Ethernet")),
    "EFA": Network(
        {"ens32": UP}, ("ens32",), "=ens32", tuple(Hca(f"rdmap{at}s27", "PIX", layer="Unknown") for at in range(4))
    ),
    "EFA of a shape that has others too": Network(
        {"ens32": UP},
        ("ens32",),
        "=ens32",
        (*rails("InfiniBand"), Hca("rdmap16s27", "PIX", layer="Unknown"), *STORAGE),
        RAILS,
    ),
    "all rails down, storage up": Network({"eno1": UP}, ("eno1",), "=eno1", (*rails("x", state="DOWN"), *STORAGE)),
    "a guest with a topology without switches": Network(
        {"ens1": UP}, ("ens1",), "=ens1", (Hca("mlx5_0", "PHB"), Hca("mlx5_1", "PHB", rate=100.0))
    ),
    "a name that is not valid": Network(
        {"$(reboot)": UP}, ("$(reboot)", "a:1", "ens1,ens2"), None, (Hca("a b", "PIX"),)
    ),
    "no network at all": Network({}, (), None),
}


def facts(network: Network, **changes: Any) -> NodeFacts:
    """The node with this network and eight GPUs."""
    return node(
        pci=gpus(GPUS),
        nics=tuple(
            Nic(
                name=name, slot=None, driver=None, state=state, speed_mbit_per_s=speed, mtu=1500, numa_node=0,
                carrier_changes=1,
            )
            for name, (state, speed) in network.nics.items()
        ),
        addressed=network.addressed,
        infiniband=tuple(device(hca) for hca in network.hcas),
        topology=topology(network.hcas),
        **changes,
    )  # fmt: skip


def device(hca: Hca) -> IbDevice:
    port = IbPort(
        port=1, state=hca.state, physical_state="LinkUp", rate_gbit_per_s=hca.rate, rate=None, link_layer=hca.layer,
        lid=1, interfaces=(hca.interface,) if hca.interface else (),
    )  # fmt: skip
    return IbDevice(name=hca.name, firmware=None, board_id=None, type=None, slot=None, numa_node=0, ports=(port,))


def topology(hcas: tuple[Hca, ...]) -> Smi[Topology]:
    """As nvidia-smi prints a machine of eight GPUs (captures of 8 x H100), read by the parser."""
    shown = [hca for hca in hcas if hca.link]
    labels = [f"GPU{gpu}" for gpu in range(GPUS)] + [f"NIC{index}" for index in range(len(shown))]
    rows = ["\t".join(["", *labels, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for gpu in range(GPUS):
        peers = ["X" if other == gpu else "NV18" for other in range(GPUS)]
        nics = [(hca.link or "SYS") if index % GPUS == gpu else "SYS" for index, hca in enumerate(shown)]
        rows.append("\t".join([f"GPU{gpu}", *peers, *nics, "0-55,112-167", "0", "N/A"]))
    legend = [f"  NIC{index}: {hca.name}" for index, hca in enumerate(shown)]
    return Smi[Topology](
        document=parsed("nvidia-smi-topo", "\n".join([*rows, "", "Legend:", "", "NIC Legend:", "", *legend]))
    )


def refused(node: NodeFacts, values: dict[str, str]) -> list[str]:
    """The settings that NCCL would refuse on the node, or that would leave it without a device."""
    bad = []
    chosen = values.get("NCCL_SOCKET_IFNAME")
    if chosen is not None:
        names = chosen.removeprefix("=").split(",")
        has = set(node.addressed or ()) - {"lo"}
        bad += [chosen] if not chosen.startswith("=") or set(names) - has or max(map(len, names)) > 15 else []
    chosen = values.get("NCCL_IB_HCA")
    if chosen is not None:
        names = chosen.removeprefix("=").split(",")
        active = {hca.name for hca in node.infiniband or () if any(port.state == "ACTIVE" for port in hca.ports)}
        existing = {hca.name for hca in node.infiniband or ()}
        bad += [chosen] if len(names) > 32 or not set(names) & active or set(names) - existing else []
    return bad


@pytest.mark.parametrize("name", NETWORKS)
def test_what_nccl_gets_of_a_network(name: str) -> None:
    network = NETWORKS[name]
    values = environment(tune(facts(network), "pytorch", multi_node=True))
    assert (values.get("NCCL_SOCKET_IFNAME"), values.get("NCCL_IB_HCA")) == (network.interface, network.hca)
    assert refused(facts(network), values) == []
    assert "NCCL_SOCKET_IFNAME" not in environment(tune(facts(network), "pytorch"))


@pytest.mark.parametrize("name", MACHINES)
def test_no_machine_gets_what_nccl_refuses(name: str) -> None:
    node = facts_from_bundle(Bundle.model_validate(bundle(MACHINES[name])))
    for workload in WORKLOADS:
        values = environment(tune(node, workload, multi_node=True))
        assert refused(node, values) == [], workload
        assert values["NCCL_SOCKET_IFNAME"] == "=eth0", workload


def test_what_was_not_seen_is_left_to_nccl() -> None:
    network = NETWORKS["RoCE rails with storage on RoCE"]
    bare = facts(network).model_copy(update={"topology": None, "addressed": None, "gaps": {"addressed": "not read"}})
    tuning = tune(bare, "pytorch", multi_node=True)
    assert not {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"} & set(environment(tuning))
    assert "not read" in left(tuning, "NCCL_SOCKET_IFNAME")
    assert "topo -m could not be read" in left(tuning, "NCCL_IB_HCA")


def test_interfaces_that_were_not_seen_are_not_called_slow() -> None:
    bare = roce(None).model_copy(update={"nics": None, "gaps": {"nics": "not read"}})
    reported = {setting.name: setting.reason for setting in tune_node(bare, "training").left_alone}
    assert "not read" in reported["NCCL_SOCKET_NTHREADS"]


def test_more_devices_than_nccl_reads_are_left_to_it() -> None:
    many = tuple(Hca(f"mlx5_{index}", "PIX") for index in range(33))
    tuning = tune(facts(Network({}, (), None, (*many, Hca("mlx5_40", "SYS")))), "pytorch")
    assert "33 devices" in left(tuning, "NCCL_IB_HCA")


GIDS = (Gid(index=0, type="IB/RoCE v1", ipv4=False), Gid(index=1, type="RoCE v2", ipv4=False))


def roce(version: str | None, *tables: tuple[int, ...], layer: str = "Ethernet") -> NodeFacts:
    """A node with a port for each table of indices of RoCE v2 over IPv4, and a libnccl."""
    hcas = tuple(device(Hca(f"mlx5_{number}", layer=layer)) for number, _ in enumerate(tables))
    gids = [(*GIDS, *(Gid(index=index, type="RoCE v2", ipv4=True) for index in table)) for table in tables]
    adapters = tuple(
        hca.model_copy(update={"ports": (hca.ports[0].model_copy(update={"gids": table}),)})
        for hca, table in zip(hcas, gids, strict=True)
    )
    path = f"/usr/lib/x86_64-linux-gnu/libnccl.so.{version}"
    library = LibraryFile(name="libnccl", path=path, file=path, version=version, in_cache=True, used=True)
    return node(infiniband=adapters, libraries=(library,) if version else ())


@pytest.mark.parametrize(
    ("version", "tables", "value"),
    [
        ("2.18.3", ((3,), (3,)), "3"),
        ("2.20.5", ((3, 5), (5,)), "5"),
        ("2.21.5", ((3,), (3,)), None),
        (None, ((3,),), None),
        ("2.18.3", ((3,), (4,)), None),
        ("2.18.3", ((),), None),
    ],
)
def test_an_old_nccl_is_given_the_gid_that_a_new_one_finds(
    version: str | None, tables: tuple[tuple[int, ...], ...], value: str | None
) -> None:
    of_node = tune_node(roce(version, *tables), "training")
    assert {setting.name: setting.value for setting in of_node.nccl}.get("NCCL_IB_GID_INDEX") == value
    assert not [
        setting
        for setting in tune_node(roce(version, *tables, layer="InfiniBand"), "training").nccl
        if "GID" in setting.name
    ]
