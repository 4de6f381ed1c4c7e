"""``gpunode plan`` from the command line: what is refused, and saved bundles."""

import json
from pathlib import Path

import pytest

from gpunode.cli import run

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
HYPOTHETICAL = ["--gpu", "H100 SXM", "--os", "ubuntu-24.04"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*HYPOTHETICAL, "--parallel", "3"], "a hypothetical node cannot be reached: --parallel"),
        ([*HYPOTHETICAL, "-K", "--timeout", "120"], "a hypothetical node cannot be reached: --timeout, -K"),
        (["--replay", str(BUNDLE), "--parallel", "32"], "--replay contacts no node: --parallel"),
    ],
)
def test_options_for_nodes_need_nodes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
    assert words in answer.err


def test_a_machine_without_a_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--replay", str(BUNDLE)]) == 0
    out = capsys.readouterr().out
    assert "no GPU named" not in out
    assert "no known NVIDIA GPU on debian-12" in out
    assert "warning: no NVIDIA GPU is on the PCI bus" in out
    assert "note: apt and dnf were not queried" in out


def test_a_hypothetical_node_without_a_gpu_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--os", "ubuntu-24.04", "--driver", "580"]) == 0
    out = capsys.readouterr().out
    assert "no GPU named on ubuntu-24.04" in out
    assert "were not asked" not in out


def test_bundles_are_counted_as_validate_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(BUNDLE.read_bytes())
    run(["plan", "--replay", str(BUNDLE), str(BUNDLE), str(other), "--format", "json"])
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    host = json.loads(BUNDLE.read_text(encoding="utf-8"))["host"]
    assert group["hosts"] == [host, f"{host} ({other})"]
