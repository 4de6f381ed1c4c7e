"""Training: steps over all ranks, replicated and sharded, with their communication; and steps of one device."""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from gpunode.workload.payload.group import Group, Seat
from gpunode.workload.payload.isolate import SkipPart
from gpunode.workload.payload.measuring import (
    median_of,
    memory_needed,
    opened,
    repeated,
    repetition_values,
    significant,
)
from gpunode.workload.payload.pytorch import half_precision, synchronize

KINDS = ("replicated", "sharded")
WIDTH, DEPTH, BATCH = 4096, 6, 256
"""On a GPU: 100 million parameters, 400 MB of gradients."""
ON_PROCESSOR = (128, 3, 16)
STEPS, WARMUPS = 10, 2
TOLERANCE = 1e-4
"""Relative to the largest gradient: ranks add the same numbers in another order, in float32."""
CLASSES = 10


class Model:
    """The network, its data and its expected gradients, the same numbers on all ranks."""

    def __init__(self, group: Group) -> None:
        torch = group.torch
        self.torch, self.group, self.device = torch, group, group.device
        width, depth, self.batch = (WIDTH, DEPTH, BATCH) if self.device.type == "cuda" else ON_PROCESSOR
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(13)
        layers: list[Any] = []
        for _ in range(depth):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        with memory_needed(torch, self.device, "the model"):
            self.plain = torch.nn.Sequential(*layers, torch.nn.Linear(width, CLASSES)).to(self.device)
        generator = torch.Generator().manual_seed(17)
        ranks = group.seat.size
        inputs = torch.randn(ranks * self.batch, width, generator=generator)
        labels = torch.randint(0, CLASSES, (ranks * self.batch,), generator=generator)
        self.inputs, self.labels = inputs.to(self.device), labels.to(self.device)
        rows = slice(group.seat.rank * self.batch, (group.seat.rank + 1) * self.batch)
        self.rank_rows = (self.inputs[rows], self.labels[rows])

    def loss(self, network: Any, inputs: Any, labels: Any) -> Any:
        """Return the mean over the samples."""
        return self.torch.nn.functional.cross_entropy(network(inputs), labels)

    def reference(self) -> list[Any]:
        """Return the gradients of one process with the data of all ranks: the mean of equal parts' means."""
        self.plain.zero_grad()
        parts = zip(self.inputs.split(self.batch), self.labels.split(self.batch))
        for inputs, labels in parts:
            (self.loss(self.plain, inputs, labels) / self.group.seat.size).backward()
        gradients = [parameter.grad.clone() for parameter in self.plain.parameters()]
        self.plain.zero_grad(set_to_none=True)
        return gradients

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole network."""
        return sum(parameter.numel() for parameter in self.plain.parameters())


def run(seat: Seat, part: int, kind: str, busbw: dict[str, float] | None) -> dict[str, Any]:
    """Return the values of ``ddp.KIND``. ``busbw``: bus bandwidth of this run's all-reduce in GB/s, by bytes."""
    with Group(seat, part) as group:
        model = Model(group)
        parameters, expected = model.parameters, model.reference()
        compute = group_seconds(group, lambda: step(model, model.plain, None))
        model.plain.zero_grad(set_to_none=True)
        network = replicated(model) if kind == "replicated" else sharded(model)
        error, wrong = compared(model, network, expected)
        optimizer = group.torch.optim.SGD(network.parameters(), lr=0.01)
        losses: list[Any] = []
        took = group_seconds(group, lambda: losses.append(step(model, network, optimizer)))
        communication = group_seconds(group, messages(model, kind, parameters))
        shared = group.share("training", {"error": error, "wrong": wrong})
    ranks, size = seat.size, 4 * parameters
    rate = nearest(busbw, size)
    moved = (2 if kind == "replicated" else 3) * (ranks - 1) / ranks * size
    expected_s = None if rate is None or not moved else moved / rate / 1e9
    return {
        **group.values,
        "steps": len(losses),
        "parameters": parameters,
        "gradient_bytes": size,
        "wrong": sum(report["wrong"] for report in shared),
        "max_gradient_error": max(report["error"] for report in shared),
        "step_seconds": significant(took),
        "compute_seconds": significant(compute),
        "communication_seconds": significant(communication),
        "expected_seconds": None if expected_s is None else significant(expected_s),
        "busbw_gb_per_s": rate,
        "ratio": None if expected_s is None else significant(expected_s / communication),
        "overlap": round(min(1.0, max(0.0, 1 - (took - compute) / communication)), 3),
        "losses": [float(loss) if math.isfinite(float(loss)) else None for loss in losses[WARMUPS:]],
    }


def replicated(model: Model) -> Any:
    """Return the network replicated on all ranks, gradients by all-reduce."""
    parallel = importlib.import_module("torch.nn.parallel")
    ids = None if model.device.type == "cpu" else [model.device.index]
    return parallel.DistributedDataParallel(model.plain, device_ids=ids)


