"""A report in short, for people: nodes that are alike, findings that are alike, their remedies, the verdict."""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gpunode.catalog import load
from gpunode.checks import State, Status
from gpunode.checks.actions import PROVISION, action
from gpunode.checks.gpus import slots_in
from gpunode.judging.report import WORST_FIRST, NodeReport, Report
from gpunode.names import fold
from gpunode.report.fleet import FoldedFinding, of_nodes
from gpunode.text import counted, listed, moment, printable

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Names of hosts that Ansible reads as such, and a shell as one word."""
_RUN = re.compile(rf"\s*Run: {re.escape(PROVISION)} -t \S+$")
_AFTER = {"restart_os": "reboot", "reload_driver": "reload the driver", "reset_gpu": "reset the GPU"}


@dataclass(frozen=True)
class Origin:
    """The inventory of a run."""

    inventories: tuple[str, ...] = ()
    """Values of ``-i``; empty: the nodes are not of an inventory."""


_NONE = Origin()
_ORIGIN: ContextVar[Origin] = ContextVar("origin_of_the_run", default=_NONE)


@contextmanager
def of_run(origin: Origin) -> Iterator[None]:
    """Let reports that are written in the context name the inventory in their commands."""
    token = _ORIGIN.set(origin)
    try:
        yield
    finally:
        _ORIGIN.reset(token)


@dataclass(frozen=True)
class Fix:
    """What to do about a finding, as lines without control characters."""

    text: str = ""
    """The remedy; empty if the command is the whole remedy."""
    command: str = ""
    """To be pasted; empty if no role repairs the fault."""
    then: str = ""
    """Steps that follow."""


def fix_of(remedy: str | None, actions: Sequence[str], hosts: Sequence[str], messages: Iterable[str] = ()) -> Fix:
    """Return the remedy for hosts. ``actions`` are those of the finding, as ``VERB:TARGET``.

    SLOT in a remedy becomes the PCI address in the findings' messages, if they have one alone.
    """
    if not remedy:
        return Fix()
    steps = [action(text) for text in actions]
    role = next((index for index, step in enumerate(steps) if step.action == "run_role"), None)
    text = printable(_RUN.sub("", remedy)).replace(PROVISION, _provision(hosts))
    addresses = {address for message in messages for address in slots_in(message)}
    if len(addresses) == 1:
        text = re.sub(r"\bSLOT\b", addresses.pop(), text)
    if role is None:
        return Fix(text=text)
    target = steps[role].target or ""
    command = f"{_provision(hosts)} -t {target.partition(':')[2] or target}"
    if command in text:
        return Fix(text=text)
    after = [_AFTER.get(step.action, f"restart {step.target}") for step in steps[role + 1 :] if _follows(step.action)]
    return Fix(text="" if role == 0 else text, command=command, then=listed(after))


def _follows(verb: str) -> bool:
    return verb in _AFTER or verb == "restart_service"


def _provision(hosts: Sequence[str]) -> str:
    """Return the command for hosts; INVENTORY and HOST stay where they are unknown, or not plain names."""
    inventories = " ".join(f"-i {shlex.quote(printable(path))}" for path in _ORIGIN.get().inventories)
    plain = hosts and all(_NAME.fullmatch(host) for host in hosts)
    return f"gpunode provision {inventories or '-i INVENTORY'} -l {','.join(hosts) if plain else 'HOST'}"


SHOWN = (Status.FAIL, Status.ERROR, Status.WARN)
"""Statuses of findings that are always shown."""
MOST_PLACES = 3
WORDS = {Status.PASS: "ok", Status.NOTE: "ok", Status.SKIP: "not judged"}
"""Verdicts on nodes; other statuses are written in capitals."""
_FIGURES = re.compile(r"\b(?:0x)?[0-9a-f]*\d[0-9a-f]*(?:[:.][0-9a-f]+)*\b", re.IGNORECASE)


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same GPUs, driver and verdict. All texts are printable."""

    hosts: tuple[str, ...]
    gpus: str
    driver: str
    status: Status
    simulated: bool

    @property
    def verdict(self) -> str:
        """Return the verdict in one word."""
        return word_of(self.status)


@dataclass(frozen=True)
class Block:
    """Findings with the same meaning and the same remedy."""

    status: Status
    checks: tuple[str, ...]
    findings: tuple[FoldedFinding, ...]
    """They differ in figures at most; the one that most nodes have is first."""
    hosts: tuple[str, ...]
    observed: str | None
    source: str | None
    measured: bool
    fix: Fix


def word_of(status: Status) -> str:
    """Return the verdict on a node in a word."""
    return WORDS.get(status, status.value.upper())


def node_groups(nodes: Iterable[NodeReport]) -> list[NodeGroup]:
    """Return the nodes, those that are alike in one group; the worst last, next to the findings."""
    groups: dict[tuple[str, str, Status, bool], list[str]] = defaultdict(list)
    for node in nodes:
        groups[gpus_of(node), driver_of(node), node.status, node.simulated is True].append(printable(node.host))
    rows = [NodeGroup(tuple(sorted(hosts)), *key) for key, hosts in groups.items()]
    return sorted(rows, key=lambda group: (-WORST_FIRST.index(group.status), group.hosts))


