"""What the checks on the driver report in the cases that one recorded node cannot show."""

from typing import Any

import pytest

from gpunode.checks import Expectation, Finding, Status, registry
from gpunode.checks.driver import same_version
from gpunode.facts.boot import Initramfs, ModuleBlock, ModuleImage
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.kernel_log import KernelEvent, KernelLog
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.modules import DkmsModule, LoadedDriver, ModuleFile
from gpunode.facts.node import NodeFacts
from gpunode.facts.packages import Kernel, Package
from gpunode.facts.pci import PciDevice
from gpunode.facts.running import Unit
from gpunode.facts.tools import ToolRun

DEBIAN = "Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.alioth.debian.org>"
NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"
RUNNING = "6.1.0-56-amd64"


def gpu(slot: str = "0000:1a:00.0", driver: str | None = "nvidia") -> PciDevice:
    return PciDevice(slot=slot, vendor_id="10de", device_id="26b9", subsystem_id=None, class_id="030200", driver=driver)


def kernel(release: str = RUNNING, **more: Any) -> Kernel:
    fields = {"package": f"linux-image-{release}", "running": True, "newest": True, "headers": True, **more}
    return Kernel(release=release, **fields)


def module(release: str = RUNNING, **more: Any) -> ModuleFile:
    fields = {"version": "535.261.03", "vermagic": f"{release} SMP", "flavour": "open", "signed": False, **more}
    return ModuleFile(kernel=release, path=f"/lib/modules/{release}/nvidia.ko", **fields)


def package(name: str, version: str = "535.261.03-1", **more: Any) -> Package:
    fields: dict[str, Any] = {
        "architecture": "amd64",
        "source": "nvidia-graphics-drivers",
        "maintainer": DEBIAN,
        "installed": True,
        "state": "hold ok installed",
        "held": True,
        **more,
    }
    return Package(name=name, version=version, **fields)


def node(**facts: Any) -> NodeFacts:
    fields = {
        "kernels": (kernel(),),
        "pci": (gpu(),),
        "modules": (),
        "module_files": (module(),),
        "dkms": (),
        "packages": (package("nvidia-kernel-dkms"),),
        "nouveau_blacklisted": True,
        "units": (),
        "secure_boot": False,
        **facts,
    }
    return NodeFacts(host="node", collected_at="2026-11-20T12:00:00Z", **fields)


def judged(check: str, **facts: Any) -> list[Finding]:
    return registry[check].findings(node(**facts), Expectation())


def one(check: str, **facts: Any) -> tuple[str, str]:
    (finding,) = judged(check, **facts)
    return finding.status.value, finding.message


# The module on disk


def test_running_and_newest_kernel_come_first() -> None:
    kernels = tuple(
        kernel(release, running=release == "6.1.0-50-amd64", newest=release == "6.1.0-56-amd64")
        for release in ("6.1.0-49-amd64", "6.1.0-50-amd64", "6.1.0-55-amd64", "6.1.0-56-amd64")
    )
    assert [finding.component for finding in judged("driver.module-built", kernels=kernels)] == [
        "kernel 6.1.0-50-amd64",
        "kernel 6.1.0-56-amd64",
        "kernel 6.1.0-49-amd64",
        "kernel 6.1.0-55-amd64",
    ]


def test_an_old_kernel_without_headers_is_not_asked_for() -> None:
    old = kernel("6.1.0-49-amd64", running=False, newest=False, headers=False)
    assert [finding.component for finding in judged("driver.module-built", kernels=(kernel(), old))] == [
        f"kernel {RUNNING}"
    ]


def test_headers_without_a_kernel_are_not_asked_for() -> None:
    left = kernel("6.1.0-49-amd64", running=False, newest=False, image=False)
    assert [finding.component for finding in judged("driver.module-built", kernels=(kernel(), left))] == [
        f"kernel {RUNNING}"
    ]


@pytest.mark.parametrize(("running", "status"), [(True, "skip"), (False, "fail")])
def test_of_kernels_without_a_package_only_the_running_one_is_excused(running: bool, status: str) -> None:
    local_kernel = kernel("6.9.0-own", package=None, running=running)
    verdict = one("driver.module-built", kernels=(local_kernel,))
    assert (verdict[0], "belongs to no installed package" in verdict[1]) == (status, running)


def test_what_dkms_reports_is_passed_on() -> None:
    state = DkmsModule(name="nvidia", version="535.261.03", kernel=RUNNING, architecture="x86_64", state="added")
    status, message = one("driver.module-built", module_files=(), dkms=(state,))
    assert (status, message) == (
        "fail",
        "no nvidia module on disk for the running kernel, though its headers are installed"
        " (dkms: nvidia 535.261.03: added)",
    )


