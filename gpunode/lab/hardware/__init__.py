"""Hardware that a lab node can show: descriptions made of the catalog and of own data."""

from gpunode.lab.hardware.describe import LAB_ARCHITECTURE, describe, names

__all__ = ["LAB_ARCHITECTURE", "describe", "names"]
