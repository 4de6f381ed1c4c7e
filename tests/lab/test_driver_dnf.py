"""The repository and the driver through a real dnf and a real DKMS, on a look-alike of Rocky.

The tests of this file share one node and run in their order.
"""

import os
import re
from collections.abc import Iterator

import pytest
from playbook_runs import Site, yaml_list

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = (
    "roles/nvidia_driver/",
    "roles/nvidia_repository/",
    "gpunode/provisioning/transaction",
    "plugins/module_utils/dnf",
)

OLDER = ("-e", "nvidia_driver_version=580.95.05")
BEFORE_580 = ("-e", "nvidia_driver_version=570")
SMI = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
CHANGE = "Change packages"
BOTH = {"nvidia-driver-cuda", "kmod-nvidia-open-dkms", "nvidia-kmod-common", "libnvidia-ml", "nvidia-persistenced"}
# rpm's database, dnf's streams, locks and repositories; dnf's cache of repositories is not included.
STATE = """
rpm --query --all --queryformat '%{NAME} %{EVR}\\n' | sort
grep -r . /etc/dnf/modules.d /etc/dnf/plugins/versionlock.list /etc/yum.repos.d /etc/pki/rpm-gpg 2>/dev/null || true
"""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"dnf-driver-{os.getpid()}")
    try:
        lab.up(1, "rocky-9", ["hgx-h100-8"])
        site = Site(lab, "-e", '{"gpunode_roles": ["nvidia_repository", "nvidia_driver", "nvidia_fabric"]}')
        site.sh("dnf --quiet --assumeyes install epel-release")  # dkms is EPEL's
        yield site
    finally:
        lab.down()


def driver(site: Site) -> dict[str, str]:
    """Installed packages of the driver: name to version, without epoch and release."""
    reply = site.sh("rpm --query --all --queryformat '%{NAME} %{VERSION}\\n' '*nvidia*'")
    return dict(line.split() for line in reply.splitlines())


def transactions(site: Site) -> int:
    return int(site.sh("dnf --quiet history list | grep -c '^ *[0-9]'"))


def test_it_announces_and_changes_nothing(site: Site) -> None:
    before = site.sh(STATE)
    run = site.play("--check", *OLDER)
    assert run.rc == 0, run.output[-3000:]
    assert "enable module stream nvidia-driver:580-open" in run.output
    announced = {line.split("=")[0] for line in yaml_list(run.output, "install")}
    assert announced >= BOTH | {"nvidia-fabricmanager", "libnvidia-nscq"}
    locked = {re.sub("-[03]:580[.]95[.]05-.*", "", line) for line in yaml_list(run.output, "hold")}
    assert locked >= BOTH | {"nvidia-fabricmanager", "libnvidia-nscq"}
    assert locked <= announced
    assert site.sh(STATE) == before


def test_one_transaction_brings_the_closure_in_one_version(site: Site) -> None:
    before = transactions(site)
    run = site.play(*OLDER)
    assert run.rc == 0, run.output[-3000:]
    have = driver(site)
    assert set(have) >= BOTH | {"nvidia-fabricmanager", "libnvidia-nscq"}
    assert set(have.values()) == {"580.95.05"}
    assert transactions(site) == before + 1
    again = site.play(*OLDER)
    assert (again.rc, again.recap["changed"]) == (0, 0), again.changed


def test_the_module_is_built_and_loaded(site: Site) -> None:
    kernel = site.sh("uname -r").strip()
    assert kernel.endswith(".x86_64")
    assert f"nvidia-open/580.95.05, {kernel}, x86_64: installed" in site.sh("dkms status")
    assert "580.95.05" in site.sh("cat /proc/driver/nvidia/version")
    site.node.restart()
    assert site.sh(SMI).split() == ["580.95.05"] * 8


def test_a_module_that_the_packages_failed_to_build_is_built(site: Site) -> None:
    """NVIDIA's scriptlets ignore the result of DKMS; one recorded RHEL 9 was left with modules that were only added."""
    site.sh("dkms uninstall -m nvidia-open -v 580.95.05 -k $(uname -r)")
    assert ": installed" not in site.sh("dkms status")
    run = site.play(*OLDER)
    assert run.rc == 0, run.output[-3000:]
    assert set(run.changed) == {"Build and install the module for kernels that lack it"}
    assert ": installed" in site.sh("dkms status")
    assert site.play(*OLDER).recap["changed"] == 0


