"""torch.compile: generated code, and its result."""

from __future__ import annotations

import importlib
import shutil
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble
from gpunode.workload.payload.pytorch import capability, device_for, difference, timed, torch_module


def _wave(left: Any, right: Any) -> Any:
    return (left.sin() * right + left * right.cos()).sum(dim=-1)


def run(where: str | None, least: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.compile``. Skip without a compiler, and below the compute capability ``least``.

    Raises Trouble on a GPU if no capability was given: there is no default.
    """
    torch = torch_module()
    if not hasattr(torch, "compile"):
        raise SkipPart(f"PyTorch {torch.__version__} has no torch.compile")
    device = device_for(torch, where)
    has = None
    if device.type == "cuda":
        has = "{}.{}".format(*capability(torch, device))
        if least is None:
            raise Trouble("the settings have no compile_min_capability")
        if as_pair(has) < as_pair(least):
            raise SkipPart(f"compute capability {has}, torch.compile needs {least}")
    kind = ("g++", "c++", "clang++") if device.type == "cpu" else ("gcc", "cc", "clang")
    if not any(shutil.which(name) for name in kind):
        # On a GPU, Triton compiles its launcher as C.
        raise SkipPart(
            "torch.compile needs a compiler, which the image lacks: use an image with gcc (a -devel one), or install "
            "gcc in the image"
        )
    # One process is enough for one small function, and leaves none behind.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.compile_threads = 1
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(64, 512, generator=generator).to(device) for _ in range(2))
    wave, seconds = timed(torch, device, lambda: torch.compile(_wave)(left, right))
    return {
        "device": device.type,
        "compute_capability": has,
        "compile_seconds": round(seconds, 3),
        "max_error": difference(wave, _wave(left, right)),
    }


def as_pair(text: str) -> tuple[int, ...]:
    """Parse ``8.6`` to numbers that compare."""
    return tuple(int(part) for part in str(text).split("."))
