"""The driver from NVIDIA's repository on bare nodes of every supported system: each branch, three kinds of machine.

A cell is a system, a branch and a machine. All cells of a system are nodes of one lab and are provisioned by one run of
the driver's and the fabric's roles; then they are restarted, asked by ``nvidia-smi``, and provisioned again. Every cell
prints its line of the matrix. One cell of each system runs with a change; all of them with ``GPUNODE_TEST_ALL=1``, as
``run_tests.py --all`` does it.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import yaml
from playbook_runs import Run, Site

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]
CONCERNS = ("roles/nvidia_driver/", "roles/nvidia_repository/", "roles/nvidia_fabric/", "gpunode/lab/packages/")

SYSTEMS = ("ubuntu-22.04", "ubuntu-24.04", "ubuntu-26.04", "debian-12", "debian-13", "rocky-9", "rocky-10")
BRANCHES = ("580", "595", "610")
GPUS = {"t4-1": 1, "l40s-4": 4, "hgx-h100-8": 8}
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
# What is refused, and the reason's first word: NVIDIA's repository for 26.04 begins with 595.
REFUSED = {("ubuntu-26.04", "580"): "no-stack"}
CELLS = [
    cell
    for cell in itertools.product(SYSTEMS, BRANCHES, GPUS)
    if cell in CHOSEN or os.environ.get("GPUNODE_TEST_ALL") == "1"
]
ROLES = ("nvidia_repository", "nvidia_driver", "nvidia_fabric")
TAGS = [f"{role}_{part}" for role in ROLES for part in ("install", "configure", "service")]


Cell = tuple[str, str, str]


@dataclass
class Outcome:
    """What came of one cell."""

    first: dict[str, int]
    refusal: str = ""
    """The reasons, where nothing was changed."""
    failure: str = ""
    """What failed after the node was accepted."""
    versions: dict[str, str] = field(default_factory=dict)
    """Upstream versions of the installed packages that carry the driver's version."""
    answers: list[str] = field(default_factory=list)
    """nvidia-smi's driver version of each GPU, after the restart."""
    second: dict[str, int] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    """Files, packages and units that the second run left otherwise."""

    def __str__(self) -> str:
        if self.refusal:
            return f"refused: {self.refusal}"
        if self.failure:
            return f"FAILED: {self.failure}"
        smi = f"nvidia-smi: {len(self.answers)} x {self.answers[0]}" if self.answers else "nvidia-smi does not answer"
        releases = " ".join(sorted(set(self.versions.values()))) or "nothing"
        return f"ok: {releases}, {smi}, second run changed={self.second['changed']}"


class Grid:
    """The selected cells; those of one system at a time are nodes."""

    def __init__(self, selected: Sequence[Cell], factory: pytest.TempPathFactory) -> None:
        self._selected, self._factory = selected, factory
        self._lab: Lab | None = None
        self._outcomes: dict[Cell, Outcome] = {}

    def outcome(self, cell: Cell) -> Outcome:
        """What came of a cell; all cells of its system are provisioned when the first is asked for."""
        if cell not in self._outcomes:
            self.down()
            self._lab = Lab(f"matrix-{cell[0].replace('.', '-')}-{os.getpid()}")
            requested = [candidate for candidate in self._selected if candidate[0] == cell[0]]
            # A fleet that does not come up is not built again for each of its cells.
            self._outcomes |= {candidate: Outcome({}, failure="the fleet did not come up") for candidate in requested}
            self._outcomes |= provisioned(self._lab, requested, self._factory.mktemp("grid"))
        return self._outcomes[cell]

    def down(self) -> None:
        if self._lab is not None:
            self._lab.down()


@pytest.fixture(scope="module")
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    grid = Grid([cast(Cell, item.callspec.params["cell"]) for item in items], tmp_path_factory)
    try:
        yield grid
    finally:
        grid.down()


