"""Simulated GPU nodes in containers, for trying and testing everything without a GPU."""

from gpunode.lab.lab import Lab
from gpunode.lab.node import LabNode

__all__ = ["Lab", "LabNode"]
