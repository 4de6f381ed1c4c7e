"""Each example on a lab node: ``gpunode init`` from the node, then plan, provision, validate, without an edit."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from playbook_runs import ROOT, SNAPSHOT, gpunode
from programs import beside_python, run_program

from gpunode.content import ansible_environment
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

HARDWARE = {
    "development": "t4-1",
    "research": "a100-pcie-4",
    "inference": "a10-2",
    "hgx-slurm": "hgx-h100-8",
    "kubernetes": "l40s-4",
    "air-gapped": "rtx-pro-6000-2",
}
MIRROR = "http://mirror.example.invalid"
PASS = {"driver.held", "driver.module-loaded", "gpu.answers", "gpu.present", "host.ssh-settings", "node.units-failed"}


def test_every_example_has_its_hardware() -> None:
    assert set(HARDWARE) == {path.parent.name for path in (ROOT / "inventory" / "examples").glob("*/hosts.yml")}


@pytest.fixture(scope="module", params=list(HARDWARE))
def site(request: pytest.FixtureRequest, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that ``gpunode init`` wrote for one node."""
    lab.up(1, "debian-12", [HARDWARE[request.param]])
    folder = tmp_path_factory.mktemp(request.param) / "site"
    limit = f"{HARDWARE[request.param]}-1"
    gpunode("init", folder, "-i", lab.inventory_path, "--limit", limit, "--example", request.param)
    if request.param == "air-gapped":
        use_the_labs_mirror(folder)
    yield folder
    for node in lab.nodes():
        if node.name == limit:
            node.container.remove(force=True, v=True)


def use_the_labs_mirror(folder: Path) -> None:
    """Do what the example leaves to a site: its mirror's address, and the keys beside the inventory."""
    hosts, settings = folder / "hosts.yml", folder / "group_vars" / "gpu_nodes.yml"
    tree = yaml.safe_load(hosts.read_text())
    keys = folder / "keys"
    keys.mkdir()
    for variable, name in (("nvidia_repository", "nvidia"), ("nvidia_container_toolkit", "nvidia-container-toolkit")):
        (keys / f"{name}.asc").write_text(Path(tree["gpu_nodes"]["vars"].pop(f"{variable}_key")).read_text())
        del tree["gpu_nodes"]["vars"][f"{variable}_url"]
    hosts.write_text(yaml.safe_dump(tree))
    text = settings.read_text()
    assert MIRROR in text
    settings.write_text(text.replace(MIRROR, "http://vendor"))


def provision(site: Path) -> str:
    argv = [beside_python("gpunode"), "provision", "-i", site / "hosts.yml", "-e", "gpunode_reboot=when_needed"]
    done = run_program(argv, limit_s=1400, cwd=site)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_an_example_is_planned_provisioned_and_validated_without_an_edit(site: Path, lab: Lab) -> None:
    inventory = site / "hosts.yml"
    node = next(node for node in lab.nodes() if node.name in inventory.read_text())
    planned = json.loads(gpunode("plan", "-i", inventory, "--format", "json"))
    (group,) = planned["groups"]
    assert group["stack"]["driver"]["version"]
    lint = [beside_python("ansible-lint"), "--offline", "--project-dir", site, site]
    assert run_program(lint, limit_s=300, env=ansible_environment()).returncode == 0

    provision(site)
    report = run_program(
        [beside_python("gpunode"), "validate", "-i", inventory, "--level", "quick", "--format", "json"], limit_s=600
    )
    (judged,) = json.loads(report.stdout)["nodes"]
    seen: dict[str, set[str]] = {}
    for finding in judged["findings"]:
        seen.setdefault(finding["check"], set()).add(finding["status"])
    assert {check for check, statuses in seen.items() if statuses & {"fail", "error"}} == set()
    assert {check for check, statuses in seen.items() if "pass" in statuses} >= PASS
    assert judged["stack"]["driver"] == group["stack"]["driver"]["version"]

    before = node.run(["bash", "-euc", SNAPSHOT], timeout_s=300).stdout
    recap = re.findall(r"changed=(\d+)", provision(site).rpartition("PLAY RECAP")[2])
    assert recap == ["0"]
    assert node.run(["bash", "-euc", SNAPSHOT], timeout_s=300).stdout == before
