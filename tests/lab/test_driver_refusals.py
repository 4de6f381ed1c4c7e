"""What the role nvidia_driver refuses with NVIDIA's repository, and that nobody else moves its packages.

The tests of this file share one node and run in their order.
"""

import json
import re

import pytest
from playbook_runs import Run, Site
from vendor_driver import FIRST, NEWEST_OF_FIRST, TRANSACTIONS, closure

pytest_plugins = ("vendor_driver",)
pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = (
    "roles/nvidia_driver/",
    "roles/nvidia_repository/",
    "roles/preflight/",
    "gpunode/provisioning/preflight",
    "gpunode/lab/packages/",
)

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


def names_in(run: Run) -> set[str]:
    """Return the names of the refusals that a run reported."""
    return set(re.findall(r"(?m)^ +-? ?- ([a-z0-9-]+): ", run.output))


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
    expected = {"mixed-sources", "runfile", "nvidia-docker2", "half-configured", "busy"}
    assert names_in(run) >= expected, run.output
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
    site.sh(f'systemd-run --quiet --unit=test-lock python3 -I -c "{hold}"; sleep 1')
    run = site.play("-e", "preflight_lock_wait_s=5")
    site.sh("systemctl stop test-lock")
    assert "package-lock" in names_in(run), run.output
    assert "python3 (pid " in run.output