@pytest.mark.parametrize(("pci", "status"), [((gpu(),), "fail"), ((), "skip")])
def test_no_driver_at_all(pci: tuple[PciDevice, ...], status: str) -> None:
    verdict = one("driver.module-built", pci=pci, packages=(), module_files=())
    assert (verdict[0], "no NVIDIA driver is installed" in verdict[1]) == (status, True)


def test_a_driver_package_that_failed_to_configure_still_needs_a_module() -> None:
    half = package("nvidia-kernel-dkms", installed=False, state="install ok half-configured")
    gone = package("nvidia-kernel-dkms", installed=False, state="deinstall ok config-files")
    assert one("driver.module-built", pci=(), packages=(half,), module_files=())[0] == "fail"
    assert one("driver.module-built", pci=(), packages=(gone,), module_files=())[0] == "skip"


# The module in memory


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"modules": ("nouveau",), "pci": (gpu(driver="nouveau"),)}, "nouveau is bound to the GPU"),
        ({"pci": (gpu(driver="vfio-pci"),)}, "bound to vfio-pci"),
        ({"module_files": ()}, "none is on disk for the running kernel"),
        ({"secure_boot": True}, "secure boot is on, and the module on disk is not signed"),
        ({"secure_boot": True, "module_files": (module(signed=True),)}, "its key may not be enrolled"),
        ({"pci": (gpu(driver=None),)}, "though one is on disk"),
        ({"kernels": None, "module_files": None}, "no NVIDIA module is loaded"),
    ],
)
def test_why_the_module_is_not_loaded(facts: dict[str, Any], words: str) -> None:
    status, message = one("driver.module-loaded", **facts)
    assert (status, words in message) == ("fail", True), message


@pytest.mark.parametrize(
    ("one_version", "other", "same"),
    [
        ("535.261.03", "535.261.3", True),
        ("535.261.03", "535.261.03-1~deb12u1", True),
        ("580.95", "580.95.0", True),
        ("535.261.03", "535.216.03", False),
        ("550.9", "550.10", False),
        ("strange", "strange", True),
        ("strange", "535.1", False),
    ],
)
def test_versions_are_compared_as_versions(one_version: str, other: str, same: bool) -> None:
    assert same_version(one_version, other) is same


def test_a_mismatch_that_only_nvidia_smi_reports() -> None:
    smi = Smi[SmiLog](error_kind="driver-library-mismatch", error_message="...", error_nvml_version="550.163")
    loaded = LoadedDriver(version="535.261.03", flavour=None)
    status, message = one("driver.library-matches-module", loaded_driver=loaded, smi=smi)
    assert status == "fail"
    assert message == "driver/library version mismatch: the module in memory is 535.261.03, nvidia-smi loads 550.163"


def test_a_module_without_any_library_is_nothing_to_compare() -> None:
    loaded = LoadedDriver(version="535.261.03", flavour=None)
    assert one("driver.library-matches-module", loaded_driver=loaded)[0] == "skip"


# Packages


def test_each_line_of_debian_has_a_version_of_its_own() -> None:
    tesla = "nvidia-graphics-drivers-tesla-535"
    packages = (
        package("nvidia-tesla-535-kernel-dkms", "535.274.02-1~deb13u1", source=tesla),
        package("libnvidia-tesla-535-ml1", "535.274.02-1~deb13u1", source=tesla),
        package("nvidia-alternative", "550.163.01-2"),
    )
    assert [(finding.status.value, finding.measured) for finding in judged("driver.closure", packages=packages)] == [
        ("pass", "535.274.02"),
        ("pass", "550.163.01"),
    ]


def test_the_open_modules_are_of_the_same_line() -> None:
    packages = (
        package("nvidia-open-kernel-dkms", "550.163.01-2", source="nvidia-open-gpu-kernel-modules"),
        package("libcuda1", "535.261.03-1"),
        package("libnvidia-ml1", "535.261.03-1"),
    )
    status, message = one("driver.closure", packages=packages)
    assert (status, "nvidia-open-kernel-dkms 550.163.01" in message) == ("fail", True)


def test_what_has_versions_of_its_own_is_neither_compared_nor_held() -> None:
    packages = (
        package("nvidia-kernel-dkms"),
        package("nvidia-persistenced", "535.171.04-1~deb12u1", source="nvidia-persistenced", held=False),
    )
    assert one("driver.closure", packages=packages)[0] == "pass"
    assert one("driver.held", packages=packages) == ("pass", "1 package held")


