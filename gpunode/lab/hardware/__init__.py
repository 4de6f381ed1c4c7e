"""Simulated hardware of lab nodes: descriptions built from the catalog and from data of this package."""

from gpunode.lab.hardware.describe import describe, names

__all__ = ["describe", "names"]
