"""Look-alikes of Ubuntu and Rocky in front of the vendor repository: kernels, precompiled modules, module streams.

Rocky is rpm logic alone: a real dnf and a real rpm database in a Debian tree, in which no module is built.
"""

import re

import pytest
from vendor_node import Shell

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = ("gpunode/lab/packages/", "gpunode/lab/repositories/")

FIRST, SECOND = "6.8.0-60-generic", "6.8.0-63-generic"


def on(lab: Lab, system: str) -> Shell:
    """A shell on the lab's one node of that system; look-alikes of other systems make room for it."""
    return Shell(next(node for node in lab.up(1, system) if node.os == system))


@pytest.fixture(scope="module")
def ubuntu(lab: Lab) -> Shell:
    return on(lab, "ubuntu-24.04")


@pytest.fixture(scope="module")
def rocky(lab: Lab) -> Shell:
    shell = on(lab, "rocky-9")
    shell.fetch(f"{lab.vendor().urls()['rhel9']}/cuda-rhel9.repo", "/etc/yum.repos.d/cuda-rhel9.repo")
    return shell


# --- Ubuntu


def test_an_ubuntu_identifies_itself_and_as_a_look_alike(ubuntu: Shell) -> None:
    assert ubuntu.do(". /etc/os-release && echo $ID $VERSION_ID $VERSION_CODENAME").split() == [
        "ubuntu",
        "24.04",
        "noble",
    ]
    assert ubuntu.do("cat /etc/gpunode/lab-node").splitlines()[0] == "ubuntu-24.04"
    assert "look-alike" in ubuntu.do("cat /etc/gpunode/lab-node")
    assert ubuntu.do("lsb_release --short --description").strip() == "Ubuntu 24.04.3 LTS"


def test_its_kernel_is_a_package_of_its_archive(ubuntu: Shell) -> None:
    assert ubuntu.do("ls /lib/modules").split() == [FIRST]
    assert set(ubuntu.do("ls /boot").split()) >= {f"vmlinuz-{FIRST}", f"initrd.img-{FIRST}", f"config-{FIRST}"}
    ubuntu.do("apt-get update")
    assert ubuntu.would("upgrade --with-new-pkgs")["linux-image-generic"] == "6.8.0-63.66"


def test_precompiled_modules_belong_to_their_kernel_and_are_signed(ubuntu: Shell) -> None:
    release = "580.95.05-0ubuntu0.24.04.1"
    names = ["nvidia-kernel-common-580-server", "nvidia-firmware-580-server-580.95.05", "nvidia-utils-580-server"]
    names += ["libnvidia-compute-580-server"]
    requested = " ".join(f"{name}={release}" for name in names)
    ubuntu.do(f"apt-get --yes --no-install-recommends install {requested} linux-modules-nvidia-580-server-open-{FIRST}")
    output = ubuntu.do(f"modinfo --set-version {FIRST} nvidia")
    assert re.search(r"^version: +580\.95\.05$", output, re.MULTILINE)
    assert re.search(rf"^vermagic: +{re.escape(FIRST)} ", output, re.MULTILINE)
    assert re.search(r"^signer: +Simulated Kernel Module Signing", output, re.MULTILINE)


def test_a_kernel_and_its_modules_move_together(ubuntu: Shell) -> None:
    ubuntu.do("apt-get --yes --no-install-recommends install linux-modules-nvidia-580-server-open-generic")
    assert set(ubuntu.do("ls /lib/modules").split()) == {FIRST, SECOND}
    assert ubuntu.do(f"modinfo --set-version {SECOND} --field version nvidia").strip() == "580.173.02"
    assert ubuntu.do("ls /boot/initrd.img-*").split() == [f"/boot/initrd.img-{FIRST}", f"/boot/initrd.img-{SECOND}"]


def test_canonicals_branch_590_is_595(ubuntu: Shell) -> None:
    would = ubuntu.would("install linux-modules-nvidia-590-server-open-generic")
    assert f"linux-modules-nvidia-595-server-open-{SECOND}" in would


def test_nvidias_driver_replaces_canonicals_and_dkms_builds_it(ubuntu: Shell) -> None:
    ubuntu.do("apt-get --yes purge '*nvidia*' && apt-get --yes --purge autoremove")
    ubuntu.trust("ubuntu2404")
    ubuntu.do("apt-get --yes install nvidia-driver-pinning-580")
    requested = "linux-headers-generic nvidia-headless-580-open nvidia-utils-580 nvidia-fabricmanager"
    ubuntu.do(f"apt-get --yes --no-install-recommends install {requested}")
    driver = ubuntu.installed(("*nvidia*",))
    assert {version for name, version in driver.items() if "pinning" not in name} == {"580.178.04-1ubuntu1"}
    output = ubuntu.do(f"modinfo --set-version {SECOND} nvidia")
    assert "/updates/dkms/nvidia.ko" in output
    assert re.search(rf"^vermagic: +{re.escape(SECOND)} ", output, re.MULTILINE)
    rc, output = ubuntu.ask("apt-get --simulate install linux-modules-nvidia-580-server-open-generic")
    assert rc != 0 or "Remv nvidia-dkms-580-open" in output or "Remv nvidia-kernel-common-580" in output


