"""Over any node: threads fit its cores, names exist on it, and nothing of a job or for debugging is set node-wide."""

import json
import re
from typing import Any

from effort import effort
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpunode.checks.host import DEBUGGING
from gpunode.facts import NodeFacts
from gpunode.facts.host import Cpu, CpuFrequency, Machine, Memory, NumaNode
from gpunode.facts.models.smi import Smi, Topology
from gpunode.facts.network import IbDevice, IbPort, Nic
from gpunode.facts.pci import Iommu, PciDevice
from gpunode.tuning import PROFILES, WORKLOADS, Tuning, nccl_conf, node_shell, tune, tune_node
from gpunode.tuning.libraries import usable_cores
from gpunode.tuning.network import debugs

NAMES = st.one_of(
    st.sampled_from(["eth0", "ens1", "bond0", "ib0", "docker0", "lo", "br-eb3b8d3c84ee", "$(reboot)", "a,b", "a b"]),
    st.text(min_size=1, max_size=20),
)
SMALL = st.integers(0, 300)
JOB = re.compile(r"PYTORCH_|XLA_|LD_PRELOAD|CUDA_VISIBLE_DEVICES|MASTER_|RANK|WORLD_SIZE")
"""What belongs to one job: set for everybody, it would decide for the others."""


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), strategy)


GPU = {"vendor_id": "10de", "device_id": "2330", "subsystem_id": None, "class_id": "030200", "driver": "nvidia"}
PCI = st.integers(0, 20).map(
    lambda number: tuple(PciDevice(slot=f"0000:{bus:02x}:00.0", **GPU) for bus in range(number))
)
CPU = st.builds(
    Cpu,
    architecture=st.just("x86_64"),
    model_name=st.none(),
    cpus=SMALL,
    sockets=optional(st.integers(0, 8)),
    cores_per_socket=optional(st.integers(0, 128)),
    threads_per_core=optional(st.integers(0, 8)),
)
NIC = st.builds(
    Nic,
    name=NAMES,
    slot=st.none(),
    driver=st.none(),
    state=optional(st.sampled_from(["up", "down", "unknown"])),
    speed_mbit_per_s=optional(st.integers(0, 800_000)),
    mtu=st.none(),
    numa_node=st.none(),
    carrier_changes=st.none(),
)
HCA_NAMES = st.one_of(st.integers(0, 40).map("mlx5_{}".format), NAMES)
PORT = st.builds(
    IbPort,
    port=st.just(1),
    state=optional(st.sampled_from(["ACTIVE", "DOWN", "INIT"])),
    physical_state=st.none(),
    rate_gbit_per_s=optional(st.floats(0, 800)),
    rate=st.none(),
    link_layer=optional(st.sampled_from(["InfiniBand", "Ethernet"])),
    lid=st.none(),
    interfaces=st.lists(NAMES, max_size=2).map(tuple),
)
HCA = st.builds(
    IbDevice,
    name=HCA_NAMES,
    firmware=st.none(),
    board_id=st.none(),
    type=st.none(),
    slot=st.none(),
    numa_node=st.none(),
    ports=st.lists(PORT, max_size=2).map(tuple),
)
NUMA = st.integers(0, 8).map(
    lambda number: tuple(
        NumaNode(node=node, cpus="0", memory_total_mib=1, memory_free_mib=1, distances=(10,)) for node in range(number)
    )
)


