"""Drawing of a node: GPUs, NVSwitches, adapters, PCIe switches and NUMA nodes, with the state of every link.

Each NUMA node is a panel. A tree hangs below its upper edge: root ports, PCIe switches, then adapters and disks, then
GPUs in the last row. NVLinks run downwards, to a panel of NVSwitches or from GPU to GPU.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpunode.checks import MachinePart, NodeLayout
from gpunode.checks.identity import PartLink
from gpunode.text import counted

COLUMN, GAP = 116, 10
ROOT, HUB, SMALL, GPU = 22, 34, 38, 72
RISE = 18
"""Height of a line between two rows."""
PAD, HEAD = 12, 26
PANEL_GAP = 26
FABRIC = 60
ARC = 26
MOST_PANELS = 8
STACK = 2
"""Adapters and disks below each other in a column."""
MOST_DRAWN = 64
"""Parts from which on a node is only listed."""
CHARS = 17
TINY_CHARS = 20
ALONE = ("Host", "NUMA node unknown")
"""Titles of panels of parts that belong to no known NUMA node."""
Area = tuple[float, float, float, float]
"""Left edge, upper edge, width, height."""
_NVLINKS = re.compile(r"NV([0-9]{1,3})")


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text."""

    kind: str
    status: str
    x: float
    y: float
    width: float
    height: float
    texts: tuple[tuple[str, str], ...]
    """Style and text of each line."""
    title: str

    @property
    def lines(self) -> list[tuple[str, float, str]]:
        """Return style, base line and text of each line."""
        first, step = (16, 13) if self.height > HUB else (14, 13)
        return [(style, self.y + first + number * step, text) for number, (style, text) in enumerate(self.texts)]


@dataclass(frozen=True)
class Wire:
    """A link: an SVG path."""

    kind: str
    status: str
    path: str
    width: float
    title: str


@dataclass(frozen=True)
class Label:
    """Text beside the boxes."""

    kind: str
    x: float
    y: float
    text: str


@dataclass
class Drawing:
    """The elements of one drawing."""

    width: float = 0
    height: float = 0
    panels: list[Box] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    summary: str = ""


