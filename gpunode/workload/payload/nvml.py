"""The management library as a program inside sees it: which one, which driver it talks to, which GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

from gpunode.workload.payload.library import Library, cuda_version

TEXT_BYTES = 96
MAX_GPUS = 64


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t, version 3."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def versions() -> dict[str, Any]:
    """Values of ``versions.nvml``. Raises Skip without the library, Trouble where it is broken."""
    library = Library("libnvidia-ml.so.1")
    result = library.call("nvmlInit_v2")
    values: dict[str, Any] = {"library": library.path or library.name, "result": result}
    if result != 0:
        values["result_name"] = library.text("nvmlErrorString", result)
        return values
    count = ctypes.c_uint()
    if library.call("nvmlDeviceGetCount_v2", ctypes.byref(count)) == 0:
        values["count"] = count.value
        values["gpus"] = [gpu(library, index) for index in range(min(count.value, MAX_GPUS))]
        values["device"] = "cuda" if count.value else "cpu"
    values["driver_version"] = said(library, "nvmlSystemGetDriverVersion")
    number = ctypes.c_int()
    if library.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number)) == 0:
        values["cuda_version"] = cuda_version(number.value)
    library.call("nvmlShutdown")
    return values


def said(library: Library, function: str, *arguments: Any) -> str | None:
    """A text that NVML writes into a buffer; None where it does not."""
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    if library.call(function, *arguments, buffer, ctypes.c_uint(TEXT_BYTES)) != 0:
        return None
    return buffer.value.decode(errors="replace")


def gpu(library: Library, index: int) -> dict[str, Any]:
    """One GPU; None for what NVML does not tell."""
    values: dict[str, Any] = {"index": index}
    handle = ctypes.c_void_p()
    if library.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return values
    values["name"] = said(library, "nvmlDeviceGetName", handle)
    values["uuid"] = said(library, "nvmlDeviceGetUUID", handle)
    pci = PciInfo()
    if library.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci)) == 0:
        values["pci_bus_id"] = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    major, minor = ctypes.c_int(), ctypes.c_int()
    answer = library.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    if answer == 0:
        values["compute_capability"] = f"{major.value}.{minor.value}"
    memory = Memory()
    if library.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)) == 0:
        values["memory_mib"] = memory.total // 2**20
    return values
