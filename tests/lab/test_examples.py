"""``gpunode init`` from lab nodes, then plan, provision, validate, without an edit: each example on a node that it is
meant for, and three different nodes with an example that init selects.
"""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from playbook_runs import ROOT, SNAPSHOT, gpunode
from programs import beside_python, run_program

from gpunode.content import ansible_environment
from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]
CONCERNS = ("inventory/examples/", "gpunode/cli/init")

HARDWARE = {
    "development": "t4-1",
    "research": "a100-pcie-4",
    "inference": "a10-2",
    "hgx-slurm": "hgx-h100-8",
    "kubernetes": "l40s-4",
    "air-gapped": "rtx-pro-6000-2",
}
MIXED = ("t4-1", "l40s-4", "hgx-h100-8")
SIDE_BY_SIDE = 3
"""Examples that are provisioned at a time: one leaves a part of two processors idle."""
MIRROR = "http://mirror.example.invalid"
PASS = {"driver.held", "driver.module-loaded", "gpu.answers", "gpu.present", "host.ssh-settings", "node.units-failed"}


def test_every_example_has_its_hardware() -> None:
    assert set(HARDWARE) == {path.parent.name for path in (ROOT / "inventory" / "examples").glob("*/hosts.yml")}


@dataclass(frozen=True)
class Outcome:
    """What the commands of a user did to the nodes of a site."""

    planned: dict[str, str]
    """Node to the driver of the plan, before anything changed."""
    lint: int
    report: list[dict[str, Any]]
    """The nodes of ``validate``, after the first run."""
    before: list[str]
    """Snapshots of the nodes after the first run."""
    recap: str
    """Of the second run."""
    after: list[str]
    edited: list[str]
    """Files of the site that differ from those that ``init`` wrote."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """The outcomes of the selected examples; ``mixed`` is the site of three different nodes."""
    calls = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    selected = [str(call["example"]) for call in calls if "example" in call]
    one_each = [hardware for example, hardware in HARDWARE.items() if example in selected]
    if one_each:
        lab.up(1, "debian-12", one_each)
    sites: dict[str, tuple[str, ...]] = {example: (f"{hardware}-1",) for example, hardware in HARDWARE.items()}
    if "mixed" in selected:
        sites["mixed"] = tuple(f"{hardware}-2" for hardware in MIXED)
        lab.up(2, "debian-12", MIXED)
    nodes = {node.name: node for node in lab.nodes()}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {
            example: pool.submit(outcome_of, lab, [nodes[name] for name in sites[example]], example, folder / "site")
            for example in selected
            if (folder := tmp_path_factory.mktemp(example))
        }
        pool.shutdown(cancel_futures=True)


def outcome_of(lab: Lab, nodes: Sequence[LabNode], example: str, site: Path) -> Outcome:
    """Write the site for some nodes, and do what a user does with it."""
    limit = ",".join(node.name for node in nodes)
    chosen = () if example == "mixed" else ("--example", example)
    gpunode("init", site, "-i", lab.inventory_path, "--limit", limit, *chosen)
    if example == "air-gapped":
        use_the_labs_mirror(site)
    written = digests(site)
    inventory = site / "hosts.yml"
    groups = json.loads(gpunode("plan", "-i", inventory, "--format", "json"))["groups"]
    lint = [beside_python("ansible-lint"), "--offline", "--project-dir", site, site]
    linted = run_program(lint, limit_s=600, env=ansible_environment()).returncode
    provision(site)
    words = ["validate", "-i", inventory, "--level", "quick", "--format", "json"]
    report = json.loads(run_program([beside_python("gpunode"), *words], limit_s=600).stdout)
    before = [snapshot(node) for node in nodes]
    recap = provision(site).rpartition("PLAY RECAP")[2]
    return Outcome(
        planned={host: group["stack"]["driver"]["version"] for group in groups for host in group["hosts"]},
        lint=linted,
        report=report["nodes"],
        before=before,
        recap=recap,
        after=[snapshot(node) for node in nodes],
        edited=sorted(path for path in {*written, *digests(site)} if written.get(path) != digests(site).get(path)),
    )


def digests(site: Path) -> dict[str, str]:
    return {str(path): sha256(path.read_bytes()).hexdigest() for path in site.rglob("*") if path.is_file()}


def use_the_labs_mirror(folder: Path) -> None:
    """Do what the example leaves to a site: its mirror's address, and the keys beside the inventory."""
    hosts, settings = folder / "hosts.yml", folder / "group_vars" / "gpu_nodes.yml"
    tree = yaml.safe_load(hosts.read_text())
    keys = folder / "keys"
    keys.mkdir()
    for variable, name in (("nvidia_repository", "nvidia"), ("nvidia_container_toolkit", "nvidia-container-toolkit")):
        (keys / f"{name}.asc").write_text(Path(tree["gpu_nodes"]["vars"].pop(f"{variable}_key")).read_text())
        del tree["gpu_nodes"]["vars"][f"{variable}_url"]
    hosts.write_text(yaml.safe_dump(tree, explicit_start=True))
    text = settings.read_text()
    assert MIRROR in text
    settings.write_text(text.replace(MIRROR, "http://vendor"))


def provision(site: Path) -> str:
    argv = [beside_python("gpunode"), "provision", "-i", site / "hosts.yml", "-e", "gpunode_reboot=when_needed"]
    done = run_program(argv, limit_s=3000, cwd=site)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def snapshot(node: LabNode) -> str:
    return str(node.run(["bash", "-euc", SNAPSHOT], timeout_s=300).stdout)


@pytest.mark.parametrize("example", [*HARDWARE, "mixed"])
def test_a_site_is_planned_provisioned_and_validated_without_an_edit(
    example: str, outcomes: dict[str, Future[Outcome]]
) -> None:
    outcome = outcomes[example].result(timeout=3600)
    assert outcome.lint == 0
    assert outcome.edited == []
    assert outcome.planned == {node["host"]: node["stack"]["driver"] for node in outcome.report}
    assert len(outcome.planned) == len(MIXED if example == "mixed" else [example])
    for node in outcome.report:
        seen: dict[str, set[str]] = {}
        for finding in node["findings"]:
            seen.setdefault(finding["check"], set()).add(finding["status"])
        assert {check for check, statuses in seen.items() if statuses & {"fail", "error"}} == set(), node["host"]
        assert {check for check, statuses in seen.items() if "pass" in statuses} >= PASS, node["host"]
    assert re.findall(r"changed=(\d+)", outcome.recap) == ["0"] * len(outcome.report)
    assert outcome.after == outcome.before
    assert all(outcome.before)
