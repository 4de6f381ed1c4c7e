"""``gpunode top``: options, formats and exit codes, without a node that could be sampled."""

import json
import os
from pathlib import Path

import forked
import pytest

from gpunode.cli import run
from gpunode.top import stream

NO_DRIVER = b"import sys,time\nprint('N {}\\nE G,the NVIDIA driver is not loaded', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "not a terminal"),
        (["--once", "--duration", "5s"], "--once and --duration"),
        (["--interval", "0", "--once"], "--interval"),
        (["--window", "x", "--once"], "--window"),
        (["--format", "xml"], "--format"),
        (["--limit", "gpu", "--once"], "--limit"),
        (["gpu-[01-", "--once"], "gpu-[01-"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert named in shown.err
    assert shown.err.count("\n") == 1


@pytest.fixture
def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "node_program", lambda: NO_DRIVER)


@pytest.mark.usefixtures("without_driver")
def test_a_node_without_driver_is_undetermined_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "--once"]) == 3
    assert "the NVIDIA driver is not loaded" in capsys.readouterr().out
    assert run(["top", "--once", "--format", "json"]) == 3
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert (node["host"], node["status"], node["gpus"]) == ("localhost", "silent", [])
    assert run(["top", "--format", "csv", "--duration", "1s"]) == 3
    header, row = capsys.readouterr().out.splitlines()
    assert header.startswith("at,host,status,")
    assert row.split(",")[1:3] in (["localhost", "silent"], ["localhost", "connecting"])


def test_a_node_out_of_reach_is_undetermined(capsys: pytest.CaptureFixture[str]) -> None:
    # Port 1 of this machine: nothing listens there.
    assert run(["top", "nobody@127.0.0.1:1", "--once", "--timeout", "10", "--format", "json"]) == 3
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["status"] == "failed"
    assert node["reason"].startswith("unreachable")


@pytest.mark.usefixtures("without_driver")
def test_a_reader_that_leaves_ends_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    errors = tmp_path / "stderr"
    assert forked.run(["top", "--format", "json", "--duration", "20s"], stdout=writing, stderr=errors) == 141
    os.close(writing)
    assert errors.read_text() == ""
