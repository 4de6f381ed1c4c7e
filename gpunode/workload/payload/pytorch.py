"""PyTorch: its build, and shared parts of its tests."""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, UndeterminedPart, one_line

MAX_GPUS = 64


def torch_module() -> Any:
    """Return PyTorch. Raises SkipPart if the image has none, UndeterminedPart if it cannot be imported."""
    if importlib.util.find_spec("torch") is None:
        raise SkipPart("PyTorch is not in the image")
    try:
        return importlib.import_module("torch")
    except Exception as err:
        # A library of the image is missing or does not match: that is not a fault of the node.
        raise UndeterminedPart(f"PyTorch cannot be imported: {type(err).__name__}: {err}") from None


def versions() -> dict[str, Any]:
    """Return the values of ``versions.torch``."""
    torch = torch_module()
    # Before CUDA starts this is NVML's count: of cards, also if CUDA gives a process one MIG device.
    number = int(torch.cuda.device_count())
    reason = why_no_gpu(torch) if torch.version.cuda else None
    available = bool(torch.cuda.is_available())
    gpus = []
    for index in range(min(number, MAX_GPUS) if available and reason is None else 0):
        try:
            gpus.append(gpu(torch, index))
        except (AssertionError, RuntimeError):
            break
    return {
        "device": "cuda" if gpus else "cpu",
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(torch),
        "nccl": nccl_version(),
        "architectures": architectures(torch),
        "available": available,
        "unavailable": reason,
        "count": number,
        "gpus": gpus,
    }


def why_no_gpu(torch: Any) -> str | None:
    """Return PyTorch's reason why a build for CUDA uses no GPU; None if it uses one."""
    try:
        torch.cuda.init()
    except Exception as err:
        return one_line(f"{type(err).__name__}: {err}")
    return None if torch.cuda.is_available() else "torch.cuda.is_available() is False"


def need_gpu(torch: Any) -> None:
    """Raise Trouble with PyTorch's reason if it uses no GPU."""
    reason = why_no_gpu(torch)
    if reason is not None:
        raise Trouble(f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: {reason}")


def cudnn_version(torch: Any) -> str | None:
    """Return cuDNN 9.20.0 for 92000, 8.9.7 for 8907."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if not number:
        return None
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def nccl_version() -> str | None:
    """Return the NCCL version in this build; None in a build without NCCL."""
    try:
        version = importlib.import_module("torch.cuda.nccl").version()
    except (AttributeError, RuntimeError, ImportError):
        return None
    # A suffix of the build may follow the three numbers.
    return ".".join(str(part) for part in version[:3]) if isinstance(version, tuple) else str(version)


def architectures(torch: Any) -> list[str]:
    """Return the targets of the compiled kernels, from the build itself: get_arch_list() is empty without a GPU."""
    try:
        flags = torch._C._cuda_getArchFlags()
    except AttributeError:
        return []
    return flags.split() if flags else []


def gpu(torch: Any, index: int) -> dict[str, Any]:
    """Return one GPU with PyTorch's values."""
    seen = torch.cuda.get_device_properties(index)
    values = {
        "index": index,
        "name": seen.name,
        "compute_capability": f"{seen.major}.{seen.minor}",
        "memory_mib": seen.total_memory // 2**20,
    }
    uuid = getattr(seen, "uuid", None)
    if uuid is not None and " MIG " not in seen.name:
        values["uuid"] = str(uuid) if str(uuid).startswith("GPU-") else f"GPU-{uuid}"
    if hasattr(seen, "pci_bus_id"):
        values["pci_bus_id"] = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
    return values


def device_for(torch: Any, where: str | None) -> Any:
    """Return the device to compute on: the processor for None, else the only GPU visible to this process.

    Raises Trouble if PyTorch finds none, or another one than that with the UUID ``where``: a test of a GPU must not run
    on the processor and pass.
    """
    if where is None:
        return torch.device("cpu")
    need_gpu(torch)
    uuid = gpu(torch, 0).get("uuid")
    if where.startswith("GPU-") and uuid is not None and uuid != where:
        raise Trouble(f"PyTorch computes on {uuid} instead of {where}")
    return torch.device("cuda:0")


def capability(torch: Any, device: Any) -> tuple[int, int]:
    """Return ``(9, 0)`` on Hopper; ``(0, 0)`` on the processor."""
    return tuple(torch.cuda.get_device_capability(device)) if device.type == "cuda" else (0, 0)


def half_precision(torch: Any, device: Any) -> Any:
    """Return bfloat16, or float16 on GPUs that only emulate bfloat16."""
    return torch.float16 if device.type == "cuda" and capability(torch, device) < (8, 0) else torch.bfloat16


def difference(tensor: Any, expected: Any) -> float:
    """Return the largest difference; Trouble if a value is not a number."""
    largest = float((tensor.detach().cpu().double() - expected.detach().cpu().double()).abs().max())
    if not math.isfinite(largest):
        raise Trouble("the result contains NaN or infinity")
    return largest


def synchronize(torch: Any, device: Any) -> None:
    """Wait for everything that was started on a GPU: its errors are raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(torch: Any, device: Any, work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of ``work``, and the seconds until the device had finished it."""
    synchronize(torch, device)
    started = time.monotonic()
    result = work()
    synchronize(torch, device)
    return result, time.monotonic() - started
