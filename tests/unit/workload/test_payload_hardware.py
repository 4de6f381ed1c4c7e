"""The payload on machines that the stub libraries describe, and the verdicts: docs/workload-hardware.md."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hardware import CASES, CHECKS, PAGE, Case, outcome, page, statuses
from stub_driver import COMPILER, PART_MIB, Gpu, Machine, python_with_torch, run

from gpunode.checks import Finding
from gpunode.facts.models.workload import KernelValues, NvmlValues, Record, TorchValues, values_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here: apt-get install gcc")
Results = Mapping[str, tuple[Case, list[Record], list[Finding]]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python_with_torch(tmp_path_factory.mktemp("torch") / "python")


@pytest.fixture(scope="module")
def results(python: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("machines")
    return {case.name: (case, *outcome(case, root / str(number), python)) for number, case in enumerate(CASES)}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_machine_gets_its_verdicts(results: Results, name: str) -> None:
    case, _, findings = results[name]
    assert {check: statuses(findings, check) for check in CHECKS} == dict.fromkeys(CHECKS, "pass") | dict(case.expected)


def test_the_page_is_up_to_date(results: Results) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(results.values()), "python tests/unit/workload/hardware.py"


def of(results: Results, name: str, record: str) -> list[Record]:
    return [candidate for candidate in results[name][1] if candidate.record == record]


MIG = "8 x H100, each in seven MIG devices 1g.10gb"


def test_every_mig_device_computes_in_a_process_of_its_own(results: Results) -> None:
    machine = results[MIG][0].machine
    kernels = [(kernel.component, values_of(kernel, KernelValues)) for kernel in of(results, MIG, "gpus.kernel")]
    assert {component for component, _ in kernels} == {f"cuda:{gpu}:{part}" for gpu in range(8) for part in range(7)}
    for component, values in kernels:
        assert isinstance(values, KernelValues), values
        gpu, part = (int(number) for number in component.split(":")[1:])
        assert (values.uuid, values.gpu_uuid, values.mig) == (machine.uuid(gpu, part), machine.uuid(gpu), part)
        assert (values.memory_mib, values.wrong) == (PART_MIB, 0)


def test_pytorch_is_asked_beside_one_mig_device(results: Results) -> None:
    (record,) = of(results, MIG, "versions.torch")
    torch = values_of(record, TorchValues)
    assert isinstance(torch, TorchValues), torch
    assert (record.error, torch.available, torch.count) == (None, True, 1)
    assert [gpu.memory_mib for gpu in torch.gpus] == [PART_MIB]


def test_what_a_device_finds_is_reported_of_the_gpu_of_the_host(results: Results) -> None:
    for name, expected in (
        (MIG, {f"gpu{gpu}/mig{part}" for gpu in range(8) for part in range(7)}),
        ("GH200", {"gpu0"}),
    ):
        assert {finding.component for finding in results[name][2] if finding.check == "container.compute"} == expected


def test_nothing_is_started_on_a_gpu_that_was_not_handed_in(results: Results) -> None:
    (kernel,) = of(results, "somebody else's GPU by a stale CDI specification", "gpus.kernel")
    assert (kernel.component, kernel.skipped is not None) == ("node", True)


def test_a_gpu_in_mig_mode_without_an_instance_has_no_device(tmp_path: Path) -> None:
    records = {record.record: record for record in run(Machine((Gpu(mig="on"),)), tmp_path)}
    nvml = values_of(records["versions.nvml"], NvmlValues)
    assert isinstance(nvml, NvmlValues)
    assert [(gpu.mig_mode, gpu.mig_devices) for gpu in nvml.gpus] == [(True, ())]
    assert records["gpus.kernel"].skipped is not None


@pytest.mark.parametrize(("force", "tried"), [(False, "undetermined"), (True, "values")])
def test_a_busy_gpu_is_left_alone_unless_forced(tmp_path: Path, force: bool, tried: str) -> None:
    machine = Machine((Gpu(used=500),))
    settings = {"gpus": {machine.uuid(0): 4}, "force": force}
    (kernel,) = [record for record in run(machine, tmp_path, "gpus", settings) if record.record == "gpus.kernel"]
    assert (kernel.undetermined is not None) == (tried == "undetermined")
    assert kernel.error is None


def test_the_gpus_that_the_variable_names_are_the_ones(tmp_path: Path) -> None:
    machine = Machine((Gpu(),) * 3)
    chosen = Machine(machine.gpus, environment={"CUDA_VISIBLE_DEVICES": f"{machine.uuid(2)},{machine.uuid(0)}"})
    kernels = [record for record in run(chosen, tmp_path, "gpus") if record.record == "gpus.kernel"]
    assert {kernel.component for kernel in kernels} == {"cuda:0", "cuda:2"}
    assert {kernel.error for kernel in kernels} == {None}


def test_without_the_management_library_cuda_names_the_devices(tmp_path: Path) -> None:
    machine = Machine((Gpu(),) * 2, nvml_init=9)
    kernels = [record for record in run(machine, tmp_path, "gpus") if record.record == "gpus.kernel"]
    assert sorted((kernel.component, kernel.values["uuid"], kernel.error) for kernel in kernels) == [
        ("cuda:0", machine.uuid(0), None),
        ("cuda:1", machine.uuid(1), None),
    ]


def test_a_gpu_that_is_older_than_the_kernel_is_a_skip(tmp_path: Path) -> None:
    (kernel,) = [
        record
        for record in run(Machine((Gpu(capability="3.7", mig="-"),)), tmp_path, "gpus")
        if record.record == "gpus.kernel"
    ]
    assert kernel.skipped == "compute capability 3.7, the kernel is compiled for 5.0 or later"


@pytest.mark.parametrize(
    ("gpus", "components"),
    [((Gpu(),) * 2, {"cuda:0", "cuda:1"}), ((Gpu(mig="on", parts=2), Gpu()), {"cuda:0:0", "cuda:0:1", "cuda:1"})],
)
def test_every_device_is_given_every_part_of_pytorch(
    tmp_path: Path, python: str, gpus: tuple[Gpu, ...], components: set[str]
) -> None:
    """The stub computes nothing: what counts is on which devices the parts were tried, and which need no computing."""
    machine = Machine(gpus, environment={"PATH": "/nonexistent"})
    records = run(machine, tmp_path, "frameworks", {"compile_min_capability": "7.0"}, python)
    for part in ("tensor", "amp", "matmul", "cudnn", "fp8", "memory"):
        attempts = [record for record in records if record.record == f"frameworks.{part}"]
        assert {record.component for record in attempts} == components, part
        # FP8 is missed by the stub itself: left out, and not of a GPU.
        assert {record.device for record in attempts} == {"cuda" if part != "fp8" else "cpu"}, part
        assert len({record.values["uuid"] for record in attempts}) == len(components), part
    (compiled,) = [record for record in records if record.record == "frameworks.compile"]
    assert (compiled.error, compiled.undetermined) == (None, None)
    assert str(compiled.skipped).startswith("torch.compile needs a compiler, which the image lacks")


def test_a_build_for_cuda_that_finds_no_gpu_does_not_compute_on_the_processor(tmp_path: Path, python: str) -> None:
    machine = Machine((Gpu(),), cu_init=999)
    records = {record.record: record for record in run(machine, tmp_path, "versions,frameworks", {}, python)}
    torch = values_of(records["versions.torch"], TorchValues)
    assert isinstance(torch, TorchValues)
    assert (torch.available, torch.unavailable) == (False, "RuntimeError: No CUDA GPUs are available")
    tensor = records["frameworks.tensor"]
    assert tensor.error == "PyTorch 2.13.0+cu130 (CUDA 13.0) finds no GPU: RuntimeError: No CUDA GPUs are available"
    assert tensor.device == "cuda"


def test_nothing_at_all_is_started_where_no_gpu_may_be_used(tmp_path: Path, python: str) -> None:
    """Somebody else's GPU, and one that somebody took: no framework finds its way there by itself."""
    machine = Machine((Gpu(used=9000),))
    for settings in ({"gpus": {"GPU-of-mine": 4}}, {"gpus": {machine.uuid(0): 4}}):
        records = run(machine, tmp_path, "gpus,frameworks", settings, python)
        ran = [record.record for record in records if (record.skipped, record.undetermined) == (None, None)]
        assert ran == []
        (tensorflow,) = [record for record in records if record.record == "frameworks.tensorflow"]
        assert tensorflow.skipped != "TensorFlow is not in the image"
