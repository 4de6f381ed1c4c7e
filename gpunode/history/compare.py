"""Comparison of two snapshots of a node: what changed, and whether it is worse."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Literal, get_args

from pydantic import Field

from gpunode.checks import Status
from gpunode.checks.measurements import DROP_WARNS, words
from gpunode.frozen import Frozen, FrozenByName
from gpunode.history.snapshot import FigureValue, GpuRecord, Scalar, Snapshot, Verdict

Effect = Literal["worse", "better", "other"]
Section = Literal[
    "node",
    "gpu",
    "link",
    "network",
    "firmware",
    "driver",
    "package",
    "library",
    "kernel",
    "setting",
    "limit",
    "hardware",
    "counter",
    "check",
    "figure",
]
SECTIONS: tuple[Section, ...] = get_args(Section)
OF_FIELD: dict[str, Section] = {
    **dict.fromkeys(("smi", "driver_gpus", "pci", "gpu_settings", "gpu_virtualization", "device_nodes"), "gpu"),
    **dict.fromkeys(("topology", "peer_access", "nvlink", "nvlink_errors", "pci_ports", "pci_acs"), "link"),
    **dict.fromkeys(("nics", "addressed", "infiniband", "rdma_nodes", "pci_io", "peer_memory"), "network"),
    **dict.fromkeys(("packages", "dkms", "foreign_installs", "repositories", "pending_updates"), "package"),
    **dict.fromkeys(("loaded_driver", "module_files", "modules", "nvidia_tool_versions", "cdi_specs"), "driver"),
    **dict.fromkeys(("driver_library_version", "libraries", "tool_versions"), "library"),
    **dict.fromkeys(("os", "kernels", "command_line", "boot_arguments", "reboot_required"), "kernel"),
    **dict.fromkeys(("machine", "cpu", "cpu_sets", "numa", "memory", "memory_controllers", "disks"), "hardware"),
    **dict.fromkeys(("nvmes", "file_systems", "storage", "bmc_fans", "bmc_power_supplies", "iommu"), "hardware"),
    "limits": "limit",
}
"""Every other fact is a setting."""
_FIRMWARE = re.compile(r"\.(vbios_version|gsp_firmware_version|firmware|bios_version|bios_date)$")
_LINK = re.compile(r"\.(link\.\w+|pcie\.\w+|links|rate|rate_gbit_per_s|speed_mbit_per_s|physical_state)$|\.fabric\.")
_LESS_IS_WORSE = re.compile(
    r"(width|width_max|width_current|gen_max|gen_max_device|speed_max_gt_per_s|rate_gbit_per_s|speed_mbit_per_s"
    r"|total_mib|cpus|online|attached_gpus|size_bytes|memory_total_mib|power_limit_w|power_max_limit_w)$"
)
_FAULTS = re.compile(r"\.(pending|failure|sram_threshold_exceeded|reset_required|drain_and_reset_recommended)$")
_ROUNDED = re.compile(r"_mib$")
"""Sizes that the kernel rounds differently from boot to boot: equal within 1 %."""
_GOOD_STATES = frozenset({"up", "active", "ACTIVE", "LinkUp", "live", "ok", "Completed", "Success"})
LIFETIME = re.compile(r"\.(ecc\.aggregate_(sram_)?uncorrected|remapped_rows\.\w+|retired_pages\.\w+|media_errors)$")
"""Counters that a healthy node does not increase, and that no reboot resets."""
_PATH = re.compile(r"^(?P<field>\w+)(?P<inner>[.\w]*)(?:\[(?P<key>.*?)\](?=[.\[]|$)(?P<rest>.*))?$", re.DOTALL)
_NOUNS = {
    "packages": "package",
    "libraries": "library",
    "units": "unit",
    "nics": "interface",
    "kernels": "kernel",
    "infiniband": "adapter",
    "pci_io": "device",
    "pci_ports": "bridge",
    "pci_acs": "bridge",
    "nvmes": "disk",
    "disks": "disk",
    "dkms": "dkms",
    "file_systems": "file system",
    "module_files": "module on disk for kernel",
}
RANK = {Status.PASS: 0, Status.NOTE: 0, Status.SKIP: 0, Status.WARN: 1, Status.ERROR: 2, Status.FAIL: 3}
MOST_CHANGES = 2000
"""Changes of one node that are kept; the rest is counted."""
OTHER_MACHINE, GPU_REPLACED = "another machine under this name", "GPU replaced"
"""What is different about a node or a GPU that is not the same one any more."""
SPREADS = 3
"""Spreads of the components of one run that are its noise."""


class Change(Frozen):
    """One difference between two runs of a node."""

    effect: Effect
    section: Section
    component: str
    what: str
    before: Scalar | None = None
    """None: absent."""
    after: Scalar | None = None

    @property
    def text(self) -> str:
        """Return the change in one line, without its component."""
        if self.before is None and self.after is None:
            return self.what
        if self.before is None:
            return f"{self.what}: {shown(self.after)} (new)" if self.after is not True else f"{self.what} (new)"
        if self.after is None:
            return f"{self.what}: {shown(self.before)} removed" if self.before is not True else f"{self.what} removed"
        return f"{self.what}: {shown(self.before)} -> {shown(self.after)}"


class NodeComparison(Frozen):
    """The differences of one node."""

    host: str
    changes: tuple[Change, ...] = ()
    more: int = 0
    """Changes beyond the limit."""
    not_compared: dict[str, str] = Field(default_factory=dict)
    """Facts that are unknown in one of the runs, with the reason."""
    other_hardware: bool = False
    """True if it is another machine under the same name."""


class RunOrigin(Frozen):
    """One side of a comparison."""

    name: str
    """``run 12``, or a file."""
    started_at: str | None = None


class Comparison(FrozenByName):
    """The document ``gpunode.comparison/1``."""

    schema_name: Literal["gpunode.comparison/1"] = Field("gpunode.comparison/1", alias="schema")
    before: RunOrigin
    after: RunOrigin
    nodes: tuple[NodeComparison, ...]
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()
    not_reached: tuple[str, ...] = ()
    """Nodes that sent no data in the second run, but did in the first."""

    @property
    def worse(self) -> bool:
        """Return whether a node is worse."""
        return any(change.effect == "worse" for node in self.nodes for change in node.changes)

    @property
    def unchanged(self) -> bool:
        """Return whether nothing changed."""
        return not any(node.changes for node in self.nodes) and not (
            self.only_before or self.only_after or self.not_reached
        )

    def to_json(self) -> str:
        """Return the document as it is printed."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


