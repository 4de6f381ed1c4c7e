"""Checks on measurements: what is never judged, and what a finding names."""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from captured import FOLDER, each

from gpunode.checks import Expectation, Finding, Status, registry
from gpunode.checks.performance_steps import causes_of_slow_launches
from gpunode.checks.performance_tools import of_diag
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.errors import ParseError
from gpunode.facts.host import CpuFrequency
from gpunode.facts.models.measured import MEASURED
from gpunode.facts.models.outputs import DcgmDiag
from gpunode.facts.models.workload import Record
from gpunode.facts.parsers.kinds import parsed
from gpunode.facts.pci import Iommu, PciDevice
from gpunode.probe.bundle import Bundle

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx, hgx_measured, pcie_measured

Document = dict[str, Any]
CHECKS = sorted(check.id for check in registry if check.id.startswith("performance."))
NOT_ON_GPU = ("performance.storage", "performance.dataloader", "performance.input")
ON_GPU = [name for name in CHECKS if name not in NOT_ON_GPU]
OVER_NCCL = ["performance.bad-links", "performance.collectives", "performance.training", "performance.transport"]


@lru_cache(maxsize=8)
def node_of(text: str) -> NodeFacts:
    """The node of a bundle; most documents are asked about by one check after another."""
    return facts_from_bundle(Bundle.from_json(text, "a test's bundle"))


def found(document: Document, check: str, expect: Expectation | None = None) -> list[Finding]:
    return registry[check].findings(node_of(json.dumps(document)), expect or Expectation())


def changed(change: Callable[[Document], None]) -> Document:
    """The measured node, with a change of each of its measured records."""
    document = deepcopy(hgx_measured())
    for record in document["results"]:
        if record["record"] in MEASURED:
            change(record)
    return document


def tenth(record: Document) -> None:
    """Figures that no GPU is well with."""
    text = json.dumps(record["values"])
    for key in ("bandwidth_gb_per_s", "tflops", "busbw_gb_per_s"):
        text = text.replace(f'"{key}": ', f'"{key}": 0.1, "was_{key}": ')
    record["values"] = json.loads(text)


def test_the_figures_of_the_tests_below_would_fail() -> None:
    statuses = {check: {finding.status for finding in found(changed(tenth), check)} for check in CHECKS}
    judged = ("host-copy", "device-copy", "peer-copy", "memory", "gemm", "collectives")
    assert all(statuses[f"performance.{name}"] & {Status.FAIL, Status.WARN} for name in judged)


@pytest.mark.parametrize("check", CHECKS)
def test_a_simulated_record_is_never_judged(check: str) -> None:
    def simulate(record: Document) -> None:
        tenth(record)
        record["simulated"] = True

    assert {finding.status for finding in found(changed(simulate), check)} == {Status.SKIP}
    node = changed(tenth) | {"simulated": True}
    assert {finding.status for finding in found(node, check)} == {Status.SKIP}


@pytest.mark.parametrize("check", ON_GPU)
def test_a_record_of_the_processor_is_never_judged(check: str) -> None:
    def on_processor(record: Document) -> None:
        tenth(record)
        record["device"] = "cpu"

    assert {finding.status for finding in found(changed(on_processor), check)} == {Status.SKIP}


@pytest.mark.parametrize("check", OVER_NCCL)
def test_gloo_is_never_judged_as_nccl(check: str) -> None:
    def over_gloo(record: Document) -> None:
        tenth(record)
        if "backend" in record["values"]:
            record["values"] |= {"backend": "gloo", "bad_ranks": [1]}

    assert {finding.status for finding in found(changed(over_gloo), check)} == {Status.SKIP}


@pytest.mark.parametrize("check", ["performance.gemm", "performance.host-copy", "performance.memory"])
def test_a_mig_device_is_not_held_to_the_figures_of_a_gpu(check: str) -> None:
    def divide(record: Document) -> None:
        tenth(record)
        if "uuid" in record["values"]:
            record["values"]["mig"] = 0

    assert {finding.status for finding in found(changed(divide), check)} == {Status.SKIP}


def test_nothing_measured_is_distinguished_from_a_payload_that_broke_off() -> None:
    for check in CHECKS:
        assert [(finding.status, finding.message) for finding in found(hgx(), check)] == [
            (Status.SKIP, "nothing was measured on this node")
        ]


def test_corruption_names_gpu_and_block() -> None:
    document = deepcopy(hgx_measured())
    (record,) = (
        record for record in document["results"] if (record["record"], record["component"]) == ("gemm.tf32", "cuda:5")
    )
    block = {"round": 7, "row": 256, "column": 384, "rows": 128, "columns": 64, "wrong": 1}
    record["values"] |= {"wrong": 1, "corrupted": [{**block, "first_row": 300, "first_column": 400}]}
    (bad,) = (finding for finding in found(document, "performance.gemm") if finding.status is Status.FAIL)
    assert (bad.component, bad.measured, bad.recommended_state) == ("gpu5", 1, "drain")
    for word in ("tf32", "product 7", "256 to 383", "384 to 447", "(300, 400)"):
        assert word in bad.message


