"""Verdicts on workloads that no mutant of a healthy node shows: busy GPUs, simulated ones, nothing run, odd values."""

from collections.abc import Mapping
from typing import Any

import pytest
from packaging.version import Version

from gpunode.catalog import load
from gpunode.checks import Expectation, Finding, Status, judge
from gpunode.checks.wheels import runs_on
from gpunode.facts import NodeFacts
from gpunode.facts.kernel_log import KernelEvent, KernelLog
from gpunode.facts.models.workload import Record
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.pci import PciDevice
from gpunode.facts.workload import JUDGED

T4 = PciDevice.model_validate(
    {
        "slot": "0000:3b:00.0",
        "class_id": "0302",
        "vendor_id": "10de",
        "device_id": "1eb8",
        "subsystem_id": "10de:12a2",
        "driver": "nvidia",
    }
)
DRIVER = LoadedDriver(version="580.95.05", flavour="open")
CONTAINER = {"image": "lab/torch", "engine": "docker 26.1.5", "gpus": "cdi"}


def record(name: str, values: Mapping[str, Any] | None = None, **more: Any) -> Record:
    fields = {"device": "cuda", "seconds": 1.0, "container": CONTAINER, "values": dict(values or {})}
    return Record.model_validate({"record": name, **fields, **more})


def found(*records: Record, simulated: bool = False, **facts: Any) -> dict[str, list[Finding]]:
    known = {"pci": (T4,), "loaded_driver": DRIVER, "architecture": "x86_64", **facts}
    node = NodeFacts(
        host="n", collected_at="now", simulated=simulated, records=records or None,
        gaps={} if records else {"records": "no workload was run"}, **known,
    )  # fmt: skip
    answer: dict[str, list[Finding]] = {}
    for finding in judge(node, Expectation(), level="standard"):
        if finding.check.startswith(("container.", "framework.")):
            answer.setdefault(finding.check, []).append(finding)
    return answer


STANDARD = {
    "container.gpus",
    "container.library",
    "container.cuda",
    "container.shm",
    "framework.wheel",
    "framework.amp",
}


def test_without_a_workload_nothing_passes() -> None:
    answer = found()
    assert {finding.status for check in STANDARD | {"container.runs"} for finding in answer[check]} == {Status.ERROR}


def test_a_node_without_a_gpu_needs_no_workload() -> None:
    (finding,) = found(pci=())["container.runs"]
    assert (finding.status, finding.message) == (Status.SKIP, "no NVIDIA GPU on the PCI bus")


def test_a_busy_gpu_is_left_out_with_process_and_user() -> None:
    values = {"complete": True, "gpus": 7, "busy": ["gpu3: python3 (pid 4242, alice)"]}
    busy, run = found(record("container", values, seconds=61.0))["container.runs"]
    assert (busy.status, busy.component) == (Status.SKIP, "gpu3")
    assert busy.message == "skipped, in use by python3 (pid 4242, alice)"
    assert (run.status, run.message) == (Status.PASS, "ran with 7 GPUs in 61 s (image lab/torch)")


def test_all_busy_is_skip_with_the_reason_and_nothing_else_is_judged() -> None:
    answer = found(record("container", skipped="every GPU is busy: gpu0: python3 (pid 4242, alice)"))
    (finding,) = answer["container.runs"]
    assert (finding.status, finding.message) == (Status.SKIP, "every GPU is busy: gpu0: python3 (pid 4242, alice)")
    assert {finding.status for check in STANDARD for finding in answer[check]} == {Status.SKIP}
    assert {finding.message for check in STANDARD for finding in answer[check]} == {
        "nothing ran in a container (container.runs reports the cause)"
    }


def test_no_engine_is_reported_once() -> None:
    answer = found(record("container", error="no Docker on this node", container=None))
    assert [(finding.status, finding.message) for finding in answer["container.runs"]] == [
        (Status.ERROR, "no Docker on this node")
    ]
    assert {finding.status for check in STANDARD for finding in answer[check]} == {Status.SKIP}


def test_on_the_host_there_is_no_container_to_judge() -> None:
    records = (
        record("defaults.limits", {"shm_bytes": 1, "memlock_bytes": 1, "stack_bytes": 1}, container=None),
        record("container", {"complete": True, "gpus": 1}, container=None, seconds=9.0),
    )
    answer = found(*records)
    assert [(finding.status, finding.message) for finding in answer["container.runs"]] == [
        (Status.SKIP, "ran with 1 GPU in 9 s on the host itself, in no container")
    ]
    for check in ("container.shm", "container.memlock", "container.stack"):
        assert [finding.status for finding in answer[check]] == [Status.SKIP]
    (finding,) = found(records[0])["container.runs"]
    assert finding.status is Status.SKIP