@pytest.mark.parametrize("debian_first", [True, False])
def test_of_two_equal_origins_the_one_with_the_module_is_the_main_one(debian_first: bool) -> None:
    pair = (package("nvidia-kernel-dkms"), package("libnvidia-nscq", maintainer=NVIDIA, source="libnvidia-nscq"))
    packages = pair if debian_first else pair[::-1]
    (finding,) = judged("driver.origin", packages=packages)
    assert (finding.status.value, finding.expected, finding.measured) == ("fail", "debian", "debian, nvidia")
    assert finding.message == "packages of 2 origins: debian: nvidia-kernel-dkms; nvidia: libnvidia-nscq"


def test_an_origin_that_nobody_knows_is_a_warning_that_names_it() -> None:
    status, message = one("driver.origin", packages=(package("libcuda1", maintainer="Me <me@example.org>"),))
    assert (status, "Me <me@example.org>" in message) == ("warn", True)


@pytest.mark.parametrize("check", ["driver.closure", "driver.held", "driver.origin"])
def test_no_package_is_skip(check: str) -> None:
    assert one(check, packages=())[0] == "skip"


def test_many_names_are_cut_and_counted() -> None:
    packages = tuple(package(f"libnvidia-part{number}", held=False) for number in range(9))
    _, message = one("driver.held", packages=packages)
    assert message.endswith("libnvidia-part4, libnvidia-part5 and 3 more")


# nouveau


def test_nouveau_without_any_driver() -> None:
    assert one("driver.nouveau", packages=(), module_files=())[0] == "skip"
    status, message = one("driver.nouveau", packages=(), module_files=(), modules=("nouveau",))
    assert (status, "instead of" in message) == ("fail", True)


# GPUs


LOADED = LoadedDriver(version="535.261.03", flavour=None)


@pytest.mark.parametrize(
    ("smi", "status"),
    [
        (Smi[SmiLog](error_kind="no-devices", error_message="No devices were found"), "fail"),
        (Smi[SmiLog](error_kind="gpu-lost", error_message="GPU is lost"), "skip"),
        (Smi[SmiLog](error_kind="nvml-unknown", error_message="Unknown Error"), "skip"),
        (None, "skip"),
    ],
)
def test_what_nvidia_smi_reports_instead_of_an_answer(smi: Smi[SmiLog] | None, status: str) -> None:
    assert one("gpu.count", loaded_driver=LOADED, smi=smi)[0] == status


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("driver-not-loaded", "fail"),
        ("library-missing", "fail"),
        ("nvml-unknown", "fail"),
        ("permission", "error"),
        ("other", "error"),
        ("driver-library-mismatch", "skip"),
        ("gpu-lost", "skip"),
        ("no-devices", "skip"),
        (None, "error"),
    ],
)
def test_a_driver_that_cannot_be_reached_is_one_failure_with_a_remedy(kind: str | None, status: str) -> None:
    smi = Smi[SmiLog](error_kind=kind, error_message="what it printed") if kind else None
    (finding,) = judged("driver.tools-answer", loaded_driver=LOADED, smi=smi, tool_runs=())
    assert finding.status.value == status
    assert bool(finding.remedy) is (status != "skip")


def test_slow_is_not_hung() -> None:
    reason = "killed: no answer within 6.0 s, which was left of the time for the whole probe"
    slow = ToolRun(answers="nvlink", command="nvidia-smi nvlink -e", exit_status=124, ended="slow", reason=reason)
    (finding,) = judged("driver.tools-answer", loaded_driver=LOADED, tool_runs=(slow,))
    assert (finding.status.value, reason in finding.message) == ("error", True)


def test_a_crash_is_named_by_its_signal() -> None:
    run = ToolRun(answers="smi", command="nvidia-smi -q -x", exit_status=139, ended="signal", signal="SIGSEGV")
    gaps = {"smi": "nvidia-smi -q -x crashed (SIGSEGV, exit status 139)"}
    (finding,) = judged("driver.tools-answer", loaded_driver=LOADED, tool_runs=(run,), gaps=gaps)
    assert (finding.status.value, finding.message) == ("fail", gaps["smi"])
    (skipped,) = judged("gpu.count", loaded_driver=LOADED, tool_runs=(run,), gaps=gaps)
    assert (skipped.status.value, "driver.tools-answer" in skipped.message) == ("skip", True)


def test_the_gpu_that_the_driver_lacks_is_named() -> None:
    smi = Smi[SmiLog](document={"attached_gpus": 1, "gpus": [{"index": 0, "pci_bus_id": "0000:1a:00.0"}]})
    pci = (gpu(), gpu("0000:3d:00.0"))
    status, message = one("gpu.count", loaded_driver=LOADED, smi=smi, pci=pci)
    assert (status, message) == ("fail", "2 GPUs on the bus, 1 with the driver (not with the driver: 0000:3d:00.0)")


