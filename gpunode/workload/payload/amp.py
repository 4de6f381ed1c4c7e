"""Training steps in mixed precision."""

from __future__ import annotations

import math
from typing import Any

from gpunode.workload.payload.pytorch import device_for, half_precision, torch_module

STEPS = 8


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.amp``: steps of a small network, in bf16 if the GPU supports it."""
    torch = torch_module()
    device = device_for(torch, where)
    torch.manual_seed(1)
    dtype = half_precision(torch, device)
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    enabled = dtype is torch.float16
    scaler = torch.amp.GradScaler("cuda", enabled=enabled) if hasattr(torch.amp, "GradScaler") else None
    if scaler is None:
        scaler = torch.cuda.amp.GradScaler(enabled=enabled)
    inputs = torch.randn(128, 64, device=device)
    labels = torch.randint(0, 8, (128,), device=device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            loss = torch.nn.functional.cross_entropy(network(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return {
        "device": device.type,
        "dtype": str(dtype).replace("torch.", ""),
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
    }