def test_what_was_not_run_for_lack_of_time_is_an_error_and_no_failure() -> None:
    reason = "not run: the 890 s for all are used up"
    records = [record(name, undetermined=reason) for name in sorted(JUDGED - {"container"})]
    answer = found(*records, record("container", {"complete": True, "gpus": 1}, error="the payload did not end"))
    statuses = {check: {finding.status for finding in findings} for check, findings in answer.items()}
    assert {
        check for check, outcomes in statuses.items() if Status.FAIL in outcomes or Status.PASS in outcomes
    } == set()
    for check in ("container.shm", "container.memlock", "container.stack", "framework.wheel"):
        assert statuses[check] == {Status.ERROR}  # the others are skipped, and name the one that reports the cause


@pytest.mark.parametrize(
    ("security", "result", "named"),
    [(["selinux"], 4, True), (["seccomp", "selinux"], 999, False), (["apparmor"], 4, False), ([], 4, False)],
)
def test_selinux_is_named_where_it_confines_containers_and_nvml_has_no_permission(
    security: list[str], result: int, named: bool
) -> None:
    answer = found(
        record("versions.nvml", {"library": "/usr/lib/libnvidia-ml.so.1", "result": result}),
        record("versions.cuda", {"library": "/usr/lib/libcuda.so.1", "result": 100}),
        record("container", {"complete": True, "gpus": 1, "security": security}),
    )
    (finding,) = answer["container.gpus"]
    assert finding.status is Status.FAIL
    assert ("SELinux" in finding.message) is named
    assert ("container_use_devices" in (finding.remedy or "")) is named


@pytest.mark.parametrize(
    ("result", "line", "named"),
    [
        (3, "request_free_mem_region() err -34", True),
        (3, "another_function() err -12", False),
        (999, "request_free_mem_region() err -34", False),
    ],
)
def test_cuda_that_is_not_initialized_is_explained_by_hmm_where_the_host_reports_that(
    result: int, line: str, named: bool
) -> None:
    answer = found(
        record("versions.nvml", {"library": "/usr/lib/libnvidia-ml.so.1", "result": 0, "count": 1}),
        record("versions.cuda", {"library": "/usr/lib/libcuda.so.1", "result": result}),
        record("container", {"complete": True, "gpus": 1}),
        record("gpus.kernel", error=f"cuInit: CUDA_ERROR_NOT_INITIALIZED ({result})"),
        record("frameworks.tensor", error="RuntimeError: CUDA driver initialization failed"),
        kernel_log=KernelLog(source="journal", complete=True, events=(KernelEvent(kind="uvm", message=line),)),
        module_parameters={"nvidia_uvm": {"uvm_disable_hmm": "N"}},
    )
    (finding,) = answer["container.gpus"]
    assert finding.status is Status.FAIL
    assert ("driver.hmm" in finding.message, "uvm_disable_hmm=1" in (finding.remedy or "")) == (named, named)
    for check in ("container.compute", "framework.tensor"):
        (skipped,) = answer[check]
        assert skipped.status is Status.SKIP
        assert "container.gpus reports the cause" in skipped.message


@pytest.mark.parametrize(
    ("limits", "statuses"),
    [
        # What Docker Engine 20.10 and 26.1 give on Debian to whoever asks for nothing, in that order of checks.
        ({"shm_bytes": 64 * 2**20, "memlock_bytes": 8 * 2**20, "stack_bytes": 8 * 2**20}, ("warn", "pass", "pass")),
        ({"shm_bytes": 8 * 2**30, "memlock_bytes": -1, "stack_bytes": -1}, ("pass", "pass", "warn")),
        ({"shm_bytes": 2**30, "memlock_bytes": 65536, "stack_bytes": 2**20}, ("pass", "pass", "warn")),
    ],
)
def test_what_a_plain_docker_run_gets_is_judged_and_not_what_the_payload_was_given(
    limits: dict[str, int], statuses: tuple[str, ...]
) -> None:
    enough = {"shm_bytes": 8 * 2**30, "memlock_bytes": -1, "stack_bytes": 64 * 2**20}
    records = (record("versions.limits", enough), record("defaults.limits", limits), record("container", {}))
    answer = found(*records)
    checks = ("container.shm", "container.memlock", "container.stack")
    assert tuple(finding.status.value for check in checks for finding in answer[check]) == statuses