def test_a_bad_link_is_named_by_its_gpus_and_a_bad_gpu_once() -> None:
    document = deepcopy(hgx_measured())
    (record,) = (record for record in document["results"] if record["record"] == "nccl.pairs")
    links = [{"ranks": pair, "verdict": "slow", "bandwidth_gb_per_s": 4.0} for pair in ([2, 5], [0, 7], [3, 4])]
    record["values"] |= {"bad": links, "cleared": 25}
    assert [finding.component for finding in found(document, "performance.bad-links")] == [
        "gpu2-gpu5",
        "gpu0-gpu7",
        "gpu3-gpu4",
    ]
    record["values"]["bad_ranks"] = [3]
    bad = [finding for finding in found(document, "performance.bad-links") if finding.status is Status.FAIL]
    assert [finding.component for finding in bad] == ["gpu3", "gpu2-gpu5", "gpu0-gpu7"]


def test_one_gpu_slower_than_its_siblings_is_found_without_any_mark() -> None:
    document = deepcopy(pcie_measured())
    for record in document["results"]:
        if record["record"] == "gemm.fp64" and record["component"] == "cuda:2":
            record["values"]["tflops"] *= 1 / 3
    assert {finding.status for finding in found(document, "performance.gemm")} == {Status.PASS, Status.SKIP}
    (slow,) = found(document, "performance.siblings")
    assert (slow.status, slow.component, slow.source) == (Status.FAIL, "gpu2", "the other GPUs of the node")


def test_a_gpu_is_compared_with_those_of_its_model_alone() -> None:
    """A node with two cards of another model, which are slower by nature."""
    document = deepcopy(pcie_measured())
    answer = document["commands"]["nvidia-smi-xml"]
    head, *gpus = answer["stdout"].split("<product_name>")
    small = [gpu.replace("NVIDIA L40S<", "NVIDIA L4<") if number > 1 else gpu for number, gpu in enumerate(gpus)]
    answer["stdout"] = "<product_name>".join([head, *small])
    for record in document["results"]:
        if record["record"] == "gemm.fp64" and record["component"] in ("cuda:2", "cuda:3"):
            record["values"]["tflops"] *= 1 / 3
    (alike,) = found(document, "performance.siblings")
    assert alike.status is Status.PASS
    for record in document["results"]:
        if record["record"] == "gemm.fp64" and record["component"] == "cuda:3":
            record["values"]["tflops"] /= 2
    (slow,) = found(document, "performance.siblings")
    assert (slow.status, slow.component) == (Status.FAIL, "gpu3")


@pytest.mark.parametrize(
    ("joined", "slow", "named"),
    [
        # Two pairs below a switch each: the other four cross the processors.
        ("PIX", {"0-2": 14.0, "0-3": 14.2, "1-2": 13.8, "1-3": 14.1}, []),
        ("NV12", {"0-2": 20.0, "0-3": 20.0, "1-2": 20.0, "1-3": 20.0}, []),
        # One of the four is much slower than its like; one alone is slow.
        ("NV12", {"0-2": 20.0, "0-3": 20.0, "1-2": 4.0, "1-3": 20.0}, ["gpu1-gpu2"]),
        ("PIX", {"1-3": 12.0}, ["gpu1-gpu3"]),
        # Both bridges are slower than PCIe; all links are of one kind.
        ("NV12", {"0-1": 4.0, "2-3": 4.0}, ["gpu0-gpu1", "gpu2-gpu3"]),
        ("SYS", {"0-1": 4.0}, ["gpu0-gpu1"]),
    ],
)
def test_links_are_compared_with_those_of_their_kind(joined: str, slow: dict[str, float], named: list[str]) -> None:
    document = deepcopy(pcie_measured())
    topology = document["commands"]["nvidia-smi-topo"]
    topology["stdout"] = topology["stdout"].replace("\tNODE", f"\t{joined}")
    (record,) = [record for record in document["results"] if record["record"] == "nccl.pairs"]
    bad = [
        {"ranks": [int(rank) for rank in pair.split("-")], "verdict": "slow", "bandwidth_gb_per_s": rate}
        for pair, rate in slow.items()
    ]
    record["values"] |= {"bad": bad, "cleared": 6 - len(bad), "slow_factor": 1.5}
    verdicts = found(document, "performance.bad-links")
    assert [verdict.component for verdict in verdicts if verdict.status is Status.FAIL] == named
    assert {verdict.status for verdict in verdicts} == ({Status.FAIL} if named else {Status.PASS})


