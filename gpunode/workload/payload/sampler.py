"""The state of a GPU while a load runs on it: clocks, power, temperature, throttle reasons, sampled by NVML."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble
from gpunode.workload.payload.library import DriverLibrary

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
