"""The roles dcgm and nvidia_fabric on a simulated L40S server: DCGM 3 gives way, and nothing is left failed.

The tests of this file share one node without an NVSwitch and run in their order. No driver is there, so DCGM is
enabled and not started; that it runs beside a driver is shown in test_fabric.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site, yaml_list

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("plugins/",)

UNIT = "/etc/systemd/system/nvidia-dcgm.service.d/gpunode.conf"
OWN_FILES = {"/etc/apt/preferences.d/gpunode-dcgm.pref", UNIT}
MEMORY = "/var/lib/gpunode/dcgm/packages-before"
STEM = "datacenter-gpu-manager-4"
EXPORTER = "datacenter-gpu-manager-exporter"
# DCGM 4's exporter has a name as DCGM 3 had them; the lab's repository has none.
MADE_EXPORTER = f"""
mkdir -p /tmp/made/DEBIAN
printf '%s\\n' 'Package: {EXPORTER}' 'Version: 4.6.0-4.8.3-1' 'Maintainer: a test' 'Architecture: all' \\
    'Description: made by a test' > /tmp/made/DEBIAN/control
dpkg-deb --build /tmp/made /tmp/exporter.deb
dpkg --install /tmp/exporter.deb
"""
OLD_SERVICE = r"""
printf '%s\n' '[Service]' 'ExecStart=/bin/sleep 1000' '[Install]' 'WantedBy=multi-user.target' \
    > /etc/systemd/system/dcgm.service
systemctl daemon-reload
systemctl enable --now --quiet dcgm.service
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plays = tmp_path_factory.mktemp("plays")
    for name in ("repository", "dcgm", "fabric", "both"):
        (plays / name).mkdir()
    return plays


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    lab = Lab(f"test-dcgm-{os.getpid()}")
    try:
        lab.up(1, "debian-12", ["l40s-4"])
        site = Site(lab)
        Roles(site, folder / "repository", "nvidia_repository").done()
        site.sh("apt-get update -q; apt-get install -y -q datacenter-gpu-manager")
        site.sh(OLD_SERVICE)
        site.sh(MADE_EXPORTER)
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def dcgm(site: Site, folder: Path) -> Roles:
    return Roles(site, folder / "dcgm", "dcgm")


@pytest.fixture(scope="module")
def installed(dcgm: Roles) -> tuple[Run, Run]:
    """The announcement, and what was done."""
    before = dcgm.site.snapshot()
    announced = dcgm.done("--check")
    assert dcgm.site.snapshot() == before
    return announced, dcgm.done()


def versions(site: Site) -> dict[str, str]:
    packages = dict(line.split()[:2] for line in site.packages() if line.endswith(" installed"))
    return {name: at for name, at in packages.items() if name.startswith("datacenter-gpu-manager") and name != EXPORTER}


