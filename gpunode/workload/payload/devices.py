"""The devices to compute on: every whole GPU, and every MIG device; CUDA gives a process only one of the latter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

BUSY_MIB = 100
"""More memory than this in use since the GPU was chosen: another process uses it. nvidia-smi and NVML count whole MiB,
and an idle GPU shows a few.
"""


@dataclass(frozen=True)
class CudaDevice:
    """A GPU, or one of its MIG devices."""

    index: int
    """Index of the GPU, in NVML's order."""
    uuid: str | None
    gpu_uuid: str | None
    mig: int | None = None
    """Index on its GPU; None: the whole GPU."""
    name: str | None = None
    busy: str | None = None
    """Why nothing may be started on it."""

    @property
    def component(self) -> str:
        """Return ``cuda:3``; ``cuda:3:1`` for MIG device 1 of it."""
        return f"cuda:{self.index}" if self.mig is None else f"cuda:{self.index}:{self.mig}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that make it the only device of a process, set before CUDA starts there."""
        return {"CUDA_VISIBLE_DEVICES": self.uuid or str(self.index)}

    @property
    def identity(self) -> dict[str, Any]:
        """Return the values that identify the device in a record."""
        return {"index": self.index, "uuid": self.uuid, "gpu_uuid": self.gpu_uuid, "mig": self.mig, "name": self.name}


def computing(nvml: dict[str, Any], cuda: dict[str, Any], settings: dict[str, Any]) -> list[CudaDevice]:
    """Return the devices to compute on, from the values of ``versions.nvml`` and ``versions.cuda``.

    ``settings``: ``gpus`` maps the UUIDs of the GPUs that were passed in to the MiB in use on each when it was chosen;
    nothing is started on others. ``force``: also on busy ones.
    """
    gpus = [gpu for gpu in nvml.get("gpus") or () if gpu.get("uuid")]
    if not gpus:
        # Without the management library (NVIDIA_DRIVER_CAPABILITIES=compute) only CUDA reports devices.
        gpus = cuda.get("gpus") or []
    handed = settings.get("gpus") or {}
    devices = []
    for gpu in gpus:
        uuid = gpu.get("uuid")
        foreign = handed and uuid not in handed and str(uuid).startswith("GPU-")
        if foreign or not visible(uuid):
            continue
        busy = None if settings.get("force") else in_use(gpu, handed.get(uuid))
        if not gpu.get("mig_mode"):
            devices.append(CudaDevice(gpu["index"], uuid, uuid, name=gpu.get("name"), busy=busy))
        for part in gpu.get("mig_devices") or ():
            devices.append(CudaDevice(gpu["index"], part.get("uuid"), uuid, part["index"], part.get("name"), busy))
    return devices


def visible(uuid: str | None) -> bool:
    """Return whether the variable that this process was started with includes the GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or uuid is None or not any(name.strip().startswith("GPU-") for name in chosen.split(",")):
        return True
    return any(name.strip() and uuid.startswith(name.strip()) for name in chosen.split(","))


def in_use(gpu: dict[str, Any], before: int | None) -> str | None:
    """Return the reason if another process uses the GPU since it was chosen; None if none does, or it is unknown."""
    now = gpu.get("memory_used_mib")
    if now is None or before is None or now <= before + BUSY_MIB:
        return None
    return f"another process has started on it: {now} MiB are in use, {before} MiB when the GPU was chosen"
