"""``gpunode parse`` as a person calls it: documents, refusals, exit codes."""

import io
import json
import sys
from pathlib import Path

import pytest

from gpunode.cli import run
from gpunode.facts.parsers.kinds import KINDS

SAMPLES = Path(__file__).parents[1] / "facts" / "samples"


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.txt")), ids=lambda path: path.stem)
def test_one_document_and_nothing_else(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parse", path.name.split(".")[0], str(path)]) == 0
    shown = capsys.readouterr()
    assert isinstance(json.loads(shown.out), dict)
    assert shown.err == ""


def test_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(monkeypatch, (SAMPLES / "driver-version.open.txt").read_bytes())
    assert run(["parse", "driver-version", "-", "-v"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["version"] == "580.95.05"
    assert "bytes read as driver-version" in shown.err


def test_utf_16(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(monkeypatch, (SAMPLES / "nvidia-smi-list.mig.txt").read_text(encoding="utf-8").encode("utf-16"))
    assert run(["parse", "nvidia-smi-list", "-"]) == 0
    assert len(json.loads(capsys.readouterr().out)["gpus"]) == 2


def test_a_failure_reported_by_the_tool_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin(monkeypatch, b"No devices were found\n")
    assert run(["parse", "nvidia-smi-xml", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "no-devices"


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("data", [b"", b"\x00\xff\xfe rubbish", b"bash: foo: command not found\n"])
def test_refused(kind: str, data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdin(monkeypatch, data)
    assert run(["parse", kind, "-"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.startswith(f"gpunode: standard input: not valid as {kind}: expected ")
    assert "found" in shown.err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        assert run(["parse", "dmesg", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"gpunode: {path}: cannot be read: ")


def test_an_unknown_kind_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parse", "nvidia-smi-xmls", "-"]) == 2
    assert "did you mean nvidia-smi-xml" in capsys.readouterr().err


def test_xids_have_the_catalogs_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parse", "dmesg", str(SAMPLES / "dmesg.mixed.txt")]) == 0
    events = json.loads(capsys.readouterr().out)["events"]
    fallen = next(event for event in events if event["xid"] == 79)
    assert fallen["severity"] == "critical"
    assert "bus" in fallen["meaning"]
    assert fallen["action"]


def test_the_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["parse", "--help"]) == 0
    words = capsys.readouterr().out.split()
    without = [kind for kind in KINDS if kind not in words]
    assert not without, f"gpunode/cli/lookup.py: the help does not list {without}"
