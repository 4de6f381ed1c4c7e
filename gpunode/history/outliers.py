"""Outliers of a fleet: nodes with versions, settings, counts or figures that differ from those of most others."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from gpunode.checks.figures import words
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
    | {"failed_reverts", "repositories"}
)
"""Facts that follow from others, or belong to the single node: its checks evaluate them."""
_OWN = re.compile(
    r"\.(uuid|serial|pci_bus_id|name|interfaces|numa_node|local_cpus|iommu_group|ports|cluster_uuid|clique_id|gids.*"
    r"|lid|state|physical_state|since|minor|status|document\.nic_names.*|cpu_affinity.*|numa_affinity.*|gpus|nics)$"
)
_ELEMENT = re.compile(r"^(\w+[.\w]*)\[.*?\](?=[.\[]|$)(.*)$", re.DOTALL)
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_MAIN = ("loaded_driver.version", "os.version_id", "driver_library_version")
NO_DOMAIN = re.compile(r"^[0-]*$")


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
        what = f"{where}{self.what}"
        if self.kind == "mixed":
            return f"{what}: {shown(self.found)}{rest}"
        return f"{what}: {shown(self.found)}, usual {shown(self.usual)} ({len(self.hosts)} of {self.of}){rest}"


@dataclass
class _Group:
    """The values of nodes that are compared with each other."""

    name: str
    hosts: list[str] = field(default_factory=list)
    values: defaultdict[str, Counter[Scalar]] = field(default_factory=lambda: defaultdict(Counter))
    figures: defaultdict[tuple[str, int | None], list[tuple[float, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    units: dict[str, str | None] = field(default_factory=dict)

    def add(self, node: Snapshot, profile: Mapping[str, Scalar]) -> None:
        self.hosts.append(node.host)
        for path, value in profile.items():
            counts = self.values[path]
            if value in counts or len(counts) <= MOST_VALUES:
                counts[value] += 1
        for figure in node.figures:
            self.figures[figure.metric, figure.message_bytes].append((figure.value, node.host, figure.component))
            self.units[figure.metric] = figure.unit

    def usual(self) -> dict[str, Scalar]:
        """Return the value of more than half of the nodes, for each fact that has one."""
        found = {}
        for path, counts in self.values.items():
            value, number = counts.most_common(1)[0]
            if 2 * number > len(self.hosts) and len(counts) <= MOST_VALUES:
                found[path] = value
        return found


def profile_of(node: Snapshot) -> dict[str, Scalar]:
    """Return the facts of a node that are alike on nodes of its model and platform, by path."""
    found: dict[str, Scalar] = {}
    sets: defaultdict[str, set[str]] = defaultdict(set)
    counts: Counter[str] = Counter()
    for path, value in (node.facts or {}).items():
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        if name in _IGNORED or name in node.unknown or _OWN.search(path):
            continue
        match = _ELEMENT.match(path)
        if name not in _ALIKE or match is None:
            found[path] = value
        elif match[2] == ".present":
            counts[f"{match[1]}[]"] += 1
        else:
            sets[f"{match[1]}[]{match[2]}"].add(shown(value))
    found |= {path: ", ".join(sorted(values)) for path, values in sets.items() if not path.endswith("[].present")}
    found |= counts
    return found


def outliers(nodes: Callable[[], Iterable[Snapshot]], racks: Mapping[str, str] | None = None) -> list[Outlier]:
    """Return the outliers of a fleet. ``nodes`` is called twice, and may yield one node at a time.

    ``racks``: the rack of each host, where the inventory names it: a node is compared with the others of its rack too.
    """
    groups: dict[str, _Group] = {}
    domains: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes():
        if not node.reached or node.facts is None:
            continue
        profile = profile_of(node)
        for name in _names(node, racks):
            groups.setdefault(name, _Group(name)).add(node, profile)
        for domain in _domains(node):
            domains[domain][str(node.facts.get("loaded_driver.version"))].append(node.host)
    usual = {name: group.usual() for name, group in groups.items() if len(group.hosts) >= LEAST_NODES}
    found: dict[tuple[str, str, Scalar | None, Scalar | None], list[tuple[str, _Deviation]]] = {}
    for node in nodes():
        if not node.reached or node.facts is None:
            continue
        profile, reported = profile_of(node), set[str]()
        for name in _names(node, racks):
            for one in _deviations(profile, usual.get(name, {}), groups[name], reported):
                found.setdefault((name, one.what, one.found, one.usual), []).append((node.host, one))
    values = [_value(groups[name], found_) for (name, *_), found_ in found.items()]
    mixed = [one for name in usual if " in " not in name for one in _mixed(groups[name])]
    figures = [one for name, group in groups.items() if " in " not in name for one in _figures(group)]
    return sorted(
        [*values, *figures, *mixed, *_mixed_domains(domains)], key=lambda one: (one.hosts, one.section, one.what)
    )


def _names(node: Snapshot, racks: Mapping[str, str] | None) -> list[str]:
    model = f"{node.model or 'no GPU'} on {node.platform or 'an unknown machine'}"
    rack = (racks or {}).get(node.host)
    return [model] if rack is None else [model, f"{model} in {rack}"]


def _domains(node: Snapshot) -> set[str]:
    """Return the NVLink domains of a node's GPUs that span nodes."""
    return {
        str(value)
        for path, value in (node.facts or {}).items()
        if path.endswith(".fabric.cluster_uuid") and not NO_DOMAIN.match(str(value))
    }