def gpus_of(node: NodeReport) -> str:
    """Return ``8x H100 SXM``."""
    hardware = node.hardware
    if hardware is None:
        return "not reached"
    number = len(node.gpus) if hardware.gpus is None else hardware.gpus
    if hardware.gpu_model is not None:
        return printable(f"{number}x {_short(hardware.gpu_model)}")
    names = Counter((gpu.name or "unknown GPU").removeprefix("NVIDIA ") for gpu in node.gpus)
    return printable(listed([f"{times}x {name}" for name, times in names.items()], most=2)) or counted(number, "GPU")


def _short(model: str) -> str:
    gpu = load().gpus.get(model)
    return model if gpu is None else next(iter(gpu.aliases), gpu.name)


def driver_of(node: NodeReport) -> str:
    """Return the version, or what is known of the driver; empty if the node was not reached."""
    stack = node.stack
    if stack.driver is not None:
        return printable(stack.driver)
    if node.hardware is None:
        return ""
    return "no driver" if stack.driver_packages is None else printable(f"{stack.driver_packages}, not loaded")


def blocks(nodes: Sequence[NodeReport], statuses: Iterable[Status], *, exact: bool = False) -> list[Block]:
    """Return the findings of some statuses, worst first. ``exact``: only equal messages are put together."""
    groups: dict[tuple[object, ...], list[FoldedFinding]] = {}
    for folded in of_nodes(nodes, frozenset(statuses)):
        group = folded.group
        texts = (group.message, group.source, group.remedy)
        alike = texts if exact else tuple(text and _FIGURES.sub("#", text) for text in texts)
        groups.setdefault((group.status, group.checks, group.observed, group.actions, alike), []).append(folded)
    return [_block(members) for members in groups.values()]


def _block(members: list[FoldedFinding]) -> Block:
    group = members[0].group
    hosts = tuple(sorted({host for folded in members for host in folded.hosts}))
    return Block(
        status=group.status,
        checks=group.checks,
        findings=tuple(members),
        hosts=hosts,
        observed=group.observed,
        source=group.source,
        measured=group.measured,
        fix=fix_of(group.remedy, group.actions, hosts, [folded.group.message for folded in members]),
    )


def where(findings: Sequence[FoldedFinding], *, hosts: bool) -> str:
    """Return the nodes and components of findings: ``gpu-[01-03] gpu2``. ``hosts`` False: only the components."""
    parts: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for folded in findings:
        parts[tuple(sorted(set(folded.group.components)))].update(folded.hosts)
    named = {_components(components): fold(names) for components, names in parts.items()}
    if not hosts:
        return printable(", ".join(text for text in named if text))
    if len(named) <= MOST_PLACES:
        return printable(", ".join(f"{names} {text}".strip() for text, names in named.items()))
    everywhere = fold({host for folded in findings for host in folded.hosts})
    return printable(f"{everywhere}, {counted(len(named), 'group')} of components")


def _components(components: Sequence[str]) -> str:
    return "" if set(components) == {"node"} else fold(components)


def per_check(nodes: Iterable[NodeReport], status: Status) -> dict[str, int]:
    """Return the number of nodes with such a finding by check, the most frequent first."""
    numbers: Counter[str] = Counter()
    for node in nodes:
        numbers.update({finding.check for finding in node.findings if finding.status is status})
    return dict(sorted(numbers.items(), key=lambda pair: (-pair[1], pair[0])))


def verdict(document: Report) -> str:
    """Return the result of the run in one sentence."""
    nodes = document.nodes
    if not nodes:
        return "no node was judged"
    number = Counter(node.status for node in nodes)
    of = counted(len(nodes), "node")
    bad = [
        f"{number[status]} {word}"
        for status, word in (
            (Status.FAIL, "failed"),
            (Status.ERROR, "could not be determined"),
            (Status.SKIP, "not judged"),
        )
        if number[status]
    ]
    warned = number[Status.WARN]
    if len(nodes) == 1:
        return f"{of}{bad[0][1:]}" if bad else f"{of} ok{', with warnings' if warned else ''}"
    if not bad:
        return f"{of} ok, {warned} with warnings" if warned else f"all {of} ok"
    first = bad[0].replace(" ", f" of {of} ", 1)
    return ", ".join([first, *bad[1:], *([f"{warned} with warnings"] if warned else [])])


def seconds(document: Report) -> float:
    """Return the duration of the run; 0 if it is unknown."""
    begin, end = moment(document.started_at), moment(document.finished_at)
    return max((end - begin).total_seconds(), 0.0) if begin and end else 0.0


def duration(document: Report) -> str:
    """Return the time that the run took; empty if it is unknown."""
    nodes = max((node.seconds or 0.0 for node in document.nodes), default=0.0)
    # The run's times are whole seconds.
    taken = seconds(document) if seconds(document) >= nodes + 2 else nodes
    return "" if taken == 0 else f"{taken:.1f} s" if taken < 100 else f"{taken:.0f} s"


def to_drain(nodes: Iterable[NodeReport]) -> str:
    """Return the nodes that should be taken out of service; empty if there are none."""
    return printable(fold(node.host for node in nodes if node.recommended_state is State.DRAIN))
