"""Physical limits of hardware, computed from the catalog's figures. GB/s: 10^9 bytes, in one direction."""

from packaging.version import Version

from gpunode.catalog.hardware import Gpu, NvLink

PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One lane after line coding, by PCIe generation."""
PCIE_PAYLOAD_BYTES = 256
PCIE_PACKET_BYTES = PCIE_PAYLOAD_BYTES + 24
"""A packet with its framing (4), header (16) and checksum (4): 5 to 7 words of four bytes without payload, according to
Intel's application note AN 708. 256 bytes of payload are what most servers negotiate; with 128 or 512 the share is 84
or 96 %."""
GEMM_SHARE = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5, "fp8": 2.0}
"""Peak rate of the tensor cores by type, as a multiple of the one for bf16."""
TENSOR_TYPES_SINCE = {"bf16": "8.0", "fp16": "7.0", "tf32": "8.0", "fp8": "8.9"}
"""The first compute capability with tensor cores for the type."""


def pcie_gb_per_s(gen: int | None, width: int | None) -> float | None:
    """Return the rate of a PCIe link after line coding; None if generation or width is unknown."""
    lane = PCIE_LANE_GB_PER_S.get(gen or 0)
    return None if lane is None or not width else lane * width


def pcie_payload_gb_per_s(gen: int | None, width: int | None) -> float | None:
    """Return the payload rate of a PCIe link, without packet headers; None as for ``pcie_gb_per_s``."""
    rate = pcie_gb_per_s(gen, width)
    return None if rate is None else rate * PCIE_PAYLOAD_BYTES / PCIE_PACKET_BYTES


def nvlink_gb_per_s(nvlink: NvLink, links: int | None = None) -> float:
    """Return the rate of ``links`` links of a GPU by the data sheet; None: all of them."""
    return nvlink.sheet_gb_per_s * (nvlink.links if links is None else links)


def tensor_tflops(gpu: Gpu, dtype: str) -> float | None:
    """Return the peak rate of matrix products without sparsity, by the data sheet; None if the catalog has none."""
    if gpu.tflops is None:
        return None
    if dtype == "fp32":
        return gpu.tflops.fp32
    first = TENSOR_TYPES_SINCE.get(dtype)
    peak = gpu.tflops.fp16 if dtype == "fp16" else gpu.tflops.bf16
    if first is None or peak is None or gpu.capability < Version(first):
        return None
    return peak * GEMM_SHARE[dtype]