@pytest.mark.parametrize(("complete", "error"), [(False, None), (None, None), (True, "the connection broke off")])
def test_on_the_host_a_payload_that_broke_off_is_an_error(complete: bool | None, error: str | None) -> None:
    (finding,) = found(record("container", {"complete": complete}, container=None, error=error))["container.runs"]
    assert finding.status is Status.ERROR


def test_a_container_without_a_recorded_end_is_an_error() -> None:
    (finding,) = found(record("versions.limits", {"shm_bytes": 2**33}))["container.runs"]
    assert finding.status is Status.ERROR


STUB = "/usr/lib/libnvidia-ml.so.580.95.05 has no function nvmlInit_v2: is it the real library?"


@pytest.mark.parametrize(("simulated", "status"), [(True, Status.SKIP), (False, Status.FAIL)])
def test_a_library_that_is_none_is_a_fault_on_real_nodes_alone(simulated: bool, status: Status) -> None:
    records = (record("versions.nvml", error=STUB), record("versions.cuda", error=STUB))
    answer = found(*records, simulated=simulated)
    assert [finding.status for finding in answer["container.gpus"]] == [status]
    assert [finding.status for finding in answer["container.forward-compat"]] == [Status.SKIP]


TORCH_CPU = {"version": "2.13.0+cpu", "available": False, "count": 0}


def test_a_result_of_the_processor_never_counts_as_one_of_a_gpu() -> None:
    records = (
        record("versions.torch", TORCH_CPU, device="cpu"),
        record("frameworks.tensor", {"max_error": 0.0}, device="cpu"),
        record("frameworks.amp", {"dtype": "bfloat16", "losses": [2.0, 1.0]}, device="cpu"),
        record("frameworks.compile", {"max_error": 0.0, "compile_seconds": 9.0}, device="cpu"),
    )
    for simulated in (True, False):
        answer = found(*records, simulated=simulated)
        for check in ("framework.tensor", "framework.amp", "framework.compile"):
            assert [finding.status for finding in answer[check]] == [Status.SKIP]
        assert [finding.status for finding in answer["framework.wheel"]] == [Status.SKIP if simulated else Status.FAIL]


def test_the_wheel_that_fits_is_named() -> None:
    (finding,) = found(record("versions.torch", TORCH_CPU, device="cpu"))["framework.wheel"]
    assert finding.remedy is not None
    assert "https://download.pytorch.org/whl/cu13" in finding.remedy
    older = LoadedDriver(version="535.261.03", flavour="proprietary")
    (finding,) = found(record("versions.torch", TORCH_CPU, device="cpu"), loaded_driver=older)["framework.wheel"]
    assert finding.remedy is not None
    # PyTorch 2.7 is the newest release with a build of a CUDA that 535 (12.2) fully supports.
    assert "https://download.pytorch.org/whl/cu118," in finding.remedy


def only(check: str, device: str, driver: LoadedDriver, *records: Record) -> Finding:
    """The finding of one check for a node with one GPU of a PCI id."""
    facts = {"pci": (T4.model_copy(update={"device_id": device}),), "loaded_driver": driver, "architecture": "x86_64"}
    node = NodeFacts(host="n", collected_at="now", simulated=False, records=records, gaps={}, **facts)
    (finding,) = judge(node, Expectation(), "standard", {check})
    return finding


