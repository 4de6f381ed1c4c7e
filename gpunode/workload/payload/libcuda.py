"""The driver's own interface: does CUDA start, which version does it run, which GPUs does it see."""

from __future__ import annotations

import ctypes
import os
import uuid
from typing import Any

from gpunode.workload.payload.image import module_version, version_in_name
from gpunode.workload.payload.library import DriverLibrary, cuda_version

MAX_GPUS = 64
NAME_BYTES = 128
# CUdevice_attribute
_MAJOR, _MINOR, _BUS, _DEVICE, _DOMAIN = 75, 76, 33, 34, 50


# CUresult
MISMATCH, NO_COMPAT = 803, 804


def versions(module: str | None) -> dict[str, Any]:
    """Values of ``versions.cuda``. Raises SkipPart without the library, Trouble where it is broken.

    ``module``: the version of the kernel module by NVML, for where /proc does not show it.
    """
    library = DriverLibrary("libcuda.so.1")
    path = os.path.realpath(library.path or library.name)
    result = library.call("cuInit", ctypes.c_uint(0))
    values: dict[str, Any] = {
        "library": path,
        "version": version_in_name(path),
        "result": result,
        "forward_compat": is_forward_compat(path, module_version() or module, result),
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


def is_forward_compat(path: str, module: str | None, result: int) -> bool:
    """Whether this libcuda is cuda-compat's, which stands in for that of an older driver.

    Not by its folder alone: older toolkits mount it among the driver's own libraries. Newer than the module and at work
    it can be nothing else. One that is refused is told from the library of an update without a reboot by its branch:
    an update stays within the module's most often, cuda-compat never does.
    """
    if "/compat/" in path:
        return True
    inside, outside = as_numbers(version_in_name(path)), as_numbers(module)
    if not inside or not outside or inside <= outside:
        return False
    return result == 0 or (result in (MISMATCH, NO_COMPAT) and inside[0] > outside[0])


def as_numbers(version: str | None) -> tuple[int, ...]:
    """``580.95.05`` as numbers that compare; empty for None and for what is only a major version."""
    numbers = tuple(int(part) for part in (version or "").split(".") if part.isdigit())
    return numbers if len(numbers) > 1 else ()


def error_name(library: DriverLibrary, code: int) -> str | None:
    """``CUDA_ERROR_SYSTEM_DRIVER_MISMATCH``."""
    name = ctypes.c_char_p()
    if library.call("cuGetErrorName", ctypes.c_int(code), ctypes.byref(name)) != 0 or not name.value:
        return None
    return name.value.decode(errors="replace")


def gpu(library: DriverLibrary, index: int) -> dict[str, Any]:
    """One GPU; None for what CUDA does not tell."""
    values: dict[str, Any] = {"index": index}
    handle = ctypes.c_int()
    if library.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(index)) != 0:
        return values
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    if library.call("cuDeviceGetName", buffer, ctypes.c_int(NAME_BYTES), handle) == 0:
        values["name"] = buffer.value.decode(errors="replace")
    number = uuid_of(library, handle)
    if number is not None:
        values["uuid"] = number
    values["pci_bus_id"] = "{:04x}:{:02x}:{:02x}.0".format(
        *tuple(attribute(library, handle, a) for a in (_DOMAIN, _BUS, _DEVICE))
    )
    values["compute_capability"] = f"{attribute(library, handle, _MAJOR)}.{attribute(library, handle, _MINOR)}"
    size = ctypes.c_size_t()
    if library.call("cuDeviceTotalMem_v2", ctypes.byref(size), handle) == 0:
        values["memory_mib"] = size.value // 2**20
    return values


def uuid_of(library: DriverLibrary, handle: ctypes.c_int) -> str | None:
    """``GPU-…``, or ``MIG-…`` of a MIG device; None where the library does not tell which of the two it is."""
    raw = (ctypes.c_ubyte * 16)()
    newest = library.has("cuDeviceGetUuid_v2")
    function = "cuDeviceGetUuid_v2" if newest else "cuDeviceGetUuid"
    if not library.has(function) or library.call(function, ctypes.byref(raw), handle) != 0:
        return None
    # Of a MIG device version 2 gives its own, the older one its GPU's. The name is what tells the two apart.
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    library.call("cuDeviceGetName", buffer, ctypes.c_int(NAME_BYTES), handle)
    kind = "MIG" if newest and b" MIG " in buffer.value else "GPU"
    return f"{kind}-{uuid.UUID(bytes=bytes(raw))}"


def attribute(library: DriverLibrary, handle: ctypes.c_int, number: int) -> int:
    """One of CUDA's device attributes, 0 where it is not told."""
    value = ctypes.c_int()
    library.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), handle)
    return value.value
