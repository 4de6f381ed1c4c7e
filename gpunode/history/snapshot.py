"""Snapshot of a node in one run: what identifies it, without the values that vary on an unchanged node.

``VOLATILE`` and ``COUNTERS`` of the models of facts name these values; everything else is compared.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, Field

from gpunode.checks import Finding, Level, RunningStack, Status, identify
from gpunode.facts import NodeFacts
from gpunode.facts.host import CpuSets
from gpunode.facts.models import Fact
from gpunode.facts.models.smi import NvlinkGpu
from gpunode.facts.models.workload import MOST_MEASURED
from gpunode.facts.node import MAY_BE_NONE
from gpunode.frozen import Frozen

Scalar = bool | int | float | str
Leaf = tuple[str, Scalar, bool]
"""A path, its value, and whether it is a counter."""
MOST_COMPONENTS = 100
"""Components of one check that are kept; the rest is counted."""
MOST_TEXT = 400
_NAMES = ("slot", "path", "name", "release", "mount", "kernel", "node", "port", "index")
_KEYS = {
    "BootSetting": ("name", "path"),
    "DkmsModule": ("name", "kernel"),
    "EnvironmentSetting": ("name", "path"),
    "ForeignInstall": ("kind", "path"),
    "Limit": ("path", "domain", "type", "item"),
    "NvlinkGpu": ("uuid",),
    "Package": ("name", "architecture"),
    "PendingUpdate": ("package",),
    "Repository": ("uri", "suite", "path"),
    "SmiGpu": ("uuid",),
}
"""Fields that name an element where the first of ``_NAMES`` does not."""
_GPU_MODULES = re.compile(r"nvidia|nouveau|gdrdrv|mlx5|ib_|rdma|efa\b|bnxt_re|irdma")
_SETS = frozenset({"gpu_virtualization", "modules"})
_STATES = {"sleep": "active"}
"""NVLinks sleep while they are idle."""
GOOD = (Status.PASS, Status.SKIP, Status.NOTE)


class GpuRecord(Frozen):
    """The identity of one GPU."""

    index: int
    name: str | None = None
    uuid: str | None = None
    serial: str | None = None
    slot: str | None = None

    @property
    def key(self) -> str:
        """Return the key of the GPU in paths of facts."""
        return self.uuid or self.slot or f"gpu{self.index}"

    @property
    def title(self) -> str:
        """Return the GPU for a message: model, serial number, UUID and slot, as far as they are known."""
        serial = f"serial {self.serial}" if self.serial else None
        return ", ".join(part for part in (self.name, serial, self.uuid, self.slot) if part)


class Verdict(Frozen):
    """The result of one check on one node."""

    status: Status
    affected: dict[str, Status] = Field(default_factory=dict)
    """Components with a finding that failed, warned or could not be determined."""
    more: int = 0
    """Affected components beyond ``MOST_COMPONENTS``."""


class FigureValue(Frozen):
    """One measured figure."""

    metric: str
    component: str
    message_bytes: int | None = None
    value: float
    unit: str | None = None
    good: bool = True
    """False: the figure failed."""


class Snapshot(Frozen):
    """The document ``gpunode.snapshot/1``: one node in one run."""

    host: str
    collected_at: str | None = None
    level: Level
    simulated: bool | None = None
    platform: str | None = None
    """Vendor and product of the machine."""
    stack: RunningStack = RunningStack()
    gpus: tuple[GpuRecord, ...] = ()
    gpus_on_bus: int | None = None
    gpu_model: str | None = None
    """Catalog id of their model; None if they have several, or an unknown one."""
    facts: dict[str, Scalar] | None = None
    """By path; None: read from a report, which has no facts."""
    unknown: dict[str, str] = Field(default_factory=dict)
    """Facts that could not be determined, with the reason."""
    verdicts: dict[str, Verdict] = Field(default_factory=dict)
    figures: tuple[FigureValue, ...] = ()
    counters: dict[str, float] = Field(default_factory=dict)
    idle_temperatures_c: dict[str, float] = Field(default_factory=dict)
    """Of GPUs that run nothing, by key."""

    @property
    def model(self) -> str | None:
        """Return the model of the GPUs; several models are joined, None if there is no GPU."""
        names = sorted({gpu.name for gpu in self.gpus if gpu.name})
        return " + ".join(names) or None

    @property
    def reached(self) -> bool:
        """Return whether the node sent data."""
        return self.simulated is not None

    def judged(self, host: str, findings: Iterable[Finding], level: Level) -> "Snapshot":
        """Return the snapshot with the results of the checks, under the node's name in the report."""
        results = list(findings)
        update = {"host": host, "level": level, "verdicts": verdicts_of(results), "figures": figures_of(results)}
        return self.model_copy(update=update)


