"""The driver from the recorded repositories on each Ubuntu and Debian: bare, repeated, up the branches and down again.

One node for each system; its tests run in their order. GPUs differ, so that each kind is met somewhere. The variable
GPUNODE_TEST_DRIVER_SYSTEMS names the systems, comma between them, or all: each takes as long as all of Ubuntu 24.04's.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playbook_runs import Run, Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3600)]
CONCERNS = ("roles/nvidia_driver/", "roles/nvidia_repository/", "plugins/")

SYSTEMS = {
    # hardware, first branch, the others in the order in which the node is moved to them
    "ubuntu-22.04": ("t4-1", "570", ("580", "595", "610", "580")),
    "ubuntu-24.04": ("hgx-h100-8", "570", ("580", "595", "610", "595", "580", "570")),
    "ubuntu-26.04": ("l40s-4", "595", ("610", "595")),
    "debian-12": ("l40s-4", "595", ("610", "580")),
    "debian-13": ("hgx-h100-8", "580", ("595", "610")),
}
TOO_OLD_DKMS = ("ubuntu-22.04", "ubuntu-24.04", "debian-12")
VERSION_OF = "dpkg-query -W -f '${{Version}}' {}"
PARTS = [f"nvidia_{role}_{part}" for role in ("repository", "driver") for part in ("install", "configure", "service")]


CHOSEN = os.environ.get("GPUNODE_TEST_DRIVER_SYSTEMS", "ubuntu-24.04")


@pytest.fixture(scope="module", params=SYSTEMS if CHOSEN == "all" else CHOSEN.split(","))
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def site(system: str) -> Iterator[Site]:
    lab = Lab(f"matrix-{system.replace('.', '-')}-{os.getpid()}")
    try:
        lab.up(1, system, hardware=[SYSTEMS[system][0]])
        yield Site(lab, "--tags", ",".join(PARTS))
    finally:
        lab.down()


def to(site: Site, branch: str) -> Run:
    run = site.play("-e", f"nvidia_driver_version={branch}")
    assert run.rc == 0, run.output[-4000:]
    return run


def closure(site: Site) -> dict[str, str]:
    """Installed packages that the role holds, with their releases."""
    held = site.held()
    rows = (line.split()[:2] for line in site.packages())
    return {name: version.partition(":")[2] or version for name, version in rows if name in held}


def assert_whole(site: Site, system: str, branch: str) -> None:
    """One release of the branch, and nvidia-smi answers with it after a restart."""
    releases = {version.rpartition("-")[0] for version in closure(site).values()}
    assert len(releases) == 1, closure(site)
    (release,) = releases
    assert release.startswith(f"{branch}.")
    dkms = site.sh("dpkg-query -W -f '${Version}' dkms")
    assert dkms.startswith("1:") == (system in TOO_OLD_DKMS), dkms
    site.node.restart()
    site.node.wait()
    assert release in site.sh("nvidia-smi --query-gpu=driver_version --format=csv,noheader")


@pytest.fixture(scope="module")
def installed(site: Site, system: str) -> Run:
    """The first run; an Ubuntu has libxnvctrl0 before, which hwloc installs and which is not a driver."""
    if system.startswith("ubuntu"):
        site.sh("apt-get --quiet update && apt-get --quiet --yes install libhwloc-plugins")
        assert site.sh(VERSION_OF.format("libxnvctrl0")).startswith("510.47.03-0ubuntu")
    return to(site, SYSTEMS[system][1])


def test_a_bare_node_gets_it(site: Site, system: str, installed: Run) -> None:
    assert_whole(site, system, SYSTEMS[system][1])
    if system.startswith("ubuntu"):
        assert site.sh(VERSION_OF.format("libhwloc-plugins"))


def test_the_second_run_changes_nothing(site: Site, system: str, installed: Run) -> None:
    before = site.snapshot()
    run = to(site, SYSTEMS[system][1])
    assert (run.recap["changed"], site.snapshot()) == (0, before), run.changed


def test_every_other_branch_follows_in_one_transaction(site: Site, system: str, installed: Run) -> None:
    count = "grep -c '^Start-Date' /var/log/apt/history.log || true"
    for branch in SYSTEMS[system][2]:
        before = int(site.sh(count))
        to(site, branch)
        assert int(site.sh(count)) == before + 1
        assert site.sh("dpkg --audit") == ""
        assert_whole(site, system, branch)


def test_a_run_that_is_cut_off_while_dpkg_works_is_finished_by_the_next(
    site: Site, system: str, installed: Run
) -> None:
    branches = SYSTEMS[system][2]
    branch = next(branch for branch in branches if branch != branches[-1])
    with ThreadPoolExecutor(1) as pool:
        cut = pool.submit(site.play, "-e", f"nvidia_driver_version={branch}")
        deadline = time.monotonic() + 1200
        while site.sh("pgrep -f '^/usr/bin/dpkg .*--(unpack|configure)' || true") == "":
            assert not cut.done(), cut.result().output[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.3)
        site.node.container.kill()  # as a power cut
        site.node.restart()
        assert cut.result().rc != 0
    assert site.sh("dpkg --audit || true") != ""
    to(site, branch)
    assert site.sh("dpkg --audit") == ""
    assert site.sh("ls /usr/sbin/policy-rc.d 2>/dev/null || true") == ""
    assert_whole(site, system, branch)
    assert to(site, branch).recap["changed"] == 0


def test_absent_removes_the_driver_and_puts_dkms_back(site: Site, system: str, installed: Run) -> None:
    run = site.play("-e", "nvidia_driver_state=absent", "-e", "nvidia_repository_state=absent")
    assert run.rc == 0, run.output[-4000:]
    assert site.held() == set()
    assert not [line for line in site.packages() if line.startswith(("nvidia-", "libnvidia-", "dkms 1:"))]
    if system.startswith("ubuntu"):
        assert site.sh(VERSION_OF.format("libhwloc-plugins"))
