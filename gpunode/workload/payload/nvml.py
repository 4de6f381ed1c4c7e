"""The management library as visible to a program inside: its version, its driver, its GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpunode.workload.payload.isolate import end_with_parent
from gpunode.workload.payload.library import DriverLibrary, cuda_version

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


class NvmlMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class MemoryWithReserve(ctypes.Structure):
    """nvmlMemory_v2_t: the driver's own memory is not in ``used``, as in nvidia-smi's output."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def versions() -> dict[str, Any]:
    """Return the values of ``versions.nvml``. Raises SkipPart without the library, Trouble if it is broken."""
    library = DriverLibrary("libnvidia-ml.so.1")
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
    values["driver_version"] = text_of(library, "nvmlSystemGetDriverVersion")
    number = ctypes.c_int()
    if library.call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number)) == 0:
        values["cuda_version"] = cuda_version(number.value)
    library.call("nvmlShutdown")
    return values


def text_of(library: DriverLibrary, function: str, *arguments: Any) -> str | None:
    """Return a text that NVML writes into a buffer; None if it does not."""
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    if library.call(function, *arguments, buffer, ctypes.c_uint(TEXT_BYTES)) != 0:
        return None
    return buffer.value.decode(errors="replace")


def gpu(library: DriverLibrary, index: int) -> dict[str, Any]:
    """Return one GPU; None for values that NVML does not report."""
    values: dict[str, Any] = {"index": index}
    handle = ctypes.c_void_p()
    result = library.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    if result != 0:
        # A lost GPU is counted, but has no handle.
        return {**values, "result": result, "result_name": library.text("nvmlErrorString", result)}
    values["name"] = text_of(library, "nvmlDeviceGetName", handle)
    values["uuid"] = text_of(library, "nvmlDeviceGetUUID", handle)
    pci = PciInfo()
    if library.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci)) == 0:
        values["pci_bus_id"] = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    major, minor = ctypes.c_int(), ctypes.c_int()
    answer = library.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    if answer == 0:
        values["compute_capability"] = f"{major.value}.{minor.value}"
    values.update(memory(library, handle))
    values["mig_mode"] = mig_mode(library, handle)
    if values["mig_mode"]:
        values["mig_devices"] = list(mig_devices(library, handle))
    return values


def memory(library: DriverLibrary, handle: ctypes.c_void_p) -> dict[str, int]:
    """Return ``memory_mib`` and ``memory_used_mib`` of a GPU or a MIG device; empty if NVML does not report them."""
    if library.has("nvmlDeviceGetMemoryInfo_v2"):
        newer = MemoryWithReserve(version=ctypes.sizeof(MemoryWithReserve) | 2 << 24)
        if library.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(newer)) == 0:
            return {"memory_mib": newer.total // 2**20, "memory_used_mib": newer.used // 2**20}
    older = NvmlMemory()
    if library.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(older)) == 0:
        return {"memory_mib": older.total // 2**20, "memory_used_mib": older.used // 2**20}
    return {}


def mig_mode(library: DriverLibrary, handle: ctypes.c_void_p) -> bool | None:
    """Return True if the GPU is divided now; None if it cannot be, and for a library without MIG."""
    now, later = ctypes.c_uint(), ctypes.c_uint()
    if not library.has("nvmlDeviceGetMigMode"):
        return None
    result = library.call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(later))
    return bool(now.value) if result == 0 else None


def mig_devices(library: DriverLibrary, handle: ctypes.c_void_p) -> Iterator[dict[str, Any]]:
    """Yield the MIG devices of a GPU that this container may use: indices without a device are skipped."""
    most = ctypes.c_uint()
    if library.call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most)) != 0:
        return
    for index in range(min(most.value, MAX_GPUS)):
        part = ctypes.c_void_p()
        if library.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index), ctypes.byref(part)) != 0:
            continue
        values: dict[str, Any] = {"index": index, "name": text_of(library, "nvmlDeviceGetName", part)}
        values["uuid"] = text_of(library, "nvmlDeviceGetUUID", part)
        values.update(memory(library, part))
        yield values


@contextlib.contextmanager
def held(limit_s: float) -> Iterator[bool]:
    """Keep every GPU open in the context: without persistence the driver stops and starts all GPUs between two
    processes.

    In a process of its own, because the library may hang or crash; False if nothing is held.
    """
    ready_from, ready_to = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _hold(ready_to)
    os.close(ready_to)
    try:
        heard = select.select([ready_from], [], [], max(0.0, limit_s))[0]
        yield bool(heard and os.read(ready_from, 1))
    finally:
        os.close(ready_from)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
        until = time.monotonic() + 5.0
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(child, os.WNOHANG)[0] and time.monotonic() < until:
                time.sleep(0.01)


def _hold(ready_to: int) -> None:
    try:
        end_with_parent()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        library = DriverLibrary("libnvidia-ml.so.1")
        count, handle = ctypes.c_uint(), ctypes.c_void_p()
        if library.call("nvmlInit_v2") == 0 and library.call("nvmlDeviceGetCount_v2", ctypes.byref(count)) == 0:
            for index in range(min(count.value, MAX_GPUS)):
                # NVML opens a GPU when its handle is requested.
                library.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            os.write(ready_to, b".")
            signal.pause()
    finally:
        os._exit(0)