@dataclass
class _Hub:
    """A root port or a PCIe switch with what is below it."""

    slot: str
    root: bool
    hubs: dict[str, "_Hub"] = field(default_factory=dict)
    parts: list[MachinePart] = field(default_factory=list)

    @property
    def columns(self) -> int:
        gpus = sum(part.kind == "gpu" for part in self.parts)
        return sum(hub.columns for hub in self.hubs.values()) + max(gpus, -(-(len(self.parts) - gpus) // STACK))

    @property
    def drop(self) -> int:
        """Return the height of the rows of hubs."""
        height = (ROOT if self.root else HUB) + RISE if self.slot else 0
        return height + max((hub.drop for hub in self.hubs.values()), default=0)

    @property
    def stack(self) -> int:
        small = sum(part.kind != "gpu" for part in self.parts)
        rows = -(-small // max(1, self.columns_of_parts))
        return max([rows, *(hub.stack for hub in self.hubs.values())])

    @property
    def columns_of_parts(self) -> int:
        return self.columns - sum(hub.columns for hub in self.hubs.values())


def drawn(layout: NodeLayout) -> bool:
    """Return whether a layout has parts, and few enough to draw."""
    return 0 < len(layout.parts) <= MOST_DRAWN


def draw(layout: NodeLayout, status: Mapping[str, str]) -> Drawing:
    """Return the drawing of a node; ``status`` has the worst status of a part, and of its links by ``pcie NAME``,
    ``nvlink NAME`` and ``fabric``.
    """
    return _Artist(layout, status).drawing()


def pcie_words(link: PartLink | None) -> str:
    """Return ``x16 · 32 GT/s``; a link below its maximum names both."""
    if link is None or link.width is None:
        return ""
    narrow = link.width_max is not None and link.width < link.width_max
    width = f"x{link.width} of x{link.width_max}" if narrow else f"x{link.width}"
    speed, most = link.speed_gt_per_s, link.speed_max_gt_per_s
    if speed is None:
        return f"{width} · {most:g} GT/s" if most else width
    slow = most is not None and speed < most
    return f"{width} · {speed:g}{f' of {most:g}' if slow else ''} GT/s"


def nvlink_words(part: MachinePart) -> str:
    """Return ``18 NVLinks active``, with the number of those that are not."""
    active = sum(link.state == "active" for link in part.nvlinks)
    if not part.nvlinks:
        return ""
    rate = f" · {part.nvlink_gb_per_s:g} GB/s each" if part.nvlink_gb_per_s else ""
    if active == len(part.nvlinks):
        return f"{counted(active, 'NVLink')}{rate}"
    return f"{active} of {counted(len(part.nvlinks), 'NVLink')} active{rate}"


def port_words(part: MachinePart) -> str:
    """Return the state and rate of an adapter's port."""
    rate = f"{part.rate_gbit_per_s:g} Gb/s" if part.rate_gbit_per_s else ""
    return " · ".join(text for text in (part.state or "", rate) if text)


def short(slot: str | None) -> str:
    """Return a slot without the domain 0000."""
    return (slot or "").removeprefix("0000:")


def short_model(model: str | None) -> str:
    """Return a model's name without the vendor."""
    return (model or "").removeprefix("NVIDIA ").removeprefix("Tesla ")


def _cut(text: str, most: int = CHARS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Artist:
    def __init__(self, layout: NodeLayout, status: Mapping[str, str]) -> None:
        self.layout = layout
        self.status = status
        self.bridges = {bridge.slot: bridge for bridge in layout.bridges}
        self.out = Drawing()
        self.boxes: dict[str, Box] = {}

    def drawing(self) -> Drawing:
        panels = self._trees()
        drop = max((hub.drop for _, hub in panels), default=0)
        stack = max((hub.stack for _, hub in panels), default=0)
        self.small_y = PAD + HEAD + drop
        self.gpu_y = self.small_y + stack * (SMALL + 6) + (8 if stack else 0)
        gpus = [part for part in self.layout.parts if part.kind == "gpu"]
        bottom = self.gpu_y + (GPU + PAD if gpus else 0)
        if any(part.nvlinks for part in gpus):
            bottom += 16
        x = 0.0
        for title, hub in panels:
            width = max(2, hub.columns) * (COLUMN + GAP) - GAP + 2 * PAD
            texts = tuple(("head" if number == 0 else "sub", text) for number, text in enumerate(title))
            self.out.panels.append(Box("numa", "", x, 0, width, bottom, texts, ": ".join(title)))
            self._below(hub, x + PAD, PAD + HEAD, None)
            if x and title[0] not in ALONE:
                between = f"M{x - PANEL_GAP:g} {HEAD / 2:g}h{PANEL_GAP}"
                self.out.wires.append(Wire("socket", "", between, 3, "link between the processors"))
            x += width + PANEL_GAP
        self.out.width = max(x - PANEL_GAP, COLUMN)
        self.out.height = bottom
        self._nvlinks(gpus)
        self.out.summary = self._summary()
        return self.out

    def _trees(self) -> list[tuple[tuple[str, ...], _Hub]]:
        """Return the panels: their title and the tree of each."""
        domains = {domain.node: domain for domain in self.layout.numa}
        numbers: list[int] = sorted(domains) if len(domains) <= MOST_PANELS else []
        trees: dict[int | None, _Hub] = {number: _Hub("", root=True) for number in numbers}
        switches_below = any(part.nvlinks for part in self.layout.parts)
        for part in self.layout.parts:
            if part.kind == "nvswitch" and switches_below:
                continue
            known = numbers[0] if len(numbers) == 1 else part.numa_node
            number = known if known in trees else None
            hub = trees.setdefault(number, _Hub("", root=True))
            chain = list(reversed(part.bridges))
            if chain:
                hub = hub.hubs.setdefault(chain[0], _Hub(chain[0], root=True))
            for slot in chain[1::2]:
                hub = hub.hubs.setdefault(slot, _Hub(slot, root=False))
            hub.parts.append(part)
        panels: list[tuple[tuple[str, ...], _Hub]] = []
        for number, hub in trees.items():
            if number is None:
                if len(trees) == 1 or hub.columns:
                    panels.append(((ALONE[0] if len(trees) == 1 else ALONE[1],), hub))
            elif hub.columns or len(domains) <= 2:
                domain = domains.get(number)
                cpus = f"CPUs {domain.cpus}" if domain and domain.cpus else ""
                memory = f"{domain.memory_mib / 1024:.0f} GiB" if domain and domain.memory_mib else ""
                detail = _cut(" · ".join(text for text in (cpus, memory) if text), 44)
                panels.append(((f"NUMA node {number}", detail) if detail else (f"NUMA node {number}",), hub))
        return panels

    def _below(self, hub: _Hub, x: float, y: float, above: float | None) -> None:
        """Place a hub with its left edge at ``x``, and everything below it; ``above`` is the lower edge of its
        parent."""
        width = hub.columns * (COLUMN + GAP) - GAP
        bottom, height = y, 0
        if hub.slot:
            bridge = self.bridges.get(hub.slot)
            words = pcie_words(bridge.link if bridge else None)
            name = "root port" if hub.root else "switch"
            texts: tuple[tuple[str, str], ...] = (("small", _cut(f"{name} {short(hub.slot)}")),)
            if words and not hub.root:
                texts = (*texts, ("tiny", words))
            kind = "root" if hub.root else "switch"
            height = ROOT if hub.root else HUB
            self.out.boxes.append(Box(kind, "", x, y, width, height, texts, f"{name} {hub.slot}, {words or 'no link'}"))
            if above is not None:
                path = f"M{x + width / 2:g} {above:g}V{y:g}"
                self.out.wires.append(Wire("pcie", "", path, 2.5, f"PCIe to {hub.slot}: {words or 'unknown'}"))
            bottom = y + height
        left = x
        for child in sorted(hub.hubs.values(), key=lambda branch: branch.slot):
            self._below(child, left, y + (height + RISE if hub.slot else 0), bottom if hub.slot else None)
            left += child.columns * (COLUMN + GAP)
        self._parts(hub, left, bottom if hub.slot else None)

    def _parts(self, hub: _Hub, x: float, above: float | None) -> None:
        gpus = [part for part in hub.parts if part.kind == "gpu"]
        others = [part for part in hub.parts if part.kind != "gpu"]
        columns = max(1, hub.columns_of_parts)
        for number, part in enumerate(gpus):
            left = x + number * (COLUMN + GAP)
            texts = [("name", part.name), ("model", short_model(part.model)), ("tiny", short(part.slot))]
            texts.append(("tiny", pcie_words(part.link) or part.state or ""))
            self._box(part, (left, self.gpu_y, COLUMN, GPU), texts)
            self._wire(part, above, f"M{left + (6 if others else COLUMN / 2):g} {{}}V{self.gpu_y:g}")
        for number, part in enumerate(others):
            column, row = number % columns, number // columns
            left, top = x + column * (COLUMN + GAP) + 22, self.small_y + row * (SMALL + 6)
            self._box(part, (left, top, COLUMN - 22, SMALL), [("name", part.name), ("tiny", self._of_small(part))])
            if row == 0:
                self._wire(part, above, f"M{left + (COLUMN - 22) / 2:g} {{}}V{top:g}")
            else:
                self._wire(part, above, f"M{left - 8:g} {{}}V{top + SMALL / 2:g}H{left:g}")

    def _of_small(self, part: MachinePart) -> str:
        rate = f"{part.rate_gbit_per_s:g} Gb/s" if part.rate_gbit_per_s else ""
        if part.state is not None and part.state.lower() not in ("active", "up"):
            return part.state
        return rate or pcie_words(part.link) or part.state or ""

    def _box(self, part: MachinePart, at: Area, texts: Sequence[tuple[str, str]]) -> None:
        less = 4 if part.kind in ("nic", "nvme") else 0
        lines = tuple(
            (style, _cut(text, (TINY_CHARS if style == "tiny" else CHARS) - less)) for style, text in texts if text
        )
        status = self.status.get(part.name, "")
        facts = (part.model, part.slot, pcie_words(part.link), nvlink_words(part), port_words(part), status)
        box = Box(part.kind, status, *at, lines, ", ".join([part.name, *(text for text in facts if text)]))
        self.boxes[part.name] = box
        self.out.boxes.append(box)

    def _wire(self, part: MachinePart, above: float | None, path: str) -> None:
        status = self.status.get(f"pcie {part.name}", "")
        words = pcie_words(part.link) or "link unknown"
        width = 1.5 + min((part.link.width if part.link else None) or 0, 16) / 8
        start = PAD + HEAD - 6 if above is None else above
        self.out.wires.append(Wire("pcie", status, path.format(f"{start:g}"), width, f"PCIe of {part.name}: {words}"))

    def _nvlinks(self, gpus: Sequence[MachinePart]) -> None:
        """Add the strip of links below each GPU, and what they lead to."""
        linked = [part for part in gpus if part.nvlinks]
        for part in linked:
            self._strip(part, self.boxes[part.name])
        if not linked:
            return
        pairs = list(self._pairs([part.name for part in linked]))
        switches = [part for part in self.layout.parts if part.kind == "nvswitch"]
        whole = len(linked) > 2 and pairs and all(number == len(linked[0].nvlinks) for _, _, number in pairs)
        if switches or whole:
            self._fabric(linked, switches)
        elif pairs:
            self._mesh(pairs)

    def _strip(self, part: MachinePart, box: Box) -> None:
        links = part.nvlinks[:72]
        step = (box.width - 4) / max(len(links), 12)
        by_state: dict[str, list[str]] = {}
        for number, link in enumerate(links):
            if self.status.get(f"nvlink {part.name}/{link.link}"):
                state = self.status[f"nvlink {part.name}/{link.link}"]
            else:
                state = {"active": "pass", "inactive": "fail"}.get(link.state or "", "skip")
            left = box.x + 2 + number * step
            by_state.setdefault(state, []).append(
                f"M{left:.1f} {box.y + box.height + 4:g}h{step - 1.6:.1f}v7h-{step - 1.6:.1f}z"
            )
        for state, paths in by_state.items():
            title = f"{part.name}: {nvlink_words(part)}"
            self.out.wires.append(Wire("tick", state, "".join(paths), 0, title))

    def _pairs(self, names: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """Yield every two GPUs that NVLinks join, with their number."""
        rows = dict(zip(self.layout.labels, self.layout.connections, strict=False))
        column = {label: number for number, label in enumerate(self.layout.labels)}
        for number, name in enumerate(names):
            for other in names[number + 1 :]:
                cell = rows[name][column[other]] if name in rows and other in column else None
                match = _NVLINKS.fullmatch(cell or "")
                if match:
                    yield name, other, int(match[1])

    def _fabric(self, gpus: Sequence[MachinePart], switches: Sequence[MachinePart]) -> None:
        """Add the panel of NVSwitches, and a band from each GPU to it."""
        top = self.out.height + 30
        status = self.status.get("fabric", "")
        head = "NVSwitches" if switches else "NVLink fabric: its switches are not on the PCI bus"
        height = FABRIC + 22 if switches else 34.0
        self.out.panels.append(Box("fabric", status, 0, top, self.out.width, height, (("head", head),), head))
        for part in gpus:
            box = self.boxes[part.name]
            middle = box.x + box.width / 2
            state = self.status.get(f"nvlink {part.name}", "")
            path = f"M{middle:g} {box.y + box.height + 13:g}V{top:g}"
            self.out.wires.append(Wire("nvlink", state, path, 10, f"{part.name}: {nvlink_words(part)}"))
        share = (self.out.width - 2 * PAD) / max(1, len(switches))
        for number, part in enumerate(switches):
            width = min(share - GAP, 180)
            x = PAD + number * share + (share - width) / 2
            numa = "" if part.numa_node is None else f" · NUMA {part.numa_node}"
            texts = [("name", part.name), ("tiny", pcie_words(part.link)), ("tiny", f"{short(part.slot)}{numa}")]
            self._box(part, (x, top + 26, width, 48), texts)
        self.out.height = top + height

    def _mesh(self, pairs: Sequence[tuple[str, str, int]]) -> None:
        """Add an arc below every two GPUs that NVLinks join."""
        top = self.gpu_y + GPU + 13
        longest = 0.0
        for name, other, number in pairs:
            first, second = self.boxes[name], self.boxes[other]
            start, end = sorted((first.x + first.width / 2, second.x + second.width / 2))
            steps = round((end - start) / (COLUMN + GAP))
            drop = ARC + 11 * min(steps, 8)
            longest = max(longest, drop)
            # A curve of the third degree reaches three quarters of the way to its handles.
            low = top + drop / 0.75
            worst = self.status.get(f"pair {name}-{other}", "")
            path = f"M{start:g} {top:g}C{start:g} {low:g} {end:g} {low:g} {end:g} {top:g}"
            self.out.wires.append(
                Wire("arc", worst, path, 1 + min(number, 18) / 6, f"{name} to {other}: {number} NVLinks")
            )
        same = {number for _, _, number in pairs}
        words = f"{counted(same.pop(), 'NVLink')} between each two" if len(same) == 1 else "NVLinks between GPUs"
        self.out.height = top + longest + 24
        self.out.labels.append(Label("tiny", PAD, self.out.height - 6, words))

    def _summary(self) -> str:
        kinds = (
            ("gpu", "GPU", None),
            ("nvswitch", "NVSwitch", "NVSwitches"),
            ("nic", "adapter", None),
            ("nvme", "disk", None),
        )
        numbers = [
            counted(number, noun, plural)
            for kind, noun, plural in kinds
            if (number := sum(part.kind == kind for part in self.layout.parts))
        ]
        faults = [f"{name}: {status}" for name, status in self.status.items() if status not in ("pass", "skip", "note")]
        text = f"{', '.join(numbers)} on {counted(max(1, len(self.layout.numa)), 'NUMA node')}"
        return f"{text}. {'; '.join(faults[:12])}" if faults else f"{text}. No fault on a part or link."
