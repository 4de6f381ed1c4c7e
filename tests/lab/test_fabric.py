"""The roles nvidia_fabric and dcgm beside a driver on a simulated HGX board: runs, repeats, repairs, refuses, goes.

The tests of this file share one node and run in their order: building the driver takes minutes. The variable
GPUNODE_TEST_FABRIC_BOARD chooses the board: hgx-h100-8 (NVSwitches on the bus), hgx-b200-8 (NVLink 5).
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]
CONCERNS = ("roles/nvidia_fabric/", "plugins/", "gpunode/lab/simulator/")

BOARD = os.environ.get("GPUNODE_TEST_FABRIC_BOARD", "hgx-h100-8")
NVLINK5 = BOARD.startswith("hgx-b")
DRIVER = "580.95.05"
UNIT = "nvidia-fabricmanager"
DROP_IN = f"/etc/systemd/system/{UNIT}.service.d/gpunode.conf"
MODULES = "/etc/modules-load.d/gpunode-nvidia-fabric.conf"
CONFIG = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
OWN_FILES = {DROP_IN, MODULES} if NVLINK5 else {DROP_IN}
CLOSURE = {UNIT, "libnvsdm"} if NVLINK5 else {UNIT, "libnvidia-nscq"}
OTHERS = {"nvlsm", "infiniband-diags"} if NVLINK5 else set()
LOUDER = ("-e", '{"nvidia_fabric_manager_config": {"LOG_LEVEL": 3}}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plays = tmp_path_factory.mktemp("plays")
    for name in ("driver", "fabric", "dcgm"):
        (plays / name).mkdir()
    return plays


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    """A node with the driver and its closure, provisioned by the role nvidia_driver."""
    lab = Lab(f"test-fabric-{os.getpid()}")
    try:
        lab.up(1, "debian-12", [BOARD])
        site = Site(lab)
        Roles(site, folder / "driver", "nvidia_repository", "nvidia_driver").done(
            "-e", f"nvidia_driver_version={DRIVER}"
        )
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def fabric(site: Site, folder: Path) -> Roles:
    """The role alone, with the driver that is there."""
    return Roles(site, folder / "fabric", "nvidia_fabric")


@pytest.fixture(scope="module")
def running(fabric: Roles) -> tuple[Run, Run]:
    """The announcement, and what was done."""
    before = fabric.site.snapshot()
    announced = fabric.done("--check")
    assert fabric.site.snapshot() == before
    return announced, fabric.done()


def versions(site: Site) -> dict[str, str]:
    return dict(line.split()[:2] for line in site.packages() if line.endswith(" installed"))


def main_pid(site: Site) -> str:
    return site.sh(f"systemctl show -p MainPID --value {UNIT}").strip()


def test_what_the_board_needs_is_there_in_the_drivers_version_and_runs(fabric: Roles, running: tuple[Run, Run]) -> None:
    announced, done = running
    assert announced.paths == done.paths
    packages = versions(fabric.site)
    assert {packages[name].partition("-")[0] for name in CLOSURE} == {DRIVER}
    assert packages.keys() >= CLOSURE | OTHERS
    assert fabric.site.held() >= CLOSURE
    if not NVLINK5:
        assert not packages.keys() & {"nvlsm", "libnvsdm"}
    assert fabric.site.sh(f"systemctl is-enabled {UNIT}; systemctl is-active {UNIT}").split() == ["enabled", "active"]
    assert ("nvlsm" in fabric.site.sh(f"systemctl status --no-pager -l {UNIT}")) == NVLINK5
    assert fabric.site.sh("systemctl list-units --failed --plain --no-legend") == ""


def test_validate_reports_a_healthy_fabric(
    fabric: Roles, running: tuple[Run, Run], capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    run_gpunode(["validate", "-i", str(fabric.site.lab.inventory_path), "--level", "quick", "--format", "json"])
    findings = json.loads(capfd.readouterr().out)["nodes"][0]["findings"]
    of_fabric = [finding for finding in findings if finding["check"].startswith("fabric.")]
    assert {finding["check"] for finding in of_fabric} >= {"fabric.manager", "fabric.manager-version", "fabric.state"}
    assert {finding["status"] for finding in of_fabric} == {"pass"}, of_fabric


def test_a_second_run_changes_nothing(fabric: Roles, running: tuple[Run, Run]) -> None:
    before, pid = fabric.site.snapshot(), main_pid(fabric.site)
    run = fabric.done()
    assert run.recap["changed"] == 0, run.changed
    assert (fabric.site.snapshot(), main_pid(fabric.site)) == (before, pid)


def test_what_is_damaged_is_repaired_and_nothing_else(fabric: Roles, running: tuple[Run, Run]) -> None:
    before = fabric.site.snapshot()
    fabric.site.sh(f"apt-mark unhold {UNIT}; systemctl disable --now --quiet {UNIT}")
    for path in OWN_FILES:
        fabric.site.sh(f"echo '# damaged' > {path}")
    announced = fabric.done("--check")
    run = fabric.done()
    assert run.paths == announced.paths == OWN_FILES
    assert fabric.site.snapshot() == before


def test_a_package_that_vanished_is_reported_and_the_next_run_installs_it(
    fabric: Roles, running: tuple[Run, Run]
) -> None:
    before = fabric.site.snapshot()
    vendor = fabric.site.lab.vendor()
    fabric.site.sh(f"apt-get purge -y -q --allow-change-held-packages {UNIT}; apt-get clean")
    vendor.fault("package-gone", f"{UNIT}_*")
    try:
        refused = fabric.play()
    finally:
        vendor.heal()
    assert refused.rc != 0
    assert f"{UNIT}_" in refused.output
    assert fabric.done("--check").rc == 0
    fabric.done()
    assert fabric.site.snapshot() == before


def test_settings_are_merged_and_restart_it(fabric: Roles, running: tuple[Run, Run]) -> None:
    lines, pid = fabric.site.sh(f"cat {CONFIG}"), main_pid(fabric.site)
    refused = fabric.play("-e", '{"nvidia_fabric_manager_config": {"LOG_LEVL": 3}}')
    assert refused.rc != 0
    assert "LOG_LEVL is not in" in refused.output
    fabric.done(*LOUDER)
    assert fabric.site.sh(f"cat {CONFIG}") == lines.replace("LOG_LEVEL=4", "LOG_LEVEL=3")
    assert main_pid(fabric.site) not in {pid, "0"}
    assert fabric.done(*LOUDER).recap["changed"] == 0


def test_on_a_busy_node_new_settings_wait(fabric: Roles, running: tuple[Run, Run]) -> None:
    pid = main_pid(fabric.site)
    fabric.site.node.fault("gpu-busy", "gpu0")
    try:
        run = fabric.play("-e", '{"nvidia_fabric_manager_config": {"LOG_LEVEL": 2}}')
    finally:
        fabric.site.node.heal()
    assert run.rc == 0, run.output
    assert "new settings wait for a restart of nvidia-fabricmanager.service" in " ".join(run.output.split())
    assert main_pid(fabric.site) == pid


def test_dcgm_runs_beside_it(site: Site, folder: Path, running: tuple[Run, Run]) -> None:
    dcgm = Roles(site, folder / "dcgm", "dcgm")
    dcgm.done()
    assert site.sh("systemctl is-active nvidia-dcgm").strip() == "active"
    assert "8 GPUs found" in site.sh("dcgmi discovery -l")
    before = site.snapshot()
    assert dcgm.done().recap["changed"] == 0
    assert site.snapshot() == before


def test_it_runs_again_after_a_restart_of_the_node(fabric: Roles, running: tuple[Run, Run]) -> None:
    fabric.site.node.restart()
    fabric.site.sh("timeout 120 systemctl is-system-running --wait || true")
    pid = main_pid(fabric.site)
    assert fabric.site.sh(f"systemctl is-active {UNIT} || true").strip() == "active"
    # The settings that waited when the GPUs were in use.
    louder = ("-e", '{"nvidia_fabric_manager_config": {"LOG_LEVEL": 2}}')
    assert not {"Set units", "Load kernel modules"} & fabric.done(*louder).changed.keys()
    assert main_pid(fabric.site) == pid


def test_a_fabric_manager_of_another_release_than_the_module_is_a_reason_to_reboot(
    fabric: Roles, running: tuple[Run, Run]
) -> None:
    fabric.done(*LOUDER)
    fabric.site.node.fault("fabric-manager-version", version="580.178.04")
    try:
        run = fabric.done(*LOUDER)
    finally:
        fabric.site.node.heal()
    assert f"the fabric manager is 580.178.04, module {DRIVER} is loaded" in " ".join(run.output.split()), run.output
    assert run.recap["changed"] == 0
    fabric.site.sh(f"systemctl stop {UNIT}")
    assert set(fabric.done(*LOUDER).changed) == {"Set units"}
    assert fabric.site.sh(f"systemctl is-active {UNIT}").strip() == "active"


def test_absent_removes_it(fabric: Roles, running: tuple[Run, Run]) -> None:
    announced = fabric.done("--check", "-e", "nvidia_fabric_state=absent")
    run = fabric.done("-e", "nvidia_fabric_state=absent")
    assert announced.paths == run.paths >= OWN_FILES
    assert not versions(fabric.site).keys() & (CLOSURE | OTHERS)
    assert fabric.site.sh("find /etc -name '*gpunode*' | grep -e fabric -e imex || true") == ""
    assert fabric.site.sh("systemctl list-units --failed --plain --no-legend") == ""
    assert fabric.done("-e", "nvidia_fabric_state=absent").recap["changed"] == 0
