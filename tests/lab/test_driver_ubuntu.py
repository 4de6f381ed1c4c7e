"""Ubuntu's own driver on the look-alike of Ubuntu 24.04: the HWE kernel, a transitional branch, the kernel's policy.

The tests of this file share one node and run in their order.
"""

import os
from collections.abc import Iterator

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site, yaml_list

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("roles/nvidia_driver/", "gpunode/stack/")

HWE = "generic-hwe-24.04"
IMAGE, HEADERS = f"linux-image-{HWE}", f"linux-headers-{HWE}"
UNATTENDED = "/etc/apt/apt.conf.d/52gpunode-nvidia-driver"
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-driver.pref"
# As on a server that was installed with the HWE kernel; the release's first kernel is still there.
HWE_KERNEL = f"""
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -y -q --no-install-recommends {IMAGE}
apt-get purge -y -q linux-image-generic
"""

FOREIGN = "/etc/apt/sources.list.d/foreign.list"
LTS_KERNEL = f"""
apt-get purge -y -q {IMAGE}
mkdir -p /tmp/meta/DEBIAN
printf '%s\\n' 'Package: linux-image-generic-lts-24.04' 'Version: 6.14.0-29.29' 'Architecture: all' \\
    'Maintainer: Ubuntu Kernel Team <kernel-team@lists.ubuntu.com>' 'Description: made by a test' \\
    > /tmp/meta/DEBIAN/control
dpkg-deb --build /tmp/meta /tmp/meta.deb
dpkg --install /tmp/meta.deb
"""


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    lab = Lab(f"test-driver-ubuntu-{os.getpid()}")
    try:
        lab.up(1, "ubuntu-24.04", ["t4-1"])
        site = Site(lab)
        site.sh(HWE_KERNEL)
        yield Roles(site, tmp_path_factory.mktemp("plays"), "nvidia_driver")
    finally:
        lab.down()


def on(roles: Roles, version: str, *arguments: str) -> Run:
    """A run that asks Ubuntu's archive for a branch."""
    return roles.done("-e", "nvidia_driver_source=ubuntu", "-e", f"nvidia_driver_version={version}", *arguments)


def versions(site: Site) -> dict[str, str]:
    return dict(line.split()[:2] for line in site.packages() if line.endswith(" installed"))


@pytest.fixture(scope="module")
def installed(roles: Roles) -> tuple[Run, Run]:
    """The announcement, and what was done."""
    before = roles.site.snapshot()
    announced = on(roles, "580", "--check")
    assert roles.site.snapshot() == before
    return announced, on(roles, "580")


def test_the_modules_are_those_of_the_hwe_kernel_that_is_installed(roles: Roles, installed: tuple[Run, Run]) -> None:
    announced, _ = installed
    packages = versions(roles.site)
    coming = {entry.partition("=")[0] for entry in yaml_list(announced.output, "install")}
    assert {name for name in coming if "-generic" in name} >= {f"linux-modules-nvidia-580-server-open-{HWE}", HEADERS}
    assert coming <= packages.keys()
    assert not {name for name in packages if name.endswith("-generic") and "hwe" not in name and name.count(".") == 0}
    assert "linux-image-generic" not in packages
    kernel = roles.site.sh("ls /lib/modules | sort -V | tail -n 1").strip()
    assert f"linux-image-{kernel}" in packages
    assert roles.site.sh(f"modinfo -k {kernel} -F version nvidia").startswith("580.")
    assert {IMAGE, HEADERS, f"linux-modules-nvidia-580-server-open-{HWE}"} <= roles.site.held()


def test_a_second_run_changes_nothing(roles: Roles, installed: tuple[Run, Run]) -> None:
    before = roles.site.snapshot()
    run = on(roles, "580")
    assert run.recap["changed"] == 0, run.changed
    assert roles.site.snapshot() == before


def test_a_transitional_branch_is_the_one_that_it_installs(roles: Roles, installed: tuple[Run, Run]) -> None:
    on(roles, "590")
    packages = versions(roles.site)
    driver = {name for name in packages if "nvidia-headless" in name or name.startswith("linux-modules-nvidia-")}
    assert {name for name in driver if "-595-" in name} == driver
    assert f"linux-modules-nvidia-595-server-open-{HWE}" in driver
    again = on(roles, "590")
    assert again.recap["changed"] == 0, again.changed


def test_a_foreign_repository_that_cannot_be_reached_stops_no_run(roles: Roles, installed: tuple[Run, Run]) -> None:
    roles.site.sh(f"echo 'deb http://ppa.invalid/somebody/ppa/ubuntu noble main' > {FOREIGN}")
    try:
        announced = on(roles, "580", "--check")
        on(roles, "580")
        packages = versions(roles.site)
        again = on(roles, "580")
    finally:
        roles.site.sh(f"rm {FOREIGN}")
    assert "Change packages" in announced.changed
    assert f"linux-modules-nvidia-580-server-open-{HWE}" in packages
    assert again.recap["changed"] == 0, again.changed


def test_a_kernel_that_follows_the_archive_is_unheld(roles: Roles, installed: tuple[Run, Run]) -> None:
    assert IMAGE in roles.site.held()
    on(roles, "595", "-e", "nvidia_driver_kernel_policy=follow")
    assert roles.site.held() == set()
    assert "linux-image" not in roles.site.sh(f"cat {UNATTENDED}")
    assert "Pin: version 595.*" in roles.site.sh(f"cat {PREFERENCES}").splitlines()
    again = on(roles, "595", "-e", "nvidia_driver_kernel_policy=follow")
    assert again.recap["changed"] == 0, again.changed
    on(roles, "595")
    assert {IMAGE, HEADERS} <= roles.site.held()


def test_a_kernel_without_signed_modules_is_refused_before_anything_changes(
    roles: Roles, installed: tuple[Run, Run]
) -> None:
    roles.done("-e", "nvidia_driver_state=absent")
    assert IMAGE not in roles.site.held()
    # A flavour that the archive has a kernel and no modules for.
    roles.site.sh(LTS_KERNEL)
    before = roles.site.snapshot()
    run = roles.play("-e", "nvidia_driver_source=ubuntu", "-e", "nvidia_driver_version=580")
    assert run.rc != 0
    assert "package-gone: " in run.output
    assert "linux-modules-nvidia-580-server-open-generic-lts-24.04" in run.output
    assert roles.site.snapshot() == before