def snapshot_of(facts: NodeFacts) -> Snapshot:
    """Return the snapshot of a node, without results of checks."""
    flat: dict[str, Scalar] = {}
    counters: dict[str, float] = {}
    unknown = dict(facts.gaps)
    for name in NodeFacts.model_fields:
        value = getattr(facts, name)
        if name in NodeFacts.VOLATILE or (value is None and name in unknown):
            continue
        if value is None:
            if name not in MAY_BE_NONE:
                unknown[name] = "not in the collected data"
            continue
        if getattr(value, "error_kind", None) is not None:
            unknown[name] = value.error_message or value.error_kind
            flat[f"{name}.error_kind"] = value.error_kind
            continue
        for path, leaf, counts in _leaves(name, value):
            if not counts:
                flat[path] = leaf
            elif not isinstance(leaf, str) and abs(leaf) <= MOST_MEASURED:
                counters[path] = leaf
    identity = identify(facts)
    return Snapshot(
        host=facts.host,
        collected_at=facts.collected_at,
        level="quick",
        simulated=facts.simulated,
        platform=_platform(facts),
        stack=identity.stack,
        gpus=_gpus(facts),
        gpus_on_bus=identity.hardware.gpus,
        gpu_model=identity.hardware.gpu_model,
        facts=flat,
        unknown={name: reason[:MOST_TEXT] for name, reason in unknown.items() if name not in NodeFacts.VOLATILE},
        counters=counters,
        idle_temperatures_c=_idle_temperatures(facts),
    )


def _platform(facts: NodeFacts) -> str | None:
    machine = facts.machine
    return " ".join(part for part in (machine.vendor, machine.product) if part) or None if machine else None


def _gpus(facts: NodeFacts) -> tuple[GpuRecord, ...]:
    """Return the GPUs that nvidia-smi lists, without those that are lost from the bus; else those on the bus."""
    slots = {gpu.slot for gpu in facts.gpus_on_bus or ()}
    listed = [gpu for gpu in facts.smi_gpus if gpu.pci_bus_id in slots] or facts.smi_gpus
    if listed:
        return tuple(
            GpuRecord(index=gpu.index, name=gpu.name, uuid=gpu.uuid, serial=gpu.serial, slot=gpu.pci_bus_id)
            for gpu in listed
        )
    by_slot = {gpu.slot: gpu for gpu in facts.driver_gpus or ()}
    return tuple(
        GpuRecord(
            index=number,
            name=by_slot[gpu.slot].model if gpu.slot in by_slot else gpu.pci_id,
            uuid=by_slot[gpu.slot].uuid if gpu.slot in by_slot else None,
            slot=gpu.slot,
        )
        for number, gpu in enumerate(facts.gpus_on_bus or ())
    )


def _idle_temperatures(facts: NodeFacts) -> dict[str, float]:
    return {
        gpu.uuid or gpu.pci_bus_id or f"gpu{gpu.index}": float(gpu.temperature_c)
        for gpu in facts.smi_gpus
        if gpu.temperature_c is not None and gpu.utilization_percent == 0 and not gpu.processes
    }


def _leaves(path: str, value: Any, *, counts: bool = False) -> list[Leaf]:
    """Return the path and value of each leaf, and whether it is a counter; unknown leaves are left out."""
    leaves: list[Leaf] = []
    _add(leaves, path, value, counts=counts)
    return leaves


def _add(leaves: list[Leaf], path: str, value: Any, *, counts: bool) -> None:
    """Add the leaves of a value to a list: generators within generators would pass each leaf on at every level."""
    match value:
        case None:
            return
        case str():
            text = _STATES.get(value, value) if path.endswith(".state") else value
            leaves.append((path, text[:MOST_TEXT], counts))
        case bool() | int() | float():
            leaves.append((path, value, counts))
        case NvlinkGpu():
            leaves += _nvlinks(path, value)
        case CpuSets():
            leaves.append((f"{path}.online", len(value.online), False))
            leaves.append((f"{path}.smt", value.smt or "unknown", False))
        case Fact():
            for name, counter in _compared_fields(type(value)):
                _add(leaves, f"{path}.{name}", getattr(value, name), counts=counts or counter)
        case Mapping():
            # Links not by pair: a GPU that is lost would change the row of each of the others.
            rows = path in ("topology.document.links", "peer_access.document.links")
            for key, inner in sorted(value.items(), key=str):
                seen = tuple(sorted(set(inner.values()))) if rows else inner
                _add(leaves, f"{path}[{key}]", seen, counts=counts)
        case tuple() | list():
            leaves += _elements(path, value, counts=counts)


