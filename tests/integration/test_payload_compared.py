"""The arithmetic of measurements that need a GPU, with a real PyTorch on the processor, see test_payload_torch.py."""

from pathlib import Path

import pytest
from payload_programs import NEEDS_TORCH, program

pytestmark = NEEDS_TORCH

WITHOUT_A_GPU = {
    "the product on the processor is the plain one, and one wrong row of it is found in every round": (
        """
from gpunode.workload.payload import frameworks
one, other = frameworks.sparse(torch, 96), frameworks.signs(torch, 96, 96)
assert torch.equal(frameworks.sparse_product(torch, one, other), one @ other)
assert int((one != 0).sum(dim=1).max()) <= 256
plain = frameworks.sparse_product
frameworks.sparse_product = lambda *matrices: plain(*matrices).index_fill_(0, torch.tensor([5]), 99.0)
print(frameworks.matmul(None)["wrong"])
""",
        5 * 512,
    ),
    "a bit that is stuck shows in one of the two patterns": (
        """
from gpunode.workload.payload import frameworks
places = torch.arange(4096, dtype=torch.int32)
pieces = [torch.empty_like(places) for _ in range(5)]
assert sum(frameworks.wrong_words(torch, places, pieces, pattern) for pattern in frameworks.PATTERNS) == 0
plain = torch.Tensor.bitwise_xor_
def stuck(piece, places):
    piece[17] |= 4
    return plain(piece, places)
torch.Tensor.bitwise_xor_ = stuck
print(sum(frameworks.wrong_words(torch, places, pieces, pattern) for pattern in frameworks.PATTERNS))
""",
        5,
    ),
    "copies arrive": (
        """
from gpunode.workload.payload import copies
cpu = torch.device("cpu")
assert copies.wrong_peers(torch, [cpu] * 3, 4096) == []
plain = torch.Tensor.to
torch.Tensor.to = lambda given, *words, **more: plain(given, *words, **more) + 1
print(len(copies.wrong_peers(torch, [cpu] * 3, 4096)))
""",
        6,
    ),
    "a product in FP8 is exact": (
        """
from gpunode.workload.payload import frameworks
frameworks.FP8_ROWS, frameworks.FP8_COLUMNS = 64, 128  # the whole size takes a processor half a minute
print(frameworks.wrong_fp8_elements(torch, torch.device("cpu")))
""",
        0,
    ),
}


@pytest.mark.parametrize("part", list(WITHOUT_A_GPU))
def test_what_a_gpu_computes_is_compared_rightly(archive: Path, part: str) -> None:
    """The arithmetic of parts that need a GPU, on the processor, with the payload as it is sent."""
    text, printed = WITHOUT_A_GPU[part]
    assert program(archive, f"import torch{text}") == printed