def shown(value: Scalar | None) -> str:
    """Return a value for a message."""
    match value:
        case None:
            return "absent"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:.4g}"
        case "":
            return "empty"
    return str(value)


def compare_runs(
    before: Iterable[Snapshot], after: Iterable[Snapshot], origins: tuple[RunOrigin, RunOrigin]
) -> Comparison:
    """Return the comparison of two runs, both in the order of the nodes' names, by which nodes are matched."""
    comparison = RunComparison(origins)
    old_nodes, new_nodes = iter(before), iter(after)
    old, new = next(old_nodes, None), next(new_nodes, None)
    while old is not None or new is not None:
        if new is None or (old is not None and old.host < new.host):
            comparison.add(old, None)
            old = next(old_nodes, None)
        elif old is None or new.host < old.host:
            comparison.add(None, new)
            new = next(new_nodes, None)
        else:
            comparison.add(old, new)
            old, new = next(old_nodes, None), next(new_nodes, None)
    return comparison.result()


class RunComparison:
    """The comparison of two runs, to which nodes are added in any order."""

    def __init__(self, origins: tuple[RunOrigin, RunOrigin]) -> None:
        self._origins = origins
        self._nodes: list[NodeComparison] = []
        self._only: tuple[list[str], list[str]] = ([], [])
        self._lost: list[str] = []

    def add(self, old: Snapshot | None, new: Snapshot | None) -> None:
        """Add a node as it was and as it is; None: it is not in that run."""
        if new is None:
            if old is not None:
                self._only[0].append(old.host)
        elif old is None or (not old.reached and new.reached):
            self._only[1].append(new.host)
        elif not new.reached:
            self._lost += [new.host] if old.reached else []
        else:
            self._nodes.append(compare(old, new))

    def result(self) -> Comparison:
        """Return the comparison of the nodes so far."""
        return Comparison(
            before=self._origins[0],
            after=self._origins[1],
            nodes=tuple(sorted(self._nodes, key=lambda node: node.host)),
            only_before=tuple(sorted(self._only[0])),
            only_after=tuple(sorted(self._only[1])),
            not_reached=tuple(sorted(self._lost)),
        )


