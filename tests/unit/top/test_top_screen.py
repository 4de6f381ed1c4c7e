"""Screens within any width and height: one node, a hundred, hostile names, and what keys do."""

import random

import pytest
from effort import effort
from rich.cells import cell_len

from gpunode.top.model import NodeStatus, TopDocument, TopGpu, TopNode, TopProcess, TopXid
from gpunode.top.samples import VerdictKind
from gpunode.top.screen import LEVELS, SORTS, ScreenLine, View, draw, press, text_of


def gpu(index: int = 0, verdict: str = "ok", **values: object) -> TopGpu:
    known = {
        **dict.fromkeys(TopGpu.model_fields),
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H100 80GB HBM3",
        "reason": "",
        "utilization_percent": 97.0,
        "memory_used_mib": 60000.0,
        "memory_total_mib": 81559.0,
        "power_w": 640.0,
        "temperature_c": 62.0,
        "pcie_received_gb_per_s": 1.25,
        "pcie_sent_gb_per_s": 0.5,
        "xids": (),
        "processes": (TopProcess(pid=4711, memory_mib=512, user="ada", name="python3", slurm_job="41"),),
    }
    return TopGpu(**{**known, "index": index, "verdict": verdict, **values})


def node(host: str, *gpus: TopGpu, status: NodeStatus = "live", reason: str | None = None) -> TopNode:
    return TopNode(
        host=host,
        status=status,
        since="2026-11-23T20:00:00Z",
        reason=reason,
        simulated=True,
        latency_ms=1.0,
        cost_percent=0.3,
        gpus=gpus,
    )


def document(*nodes: TopNode) -> TopDocument:
    return TopDocument(at="2026-11-23T20:00:32Z", interval_s=1, window_s=30.0, nodes=nodes)


def hundred() -> TopDocument:
    nodes = [node(f"gpu-{number:03}", *(gpu(index) for index in range(8))) for number in range(1, 98)]
    starving = node("gpu-098", *(gpu(index, "starving", reason="45 %") for index in range(8)))
    dead = [node(f"gpu-{number:03}", status="failed", reason="unreachable: x") for number in (99, 100)]
    return document(*nodes, starving, *dead)


def shown(lines: list[ScreenLine]) -> str:
    return "\n".join(line.text for line in lines)


def test_a_hundred_nodes_fold_to_rows_that_fit() -> None:
    text = shown(draw(hundred(), View(), 120, 30))
    rows = text.splitlines()
    assert len(rows) == 6
    assert "gpu-[001-097]" in text
    assert "97x 8x H100 80GB HBM3" in text
    assert rows[2].startswith("gpu-[099-100]")
    assert "since" in rows[2]
    assert "(32 s)" in rows[2]
    assert rows[3].startswith("gpu-098")
    assert "100 nodes, 784 GPUs" in rows[0]
    assert "2 not live" in rows[0]
    assert "8 starving" in rows[0]


@pytest.mark.parametrize(("height", "rows"), [(1000, 778), (200, 100), (90, 3)])
def test_the_finest_rows_that_fit_are_shown(height: int, rows: int) -> None:
    # 98 nodes with 8 GPUs, 2 without any; below that one row for each node; below that groups.
    assert len(draw(hundred(), View(), 120, height)) - 3 in (rows, 98 * 8 + 2)


def test_forty_columns_show_node_gpu_load_and_verdict() -> None:
    lines = draw(
        document(node("gpu-01", gpu(0, "starving", reason="45 % on average")), node("b" * 60, gpu(3))), View(), 40, 10
    )
    assert all(cell_len(line.text) <= 40 for line in lines)
    assert "starving" in lines[2].text
    assert "97%" in lines[2].text
    assert "ok" in lines[3].text


