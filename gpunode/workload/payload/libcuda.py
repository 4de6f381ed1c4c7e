"""The driver's own interface: whether CUDA starts, which version it has, which GPUs it sees."""

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
    """Return the values of ``versions.cuda``. Raises SkipPart without the library, Trouble if it is broken.

    ``module``: the version of the kernel module by NVML, used if /proc does not show it.
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
    """Return whether this libcuda is cuda-compat's, which replaces that of an older driver.

    The folder is not sufficient: older toolkits mount it among the driver's own libraries. A library that is newer than
    the module and works can only be cuda-compat's. One that is refused differs from the library of an update without a
    reboot in its branch: an update mostly stays in the module's branch, cuda-compat never does.
    """
    if "/compat/" in path:
        return True
    inside, outside = as_numbers(version_in_name(path)), as_numbers(module)
    if not inside or not outside or inside <= outside:
        return False
    return result == 0 or (result in (MISMATCH, NO_COMPAT) and inside[0] > outside[0])


def as_numbers(version: str | None) -> tuple[int, ...]:
    """Return ``580.95.05`` as numbers that compare; empty for None and for a version that is only a major one."""
    numbers = tuple(int(part) for part in (version or "").split(".") if part.isdigit())
    return numbers if len(numbers) > 1 else ()


def error_name(library: DriverLibrary, code: int) -> str | None:
    """Return ``CUDA_ERROR_SYSTEM_DRIVER_MISMATCH``."""
    name = ctypes.c_char_p()
    if library.call("cuGetErrorName", ctypes.c_int(code), ctypes.byref(name)) != 0 or not name.value:
        return None
    return name.value.decode(errors="replace")


def gpu(library: DriverLibrary, index: int) -> dict[str, Any]:
    """Return one GPU; None for values that CUDA does not report."""
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
    """Return ``GPU-…``, or ``MIG-…`` of a MIG device; None if the library does not report which of the two it is."""
    raw = (ctypes.c_ubyte * 16)()
    newest = library.has("cuDeviceGetUuid_v2")
    function = "cuDeviceGetUuid_v2" if newest else "cuDeviceGetUuid"
    if not library.has(function) or library.call(function, ctypes.byref(raw), handle) != 0:
        return None
    # For a MIG device version 2 returns its own UUID, the older one its GPU's. The name distinguishes the two.
    buffer = ctypes.create_string_buffer(NAME_BYTES)
    library.call("cuDeviceGetName", buffer, ctypes.c_int(NAME_BYTES), handle)
    kind = "MIG" if newest and b" MIG " in buffer.value else "GPU"
    return f"{kind}-{uuid.UUID(bytes=bytes(raw))}"


def attribute(library: DriverLibrary, handle: ctypes.c_int, number: int) -> int:
    """Return one of CUDA's device attributes, 0 if it is not reported."""
    value = ctypes.c_int()
    library.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), handle)
    return value.value
