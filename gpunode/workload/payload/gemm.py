"""Products of random matrices in each number format, every result compared element by element; also under sustained
load.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpunode.workload.payload import frameworks
from gpunode.workload.payload.isolate import SkipPart
from gpunode.workload.payload.measuring import (
    MAX_BLOCKS,
    corrupted,
    finite,
    memory_needed,
    once,
    opened,
    repetition_values,
    significant,
    timer_of,
)
from gpunode.workload.payload.nvml import Sampler, sensors_of, settle, state_of
from gpunode.workload.payload.pytorch import capability

SIZES = {"bf16": 8192, "fp16": 8192, "tf32": 8192, "fp8": 8192, "int8": 8192, "fp32": 4096, "fp64": 4096}
SIZE_ON_PROCESSOR = 512
FORMATS = tuple(SIZES)
ROWS = 61
"""The first matrix has this many different rows, each used again with another sign: so the reference is the product of
61 rows, which a processor computes in a moment, and no row of the result equals another by accident.
"""
LARGEST = 8
"""Entries are whole numbers from -8 to 8: 8192 products of two of them sum up to less than 2^24, so that every partial
sum is exact in float32, in any order. FP8 sums with fewer bits on Hopper: there from -1 to 1.
"""
BUFFERS = 4
"""Products between two comparisons, each with a result of its own: every one of them is compared."""
SETTLE_S = 30.0
WARMUPS = 2
LEAST_TENSOR = (8, 0)
"""Compute capability from which the tensor cores compute bf16 and tf32."""
LEAST_INTEGER = (7, 5)
"""Compute capability from which the tensor cores compute int8."""


class Product:
    """One product to measure: its matrices, its results, and the expected result."""

    def __init__(self, torch: Any, device: Any, name: str) -> None:
        self.torch, self.device, self.name = torch, device, name
        self.dtype = dtype_of(torch, device, name)
        self.size = SIZES[name] if device.type == "cuda" else SIZE_ON_PROCESSOR
        set_precision(torch, name)
        largest = 1 if name == "fp8" else LARGEST
        generator = torch.Generator().manual_seed(5)

        def random(rows: int) -> Any:
            return torch.randint(-largest, largest + 1, (rows, self.size), generator=generator).float()

        few, other = random(ROWS), random(self.size)
        signs = torch.randint(0, 2, (self.size, 1), generator=generator).float() * 2 - 1
        index = torch.arange(self.size) % ROWS
        out = {"fp8": torch.bfloat16, "int8": torch.int32}.get(name, self.dtype)
        with memory_needed(torch, device, f"matrices of {self.size} x {self.size}"):
            self.left = (few[index] * signs).to(self.dtype).to(device)
            self.right = other.to(self.dtype).to(device)
            # In double precision each sum is exact; then it is rounded once, as the device rounds.
            self.expected = ((few.double() @ other.double())[index] * signs).to(out).to(device)
            self.products = [torch.zeros_like(self.expected) for _ in range(BUFFERS if device.type == "cuda" else 1)]
        self.multiply = self._scaled if name == "fp8" else self._plain
        self._unit = torch.ones((), device=device)
        if name in ("fp8", "int8"):
            # The second matrix must be stored by columns.
            self.right = self.right.t().contiguous().t()
        self.compared, self.wrong = 0, 0
        self.blocks: list[dict[str, Any]] = []

    def _plain(self, result: Any) -> Any:
        multiply = self.torch._int_mm if self.name == "int8" else self.torch.matmul
        return multiply(self.left, self.right, out=result)

    def _scaled(self, _: Any) -> Any:
        # Its variant with an output argument has another signature in each release.
        product = self.torch._scaled_mm(
            self.left, self.right, scale_a=self._unit, scale_b=self._unit, out_dtype=self.torch.bfloat16
        )
        # Until PyTorch 2.4 the result was a tuple with the largest value.
        return product[0] if isinstance(product, tuple) else product

    def batch(self) -> None:
        """Compute every result once."""
        self.products = [self.multiply(result) for result in self.products]

    def compare(self) -> None:
        """Compare every element of all results; only one number is copied from the device if all are right."""
        counts = self.torch.stack([(result != self.expected).sum() for result in self.products])
        if int(counts.sum()):
            for number, result in enumerate(self.products):
                self.wrong += int(counts[number])
                if len(self.blocks) < MAX_BLOCKS:
                    left = MAX_BLOCKS - len(self.blocks)
                    self.blocks += corrupted(result, self.expected, self.compared + number)[:left]
        self.compared += len(self.products)

    def tflops(self, seconds: float) -> float:
        """Return the rate of one batch in TFLOPS."""
        return significant(2 * self.size**3 * len(self.products) / seconds / 1e12)

    def values(self) -> dict[str, Any]:
        """Return the values that all records of products have."""
        return {
            "device": self.device.type,
            "dtype": str(self.dtype).replace("torch.", ""),
            "size": self.size,
            "compared": self.compared,
            "wrong": self.wrong,
            "corrupted": self.blocks,
        }


def dtype_of(torch: Any, device: Any, name: str) -> Any:
    """Return the type of the matrices. Raises SkipPart if the device does not compute in this format."""
    if name in ("tf32", "fp8") and device.type != "cuda":
        raise SkipPart(f"a processor has no units for {name.upper()}")
    has = capability(torch, device)
    if name == "fp8":
        frameworks.need_fp8(torch, device)
        return torch.float8_e4m3fn
    least = {"bf16": LEAST_TENSOR, "tf32": LEAST_TENSOR, "int8": LEAST_INTEGER}.get(name)
    if device.type == "cuda" and least is not None and has < least:
        raise SkipPart("compute capability {}.{}, {} begins with {}.{}".format(*has, name, *least))
    if name == "int8" and not hasattr(torch, "_int_mm"):
        raise SkipPart(f"PyTorch {torch.__version__} has no product of integers")
    types = {"bf16": "bfloat16", "fp16": "float16", "tf32": "float32", "fp32": "float32", "fp64": "float64"}
    return getattr(torch, types.get(name, name))


def set_precision(torch: Any, name: str) -> None:
    """Configure PyTorch to compute in exactly this format, and to sum in single precision."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = name == "tf32"
    for option in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        if hasattr(matmul, option):
            setattr(matmul, option, False)


