"""Simulated GPU nodes in containers, to try and to test everything without a GPU."""

from gpunode.lab.lab import Lab
from gpunode.lab.node import LabNode

__all__ = ["Lab", "LabNode"]
