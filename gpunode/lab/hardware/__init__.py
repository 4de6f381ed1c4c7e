"""Simulated hardware of lab nodes: descriptions built from the catalog and from data of this package."""

from gpunode.lab.hardware.describe import LAB_ARCHITECTURE, describe, names

__all__ = ["LAB_ARCHITECTURE", "describe", "names"]
