"""Hardware that a lab node can show: descriptions made of the catalog and of own data."""

from gpunode.lab.hardware.describe import describe, names

__all__ = ["describe", "names"]
