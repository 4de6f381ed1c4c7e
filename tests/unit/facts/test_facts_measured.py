"""The records of measurements: the examples obey the models, and each record has one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpunode.facts.models import measured
from gpunode.facts.models.measured import MEASURED, VALUES, GemmValues, NcclValues
from gpunode.facts.models.workload import Record, values_of

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
