"""The role updates on a lab node: what an automatic upgrade would move, with the policy and without it.

The node has older packages than the archives: of Debian's security updates, of NVIDIA's (simulated) repository, Docker
and the kernel. Its administrator lets unattended-upgrades take all origins, so that nothing but the policy holds back.
"""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from docker_plays import Roles
from playbook_runs import Site

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("gpunode/onnode/pending_updates",)

POLICY, PROGRAM = "/etc/apt/apt.conf.d/53gpunode-updates", "/usr/local/lib/gpunode/pending_updates.py"
RECORD = "/var/lib/gpunode/updates/pending.json"
POLICY_ON = ["-e", "updates_state=present", "-e", "updates_exclude_kernel=true"]
KEPT = re.compile(r"nvidia|cuda|datacenter-gpu|docker|containerd|runc|linux-(image|headers)")
# Security updates are in a suite of their own, which Debian's point releases follow later. The test makes one: an
# archive with packages of a higher version, with the Release file of Debian's security suite.
ARCHIVE = r"""
apt-get update -q
apt-get install -y -q --no-install-recommends docker.io dpkg-dev
mkdir -p /srv/archive && cd /srv/archive
for name in hostname docker.io linux-image-cloud-amd64; do
    rm -rf made && mkdir -p made/DEBIAN
    version=$(dpkg-query -W -f '${Version}' $name)
    architecture=$(dpkg-query -W -f '${Architecture}' $name)
    printf '%s\n' "Package: $name" "Version: $version+test1" 'Maintainer: a test' "Architecture: $architecture" \
        'Description: made by a test' > made/DEBIAN/control
    dpkg-deb --build made $name.deb
done
rm -rf made
mkdir -p dists/bookworm-security/main/binary-amd64
dpkg-scanpackages --multiversion . > dists/bookworm-security/main/binary-amd64/Packages
cd dists/bookworm-security
{ printf '%s\n' 'Origin: Debian' 'Label: Debian-Security' 'Suite: oldstable-security' 'Codename: bookworm-security' \
    'Date: '"$(date -Ru)" 'Components: main' 'Architectures: amd64' 'SHA256:'
  printf ' %s %s %s\n' $(sha256sum main/binary-amd64/Packages | cut -d' ' -f1) \
    $(stat -c %s main/binary-amd64/Packages) main/binary-amd64/Packages
} > Release
echo 'deb [trusted=yes] file:/srv/archive bookworm-security main' > /etc/apt/sources.list.d/test.list
echo 'Unattended-Upgrade::Origins-Pattern { "origin=*"; };' > /etc/apt/apt.conf.d/51test
apt-get install -y -q --allow-downgrades datacenter-gpu-manager-4-core=1:4.5.1-1
apt-get update -q
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    lab = Lab(f"wall-updates-{os.getpid()}")
    try:
        lab.up(1, "debian-12", ["l40s-4"])
        site = Site(lab)
        Roles(site, tmp_path_factory.mktemp("repository"), "nvidia_repository").done()
        site.sh(ARCHIVE)
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def updates(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Roles:
    return Roles(site, tmp_path_factory.mktemp("plays"), "updates")


def would_move(site: Site) -> set[str]:
    """Packages that an automatic upgrade would install now."""
    reply = site.sh("unattended-upgrade --dry-run --debug 2>&1")
    matches = re.findall(r"(?m)^Packages that will be upgraded: (.*)$", reply)
    assert matches or "No packages found that can be upgraded unattended" in reply, reply
    return set(matches[-1].split()) if matches else set()


def record(site: Site) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(site.sh(f"cat {RECORD}"))
    return content


def test_an_automatic_upgrade_moves_security_updates_and_nothing_of_the_gpu_stack(updates: Roles) -> None:
    site = updates.site
    before = would_move(site)
    # Without the policy all of it would move: otherwise what follows would prove nothing.
    assert {"hostname", "docker.io", "linux-image-cloud-amd64", "datacenter-gpu-manager-4-core"} <= before
    announced = updates.done("--check", *POLICY_ON)
    assert would_move(site) == before
    run = updates.done(*POLICY_ON)
    assert run.paths == announced.paths >= {POLICY, PROGRAM}
    after = would_move(site)
    assert "hostname" in after
    assert [name for name in after if KEPT.search(name)] == []
    assert before - after == {name for name in before if KEPT.search(name)}


def test_a_second_run_changes_nothing_and_damage_is_repaired(updates: Roles) -> None:
    site = updates.site
    before = site.snapshot()
    assert updates.done(*POLICY_ON, "-e", "gpunode_force=true").recap["changed"] == 0
    assert site.snapshot() == before
    site.sh(f"echo '// damaged' >> {POLICY}; chmod 600 {PROGRAM}")
    run = updates.done(*POLICY_ON)
    assert {POLICY, PROGRAM} <= run.paths
    assert site.snapshot() == before


def test_the_kernel_moves_where_its_modules_are_built_by_dkms(updates: Roles) -> None:
    updates.done("-e", "updates_state=present")
    assert "linux-image-cloud-amd64" in would_move(updates.site)
    updates.done(*POLICY_ON)
    assert "linux-image-cloud-amd64" not in would_move(updates.site)


def test_since_when_security_updates_wait_is_recorded(updates: Roles) -> None:
    site = updates.site
    updates.done(*POLICY_ON)
    site.sh("apt-get update -q")
    rows = {row["package"]: row for row in record(site)["pending"]}
    assert {"docker.io", "linux-image-cloud-amd64"} <= rows.keys()
    assert "hostname" not in rows
    assert rows["docker.io"]["version"] == rows["docker.io"]["installed"] + "+test1"
    # The time of the first sight stays.
    old = "2026-01-02T03:04:05+00:00"
    site.sh(f'sed -i \'s/"since": .*/"since": "{old}"/\' {RECORD}; apt-get update -q')
    assert {row["since"] for row in record(site)["pending"]} == {old}


def test_needrestart_reads_the_list(updates: Roles) -> None:
    site = updates.site
    site.sh("apt-get install -y -q --no-install-recommends needrestart")
    perl = "our %nrconf; do q(/etc/needrestart/needrestart.conf); print join(qq(\\n), keys %{$nrconf{override_rc}})"
    keys = site.sh(f"perl -e '{perl}'")
    for unit in ("docker", "nvidia-", "slurmd"):
        assert f"^{unit})" in keys
    site.sh("needrestart -b -r l")


def test_bad_settings_are_refused(updates: Roles) -> None:
    before = updates.site.snapshot()
    run = updates.play(*POLICY_ON, "-e", '{"updates_exclude": ["slurm-("]}')
    assert run.rc != 0
    assert "is not a regular expression" in run.output
    assert updates.site.snapshot() == before


def test_absent_restores_the_distributions_settings(updates: Roles) -> None:
    run = updates.done("-e", "updates_state=absent")
    assert run.paths >= {POLICY, PROGRAM}
    assert "docker.io" in would_move(updates.site)
    assert updates.site.sh("find /etc /usr/local/lib /var/lib/gpunode -path '*gpunode*updates*'") == ""
    assert updates.done("-e", "updates_state=absent").recap["changed"] == 0
