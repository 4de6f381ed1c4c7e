"""A large product in half precision on the tensor cores, with every element of the result compared."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.pytorch import device_for, half_precision, timed, torch_module

SIZE = 8192
"""On a GPU: 1.1 TFLOP per round, 0.5 GiB for all matrices."""
SIZE_ON_PROCESSOR = 512
STRIDE = 32
"""Every 32nd element of a row is not 0: at most 256 terms of 1 or -1, so that every partial sum is a whole number that
bfloat16 represents exactly, in any order of addition.
"""
ROUNDS = 5


def run(where: str | None) -> dict[str, Any]:
    """Return the values of ``frameworks.matmul``: the same product several times, each compared with the CPU's."""
    torch = torch_module()
    device = device_for(torch, where)
    dtype = half_precision(torch, device)
    size = SIZE if device.type == "cuda" else SIZE_ON_PROCESSOR
    left, right = sparse(torch, size), signs(torch, size, size)
    wanted = product(torch, left, right).to(dtype).to(device)
    device_left, device_right = left.to(dtype).to(device), right.to(dtype).to(device)
    wrong, seconds = 0, []
    for _ in range(ROUNDS):
        output, took = timed(torch, device, lambda: device_left @ device_right)
        seconds.append(took)
        wrong += int((output != wanted).sum())
    return {
        "device": device.type,
        "dtype": str(dtype).replace("torch.", ""),
        "size": size,
        "rounds": ROUNDS,
        "wrong": wrong,
        "seconds": round(min(seconds), 6),
    }


def signs(torch: Any, rows: int, columns: int) -> Any:
    """Return a matrix of 1 and -1."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8).float().mul_(2).sub_(1)


def sparse(torch: Any, size: int) -> Any:
    """Return 1 and -1 in the columns with the same remainder as the row, 0 elsewhere."""
    rests = torch.arange(size) % STRIDE
    return signs(torch, size, size).mul_(rests[:, None] == rests[None, :])


def product(torch: Any, left: Any, right: Any) -> Any:
    """Return the product on the CPU, from the parts that are not 0: a 32nd of the work."""
    output = torch.empty_like(right)
    for rest in range(STRIDE):
        output[rest::STRIDE] = left[rest::STRIDE, rest::STRIDE] @ right[rest::STRIDE]
    return output
