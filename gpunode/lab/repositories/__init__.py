"""A lab's vendor repository: what NVIDIA's and Ubuntu's servers would give to a node, signed, and faults of it."""

from gpunode.lab.repositories.vendor import FAULTS, VENDOR_LABEL, Vendor, find, start

__all__ = ["FAULTS", "VENDOR_LABEL", "Vendor", "find", "start"]
