"""The vendor repository as a real apt and a real DKMS see it, in a Debian 12 node; its faults."""

from collections.abc import Iterator

import pytest
from vendor_node import Shell

from gpunode.errors import UsageError
from gpunode.lab import Lab
from gpunode.lab.repositories import FAULTS, Vendor, VendorImages, start

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = ("gpunode/lab/packages/", "gpunode/lab/repositories/")

OLDER, NEWER, NEXT = "580.95.05-1", "580.178.04-1", "615.71.09-1"
DRIVER = ("*nvidia*", "libcuda*", "libnvsdm", "firmware-nvidia-gsp")
# apt with NVIDIA's repository alone, and nothing remembered of it
ALONE = (
    "-o Dir::Etc::sourcelist=/etc/apt/sources.list.d/cuda-debian12-x86_64.list -o Dir::Etc::sourceparts=- "
    "-o Dir::State::lists=/tmp/lists -o Acquire::Retries=0"
)


@pytest.fixture(scope="module")
def vendor(lab: Lab) -> Vendor:
    lab.up(1, "debian-12")
    return start(VendorImages(lab.client, print), lab.name, f"gpunode-lab-{lab.name}")


@pytest.fixture(scope="module")
def shell(lab: Lab, vendor: Vendor) -> Shell:
    assert vendor.faults() == []
    shell = Shell(lab.nodes()[0])
    shell.trust("debian12")
    return shell


@pytest.fixture
def fault(vendor: Vendor, shell: Shell) -> Iterator[Vendor]:
    shell.do("rm -rf /tmp/lists && mkdir -p /tmp/lists/partial")
    yield vendor
    vendor.heal()


def test_a_second_start_is_the_same_repository(lab: Lab, vendor: Vendor) -> None:
    again = start(VendorImages(lab.client, print), lab.name, f"gpunode-lab-{lab.name}")
    assert again.container.id == vendor.container.id
    assert again.keys == vendor.keys
    assert len(lab.nodes()) == 1


def test_unpinned_the_meta_of_a_release_drifts_to_the_newest_branch(shell: Shell) -> None:
    would = shell.would("install nvidia-open=595.91.07-1")
    assert would["nvidia-open"] == "595.91.07-1"
    assert would["nvidia-kernel-open-dkms"] == NEXT
    assert would["libnvidia-ml1"] == NEXT


def test_nvidias_dkms_has_an_epoch_and_comes_where_debians_is_too_old(shell: Shell) -> None:
    assert shell.would("install nvidia-kernel-open-dkms")["dkms"] == "1:3.4.1-1"
    assert "3.0.10" in shell.do("apt-cache madison dkms")


def test_pinned_and_installed_the_closure_has_one_version_and_stays(shell: Shell) -> None:
    shell.do("apt-get --yes install nvidia-driver-pinning-580.95.05")
    requested = "nvidia-kernel-open-dkms nvidia-driver-cuda nvidia-fabricmanager libnvidia-nscq nvidia-imex libnvsdm"
    shell.do(f"apt-get --yes --no-install-recommends install linux-headers-cloud-amd64 {requested} nvlsm")
    closure = shell.installed(DRIVER)
    assert set(requested.split()) <= set(closure)
    assert set(closure.values()) == {OLDER}
    for command in ("upgrade", "dist-upgrade", "install cuda-drivers-580"):
        rc, output = shell.ask(f"apt-get --simulate {command}")
        moved = [line for line in output.splitlines() if line.startswith("Inst ") and "nvidia" in line.split()[1]]
        assert not [line for line in moved if NEWER in line or NEXT in line], (rc, moved)


