"""The driver's libraries by ctypes, against shared objects that are built here with the real names and signatures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.models.workload import CudaValues, NvmlValues, Record, values_of
from gpunode.workload.payload import payload_zip

COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")

# The structures are written as NVIDIA's headers have them, not as the payload has them.
NVML = r"""
#include <string.h>
#include <stdlib.h>
typedef struct {
  char busIdLegacy[16]; unsigned domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32];
} nvmlPciInfo_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct dev { int n; } *nvmlDevice_t;
static struct dev devices[2] = {{0}, {1}};
static int code(void) { return getenv("NVML_CODE") ? atoi(getenv("NVML_CODE")) : 0; }
int nvmlInit_v2(void) { return code(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int c) { return c == 18 ? "Driver/library version mismatch" : "Unknown"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlSystemGetDriverVersion(char *b, unsigned n) { strncpy(b, "580.95.05", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d) { *d = &devices[i]; return 0; }
int nvmlDeviceGetName(nvmlDevice_t d, char *b, unsigned n) { strncpy(b, "NVIDIA H100 80GB HBM3", n); return 0; }
int nvmlDeviceGetUUID(nvmlDevice_t d, char *b, unsigned n) { strncpy(b, d->n ? "GPU-b" : "GPU-a", n); return 0; }
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) {
  memset(p, 0xff, sizeof *p); p->domain = 0; p->bus = d->n ? 0x2a : 0x18; p->device = 0; return 0; }
int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *a, int *b) { *a = 9; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
  if (d->n) return 3; m->total = 85520809984ULL; m->free = 1; m->used = 2; return 0; }
"""
CUDA = r"""
#include <string.h>
#include <stdlib.h>
typedef int CUdevice;
static int code(void) { return getenv("CUDA_CODE") ? atoi(getenv("CUDA_CODE")) : 0; }
int cuInit(unsigned flags) { if (code() == 11) abort(); return flags ? 1 : code(); }
int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
int cuGetErrorName(int c, const char **s) { *s = c == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : 0; return *s ? 0 : 1; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(CUdevice *d, int i) { *d = 7 + i; return 0; }
int cuDeviceGetName(char *b, int n, CUdevice d) { strncpy(b, d == 7 ? "NVIDIA H100" : "?", n); return 0; }
int cuDeviceTotalMem_v2(size_t *n, CUdevice d) { *n = 1024UL * 1024 * 81559; return 0; }
int cuDeviceGetAttribute(int *v, int attribute, CUdevice d) {
  switch (attribute) { case 75: *v = 9; break; case 76: *v = 0; break; case 33: *v = 0x18; break;
    case 34: *v = 0; break; case 50: *v = 1; break; default: return 1; } return 0; }
"""


def build(folder: Path, name: str, source: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.c").write_text(source)
    library = folder / name
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-w", "-o", str(library), str(folder / "source.c")], check=True, timeout=60
    )
    link = folder / (name.split(".so", maxsplit=1)[0] + ".so.1")
    link.symlink_to(library.name)
    return library


def run(folder: Path, tmp_path: Path, **environment: str) -> dict[str, Record]:
    archive = tmp_path / "payload.pyz"
    archive.write_bytes(payload_zip())
    answer = subprocess.run(
        [sys.executable, "-I", str(archive), "--tests", "versions"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(folder), **environment},
    )
    records = [Record.model_validate_json(line) for line in answer.stdout.splitlines()[:-1]]
    return {record.record: record for record in records}


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    build(tmp_path / "lib", "libnvidia-ml.so.580.95.05", NVML)
    build(tmp_path / "lib", "libcuda.so.580.95.05", CUDA)
    return tmp_path / "lib"


def nvml_of(records: dict[str, Record]) -> NvmlValues:
    values = values_of(records["versions.nvml"], NvmlValues)
    assert isinstance(values, NvmlValues), values
    return values


def cuda_of(records: dict[str, Record]) -> CudaValues:
    values = values_of(records["versions.cuda"], CudaValues)
    assert isinstance(values, CudaValues), values
    return values


def test_both_are_read(libraries: Path, tmp_path: Path) -> None:
    records = run(libraries, tmp_path)
    nvml = nvml_of(records)
    assert records["versions.nvml"].device == "cuda"
    assert (nvml.result, nvml.driver_version, nvml.cuda_version, nvml.count) == (0, "580.95.05", "13.0", 2)
    assert nvml.library == str(libraries / "libnvidia-ml.so.580.95.05")
    assert [(gpu.uuid, gpu.pci_bus_id, gpu.compute_capability, gpu.memory_mib) for gpu in nvml.gpus] == [
        ("GPU-a", "0000:18:00.0", "9.0", 81559),
        ("GPU-b", "0000:2a:00.0", "9.0", None),
    ]
    cuda = cuda_of(records)
    assert (cuda.result, cuda.version, cuda.cuda_version, cuda.count) == (0, "580.95.05", "12.8", 1)
    assert cuda.forward_compat is False
    (gpu,) = cuda.gpus
    assert (gpu.name, gpu.pci_bus_id, gpu.compute_capability, gpu.memory_mib) == (
        "NVIDIA H100",
        "0001:18:00.0",
        "9.0",
        81559,
    )
    system = records["versions.system"].values["driver_libraries"]
    assert system == {"libcuda.so.1": "580.95.05", "libnvidia-ml.so.1": "580.95.05"}


def test_a_library_that_does_not_fit_says_so_in_its_own_words(libraries: Path, tmp_path: Path) -> None:
    nvml = nvml_of(run(libraries, tmp_path, NVML_CODE="18"))
    assert (nvml.result, nvml.result_name, nvml.count) == (18, "Driver/library version mismatch", None)


@pytest.mark.parametrize(("code", "name"), [("802", "CUDA_ERROR_SYSTEM_NOT_READY"), ("803", None)])
def test_cuda_that_does_not_start_says_why(libraries: Path, tmp_path: Path, code: str, name: str | None) -> None:
    cuda = cuda_of(run(libraries, tmp_path, CUDA_CODE=code))
    assert (cuda.result, cuda.result_name, cuda.count) == (int(code), name, None)
    assert cuda.cuda_version == "12.8"


def test_a_crash_in_the_driver_takes_one_record_with_it(libraries: Path, tmp_path: Path) -> None:
    records = run(libraries, tmp_path, CUDA_CODE="11")
    assert records["versions.cuda"].error is not None
    assert records["versions.cuda"].error.startswith("crashed with SIGABRT")
    assert nvml_of(records).count == 2


def test_forward_compat_is_seen_by_where_the_library_lies(libraries: Path, tmp_path: Path) -> None:
    compat = tmp_path / "cuda-12.8" / "compat"
    build(compat, "libcuda.so.570.124.06", CUDA)
    cuda = cuda_of(run(compat, tmp_path))
    assert (cuda.forward_compat, cuda.version) == (True, "570.124.06")


def test_a_library_without_its_functions_is_told_as_none(tmp_path: Path) -> None:
    build(tmp_path / "stub", "libnvidia-ml.so.580.95.05", "int nothing;")
    record = run(tmp_path / "stub", tmp_path)["versions.nvml"]
    assert record.error is not None
    assert "has no function nvmlInit_v2: is it the real library?" in record.error


def test_a_file_that_is_no_library_is_told(tmp_path: Path) -> None:
    folder: Any = tmp_path / "broken"
    folder.mkdir()
    (folder / "libcuda.so.1").write_bytes(b"")
    record = run(folder, tmp_path)["versions.cuda"]
    assert record.error is not None
    assert "cannot be loaded" in record.error
