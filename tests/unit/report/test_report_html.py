"""The HTML page: whole and closed whatever nodes send; equal nodes share a drawing; drawings overlap nowhere."""

import random
import re
from collections import Counter
from html.parser import HTMLParser
from itertools import combinations, pairwise
from typing import Any

import pytest
from effort import effort

from gpunode.checks import (
    Finding,
    GpuIdentity,
    Identity,
    MachinePart,
    NodeLayout,
    PairMatrix,
    RunningStack,
    State,
    Status,
)
from gpunode.checks.actions import Action
from gpunode.checks.identity import MachineBridge, NumaDomain, PartLink, PartNvlink
from gpunode.checks.registry import FigureReport
from gpunode.judging.report import Fleet, NodeReport, judged, report, unreachable
from gpunode.report import html
from gpunode.report.html.drawing import MOST_DRAWN, Drawing, draw
from gpunode.report.html.page import MOST_UNAFFECTED
from gpunode.report.summary import Origin, of_run
from gpunode.text import printable

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'\" onload='x",
    "</style></title><svg onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "a\x00b\x1b[31mred\x07",
    "\u202egnp.exe\u2066\u2069\u200f",
    "&lt;&amp;&#x41;",
    "javascript:alert(1)",
    "]]>--><!--",
    "node\nname\ttab",
    "x" * 300,
    "",
)
VOID = {"meta", "input", "br", "img", "link", "hr"}


class Reader(HTMLParser):
    """Tags of the page, which must be closed in order, and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    """Return the page's tags; nothing in it comes from elsewhere, runs, or leads nowhere."""
    page = Reader()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.tags["script"] == 1
    assert not page.tags & Counter(("img", "iframe", "object", "embed", "link", "base"))
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        assert name not in ("src", "srcset", "action", "xlink:href")
        if name == "href":
            assert value.removeprefix("#") in ids
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)
    return page


def layout(gpus: int = 4, *, inactive: int = 0, switch: bool = True) -> NodeLayout:
    """Return a node with a PCIe switch above each two GPUs, and an adapter beside each."""
    link = PartLink(width=16, width_max=16, speed_gt_per_s=None, speed_max_gt_per_s=32.0)
    nvlinks = tuple(PartNvlink(link=number, state="inactive" if number < inactive else "active") for number in range(6))
    parts: list[MachinePart] = []
    slots: set[str] = set()
    for number in range(gpus):
        chain = (f"0000:{number // 2:x}7:0{number % 2}.0", f"0000:{number // 2:x}6:00.0", f"0000:{number // 2:x}5:01.0")
        bridges = chain if switch else chain[2:]
        slots |= set(bridges)
        numa = number * 2 // max(gpus, 1)
        common: dict[str, Any] = {"numa_node": numa, "bridges": bridges, "link": link}
        parts.append(MachinePart(kind="gpu", name=f"gpu{number}", model="NVIDIA H100", nvlinks=nvlinks, **common))
        parts.append(MachinePart(kind="nic", name=f"mlx5_{number}", state="ACTIVE", rate_gbit_per_s=400, **common))
    labels = tuple(f"gpu{number}" for number in range(gpus))
    return NodeLayout(
        numa=(NumaDomain(node=0, cpus="0-7", memory_mib=1024), NumaDomain(node=1, cpus="8-15", memory_mib=1024)),
        parts=tuple(parts),
        bridges=tuple(MachineBridge(slot=slot, numa_node=0, link=link) for slot in sorted(slots)),
        labels=labels,
        connections=tuple(tuple(None if label == other else "NV2" for other in labels) for label in labels),
    )


def finding(check: str = "a.check", status: str = "pass", component: str = "node", **more: Any) -> Finding:
    return Finding(check=check, status=Status(status), component=component, **{"message": f"it is {status}", **more})


def node(host: str, *findings: Finding, parts: NodeLayout | None = None, **more: Any) -> NodeReport:
    about = {"stack": RunningStack(driver="580.1"), "gpus": (GpuIdentity(index=0, name="NVIDIA H100", uuid="GPU-1"),)}
    return judged(host, Identity(simulated=False, layout=parts, **{**about, **more}), findings, 1.0)


def page(*nodes: NodeReport, fleet: Fleet | None = None) -> str:
    at = "2026-11-20T12:00:00Z"
    document = report(nodes, level="quick", version="0", started_at=at, finished_at=at, fleet=fleet)
    return html.as_text(document)


def test_the_head_has_the_verdict_and_what_to_drain_and_a_remedy_its_command() -> None:
    role = Action(action="run_role", target="nvidia_driver:nvidia_driver_install")
    bad = finding(status="fail", remedy="Install it.", actions=(role,), recommended_state=State.DRAIN)
    with of_run(Origin(("hosts.yml",))):
        text = page(node("gpu-1", bad), node("gpu-2", finding()), node("gpu-3", bad))
    read(text)
    assert "<h1>2 of 3 nodes failed</h1>\n<p><b>Drain</b> gpu-[1,3]</p>" in text
    assert "<code>gpunode provision -i hosts.yml -l gpu-1,gpu-3 -t nvidia_driver_install</code>" in text


