"""The published JSON Schemas: none changes unnoticed, and what is really printed obeys them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bundles import DRIVER_NODE, driver_node, with_two_gpus

from gpunode.cli import run
from gpunode.cli.reference import format_names, schema_of
from gpunode.facts.parsers.kinds import KINDS


def schema(name: str) -> Any:
    """Return the published schema."""
    return json.loads(schema_of(name))


def obeys(document: Any, name: str) -> None:
    jsonschema.validate(document, schema(name), cls=jsonschema.Draft202012Validator)


HASHES = Path(__file__).with_name("schemas.sha256")


def test_no_format_changes_unnoticed() -> None:
    """After an intended change: compare ``gpunode schema NAME`` before and after, and replace the line."""
    now = [f"{hashlib.sha256(schema_of(name).encode()).hexdigest()}  {name}" for name in sorted(format_names())]
    assert len(now) > 20
    kept = HASHES.read_text(encoding="ascii").splitlines()
    assert now == kept, f"{HASHES.name}, sorted by name: {sorted(set(now) ^ set(kept)) or 'another order'}"


@pytest.mark.parametrize("name", format_names())
def test_the_schema_is_one_and_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))
    assert run(["schema", name]) == 0
    assert json.loads(capsys.readouterr().out) == schema(name)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    run(arguments)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("document", [driver_node, with_two_gpus])
def test_reports_obey(document: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "node.json"
    bundle.write_text(json.dumps(document()))
    report = printed(capsys, "validate", "--replay", str(bundle), "--format", "json")
    obeys(report, "report")
    assert report["nodes"][0]["findings"]
    assert report["nodes"][0]["simulated"] is True


def test_a_report_on_a_node_out_of_reach_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 of this machine: nothing listens there.
    report = printed(capsys, "validate", "nobody@127.0.0.1:1", "--timeout", "10", "--format", "json")
    obeys(report, "report")
    (finding,) = report["nodes"][0]["findings"]
    assert (finding["check"], finding["status"]) == ("node.reachable", "error")
    assert report["nodes"][0]["simulated"] is None


def test_the_list_of_checks_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    obeys(printed(capsys, "checks", "--format", "json"), "checks")


def test_a_recorded_bundle_obeys() -> None:
    obeys(json.loads(DRIVER_NODE.read_text(encoding="utf-8")), "bundle")


@pytest.mark.parametrize(
    ("name", "keys"),
    [("report", ("status",)), ("report", ("nodes", 0, "findings", 0, "check")), ("bundle", ("commands",))],
)
def test_the_schema_refuses_what_lacks_a_part(
    name: str, keys: tuple[str | int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "bundle":
        document: Any = driver_node()
    else:
        document = printed(capsys, "validate", "--replay", str(DRIVER_NODE), "--format", "json")
    inner = document
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    with pytest.raises(jsonschema.ValidationError):
        obeys(document, name)


SAMPLES = sorted((Path(__file__).parents[1] / "unit/facts/samples").glob("*.*"))
FAILURES = {
    "nvidia-smi-xml": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
    "dmesg": "dmesg: read kernel buffer failed: Operation not permitted\n",
}
PARSED = [(path.name.partition(".")[0], path) for path in SAMPLES if path.name.partition(".")[0] in KINDS]


@pytest.mark.parametrize(("kind", "path"), PARSED, ids=[path.name for _, path in PARSED])
def test_a_parsed_output_obeys(kind: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    obeys(printed(capsys, "parse", kind, str(path)), f"parse-{kind}")


def test_every_kind_has_a_sample() -> None:
    without = set(KINDS) - {kind for kind, _ in PARSED}
    assert not without, f"tests/unit/facts/samples has no KIND.NAME.txt of {sorted(without)}"


@pytest.mark.parametrize("kind", FAILURES)
def test_the_failure_of_a_tool_obeys(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output"
    output.write_text(FAILURES[kind])
    document = printed(capsys, "parse", kind, str(output))
    obeys(document, f"parse-{kind}")
    del document["error"]["kind"]
    with pytest.raises(jsonschema.ValidationError):
        obeys(document, f"parse-{kind}")
