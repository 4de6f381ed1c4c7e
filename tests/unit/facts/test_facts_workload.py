"""Records of workloads as facts, and what their values mean."""

from typing import Any

import pytest
from facts_samples import LIMITS_RECORD as LIMITS
from pydantic import ValidationError

from gpunode.facts import facts_from_bundle
from gpunode.facts.models.workload import LimitValues, Record, values_of
from gpunode.probe.bundle import Bundle


def facts(results: list[Any]) -> Any:
    return facts_from_bundle(Bundle(host="h", collected_at="now", commands={}, files={}, results=results))


def test_records_are_read() -> None:
    node = facts([LIMITS])
    (record,) = node.records
    assert (record.record, record.device, record.container.engine) == ("versions.limits", "cpu", "docker 20.10.24")
    assert record.model_dump(by_alias=True, mode="json") == LIMITS
    values = values_of(record, LimitValues)
    assert isinstance(values, LimitValues)
    assert (values.shm_bytes, values.memlock_bytes, values.stack_bytes) == (67108864, -1, None)


def test_no_records_is_a_gap() -> None:
    node = facts([])
    assert node.records is None
    assert "no workload was run" in node.gaps["records"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "tpu"}, "device"),
        ({"seconds": -1}, "seconds"),
        ({"record": "Rubbish here"}, "record"),
        ({"schema": "gpunode.record/2"}, "schema"),
        ({"surprise": 1}, "surprise"),
        ({"error": "a", "skipped": "b"}, "both there"),
    ],
)
def test_a_record_that_is_none_is_a_gap_with_its_place(change: dict[str, Any], said: str) -> None:
    node = facts([LIMITS, LIMITS | change])
    assert node.records is None
    assert "result 1" in node.gaps["records"]
    assert said in node.gaps["records"]


def test_values_of_another_kind_are_told_and_do_not_raise() -> None:
    record = Record.model_validate(LIMITS | {"values": {"shm_bytes": "much"}})
    assert values_of(record, LimitValues) == (
        "record versions.limits: shm_bytes: Input should be a valid integer, unable to parse string as an integer"
    )


def test_a_record_is_closed_and_frozen() -> None:
    record = Record.model_validate(LIMITS)
    with pytest.raises(ValidationError):
        record.device = "cuda"  # type: ignore[misc]
