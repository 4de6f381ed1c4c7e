"""Worker processes that pass batches over shared memory."""

from __future__ import annotations

import importlib
import time
from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.pytorch import device_for, torch_module

WORKERS = 2
BATCH = 64
BATCHES = 16
SAMPLE_FLOATS = 16 * 1024
"""64 KiB a sample, 4 MiB a batch."""


class Samples:
    """A dataset without files: every element of sample ``n`` is ``n``."""

    def __init__(self, torch: Any, number: int) -> None:
        self._torch = torch
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number: int) -> Any:
        return self._torch.full((SAMPLE_FLOATS,), float(number))


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.dataloader``: batches by worker processes, pinned for a GPU."""
    torch = torch_module()
    # The workers are forked from here: CUDA must not be initialised before.
    pin = where is not None
    data = importlib.import_module("torch.utils.data")
    loader = data.DataLoader(
        Samples(torch, BATCH * BATCHES),
        batch_size=BATCH,
        num_workers=WORKERS,
        pin_memory=pin,
        multiprocessing_context="fork",
    )
    batches = iter(loader)
    device = device_for(torch, where)
    started = time.monotonic()
    pinned, expected = True, 0
    for batch in batches:
        pinned = pinned and bool(batch.is_pinned()) if pin else False
        samples = batch.to(device, non_blocking=pin)
        # Each number arrives once and in order, so the received data can be compared with the sent data.
        for row in (0, BATCH - 1):
            if float(samples[row, -1]) != expected + row:
                raise Trouble(f"batch {expected // BATCH} arrived with wrong content")
        expected += BATCH
    seconds = time.monotonic() - started
    return {
        "device": device.type,
        "workers": WORKERS,
        "batches": expected // BATCH,
        "pinned": pinned,
        "samples_per_second": round(expected / max(seconds, 1e-9), 1),
    }
