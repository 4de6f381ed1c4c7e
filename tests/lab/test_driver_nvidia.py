"""The driver from NVIDIA's repository on a simulated HGX H100: installed, repeated, repaired, moved, removed.

What is refused: test_driver_refusals.py.

The tests of this file share one node and run in their order.
"""

import json

import pytest
from playbook_runs import Run, Site
from vendor_driver import (
    CLOSURE,
    DRIVER_FILES,
    FIRST,
    NEWEST_OF_FIRST,
    REPOSITORY_FILES,
    SECOND,
    TRANSACTIONS,
    VERSION,
    closure,
)

from gpunode.cli import run as run_gpunode

pytest_plugins = ("vendor_driver",)
pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]


def judged(site: Site, capfd: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    """The status of each check and component, as ``gpunode validate`` has it."""
    capfd.readouterr()
    run_gpunode(["validate", "-i", str(site.lab.inventory_path), "--level", "quick", "--format", "json"])
    findings = json.loads(capfd.readouterr().out)["nodes"][0]["findings"]
    return {(finding["check"], finding["component"]): finding["status"] for finding in findings}


def test_the_whole_closure_comes_in_one_version_and_one_transaction(site: Site, provisioned: Run) -> None:
    packages = closure(site)
    assert packages.keys() >= CLOSURE
    assert set(packages.values()) == {FIRST}
    assert packages.keys() == set(site.sh("apt-mark showhold").split())
    assert site.sh(TRANSACTIONS).strip() == "1"
    assert provisioned.paths >= REPOSITORY_FILES | DRIVER_FILES
    assert site.sh("cat /proc/driver/nvidia/version").count(FIRST) == 1
    assert site.sh("dpkg-query -W -f '${Version}' dkms").startswith("1:"), "Debian 12's is too old for NVIDIA's modules"


def test_a_second_run_changes_nothing_and_a_busy_node_may_have_it(site: Site, provisioned: Run) -> None:
    site.node.fault("gpu-busy", "gpu0")
    before = site.snapshot()
    run = site.play(*VERSION)
    after = site.snapshot()
    site.node.heal("gpu-busy")
    assert run.rc == 0, run.output
    assert run.recap["changed"] == 0, run.changed
    assert after == before


def test_what_is_damaged_is_repaired_and_nothing_else(site: Site, provisioned: Run) -> None:
    before = site.snapshot()
    for path in REPOSITORY_FILES | DRIVER_FILES:
        site.sh(f"echo '# damaged' > {path}")
    run = site.play(*VERSION)
    assert run.rc == 0, run.output
    assert {path for path in run.paths if not path.startswith("/boot/")} == REPOSITORY_FILES | DRIVER_FILES
    assert site.snapshot() == before


def test_a_package_that_vanishes_leaves_the_working_stack_and_the_next_run_goes_on(
    site: Site, provisioned: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    request = ("-e", "nvidia_driver_version=595")
    site.lab.vendor().fault("package-gone")
    try:
        broken = site.play(*request)
    finally:
        site.lab.vendor().heal("package-gone")
    assert broken.rc != 0
    assert set(closure(site).values()) == {FIRST}
    assert site.sh("dpkg --audit") == ""

    # And what a dpkg leaves that is killed: one package unpacked and not configured.
    site.sh(f"cd /tmp && apt-get -q download libnvidia-cfg1={SECOND}-1 && dpkg --unpack libnvidia-cfg1_*.deb")
    run = site.play(*request)
    assert run.rc == 0, run.output
    packages = closure(site)
    assert packages.keys() >= CLOSURE
    assert set(packages.values()) == {SECOND}
    assert "a reboot is pending: module " + FIRST in run.output


def test_without_a_restart_validate_names_the_mismatch_and_after_it_all_is_well(
    site: Site, provisioned: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def driver(statuses: dict[tuple[str, str], str]) -> dict[str, str]:
        return {check: status for (check, _), status in statuses.items() if check.startswith("driver.")}

    before = driver(judged(site, capfd))
    assert "fail" in before.values()
    assert site.play("-e", "nvidia_driver_version=keep").recap["changed"] == 0
    site.node.restart()
    site.node.wait()
    after = driver(judged(site, capfd))
    assert "fail" not in after.values(), after
    assert SECOND in site.sh("cat /proc/driver/nvidia/version")


def test_an_idle_node_exchanges_its_module_on_request(site: Site, provisioned: Run) -> None:
    requests = ("-e", "nvidia_driver_flavour=proprietary", "-e", "nvidia_driver_reload=true")
    before = int(site.sh(TRANSACTIONS))
    run = site.play("-e", f"nvidia_driver_version={NEWEST_OF_FIRST}", *requests)
    assert run.rc == 0, run.output
    assert int(site.sh(TRANSACTIONS)) == before + 1
    packages = closure(site)
    assert set(packages.values()) == {NEWEST_OF_FIRST}
    assert "nvidia-kernel-dkms" in packages
    assert "nvidia-kernel-open-dkms" not in packages
    assert NEWEST_OF_FIRST in site.sh("cat /proc/driver/nvidia/version")
    assert "a reboot is pending:" not in run.output


def test_absent_restores_the_node(site: Site, bare: list[str], provisioned: Run) -> None:
    run = site.play("-e", "nvidia_driver_state=absent", "-e", "nvidia_repository_state=absent")
    assert run.rc == 0, run.output
    assert closure(site) == {}
    assert "dkms 1:" not in site.sh("dpkg-query -W -f '${Package} ${Version}\n'")
    assert site.sh("apt-mark showhold") == ""
    left = [line for line in site.snapshot() if line not in bare]
    assert not [line for line in left if "gpunode" in line and "gpunode-lab" not in line], left
    assert site.play("-e", "nvidia_driver_state=absent", "-e", "nvidia_repository_state=absent").recap["changed"] == 0