def test_dkms_built_modules_that_modinfo_reads(shell: Shell) -> None:
    kernel = shell.do("ls /lib/modules").strip()
    status = shell.do("dkms status").strip()
    assert status == f"nvidia-open/580.95.05, {kernel}, x86_64: installed"
    for module in ("nvidia", "nvidia-uvm", "nvidia-modeset", "nvidia-drm", "nvidia-peermem"):
        output = shell.do(f"modinfo --set-version {kernel} --field version {module}")
        assert output.strip() == "580.95.05", module
    assert shell.do(f"modinfo --set-version {kernel} --field license nvidia").strip() == "Dual MIT/GPL"
    assert shell.do(f"modinfo --set-version {kernel} --field depends nvidia-uvm").strip() == "nvidia"
    assert shell.do(f"modinfo --set-version {kernel} --field vermagic nvidia").split()[0] == kernel


def test_the_loader_finds_the_libraries(shell: Shell) -> None:
    cache = shell.do("ldconfig --print-cache")
    for soname in ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-nscq.so.2"):
        assert soname in cache
    real = shell.do("readlink -e /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").strip()
    assert real.endswith("/libnvidia-ml.so.580.95.05")
    shell.do(f'python3 -c "import ctypes; ctypes.CDLL(\\"{real}\\")"')


def test_without_its_pin_the_driver_moves_on_and_dkms_follows(shell: Shell) -> None:
    shell.do("apt-get --yes purge nvidia-driver-pinning-580.95.05")
    assert shell.would("dist-upgrade")["nvidia-kernel-open-dkms"] == NEXT
    shell.do("apt-get --yes install nvidia-driver-pinning-580 && apt-get --yes dist-upgrade")
    assert set(shell.installed(DRIVER).values()) == {NEWER, "580-2"}
    assert "nvidia-open/580.178.04" in shell.do("dkms status")
    assert "580.95.05" not in shell.do("dkms status; ls /usr/src")


def test_another_flavour_replaces_this_one(shell: Shell) -> None:
    shell.do("apt-get --yes --no-install-recommends install nvidia-kernel-dkms")
    assert "nvidia-kernel-open-dkms" not in shell.installed(DRIVER)
    assert shell.do("dkms status").startswith("nvidia/580.178.04")
    kernel = shell.do("ls /lib/modules").strip()
    assert shell.do(f"modinfo --set-version {kernel} --field license nvidia").strip() == "NVIDIA"


def test_what_a_package_left_goes_with_it(shell: Shell) -> None:
    shell.do("apt-get --yes purge '*nvidia*' 'libcuda*' libnvsdm && apt-get --yes --purge autoremove")
    assert shell.installed(DRIVER) == {}
    assert "nvidia" not in shell.do("dkms status; ldconfig --print-cache; ls /usr/src /etc/apt/preferences.d")
    assert shell.ask("systemctl is-enabled nvidia-persistenced")[0] != 0


def test_the_container_toolkit_has_a_repository_and_a_key_of_its_own(shell: Shell, vendor: Vendor) -> None:
    shell.fetch("http://vendor/libnvidia-container/gpgkey", "/usr/share/keyrings/toolkit.asc")
    assert shell.do("cat /usr/share/keyrings/toolkit.asc") == vendor.keys["container-toolkit"]
    line = "deb [signed-by=/usr/share/keyrings/{}] http://vendor/libnvidia-container/stable/deb/amd64 /"
    for key, trusted in (("cuda-archive-keyring.gpg", False), ("toolkit.asc", True)):
        shell.do(f"echo '{line.format(key)}' > /etc/apt/sources.list.d/toolkit.list")
        output = shell.ask("apt-get update")[1]
        assert ("NO_PUBKEY" in output) is not trusted, output
    rc, output = shell.ask("apt-get --simulate install nvidia-container-toolkit=1.18.1-1")
    assert rc != 0
    assert "Depends: nvidia-container-toolkit-base (= 1.18.1-1) but 1.20.1-1" in output


def test_named_together_the_toolkits_packages_install(shell: Shell) -> None:
    names = ("nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools")
    requested = " ".join(f"{name}=1.19.1-1" for name in (*names, "libnvidia-container1"))
    shell.do(f"apt-get --yes install {requested}")
    assert shell.do("systemctl is-enabled nvidia-cdi-refresh.path").strip() == "enabled"
    assert shell.would("upgrade")["nvidia-container-toolkit"] == "1.20.1-1"


