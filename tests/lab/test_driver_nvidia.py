"""The driver from NVIDIA's repository on a simulated HGX H100: refused, installed, repeated, moved, switched, removed.

The tests of this file share one node and run in their order.
"""

import json
import os
import re
from collections.abc import Iterator

import pytest
from playbook_runs import Run, Site

from gpunode.cli import run as run_gpunode
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]

FIRST, SECOND = "580.95.05", "595.91.07"
NEWEST_OF_FIRST = "580.178.04"
VERSION = ("-e", f"nvidia_driver_version={FIRST}")
REPOSITORY_FILES = {
    "/etc/apt/sources.list.d/gpunode-nvidia-cuda.sources",
    "/etc/apt/preferences.d/gpunode-nvidia-cuda.pref",
    "/etc/apt/keyrings/gpunode-nvidia-cuda.asc",
}
DRIVER_FILES = {
    "/etc/apt/preferences.d/gpunode-nvidia-driver.pref",
    "/etc/apt/apt.conf.d/52gpunode-nvidia-driver",
    "/etc/modprobe.d/gpunode-nouveau.conf",
    "/etc/systemd/system/nvidia-persistenced.service.d/gpunode.conf",
}
# The roles under test alone: what else site.yml brings is tested with those roles.
PARTS = [f"nvidia_{role}_{part}" for role in ("repository", "driver") for part in ("install", "configure")]
CLOSURE = {"nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-fabricmanager", "libnvidia-nscq", "libcuda1"}

# A package as another publisher would make it: name, version, maintainer, and fields more.
PACKAGE = r"""
package() {
    rm -rf /tmp/made && mkdir -p /tmp/made/DEBIAN
    printf '%s\n' "Package: $1" "Version: $2" "Maintainer: $3" 'Architecture: all' 'Description: made by a test' \
        > /tmp/made/DEBIAN/control
    dpkg-deb --build /tmp/made "/tmp/$1.deb" > /dev/null
}
"""
DEBIANS = (
    PACKAGE
    + """
package libnvidia-ml1-dev 535.309.01-1 'Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.alioth.debian.org>'
sed -i 's/^Version/Source: nvidia-graphics-drivers\\nVersion/' /tmp/made/DEBIAN/control
dpkg-deb --build /tmp/made /tmp/libnvidia-ml1-dev.deb
dpkg --install /tmp/libnvidia-ml1-dev.deb
"""
)
RUNFILE = r"""
printf '%s\n' '#!/bin/sh' 'echo "$@" > /root/uninstalled; rm "$0"' > /usr/bin/nvidia-uninstall
chmod 755 /usr/bin/nvidia-uninstall
"""
DOCKER2 = (
    PACKAGE
    + """
package nvidia-docker2 2.14.0-1 'NVIDIA CORPORATION <cudatools@nvidia.com>'
dpkg --install /tmp/nvidia-docker2.deb
"""
)
HALF = (
    PACKAGE
    + """
package a-users-package 1 'A user <user@example.org>'
printf '%s\\n' '#!/bin/sh' 'exit 1' > /tmp/made/DEBIAN/postinst
chmod 755 /tmp/made/DEBIAN/postinst
dpkg-deb --build /tmp/made /tmp/a-users-package.deb
dpkg --install /tmp/a-users-package.deb || true
"""
)
TRANSACTIONS = "grep -c '^Start-Date' /var/log/apt/history.log || true"


def closure(site: Site) -> dict[str, str]:
    """Installed packages of the driver with their releases; others of NVIDIA have versions of their own, as dkms."""
    form = "${Package} ${Version} ${db:Status-Status} ${Maintainer}\n"
    lines = site.sh(f"dpkg-query -W -f '{form}'").splitlines()
    words = [line.split() for line in lines if "cudatools@nvidia.com" in line and " installed " in line]
    own_versions = re.compile(r"(dh-)?dkms$|libnvidia-egl-|eglexternalplatform|nvidia-driver-pinning-")
    return {name: version.rpartition("-")[0] for name, version, *_ in words if not own_versions.match(name)}


