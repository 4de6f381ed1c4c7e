"""Records of workloads and measurements as facts, and what their values mean; the examples obey the models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from facts_samples import LIMITS_RECORD as LIMITS
from pydantic import ValidationError

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.models import measured
from gpunode.facts.models.measured import MEASURED, VALUES, GemmValues, NcclValues
from gpunode.facts.models.workload import LimitValues, MalformedRecord, Record, values_of
from gpunode.probe.bundle import Bundle


def facts(results: list[Any]) -> Any:
    return facts_from_bundle(Bundle(host="h", collected_at="now", commands={}, files={}, results=results))


def test_records_are_read() -> None:
    node = facts([LIMITS])
    (record,) = node.records
    assert (record.record, record.device, record.container.engine) == ("defaults.limits", "cpu", "docker 20.10.24")
    assert record.model_dump(by_alias=True, mode="json") == LIMITS
    values = values_of(record, LimitValues)
    assert isinstance(values, LimitValues)
    assert (values.shm_bytes, values.memlock_bytes, values.stack_bytes) == (67108864, -1, None)


def test_no_records_is_a_gap() -> None:
    node = facts([])
    assert node.records is None
    assert "no workload was run" in node.gaps["records"]


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"device": "tpu"}, "device"),
        ({"seconds": -1}, "seconds"),
        ({"record": "Rubbish here"}, "record"),
        ({"schema": "gpunode.record/2"}, "schema"),
        ({"surprise": 1}, "surprise"),
        ({"error": "a", "skipped": "b"}, "only one of"),
        ({"error": "a", "undetermined": "b"}, "only one of"),
    ],
)
def test_a_result_that_is_no_record_takes_no_other_with_it_and_reports_its_place(
    change: dict[str, Any], reported: str
) -> None:
    node = facts([LIMITS | {"record": "versions.system"}, LIMITS | change])
    assert "records" not in node.gaps
    broken, *_, good = node.records
    assert good.model_dump(by_alias=True, mode="json") == LIMITS | {"record": "versions.system"}
    answer = values_of(broken, LimitValues)
    assert isinstance(answer, str)
    assert "result 1" in answer
    assert reported in answer
    assert len(answer.splitlines()) == 1


def test_a_malformed_record_keeps_its_name_component_and_container() -> None:
    (record,) = facts([LIMITS | {"component": "cuda:3", "seconds": None}]).records
    assert (record.record, record.component) == ("defaults.limits", "cuda:3")
    assert record.container.engine == "docker 20.10.24"
    assert "defaults.limits: seconds: " in record.malformed


@pytest.mark.parametrize("name", [None, 7, ["defaults.limits"], {}, "Rubbish here", "defaults.limits\n"])
def test_a_result_without_a_name_counts_against_the_run(name: object) -> None:
    run = LIMITS | {"record": "container"}
    broken, good = facts([run, LIMITS | {"record": name}]).records
    assert (broken.record, good.model_dump(by_alias=True, mode="json")) == ("container", run)
    assert "result 1" in values_of(broken, LimitValues)


def test_of_two_under_one_name_the_malformed_is_not_hidden() -> None:
    broken, _ = facts([LIMITS, LIMITS | {"device": "tpu"}]).records
    assert "device" in broken.malformed


def test_a_malformed_record_stays_malformed_in_a_document() -> None:
    node = facts([LIMITS, LIMITS | {"device": "tpu"}])
    again = NodeFacts.model_validate_json(node.model_dump_json())
    assert again.records == node.records
    assert [type(record) for record in again.records or ()] == [MalformedRecord, Record]


def test_values_of_another_kind_are_reported_and_do_not_raise() -> None:
    record = Record.model_validate(LIMITS | {"values": {"shm_bytes": "much"}})
    assert values_of(record, LimitValues) == (
        "record defaults.limits: shm_bytes: Input should be a valid integer, unable to parse string as an integer"
    )


def test_a_record_is_closed_and_frozen() -> None:
    record = Record.model_validate(LIMITS)
    with pytest.raises(ValidationError):
        record.device = "cuda"  # type: ignore[misc]


PAGE = Path(__file__).parents[3] / "docs" / "measurements.md"
LINES = (Path(__file__).parents[2] / "fixtures" / "measured.jsonl").read_text(encoding="utf-8").splitlines()
EXAMPLES: list[dict[str, Any]] = [json.loads(line) for line in LINES]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["record"])
def test_an_example_obeys_its_model_and_has_no_other_key(example: dict[str, Any]) -> None:
    record = Record.model_validate(example)
    values = values_of(record, VALUES[record.record])
    assert not isinstance(values, str), values
    unknown = set(record.values) - set(type(values).model_fields) - {"index", "name"}
    assert not unknown


def test_each_record_has_a_model_and_each_model_an_example() -> None:
    assert set(VALUES) == MEASURED
    shown = {VALUES[example["record"]] for example in EXAMPLES}
    assert shown == set(VALUES.values())


def test_all_records_are_in_the_table() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [re.findall(r"`([a-z0-9.-]+)`", row.split("|")[1]) for row in rows]
    named = {name if name[0] != "." else cell[0].partition(".")[0] + name for cell in cells for name in cell}
    assert {name for name in named if "." in name} == set(VALUES)


@pytest.mark.parametrize("change", [{"tflops": 0}, {"tflops": None}, {"compared": 0}, {"wrong": -1}])
def test_a_figure_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    good = next(example["values"] for example in EXAMPLES if example["record"] == "gemm.bf16")
    with pytest.raises(ValidationError):
        GemmValues.model_validate(good | change)


def test_a_failed_group_names_the_rank() -> None:
    failed = next(example for example in EXAMPLES if example.get("error"))
    assert NcclValues.model_validate(failed["values"]).missing == (2,)


def test_names_are_those_of_the_types() -> None:
    assert {f"gemm.{name}" for name in measured.GEMM_TYPES} < MEASURED