# --- Rocky


def test_a_rocky_identifies_itself(rocky: Shell, lab: Lab) -> None:
    assert rocky.do(". /etc/os-release && echo $ID $VERSION_ID $PLATFORM_ID").split() == [
        "rocky",
        "9.6",
        "platform:el9",
    ]
    assert rocky.do("cat /etc/gpunode/lab-node").splitlines()[0] == "rocky-9"
    assert {node.os for node in lab.nodes() if isinstance(node, LabNode)} >= {"rocky-9"}


def test_streams_contain_branch_and_flavour(rocky: Shell) -> None:
    listed = rocky.do("dnf --quiet --assumeyes module list nvidia-driver")
    streams = set(re.findall(r"^nvidia-driver +(\S+)", listed, re.MULTILINE))
    branches = {f"{branch}-{kind}" for branch in (570, 580, 595, 610, 615) for kind in ("open", "dkms")}
    assert streams == {*branches, "open-dkms", "latest-dkms"}


def test_a_stream_keeps_the_driver_in_its_branch_and_keys_are_asked_for(rocky: Shell) -> None:
    rc, output = rocky.ask("dnf --assumeno install nvidia-open")
    assert rc != 0, output  # the default stream has the proprietary modules alone
    rocky.do("dnf --assumeyes module enable nvidia-driver:580-open")
    rc, output = rocky.ask("dnf --assumeyes install nvidia-open")
    assert rc != 0
    assert "nothing provides dkms >= 3.1.8" in output  # that is EPEL's
    rocky.do("dnf --assumeyes install epel-release")
    output = rocky.do("dnf --assumeyes install nvidia-open nvidia-fabricmanager")
    assert "Importing GPG key" in output
    assert versions(rocky) == {"580.178.04"}
    assert "nvidia-fabricmanager" in rocky.do("rpm --query --all")
    assert rocky.do("rpm --query --queryformat '%{VENDOR}|%{RELEASE}' nvidia-open") == "NVIDIA CORPORATION|1.el9"
    assert rocky.ask("dnf --quiet check-update")[0] == 0


def test_another_stream_is_switched_to_in_one_transaction(rocky: Shell) -> None:
    assert rocky.ask("dnf --assumeyes module enable nvidia-driver:595-open")[0] != 0
    rocky.do("dnf --assumeyes module switch-to nvidia-driver:595-open --allowerasing")
    assert versions(rocky) == {"595.91.07"}
    rocky.do("dnf --assumeyes module switch-to nvidia-driver:580-open --allowerasing")
    assert versions(rocky) == {"580.178.04"}


def test_the_fabric_manager_lost_its_hyphen(rocky: Shell) -> None:
    assert rocky.ask("dnf --assumeno install nvidia-fabric-manager")[0] != 0
    rocky.do("dnf --assumeyes remove nvidia-fabricmanager")
    rocky.do("dnf --assumeyes module switch-to nvidia-driver:570-open --allowerasing")
    rocky.do("dnf --assumeyes install nvidia-fabric-manager")
    assert versions(rocky) == {"570.211.01"}


def test_a_locked_version_stays(rocky: Shell) -> None:
    rocky.do("dnf --assumeyes remove '*nvidia*' && dnf --assumeyes module reset nvidia-driver")
    rocky.do("dnf --assumeyes module enable nvidia-driver:580-open")
    rocky.do(
        "dnf --assumeyes install '*nvidia-open-580.95.05*' nvidia-driver-580.95.05 kmod-nvidia-open-dkms-580.95.05 "
        "nvidia-kmod-common-580.95.05 nvidia-driver-cuda-580.95.05 nvidia-modprobe-580.95.05 "
        "nvidia-persistenced-580.95.05"
    )
    assert versions(rocky) == {"580.95.05"}
    assert rocky.ask("dnf --quiet check-update")[0] == 100
    rocky.do("dnf --assumeyes versionlock add '*nvidia*'")
    rocky.do("dnf --assumeyes upgrade")
    assert versions(rocky) == {"580.95.05"}


def versions(rocky: Shell) -> set[str]:
    """The versions of the driver's installed packages."""
    output = rocky.do("rpm --query --all --queryformat '%{NAME} %{VERSION}\\n' '*nvidia*'")
    return {line.split()[1] for line in output.splitlines()}
