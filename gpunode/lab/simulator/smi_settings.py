"""Settings of ``nvidia-smi``: persistence, power, clocks, ECC, MIG, compute mode, reset."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from . import state
from .node import SimulatedGpu
from .readings import maximum_clocks

INVALID, NOT_SUPPORTED, NO_PERMISSION, IN_USE = 2, 3, 4, 19
MODES = {
    "0": "Default", "DEFAULT": "Default", "2": "Prohibited", "PROHIBITED": "Prohibited",
    "3": "Exclusive_Process", "EXCLUSIVE_PROCESS": "Exclusive_Process",
}  # fmt: skip
DONE = "All done.\n"
MOVING_ON = "Treating as warning and moving on.\n"


class RefusedError(Exception):
    """A setting that one GPU refuses: exit code and text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


def run(gpus: list[SimulatedGpu], options: dict[str, str]) -> tuple[int, str] | None:
    """Return exit code and text of the requested setting; None if none is requested."""
    requested = [name for name in _SETTINGS if name in options]
    if not requested:
        return None
    code, text = 0, ""
    for name in requested:
        if os.geteuid() != 0 and not os.environ.get("GPUNODE_LAB_ROOT"):
            return NO_PERMISSION, text + _SETTINGS[name][1].format(gpus[0].bus_id) + ": Insufficient Permissions\n"
        for gpu in gpus:
            try:
                if name == "r" and not gpu.busy:
                    from . import faults  # noqa: PLC0415 (it loads all that produces faults)

                    faults.at_reset(gpu.number)
                text += _apply(gpu, _SETTINGS[name][0], options[name])
            except RefusedError as err:
                code, text = err.code, text + err.text
        if not code:
            text += DONE
    return code, text


def _apply(gpu: SimulatedGpu, setting: Callable[..., str], value: str) -> str:
    if gpu.lost:
        raise RefusedError(15, f"Unable to determine the device handle for GPU {gpu.sysfs_id}: GPU is lost\n")
    with _changed(gpu) as (kept, running):
        key = str(gpu.number)
        record = kept.setdefault("gpus", {}).setdefault(key, {})
        now = running.setdefault("gpus", {}).setdefault(key, {})
        text = setting(gpu, value, record, now)
        if not now.get("persistence", False) and not gpu.busy:
            forget(now)
        return text