def test_a_fabric_manager_that_lags(fault: Vendor, shell: Shell) -> None:
    fault.fault("fabric-manager-lags")
    shell.do(f"apt-get {ALONE} update")
    versions = shell.do(f"apt-cache {ALONE} madison nvidia-fabricmanager")
    assert "580.95.05" in versions
    assert "580.178.04" not in versions
    assert "595.91.07" not in versions
    assert "580.178.04" in shell.do(f"apt-cache {ALONE} madison nvidia-kernel-open-dkms")
    assert fault.heal() == ["fabric-manager-lags"]
    shell.do(f"apt-get {ALONE} update")
    assert "580.178.04" in shell.do(f"apt-cache {ALONE} madison nvidia-fabricmanager")
    fault.fault("fabric-manager-lags")  # a node that knows the newer index must see the older one again
    shell.do(f"apt-get {ALONE} update")
    assert "580.178.04" not in shell.do(f"apt-cache {ALONE} madison nvidia-fabricmanager")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unsigned", "is not signed"),
        ("expired-key", "EXPKEYSIG"),
        ("unreachable", "Connection refused"),
    ],
)
def test_a_repository_that_cannot_be_trusted_or_reached(fault: Vendor, shell: Shell, name: str, message: str) -> None:
    fault.fault(name)
    assert fault.faults() == [name]
    output = shell.ask(f"apt-get {ALONE} update")[1]
    assert message in output
    assert shell.do(f"apt-cache {ALONE} madison nvidia-open").strip() == ""
    fault.heal(name)
    assert message not in shell.do(f"apt-get {ALONE} update")
    assert "615.71.09" in shell.do(f"apt-cache {ALONE} madison nvidia-open")


def test_a_package_that_vanished_between_plan_and_install(fault: Vendor, shell: Shell) -> None:
    shell.do("apt-get update")
    assert shell.would("install libcuda1")["libcuda1"] == NEXT
    fault.fault("package-gone", "libcuda1_615*")
    rc, output = shell.ask("apt-get --yes install libcuda1")
    assert rc != 0
    assert "404" in output
    assert "libcuda1" not in shell.installed(DRIVER)
    fault.heal()
    shell.do("apt-get --yes install libcuda1 && apt-get --yes purge libcuda1 && apt-get --yes autoremove")


def test_an_unknown_fault_names_those_there_are(vendor: Vendor) -> None:
    with pytest.raises(UsageError, match="unknown fault of the vendor repository; known: " + ", ".join(FAULTS)):
        vendor.fault("fire")


def test_what_a_run_installer_leaves_and_its_uninstaller(shell: Shell, vendor: Vendor) -> None:
    kernel = shell.do("ls /lib/modules").strip()
    vendor.leave_run_file(shell.node.container, "570.195.03", "proprietary", kernel)
    assert shell.do(f"modinfo --set-version {kernel} --field version nvidia").strip() == "570.195.03"
    assert "libnvidia-ml.so.1" in shell.do("ldconfig --print-cache")
    assert "570.195.03" in shell.do("cat /var/log/nvidia-installer.log")
    assert shell.ask("dpkg --search /usr/bin/nvidia-smi")[0] != 0
    assert shell.ask("nvidia-uninstall")[0] != 0
    shell.do("nvidia-uninstall --silent")
    assert shell.ask(f"modinfo --set-version {kernel} nvidia")[0] != 0
    assert "libnvidia-ml" not in shell.do("ldconfig --print-cache")
    assert shell.ask("ls /usr/bin/nvidia-uninstall /usr/bin/nvidia-smi")[0] != 0


def test_the_log_lists_the_requests(vendor: Vendor) -> None:
    assert '"GET /compute/cuda/repos/debian12/x86_64/InRelease HTTP/1.1" 200' in vendor.log()