def test_a_part_that_broke_is_one_failure() -> None:
    """Its clocks and transports are not failures of their own, with a remedy that does not help."""
    document = deepcopy(hgx_measured())
    for record in document["results"]:
        if record["record"] in ("gemm.bf16", "burn.gemm", "nccl.all-gather"):
            record |= {"error": "CUDA error: uncorrectable ECC error encountered", "values": {}}
    for check in ("gemm", "burn", "collectives"):
        assert Status.FAIL in {finding.status for finding in found(document, f"performance.{check}")}
    for check in ("clocks", "transport"):
        assert {finding.status for finding in found(document, f"performance.{check}")} == {Status.PASS, Status.SKIP}


def test_shared_memory_is_not_good_where_the_links_of_the_gpus_are_not_known() -> None:
    """Cards of a model that bridges can join, and a topology that was not seen."""
    document = deepcopy(pcie_measured())
    for record in document["results"]:
        if record["record"].startswith("nccl.") and "kinds" in record["values"]:
            record["values"] |= {"kinds": ["SHM"], "transports": {"SHM/direct/direct": 8}}
    before = {finding.status for finding in found(document, "performance.transport")}
    del document["commands"]["nvidia-smi-topo"]
    # L40S have no NVLink at all.
    assert before == {finding.status for finding in found(document, "performance.transport")} == {Status.PASS}
    for name, answer in document["commands"].items():
        if name.startswith("lspci"):
            answer["stdout"] = answer["stdout"].replace("10de:26b9", "10de:20b5")
    smi = document["commands"]["nvidia-smi-xml"]
    smi["stdout"] = smi["stdout"].replace("NVIDIA L40S<", "NVIDIA A100 80GB PCIe<").replace("26B910DE", "20B510DE")
    assert {finding.status for finding in found(document, "performance.transport")} == {Status.ERROR}


def test_the_links_of_the_node_decide_about_a_collective() -> None:
    """The same figures are good over PCIe, and a failure where NVSwitches join the GPUs."""
    slow = deepcopy(hgx_measured())
    pcie = {record["record"]: record for record in pcie_measured()["results"] if record["record"].startswith("nccl.")}
    for record in slow["results"]:
        if record["record"] == "nccl.all-gather":
            record["values"]["rows"] = pcie["nccl.all-gather"]["values"]["rows"]
    assert {finding.status for finding in found(pcie_measured(), "performance.collectives")} == {Status.PASS}
    (bad,) = (finding for finding in found(slow, "performance.collectives") if finding.status is not Status.PASS)
    assert (bad.status, bad.figure and bad.figure.metric) == (Status.FAIL, "all_gather_busbw")


@pytest.mark.parametrize(
    ("name", "expected"),
    each(
        [
            ("dcgm/aws-p4de-dcgmi-diag-r2-pass-v3.3.3.txt", {("node", Status.PASS)}),
            ("dcgm/deepops-dcgmi-diag-fail-table-doc-example.txt", {("node", Status.FAIL)}),
            ("dcgm/stas00-diag-fail-gpu0-thermal-excerpt.txt", {("gpu0", Status.FAIL)}),
            (
                "dcgm/stas00-diag-fail-row-remap-pending-excerpt.txt",
                "refused",
            ),  # cut, and without a Fail: an error, no pass
            ("dcgm/synthetic-dcgm-PER_GPU_JSON.json", None),
            ("dcgm/deepops-dcgmi-diag-r1-pass-truncated-old.txt", "refused"),
        ]
    ),
)
def test_the_verdict_on_a_recorded_diagnosis(name: str, expected: object) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    if expected == "refused":
        with pytest.raises(ParseError):
            parsed("dcgm-diag", text)
        return
    answer = DcgmDiag.model_validate(parsed("dcgm-diag", text))
    verdicts = {(verdict.component, verdict.status) for verdict in of_diag(answer)}
    print(answer.overall, verdicts)
    if expected is not None:
        assert verdicts == expected
    assert {status for _, status in verdicts} <= {Status.PASS, Status.SKIP} or answer.overall not in ("pass", "skip")


@pytest.mark.parametrize(
    ("layer", "kinds", "status"),
    [
        ("InfiniBand", ["IB", "P2P"], Status.PASS),
        ("InfiniBand", ["P2P", "other"], Status.FAIL),
        # NCCL's log names the plugin's network, AWS Libfabric or OFI: no kind of NCCL's own.
        ("Unknown", ["P2P", "other"], Status.PASS),
        ("Unknown", ["P2P", "socket"], Status.FAIL),
    ],
)
def test_between_nodes_efa_is_reached_by_libfabric(layer: str, kinds: list[str], status: Status) -> None:
    document = deepcopy(hgx_measured())
    layers = [path for path in document["files"] if path.endswith("/link_layer")]
    assert layers
    document["files"] |= dict.fromkeys(layers, f"{layer}\n")
    for record in document["results"]:
        if record["record"].startswith("nccl.") and "kinds" in record["values"]:
            record["values"] |= {"nodes": 2, "kinds": kinds, "transports": {}}
    assert {finding.status for finding in found(document, "performance.transport")} == {status}


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
