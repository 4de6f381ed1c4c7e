"""The driver's libraries by ctypes, against the stub libraries: what is read, and what is wrong with one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_driver import COMPILER, Gpu, Machine, built, install, run, write

import gpunode
from gpunode.facts.models.workload import CudaValues, NvmlValues, Record, values_of
from gpunode.workload.payload.libcuda import is_forward_compat

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here: apt-get install gcc")
MACHINE = Machine((Gpu(), Gpu(state="nvml")))


def records_of(machine: Machine, root: Path) -> dict[str, Record]:
    return {record.record: record for record in run(machine, root, "versions")}


def nvml_of(records: dict[str, Record]) -> NvmlValues:
    values = values_of(records["versions.nvml"], NvmlValues)
    assert isinstance(values, NvmlValues), values
    return values


def cuda_of(records: dict[str, Record]) -> CudaValues:
    values = values_of(records["versions.cuda"], CudaValues)
    assert isinstance(values, CudaValues), values
    return values


def test_both_are_read(tmp_path: Path) -> None:
    records = records_of(MACHINE, tmp_path)
    nvml = nvml_of(records)
    assert records["versions.nvml"].device == "cuda"
    assert (nvml.result, nvml.driver_version, nvml.cuda_version, nvml.count) == (0, "580.95.05", "13.0", 2)
    assert nvml.library == str(tmp_path / "lib" / "libnvidia-ml.so.580.95.05")
    assert [(gpu.uuid, gpu.pci_bus_id, gpu.compute_capability, gpu.memory_mib, gpu.mig_mode) for gpu in nvml.gpus] == [
        (MACHINE.uuid(0), "0000:18:00.0", "9.0", 81559, False),
        (MACHINE.uuid(1), "0000:19:00.0", "9.0", 81559, False),
    ]
    cuda = cuda_of(records)
    assert (cuda.result, cuda.version, cuda.cuda_version, cuda.count) == (0, "580.95.05", "13.0", 1)
    assert cuda.forward_compat is False
    (gpu,) = cuda.gpus
    assert (gpu.name, gpu.uuid, gpu.pci_bus_id, gpu.compute_capability, gpu.memory_mib) == (
        "NVIDIA H100 80GB HBM3",
        MACHINE.uuid(0),
        "0000:18:00.0",
        "9.0",
        81559,
    )
    system = records["versions.system"].values["driver_libraries"]
    assert set(system.values()) == {"580.95.05"}
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= set(system)


def test_a_library_that_does_not_fit_is_reported_in_its_own_words(tmp_path: Path) -> None:
    nvml = nvml_of(records_of(Machine(MACHINE.gpus, nvml_init=18), tmp_path))
    assert (nvml.result, nvml.result_name, nvml.count) == (18, "Driver/library version mismatch", None)


def test_a_gpu_that_is_lost_is_counted_and_named_by_its_error(tmp_path: Path) -> None:
    nvml = nvml_of(records_of(Machine((Gpu(), Gpu(state="lost"))), tmp_path))
    assert nvml.count == 2
    assert [(gpu.result, gpu.result_name, gpu.uuid is None) for gpu in nvml.gpus] == [
        (0, None, False),
        (15, "GPU is lost", True),
    ]


@pytest.mark.parametrize(("code", "name"), [(802, "CUDA_ERROR_SYSTEM_NOT_READY"), (46, None)])
def test_cuda_that_does_not_start_reports_why(tmp_path: Path, code: int, name: str | None) -> None:
    cuda = cuda_of(records_of(Machine(MACHINE.gpus, cu_init=code), tmp_path))
    assert (cuda.result, cuda.result_name, cuda.count) == (code, name, None)
    assert cuda.cuda_version == "13.0"


def test_a_crash_in_the_driver_takes_one_record_with_it(tmp_path: Path) -> None:
    records = records_of(Machine(MACHINE.gpus, cu_init=11), tmp_path)
    assert records["versions.cuda"].error is not None
    assert records["versions.cuda"].error.startswith("crashed with SIGABRT")
    assert nvml_of(records).count == 2


@pytest.mark.parametrize(
    ("path", "module", "result", "compat"),
    [
        ("/usr/local/cuda-12.8/compat/libcuda.so.570.124.06", "580.95.05", 0, True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06", "535.183.01", 0, True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06", "535.183.01", 804, True),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06", "535.183.01", 803, True),
        # An update with a module that waits for a reboot: 804 on GeForce, 803 on others.
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.470.223.02", "470.182.03", 804, False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.580.105.08", "580.95.05", 803, False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01", "535.183.01", 0, False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.535.183.01", "580.95.05", 0, False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06", "535.183.01", 999, False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.124.06", None, 0, False),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "535.183.01", 0, False),
    ],
)
def test_forward_compat_is_a_newer_library_at_work(path: str, module: str | None, result: int, compat: bool) -> None:
    assert is_forward_compat(path, module, result) is compat


@pytest.mark.parametrize(
    ("name", "record", "reported"),
    [
        ("libnvidia-ml", "versions.nvml", "has no function nvmlInit_v2: is it the real library?"),
        ("libcuda", "versions.cuda", "cannot be loaded"),
    ],
)
def test_a_library_that_is_none_is_reported(tmp_path: Path, name: str, record: str, reported: str) -> None:
    # One is the library of the other; one is an empty file.
    content = built("cuda") if name == "libnvidia-ml" else b""
    write(tmp_path / "broken" / f"{name}.so.580.95.05", f"{name}.so.1", content)
    machine = Machine(MACHINE.gpus, environment={"LD_LIBRARY_PATH": str(tmp_path / "broken")})
    error = records_of(machine, tmp_path)[record].error
    assert error is not None
    assert reported in error


HOLD = """
import pathlib
from gpunode.workload.payload import nvml
def children():
    return pathlib.Path("/proc/self/task").glob("*/children")
with nvml.held(20.0) as ready:
    pids = [pid for file in children() for pid in file.read_text().split()]
    print(ready, ["libnvidia-ml" in pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in pids])
print([file.read_text() for file in children()])
"""


@pytest.mark.parametrize(("installed", "reported"), [(True, "True [True]\n['']\n"), (False, "False []\n['']\n")])
def test_the_gpus_are_kept_open_by_a_process_that_ends(tmp_path: Path, installed: bool, reported: str) -> None:
    environment = install(MACHINE, tmp_path) if installed else {}
    answer = subprocess.run(
        [sys.executable, "-c", HOLD],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(gpunode.__file__).parents[1]), **environment},
    )
    # A process that ended by itself is still an entry until it is waited for.
    assert answer.stdout in (reported, reported.replace("False []", "False [False]"))
