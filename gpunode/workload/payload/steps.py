"""Steps of one device: the time to launch an operation, and a training step with and without mixed precision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from gpunode.workload.payload.measuring import (
    median_of,
    memory_needed,
    opened,
    repeated,
    repetition_values,
    significant,
)
from gpunode.workload.payload.pytorch import half_precision, synchronize

LAUNCHES = 500
"""At once, below the length of CUDA's queue of launches: the host does not wait for the GPU."""
ROUNDS = 15
WIDTH, DEPTH, BATCH = 4096, 4, 2048
ON_PROCESSOR = (256, 2, 64)


def run(where: str | None, repetitions: int) -> dict[str, Any]:
    """Return the values of ``steps.device``."""
    torch, device = opened(where)
    number = torch.zeros(1, device=device)

    def launch() -> None:
        number.add_(1.0)

    launches, returns = launch_seconds(launch, lambda: synchronize(torch, device))
    width, depth, batch = WIDTH, DEPTH, BATCH
    if device.type == "cpu":
        width, depth, batch = ON_PROCESSOR
    dtype = half_precision(torch, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    with memory_needed(torch, device, "a training step"):
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        network = torch.nn.Sequential(*layers).to(device)
        inputs = torch.randn(batch, width, device=device)

        def step(*, mixed: bool) -> None:
            with torch.autocast(device.type, dtype=dtype, enabled=mixed):
                loss = network(inputs).square().mean()
            loss.backward()
            network.zero_grad(set_to_none=True)

        plain = repeated(torch, device, lambda: step(mixed=False), warmups=3, repetitions=repetitions)
        mixed = repeated(torch, device, lambda: step(mixed=True), warmups=3, repetitions=repetitions)
    return {
        "device": device.type,
        "launch_us": significant(median_of(launches) * 1e6),
        "round_trip_us": significant(median_of(returns) * 1e6),
        **repetition_values(launches),
        "dtype": str(dtype).replace("torch.", ""),
        "fp32_step_seconds": significant(median_of(plain)),
        "mixed_step_seconds": significant(median_of(mixed)),
    }


def launch_seconds(launch: Callable[[], None], wait: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Return the host's seconds for one launch in each round, and those until one result is there."""
    launches, returns = [], []
    for number in range(ROUNDS + 1):
        wait()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        took = (time.perf_counter() - began) / LAUNCHES
        wait()
        single = []
        for _ in range(20):
            began = time.perf_counter()
            launch()
            wait()
            single.append(time.perf_counter() - began)
        # The first round loads the kernel.
        if number:
            launches.append(took)
            returns.append(statistics.median(single))
    return launches, returns
