"""Records of workloads as facts, and what their values mean."""

from typing import Any

import pytest
from facts_samples import LIMITS_RECORD as LIMITS
from pydantic import ValidationError

from gpunode.facts import NodeFacts, facts_from_bundle
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
