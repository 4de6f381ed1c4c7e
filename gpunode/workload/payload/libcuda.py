"""The driver's own interface: does CUDA start, which version does it run, which GPUs does it see."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from gpunode.workload.payload.image import version_in_name
from gpunode.workload.payload.library import Library, cuda_version

MAX_GPUS = 64
# CUdevice_attribute
_MAJOR, _MINOR, _BUS, _DEVICE, _DOMAIN = 75, 76, 33, 34, 50


def versions() -> dict[str, Any]:
    """Values of ``versions.cuda``. Raises Skip without the library, Trouble where it is broken."""
    library = Library("libcuda.so.1")
    path = os.path.realpath(library.path or library.name)
    result = library.call("cuInit", ctypes.c_uint(0))
    values: dict[str, Any] = {
        "library": path,
        "version": version_in_name(path),
        "result": result,
        "forward_compat": "/compat/" in path,
    }
    number = ctypes.c_int()
    if library.call("cuDriverGetVersion", ctypes.byref(number)) == 0 and number.value:
        values["cuda_version"] = cuda_version(number.value)
    if result != 0:
        values["result_name"] = error_name(library, result)
        return values
    count = ctypes.c_int()
    if library.call("cuDeviceGetCount", ctypes.byref(count)) == 0:
        values["count"] = count.value
        values["gpus"] = [gpu(library, index) for index in range(min(count.value, MAX_GPUS))]
        values["device"] = "cuda" if count.value else "cpu"
    return values


def error_name(library: Library, code: int) -> str | None:
    """``CUDA_ERROR_SYSTEM_DRIVER_MISMATCH``."""
    name = ctypes.c_char_p()
    if library.call("cuGetErrorName", ctypes.c_int(code), ctypes.byref(name)) != 0 or not name.value:
        return None
    return name.value.decode(errors="replace")


def gpu(library: Library, index: int) -> dict[str, Any]:
    """One GPU; None for what CUDA does not tell."""
    values: dict[str, Any] = {"index": index}
    handle = ctypes.c_int()
    if library.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index)) != 0:
        return values
    buffer = ctypes.create_string_buffer(96)
    if library.call("cuDeviceGetName", buffer, ctypes.c_int(96), handle) == 0:
        values["name"] = buffer.value.decode(errors="replace")
    values["pci_bus_id"] = "{:04x}:{:02x}:{:02x}.0".format(
        *tuple(attribute(library, handle, a) for a in (_DOMAIN, _BUS, _DEVICE))
    )
    values["compute_capability"] = f"{attribute(library, handle, _MAJOR)}.{attribute(library, handle, _MINOR)}"
    size = ctypes.c_size_t()
    if library.call("cuDeviceTotalMem_v2", ctypes.byref(size), handle) == 0:
        values["memory_mib"] = size.value // 2**20
    return values


def attribute(library: Library, handle: ctypes.c_int, number: int) -> int:
    """One of CUDA's device attributes, 0 where it is not told."""
    value = ctypes.c_int()
    library.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), handle)
    return value.value
