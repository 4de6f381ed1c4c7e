"""Outliers of a fleet: nodes with versions, settings, counts or figures that differ from those of most others."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import median
from typing import Literal

from gpunode.checks.measurements import words
from gpunode.frozen import Frozen
from gpunode.history.compare import Names, Section, differing, section_of, shown
from gpunode.history.snapshot import Scalar, Snapshot

LEAST_NODES = 3
"""Nodes of one model and platform below which values are not compared."""
LEAST_FIGURES = 5
"""Figures below which none is an outlier: the spread of fewer is unknown."""
RARE = 0.25
"""Share of the nodes up to which a value is an outlier; beyond, the fleet has two usual values."""
SPREADS, SHARE = 5.0, 0.10
"""A figure is an outlier below the median by more than both: so many spreads (1.4826 MAD), and this share of it."""
MOST_VALUES = 100
"""Different values of one fact beyond which it belongs to the node, like a serial number."""
MOST_FACTS = 6
"""Facts of one outlier that are named."""
_ALIKE = frozenset(
    {"smi", "driver_gpus", "pci", "pci_io", "nics", "infiniband", "nvlink", "nvmes", "disks", "memory_controllers"}
    | {"bmc_fans", "bmc_power_supplies", "peer_access", "topology"}
)
"""Facts with elements that are compared as a whole: their count, and the set of the values of each field."""
_IGNORED = frozenset(
    {"pci_ports", "pci_acs", "iommu", "device_nodes", "rdma_nodes", "cdi_specs", "addressed", "command_line"}
    | {"nvlink_errors", "numa", "private_keys", "file_systems", "storage", "dkms", "module_files", "gpu_virtualization"}
    | {"reboot_required", "pending_updates", "boot_arguments", "docker", "modules", "packet_filter", "environment"}
    | {"failed_reverts", "repositories", "own_name", "local_mounts"}
)
"""Facts that follow from others, or belong to the single node: its checks evaluate them."""
_OWN = re.compile(
    r"\.(uuid|serial|pci_bus_id|name|interfaces|numa_node|local_cpus|iommu_group|ports|cluster_uuid|clique_id|gids.*"
    r"|lid|state|physical_state|since|minor|status|document\.nic_names.*|cpu_affinity.*|numa_affinity.*|gpus|nics)$"
)
_ELEMENT = re.compile(r"^(\w+[.\w]*)\[.*?\](?=[.\[]|$)(.*)$", re.DOTALL)
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_MAIN = ("loaded_driver.version", "os.version_id", "driver_library_version")


class Outlier(Frozen):
    """Nodes that differ from most others of their group in one respect."""

    kind: Literal["value", "count", "figure", "mixed"]
    """``mixed``: there are several usual values."""
    section: Section
    hosts: tuple[str, ...]
    of: int
    """Nodes, or figures, that were compared."""
    component: str = "node"
    what: str
    found: Scalar | None
    usual: Scalar | None
    more: tuple[str, ...] = ()
    """Further facts that differ with it."""
    group: str
    """Model and platform, and the rack if the node was compared with its rack."""

    @property
    def text(self) -> str:
        """Return the outlier without the names of its nodes."""
        where = "" if self.component == "node" else f"{self.component}: "
        rest = f"; also {', '.join(self.more[:MOST_FACTS])}" if self.more else ""
        rest += f" and {len(self.more) - MOST_FACTS} more" if len(self.more) > MOST_FACTS else ""
        subject = f"{where}{self.what}"
        if self.kind == "mixed":
            return f"{subject}: {shown(self.found)}{rest}"
        return f"{subject}: {shown(self.found)}, usual {shown(self.usual)} ({len(self.hosts)} of {self.of}){rest}"


Profile = Mapping[str, Scalar]


@dataclass
class _Group:
    """The values of nodes that are compared with each other."""

    name: str
    profiles: dict[int, tuple[Profile, list[str]]] = field(default_factory=dict)
    """Profiles by their hash, each with its nodes: in a healthy fleet there are few."""
    figures: defaultdict[tuple[str, int | None], list[tuple[float, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    units: dict[str, str | None] = field(default_factory=dict)

    def add(self, node: Snapshot, profile: Profile) -> None:
        self.profiles.setdefault(hash(frozenset(profile.items())), (profile, []))[1].append(node.host)
        for figure in node.figures:
            self.figures[figure.metric, figure.message_bytes].append((figure.value, node.host, figure.component))
            self.units[figure.metric] = figure.unit

    @cached_property
    def nodes(self) -> int:
        return sum(len(hosts) for _, hosts in self.profiles.values())

    @cached_property
    def values(self) -> defaultdict[str, Counter[Scalar]]:
        """Return the number of nodes with each value of each fact."""
        by_path: defaultdict[str, Counter[Scalar]] = defaultdict(Counter)
        for profile, hosts in self.profiles.values():
            for path, value in profile.items():
                counts = by_path[path]
                if value in counts or len(counts) <= MOST_VALUES:
                    counts[value] += len(hosts)
        return by_path

    @cached_property
    def usual(self) -> dict[str, Scalar]:
        """Return the value of more than half of the nodes, for each fact that has one."""
        if self.nodes < LEAST_NODES:
            return {}
        usual = {}
        for path, counts in self.values.items():
            value, number = counts.most_common(1)[0]
            if 2 * number > self.nodes and len(counts) <= MOST_VALUES:
                usual[path] = value
        return usual


@lru_cache(maxsize=20_000)
def _fact_and_kind(path: str) -> tuple[str, str | None]:
    """Return the name of a fact in profiles, and what is taken of it: ``value``, ``count``, ``set``; None: nothing."""
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    if name in _IGNORED or _OWN.search(path):
        return path, None
    match = _ELEMENT.match(path)
    if name not in _ALIKE or match is None:
        return path, "value"
    if match[2] == ".present":
        return f"{match[1]}[]", "count"
    if not match[2]:
        return match[1], "set"
    return f"{match[1]}[]{match[2]}", None if match[2].endswith("].present") else "set"


def profile_of(node: Snapshot) -> dict[str, Scalar]:
    """Return the facts of a node that are alike on nodes of its model and platform, by path."""
    profile: dict[str, Scalar] = {}
    sets: defaultdict[str, set[str]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for path, value in (node.facts or {}).items():
        fact, kind = _fact_and_kind(path)
        if kind is None or (node.unknown and re.split(r"[.\[]", path, maxsplit=1)[0] in node.unknown):
            continue
        if kind == "value":
            profile[path] = value
        elif kind == "count":
            counts[fact] += 1
        else:
            sets[fact].add(shown(value))
    return profile | {path: ", ".join(sorted(values)) for path, values in sets.items()} | dict(counts)


class FleetProfile:
    """The nodes of one run, for their comparison: add each, then read ``outliers``.

    ``racks``: the rack of each host, where the inventory names it: a node is compared with the others of its rack too.
    """

    def __init__(self, racks: Mapping[str, str] | None = None) -> None:
        self._racks = racks or {}
        self._fleet: dict[str, _Group] = {}
        self._within: dict[str, _Group] = {}

    def add(self, node: Snapshot) -> None:
        """Add a node; one that sent no data is left out."""
        if not node.reached or node.facts is None:
            return
        name, profile = f"{node.model or 'no GPU'} on {node.platform or 'an unknown machine'}", profile_of(node)
        self._fleet.setdefault(name, _Group(name)).add(node, profile)
        if (rack := self._racks.get(node.host)) is not None:
            self._within.setdefault(f"{name} in {rack}", _Group(f"{name} in {rack}")).add(node, profile)

    def outliers(self) -> list[Outlier]:
        """Return the outliers, those that apply to the whole fleet first."""
        reported: set[tuple[str, str]] = set()
        groups = [*self._fleet.values(), *self._within.values()]
        outliers = [outlier for group in groups for outlier in _of_group(group, reported)]
        for group in self._fleet.values():
            outliers += [*_mixed(group), *_figures(group)]
        return sorted(outliers, key=lambda outlier: (outlier.hosts, outlier.section, outlier.what))


def outliers(nodes: Iterable[Snapshot], racks: Mapping[str, str] | None = None) -> list[Outlier]:
    """Return the outliers of nodes, see ``FleetProfile``."""
    fleet = FleetProfile(racks)
    for node in nodes:
        fleet.add(node)
    return fleet.outliers()


def _of_group(group: _Group, reported: set[tuple[str, str]]) -> list[Outlier]:
    """Return the nodes with values that differ from the usual ones; what was reported before is left out."""
    hosts_of: defaultdict[_Deviation, list[str]] = defaultdict(list)
    for profile, hosts in group.profiles.values():
        for deviation in _deviations(profile, group):
            new = [host for host in hosts if (host, deviation.what) not in reported]
            reported.update((host, deviation.what) for host in new)
            hosts_of[deviation] += new
    return [
        Outlier(
            kind=deviation.kind,
            section=deviation.section,
            hosts=tuple(sorted(hosts)),
            of=group.nodes,
            what=deviation.what,
            found=deviation.found,
            usual=deviation.usual,
            more=deviation.more,
            group=group.name,
        )
        for deviation, hosts in hosts_of.items()
        if hosts
    ]


@dataclass(frozen=True)
class _Deviation:
    kind: Literal["value", "count"]
    section: Section
    what: str
    found: Scalar | None
    usual: Scalar | None
    more: tuple[str, ...]


def _deviations(profile: Profile, group: _Group) -> Iterator[_Deviation]:
    """Yield what differs on a node; facts that differ by the same versions are one deviation, and so are counts."""
    usual, limit = group.usual, max(1, RARE * group.nodes)
    bundles: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    present: dict[str, Scalar] = {}
    paths = list(differing(usual, {path: value for path, value in profile.items() if path in usual}))
    counted = tuple(f"{path}." for path in paths if path.endswith("[]"))
    for path in paths:
        value = profile.get(path)
        if value is None and usual[path] == "":
            # A list that is usually empty: its elements have paths of their own.
            present[path] = sum(fact.startswith(f"{path}[") and fact.endswith("].present") for fact in profile)
            if not present[path]:
                continue
        number = group.values[path][value] if value is not None else group.nodes - group.values[path].total()
        if number > limit or path.startswith(counted):
            continue
        versions = [_VERSION.search(str(scalar)) for scalar in (usual[path], value)]
        if path.endswith("[]"):
            bundles["count", section_of(path)].append(path)
        elif versions[0] and versions[1]:
            bundles["value", versions[0][0], versions[1][0]].append(path)
        else:
            bundles["value", path].append(path)
    for key, alike in bundles.items():
        alike.sort(key=lambda path: _MAIN.index(path) if path in _MAIN else len(_MAIN))
        first = alike[0]
        yield _Deviation(
            kind="count" if key[0] == "count" else "value",
            section=section_of(first),
            what=_title(first),
            found=present.get(first, profile.get(first)),
            usual=usual[first],
            more=tuple(_title(path) for path in alike[1:]),
        )


def _title(path: str) -> str:
    name = path.replace(".present", "")
    if name.endswith("[]"):
        return f"number of {_field(name)}"
    component, subject = Names.plain(name)
    return subject if component == "node" else f"{component} {subject}".strip()


def _field(path: str) -> str:
    return {
        "smi.document.gpus[]": "GPUs by nvidia-smi",
        "driver_gpus[]": "GPUs by the driver",
        "pci[]": "GPUs on the bus",
        "nvlink.document.gpus[]": "GPUs by nvidia-smi nvlink",
    }.get(path, path.removesuffix("[]").rpartition(".")[2].replace("_", " "))


def _mixed(group: _Group) -> Iterator[Outlier]:
    """Yield main versions of which the fleet has several usual values."""
    if group.nodes < LEAST_NODES:
        return
    for path in (*_MAIN, "kernels", "smi.document.gpus[].vbios_version"):
        counts = group.values.get(path, Counter())
        common = [(value, number) for value, number in counts.most_common() if number > max(1, RARE * group.nodes)]
        if len(common) > 1:
            yield Outlier(
                kind="mixed",
                section=section_of(path),
                hosts=(),
                of=group.nodes,
                what=_title(path),
                found=", ".join(f"{shown(value)} on {number} nodes" for value, number in common),
                usual=None,
                group=group.name,
            )


def _figures(group: _Group) -> Iterator[Outlier]:
    """Yield figures that are lower than the group's median by more than its spread."""
    for (metric, _), figures in group.figures.items():
        if len(figures) < LEAST_FIGURES:
            continue
        usual = median(value for value, _, _ in figures)
        spread = 1.4826 * median(abs(value - usual) for value, _, _ in figures)
        for value, host, component in figures:
            if usual - value > max(SPREADS * spread, SHARE * usual):
                unit = group.units.get(metric)
                yield Outlier(
                    kind="figure",
                    section="figure",
                    hosts=(host,),
                    of=len(figures),
                    component=component,
                    what=f"{words(metric)}{f' in {unit}' if unit else ''}",
                    found=value,
                    usual=usual,
                    group=group.name,
                )
