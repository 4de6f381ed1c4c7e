"""PyTorch: which build it is, and whether it really computes on every GPU."""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from typing import Any

from gpunode.workload.payload.isolate import Skip, Trouble

MAX_GPUS = 64
SIZE = 256
STEPS = 8
WORKERS = 2
BATCH = 64
BATCHES = 16
SAMPLE_FLOATS = 16 * 1024
"""64 KiB a sample, 4 MiB a batch."""


def torch_module() -> Any:
    """PyTorch. Raises Skip where the image has none."""
    if importlib.util.find_spec("torch") is None:
        raise Skip("PyTorch is not in the image")
    return importlib.import_module("torch")


def versions() -> dict[str, Any]:
    """Values of ``versions.torch``."""
    torch = torch_module()
    available = bool(torch.cuda.is_available())
    number = int(torch.cuda.device_count())
    return {
        "device": "cuda" if available and number else "cpu",
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": cudnn_version(torch),
        "nccl": nccl_version(),
        "architectures": architectures(torch),
        "available": available,
        "count": number,
        "gpus": [gpu(torch, index) for index in range(min(number, MAX_GPUS))] if available else [],
    }


def cudnn_version(torch: Any) -> str | None:
    """92000 is cuDNN 9.20.0, 8907 is 8.9.7."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if not number:
        return None
    major = 10000 if number >= 90000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def nccl_version() -> str | None:
    """The NCCL that this build carries; None in a build without."""
    try:
        version = importlib.import_module("torch.cuda.nccl").version()
    except (AttributeError, RuntimeError, ImportError):
        return None
    # A suffix of the build may follow the three numbers.
    return ".".join(str(part) for part in version[:3]) if isinstance(version, tuple) else str(version)


def architectures(torch: Any) -> list[str]:
    """What the kernels were compiled for. Asked of the build itself: get_arch_list() is empty without a GPU."""
    try:
        flags = torch._C._cuda_getArchFlags()
    except AttributeError:
        return []
    return flags.split() if flags else []


def gpu(torch: Any, index: int) -> dict[str, Any]:
    """One GPU as PyTorch shows it."""
    seen = torch.cuda.get_device_properties(index)
    values = {
        "index": index,
        "name": seen.name,
        "compute_capability": f"{seen.major}.{seen.minor}",
        "memory_mib": seen.total_memory // 2**20,
    }
    uuid = getattr(seen, "uuid", None)
    if uuid is not None:
        values["uuid"] = str(uuid) if str(uuid).startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    if hasattr(seen, "pci_bus_id"):
        values["pci_bus_id"] = f"{seen.pci_domain_id:04x}:{seen.pci_bus_id:02x}:{seen.pci_device_id:02x}.0"
    return values


def count() -> dict[str, Any]:
    """How many GPUs PyTorch can use. Raises Skip without PyTorch."""
    torch = torch_module()
    return {"count": int(torch.cuda.device_count()) if torch.cuda.is_available() else 0}


def first_device(torch: Any) -> Any:
    """``cuda:0`` where there is one, else the processor."""
    return torch.device("cuda:0" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu")


def difference(found: Any, wanted: Any) -> float:
    """The largest difference; Trouble where a number is none."""
    largest = float((found.detach().cpu().double() - wanted.detach().cpu().double()).abs().max())
    if not math.isfinite(largest):
        raise Trouble("the result holds values that are no numbers")
    return largest


def tensor(index: int | None) -> dict[str, Any]:
    """Values of ``frameworks.tensor``: a product on GPU ``index`` (None: the processor), beside the processor's.

    Small whole numbers, so that every rounding on the way gives the same and any difference is a fault.
    """
    torch = torch_module()
    device = torch.device("cpu" if index is None else f"cuda:{index}")
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randint(-4, 5, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    values = {"device": device.type, "index": index or 0}
    before = 0
    if index is not None:
        values.update(gpu(torch, index))
        before = torch.cuda.memory_allocated(device)
    there = one.to(device)
    product = there @ other.to(device)
    if product.device != device:
        raise Trouble(f"the tensor lies on {product.device}, not on {device}")
    if index is not None:
        torch.cuda.synchronize(device)
        values["allocated_bytes"] = int(torch.cuda.memory_allocated(device) - before)
    values["max_error"] = difference(product, one.double() @ other.double())
    return values


def amp() -> dict[str, Any]:
    """Values of ``frameworks.amp``: steps of a small network in mixed precision, bf16 where the GPU computes it."""
    torch = torch_module()
    device = first_device(torch)
    torch.manual_seed(1)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        # Older GPUs only imitate bf16.
        dtype = torch.float16
    else:
        dtype = torch.bfloat16
    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    enabled = dtype is torch.float16
    scaler = torch.amp.GradScaler("cuda", enabled=enabled) if hasattr(torch.amp, "GradScaler") else None
    if scaler is None:
        scaler = torch.cuda.amp.GradScaler(enabled=enabled)
    inputs = torch.randn(128, 64, device=device)
    wanted = torch.randint(0, 8, (128,), device=device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            loss = torch.nn.functional.cross_entropy(network(inputs), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return {
        "device": device.type,
        "dtype": str(dtype).replace("torch.", ""),
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
    }


def _wave(one: Any, other: Any) -> Any:
    return (one.sin() * other + one * other.cos()).sum(dim=-1)


def compiled(least: str | None) -> dict[str, Any]:
    """Values of ``frameworks.compile``. Skip on a GPU whose compute capability is below ``least``.

    Raises Trouble where a GPU is there and no capability was named: ours is not to guess.
    """
    torch = torch_module()
    if not hasattr(torch, "compile"):
        raise Skip(f"PyTorch {torch.__version__} has no torch.compile")
    device = first_device(torch)
    capability = None
    if device.type == "cuda":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        if least is None:
            raise Trouble("the settings name no compile_min_capability")
        if as_pair(capability) < as_pair(least):
            raise Skip(f"compute capability {capability}, torch.compile needs {least}")
    elif not has_compiler():
        raise Skip("on a processor torch.compile needs a C++ compiler, and the image has none")
    # One process is enough for one small function, and leaves none behind.
    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.compile_threads = 1
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randn(64, 512, generator=generator).to(device) for _ in range(2))
    started = time.monotonic()
    found = torch.compile(_wave)(one, other)
    seconds = time.monotonic() - started
    return {
        "device": device.type,
        "compute_capability": capability,
        "compile_seconds": round(seconds, 3),
        "max_error": difference(found, _wave(one, other)),
    }


def as_pair(capability: str) -> tuple[int, ...]:
    """``8.6`` as numbers that compare."""
    return tuple(int(part) for part in str(capability).split("."))


def has_compiler() -> bool:
    """The image can compile C++."""
    shutil = importlib.import_module("shutil")
    return any(shutil.which(name) for name in ("g++", "c++", "clang++"))


def convolution() -> dict[str, Any]:
    """Values of ``frameworks.cudnn``: a convolution and its gradient, beside the processor's in double precision."""
    torch = torch_module()
    device = first_device(torch)
    cudnn = torch.backends.cudnn
    if device.type == "cuda" and not cudnn.is_available():
        raise Trouble(f"PyTorch {torch.__version__} finds no cuDNN")
    cudnn.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(4, 8, 32, 32, generator=generator)
    weight = torch.randn(16, 8, 3, 3, generator=generator)

    def run(on: Any, dtype: Any) -> tuple[Any, Any]:
        kernel = weight.to(on, dtype, copy=True).requires_grad_()
        found = torch.nn.functional.conv2d(image.to(on, dtype), kernel, padding=1)
        found.square().mean().backward()
        return found, kernel.grad

    (found, slope), (wanted, wanted_slope) = run(device, torch.float32), run("cpu", torch.float64)
    return {
        "device": device.type,
        "cudnn": cudnn_version(torch),
        "enabled": bool(cudnn.enabled and cudnn.is_available()),
        "max_error": max(difference(found, wanted), difference(slope, wanted_slope)),
    }


