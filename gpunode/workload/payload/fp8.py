"""A product in 8-bit floating point: Ada, Hopper and later have units for it."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.isolate import SkipPart
from gpunode.workload.payload.pytorch import capability, device_for, synchronize, torch_module

LEAST = (8, 9)
"""Compute capability from which PyTorch's scaled product runs on NVIDIA GPUs (its own tests require it)."""
ROWS, TERMS, COLUMNS = 1024, 256, 2048
"""Multiples of 16, as the product requires; 256 terms of 1, 0 or -1 sum up to whole numbers in bfloat16."""


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.fp8``. Raises SkipPart if the GPU or PyTorch does not support it."""
    torch = torch_module()
    device = device_for(torch, where)
    need(torch, device)
    return {"device": "cuda", "wrong": wrong_elements(torch, device)}


def need(torch: Any, device: Any) -> None:
    """Raise SkipPart if the device, or PyTorch, has no product in FP8."""
    if device.type != "cuda":
        raise SkipPart("a processor has no units for FP8")
    if capability(torch, device) < LEAST:
        has = "{}.{}".format(*capability(torch, device))
        raise SkipPart(f"compute capability {has}, FP8 begins with {LEAST[0]}.{LEAST[1]}")
    if not hasattr(torch, "float8_e4m3fn") or not hasattr(torch, "_scaled_mm"):
        raise SkipPart(f"PyTorch {torch.__version__} has no product in FP8")


def wrong_elements(torch: Any, device: Any) -> int:
    """Return how many elements of the product on a device differ from the CPU's in single precision."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randint(-1, 2, (ROWS, TERMS), generator=generator).float()
    right = torch.randint(-1, 2, (COLUMNS, TERMS), generator=generator).float()
    scale = torch.ones((), device=device)
    # The second matrix must be stored by columns: rows of its transpose.
    product = torch._scaled_mm(
        left.to(device).to(torch.float8_e4m3fn),
        right.to(device).to(torch.float8_e4m3fn).t(),
        scale_a=scale,
        scale_b=scale,
        out_dtype=torch.bfloat16,
    )
    if isinstance(product, tuple):
        # Until PyTorch 2.4 the result was a tuple with the largest value.
        product = product[0]
    synchronize(torch, device)
    return int((product.float().cpu() != left @ right.t()).sum())