def hostile_node(draw_: random.Random, number: int) -> NodeReport:
    """Return a node of which every text is hostile."""

    def text() -> str:
        return draw_.choice(HOSTILE)

    if draw_.random() < 0.2:
        return unreachable(f"{text()}{number}", text(), None)
    statuses = [status.value for status in Status]
    findings = [
        finding(
            draw_.choice(("gpu.present", "link.pcie-width", f"own.{draw_.randrange(3)}", f"own.{text()}")),
            draw_.choice(statuses),
            draw_.choice(("node", "gpu0", "gpu0-gpu1", text())),
            message=text(),
            remedy=text() or None,
            source=text(),
            expected=draw_.choice((None, text(), 1.5)),
            measured=draw_.choice((None, text(), 2, 0)),
            unit=text(),
            figure=draw_.choice(
                (
                    None,
                    FigureReport(
                        metric=text(),
                        limit=draw_.choice((None, 0.0, 3.0)),
                        limit_of=text(),
                        baseline=draw_.choice((None, 0.0, 4.0)),
                    ),
                )
            ),
            observed=draw_.choice((None, None, text())),
        )
        for _ in range(draw_.randrange(12))
    ]
    parts = layout(draw_.randrange(1, 9), switch=draw_.random() < 0.5)
    odd = [
        part.model_copy(update={"name": text() or part.name, "model": text(), "slot": text()}) for part in parts.parts
    ]
    matrix = PairMatrix(
        title=text(), origin=text(), labels=(text(), text()), unit=text(), rows=((None, 1.0), (0.0, None))
    )
    return node(
        f"{text()}{number}",
        *findings,
        parts=parts.model_copy(
            update={"parts": tuple(odd), "labels": (text(), "gpu1"), "connections": ((None, text()), (text(), None))}
        ),
        stack=RunningStack(os=text(), driver=text(), kernel=text()),
        gpus=(GpuIdentity(index=0, name=text(), uuid=text()),),
        matrices=(matrix,),
    )


@pytest.mark.parametrize("seed", range(effort(12, 400)))
def test_a_page_of_hostile_texts_is_closed_and_shows_them(seed: int) -> None:
    draw_ = random.Random(seed)  # noqa: S311
    nodes = [hostile_node(draw_, number) for number in range(draw_.randrange(6))]
    text = draw_.choice(HOSTILE)
    outlier: dict[str, Any] = {
        "kind": "value",
        "section": "link",
        "hosts": [text],
        "of": 3,
        "what": text,
        "group": text,
    }
    fleet = Fleet(outliers=(outlier | {"found": text, "usual": text},))
    parsed = read(page(*nodes, fleet=fleet))
    shown = "".join(parsed.text)
    for judged_node in nodes:
        assert printable(judged_node.host) in shown
        for result in judged_node.findings:
            if result.status is Status.FAIL:
                assert printable(result.message) in shown


def test_no_node_and_only_unreachable_nodes() -> None:
    assert "No node was judged." in page()
    parsed = read(page(*(unreachable(f"n{number}", "no route to host", 1.0) for number in range(200))))
    text = "".join(parsed.text)
    assert "n[0-199]" in text
    assert text.count("no route to host") < 210
    assert 'class="drawing"' not in page(unreachable("n", "no route to host", 1.0))


def test_ten_thousand_findings_are_all_in_the_page_once() -> None:
    rows = [
        finding(f"own.c{number % 40}", "fail", f"disk{number}", message=f"fault {number}!") for number in range(10_000)
    ]
    text = page(node("n", *rows))
    assert len(text) < 10_000_000
    assert text.count('data-s="fail" data-n="0"') == 10_000 + 1
    assert "fault 9999!" in text


def test_equal_nodes_share_a_drawing_and_a_fault_is_its_own() -> None:
    nodes = [node(f"n{number:03d}", finding(), parts=layout()) for number in range(200)]
    bad = finding("link.pcie-width", "fail", "gpu2", message="x8")
    text = page(*nodes, node("bad", bad, finding(), parts=layout()))
    parsed = read(text)
    drawings = re.findall(r'<svg class="drawing".*?</svg>', text, re.DOTALL)
    assert sorted("k-fail" in drawing for drawing in drawings) == [False, True]
    assert sum((tag, name, value) == ("p", "data-d", "1") for tag, name, value in parsed.attributes) == 199
    assert len(text) < 1_000_000


def test_a_thousand_nodes_with_texts_of_their_own_stay_small() -> None:
    checks = [f"own.c{number}" for number in range(10)]
    nodes = [
        node(
            f"n{number}",
            *(finding(check, message=f"{check} took {number} of its own") for check in checks),
            parts=layout(),
        )
        for number in range(1000)
    ]
    text = page(*nodes)
    assert len(text) < 3_000_000
    assert text.count("own.c7 took") == MOST_UNAFFECTED
    assert 'role="img" aria-label="10 passed, 0 skipped"' in text