def sharded(model: Model) -> Any:
    """Return each layer in parts over the ranks. Raises SkipPart in a PyTorch before 2.6."""
    try:
        fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
        device_mesh = importlib.import_module("torch.distributed.device_mesh")
    except (ImportError, AttributeError):
        raise SkipPart(f"PyTorch {model.torch.__version__} has no fully_shard") from None
    mesh = device_mesh.init_device_mesh(model.device.type, (model.group.seat.size,))
    for layer in model.plain:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model.plain, mesh=mesh)


def step(model: Model, network: Any, optimizer: Any) -> Any:
    """Run one step with this rank's data; return the loss, still on the device."""
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    loss = model.loss(network, *model.rank_rows)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss.detach()


def compared(model: Model, network: Any, expected: list[Any]) -> tuple[float, int]:
    """Return the largest error of a gradient, relative to the largest gradient, and how many parameters have wrong
    ones.
    """
    step(model, network, None)
    largest, wrong = 0.0, 0
    for parameter, labels in zip(network.parameters(), expected):
        gradient = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        error = float((gradient - labels).abs().max() / labels.abs().max().clamp(min=1e-30))
        error = error if math.isfinite(error) else float("1e30")
        largest, wrong = max(largest, error), wrong + (error > TOLERANCE)
    network.zero_grad(set_to_none=True)
    return float(f"{largest:.3g}"), wrong


def messages(model: Model, kind: str, parameters: int) -> Callable[[], None]:
    """Return a function that sends the messages of one step without its computation."""
    torch, distributed, ranks = model.torch, model.group.distributed, model.group.seat.size
    part = -(-parameters // ranks)
    whole = torch.randn(part * ranks, device=model.device)
    if kind == "replicated":
        return lambda: distributed.all_reduce(whole)
    small = torch.randn(part, device=model.device)
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor

    def all_three() -> None:
        gather(whole, small)
        gather(whole, small)
        scatter(small, whole)

    return all_three


def group_seconds(group: Group, work: Callable[[], Any]) -> float:
    """Return the median of the slowest rank."""
    for _ in range(WARMUPS):
        work()
    group.share("ready", None)
    seconds = group.seconds(work, STEPS)
    return float(max(1e-9, *group.share("took", statistics.median(seconds))))


def nearest(busbw: dict[str, float] | None, size: int) -> float | None:
    """Return the measurement at the size nearest to ``size``; None if there is none."""
    known = {int(at): rate for at, rate in (busbw or {}).items() if rate}
    return known[min(known, key=lambda at: abs(math.log(at / size)))] if known else None


LAUNCHES = 500
"""At once, below the length of CUDA's queue of launches: the host does not wait for the GPU."""
ROUNDS = 15
STEPS_WIDTH, STEPS_DEPTH, STEPS_BATCH = 4096, 4, 2048
STEPS_ON_PROCESSOR = (256, 2, 64)


def steps(where: str | None, repetitions: int) -> dict[str, Any]:
    """Return the values of ``steps.device``."""
    torch, device = opened(where)
    number = torch.zeros(1, device=device)

    def launch() -> None:
        number.add_(1.0)

    launches, returns = launch_seconds(launch, lambda: synchronize(torch, device))
    width, depth, batch = STEPS_WIDTH, STEPS_DEPTH, STEPS_BATCH
    if device.type == "cpu":
        width, depth, batch = STEPS_ON_PROCESSOR
    dtype = half_precision(torch, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    with memory_needed(torch, device, "a training step"):
        layers = [layer for _ in range(depth) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        network = torch.nn.Sequential(*layers).to(device)
        inputs = torch.randn(batch, width, device=device)

        def step(*, mixed: bool) -> None:
            with torch.autocast(device.type, dtype=dtype, enabled=mixed):
                loss = network(inputs).square().mean()
            loss.backward()
            network.zero_grad(set_to_none=True)

        plain = repeated(torch, device, lambda: step(mixed=False), warmups=3, repetitions=repetitions)
        mixed = repeated(torch, device, lambda: step(mixed=True), warmups=3, repetitions=repetitions)
    return {
        "device": device.type,
        "launch_us": significant(median_of(launches) * 1e6),
        "round_trip_us": significant(median_of(returns) * 1e6),
        **repetition_values(launches),
        "dtype": str(dtype).replace("torch.", ""),
        "fp32_step_seconds": significant(median_of(plain)),
        "mixed_step_seconds": significant(median_of(mixed)),
    }


def launch_seconds(launch: Callable[[], None], wait: Callable[[], None]) -> tuple[list[float], list[float]]:
    """Return the host's seconds for one launch in each round, and those until one result is there."""
    launches, returns = [], []
    for number in range(ROUNDS + 1):
        wait()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        took = (time.perf_counter() - began) / LAUNCHES
        wait()
        single = []
        for _ in range(20):
            began = time.perf_counter()
            launch()
            wait()
            single.append(time.perf_counter() - began)
        # The first round loads the kernel.
        if number:
            launches.append(took)
            returns.append(statistics.median(single))
    return launches, returns
