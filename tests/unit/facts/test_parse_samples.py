"""Samples that we wrote in each tool's format: samples/expected.yml has their answers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from expected import changed, wrong

from gpunode.facts.parsers.kinds import KINDS, decoded, parsed

HERE = Path(__file__).resolve().parent
SAMPLES = {path.stem: path for path in sorted((HERE / "samples").glob("*.txt"))}
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "samples" / "expected.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_value_is_read_and_another_is_noticed(name: str) -> None:
    answer = parsed(name.partition(".")[0], decoded(SAMPLES[name].read_bytes()))
    assert EXPECTED[name]
    assert wrong(answer, EXPECTED[name]) == []
    for path, value in EXPECTED[name].items():
        assert len(wrong(answer, {path: changed(value)})) == 1, path


def test_each_kind_has_three_samples_and_each_sample_is_judged() -> None:
    count = Counter(name.partition(".")[0] for name in SAMPLES)
    assert {kind: count[kind] for kind in KINDS if count[kind] < 3} == {}
    assert set(count) == set(KINDS)
    tests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_parse_*.py"))
    assert [name for name in SAMPLES if name not in EXPECTED and name not in tests] == []
    assert set(EXPECTED) <= set(SAMPLES)