@contextlib.contextmanager
def _changed(gpu: SimulatedGpu) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the state for changes; a container has it read-only, so its root cannot change the node."""
    try:
        with state.change() as both:
            yield both
    except OSError:
        raise RefusedError(NO_PERMISSION, f"Unable to change GPU {gpu.bus_id}: Insufficient Permissions\n") from None


def _switch(value: str, option: str) -> bool:
    word = value.upper()
    if word in ("1", "ENABLED"):
        return True
    if word in ("0", "DISABLED"):
        return False
    raise RefusedError(INVALID, f"{value} is not a valid value for option {option}.\n")


def _was(gpu: SimulatedGpu, setting: str, now: str) -> str:
    return f"{setting} is already {now} for GPU {gpu.bus_id}.\n"


def _persistence(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    on = _switch(value, "-pm")
    word = "Enabled" if on else "Disabled"
    if gpu.persistence == on:
        return _was(gpu, "Persistence mode", word)
    now["persistence"] = on
    return f"{word} persistence mode for GPU {gpu.bus_id}.\n"


def _power(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    try:
        limit = float(value)
    except ValueError:
        raise RefusedError(INVALID, f"{value} is not a valid power limit.\n") from None
    smallest = float(gpu.get("power_min_w", 0) or 0)
    largest = float(gpu.get("power_max_w", gpu.get("power_limit_w", 0)))
    if not smallest <= limit <= largest:
        text = (
            f"Provided power limit {limit:.2f} W is not a valid power limit which should be between {smallest:.2f} W "
            f"and {largest:.2f} W for GPU {gpu.bus_id}\nTerminating early due to previous errors.\n"
        )
        raise RefusedError(INVALID, text)
    before = gpu.power_limit_w
    now["power_limit_w"] = limit
    text = f"Power limit for GPU {gpu.bus_id} was set to {limit:.2f} W from {before:.2f} W.\n"
    if not gpu.persistence:
        text += (
            "\nWarning: persistence mode is disabled on device "
            f"{gpu.bus_id}. See the Known Issues section of the nvidia-smi(1) man page for more information. Run with "
            "[--help | -h] switch to get more information on how to enable persistence mode.\n\n"
        )
    return text


def _pair(value: str, option: str) -> list[int]:
    words = value.split(",")
    if not all(word.strip().isdigit() for word in words) or len(words) > 2:
        raise RefusedError(INVALID, f"{value} is not a valid value for option {option}.\n")
    clocks = [int(word) for word in words]
    return clocks * 2 if len(clocks) == 1 else clocks


VOLATILE = ("power_limit_w", "locked_sm_clock_mhz", "locked_memory_clock_mhz", "application_clocks_mhz")
"""Settings that a GPU loses when its last user closes it; persistence mode keeps it initialised."""


def forget(now: dict[str, Any]) -> None:
    """Drop the settings that a GPU loses when the driver releases it."""
    for key in VOLATILE:
        now.pop(key, None)


def _lock_sm(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    low, high = _pair(value, "-lgc")
    if not gpu.is_since("volta"):
        return f"Setting locked GPU clocks is not supported for GPU {gpu.bus_id}.\n{MOVING_ON}"
    if low > high or not high:
        raise RefusedError(INVALID, f"Invalid GPU clocks {value} for GPU {gpu.bus_id}.\n")
    now["locked_sm_clock_mhz"] = [low, min(high, maximum_clocks(gpu)["sm"])]
    return f'GPU clocks set to "(gpuClkMin {low}, gpuClkMax {high})" for GPU {gpu.bus_id}\n'


def _lock_memory(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    low, high = _pair(value, "-lmc")
    if not gpu.is_since("ampere"):
        return f"Setting locked Memory clocks is not supported for GPU {gpu.bus_id}.\n{MOVING_ON}"
    now["locked_memory_clock_mhz"] = [low, high]
    return f'Memory clocks set to "(memClkMin {low}, memClkMax {high})" for GPU {gpu.bus_id}\n'


def _drop(key: str, text: str) -> Callable[..., str]:
    def reset(gpu: SimulatedGpu, _value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
        now.pop(key, None)
        return text.format(gpu.bus_id) + "\n"

    return reset


def _application_clocks(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    memory, graphics = _pair(value, "-ac")
    top = maximum_clocks(gpu)
    if gpu.node_is_since(590):
        raise RefusedError(NOT_SUPPORTED, f"Setting applications clocks is not supported for GPU {gpu.bus_id}.\n")
    if memory != top["memory"] or not 0 < graphics <= top["sm"]:
        text = (
            f'Specified clock combination "(MEM {memory}, SM {graphics})" is not supported for GPU {gpu.bus_id}. '
            "Run 'nvidia-smi -q -d SUPPORTED_CLOCKS' to see list of supported clock combinations\n"
        )
        raise RefusedError(INVALID, text)
    now["application_clocks_mhz"] = [memory, graphics]
    return f'Applications clocks set to "(MEM {memory}, SM {graphics})" for GPU {gpu.bus_id}\n'


def _ecc(gpu: SimulatedGpu, value: str, kept: dict[str, Any], _now: dict[str, Any]) -> str:
    on = _switch(value, "-e")
    if not gpu.has_ecc:
        raise RefusedError(NOT_SUPPORTED, f"Changing ECC configuration is not supported for GPU {gpu.bus_id}.\n")
    if gpu.ecc_pending == on:
        return f"ECC support is already {'Enabled' if on else 'Disabled'} for GPU {gpu.bus_id}.\n"
    kept["ecc"] = on
    word = "Enabled" if on else "Disabled"
    return f"{word} ECC support for GPU {gpu.bus_id}.\nA reboot is required.\n"


def _mig(gpu: SimulatedGpu, value: str, kept: dict[str, Any], now: dict[str, Any]) -> str:
    on = _switch(value, "-mig")
    word = "Enabled" if on else "Disabled"
    if not gpu.can_mig:
        raise RefusedError(
            NOT_SUPPORTED, f"Unable to {word.lower()[:-1]} MIG Mode for GPU {gpu.bus_id}: Not Supported\n"
        )
    if gpu.busy:
        if gpu.is_since("hopper"):
            raise RefusedError(
                IN_USE, f"Unable to {word.lower()[:-1]} MIG Mode for GPU {gpu.bus_id}: In use by another client\n"
            )
        now["mig_pending"] = kept["mig"] = on
        return (
            f"Warning: MIG mode is in pending {word.lower()[:-1]} state for GPU {gpu.bus_id}:In use by another client\n"
            f"{gpu.bus_id} is currently being used by one or more other processes (e.g. CUDA application or a "
            "monitoring application such as another instance of nvidia-smi). Please first kill all processes using the "
            "device and retry the command or reboot the system to make MIG mode effective.\n"
        )
    if not on and now.get("mig_instances"):
        raise RefusedError(IN_USE, f"Unable to disable MIG Mode for GPU {gpu.bus_id}: In use by another client\n")
    now["mig"] = now["mig_pending"] = on
    if not gpu.is_since("hopper"):
        kept["mig"] = on
    return f"{word} MIG Mode for GPU {gpu.bus_id}\n"


def _compute_mode(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    mode = MODES.get(value.upper())
    if mode is None:
        raise RefusedError(INVALID, f"{value} is not a valid compute mode.\n")
    now["compute_mode"] = mode
    return f"Set compute mode to {mode.upper()} for GPU {gpu.bus_id}.\n"


def _accounting(gpu: SimulatedGpu, value: str, _kept: dict[str, Any], now: dict[str, Any]) -> str:
    on = _switch(value, "-am")
    now["accounting"] = on
    return f"{'Enabled' if on else 'Disabled'} Accounting Mode for GPU {gpu.bus_id}.\n"


def _reset(gpu: SimulatedGpu, _value: str, kept: dict[str, Any], now: dict[str, Any]) -> str:
    if gpu.busy:
        text = (
            f"GPU {gpu.bus_id} is currently in use by another process.\n\n1 device is currently being used by one or "
            "more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X server, "
            "or a monitoring application such as another instance of nvidia-smi). Please first kill all processes "
            "using this device and all compute applications running in the system.\n"
        )
        raise RefusedError(IN_USE, text)
    persistence = now.get("persistence", False)
    now.clear()
    now.update({"persistence": persistence, "ecc": kept.get("ecc", True)})
    if gpu.can_mig and not gpu.is_since("hopper"):
        now["mig"] = now["mig_pending"] = bool(kept.get("mig", False))
    rows = kept.get("remapped")
    if rows:
        rows["pending"] = False
    return f"GPU {gpu.bus_id} was successfully reset.\n"


# Option to (its function, the start of its error for a user who is not root).
_SETTINGS: dict[str, tuple[Callable[..., str], str]] = {
    "pm": (_persistence, "Unable to set persistence mode for GPU {}"),
    "e": (_ecc, "Unable to set ECC support for GPU {}"),
    "am": (_accounting, "Unable to set accounting mode for GPU {}"),
    "c": (_compute_mode, "Unable to set the compute mode for GPU {}"),
    "pl": (_power, "Changing power management limit in GPU {}"),
    "ac": (_application_clocks, "Setting applications clocks for GPU {}"),
    "rac": (
        _drop("application_clocks_mhz", "All applications clocks reset for GPU {}"),
        "Resetting applications clocks for GPU {}",
    ),
    "lgc": (_lock_sm, "The current user does not have permission to change clocks for GPU {}"),
    "rgc": (_drop("locked_sm_clock_mhz", "All GPU clocks reset for GPU {}"), "Unable to reset GPU clocks for GPU {}"),
    "lmc": (_lock_memory, "The current user does not have permission to change clocks for GPU {}"),
    "rmc": (
        _drop("locked_memory_clock_mhz", "All memory clocks reset for GPU {}"),
        "Unable to reset memory clocks for GPU {}",
    ),
    "mig": (_mig, "Unable to set MIG mode for GPU {}"),
    "r": (_reset, "Unable to reset GPU {}"),
}
