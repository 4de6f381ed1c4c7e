"""What a bundle may hold at most, and that a refusal costs little: the answer of a node is nobody's promise."""

import json
import tracemalloc
from typing import Any

import pytest

from gpunode.errors import UsageError
from gpunode.probe import Bundle
from gpunode.probe import bundle as module

GOOD: dict[str, Any] = {"schema": module.SCHEMA, "host": "n", "collected_at": "t", "commands": {}, "files": {}}
COMMAND: dict[str, Any] = {"argv": [], "rc": 0, "stdout": "", "stderr": "", "seconds": 0.1}


def refusal(document: Any) -> str:
    """The one line."""
    text = document if isinstance(document, str | bytes) else json.dumps(document)
    with pytest.raises(UsageError) as refused:
        Bundle.from_json(text, "n.json")
    message = str(refused.value)
    assert message.startswith("n.json: not a gpunode.bundle/1 bundle: ")
    assert message.isprintable()
    assert len(message) <= 500
    return message


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"results": [{}] * (module.MAX_RESULTS + 1)}, "results: 5001 entries"),
        ({"results": [{"values": {"x": [0] * module.MAX_VALUES}}]}, "results.0: more than"),
        ({"results": [{str(n): 0 for n in range(65)}]}, "results.0: 65 entries"),
        ({"results": [1]}, "results.0"),
        ({"results": {}}, "results"),
        ({"commands": {str(n): COMMAND for n in range(module.MAX_COMMANDS + 1)}}, "commands: 2001 entries"),
        ({"commands": {"a": {**COMMAND, "argv": ["x"] * (module.MAX_WORDS + 1)}}}, "commands.a.argv: 50001 entries"),
        ({"commands": {"a": {**COMMAND, "argv": [1]}}}, "commands.a.argv"),
        ({"commands": {"a": {**COMMAND, **{str(n): 0 for n in range(40)}}}}, "commands.a: 45 entries"),
        ({"commands": {"a": {**COMMAND, "stdout": "x" * (module.MAX_TEXT + 1)}}}, "commands.a.stdout: longer than"),
        ({"commands": {"a": {**COMMAND, "rc": "x"}}}, "commands.a.rc"),
        ({"commands": []}, "commands"),
        ({"files": {str(n): None for n in range(module.MAX_FILES + 1)}}, "files: 100001 entries"),
        ({"files": {"a": 1}}, "files.a"),
        ({"files": {"a": "x" * (module.MAX_TEXT + 1)}}, "files.a: longer than 8 MiB"),
        ({str(n): 0 for n in range(33)}, "the document: 38 entries"),
        ({"a": 1}, "a: Extra inputs"),
    ],
)
def test_what_is_too_much_or_of_another_kind_is_named(part: dict[str, Any], message: str) -> None:
    assert message in refusal({**GOOD, **part})


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "[" * 100_000, '{"schema": ', b"\xff\xfe", '{"a": "\\ud800"}'])
def test_what_is_no_object_is_refused(text: str | bytes) -> None:
    assert "the document" in refusal(text)


def test_a_larger_document_is_not_even_read() -> None:
    assert "longer than 32 MiB" in refusal(b" " * (module.MAX_BYTES + 1))


def test_what_the_node_names_does_not_steer_a_terminal() -> None:
    assert "\x1b" not in refusal({**GOOD, "files": {"\x1b[2J\u202e": 1}})


def test_a_million_wrong_results_cost_no_more_than_reading_them() -> None:
    text = json.dumps(GOOD)[:-1] + ', "results": [' + ",".join(["0"] * 1_000_000) + "]}"
    tracemalloc.start()
    try:
        refusal(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(text)


def test_a_bundle_within_the_limits_is_read() -> None:
    results = [{"record": "x", "values": {"x": [0] * 1000}}] * 100
    bundle = Bundle.from_json(json.dumps({**GOOD, "commands": {"a": COMMAND}, "results": results}), "n.json")
    assert Bundle.from_json(bundle.to_json(), "n.json") == bundle