@pytest.mark.parametrize(
    ("device", "capability"), [("1eb8", "7.5"), ("20b5", "8.0"), ("2330", "9.0"), ("2901", "10.0")]
)
def test_container_cuda_passes_the_wheel_that_is_named(device: str, capability: str) -> None:
    """framework.wheel recommended builds that container.cuda warns about."""
    wheels = [row for row in load().wheels.values() if row.arch == "x86_64" and capability in row.compute_capabilities]
    named = 0
    for branch in load().branches:
        driver = LoadedDriver(version=f"{branch}.999.99", flavour="proprietary")
        status = {}
        for series in {series for row in wheels for series in row.cuda}:
            torch = record("versions.torch", {"version": "2", "cuda": series, "available": True, "count": 1})
            status[series] = only(
                "container.cuda", device, driver, torch, record("versions.system", {"python": "3.12"})
            ).status
        remedy = only("framework.wheel", device, driver, record("versions.torch", TORCH_CPU, device="cpu")).remedy
        chosen = [outcome for series, outcome in status.items() if f"whl/cu{series.replace('.', '')}," in str(remedy)]
        best = next((outcome for outcome in (Status.PASS, Status.WARN) if outcome in status.values()), None)
        assert chosen == ([] if best is None else [best]), (branch, remedy, status)
        named += len(chosen)
    assert named > 3


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80"], "8.0", True),
        (["sm_80"], "8.9", True),
        (["sm_86"], "8.0", False),
        (["sm_80"], "9.0", False),
        (["sm_90a"], "9.0", True),
        (["sm_90a"], "9.1", False),
        (["compute_90"], "12.0", True),
        (["compute_120"], "9.0", False),
        (["sm_100f"], "10.3", True),
        (["sm_100a"], "10.3", False),
        (["gfx942", ""], "9.0", False),
        ([], "9.0", False),
    ],
)
def test_which_code_runs_where(architectures: list[str], capability: str, runs: bool) -> None:
    assert runs_on(architectures, Version(capability)) is runs


@pytest.mark.parametrize("value", [None, -5, "much", [], {}, 1e99, "\x00"])
def test_no_value_breaks_a_check(value: Any) -> None:
    keys = {
        "container": ("complete", "gpus", "busy"),
        "versions.system": ("driver_libraries", "cuda", "python"),
        "defaults.limits": ("shm_bytes", "memlock_bytes", "stack_bytes"),
        "versions.nvml": ("result", "count", "library", "gpus"),
        "versions.cuda": ("result", "count", "forward_compat", "cuda_version", "gpus"),
        "versions.torch": ("version", "cuda", "cudnn", "nccl", "architectures", "count", "available"),
        "frameworks.tensor": ("max_error", "allocated_bytes", "pci_bus_id"),
        "frameworks.amp": ("dtype", "losses"),
        "frameworks.memory": ("total_mib", "free_mib", "peak_mib", "reserved_mib", "fragmentation_percent"),
        "frameworks.tensorflow": ("count", "compute_dtype", "max_error"),
        "frameworks.tensorflow-training": ("wrong", "efficiency", "xla_error", "xla_max_error", "ranks"),
        "frameworks.dali": ("version", "samples"),
    }
    for name, names in keys.items():
        for key in names:
            answer = found(*(record(record_name, {key: value} if record_name == name else {}) for record_name in keys))
            reported = [finding for findings in answer.values() for finding in findings]
            assert not [finding for finding in reported if "failed to run" in finding.message], (name, key)
            assert Status.PASS not in {finding.status for finding in reported if finding.check != "container.runs"}


@pytest.mark.parametrize(
    ("check", "name", "values"),
    [
        ("container.runs", None, {}),
        ("container.library", "versions.system", {"driver_libraries": {"libcuda.so.1": None}}),
        ("container.cuda", "versions.system", {"cuda": "thirteen"}),
        ("framework.cudnn-version", "versions.torch", {"cudnn": "99.0"}),
        ("framework.nccl-version", "versions.torch", {"nccl": "1.0"}),
    ],
)
def test_what_was_not_observed_is_an_error_and_no_skip(check: str, name: str | None, values: dict[str, Any]) -> None:
    records = [] if name is None else [record(name, values)]
    assert {finding.status for finding in found(*records)[check]} == {Status.ERROR}


TORCH = {"version": "2.13.0+cu130", "cuda": "13.0", "available": True, "count": 1}
SYSTEM = {"python": "3.12.3", "cuda": "13.0.2"}


def cuda_found(torch: Mapping[str, Any] | None, *, image: str, compat: str | None = None) -> Finding:
    """The verdict on the CUDA of an image, on a node with a driver that runs up to 13.0."""
    records = [record("versions.system", {**SYSTEM, "cuda": image})]
    records += [record("versions.torch", torch)] if torch else [record("versions.torch", skipped="not in the image")]
    if compat is not None:
        values = {"library": "libcuda.so.590.1", "result": 0, "forward_compat": True, "cuda_version": compat}
        records.append(record("versions.cuda", values))
    (finding,) = found(*records)["container.cuda"]
    return finding


