"""Copies from every GPU to every other one, and between which of them they go directly."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.pytorch import torch_module, why_no_gpu

WORDS = 16 * 2**20
"""64 MiB in one copy."""


def run(uuids: list[str]) -> dict[str, Any]:
    """Values of ``frameworks.p2p``: ``access[i][j]`` and the pairs whose copy arrived wrong."""
    torch = torch_module()
    reason = why_no_gpu(torch)
    if reason is not None:
        raise Trouble(f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: {reason}")
    number = int(torch.cuda.device_count())
    if number != len(uuids):
        raise Trouble(f"PyTorch counts {number} GPUs side by side, {len(uuids)} were handed in")
    access = [
        [one == other or bool(torch.cuda.can_device_access_peer(one, other)) for other in range(number)]
        for one in range(number)
    ]
    wrong = []
    for one in range(number):
        # The rounds differ, so that what an earlier copy left at its place cannot pass for this one.
        given = torch.arange(WORDS, dtype=torch.int32, device=f"cuda:{one}").bitwise_xor_(one + 1)
        for other in range(number):
            if one != other:
                found = given.to(f"cuda:{other}")
                wanted = torch.arange(WORDS, dtype=torch.int32, device=found.device).bitwise_xor_(one + 1)
                if int((found != wanted).sum()):
                    wrong.append([one, other])
    return {"device": "cuda", "uuids": uuids, "access": access, "wrong": wrong}