@st.composite
def nodes(draw: st.DrawFn) -> NodeFacts:
    """A node of which anything may be missing."""
    hcas = draw(optional(st.lists(HCA, max_size=40).map(tuple)))
    pci = draw(optional(PCI))
    labels = [f"NIC{number}" for number, _ in enumerate(hcas or ())]
    links = {
        f"GPU{gpu}": {label: draw(st.sampled_from(["PIX", "PXB", "NODE", "SYS"])) for label in labels}
        for gpu in range(min(2, len(pci or ())))
    }
    document = {
        "gpus": sorted(links),
        "nics": labels,
        "nic_names": dict(zip(labels, [hca.name for hca in hcas or ()], strict=True)),
        "links": links,
    }
    facts = {
        "pci": pci,
        "cpu": draw(optional(CPU)),
        "cpus_allowed": draw(optional(SMALL)),
        "nics": draw(optional(st.lists(NIC, max_size=5).map(tuple))),
        "addressed": draw(optional(st.lists(NAMES, max_size=4).map(tuple))),
        "infiniband": hcas,
        "topology": draw(st.sampled_from([None, Smi[Topology](document=document)])),
        "numa": draw(optional(NUMA)),
        "virtualization": draw(optional(st.sampled_from(["none", "kvm", "docker"]))),
        "iommu": draw(optional(st.just(Iommu(units=("dmar0",), group_types={1: "DMA-FQ"})))),
        "machine": draw(
            optional(
                st.sampled_from(["Google", "Supermicro"]).map(
                    lambda vendor: Machine(vendor=vendor, product=None, board=None, bios_version=None, bios_date=None)
                )
            )
        ),
        "memory": draw(
            optional(
                st.integers(0, 1 << 22).map(
                    lambda mib: Memory(
                        total_mib=mib, available_mib=None, swap_total_mib=None, swap_free_mib=None,
                        hugepages_total=None, hugepages_free=None, hugepage_size_kib=None,
                    )
                )
            )
        ),
        "cpu_frequency": draw(
            optional(st.just(CpuFrequency(driver="intel_pstate", governors={"powersave": 8}, preferences={})))
        ),
    }  # fmt: skip
    return NodeFacts(host="n", collected_at="now", **facts)


def tunings(node: NodeFacts) -> list[Tuning]:
    return [
        tune(node, workload, profile=profile, multi_node=True, expandable=workload == "pytorch")
        for workload in WORKLOADS
        for profile in PROFILES
    ]


@settings(max_examples=effort(25, 100), deadline=None, suppress_health_check=list(HealthCheck))
@given(nodes(), st.integers(-1, 100_000))
def test_a_node_is_given_only_what_fits_it(node: NodeFacts, fleet: int) -> None:
    for tuning in tunings(node):
        values = {
            setting.name: setting.value
            for setting in (*tuning.environment, *tuning.node.environment, *tuning.node.nccl)
        }
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            if name in values:
                cores = usable_cores(node)
                assert cores is not None
                assert int(values[name]) * len(node.gpus_on_bus or ()) <= cores
        if "NCCL_SOCKET_IFNAME" in values:
            assert set(values["NCCL_SOCKET_IFNAME"].removeprefix("=").split(",")) <= set(node.addressed or ()) - {"lo"}
        if "NCCL_IB_HCA" in values:
            assert values["NCCL_IB_HCA"].startswith("=")
            named = set(values["NCCL_IB_HCA"].removeprefix("=").split(","))
            assert named <= {hca.name for hca in node.infiniband or ()}
        assert not [
            name
            for name, value in values.items()
            if debugs(name, value) or (name in DEBUGGING and name != "NCCL_DEBUG")
        ]
    for profile in PROFILES:
        of_node = tune_node(node, profile, shared=True, fleet=fleet)
        wide = [setting.name for setting in (*of_node.environment, *of_node.nccl)]
        assert not [name for name in wide if JOB.search(name)]
        assert len(set(wide)) == len(wide)
        for setting in (*of_node.environment, *of_node.nccl, *of_node.kernel):
            assert setting.reason
            assert setting.source
            assert setting.value
            assert "\n" not in setting.value + setting.name


@settings(max_examples=effort(20, 80), deadline=None, suppress_health_check=list(HealthCheck))
@given(nodes())
def test_files_hold_what_was_derived_and_nothing_else(node: NodeFacts) -> None:
    for profile in PROFILES:
        of_node = tune_node(node, profile, shared=True)
        text = nccl_conf(of_node.nccl, "managed by=x")
        assert [line.split("=", 1)[0] for line in text.splitlines() if "=" in line] == [
            setting.name for setting in of_node.nccl
        ]
        assert re.fullmatch(r"(#[^=\n]*\n)?([A-Z_]+=[^\s'\"]+\n)*", text)
        shell = node_shell(of_node.environment, "x")
        assert re.findall(r"(?m)^export (\w+)=", shell) == [setting.name for setting in of_node.environment]
        json.loads(of_node.model_dump_json())
