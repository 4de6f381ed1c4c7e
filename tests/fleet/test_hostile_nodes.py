"""Twenty nodes over real SSH, three of them hostile: the others are judged, in bounded memory and time."""

import json
import re
import sys
from pathlib import Path

import pytest
from endpoints import SSHD, endpoints
from fleet_bundles import healthy, verdict
from measure import measured

pytestmark = [
    pytest.mark.skipif(SSHD is None, reason="no sshd on this machine: apt-get install openssh-server"),
    pytest.mark.timeout(600),
    pytest.mark.alone,
]

NAMES = [f"gpu-{number:03d}" for number in range(1, 21)]
MEMORY_MIB = 1536
LIMIT_S = 240.0
ENDS = {
    "gpu-003": r"MiB of memory|at most 5000 are read",
    "gpu-007": r"MiB of memory",
    "gpu-011": r"more than 256 GPUs",
}
"""By what the answer of each hostile node ends: not by --timeout, which is the collection's."""


def with_results(text: str, results: str) -> str:
    """The bundle, as text, with these results."""
    document = json.loads(text)
    document.pop("results", None)
    return f'{json.dumps(document)[:-1]}, "results": {results}}}'


def with_output(text: str, key: str, stdout: str) -> str:
    """The bundle with another output of one command."""
    document = json.loads(text)
    document["commands"][key]["stdout"] = stdout
    return json.dumps(document)


def test_three_hostile_nodes_stop_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundles = {name: healthy(number, name) for number, name in enumerate(NAMES, start=1)}
    million = "[" + ",".join(["[1]"] * 2_800_000) + "]"
    deep = "[" + ",".join(["[" * 100 + "]" * 100] * 40_000) + "]"
    gpus = "<nvidia_smi_log>" + "<gpu></gpu>" * 500_000 + "</nvidia_smi_log>"
    commands = json.loads(bundles["gpu-011"])["commands"]
    key = next(key for key, command in commands.items() if command["argv"][-2:] == ["-q", "-x"])
    bundles["gpu-003"] = with_results(bundles["gpu-003"], million)
    bundles["gpu-007"] = with_results(bundles["gpu-007"], deep)
    bundles["gpu-011"] = with_output(bundles["gpu-011"], key, gpus)
    hostile = {"gpu-003", "gpu-007", "gpu-011"}
    folder = tmp_path / "fleet"
    folder.mkdir()
    with endpoints(folder, bundles, {}) as standing:
        cost = measured(
            [
                *(sys.executable, "-m", "gpunode", "validate", "--level", "quick", "-i", standing.inventory),
                *("--timeout", "120", "--format", "json"),
            ],
            timeout_s=LIMIT_S,
        )
    nodes = {node["host"]: node for node in json.loads(cost.stdout)["nodes"]}
    assert sorted(nodes) == NAMES
    for name in NAMES:
        if name not in hostile:
            assert nodes[name]["status"] == verdict(bundles[name]).value
    for name in hostile:
        errors = [finding for finding in nodes[name]["findings"] if finding["status"] == "error"]
        assert any(re.search(ENDS[name], finding["message"]) for finding in errors), errors
        assert all(re.fullmatch(r"[^\x00-\x1f]*", finding["message"]) for finding in errors)
    assert cost.rc == 3
    assert cost.memory_mib < MEMORY_MIB
    with capsys.disabled():
        print(f"\n17 of 20 judged; exit {cost.rc}; {cost.wall_s:.1f} s, {cost.memory_mib:.0f} MiB at most")