def run(where: str | None, gpu_uuid: str | None, name: str, seconds: float) -> dict[str, Any]:
    """Return the values of ``gemm.NAME``, measured for about ``seconds``."""
    torch, device = opened(where)
    product = Product(torch, device, name)
    sensors = sensors_of(gpu_uuid)
    settle(sensors, SETTLE_S)
    for _ in range(WARMUPS):
        product.batch()
        product.compare()
    took: list[float] = []
    until = time.monotonic() + seconds
    with Sampler(sensors) as sampler:
        while len(took) < 3 or time.monotonic() < until:
            took.append(once(torch, device, product.batch))
            product.compare()
    return {
        **product.values(),
        "timer": timer_of(device),
        "tflops": product.tflops(statistics.median(took)),
        **repetition_values(took),
        "load": sampler.state(),
    }


def burn(where: str | None, gpu_uuid: str | None, seconds: float) -> dict[str, Any]:
    """Return the values of ``burn.gemm``: products in half precision for ``seconds``, with the slopes of rate and
    clock.
    """
    torch, device = opened(where)
    half = device.type == "cuda" and capability(torch, device) < LEAST_TENSOR
    product = Product(torch, device, "fp16" if half else "bf16")
    sensors = sensors_of(gpu_uuid)
    settle(sensors, SETTLE_S)
    product.batch()
    product.compare()
    interval = max(seconds / 30, 0.2)
    points: list[dict[str, Any]] = []
    started = time.monotonic()
    with Sampler(sensors) as sampler:
        while time.monotonic() - started < seconds:
            began, batches, busy_s = time.monotonic(), 0, 0.0
            while time.monotonic() - began < interval:
                busy_s += once(torch, device, product.batch)
                product.compare()
                batches += 1
            ended = time.monotonic()
            state = state_of([sample for at, sample in sampler.samples if began <= at <= ended])
            points.append(
                {
                    "second": round(ended - started, 2),
                    "tflops": product.tflops(busy_s / batches),
                    **{key: state[key] for key in ("sm_clock_mhz", "power_w", "temperature_c")},
                }
            )
    rates = [point["tflops"] for point in points]
    rate = statistics.median(rates[len(rates) // 2 :])
    slope = slope_per_minute([(point["second"], point["tflops"]) for point in points])
    clock = [(point["second"], point["sm_clock_mhz"]) for point in points if point["sm_clock_mhz"] is not None]
    return {
        **product.values(),
        "requested_seconds": seconds,
        "burn_seconds": round(time.monotonic() - started, 2),
        "points": points,
        "tflops": rate,
        "tflops_slope_percent_per_minute": None if slope is None else round(100 * slope / rate, 2),
        "sm_clock_slope_mhz_per_minute": slope_per_minute(clock),
        "load": sampler.state(),
    }


def slope_per_minute(points: list[tuple[float, float]]) -> float | None:
    """Return the least-squares slope per minute; None for fewer than five points."""
    if len(points) < 5:
        return None
    middle = statistics.fmean(at for at, _ in points)
    level = statistics.fmean(value for _, value in points)
    width = sum((at - middle) ** 2 for at, _ in points)
    rise = sum((at - middle) * (value - level) for at, value in points)
    return finite(round(60 * rise / width, 2)) if width else None
