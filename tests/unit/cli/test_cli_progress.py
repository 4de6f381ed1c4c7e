"""The progress line while nodes are asked."""

import pytest

from gpunode.cli import selection
from gpunode.cli.selection import progress, shown_progress


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


def test_in_a_pipe_lines_are_far_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress(["gpu-1", "gpu-2"]) as shown:
        shown("gpu-1")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(selection, "LINE_EVERY_S", 0.0)
    with shown_progress(["gpu-1", "gpu\x1b-2"], "evaluating") as shown:
        shown("gpu-1")
        shown.step("gpu\x1b-2", "pulling")
    assert capsys.readouterr().err.splitlines() == [
        "gpunode: evaluating: 1 of 2 nodes, waiting for gpu\\x1b-2",
        "gpunode: evaluating: 1 of 2 nodes, waiting for gpu\\x1b-2; gpu\\x1b-2: pulling",
    ]
