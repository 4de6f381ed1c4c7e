"""Single checks on driver, libraries, clock and processes, in the cases that machines or lab nodes brought up."""

import pytest

from gpunode.catalog import load
from gpunode.checks import Expectation, Status, registry
from gpunode.checks.driver_modes import fits
from gpunode.facts.driver import LibraryFile
from gpunode.facts.modules import LoadedDriver, ModuleFile
from gpunode.facts.node import NodeFacts
from gpunode.facts.running import Process, TimeSync

CURRENT = "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.309.01"
LINKED = "/lib/x86_64-linux-gnu/libcuda.so.1"


def library(path: str, file: str = CURRENT, *, used: bool = False) -> LibraryFile:
    version = file.partition(".so.")[2]
    return LibraryFile(name="libcuda", path=path, file=file, version=version, in_cache=used, used=used)


def node(*libraries: LibraryFile, virtualization: str = "none", synchronized: bool | None = None) -> NodeFacts:
    clock = TimeSync(synchronized=synchronized, service=None, offset_s=None, timezone=None)
    return NodeFacts(
        host="n",
        collected_at="2026-11-20T00:00:00Z",
        libraries=libraries,
        virtualization=virtualization,
        time_sync=clock,
    )


def statuses(check: str, facts: NodeFacts) -> set[Status]:
    return {finding.status for finding in registry[check].findings(facts, Expectation())}


def test_one_file_under_several_paths_is_one_copy() -> None:
    # Debian's libcuda lies in nvidia/current; the linker finds it through two links.
    facts = node(library(LINKED, used=True), library("/usr" + LINKED), library(CURRENT))
    assert statuses("driver.libraries", facts) == {Status.PASS}


def test_one_file_that_the_linkers_cache_lacks_is_one_copy() -> None:
    assert statuses("driver.libraries", node(library("/usr" + LINKED), library(CURRENT))) == {Status.PASS}


def test_a_second_file_of_another_version_is_a_copy() -> None:
    second = library("/usr/local/lib/libcuda.so.1", "/usr/local/lib/libcuda.so.580.95.05")
    assert statuses("driver.libraries", node(library(LINKED, used=True), second)) == {Status.WARN}


@pytest.mark.parametrize(
    ("virtualization", "status"), [("none", Status.FAIL), ("kvm", Status.FAIL), ("docker", Status.SKIP)]
)
def test_a_containers_clock_is_its_hosts(virtualization: str, status: Status) -> None:
    assert statuses("host.time", node(virtualization=virtualization, synchronized=False)) == {status}


@pytest.mark.parametrize(("virtualization", "status"), [("none", Status.ERROR), ("docker", Status.SKIP)])
def test_a_containers_firmware_is_its_hosts(virtualization: str, status: Status) -> None:
    module = ModuleFile(kernel="6.1", path="/m.ko", version="535", vermagic="6.1", flavour="open", signed=False)
    facts = node(virtualization=virtualization).model_copy(
        update={"module_files": (module,), "kernels": (), "gaps": {"secure_boot": "/sys/firmware is empty"}}
    )
    assert statuses("driver.signed", facts) == {status}


@pytest.mark.parametrize(
    ("name", "waits_in", "status"),
    [
        ("nvidia-smi", "rm_ioctl", "fail"),
        ("python", "os_acquire_mutex", "fail"),
        ("nvidia-smi", None, "fail"),
        ("nvidia-smi", "io_schedule", "warn"),
        # Recorded on Linux 6.18: a user's program that set its name, called vfork, and let the child sleep.
        ("nvidia-smi", "kernel_clone", "pass"),
    ],
)
def test_the_function_counts_and_not_the_name(name: str, waits_in: str | None, status: str) -> None:
    stuck = (Process(pid=78, name=name, waits_in=waits_in),)
    facts = NodeFacts(host="n", collected_at="2026-11-20T12:00:00Z", stuck_processes=stuck)
    (finding,) = registry["host.stuck-processes"].findings(facts, Expectation())
    assert finding.status.value == status


@pytest.mark.parametrize(
    ("gpu", "version", "flavour", "status"),
    [
        ("b200", "560.35.03", "open", "fail"),
        ("b200", "570.133.20", "open", "pass"),
        ("gb300", "570.124.06", "open", "fail"),
        ("h100-sxm5-80gb", "580.95.05", "open", "pass"),
        ("h100-sxm5-80gb", "470.57.02", "proprietary", "fail"),
        ("t4", "535.261.03", "proprietary", "pass"),
        ("v100-sxm2-32gb", "590.48.01", "proprietary", "fail"),
        ("b100", "580.95.05", "proprietary", "fail"),
    ],
)
def test_drivers_and_models(gpu: str, version: str, flavour: str, status: str) -> None:
    verdict = fits(LoadedDriver(version=version, flavour=flavour), [load().gpu(gpu)], ())
    assert verdict.status.value == status, verdict.message
    assert verdict.message
