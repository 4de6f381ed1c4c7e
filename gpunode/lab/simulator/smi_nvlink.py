"""``nvidia-smi nvlink --status`` and ``-e``."""

from __future__ import annotations

from collections.abc import Callable

from .node import SimulatedGpu

COUNTERS = ("Replay Errors", "Recovery Errors", "CRC Errors")
COUNTERS_OF_NVLINK_5 = (
    ("Tx packets", "0"),
    ("Tx bytes", "0"),
    ("Rx packets", "0"),
    ("Rx bytes", "0"),
    ("Malformed packet Errors", "0"),
    ("Buffer overrun Errors", "0"),
    ("Rx Errors", "0"),
    ("Rx remote Errors", "0"),
    ("Rx General Errors", "0"),
    ("Local link integrity Errors", "0"),
    ("Tx discards", "0"),
    ("Link recovery successful events", "0"),
    ("Link recovery failed events", "0"),
    ("Total link recovery events", "0"),
    ("Effective Errors", "0"),
    ("Effective BER", "15e-255"),
    ("Symbol Errors", "0"),
    ("Symbol BER", "15e-255"),
)
IN_MIG = "Nvlink queries are not supported for Devices in MIG mode"
NONE = "Device does not have or support Nvlink"
ALL_INACTIVE = "NVML: Unable to retrieve NVLink information as all links are inActive"


def status(gpus: list[SimulatedGpu]) -> str:
    """Return the output of ``nvlink --status``: the speed of each link, or that it is inactive."""
    return _listing(gpus, _status)


def errors(gpus: list[SimulatedGpu]) -> str:
    """Return the output of ``nvlink -e``: error counters."""
    return _listing(gpus, _errors)


def _listing(gpus: list[SimulatedGpu], of_link: Callable[[SimulatedGpu, int], list[str]]) -> str:
    lines = []
    for gpu in gpus:
        if gpu.lost:
            lines.append(f"Unable to determine the device handle for GPU {gpu.sysfs_id}: GPU is lost")
            continue
        lines.append(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})")
        if gpu.mig:
            lines.append(IN_MIG)
        elif not gpu.links:
            lines.append(NONE)
        elif all(gpu.link_is_down(link) for link in range(gpu.links)):
            lines.append(ALL_INACTIVE)
        else:
            for link in range(gpu.links):
                lines += [f"\t {line}" for line in of_link(gpu, link)]
    return "\n".join(lines) + "\n"


def _status(gpu: SimulatedGpu, link: int) -> list[str]:
    speed = f"{float(gpu.get('nvlink_speed_gb_per_s', 25)):.3f}".rstrip("0").rstrip(".")
    return [f"Link {link}: " + ("<inactive>" if gpu.link_is_down(link) else f"{speed} GB/s")]


def _errors(gpu: SimulatedGpu, link: int) -> list[str]:
    if gpu.is_since("blackwell"):
        return [f"Link {link}: {name}: {value}" for name, value in COUNTERS_OF_NVLINK_5]
    return [f"Link {link}: {name}: 0" for name in COUNTERS]