def provisioned(lab: Lab, cells: Sequence[Cell], folder: Path) -> dict[Cell, Outcome]:
    system = cells[0][0]
    by_machine = {gpus: [cell for cell in cells if cell[2] == gpus] for gpus in GPUS}
    for machine, requested in by_machine.items():
        if requested:
            lab.up(len(requested), system, [machine])
    waiting = {machine: list(requested) for machine, requested in by_machine.items()}
    sites = {}
    for node in lab.nodes():
        sites[waiting[str(node.hardware)].pop(0)] = site = Site(lab)
        site.node = node
    name_of = {cell: site.node.name for cell, site in sites.items()}
    hosts = {name: {"nvidia_driver_version": cell[1]} for cell, name in name_of.items()}
    branches = folder / "branches.yml"
    branches.write_text(yaml.safe_dump({"all": {"hosts": hosts}}), encoding="utf-8")
    options = ("-i", str(branches), "-e", "nvidia_driver_source=nvidia", "--tags", ",".join(TAGS))
    play = next(iter(sites.values())).play
    with ThreadPoolExecutor(4) as pool:
        if system.startswith("rocky"):  # dkms is EPEL's; without it the node is refused
            list(
                pool.map(
                    lambda site: site.sh("dnf --setopt=timeout=250 --quiet --assumeyes install epel-release"),
                    sites.values(),
                )
            )
        run = play(*options, limit_s=3000)
        (folder / "first.log").write_text(run.output, encoding="utf-8")
        outcomes = {cell: first(run, name) for cell, name in name_of.items()}
        good = {cell: site for cell, site in sites.items() if not (outcomes[cell].refusal or outcomes[cell].failure)}
        before = dict(zip(good, pool.map(settle, good.values()), strict=True))
        if good:
            run = play(*options, "--limit", ",".join(name_of[cell] for cell in good), limit_s=3000)
            (folder / "second.log").write_text(run.output, encoding="utf-8")
        after = dict(zip(good, pool.map(Site.snapshot, good.values()), strict=True))
    for cell, site in good.items():
        outcomes[cell].second = recap(run, name_of[cell])
        outcomes[cell].failure = failure(run, name_of[cell])
        outcomes[cell].moved = sorted(set(before[cell]) ^ set(after[cell]))
        outcomes[cell].versions = installed(site.node)
        query = "nvidia-smi --query-gpu=driver_version --format=csv,noheader || true"
        outcomes[cell].answers = site.sh(query).split()
    return outcomes


def settle(site: Site) -> list[str]:
    site.node.restart()
    return site.snapshot()


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_bare_node_gets_the_branch(grid: Grid, cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    system, branch, machine = cell
    outcome = grid.outcome(cell)
    with capsys.disabled():
        sys.stdout.write(f"\nmatrix: {system} {branch} {machine}: {outcome} ")
        sys.stdout.flush()
    if reason := REFUSED.get((system, branch)):
        assert outcome.refusal.startswith(f"{reason}:"), outcome
        assert branch in outcome.refusal
        assert outcome.first["changed"] == 0
        return
    assert (outcome.refusal, outcome.failure) == ("", "")
    assert {version.partition(".")[0] for version in outcome.versions.values()} == {branch}, outcome.versions
    (release,) = set(outcome.versions.values())
    has_fabric_manager = any(name.startswith("nvidia-fabric") for name in outcome.versions)
    assert has_fabric_manager is (machine == "hgx-h100-8")
    assert outcome.answers == [release] * GPUS[machine]
    assert outcome.second["ok"] > 0
    assert (outcome.second["changed"], outcome.second["failed"], outcome.moved) == (0, 0, [])


def installed(node: LabNode) -> dict[str, str]:
    """Upstream versions of what carries the driver's version: its libraries, modules and the fabric manager."""
    if node.os.startswith("rocky"):
        query = "rpm --query --all --queryformat '%{NAME} %{VERSION}\n'"
    else:
        query = "dpkg-query -W -f '${Package} ${Version} ${db:Status-Status}\n' | grep ' installed$'"
    reply = node.run(["bash", "-c", query]).stdout
    closure = re.compile(
        r"(nvidia-(driver|headless|dkms|kernel|utils|compute-utils|firmware|fabric-?manager|persistenced|modprobe|"
        r"kmod-common)|libnvidia-(compute|cfg1|nscq|ml)|libcuda1|kmod-nvidia)(?!.*(pinning|selinux|assistant))"
    )
    rows = [line.split() for line in reply.splitlines()]
    return {row[0]: re.sub(r"-[0-9]+(ubuntu[0-9]+)?$", "", row[1]) for row in rows if closure.match(row[0])}


def first(run: Run, host: str) -> Outcome:
    """The outcome so far: accepted, refused with its reasons, or failed."""
    failed = failure(run, host)
    reasons = [line.strip()[2:] for line in failed.splitlines() if re.match(r"\s+- [a-z-]+: ", line)]
    return Outcome(recap(run, host), refusal="; ".join(reasons), failure="" if reasons else failed)


def recap(run: Run, host: str) -> dict[str, int]:
    """What Ansible counted for a host."""
    line = re.search(rf"(?m)^{re.escape(host)} +: (.*)$", run.output.rpartition("PLAY RECAP")[2])
    assert line, run.output[-3000:]
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line[1])}


def failure(run: Run, host: str) -> str:
    """What a host failed with, empty where it did not."""
    block = re.search(rf"(?ms)^(?:fatal|failed): \[{re.escape(host)}\].*?(?=^[^\s}}]|\Z)", run.output)
    return block[0].strip() if block else ""
