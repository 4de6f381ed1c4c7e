"""A convolution and its gradient by cuDNN."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.pytorch import cudnn_version, device_for, difference, torch_module


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.cudnn``, compared with the CPU's in double precision."""
    torch = torch_module()
    device = device_for(torch, where)
    cudnn = torch.backends.cudnn
    if device.type == "cuda" and not cudnn.is_available():
        raise Trouble(f"PyTorch {torch.__version__} finds no cuDNN")
    cudnn.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(4, 8, 32, 32, generator=generator)
    weight = torch.randn(16, 8, 3, 3, generator=generator)

    def on(target: Any, dtype: Any) -> tuple[Any, Any]:
        kernel = weight.to(target, dtype, copy=True).requires_grad_()
        output = torch.nn.functional.conv2d(image.to(target, dtype), kernel, padding=1)
        output.square().mean().backward()
        return output, kernel.grad

    (output, slope), (wanted, wanted_slope) = on(device, torch.float32), on("cpu", torch.float64)
    return {
        "device": device.type,
        "cudnn": cudnn_version(torch),
        "enabled": bool(cudnn.enabled and cudnn.is_available()),
        "max_error": max(difference(output, wanted), difference(slope, wanted_slope)),
    }
