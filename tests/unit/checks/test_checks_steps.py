"""Causes of slow launches: what the node's own facts show."""

from typing import Any

import pytest

from gpunode.checks.performance_steps import causes_of_slow_launches
from gpunode.facts import NodeFacts
from gpunode.facts.host import CpuFrequency
from gpunode.facts.models.workload import Record
from gpunode.facts.pci import Iommu, PciDevice

ON_HOST = Record.model_validate(
    {"record": "steps.device", "schema": "gpunode.record/1", "device": "cuda", "seconds": 1, "values": {}}
)


def node(**facts: Any) -> NodeFacts:
    empty = {"host": "gpu-1", "collected_at": "2026-11-20T00:00:00Z", "simulated": False, "gaps": {}}
    return NodeFacts(**{**empty, **facts})


def governor(name: str) -> CpuFrequency:
    return CpuFrequency(driver="intel_pstate", governors={name: 8}, preferences={})


def idle(latencies: dict[int, int]) -> CpuFrequency:
    return CpuFrequency(driver=None, governors={}, preferences={}, idle_latencies=latencies)


def gpu(group: int) -> PciDevice:
    values: dict[str, Any] = dict.fromkeys(PciDevice.model_fields)
    values |= {"slot": "0000:01:00.0", "vendor_id": "10de", "device_id": "2330", "class_id": "030200"}
    return PciDevice.model_construct(**{**values, "iommu_group": group})


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, []),
        ({"cpu_frequency": governor("performance")}, []),
        ({"cpu_frequency": governor("powersave")}, ["powersave"]),
        ({"cpu_frequency": idle({2: 4, 133: 4})}, ["133 us to wake up"]),
        ({"cpu_frequency": idle({2: 8})}, []),
        ({"virtualization": "none"}, []),
        ({"virtualization": "kvm"}, ["guest of kvm"]),
        ({"pci": (gpu(3),), "iommu": Iommu(units=("dmar0",), group_types={3: "DMA-FQ"})}, ["DMA-FQ"]),
        ({"pci": (gpu(3),), "iommu": Iommu(units=("dmar0",), group_types={3: "identity", 4: "DMA"})}, []),
        ({"cpu_frequency": governor("schedutil"), "virtualization": "kvm"}, ["schedutil", "guest of kvm"]),
    ],
)
def test_a_cause_is_named_where_the_node_has_it(facts: dict[str, Any], words: list[str]) -> None:
    causes = causes_of_slow_launches(node(**facts), ON_HOST)
    assert len(causes) == len(words)
    assert [word for word, text in zip(words, causes, strict=True) if word not in text] == []