def test_a_toolkit_that_nothing_uses_fails_no_node() -> None:
    unused = cuda_found(TORCH, image="14.1.0")
    assert unused.status is Status.PASS
    assert "toolkit" in unused.message
    assert cuda_found(None, image="14.1.0").status is Status.FAIL
    assert cuda_found({**TORCH, "cuda": None}, image="14.1.0").status is Status.FAIL


@pytest.mark.parametrize(
    ("compat", "status"), [("14.1", Status.PASS), ("14.0", Status.WARN), ("13.4", Status.FAIL), (None, Status.FAIL)]
)
def test_forward_compatibility_carries_as_far_as_its_own_cuda(compat: str | None, status: Status) -> None:
    assert cuda_found({**TORCH, "cuda": "14.1"}, image="14.1.0", compat=compat).status is status


def test_the_compiler_that_cuda_compat_brings_is_no_library_of_another_driver() -> None:
    libraries = {
        "libcuda.so.1": "590.10",
        "libnvidia-ptxjitcompiler.so.1": "590.10",
        "libnvidia-ml.so.1": "580.95.05",
    }
    system = record("versions.system", {"python": "3.12.3", "driver_libraries": libraries})
    for compat, status in ((True, Status.PASS), (False, Status.FAIL)):
        values = {"library": "/usr/lib/libcuda.so.590.10", "version": "590.10", "result": 0, "forward_compat": compat}
        (finding,) = found(system, record("versions.cuda", values))["container.library"]
        assert finding.status is status, finding.message


@pytest.mark.parametrize(
    ("built", "torch", "status"),
    [(False, "13.0", Status.SKIP), (True, "13.0", Status.FAIL), (False, None, Status.FAIL)],
)
def test_a_tensorflow_for_the_processor_is_a_skip_beside_a_pytorch_for_gpus(
    built: bool, torch: str | None, status: Status
) -> None:
    run = {"count": 0, "compute_dtype": "float16", "max_error": 0.0}
    records = (
        record("versions.torch", {**TORCH, "cuda": torch, "architectures": ["sm_75"]}),
        record("versions.tensorflow", {"version": "2.21.0", "built_with_cuda": built, "count": 0}, device="cpu"),
        record("frameworks.tensorflow", run, device="cpu"),
    )
    statuses = {finding.status for finding in found(*records)["framework.tensorflow"]}
    # Without a PyTorch for CUDA it is the wheel that is at fault, and is reported there.
    assert statuses == ({status} if torch else {Status.SKIP})


@pytest.mark.parametrize("reason", ["not run: the 900 s for all are used up", "PyTorch cannot be imported: OSError"])
def test_what_was_not_run_fails_nothing(reason: str) -> None:
    names = ("gpus.kernel", *(f"frameworks.{part}" for part in ("tensor", "amp", "matmul", "collective", "tensorflow")))
    answer = found(*(record(name, undetermined=reason) for name in names))
    reported = [finding for check, findings in answer.items() for finding in findings if reason in finding.message]
    assert {finding.check for finding in reported} == {
        "container.compute",
        *(name.replace("works", "work") for name in names[1:]),
    }
    assert {finding.status for finding in reported} == {Status.ERROR}


def test_a_simulated_gpu_is_a_skip_for_all_that_computes() -> None:
    """What the payload records on a node of the lab: libraries that are none, a PyTorch for the processor."""
    reason = "none of the passed GPUs can compute (records versions.nvml and versions.cuda)"
    records = (
        record("container", {"complete": True, "gpus": 1, "uuids": ["GPU-0"]}),
        record("versions.nvml", error=STUB),
        record("versions.cuda", error=STUB),
        record("versions.torch", TORCH_CPU, device="cpu"),
        record("gpus.kernel", device="cpu", skipped=reason),
        *(record(f"frameworks.{part}", device="cpu") for part in ("tensor", "amp", "matmul", "cudnn", "fp8", "memory")),
        record("frameworks.p2p", device="cpu", skipped="no GPUs to copy between"),
        record("frameworks.collective", {"backend": "gloo", "ranks": 2, "wrong": 0, "seconds": 0.1}, device="cpu"),
    )
    answer = found(*records, simulated=True)
    judged = {
        f"framework.{part}" for part in ("tensor", "amp", "matmul", "cudnn", "fp8", "memory", "p2p", "collective")
    }
    for check in judged | {"container.gpus", "container.compute"}:
        assert {finding.status for finding in answer[check]} == {Status.SKIP}, check