def compare(before: Snapshot, after: Snapshot) -> NodeComparison:
    """Return what changed between two snapshots of one node."""
    other_hardware = _other_hardware(before, after)
    names = Names(before, after)
    changes = list(_gpu_changes(before, after))
    if other_hardware:
        changes = [Change(effect="other", section="node", component="node", what=OTHER_MACHINE)]
        changes += _plain("platform", before.platform, after.platform)
        changes += _plain("GPUs", len(before.gpus), len(after.gpus))
    elif before.facts is None or after.facts is None:
        old, new = before.stack.model_dump(), after.stack.model_dump()
        changes += [change for key in old for change in _plain(key.replace("_", " "), old[key], new[key])]
    else:
        changes += _fact_changes(before, after, names)
        changes += _counter_changes(before, after, names)
    if not other_hardware:
        numbers = {old: new or f"{old} (removed)" for old, new in renumbered(before, after).items()}
        changes += _verdict_changes(before.verdicts, after.verdicts, numbers)
        changes += _figure_changes(before.figures, after.figures, numbers)
    changes.sort(key=lambda change: (SECTIONS.index(change.section), change.component, change.what))
    unknown = {field: f"before: {reason}" for field, reason in before.unknown.items() if field not in after.unknown}
    unknown |= {field: reason for field, reason in after.unknown.items() if field not in before.unknown}
    return NodeComparison(
        host=after.host,
        changes=tuple(changes[:MOST_CHANGES]),
        more=max(0, len(changes) - MOST_CHANGES),
        not_compared=unknown if before.facts is not None and after.facts is not None else {},
        other_hardware=other_hardware,
    )


def _plain(subject: str, before: Scalar | None, after: Scalar | None) -> list[Change]:
    section: Section = (
        "driver" if subject.startswith(("driver", "cuda")) else "kernel" if subject in ("os", "kernel") else "node"
    )
    if before == after:
        return []
    return [Change(effect="other", section=section, component="node", what=subject, before=before, after=after)]


def same_gpu(gpu: GpuRecord, other: GpuRecord) -> bool:
    """Return whether two records are about the same card: by UUID or serial number, else by slot."""
    if gpu.uuid and other.uuid:
        return gpu.uuid == other.uuid or (gpu.serial is not None and gpu.serial == other.serial)
    return gpu.slot is not None and gpu.slot == other.slot


def _other_hardware(before: Snapshot, after: Snapshot) -> bool:
    common = any(same_gpu(old, new) for old in before.gpus for new in after.gpus)
    if common or not before.gpus or not after.gpus:
        return False
    replaced_card = before.platform == after.platform and len(before.gpus) == len(after.gpus) == 1
    return not replaced_card


