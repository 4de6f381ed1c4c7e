"""A bundle of a real H200, passed through to a guest with a small image, without systemd: gpunode validate, level deep.

It was collected by us on 2026-11-29 and anonymized by gpunode evidence; of the kernel only its release was renamed, and
its command line shortened.
"""

from functools import cache
from pathlib import Path

import pytest

from gpunode.checks import Expectation, Finding, Status, judge
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.bundle_reader import NOT_COLLECTED
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.packages import Kernel
from gpunode.probe.bundle import Bundle
from gpunode.workload import devices

BUNDLE = Path(__file__).parents[2] / "fixtures/bundles/h200-guest.json"
HOLDS = ("/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl")
"""What both a running nvidia-smi and a job of PyTorch hold with driver 580.159.04."""


@cache
def guest() -> NodeFacts:
    return facts_from_bundle(Bundle.from_json(BUNDLE.read_bytes(), str(BUNDLE)))


def judged(node: NodeFacts, *checks: str) -> list[Finding]:
    return judge(node, Expectation(), "deep", only=frozenset(checks) or None)


def test_only_what_the_image_lacks_is_unknown_and_nothing_fails() -> None:
    # A check that came later may need what the probe of that day did not read.
    known = [finding for finding in judged(guest()) if NOT_COLLECTED not in finding.message]
    statuses = {
        (finding.check, finding.status.value) for finding in known if finding.status not in (Status.PASS, Status.SKIP)
    }
    assert statuses == {
        ("container.docker-api", "error"),
        ("host.exposed-services", "error"),
        ("host.time", "error"),
        ("host.kernel-settings", "warn"),
        ("host.sized-for-gpus", "note"),
    }


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ("driver.closure", "no package of an NVIDIA driver is installed"),
        ("driver.held", "no package of an NVIDIA driver is installed"),
        ("driver.nouveau", "no kernel is installed here"),
        ("fabric.manager", "a virtual machine without NVSwitches"),
        ("node.units-failed", "not booted with systemd"),
        ("node.units-restarting", "not booted with systemd"),
        ("nvlink.count", "a virtual machine without NVLink"),
        ("performance.collectives", "only one GPU"),
        ("performance.transport", "only one GPU"),
        ("rdma.routes", "no InfiniBand or RoCE device"),
        ("slurm.gres", "Slurm is not configured here"),
    ],
)
def test_what_does_not_apply_is_skipped(check: str, message: str) -> None:
    findings = judged(guest(), check)
    assert {finding.status for finding in findings} == {Status.SKIP}
    assert all(message in finding.message for finding in findings), [finding.message for finding in findings]


@pytest.mark.parametrize(
    ("check", "least", "most"),
    [
        ("performance.gemm", 5, 7),
        ("performance.memory", 3, 3),
        ("performance.host-copy", 2, 2),
        ("performance.burn", 1, 1),
        ("container.compute", 1, 1),
        ("framework.fp8", 1, 1),
        ("framework.compile", 1, 1),
    ],
)
def test_its_measurements_are_judged(check: str, least: int, most: int) -> None:
    statuses = [finding.status for finding in judged(guest(), check)]
    assert least <= statuses.count(Status.PASS) <= most


def test_a_single_rank_of_a_node_with_several_gpus_is_unknown() -> None:
    (gpu,) = guest().gpus_on_bus or ()
    second = gpu.model_copy(update={"slot": "0000:00:07.0"})
    node = guest().model_copy(update={"pci": (*(guest().pci or ()), second)})
    findings = judged(node, "performance.collectives", "performance.transport")
    assert {finding.status for finding in findings} == {Status.ERROR}


def test_with_systemd_a_missing_daemon_is_a_warning() -> None:
    with_it = guest().model_copy(update={"systemd": True})
    warned = [finding.component for finding in judged(with_it, "gpu.persistence") if finding.status is Status.WARN]
    assert warned == ["nvidia-persistenced"]


def test_a_kernel_that_is_installed_may_bring_nouveau() -> None:
    kernel = Kernel(release="6.8.0-90-generic", package="linux-image", running=False, newest=True, headers=True)
    findings = judged(guest().model_copy(update={"kernels": (kernel,)}), "driver.nouveau")
    assert [finding.status for finding in findings] == [Status.WARN]


@pytest.mark.parametrize(("number", "status"), [(1, Status.SKIP), (4, Status.SKIP), (7, Status.ERROR)])
def test_a_guest_with_a_part_of_a_board_needs_no_fabric_manager(number: int, status: Status) -> None:
    (gpu,) = guest().gpus_on_bus or ()
    more = tuple(gpu.model_copy(update={"slot": f"0000:00:{6 + index:02x}.0"}) for index in range(number))
    others = tuple(device for device in guest().pci or () if device != gpu)
    node = guest().model_copy(update={"pci": (*others, *more)})
    assert {finding.status for finding in judged(node, "fabric.manager")} == {status}


@pytest.mark.parametrize(
    ("process", "used"),
    [("nvidia-smi", False), ("python3", True)],
)
def test_a_running_nvidia_smi_keeps_no_gpu_busy(process: str, used: bool) -> None:
    gpu_process = GpuProcess(pid=1004, name=process, type=None, user="root", devices=HOLDS)
    node = guest().model_copy(update={"gpu_processes": (gpu_process,)})
    use = devices.choose(node, force=False, without=True)
    assert bool(use.skipped) is used
    assert len(use.indices) == (0 if used else 1)
