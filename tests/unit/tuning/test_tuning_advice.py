"""Each advice has a number of this node or a source, and follows the measurement."""

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from effort import effort
from pydantic import ValidationError

from gpunode.cli import run
from gpunode.cli.reference import schema_of
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.bundle_reader import BundleReader
from gpunode.facts.settings import EnvironmentSetting
from gpunode.facts.workload import read_records
from gpunode.probe.bundle import Bundle
from gpunode.tuning.advice import STEPS, Advice, advise

sys.path.append(str(Path(__file__).parents[2] / "contract"))
from bundles import hgx_measured
from machines import T4_1, V100_2, bundle

Document = dict[str, Any]
HGX = hgx_measured()
FACTS = facts_from_bundle(Bundle.model_validate(HGX))


def reported(node: NodeFacts, title: str) -> Advice:
    return next(advice for advice in advise(node).advice if advice.title == title)


def with_results(results: list[Document]) -> NodeFacts:
    return FACTS.model_copy(
        update={"records": read_records(BundleReader(Bundle.model_validate({**HGX, "results": results})))}
    )


def changed(name: str, **fields: Any) -> NodeFacts:
    """Return the node with other fields in each record of a name."""
    assert any(record["record"] == name for record in HGX["results"])
    return with_results([{**record, **fields} if record["record"] == name else record for record in HGX["results"]])


def with_values(name: str, **values: Any) -> NodeFacts:
    (record, *_) = (record for record in HGX["results"] if record["record"] == name)
    return changed(name, values={**record["values"], **values})


@pytest.mark.parametrize(
    ("title", "numbers"),
    [
        ("loader workers", ["900 with 0, 3300 with 4, 3400 with 8 (/data; storage.dataloader)"]),
        ("storage", ["/data: read 6.1 GB/s"]),
        ("pinned memory", ["55 GB/s pinned, 11 pageable: 5 times"]),
        ("mixed precision", ["compute capability 9.0", "702 TFLOP/s in bf16, 52 in fp32: 14 times"]),
        ("TF32 for what stays in fp32", ["351 TFLOP/s in TF32: 6.8 times fp32"]),
        ("batch", ["GiB are free in a process with PyTorch", "90 % are"]),
        ("model", ["5.3 billion parameters"]),
        ("torch.compile", ["compiled in 11.2 s", "in 3.1 s with the cache"]),
        ("8-bit inference", ["1.3e+03 TOP/s in int8: 1.9 times bf16", "in fp8: 1.8 times bf16"]),
        ("data parallel", ["8 GPUs do 95 % of 8 single ones"]),
        ("time of an all-reduce", ["over 8 GPUs", "1 billion parameters 14.9 ms"]),
        ("variables", ["set for the whole system: NCCL_DEBUG=WARN", "not set: CUDA_DEVICE_ORDER=PCI_BUS_ID"]),
    ],
)
def test_the_numbers_are_those_of_the_node(title: str, numbers: list[str]) -> None:
    advice = reported(FACTS, title)
    assert advice.missing is None
    assert [part for part in numbers if part not in " ".join(advice.numbers)] == []


@pytest.mark.parametrize(
    ("title", "record"),
    [
        ("loader workers", "storage.dataloader"),
        ("storage", "storage.fio"),
        ("pinned memory", "copy.host"),
        ("mixed precision", "gemm.bf16"),
        ("mixed precision", "gemm.fp32"),
        ("TF32 for what stays in fp32", "gemm.tf32"),
        ("batch", "frameworks.memory"),
        ("torch.compile", "frameworks.compile"),
        ("data parallel", "ddp.replicated"),
    ],
)
@pytest.mark.parametrize(
    "state",
    [{"error": "it broke"}, {"skipped": "no time"}, {"undetermined": "busy"}, {"values": {}}, {"device": "other"}],
    ids=lambda state: next(iter(state)),
)
def test_a_result_that_is_none_gives_no_number(title: str, record: str, state: Document) -> None:
    """Neither what broke nor what ran on a processor is a figure of this node's GPUs."""
    if "device" in state:
        ran_on = next(row["device"] for row in HGX["results"] if row["record"] == record)
        state = {"device": "cpu" if ran_on == "cuda" else "cuda"}
    advice = reported(changed(record, **state), title)
    assert advice.missing is not None
    assert advice.missing.startswith("gpunode validate HOST")


