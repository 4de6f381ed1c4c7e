"""The driver from NVIDIA's repository on bare nodes of every supported system: each branch, three kinds of machine.

A cell is a system, a branch and a machine: a fresh node, the driver's roles, a restart, ``nvidia-smi``, a second run
that changes nothing. Every cell prints what came of it. One cell of each system runs with a change; all of them with
``GPUNODE_TEST_ALL=1``, as ``run_tests.py --all`` does it.
"""

import itertools
import os
import re
import sys

import pytest
from playbook_runs import Run, Site

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

SYSTEMS = ("ubuntu-22.04", "ubuntu-24.04", "ubuntu-26.04", "debian-12", "debian-13", "rocky-9", "rocky-10")
BRANCHES = ("580", "595", "610")
MACHINES = ("t4-1", "l40s-4", "hgx-h100-8")
# One cell for each system; together they have every branch and every machine.
CHOSEN = {
    ("ubuntu-22.04", "610", "hgx-h100-8"),
    ("ubuntu-24.04", "595", "t4-1"),
    ("ubuntu-26.04", "610", "l40s-4"),
    ("debian-12", "580", "hgx-h100-8"),
    ("debian-13", "595", "l40s-4"),
    ("rocky-9", "580", "t4-1"),
    ("rocky-10", "610", "hgx-h100-8"),
}
# What is refused, and the word that the refusal has to hold: NVIDIA's repository for 26.04 begins with 595.
REFUSED = {("ubuntu-26.04", "580"): "580"}
CELLS = [
    cell
    for cell in itertools.product(SYSTEMS, BRANCHES, MACHINES)
    if cell in CHOSEN or os.environ.get("GPUNODE_TEST_ALL") == "1"
]
ROLES = ("nvidia_repository", "nvidia_driver", "nvidia_fabric")
TAGS = [f"{role}_{part}" for role in ROLES for part in ("install", "configure", "service")]


@pytest.fixture
def bare(lab: Lab, request: pytest.FixtureRequest) -> Site:
    """A fresh node of the cell's system and machine."""
    system, _, machine = request.getfixturevalue("cell")
    for node in lab.nodes():
        node.container.remove(force=True, v=True)
    lab.up(1, system, [machine])
    node = next(node for node in lab.nodes() if (node.os, node.hardware) == (system, machine))
    site = Site(lab, "--limit", node.name, "--tags", ",".join(TAGS))
    site.node = node
    if system.startswith("rocky"):
        site.sh("dnf --quiet --assumeyes install epel-release")  # dkms is EPEL's; without it the node is refused
    return site


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_bare_node_gets_the_branch(
    bare: Site, cell: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    system, branch, machine = cell
    wish = ("-e", f"nvidia_driver_version={branch}", "-e", "nvidia_driver_source=nvidia")
    first = bare.play(*wish)
    report(capsys, cell, first)
    if reason := REFUSED.get((system, branch)):
        assert first.rc != 0
        assert first.recap["changed"] == 0
        assert reason in refusal(first), first.output[-3000:]
        return
    assert first.rc == 0, first.output[-5000:]
    versions = installed(bare.node)
    assert {version.partition(".")[0] for version in versions.values()} == {branch}, versions
    assert len(set(versions.values())) == 1, versions
    assert ("nvidia-fabricmanager" in versions) is (machine == "hgx-h100-8")
    if not system.startswith("rocky"):  # no module is built there
        bare.node.restart()
        assert bare.sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader | sort -u").strip() in {
            version.partition("-")[0] for version in versions.values()
        }
    second = bare.play(*wish)
    assert (second.rc, second.recap["changed"]) == (0, 0), second.output[-3000:]


def installed(node: LabNode) -> dict[str, str]:
    """Upstream versions of what carries the driver's version: its libraries, modules and the fabric manager."""
    if node.os.startswith("rocky"):
        query = "rpm --query --all --queryformat '%{NAME} %{VERSION}\n'"
    else:
        query = "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' | grep ' installed$'"
    said = node.run(["bash", "-c", query]).stdout
    closure = re.compile(
        r"(nvidia-(driver|headless|dkms|kernel|utils|compute-utils|firmware|fabricmanager|persistenced|kmod-common)|"
        r"libnvidia-(compute|cfg1|nscq|ml)|libcuda1|kmod-nvidia)(?!.*(pinning|selinux|assistant))"
    )
    rows = [line.split() for line in said.splitlines()]
    return {row[0]: re.sub(r"-[0-9]+(ubuntu[0-9]+)?$", "", row[1]) for row in rows if closure.match(row[0])}


def refusal(run: Run) -> str:
    """The lines that say why a run was refused."""
    return "; ".join(line.strip() for line in run.output.splitlines() if re.match(r"\s+- [a-z-]+: ", line))


def report(capsys: pytest.CaptureFixture[str], cell: tuple[str, str, str], run: Run) -> None:
    """Print the cell's line of the matrix."""
    outcome = "ok" if run.rc == 0 else f"refused: {refusal(run)}" if refusal(run) else f"failed (rc {run.rc})"
    with capsys.disabled():
        sys.stdout.write(f"\nmatrix: {' '.join(cell)}: {outcome} ")
        sys.stdout.flush()
