"""Devices as torch.cuda counts them: by NVML first, by CUDA where it has to compute."""

import ctypes
import os
from types import SimpleNamespace


def _nvml_count() -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.startswith("MIG-"):
        return -1
    library = ctypes.CDLL("libnvidia-ml.so.1")
    count = ctypes.c_int(-1)
    if library.nvmlInit() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return -1
    return count.value if chosen is None else len([name for name in chosen.split(",") if name])


def _cuda_count() -> int:
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def device_count() -> int:
    """Devices, before and after CUDA has started."""
    counted = _nvml_count()
    return counted if counted >= 0 else _cuda_count()


def is_available() -> bool:
    """CUDA itself counts at least one."""
    return _cuda_count() > 0


def init() -> None:
    """Start CUDA in this process."""
    if _cuda_count() == 0:
        raise RuntimeError("No CUDA GPUs are available")


def get_device_properties(index: int) -> SimpleNamespace:
    """Of a device that CUDA gave this process."""
    init()
    if not 0 <= index < _cuda_count():
        raise AssertionError("Invalid device id")
    library = ctypes.CDLL("libcuda.so.1")
    name, size, major, minor = ctypes.create_string_buffer(96), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    library.cuDeviceGetName(name, 96, index)
    library.cuDeviceTotalMem_v2(ctypes.byref(size), index)
    library.cuDeviceGetAttribute(ctypes.byref(major), 75, index)
    library.cuDeviceGetAttribute(ctypes.byref(minor), 76, index)
    return SimpleNamespace(name=name.value.decode(), total_memory=size.value, major=major.value, minor=minor.value)


def get_device_capability(device: object) -> tuple[int, int]:
    """Of the one device that this process has."""
    seen = get_device_properties(0)
    return seen.major, seen.minor
