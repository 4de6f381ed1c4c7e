"""The surface of a PyTorch for CUDA that reports devices, as torch/cuda/__init__.py of pytorch/pytorch has it.

It computes nothing. What counts: before CUDA starts in the process the devices are counted by NVML (cards, also where
MIG is on), unless CUDA_VISIBLE_DEVICES names a MIG device; CUDA's own count is what can be used.
"""

import os
from types import SimpleNamespace

from torch import cuda

_CUDA, _, _FLAGS = os.environ.get("GPUNODE_STUB_TORCH", "13.0 sm_75 sm_80 sm_86 sm_90 sm_100 sm_120").partition(" ")
__version__ = f"2.13.0+cu{_CUDA.replace('.', '')}"
version = SimpleNamespace(cuda=_CUDA)
_C = SimpleNamespace(_cuda_getArchFlags=lambda: _FLAGS)
backends = SimpleNamespace(cudnn=SimpleNamespace(is_available=lambda: True, version=lambda: 91900))


def device(name: str) -> SimpleNamespace:
    """``cuda:0`` as an object with its type."""
    return SimpleNamespace(type=name.partition(":")[0])


def compile(function: object) -> object:  # noqa: A001 - the name that PyTorch has
    """Compiles nothing."""
    return function


__all__ = ["backends", "compile", "cuda", "device", "version"]