def _gpu_changes(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    """Yield GPUs that were removed, added or replaced."""
    removed = [gpu for gpu in before.gpus if not any(same_gpu(gpu, new) for new in after.gpus)]
    added = [gpu for gpu in after.gpus if not any(same_gpu(gpu, old) for old in before.gpus)]
    by_slot = {gpu.slot: gpu for gpu in added if gpu.slot}
    for gpu in removed:
        new = by_slot.pop(gpu.slot, None) if gpu.slot else None
        if new is not None:
            added.remove(new)
        yield Change(
            effect="worse" if new is None else "other",
            section="gpu",
            component=f"gpu{gpu.index}",
            what="GPU" if new is None else GPU_REPLACED,
            before=gpu.title,
            after=None if new is None else new.title,
        )
    for gpu in added:
        yield Change(effect="better", section="gpu", component=f"gpu{gpu.index}", what="GPU", after=gpu.title)


class Names:
    """Names of components: a path names a GPU by its UUID or slot, a message by its index."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self.gpus: dict[str, str] = {}
        for gpu in (*before.gpus, *after.gpus):
            for key in (gpu.uuid, gpu.slot):
                if key:
                    self.gpus[key] = f"gpu{gpu.index}"
        gone = [gpu for gpu in before.gpus if not any(same_gpu(gpu, new) for new in after.gpus)]
        new = [gpu for gpu in after.gpus if not any(same_gpu(gpu, old) for old in before.gpus)]
        self.exchanged = {key for gpu in (*gone, *new) for key in (gpu.uuid, gpu.slot) if key}
        """Keys of GPUs that were removed, added or replaced: their other facts are not compared."""

    def of(self, path: str) -> tuple[str, str]:
        """Return the component of a path and the name of the value there."""
        match = _PATH.match(path)
        if match is not None and match["key"] in self.gpus:
            return self.gpus[match["key"]], _words(match["rest"].replace(".present", "")) or _words(match["field"])
        return self.plain(path)

    @staticmethod
    def plain(path: str) -> tuple[str, str]:
        """Return the same for a path that belongs to no GPU."""
        match = _PATH.match(path)
        if match is None:
            return "node", path
        field, key = match["field"], match["key"]
        inner = match["inner"].removeprefix(".document").removesuffix(".gpus")
        if not key:
            rest = match["rest"] or ""
            return "node", _words(f"{inner if field == 'smi' else field + inner}{rest}")
        rest = _words(match["rest"].replace(".present", ""))
        if field in _NOUNS:
            return f"{_NOUNS[field]} {key}", rest
        return "node", f"{_words(field + inner)} {key}{f' {rest}' if rest else ''}"

    def belongs_to_exchanged(self, path: str) -> bool:
        """Return whether a path is about a GPU that was removed, added or replaced."""
        match = _PATH.match(path)
        if match is None or match["key"] is None or not self.exchanged:
            return False
        return match["key"] in self.exchanged or bool(re.match(r"device_nodes\[/dev/nvidia\d+\]", path))


def _words(path: str) -> str:
    return re.sub(r"[.\[\]_]+", " ", path).strip()


def section_of(path: str) -> Section:
    """Return the section of a fact's path."""
    if _FIRMWARE.search(path):
        return "firmware"
    if _LINK.search(path):
        return "link"
    if path in ("smi.document.driver_version", "smi.document.cuda_version"):
        return "driver"
    return OF_FIELD.get(re.split(r"[.\[]", path, maxsplit=1)[0], "setting")


def differing(before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> Iterator[str]:
    """Yield the paths with different values, in their order; of an element that is new or removed only its own."""
    paths = [path for path in dict.fromkeys((*before, *after)) if not _equal(path, before.get(path), after.get(path))]
    whole = {path.removesuffix(".present") for path in paths if path.endswith("].present")}
    for path in paths:
        stem = path.removesuffix(".present") if path.endswith("].present") else f"{path}."
        if not any(sign == "]" and stem[: end + 1] in whole for end, sign in enumerate(stem[:-1])):
            yield path


def _equal(path: str, before: Scalar | None, after: Scalar | None) -> bool:
    if before == after:
        return True
    if _ROUNDED.search(path) and isinstance(before, int | float) and isinstance(after, int | float):
        return abs(before - after) <= 0.01 * max(abs(before), abs(after))
    return False


def _fact_changes(before: Snapshot, after: Snapshot, names: Names) -> Iterator[Change]:
    old, new = before.facts or {}, after.facts or {}
    unknown = {*before.unknown, *after.unknown}
    for path in differing(old, new):
        field = re.split(r"[.\[]", path, maxsplit=1)[0]
        failed = path == f"{field}.error_kind"
        if (field in unknown and not failed) or names.belongs_to_exchanged(path) or _follows(path, old, new):
            continue
        component, subject = names.of(path)
        if failed:
            component, subject = "node", {"smi": "nvidia-smi"}.get(field, _words(field))
        earlier, later = old.get(path), new.get(path)
        yield Change(
            effect=_effect(path, earlier, later, failed=failed),
            section="driver" if failed else section_of(path),
            component=component,
            what=subject,
            before="answers" if failed and earlier is None else earlier,
            after="answers" if failed and later is None else later,
        )


def _follows(path: str, old: Mapping[str, Scalar], new: Mapping[str, Scalar]) -> bool:
    """Return whether a change follows from another one: a library's file has its version in its name."""
    version = f"{path.removesuffix('.file')}.version"
    return path.endswith(".file") and old.get(version) != new.get(version)


def _effect(path: str, before: Scalar | None, after: Scalar | None, *, failed: bool) -> Effect:
    if failed:
        return "worse" if before is None else "better" if after is None else "other"
    if path.endswith("].present") and path.startswith(("nics", "infiniband", "pci", "nvmes", "disks", "memory_c")):
        return "worse" if after is None else "better"
    less = _LESS_IS_WORSE.search(path)
    if less and isinstance(before, int | float) and isinstance(after, int | float):
        return "worse" if after < before else "better"
    if _FAULTS.search(path) and isinstance(before, bool | None) and isinstance(after, bool | None):
        return "worse" if after else "better" if before else "other"
    if path.endswith(".errors"):
        return "better" if not after else "worse"
    good = [value in _GOOD_STATES for value in (before, after)]
    if good[0] != good[1] and re.search(r"state|status|\.active$", path):
        return "worse" if good[0] else "better"
    if path.endswith(".links") and isinstance(before, str) and isinstance(after, str):
        return (
            "worse" if _active(after) < _active(before) else "better" if _active(after) > _active(before) else "other"
        )
    return "other"


def _active(links: str) -> int:
    return sum(int(number) for number in re.findall(r"(\d+) active", links))


def _counter_changes(before: Snapshot, after: Snapshot, names: Names) -> Iterator[Change]:
    for path, value in after.counters.items():
        old = before.counters.get(path)
        if old is not None and value > old and LIFETIME.search(path):
            component, subject = names.of(path)
            yield Change(
                effect="worse", section="counter", component=component, what=subject, before=int(old), after=int(value)
            )


def renumbered(before: Snapshot, after: Snapshot) -> dict[str, str | None]:
    """Return the new name of each GPU of the first run: behind one that was removed (None), the others move up."""
    names: dict[str, str | None] = {}
    for gpu in before.gpus:
        new = next((candidate.index for candidate in after.gpus if same_gpu(gpu, candidate)), None)
        names[f"gpu{gpu.index}"] = None if new is None else f"gpu{new}"
    return names


def _verdict_changes(
    before: Mapping[str, Verdict], after: Mapping[str, Verdict], numbers: Mapping[str, str]
) -> Iterator[Change]:
    for check, verdict in after.items():
        earlier = before.get(check)
        if earlier is None:
            continue
        affected = {numbers.get(name, name): status for name, status in earlier.affected.items()}
        old = earlier.model_copy(update={"affected": affected})
        for component in sorted({*old.affected, *verdict.affected}):
            old_status, new_status = _status(old, component), _status(verdict, component)
            if old_status is new_status:
                continue
            effect: Effect = "worse" if RANK[new_status] > RANK[old_status] else "better"
            yield Change(
                effect=effect,
                section="check",
                component=component,
                what=check,
                before=old_status.value,
                after=new_status.value,
            )
        if not old.affected and not verdict.affected and old.status is not verdict.status:
            yield Change(
                effect="other",
                section="check",
                component="node",
                what=check,
                before=old.status.value,
                after=verdict.status.value,
            )


def _status(verdict: Verdict, component: str) -> Status:
    """Return the status of a component: a check names the good ones together."""
    status = verdict.affected.get(component)
    return status or (verdict.status if not verdict.affected else Status.PASS)


Key = tuple[str, str, int | None]


def _figure_changes(
    before: Iterable[FigureValue], after: Iterable[FigureValue], numbers: Mapping[str, str]
) -> Iterator[Change]:
    """Yield the figures that differ by more than the noise of both runs."""
    old = {
        (figure.metric, numbers.get(figure.component, figure.component), figure.message_bytes): figure
        for figure in before
    }
    new = {(figure.metric, figure.component, figure.message_bytes): figure for figure in after}
    noise = {key: max(DROP_WARNS.default, first, second) for key, first, second in _noises(old, new)}
    for key, figure in new.items():
        earlier = old.get(key)
        if earlier is None:
            continue
        share = figure.value / earlier.value - 1
        if abs(share) <= noise[key[0], key[2]]:
            continue
        yield Change(
            effect="worse" if share < 0 else "better",
            section="figure",
            component=figure.component,
            what=f"{words(figure.metric)} ({share:+.0%}){f' {figure.unit}' if figure.unit else ''}",
            before=earlier.value,
            after=figure.value,
        )


def _noises(
    old: Mapping[Key, FigureValue], new: Mapping[Key, FigureValue]
) -> Iterator[tuple[tuple[str, int | None], float, float]]:
    kinds = {(metric, size) for metric, _, size in (*old, *new)}
    spreads = [_spreads(run) for run in (old, new)]
    for kind in kinds:
        yield kind, spreads[0].get(kind, 0.0), spreads[1].get(kind, 0.0)


def _spreads(run: Mapping[Key, FigureValue]) -> dict[tuple[str, int | None], float]:
    """Return three times the spread of a run's components around their median, as a share of it."""
    groups: defaultdict[tuple[str, int | None], list[float]] = defaultdict(list)
    for (metric, _, size), figure in run.items():
        groups[metric, size].append(figure.value)
    spreads = {}
    for kind, values in groups.items():
        middle = median(values)
        spreads[kind] = SPREADS * median(abs(value - middle) for value in values) / middle if len(values) > 2 else 0.0
    return spreads
