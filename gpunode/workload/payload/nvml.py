"""The management library as visible inside: its version, driver and GPUs; the state of a GPU while a load runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, end_with_parent
from gpunode.workload.payload.libcuda import DriverLibrary, cuda_version

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


LOOK_S = 0.1
MAX_SAMPLES = 50_000
SM, MEMORY = 1, 2
"""nvmlClockType_t."""
GPU_IS_LOST = 15
"""nvmlReturn_t."""
REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
"""nvmlClocksThrottleReasons of nvml.h, without gpu_idle, by the names of nvidia-smi's XML."""
SETTLED_C = 1
"""A GPU has settled if its temperature changed by no more than this, in degrees, in the last seconds."""
SETTLE_WINDOW_S = 5


class Sensors:
    """One GPU by NVML. Raises SkipPart without a library, Trouble if it does not start or has no such GPU."""

    def __init__(self, uuid: str) -> None:
        self._library = DriverLibrary("libnvidia-ml.so.1")
        result = self._library.call("nvmlInit_v2")
        if result != 0:
            raise Trouble(f"nvmlInit: {self._library.text('nvmlErrorString', result) or result}")
        self._handle = ctypes.c_void_p()
        result = self._library.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        if result != 0:
            raise Trouble(f"NVML has no GPU {uuid}: {self._library.text('nvmlErrorString', result) or result}")
        self.lost = False
        """NVML no longer reaches the GPU."""

    def _number(self, function: str, kind: Any, *arguments: Any) -> int | None:
        if not self._library.has(function):
            return None
        reading = kind()
        result = self._library.call(function, self._handle, *arguments, ctypes.byref(reading))
        self.lost = self.lost or result == GPU_IS_LOST
        return int(reading.value) if result == 0 else None

    def temperature_c(self) -> int | None:
        """Return the temperature of the GPU's core."""
        return self._number("nvmlDeviceGetTemperature", ctypes.c_uint, ctypes.c_int(0))

    def sample(self) -> dict[str, float | int | None]:
        """Return one sample: ``sm_clock_mhz``, ``memory_clock_mhz``, ``power_w``, ``temperature_c``, ``reasons``."""
        power = self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        return {
            "sm_clock_mhz": self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_int(SM)),
            "memory_clock_mhz": self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_int(MEMORY)),
            "power_w": None if power is None else power / 1000,
            "temperature_c": self.temperature_c(),
            "reasons": self._number("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong),
        }


class Sampler:
    """Sampling in a thread during the context; without sensors (processor, no NVML) it has no samples."""

    def __init__(self, sensors: Any) -> None:
        self._sensors = sensors
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.samples: list[tuple[float, dict[str, Any]]] = []
        """With the time.monotonic() of each."""

    def __enter__(self) -> Sampler:
        if self._sensors is not None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            # A library that hangs stays until the process ends.
            self._thread.join(2.0)
        if isinstance(error, RuntimeError) and self._sensors is not None and self._sensors.lost:
            raise Trouble(f"the GPU was lost while it was measured (NVML: GPU is lost): {error}") from None

    def _run(self) -> None:
        while not self._stop.is_set() and len(self.samples) < MAX_SAMPLES:
            self.samples.append((time.monotonic(), self._sensors.sample()))
            self._stop.wait(LOOK_S)

    def state(self) -> dict[str, Any]:
        """Return the values of ``LoadState``."""
        return state_of([sample for _, sample in self.samples])


def sensors_of(uuid: str | None) -> Sensors | None:
    """Return the sensors of a GPU; None on a processor and if NVML has none: figures are valid without them."""
    if uuid is None:
        return None
    try:
        return Sensors(uuid)
    except (SkipPart, Trouble):
        return None


def state_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of ``LoadState`` from single samples."""

    def known(key: str) -> list[Any]:
        return [sample[key] for sample in samples if sample.get(key) is not None]

    def median(key: str) -> float | None:
        return round(statistics.median(known(key)), 1) if known(key) else None

    reasons = known("reasons")
    active = {name: sum(bool(mask & bit) for mask in reasons) for bit, name in REASONS.items()}
    return {
        "samples": len(samples),
        "sm_clock_mhz": median("sm_clock_mhz"),
        "sm_clock_min_mhz": min(known("sm_clock_mhz"), default=None),
        "memory_clock_mhz": median("memory_clock_mhz"),
        "power_w": median("power_w"),
        "temperature_c": max(known("temperature_c"), default=None),
        "throttle_reasons": {name: round(count / len(reasons), 3) for name, count in active.items() if count}
        if reasons
        else None,
    }


def settle(sensors: Any, limit_s: float, pause_s: float = 1.0) -> float:
    """Wait until the GPU's temperature no longer changes, at most ``limit_s``; return the seconds that it took."""
    started = time.monotonic()
    seen: list[int] = []
    while sensors is not None and time.monotonic() - started < limit_s:
        now = sensors.temperature_c()
        if now is None:
            break
        seen = [*seen, now][-SETTLE_WINDOW_S:]
        if len(seen) == SETTLE_WINDOW_S and max(seen) - min(seen) <= SETTLED_C:
            break
        time.sleep(pause_s)
    return time.monotonic() - started