class Samples:
    """A dataset that needs no file: sample ``n`` is full of ``n``."""

    def __init__(self, torch: Any, number: int) -> None:
        self._torch = torch
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, number: int) -> Any:
        return self._torch.full((SAMPLE_FLOATS,), float(number))


def dataloader() -> dict[str, Any]:
    """Values of ``frameworks.dataloader``: batches by worker processes over shared memory, pinned for a GPU."""
    torch = torch_module()
    device = first_device(torch)
    pin = device.type == "cuda"
    data = importlib.import_module("torch.utils.data")
    loader = data.DataLoader(
        Samples(torch, BATCH * BATCHES),
        batch_size=BATCH,
        num_workers=WORKERS,
        pin_memory=pin,
        multiprocessing_context="fork",
    )
    started = time.monotonic()
    pinned, expected = True, 0
    for batch in loader:
        pinned = pinned and bool(batch.is_pinned()) if pin else False
        there = batch.to(device, non_blocking=pin)
        # Each number comes once and in its order: what arrives is what was sent.
        for row in (0, BATCH - 1):
            if float(there[row, -1]) != expected + row:
                raise Trouble(f"batch {expected // BATCH} arrived with the wrong content")
        expected += BATCH
    seconds = time.monotonic() - started
    return {
        "device": device.type,
        "workers": WORKERS,
        "batches": expected // BATCH,
        "pinned": pinned,
        "samples_per_second": round(expected / max(seconds, 1e-9), 1),
    }


def memory() -> dict[str, Any]:
    """Values of ``frameworks.memory``: what the first GPU has, and how the allocator deals with holes."""
    torch = torch_module()
    device = first_device(torch)
    if device.type != "cuda":
        raise Skip("there is no GPU whose memory could be looked at")
    free, total = torch.cuda.mem_get_info(device)
    piece = min(64 * 2**20, free // 32)
    pieces = [torch.empty(piece, dtype=torch.uint8, device=device) for _ in range(8)]
    del pieces[::2]
    large = torch.empty(piece * 2, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    reserved = stats["reserved_bytes.all.current"]
    unused = reserved - stats["allocated_bytes.all.current"]
    values = {
        "device": "cuda",
        "total_mib": total // 2**20,
        "free_mib": free // 2**20,
        "peak_mib": int(stats["allocated_bytes.all.peak"]) // 2**20,
        "reserved_mib": int(reserved) // 2**20,
        "fragmentation_percent": round(100.0 * unused / max(1, reserved), 1),
    }
    del pieces, large
    return values