def test_persistence_is_reported_for_each_gpu_and_for_the_daemon() -> None:
    gpus = [{"index": 0, "persistence_mode": True}, {"index": 1, "persistence_mode": None}]
    smi = Smi[SmiLog](document={"attached_gpus": 2, "gpus": gpus})
    daemon = Unit(name="nvidia-persistenced.service", load="loaded", active="failed", sub="failed")
    findings = judged("gpu.persistence", loaded_driver=LOADED, smi=smi, units=(daemon,))
    assert [(finding.component, finding.status) for finding in findings] == [
        ("gpu0", Status.PASS),
        ("gpu1", Status.ERROR),
        ("nvidia-persistenced", Status.WARN),
    ]


@pytest.mark.parametrize(
    ("gpus", "expected", "status"),
    [
        (2, None, "pass"),
        (2, 2, "pass"),
        (2, 8, "fail"),
        (2, 0, "fail"),
        (0, None, "error"),
        (0, 8, "error"),
        (0, 0, "skip"),
    ],
)
def test_gpus_on_the_bus(gpus: int, expected: int | None, status: str) -> None:
    facts = node(pci=tuple(gpu(f"0000:{number:02x}:00.0") for number in range(gpus)))
    (finding,) = registry["gpu.present"].findings(facts, Expectation(gpus=expected))
    assert (finding.status.value, finding.measured, finding.expected) == (status, gpus, expected)


# Causes and remedies that do not loop

OFF = ModuleBlock(place="/etc/modprobe.d/off.conf:3", text="alias nvidia off", module="nvidia", always=True)
KEY = KernelEvent(kind="module-rejected", message="Loading of module with unavailable key is rejected")
IMAGE = Initramfs(
    kernel=RUNNING,
    path=f"/boot/initrd.img-{RUNNING}",
    newer=False,
    modules=(ModuleImage(path=f"/usr/lib/modules/{RUNNING}/nvidia.ko", size=5),),
)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"module_blocks": (OFF,)}, "/etc/modprobe.d/off.conf:3 (alias nvidia off)"),
        ({"command_line": "ro modprobe.blacklist=nvidia"}, "modprobe.blacklist=nvidia on the kernel's command line"),
        ({"kernel_log": KernelLog(source="journal", complete=True, events=(KEY,))}, KEY.message),
    ],
)
def test_why_no_module_is_loaded(facts: dict[str, Any], words: str) -> None:
    status, message = one("driver.module-loaded", **facts)
    assert status == "fail"
    assert words in message


def test_a_reboot_is_no_remedy_while_the_initramfs_has_the_old_module() -> None:
    facts = {"loaded_driver": LOADED, "driver_library_version": "535.309.01"}
    (looping,) = judged("driver.library-matches-module", **facts)
    assert "update-initramfs" not in (looping.remedy or "")
    (finding,) = judged("driver.library-matches-module", **facts, initramfs=(IMAGE,))
    assert (finding.remedy or "").index(f"update-initramfs -u -k {RUNNING}") < (finding.remedy or "").index(
        "then reboot"
    )


@pytest.mark.parametrize("folder", ["extra", "weak-updates"])
def test_a_module_in_weak_updates_is_that_of_another_kernel(folder: str) -> None:
    file = module(vermagic="5.14.0-427.el9 SMP").model_copy(
        update={"path": f"/lib/modules/{RUNNING}/{folder}/nvidia.ko"}
    )
    assert one("driver.module-built", module_files=(file,))[0] == ("pass" if folder == "weak-updates" else "fail")


def test_the_remedy_of_a_reset_names_who_holds_the_gpu_in_the_order_to_stop_them() -> None:
    smi = Smi[SmiLog](document={"attached_gpus": 1, "gpus": [{"index": 0, "reset_required": True}]})
    names = ("nvidia-persistenced.service", "nvidia-dcgm.service", "gpunode-exporter.service")
    units = tuple(Unit(name=name, load="loaded", active="active", sub="running") for name in names)
    holder = GpuProcess(pid=7, name="dcgm-exporter", type=None)
    (finding,) = judged("gpu.recovery", loaded_driver=LOADED, smi=smi, units=units, gpu_processes=(holder,))
    remedy = finding.remedy or ""
    assert "stop dcgm-exporter (7), then systemctl stop gpunode-exporter.service nvidia-dcgm.service" in remedy
    assert "systemctl start nvidia-persistenced.service nvidia-dcgm.service gpunode-exporter.service" in remedy
    (alone,) = judged("gpu.recovery", loaded_driver=LOADED, smi=smi)
    assert "systemctl stop" not in (alone.remedy or "")
