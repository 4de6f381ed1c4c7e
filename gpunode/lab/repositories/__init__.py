"""A lab's vendor repository: the signed content of NVIDIA's and Ubuntu's servers, and faults of it."""

from gpunode.lab.repositories.image import VendorImages
from gpunode.lab.repositories.vendor import FAULTS, VENDOR_LABEL, Vendor, find, start

__all__ = ["FAULTS", "VENDOR_LABEL", "Vendor", "VendorImages", "find", "start"]