def names_in(run: Run) -> set[str]:
    """Return the names of the refusals that a run reported."""
    return set(re.findall(r"(?m)^ +-? ?- ([a-z0-9-]+): ", run.output))


def judged(site: Site, capfd: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    """The status of each check and component, as ``gpunode validate`` has it."""
    capfd.readouterr()
    run_gpunode(["validate", "-i", str(site.lab.inventory_path), "--level", "quick", "--format", "json"])
    findings = json.loads(capfd.readouterr().out)["nodes"][0]["findings"]
    return {(finding["check"], finding["component"]): finding["status"] for finding in findings}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"test-driver-nvidia-{os.getpid()}")
    try:
        lab.up(1, "debian-12", hardware=["hgx-h100-8"])
        yield Site(lab, "--tags", ",".join([*PARTS, "nvidia_driver_service"]))
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(site: Site) -> list[str]:
    return site.snapshot()


@pytest.fixture(scope="module")
def provisioned(site: Site, bare: list[str]) -> Run:
    run = site.play(*VERSION)
    assert run.rc == 0, run.output
    return run


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ("fabric-manager-lags", "closure-lags", "nvidia_driver_version: "),
        ("unsigned", "repository-unsigned", "nvidia_repository_key"),
        ("expired-key", "repository-key-expired", "nvidia_repository_key"),
        ("unreachable", "repository-unreachable", "nvidia_repository_url"),
        ("html", "repository-answers-html", "nvidia_repository_proxy"),
        ("mid-sync", "repository-mid-sync", "nvidia_repository_url"),
        ("no-dkms", "apt-refuses", "dkms (>= 3.1.8)"),
    ],
)
def test_a_repository_that_will_not_do_is_refused_before_anything_changes(
    site: Site, bare: list[str], fault: str, name: str, words: str
) -> None:
    site.lab.vendor().fault(fault)
    try:
        run = site.play("-e", f"nvidia_driver_version={NEWEST_OF_FIRST}")
    finally:
        site.lab.vendor().heal(fault)
    assert run.rc != 0
    assert names_in(run) == {name}, run.output
    assert words in run.output
    assert site.snapshot() == bare


def test_the_whole_closure_comes_in_one_version_and_one_transaction(site: Site, provisioned: Run) -> None:
    found = closure(site)
    assert found.keys() >= CLOSURE
    assert set(found.values()) == {FIRST}
    assert found.keys() == set(site.sh("apt-mark showhold").split())
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


@pytest.mark.parametrize(
    "command",
    ["apt-get -y upgrade", "unattended-upgrade", "apt-get -y install cuda-drivers", "apt-get -y install nvidia-open"],
)
def test_nothing_of_the_closure_moves_by_other_hands(site: Site, provisioned: Run, command: str) -> None:
    before = closure(site)
    site.sh("apt-get -q update")
    site.sh(f"DEBIAN_FRONTEND=noninteractive {command} || true")
    after = closure(site)
    assert {name: after.get(name) for name in before} == before
    assert set(after.values()) == {FIRST}
    added = sorted(after.keys() - before.keys())
    if added:
        site.sh(f"apt-get -y purge {' '.join(added)}")
    assert closure(site) == before


def test_all_that_stands_in_the_way_is_named_and_nothing_changes(site: Site, provisioned: Run) -> None:
    site.sh(DEBIANS)
    site.sh(RUNFILE)
    site.sh(DOCKER2)
    site.sh(HALF)
    site.sh("mv /etc/apt/apt.conf.d/52gpunode-nvidia-driver /root/; apt-mark hold nvidia-fabricmanager")
    site.node.fault("gpu-busy", "gpu0")
    before = site.snapshot()
    run = site.play("-e", f"nvidia_driver_version={NEWEST_OF_FIRST}")
    after = site.snapshot()
    site.sh("dpkg --purge --force-all a-users-package; mv /root/52gpunode-nvidia-driver /etc/apt/apt.conf.d/")
    assert run.rc != 0
    wanted = {"mixed-sources", "runfile", "nvidia-docker2", "half-configured", "busy"}
    assert names_in(run) >= wanted, run.output
    for switch in ("nvidia_driver_switch: true", "gpunode_allow_busy: true", "dpkg --configure -a"):
        assert switch in " ".join(run.output.split())
    assert after == before