def test_the_most_urgent_row_is_first_and_keys_change_the_order() -> None:
    top_document = document(
        node("gpu-10", gpu(0), gpu(1, "stuck", reason="hangs")),
        node("gpu-2", gpu(0, "free", utilization_percent=0.0)),
        node("gpu-3", status="failed", reason="unreachable: x"),
    )
    view = View()

    def first() -> list[str]:
        return [" ".join(line.text.split()[:2]) for line in draw(top_document, view, 150, 20)[2:-1]]

    assert first() == ["gpu-3 failed", "gpu-10 1", "gpu-2 0", "gpu-10 0"]
    assert press(view, "s")
    assert first() == ["gpu-2 0", "gpu-3 failed", "gpu-10 0", "gpu-10 1"]
    assert press(view, "r")
    assert first() == ["gpu-10 1", "gpu-10 0", "gpu-3 failed", "gpu-2 0"]
    for _ in range(len(SORTS) - 1):
        press(view, "s")
    assert view.sort == "verdict"
    assert not press(view, "q")


def test_keys_scroll_fold_and_pause() -> None:
    view = View(level="gpu")
    first = draw(hundred(), view, 100, 20)
    assert "more rows below" in first[-1].text
    press(view, "\x1b[6~")
    assert draw(hundred(), view, 100, 20)[2].text != first[2].text
    for _ in range(100):
        press(view, "\x1b[6~")
    last = draw(hundred(), view, 100, 20)
    assert len(last) == 20
    assert "more rows" not in last[-1].text
    for key in ("\x1b[5~",) * 200:
        press(view, key)
    assert draw(hundred(), view, 100, 20) == first
    press(view, " ")
    assert "PAUSED" in draw(hundred(), view, 200, 20)[0].text
    seen = [view.level]
    for _ in LEVELS:
        press(view, "f")
        seen.append(view.level)
    assert set(seen) == set(LEVELS)


def test_once_has_every_gpu_with_processes_and_errors() -> None:
    marked = gpu(5, "throttled", reason="heat in 100 %", xids=(TopXid(xid=79, count=2),), uncorrected_new=4)
    text = shown(text_of(document(node("gpu-01", *(gpu(index) for index in range(5)), marked)), 1 << 16))
    assert text.count("pid 4711 python3 ada job 41 512 MiB") == 6
    assert "Xid 79 4 ECC" in text
    assert "heat in 100 %" in text
    assert "SIMULATED" in text


HOSTILE = ("\x1b[2J", "[red]x[/]", "\u202eevil", "\u540d\u524d" * 20, "a" * 300, "gpu[0-9]", "", "-", "\ud800")


def test_any_screen_stays_within_its_size() -> None:
    for seed in range(effort(120, 5000)):
        draw_ = random.Random(seed)  # noqa: S311 (reproducible, not secret)
        kinds = [kind.title for kind in VerdictKind]
        nodes = []
        for number in range(draw_.choice([0, 1, 3, 60])):
            name = f"{draw_.choice(HOSTILE)}{number}"
            gpus = [
                gpu(
                    index,
                    draw_.choice(kinds),
                    reason=draw_.choice(HOSTILE),
                    name=draw_.choice(HOSTILE),
                    utilization_percent=draw_.choice([None, 0.0, 100.0, 1e12]),
                    memory_total_mib=draw_.choice([None, 0.0, 81559.0]),
                    processes=(TopProcess(pid=1, memory_mib=None, user=draw_.choice(HOSTILE)),),
                )
                for index in range(draw_.choice([0, 1, 8]))
            ]
            nodes.append(node(name, *gpus, status=draw_.choice(["live", "failed"]), reason=draw_.choice(HOSTILE)))
        width, height = draw_.choice([1, 20, 40, 80, 250]), draw_.choice([1, 4, 24, 100])
        view = View(level=draw_.choice(LEVELS), sort=draw_.choice(SORTS), processes=draw_.random() < 0.5)
        view.offset = draw_.choice([0, 5, 10**6])
        lines = draw(document(*nodes), view, width, height)
        assert 1 <= len(lines) <= max(height, 1)
        assert all(cell_len(line.text) <= width for line in lines)
        assert not any(char in line.text for line in lines for char in "\x1b\n\r\u202e")