@dataclass(frozen=True)
class _Deviation:
    kind: Literal["value", "count"]
    section: Section
    what: str
    found: Scalar | None
    usual: Scalar | None
    more: tuple[str, ...]


def _deviations(
    profile: Mapping[str, Scalar], usual: Mapping[str, Scalar], group: _Group, reported: set[str]
) -> Iterator[_Deviation]:
    """Yield what differs on a node; facts that differ by the same versions are one deviation, and so are counts."""
    limit = max(1, RARE * len(group.hosts))
    bundles: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    paths = list(differing(usual, {path: value for path, value in profile.items() if path in usual}))
    counted = tuple(f"{path}." for path in paths if path.endswith("[]"))
    for path in paths:
        value = profile.get(path)
        number = group.values[path][value] if value is not None else len(group.hosts) - group.values[path].total()
        if path in reported or number > limit or path.startswith(counted):
            continue
        reported.add(path)
        versions = [_VERSION.search(str(one)) for one in (usual[path], value)]
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
            found=profile.get(first),
            usual=usual[first],
            more=tuple(_title(path) for path in alike[1:]),
        )


def _title(path: str) -> str:
    name = path.replace(".present", "")
    if name.endswith("[]"):
        return f"number of {_field(name)}"
    component, what = Names.plain(name)
    return what if component == "node" else f"{component} {what}".strip()


def _field(path: str) -> str:
    return {
        "smi.document.gpus[]": "GPUs by nvidia-smi",
        "driver_gpus[]": "GPUs by the driver",
        "pci[]": "GPUs on the bus",
    }.get(path, path.removesuffix("[]").rpartition(".")[2].replace("_", " "))


def _value(group: _Group, found: Sequence[tuple[str, _Deviation]]) -> Outlier:
    first = found[0][1]
    return Outlier(
        kind=first.kind,
        section=first.section,
        hosts=tuple(sorted(host for host, _ in found)),
        of=len(group.hosts),
        what=first.what,
        found=first.found,
        usual=first.usual,
        more=first.more,
        group=group.name,
    )


def _mixed(group: _Group) -> Iterator[Outlier]:
    """Yield main versions of which the fleet has several usual values."""
    for path in (*_MAIN, "kernels", "smi.document.gpus[].vbios_version"):
        counts = group.values.get(path, Counter())
        common = [(value, number) for value, number in counts.most_common() if number > max(1, RARE * len(group.hosts))]
        if len(common) > 1:
            yield Outlier(
                kind="mixed",
                section=section_of(path),
                hosts=(),
                of=len(group.hosts),
                what=_title(path),
                found=", ".join(f"{shown(value)} on {number} nodes" for value, number in common),
                usual=None,
                group=group.name,
            )


def _mixed_domains(domains: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[Outlier]:
    for domain, drivers in domains.items():
        if len(drivers) > 1:
            yield Outlier(
                kind="mixed",
                section="driver",
                hosts=tuple(sorted({host for hosts in drivers.values() for host in hosts})),
                of=sum(map(len, drivers.values())),
                what="drivers of one NVLink domain",
                found=", ".join(f"{driver} on {len(hosts)}" for driver, hosts in sorted(drivers.items())),
                usual=None,
                group=f"NVLink domain {domain}",
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