def test_dcgm_4_replaces_3_as_announced(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    announced, done = installed
    assert announced.paths >= OWN_FILES
    assert done.paths == announced.paths
    packages = versions(dcgm.site)
    assert {f"{name}={version}" for name, version in packages.items()} == yaml_list(announced.output, "install")
    assert yaml_list(announced.output, "remove") == {"datacenter-gpu-manager"}
    names = {STEM + part for part in ("-core", "-cuda13", "-proprietary", "-proprietary-cuda13")}
    assert packages.keys() == names == dcgm.site.held()
    assert len(set(packages.values())) == 1
    assert {version.partition(":")[0] for version in packages.values()} == {"1"}


def test_the_exporter_of_dcgm_4_stays_and_parts_move_along(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    assert f"{EXPORTER} 4.6.0-4.8.3-1 installed" in dcgm.site.packages()
    before = dcgm.site.snapshot()
    dcgm.done("-e", "dcgm_proprietary=false")
    assert versions(dcgm.site).keys() == {f"{STEM}-core", f"{STEM}-cuda13"}
    dcgm.done()
    assert dcgm.site.snapshot() == before


def test_the_service_is_enabled_bound_to_a_gpu_and_alone(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    assert dcgm.site.sh("systemctl is-enabled nvidia-dcgm.service").strip() == "enabled"
    assert dcgm.site.sh("systemctl is-enabled dcgm.service || true").strip() == "disabled"
    assert dcgm.site.sh("systemctl is-active dcgm.service || true").strip() == "inactive"
    assert "exit-condition" not in dcgm.site.sh("systemctl start nvidia-dcgm; systemctl show -p Result nvidia-dcgm")
    dcgm.site.sh("systemctl stop nvidia-dcgm; systemctl reset-failed")


def test_a_second_run_changes_nothing_and_an_installed_version_is_kept(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    before = dcgm.site.snapshot()
    run = dcgm.done()
    assert run.recap["changed"] == 0, run.changed
    assert dcgm.site.snapshot() == before
    dcgm.done("-e", "dcgm_version=4.5.1")
    older = versions(dcgm.site)
    assert {version.partition("-")[0] for version in older.values()} == {"1:4.5.1"}
    kept = dcgm.done()
    assert kept.recap["changed"] == 0, kept.changed
    dcgm.done("-e", "dcgm_version=newest")
    assert dcgm.site.snapshot() == before


def test_what_is_damaged_is_repaired_and_nothing_else(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    before = dcgm.site.snapshot()
    dcgm.site.sh(
        f"apt-mark unhold {STEM}-core; apt-get purge -y -q --allow-change-held-packages {STEM}-cuda13;"
        "systemctl disable --quiet nvidia-dcgm.service"
    )
    for path in OWN_FILES:
        dcgm.site.sh(f"echo '# damaged' > {path}")
    announced = dcgm.done("--check")
    run = dcgm.done()
    assert run.paths == announced.paths == OWN_FILES
    assert dcgm.site.snapshot() == before


def test_a_package_that_vanished_stops_it_and_the_next_run_goes_on(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    vendor = dcgm.site.lab.vendor()
    before = dcgm.site.snapshot()
    dcgm.site.sh("apt-get clean")
    vendor.fault("package-gone", f"{STEM}-core_*")
    try:
        run = dcgm.play("-e", "dcgm_version=4.5.1")
    finally:
        vendor.heal()
    assert run.rc != 0
    assert "interrupted" in run.output
    assert "404" in run.output
    assert versions(dcgm.site).keys() == {
        STEM + part for part in ("-core", "-cuda13", "-proprietary", "-proprietary-cuda13")
    }
    dcgm.done("-e", "dcgm_version=newest")
    assert dcgm.site.snapshot() == before


def test_a_driver_of_the_distribution_has_dcgm_from_nvidia_where_that_is_asked_for(
    dcgm: Roles, installed: tuple[Run, Run], folder: Path
) -> None:
    before = dcgm.site.snapshot()
    both = Roles(dcgm.site, folder / "both", "nvidia_repository", "dcgm")
    both.done("-e", "nvidia_driver_source=debian", "-e", "dcgm_source=nvidia")
    parts = ("-core", "-cuda12", "-proprietary", "-proprietary-cuda12")
    assert versions(dcgm.site).keys() == {STEM + part for part in parts}
    assert "NVIDIA" in dcgm.site.sh("apt-cache policy")
    both.done()
    assert dcgm.site.snapshot() == before


def test_a_fabric_manager_that_no_board_needs_is_not_let_fail(site: Site, folder: Path) -> None:
    fabric = Roles(site, folder / "fabric", "nvidia_fabric")
    assert fabric.done().recap["changed"] == 0
    assert "fabricmanager" not in site.sh("dpkg -l; find /etc/systemd")
    site.sh("apt-get install -y -q nvidia-fabricmanager")
    fabric.done()
    site.sh("systemctl enable --quiet nvidia-fabricmanager; systemctl start nvidia-fabricmanager")
    shown = site.sh("systemctl show -p ActiveState,Result nvidia-fabricmanager").split()
    assert set(shown) == {"ActiveState=inactive", "Result=exec-condition"}
    assert site.sh("systemctl list-units --failed --plain --no-legend") == ""
    fabric.done("-e", "nvidia_fabric_state=absent")
    assert "fabricmanager" not in site.sh("dpkg -l; find /etc/systemd")
    assert fabric.done("-e", "nvidia_fabric_state=absent").recap["changed"] == 0


def test_absent_removes_it(dcgm: Roles, installed: tuple[Run, Run]) -> None:
    announced = dcgm.done("--check", "-e", "dcgm_state=absent")
    run = dcgm.done("-e", "dcgm_state=absent")
    assert announced.paths == run.paths >= OWN_FILES | {MEMORY}
    assert versions(dcgm.site) == {}
    assert f"{EXPORTER} 4.6.0-4.8.3-1 installed" in dcgm.site.packages()
    assert "gpunode-dcgm" not in dcgm.site.sh("find /etc")
    assert dcgm.done("-e", "dcgm_state=absent").recap["changed"] == 0
