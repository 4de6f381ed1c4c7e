"""Copies from every GPU to every other one, and between which of them they are direct."""

from __future__ import annotations

from typing import Any

from gpunode.workload.payload.isolate import Trouble
from gpunode.workload.payload.pytorch import torch_module, why_no_gpu

WORDS = 16 * 2**20
"""64 MiB in one copy."""


def run(uuids: list[str]) -> dict[str, Any]:
    """Return the values of ``frameworks.p2p``: ``access[i][j]`` and the pairs with a wrong copy."""
    torch = torch_module()
    reason = why_no_gpu(torch)
    if reason is not None:
        raise Trouble(f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: {reason}")
    number = int(torch.cuda.device_count())
    if number != len(uuids):
        raise Trouble(f"PyTorch finds {number} GPUs, {len(uuids)} were passed")
    access = [
        [device == other or bool(torch.cuda.can_device_access_peer(device, other)) for other in range(number)]
        for device in range(number)
    ]
    wrong = copied(torch, [torch.device(f"cuda:{index}") for index in range(number)], WORDS)
    return {"device": "cuda", "uuids": uuids, "access": access, "wrong": wrong}


def copied(torch: Any, devices: list[Any], words: int) -> list[list[int]]:
    """Return the pairs of devices with a copy that differs from its source."""
    wrong = []
    for sender, source in enumerate(devices):
        # Every device sends other data: the rest of an earlier copy cannot be mistaken for this one.
        sent = torch.arange(words, dtype=torch.int32, device=source).bitwise_xor_(sender + 1)
        for receiver, target in enumerate(devices):
            if sender != receiver:
                received = sent.to(target, copy=True)
                expected = torch.arange(words, dtype=torch.int32, device=target).bitwise_xor_(sender + 1)
                if int((received != expected).sum()):
                    wrong.append([sender, receiver])
    return wrong