def test_with_the_switches_it_is_done_in_one_transaction(site: Site, provisioned: Run) -> None:
    before = int(site.sh(TRANSACTIONS))
    requests = {"nvidia_driver_version": FIRST, "nvidia_driver_source": "nvidia", "nvidia_driver_switch": True}
    run = site.play("-e", json.dumps({**requests, "gpunode_allow_busy": True}))
    site.node.heal("gpu-busy")
    site.sh("dpkg --purge nvidia-docker2")
    assert run.rc == 0, run.output
    assert int(site.sh(TRANSACTIONS)) == before + 1
    assert "libnvidia-ml1-dev" not in site.sh("dpkg-query -W -f '${Package}\n'").split()
    assert site.sh("cat /root/uninstalled").strip() == "--silent"
    assert set(closure(site).values()) == {FIRST}


def test_holds_of_others_are_refused_by_name_where_they_would_move(site: Site, provisioned: Run) -> None:
    site.sh("mv /etc/apt/apt.conf.d/52gpunode-nvidia-driver /root/")
    before = site.snapshot()
    run = site.play("-e", f"nvidia_driver_version={NEWEST_OF_FIRST}")
    after = site.snapshot()
    site.sh("mv /root/52gpunode-nvidia-driver /etc/apt/apt.conf.d/")
    assert names_in(run) == {"held-packages"}, run.output
    assert after == before


def test_a_lock_is_waited_for_and_then_named(site: Site, provisioned: Run) -> None:
    lock = "f = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    hold = f"import fcntl, time; {lock}; time.sleep(120)"
    site.sh(f'systemd-run --quiet --unit=test-lock python3 -c "{hold}"; sleep 1')
    run = site.play("-e", "preflight_lock_wait_s=5")
    site.sh("systemctl stop test-lock")
    assert "package-lock" in names_in(run), run.output
    assert "python3 (pid " in run.output


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
    found = closure(site)
    assert found.keys() >= CLOSURE
    assert set(found.values()) == {SECOND}
    assert "a reboot is pending: module " + FIRST in run.output


def test_without_a_restart_validate_names_the_mismatch_and_after_it_all_is_well(
    site: Site, provisioned: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def driver(found: dict[tuple[str, str], str]) -> dict[str, str]:
        return {check: status for (check, _), status in found.items() if check.startswith("driver.")}

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
    found = closure(site)
    assert set(found.values()) == {NEWEST_OF_FIRST}
    assert "nvidia-kernel-dkms" in found
    assert "nvidia-kernel-open-dkms" not in found
    assert NEWEST_OF_FIRST in site.sh("cat /proc/driver/nvidia/version")
    assert "a reboot is pending:" not in run.output


def test_absent_gives_the_node_back(site: Site, bare: list[str], provisioned: Run) -> None:
    run = site.play("-e", "nvidia_driver_state=absent", "-e", "nvidia_repository_state=absent")
    assert run.rc == 0, run.output
    assert closure(site) == {}
    assert "dkms 1:" not in site.sh("dpkg-query -W -f '${Package} ${Version}\n'")
    assert site.sh("apt-mark showhold") == ""
    left = [line for line in site.snapshot() if line not in bare]
    assert not [line for line in left if "gpunode" in line and "gpunode-lab" not in line], left
    assert site.play("-e", "nvidia_driver_state=absent", "-e", "nvidia_repository_state=absent").recap["changed"] == 0