def test_a_matrix_marks_what_is_below_the_expected_value() -> None:
    matrix = PairMatrix(
        title="one direction",
        origin="copy.peer",
        labels=("gpu0", "gpu1"),
        unit="GB/s",
        rows=((None, 390.0), (21.4, None)),
    )
    slow = finding(
        "performance.peer-copy",
        "fail",
        "gpu1-gpu0",
        expected=335.0,
        measured=21.4,
        figure=FigureReport(metric="peer_to_peer"),
    )
    text = page(node("n", slow, matrices=(matrix,)))
    assert re.findall(r'<td class="q\d( low)?">([\d.]+)</td>', text) == [("", "390"), (" low", "21.4")]


# Drawings


def overlap(drawing: Drawing) -> list[tuple[str, str]]:
    return [
        (box.title, other.title)
        for box, other in combinations(drawing.boxes, 2)
        if box.x < other.x + other.width
        and other.x < box.x + box.width
        and box.y < other.y + other.height
        and other.y < box.y + box.height
    ]


def any_layout(draw_: random.Random) -> NodeLayout:
    """Return parts below any tree of bridges, on any NUMA nodes."""
    domains = draw_.randrange(0, 5)
    chains = [
        tuple(f"0000:{root:02x}:{level:02x}.0" for level in range(draw_.choice((0, 1, 2, 3, 5)), 0, -1))
        for root in range(draw_.randrange(1, 9))
    ]
    parts = []
    for number in range(draw_.randrange(1, MOST_DRAWN)):
        chain = draw_.choice(chains)
        links = tuple(
            PartNvlink(link=link, state=draw_.choice(("active", "inactive", None)))
            for link in range(draw_.choice((0, 0, 4, 18)))
        )
        kind = draw_.choice(("gpu", "gpu", "nic", "nvme", "nvswitch"))
        bridges = (f"{chain[0]}-{number}", *chain[1:]) if len(chain) > 2 else chain
        parts.append(
            MachinePart(
                kind=kind,
                name=f"{kind}{number}",
                numa_node=draw_.choice((None, *range(domains))),
                bridges=bridges,
                nvlinks=links if kind == "gpu" else (),
                link=PartLink(
                    width=draw_.choice((None, 1, 8, 16)), width_max=16, speed_gt_per_s=2.5, speed_max_gt_per_s=32
                ),
            )
        )
    gpus = [part.name for part in parts if part.kind == "gpu"]
    return NodeLayout(
        numa=tuple(NumaDomain(node=domain, cpus=None, memory_mib=None) for domain in range(domains)),
        parts=tuple(parts),
        labels=tuple(gpus),
        connections=tuple(tuple(draw_.choice(("NV4", "NV18", "SYS", None)) for _ in gpus) for _ in gpus),
    )


@pytest.mark.parametrize("seed", range(effort(40, 2000)))
def test_every_part_is_drawn_once_within_the_picture_and_overlaps_nothing(seed: int) -> None:
    machine = any_layout(random.Random(seed))  # noqa: S311
    drawing = draw(machine, {})
    titles = Counter(box.title.partition(",")[0] for box in drawing.boxes)
    nvlinks = any(part.nvlinks for part in machine.parts)
    assert all(titles[part.name] == 1 for part in machine.parts if part.kind != "nvswitch" or not nvlinks)
    assert overlap(drawing) == []
    for box in (*drawing.boxes, *drawing.panels):
        assert 0 <= box.x < box.x + box.width <= drawing.width
        assert 0 <= box.y < box.y + box.height <= drawing.height
    assert all(
        panel.x + panel.width <= other.x
        for panel, other in pairwise(panel for panel in drawing.panels if panel.kind == "numa")
    )
    wired = {wire.title.split(":")[0] for wire in drawing.wires if wire.kind == "pcie"}
    assert wired >= {f"PCIe of {part.name}" for part in machine.parts if part.kind in ("gpu", "nic", "nvme")}


def test_states_of_links_are_drawn() -> None:
    drawing = draw(layout(inactive=2), {"gpu1": "fail", "pcie gpu1": "fail", "nvlink gpu3": "warn"})
    ticks = [wire for wire in drawing.wires if wire.kind == "tick"]
    assert {wire.status: wire.path.count("M") for wire in ticks} == {"fail": 2, "pass": 4}
    assert len(ticks) == 8
    assert [wire.status for wire in drawing.wires if wire.title.startswith("PCIe of gpu1")] == ["fail"]
    assert [box.status for box in drawing.boxes if box.title.startswith("gpu1,")] == ["fail"]
    assert sum(wire.kind == "arc" for wire in drawing.wires) == 6
    assert "gpu1: fail" in drawing.summary
