"""A hundred nodes at once over real SSH: each verdict is the right one, each bad node is named, and it ends in time."""

import json
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import EVERYTHING, effort
from endpoints import BAD, SSHD, Endpoints, endpoints
from fleet_bundles import faulty, gpus, healthy, verdict
from measure import Cost, measured

from gpunode.checks import Status
from gpunode.names import fold

pytestmark = [
    pytest.mark.skipif(SSHD is None, reason="no sshd on this machine: apt-get install openssh-server"),
    pytest.mark.timeout(900),
    pytest.mark.alone,
]

NAMES = [f"gpu-{number:03d}" for number in range(1, 101)]
NODE_LIMIT_S = 40.0
WHOLE_LIMIT_S = 150.0
"""Far above what it takes: three nodes hang for NODE_LIMIT_S, beside the others."""
KINDS = dict(zip(NAMES[7::16], BAD, strict=True))
REASONS = {
    "silent": "sends no SSH greeting within 20 s",
    "hangs": f"no answer within {NODE_LIMIT_S:g} s, login succeeded, the probe did not start",
    "half": f"no answer within {NODE_LIMIT_S:g} s, the probe started and did not end",
    "refused": "Connection refused",
    "closes": "accepts the connection and closes it without an SSH greeting",
    "floods": "the node sent more than 32 MiB",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    bundles = {name: healthy(number, name) for number, name in enumerate(NAMES, start=1)}
    assert len(set(bundles.values())) == len(NAMES)
    verdicts = {name: verdict(bundles[name]) for name in NAMES}
    assert set(verdicts.values()) <= {Status.PASS, Status.WARN}, f"not healthy to begin with: {verdicts}"
    answering = {name: text for name, text in bundles.items() if KINDS.get(name) in (None, "half", "floods")}
    with endpoints(tmp_path_factory.mktemp("fleet"), answering, KINDS) as standing:
        yield standing


def validate(fleet: Endpoints, limit: str) -> tuple[Cost, dict[str, Any]]:
    """``gpunode validate`` as a user runs it; its cost and its nodes by name."""
    cost = measured(
        [
            *(sys.executable, "-m", "gpunode", "validate", "--level", "quick", "-i", fleet.inventory, "--limit", limit),
            *("--timeout", f"{NODE_LIMIT_S:g}", "--format", "json"),
        ],
        timeout_s=WHOLE_LIMIT_S,
    )
    report = json.loads(cost.stdout)
    nodes = {node["host"]: node for node in report["nodes"]}
    assert len(nodes) == len(report["nodes"])
    return cost, nodes


def right(fleet: Endpoints) -> dict[str, str]:
    """What each node's own bundle comes to, judged from its file; the bad nodes come to an error."""
    status = dict.fromkeys(KINDS, "error")
    for name in NAMES:
        if name not in KINDS:
            status[name] = verdict(fleet.bundle(name).read_text(encoding="utf-8")).value
    return status


def good(fleet: Endpoints, nodes: Collection[str]) -> dict[str, str]:
    """The same for these nodes, and none of them bad."""
    assert not set(nodes) & set(KINDS)
    return {name: status for name, status in right(fleet).items() if name in nodes}


def seen(nodes: dict[str, Any]) -> dict[str, str]:
    """The verdicts of a report."""
    return {name: node["status"] for name, node in nodes.items()}


def bad_findings(node: dict[str, Any]) -> list[dict[str, Any]]:
    """What failed or could not be determined on a node."""
    return [finding for finding in node["findings"] if finding["status"] in ("fail", "error")]


def test_all_hundred(fleet: Endpoints, capsys: pytest.CaptureFixture[str]) -> None:
    cost, nodes = validate(fleet, "all")
    assert seen(nodes) == right(fleet)
    assert list(right(fleet).values()).count("error") == len(KINDS)
    for name, kind in KINDS.items():
        (finding,) = bad_findings(nodes[name])
        assert finding["check"] == "node.reachable"
        assert REASONS[kind] in finding["message"]
    assert cost.rc == 3
    # No node's answer was taken for another's.
    for number, name in enumerate(NAMES, start=1):
        if name not in KINDS:
            assert [gpu["uuid"] for gpu in nodes[name]["gpus"]] == gpus(number)
    with capsys.disabled():
        print(f"\n94 of 100 nodes right, errors: {fold(KINDS)}; exit {cost.rc}; {line(cost, 100)}")


def test_without_the_bad_ones(fleet: Endpoints, capsys: pytest.CaptureFixture[str]) -> None:
    cost, nodes = validate(fleet, limited("gpu-09*"))
    assert seen(nodes) == good(fleet, nodes)
    assert len(nodes) == effort(10, 94)
    assert cost.rc == 0
    if not EVERYTHING:
        return
    with capsys.disabled():
        print(f"\n94 nodes right; exit {cost.rc}\n  gpunode validate: {line(cost, 94)}")
        clush = shutil.which("clush", path=str(Path(sys.executable).parent))
        assert clush is not None, "clush comes with the dependency ClusterShell"
        other = measured(
            [
                *(clush, "-q", "-f", "32", "-u", f"{NODE_LIMIT_S:g}", "-w", fold(nodes)),
                *("--options", f"-F {fleet.ssh_config}", "true"),
            ],
            timeout_s=WHOLE_LIMIT_S,
        )
        print(f"  clush, the output alone: {line(other, 94)}")
    assert other.rc == 0, other.stderr[-2000:]
    assert other.stdout.count('"schema": "gpunode.bundle/1"') == 94


def test_one_faulty_among_them(fleet: Endpoints) -> None:
    sick = "gpu-078"
    path = fleet.bundle(sick)
    healthy_again = path.read_text(encoding="utf-8")
    path.write_text(faulty(healthy_again), encoding="utf-8")
    try:
        cost, nodes = validate(fleet, limited("gpu-07*"))
    finally:
        path.write_text(healthy_again, encoding="utf-8")
    assert seen(nodes) == {**good(fleet, nodes), sick: "fail"}
    assert len(nodes) == effort(9, 94)
    assert "driver.library-matches-module" in {finding["check"] for finding in bad_findings(nodes[sick])}
    assert cost.rc == 1


def limited(names: str) -> str:
    """What --limit gets: some nodes, or in a whole run all, without the bad ones."""
    return f"{'all' if EVERYTHING else names}:!bad"


def line(cost: Cost, nodes: int) -> str:
    """A cost in words."""
    return (
        f"{cost.wall_s:.1f} s; controller: {1000 * cost.cpu_s / nodes:.0f} ms of processor time per node, "
        f"{cost.memory_mib:.0f} MiB at most"
    )