def test_the_advice_follows_the_measurement() -> None:
    assert "num_workers=4," in reported(FACTS, "loader workers").advice
    assert "num_workers=2," in reported(with_values("storage.dataloader", advised_workers=2), "loader workers").advice
    many = reported(with_values("storage.dataloader", advised_workers=64), "loader workers")
    assert "num_workers=13," in many.advice
    assert "64 do not fit the 14 cores per GPU" in many.numbers[0]
    copies = next(record["values"]["copies"] for record in HGX["results"] if record["record"] == "copy.host")
    equal = [{**row, "bandwidth_gb_per_s": 11.0} for row in copies]
    assert "does not copy faster" in reported(with_values("copy.host", copies=equal), "pinned memory").advice
    slow = reported(with_values("ddp.replicated", step_seconds=0.1), "data parallel")
    assert "8 GPUs do 20 % of 8 single ones" in slow.numbers[0]


def test_old_gpus_get_float16_with_a_scaler() -> None:
    for machine in (T4_1, V100_2):
        advice = reported(facts_from_bundle(Bundle.model_validate(bundle(machine))), "mixed precision")
        assert "float16" in advice.advice
        assert "GradScaler" in advice.advice
    assert "bfloat16" in reported(FACTS, "mixed precision").advice


def test_a_variable_left_from_debugging_is_named() -> None:
    setting = EnvironmentSetting(path="/etc/environment", name="CUDA_LAUNCH_BLOCKING", value="1")
    node = FACTS.model_copy(update={"environment": (*(FACTS.environment or ()), setting)})
    assert reported(node, "left from debugging").numbers == ("CUDA_LAUNCH_BLOCKING=1",)


def test_an_advice_without_number_and_source_does_not_exist() -> None:
    with pytest.raises(ValidationError, match="a number or a source"):
        Advice(step="code", title="magic", advice="Add more of it")


def test_damaged_results_leave_each_advice_with_a_reason() -> None:
    """Values of any type and size at any place of the records: no crash, order kept, no advice without a reason."""
    seeded = random.Random(40)  # noqa: S311
    values: list[Any] = [None, -1, 0, 1e308, float("inf"), "x\n\x1b[2J", [], {}, True, 10**30]
    for _ in range(effort(60, 3000)):
        results = copy.deepcopy(HGX["results"])
        for record in seeded.sample(results, 12):
            key = seeded.choice(sorted(record["values"]) or ["x"])
            record["values"][key] = seeded.choice(values)
        node = advise(with_results(results))
        assert all(advice.numbers or advice.source for advice in node.advice)
        steps = [list(STEPS).index(advice.step) for advice in node.advice]
        assert steps == sorted(steps)
        assert "inf" not in " ".join(number for advice in node.advice for number in advice.numbers)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hgx.json"
    path.write_text(json.dumps(HGX))
    assert run(["advise", "--replay", str(path)]) == 0
    text = capsys.readouterr().out
    assert [title for title in STEPS.values() if title not in text] == []
    assert text.splitlines()[0] == "hgx-h100-8: 8x NVIDIA H100 80GB HBM3"
    assert run(["advise", "--replay", str(path), "--format", "json"]) == 0
    jsonschema.validate(
        json.loads(capsys.readouterr().out), json.loads(schema_of("advice")), cls=jsonschema.Draft202012Validator
    )
    plain = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-provisioned.json"
    assert run(["advise", "--replay", str(plain)]) == 3
    answer = capsys.readouterr()
    assert answer.out == ""
    assert answer.err == "deb12-1: no NVIDIA GPU on the PCI bus: no advice for it\n"
    assert run(["advise", "--replay", str(path), "-i", "x"]) == 2
