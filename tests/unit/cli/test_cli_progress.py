"""The progress line while nodes are asked."""

import pytest

from gpunode.cli.selection import progress


@pytest.mark.parametrize(
    ("waiting", "nodes", "line"),
    [
        ([f"gpu-{n:02d}" for n in range(1, 17)], 16, "collecting: 0 of 16 nodes"),
        (["gpu-03", "gpu-02", "gpu-09"], 16, "collecting: 13 of 16 nodes, waiting for gpu-[02-03,09]"),
        ([], 16, "collecting: 16 of 16 nodes"),
        (["localhost"], 1, "collecting: 0 of 1 nodes"),
    ],
)
def test_the_last_nodes_are_named(waiting: list[str], nodes: int, line: str) -> None:
    assert progress(waiting, nodes) == line