def test_a_module_that_cannot_be_built_fails_the_run_with_the_compilers_errors(site: Site) -> None:
    source = "/usr/src/nvidia-open-580.95.05/nvidia.c"
    site.sh("dkms unbuild -m nvidia-open -v 580.95.05 -k $(uname -r)")
    site.sh(f"cp {source} /root/ && echo 'this is not C' >> {source}")
    run = site.play(*OLDER)
    site.sh(f"cp /root/nvidia.c {source}")
    assert run.rc != 0
    assert "error:" in run.output
    assert site.play(*OLDER).rc == 0
    assert "580.95.05" in site.sh("modinfo --field version nvidia")


def test_nothing_of_it_moves_by_itself(site: Site) -> None:
    assert "580.178.04" in site.sh("dnf --quiet --disableplugin=versionlock list --upgrades")
    before = driver(site)
    site.sh("dnf --assumeyes upgrade")
    assert driver(site) == before
    site.sh("! dnf --assumeyes install nvidia-open-580.178.04")
    assert driver(site) == before


def test_a_damaged_lock_list_is_repaired_and_other_lines_stay(site: Site) -> None:
    path = "/etc/dnf/plugins/versionlock.list"
    site.sh(f"sed -i /nvidia-fabricmanager/d {path} && echo 'somebodys-tool-1.0-1.*' >> {path}")
    run = site.play(*OLDER)
    assert (run.rc, set(run.changed)) == (0, {CHANGE}), run.output[-3000:]
    text = site.sh(f"cat {path}")
    assert re.search("(?m)^nvidia-fabricmanager-0:580[.]95[.]05-", text)
    assert "somebodys-tool-1.0-1.*" in text


def test_locks_of_others_are_refused_by_name(site: Site) -> None:
    path = "/etc/dnf/plugins/versionlock.list"
    site.sh(f"echo 'libnvidia-ml-3:580.95.05-1*' >> {path}")
    before = site.sh(STATE)
    run = site.play(*BEFORE_580)
    assert run.rc != 0
    assert "held-packages: libnvidia-ml-3:580.95.05-1*" in run.output.replace("\n", " ")
    assert site.sh(STATE) == before
    site.sh(f"sed -i '/^libnvidia-ml-3:580.95.05-1[*]$/d' {path}")


def test_a_repository_out_of_reach_is_refused(site: Site) -> None:
    before = site.sh(STATE)
    vendor = site.lab.vendor()
    vendor.fault("unreachable")
    try:
        run = site.play(*BEFORE_580)
    finally:
        vendor.heal()
    assert run.rc != 0
    assert "repository-unreachable:" in run.output
    assert site.sh(STATE) == before


def test_another_branch_comes_in_one_transaction_with_the_names_that_it_has(site: Site) -> None:
    before = transactions(site)
    run = site.play(*BEFORE_580)
    assert run.rc == 0, run.output[-3000:]
    assert run.changed[CHANGE] == [""]
    have = driver(site)
    assert set(have) >= BOTH | {"nvidia-fabric-manager"}
    assert "nvidia-fabricmanager" not in have
    assert set(have.values()) == {"570.211.01"}
    assert "stream=570-open" in site.sh("cat /etc/dnf/modules.d/nvidia-driver.module")
    assert transactions(site) == before + 1
    again = site.play(*BEFORE_580)
    assert (again.rc, again.recap["changed"]) == (0, 0), again.changed


def test_packages_that_are_signed_by_another_key_do_not_come(site: Site) -> None:
    wrong = str(site.lab.inventory_path.with_name("vendor-container-toolkit.asc"))
    site.sh("rpm --erase --allmatches gpg-pubkey")
    before = driver(site)
    run = site.play("-e", f"nvidia_repository_key={wrong}", *OLDER)
    assert run.rc != 0
    assert "repository-unsigned:" in run.output
    assert driver(site) == before
    assert "stream=570-open" in site.sh("cat /etc/dnf/modules.d/nvidia-driver.module")


def test_it_is_removed_again(site: Site) -> None:
    gone = ("-e", "nvidia_driver_state=absent", "-e", "nvidia_repository_state=absent")
    run = site.play(*gone)
    assert run.rc == 0, run.output[-3000:]
    assert driver(site) == {}
    assert site.sh("dkms status | grep nvidia || true") == ""
    left = site.sh(STATE)
    assert "gpunode" not in left
    assert "state=enabled" not in left
    assert "somebodys-tool-1.0-1.*" in left
    again = site.play(*gone)
    assert (again.rc, again.recap["changed"]) == (0, 0), again.changed
