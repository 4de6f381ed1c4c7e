"""The bandwidth of a device's memory: read, write, triad."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.copies import size_for
from gpunode.workload.payload.measuring import bandwidth, memory_needed, opened, repeated, timer_of, wrong_elements
from gpunode.workload.payload.sampler import Sampler, sensors_of, settle

BYTES, BYTES_ON_PROCESSOR = 1024 * 2**20, 16 * 2**20
SCALE = 3.0
SETTLE_S = 20.0


def run(where: str | None, gpu_uuid: str | None, repetitions: int) -> dict[str, Any]:
    """Return the values of ``memory.stream``.

    Small whole numbers: every sum is exact in float32, in any order of addition, and each result is compared.
    """
    torch, device = opened(where)
    size = size_for(torch, device, BYTES, BYTES_ON_PROCESSOR)
    with memory_needed(torch, device, "the arrays"):
        generator = torch.Generator(device=device).manual_seed(4)
        left, right = (torch.randint(-8, 9, (size // 4,), generator=generator, device=device).float() for _ in range(2))
        result = torch.zeros_like(left)
    total = torch.zeros((), dtype=torch.float32, device=device)
    # One sum per row: no partial sum exceeds the whole numbers that float32 represents.
    rows = left[: size // 4 // 1024 * 1024].view(-1, 1024)
    sums = torch.zeros(rows.shape[0], dtype=torch.float32, device=device)

    def read() -> None:
        torch.sum(rows, dim=1, out=sums)

    def write() -> None:
        result.fill_(SCALE)

    def triad() -> None:
        torch.add(left, right, alpha=SCALE, out=result)

    sensors = sensors_of(gpu_uuid)
    settle(sensors, SETTLE_S)
    kernels = []
    with Sampler(sensors) as sampler:
        for name, work, moved in (
            ("read", read, rows.numel() * 4),
            ("write", write, size),
            ("triad", triad, 3 * size),
        ):
            seconds = repeated(torch, device, work, warmups=3, repetitions=repetitions)
            if name == "read":
                wrong = wrong_elements(sums, rows.double().sum(dim=1).float())
            elif name == "write":
                wrong = wrong_elements(result, total + SCALE)
            else:
                wrong = wrong_elements(result - left, right * SCALE)
            kernels.append({"kernel": name, **bandwidth(moved, seconds), "wrong": wrong})
    return {
        "device": device.type,
        "timer": timer_of(device),
        "size_bytes": size,
        "kernels": kernels,
        "load": sampler.state(),
    }
