"""Small computations of PyTorch on one device, and one of DALI: the parts ``frameworks.*`` without other devices."""

from __future__ import annotations

import importlib
import importlib.util
import math
import shutil
import time
from pathlib import Path
from typing import Any

from gpunode.workload.payload.isolate import SkipPart, Trouble, UndeterminedPart
from gpunode.workload.payload.pytorch import (
    capability,
    cudnn_version,
    device_for,
    difference,
    gpu,
    half_precision,
    synchronize,
    timed,
    torch_module,
)

TENSOR_SIZE = 256


def tensor(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.tensor``: a product on the device, compared with the CPU's.

    The simplest computation of a GPU: small whole numbers, so that every rounding gives the same result and any
    difference is a fault.
    """
    torch = torch_module()
    device = device_for(torch, where)
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randint(-4, 5, (TENSOR_SIZE, TENSOR_SIZE), generator=generator).float() for _ in range(2))
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


AMP_STEPS = 8


def amp(where: str | None) -> dict[str, Any]:
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
    for _ in range(AMP_STEPS):
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


MATMUL_SIZE = 8192
"""On a GPU: 1.1 TFLOP per round, 0.5 GiB for all matrices."""
MATMUL_SIZE_ON_PROCESSOR = 512
MATMUL_STRIDE = 32
"""Every 32nd element of a row is not 0: at most 256 terms of 1 or -1, so that every partial sum is a whole number that
bfloat16 represents exactly, in any order of addition.
"""
MATMUL_ROUNDS = 5


def matmul(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.matmul``: the same product several times, each compared with the CPU's."""
    torch = torch_module()
    device = device_for(torch, where)
    dtype = half_precision(torch, device)
    size = MATMUL_SIZE if device.type == "cuda" else MATMUL_SIZE_ON_PROCESSOR
    left, right = sparse(torch, size), signs(torch, size, size)
    wanted = sparse_product(torch, left, right).to(dtype).to(device)
    device_left, device_right = left.to(dtype).to(device), right.to(dtype).to(device)
    wrong, seconds = 0, []
    for _ in range(MATMUL_ROUNDS):
        output, took = timed(torch, device, lambda: device_left @ device_right)
        seconds.append(took)
        wrong += int((output != wanted).sum())
    return {
        "device": device.type,
        "dtype": str(dtype).replace("torch.", ""),
        "size": size,
        "rounds": MATMUL_ROUNDS,
        "wrong": wrong,
        "seconds": round(min(seconds), 6),
    }


def signs(torch: Any, rows: int, columns: int) -> Any:
    """Return a matrix of 1 and -1."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8).float().mul_(2).sub_(1)


def sparse(torch: Any, size: int) -> Any:
    """Return 1 and -1 in the columns with the same remainder as the row, 0 elsewhere."""
    rests = torch.arange(size) % MATMUL_STRIDE
    return signs(torch, size, size).mul_(rests[:, None] == rests[None, :])


def sparse_product(torch: Any, left: Any, right: Any) -> Any:
    """Return the product on the CPU, from the parts that are not 0: a 32nd of the work."""
    output = torch.empty_like(right)
    for rest in range(MATMUL_STRIDE):
        output[rest::MATMUL_STRIDE] = left[rest::MATMUL_STRIDE, rest::MATMUL_STRIDE] @ right[rest::MATMUL_STRIDE]
    return output


def convolution(where: str | None) -> dict[str, Any]:
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


FP8_LEAST = (8, 9)
"""Compute capability from which PyTorch's scaled product runs on NVIDIA GPUs (its own tests require it)."""
FP8_ROWS, FP8_TERMS, FP8_COLUMNS = 1024, 256, 2048
"""Multiples of 16, as the product requires; 256 terms of 1, 0 or -1 sum up to whole numbers in bfloat16."""


def fp8(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.fp8``. Raises SkipPart if the GPU or PyTorch does not support it."""
    torch = torch_module()
    device = device_for(torch, where)
    need_fp8(torch, device)
    return {"device": "cuda", "wrong": wrong_fp8_elements(torch, device)}


def need_fp8(torch: Any, device: Any) -> None:
    """Raise SkipPart if the device, or PyTorch, has no product in FP8."""
    if device.type != "cuda":
        raise SkipPart("a processor has no units for FP8")
    if capability(torch, device) < FP8_LEAST:
        has = "{}.{}".format(*capability(torch, device))
        raise SkipPart(f"compute capability {has}, FP8 begins with {FP8_LEAST[0]}.{FP8_LEAST[1]}")
    if not hasattr(torch, "float8_e4m3fn") or not hasattr(torch, "_scaled_mm"):
        raise SkipPart(f"PyTorch {torch.__version__} has no product in FP8")


def wrong_fp8_elements(torch: Any, device: Any) -> int:
    """Return how many elements of the product on a device differ from the CPU's in single precision."""
    generator = torch.Generator().manual_seed(1)
    left = torch.randint(-1, 2, (FP8_ROWS, FP8_TERMS), generator=generator).float()
    right = torch.randint(-1, 2, (FP8_COLUMNS, FP8_TERMS), generator=generator).float()
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


PIECE_BYTES = 256 * 2**20
SPARE = 8
"""This fraction (1/8) of the free memory stays free: for the allocator, and for the comparison itself."""
BUSY_BYTES = 100 * 2**20
"""More than this allocated by others in the meantime: not the driver's own use."""
PATTERNS = (0x5A5A5A5A, ~0x5A5A5A5A)


def memory(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.memory``: the device's memory, the tested part, the allocator's counters."""
    torch = torch_module()
    device = device_for(torch, where)
    if device.type != "cuda":
        raise SkipPart("no GPU with readable memory")
    free, total = torch.cuda.mem_get_info(device)
    piece_bytes = min(PIECE_BYTES, free // 32)
    words = piece_bytes // 4
    # Each word contains its own index, so that a broken address line is detected too.
    places = torch.arange(words, dtype=torch.int32, device=device)
    spare = max(free // SPARE, 4 * piece_bytes)
    pieces = pieces_of(torch, device, places, max(1, (free - spare) // piece_bytes))
    wrong = sum(wrong_words(torch, places, pieces, pattern) for pattern in PATTERNS)
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return {
        "device": "cuda",
        "total_mib": total // 2**20,
        "free_mib": free // 2**20,
        "tested_mib": len(pieces) * piece_bytes // 2**20,
        "wrong": wrong,
        "peak_mib": int(stats["allocated_bytes.all.peak"]) // 2**20,
        "reserved_mib": int(stats["reserved_bytes.all.current"]) // 2**20,
    }


def pieces_of(torch: Any, device: Any, places: Any, number: int) -> list[Any]:
    """Return this number of pieces of memory; Undetermined if another process allocates at the same time."""
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    pieces: list[Any] = []
    try:
        while len(pieces) < number:
            pieces.append(torch.empty_like(places))
    except torch.cuda.OutOfMemoryError:
        left, _ = torch.cuda.mem_get_info(device)
        others = (free - left) - (torch.cuda.memory_reserved(device) - reserved)
        if others > BUSY_BYTES:
            raise UndeterminedPart(f"another process used {others >> 20} MiB of it meanwhile") from None
        raise
    return pieces


def wrong_words(torch: Any, places: Any, pieces: list[Any], pattern: int) -> int:
    """Write every piece, then read every piece; return how many words were wrong."""
    for number, piece in enumerate(pieces):
        torch.bitwise_xor(places, pattern ^ number, out=piece)
    wrong = 0
    for number, piece in enumerate(pieces):
        piece.bitwise_xor_(places)
        wrong += int((piece != (pattern ^ number)).sum())
    return wrong


def _wave(left: Any, right: Any) -> Any:
    return (left.sin() * right + left * right.cos()).sum(dim=-1)


def compiled(where: str | None, least: str | None) -> dict[str, Any]:
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


def dataloader(where: str | None) -> dict[str, Any]:
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


def dali() -> dict[str, Any]:
    """Return the values of ``frameworks.dali``. Raises SkipPart if the image has no DALI, or there is no GPU."""
    try:
        spec = importlib.util.find_spec("nvidia.dali")
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise SkipPart("DALI is not in the image")
    if not Path("/dev/nvidiactl").exists():
        raise SkipPart("no GPU for DALI")
    module = importlib.import_module("nvidia.dali")
    functions = importlib.import_module("nvidia.dali.fn")
    pipeline = module.Pipeline(batch_size=4, num_threads=1, device_id=0)
    with pipeline:
        pipeline.set_outputs(functions.random.uniform(device="gpu", range=[0.0, 1.0], shape=[16, 16]))
    pipeline.build()
    (batch,) = pipeline.run()
    return {"device": "cuda", "version": str(module.__version__), "samples": len(batch)}