@cache
def _compared_fields(kind: type[Fact]) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a model that are compared, each with whether it is a counter."""
    return tuple((name, name in kind.COUNTERS) for name in kind.model_fields if name not in kind.VOLATILE)


def _nvlinks(path: str, gpu: NvlinkGpu) -> Iterator[Leaf]:
    """Yield the links of one GPU in one line, and the sum of each counter: the checks name the link."""
    states = Counter(
        f"{_STATES.get(link.state, link.state)}{f' at {link.speed_gb_per_s} GB/s' if link.speed_gb_per_s else ''}"
        for link in gpu.links
        if link.state is not None
    )
    if states:
        yield f"{path}.links", ", ".join(f"{number} {state}" for state, number in sorted(states.items())), False
    sums: Counter[str] = Counter()
    for link in gpu.links:
        sums.update({name: number for name, number in link.errors.items() if isinstance(number, int)})
    yield from ((f"{path}.{name}", number, True) for name, number in sorted(sums.items()))


def _elements(path: str, values: Iterable[Any], *, counts: bool) -> Iterator[Leaf]:
    items = list(values)
    if not any(isinstance(item, BaseModel) for item in items):
        texts = [str(item) for item in items]
        if path == "modules":
            texts = [text for text in texts if _GPU_MODULES.match(text)]
        yield path, ", ".join(sorted(set(texts)) if path in _SETS else texts)[:MOST_TEXT], False
        return
    seen: Counter[str] = Counter()
    for item in items:
        fields = _fields_of_key(item)
        key = ":".join(str(getattr(item, name)) for name in fields)[:200] or "-"
        seen[key] += 1
        prefix = f"{path}[{key}]" if seen[key] == 1 else f"{path}[{key} #{seen[key]}]"
        yield f"{prefix}.present", True, False
        named = {f"{prefix}.{name}" for name in fields}
        for inner, leaf, of_events in _leaves(prefix, item, counts=counts):
            if inner not in named and leaf != "":
                yield inner, leaf, of_events


def _fields_of_key(item: BaseModel) -> tuple[str, ...]:
    """Return the fields that name an element of a list: the same element in another run has the same name."""
    kind = type(item)
    fields = _KEYS.get(kind.__name__)
    if fields is None:
        fields = tuple(name for name in _names_of(kind) if isinstance(getattr(item, name), str | int))[:1]
    return tuple(name for name in fields if getattr(item, name) is not None)


@cache
def _names_of(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the fields of a model that can name an element."""
    return tuple(name for name in _NAMES if name in kind.model_fields)


def verdicts_of(findings: Iterable[Finding]) -> dict[str, Verdict]:
    """Return the result of each check; findings that a policy only observes do not count."""
    by_check: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.observed is None:
            by_check.setdefault(finding.check, []).append(finding)
    return {check: _verdict(alike) for check, alike in by_check.items()}


def _verdict(findings: list[Finding]) -> Verdict:
    order = (Status.FAIL, Status.ERROR, Status.WARN, Status.PASS, Status.NOTE, Status.SKIP)
    affected: dict[str, Status] = {}
    for finding in findings:
        if finding.status not in GOOD:
            before = affected.get(finding.component, finding.status)
            affected[finding.component] = min(before, finding.status, key=order.index)
    worst = min((finding.status for finding in findings), key=order.index)
    kept = dict(sorted(affected.items())[:MOST_COMPONENTS])
    return Verdict(status=worst, affected=kept, more=len(affected) - len(kept))


def figures_of(findings: Iterable[Finding]) -> tuple[FigureValue, ...]:
    """Return the measured figures; if two programs measured the same, the lower one."""
    lowest: dict[tuple[str, str, int | None], FigureValue] = {}
    for finding in findings:
        figure, measured = finding.figure, finding.measured
        if figure is None or isinstance(measured, bool) or not isinstance(measured, int | float):
            continue
        if not 1 / MOST_MEASURED <= measured <= MOST_MEASURED:
            continue
        key = (figure.metric, finding.component, figure.message_bytes)
        if key not in lowest or measured < lowest[key].value:
            lowest[key] = FigureValue(
                metric=figure.metric,
                component=finding.component,
                message_bytes=figure.message_bytes,
                value=float(measured),
                unit=finding.unit,
                good=finding.status is not Status.FAIL,
            )
    return tuple(lowest.values())
