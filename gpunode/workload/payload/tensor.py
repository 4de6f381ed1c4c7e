"""A product of small whole numbers: the simplest computation of a GPU."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.pytorch import device_for, difference, gpu, synchronize, torch_module

SIZE = 256


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.tensor``: a product on the device, compared with the CPU's.

    Small whole numbers, so that every rounding gives the same result and any difference is a fault.
    """
    torch = torch_module()
    device = device_for(torch, where)
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-4, 5, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    values: dict[str, Any] = {"device": device.type}
    before = 0
    if device.type == "cuda":
        seen = gpu(torch, 0)
        values.update({key: seen[key] for key in ("pci_bus_id", "compute_capability", "memory_mib") if key in seen})
        before = torch.cuda.memory_allocated(device)
    device_left = left.to(device)
    product = device_left @ right.to(device)
    if product.device != device:
        raise Trouble(f"the tensor is on {product.device}, not on {device}")
    synchronize(torch, device)
    if device.type == "cuda":
        values["allocated_bytes"] = int(torch.cuda.memory_allocated(device) - before)
    values["max_error"] = difference(product, left.double() @ right.double())
    return values
