"""Content of a vendor's repository according to its recorded indexes, package by package. Pure.

Names, versions and dependencies come from ``data/recorded`` (derived from recorded indexes, never from the catalogue or
the roles). For a fact that is not recorded, an assumption of ``assumptions.yml`` is used; each package lists its own.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gpunode.lab.packages.rows import loaded

_RELATIONS = ("depends", "recommends", "provides", "conflicts", "breaks", "replaces")
_BRANCH_IN_NAME = re.compile(r"-(5[0-9]{2})(?=[- ]|$)")  # 510 to 599: later branches are not part of a name
_LIMITS = {"from": lambda branch, limit: branch >= limit, "up to": lambda branch, limit: branch <= limit,
           "before": lambda branch, limit: branch < limit}  # fmt: skip
_LIMIT = re.compile(r"\b(from|up to|before) (\d{3})\b")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+~:-]*")
_LAST_SUFFIXED = 580
_FABRIC = ("libnvidia-nscq", "libnvsdm", "nvidia-fabricmanager", "nvidia-fabricmanager-dev", "nvidia-imex")
"""Up to 575 these have the branch in their names, on every system."""
_FABRIC_FROM_580 = ("libnvsdm-dev", "nvidia-fabric-manager-devel", "nvlink5")
_RECORDED_SINCE = {"570 spec": 570, "610+": 610}
"""First branch of each key in a record's dependencies by version."""
_PINNING = "nvidia-driver-pinning"
_LAST_PROPRIETARY = 610
_FLAVOURS = frozenset(
    {"nvidia-kernel-dkms", "nvidia-kernel-open-dkms", "kmod-nvidia-latest-dkms", "kmod-nvidia-open-dkms"}
)
"""The kernel modules of Debian and RHEL: one flavour at a time."""


@dataclass
class Offer:
    """One package in one version, as a repository offers it."""

    name: str
    version: str
    release: str
    """The upstream version: 580.95.05."""
    architecture: str
    relations: dict[str, list[str]]
    sure: bool
    """Whether the name is recorded for this repository."""
    assumed: list[str] = field(default_factory=list)
    """The assumptions used for facts of this package that are not recorded."""


@cache
def recorded(system: str) -> dict[str, Any]:
    """Return the recorded repository of that name: ``repository``, ``sources``, ``packages``.

    Rows of ``assumed.yml`` for it override the recorded ones.
    """
    content: dict[str, Any] = loaded(f"recorded/{system}")
    rows = dict(content["packages"])
    for name, row in loaded("assumed")["rows"].get(system, {}).items():
        if not any(map(_VERSION.fullmatch, rows.get(name, {}).get("versions", ()))):
            rows[name] = rows.get(name, {}) | row
    return content | {"packages": rows}


@cache
def assumptions() -> dict[str, Any]:
    """Return the assumptions for facts that are not recorded, and under ``unknown`` a description of those facts."""
    content: dict[str, Any] = loaded("recorded/assumptions")
    assumed = {key: {"assumption": text} for key, text in loaded("assumed")["assumptions"].items()}
    return content | {"assumptions": content["assumptions"] | assumed}


def offers(system: str, releases: Sequence[str]) -> Iterator[Offer]:
    """Yield every package of that repository, those of the driver in these releases."""
    return _Index(system, releases).offers()


def stem(name: str) -> str:
    """Return the name without branch, release and ``-server``, which decides the content of a driver's package."""
    return re.sub(r"-(server|[0-9]{3}(\.[0-9]+)*)(?=-|$)", "", name)


class _Index:
    """The packages of one recorded repository."""

    def __init__(self, system: str, releases: Sequence[str]) -> None:
        content = recorded(system)
        self._rows: dict[str, dict[str, Any]] = content["packages"]
        self._repository: dict[str, Any] = content["repository"]
        self._releases = releases
        self._branches = sorted({_branch(release) for release in releases})
        self._rpm = "rpm" in self._repository["kind"]
        self._ubuntu = system.startswith("ubuntu")
        added = loaded("assumed")["driver_spec"] if self._rpm else {"epoch_of": [], "relations": {}}
        self._spec: dict[str, dict[str, list[str]]] = added["relations"]
        self._epochs = [*self._repository.get("epoch_of", ()), *self._required_with_epoch(), *added["epoch_of"]]
        self._graphs: dict[str, Any] = assumptions()["assumptions"]["dependency_graph"]

    def offers(self) -> Iterator[Offer]:
        """Yield all packages in all versions."""
        for name, row in self._rows.items():
            if row.get("virtual") or row.get("from_repository") or name.startswith(_PINNING):
                continue
            if stem(name) in _FABRIC and stem(name) != name and stem(name) in self._rows:
                continue  # the row without the branch yields these, too
            if ("follows" in row and row["follows"] != "own") or name in _FABRIC or _is_template(name, row):
                for release in self._releases:
                    for offer in self._with_driver(name, row, release):
                        offer.assumed += [row["why"]] if "why" in row else []
                        yield offer
            else:
                yield from self._own_versions(name, row)
        if not self._rpm and "driver_revisions" in self._repository:
            for target in [*map(str, self._branches), *self._releases]:
                if _branch(target) >= _LAST_SUFFIXED:
                    yield self._pinning(target)

    def _with_driver(self, name: str, row: Mapping[str, Any], release: str) -> Iterator[Offer]:
        """Yield the package in that release, if it exists there."""
        branch = _branch(release)
        if branch > _LAST_PROPRIETARY and name in ("nvidia-kernel-dkms", "kmod-nvidia-latest-dkms"):
            return
        if name.startswith("cuda-compat-") and branch not in map(_branch, _versions(row)):
            return
        if name in _FABRIC and branch < _LAST_SUFFIXED:
            old = f"{name}-{branch}"
            if self._rpm and name == "nvidia-fabricmanager":
                old = "nvidia-fabric-manager"
            if self._rpm and f"{name}-570" not in self._rows and old not in self._rows:
                return
            yield self._offer(old, name, row, release, [] if old in self._rows else ["names_before_580"])
        elif name in _FABRIC_FROM_580 and branch < _LAST_SUFFIXED:
            return
        elif match := _BRANCH_IN_NAME.search(name):
            called = name.replace(match[0], f"-{branch}")
            if match[1] == str(branch):
                yield self._offer(name, name, row, release, [])
            elif self._ubuntu and match[1] == str(_LAST_SUFFIXED) > str(branch) and called not in self._rows:
                yield self._offer(called, name, row, release, ["names_before_580"])
        elif self._ubuntu and branch < _LAST_SUFFIXED and str(_LAST_SUFFIXED) in row.get("branches", ()):
            yield self._offer(name, name, row, release, ["names_before_580"])
        elif _applies(row.get("branches", ()), branch):
            yield self._offer(name, name, row, release, [])

    def _own_versions(self, name: str, row: Mapping[str, Any]) -> Iterator[Offer]:
        """Yield the package in the versions that are recorded completely."""
        for version in _versions(row):
            release = version.rpartition(":")[2].rpartition("-")[0] or version
            assumed = [] if version in row.get("versions", ()) else [row.get("why", "derived_version")]
            yield self._made(name, name, version, release, assumed)

    def _pinning(self, target: str) -> Offer:
        """Return the package that pins the branch or release ``target``, with the recorded version or a similar one."""
        name = f"{_PINNING}-{target}"
        row = self._rows.get(name, {})
        assumed = ["pin_file"]
        if row.get("versions"):
            version = str(row["versions"][0])
        else:
            version = self._version(target, "driver") if "." in target else f"{target}-2{'ubuntu1' * self._ubuntu}"
            assumed.append("pinning_versions")
        relations = {key: [_PINNING] for key in ("provides", "conflicts", "replaces")}
        return Offer(name, version, target, "all", relations, bool(row.get("sure")), assumed)

    def _offer(self, name: str, like: str, row: Mapping[str, Any], release: str, assumed: list[str]) -> Offer:
        """Return a package that carries the driver's version; ``like``: the name of the record it is built from."""
        follows = str(row.get("follows", "driver"))
        version = self._version(release, follows)
        if version not in row.get("versions", ()):
            assumed = [*assumed, "rpm_release" if self._rpm else "versions_per_package"]
        return self._made(name, like, version, release, assumed)

    def _version(self, release: str, follows: str) -> str:
        if self._rpm:
            return f"{release}-{self._repository['release_suffix']}"
        for key in (f"{follows}_revisions", "driver_revisions"):
            for patterns, revision in self._repository[key].items():
                if any(fnmatch.fnmatch(release, pattern) for pattern in patterns.split()):
                    return f"{release}-{revision}"
        raise KeyError(f"{release}: no revision is recorded for it")

    def _made(self, name: str, like: str, version: str, release: str, assumed: list[str]) -> Offer:
        row = self._rows[like]
        notes = [*assumed]
        branch = _branch(release)
        relations = {key: [*row.get(key, ())] for key in _RELATIONS}
        relations["depends"] = self._depends(like, row, version, branch, notes)
        for key, entries in self._spec.get(like, {}).items():
            relations[key] += [entry for entry in entries if _applies([entry], branch)]
            notes += [] if "driver_spec" in notes else ["driver_spec"]
        if not self._rpm:
            relations = {key: [_bare(entry) for entry in entries] for key, entries in relations.items()}
        if name != like:
            for key, entries in relations.items():
                relations[key] = [_BRANCH_IN_NAME.sub(f"-{branch}", entry) for entry in entries]
        first = (self._repository.get("dkms") or {}).get("required_from")
        if first and _point(release) < _point(first):
            relations["depends"] = ["dkms" if e.startswith("dkms (>=") else e for e in relations["depends"]]
        if branch > _LAST_PROPRIETARY and not self._rpm:
            opened = [_open(entry) for entry in relations["depends"]]
            notes += ["no_proprietary_615"] if opened != relations["depends"] else []
            relations["depends"] = opened
        if self._ubuntu and (others := self._other_names(name)):
            for key in ("conflicts", "replaces"):
                relations[key] = sorted({*relations[key], *others})
            notes.append("rename_conflicts")
        if name in _FLAVOURS:
            relations["conflicts"] = sorted({*relations["conflicts"], *_FLAVOURS - {name}} - {name})
            notes.append("flavours")
        values = {"v": version, "u": release}
        filled = {key: [self._filled(entry, values) for entry in entries] for key, entries in relations.items()}
        architecture = "all" if row.get("architecture") in ("all", "noarch") else "amd64"
        return Offer(name, self._epoch(name) + version, release, architecture, filled, bool(row.get("sure")), notes)

    def _depends(self, like: str, row: Mapping[str, Any], version: str, branch: int, notes: list[str]) -> list[str]:
        """Return the recorded dependencies, completed from the assumed graph."""
        by_version = row.get("depends_by_version", {})
        dependencies = [*row.get("depends", ()), *by_version.get(version, ())]
        for key, first in _RECORDED_SINCE.items():
            if branch >= first:
                dependencies += by_version.get(key, ())
        known = {_name(entry) for entry in dependencies}
        assumed = self._graph(branch).get(_BRANCH_IN_NAME.sub(f"-{_LAST_SUFFIXED}", like), ())
        if 0 < branch <= _LAST_SUFFIXED:
            assumed = [_BRANCH_IN_NAME.sub(f"-{branch}", entry) for entry in assumed]
        graph = [entry for entry in assumed if _applies([entry], branch) and _name(entry) not in known]
        if graph or not (dependencies or "depends" in row or version in by_version):
            notes.append("dependency_graph")
        return [*dependencies, *graph]

    def _graph(self, branch: int) -> Mapping[str, list[str]]:
        """Return the assumed dependencies by name, as of that branch."""
        ubuntu = "ubuntu_suffixed_580" if 0 < branch <= _LAST_SUFFIXED else "ubuntu_unsuffixed"
        graph: dict[str, list[str]] = self._graphs["rpm" if self._rpm else ubuntu if self._ubuntu else "debian"]
        return graph

    def _other_names(self, name: str) -> set[str]:
        """Return the names of this package's files in other branches, which conflict with it."""
        plain = _BRANCH_IN_NAME.sub("", name)
        shared = {"nvidia-dkms", "nvidia-kernel-source"} & {plain.removesuffix("-open")}
        flavour = plain.removesuffix("-open") if plain.endswith("-open") else f"{plain}-open"
        both = self._names_of(plain) | (self._names_of(flavour) if shared else set())
        old = [branch for branch in self._branches if branch <= _LAST_SUFFIXED]
        moved = ("nvidia-utils", "nvidia-compute-utils")  # in libnvidia-compute from 590 on
        if name == "libnvidia-compute":
            both |= {f"{tool}-{branch}" for tool in moved for branch in old}
        if plain in moved:
            both.add("libnvidia-compute")
        return both - {name}

    def _names_of(self, plain: str) -> set[str]:
        """Return all names of a package of the driver, in all branches."""
        template = next((key for key in self._rows if key != plain and _BRANCH_IN_NAME.sub("-580", key) == key
                         and _BRANCH_IN_NAME.sub("", key) == plain), None)  # fmt: skip
        if template is None or plain in _FABRIC or plain.startswith(("cuda-drivers", "nvlink5", _PINNING)):
            return set()
        old = [branch for branch in self._branches if branch <= _LAST_SUFFIXED]
        others = {_BRANCH_IN_NAME.sub(f"-{branch}", template) for branch in old}
        others |= {plain} & self._rows.keys()
        return others

    def _filled(self, entry: str, values: Mapping[str, str]) -> str:
        """Return a relation with its braces filled, in the package manager's notation."""
        text = _LIMIT.sub("", entry.format(**values)).replace("()", "").strip()
        if not self._rpm:
            return text
        if " if " in text:
            return f"({text})"
        words = text.replace("epoch:version", values["u"]).split()
        if words[-1] == values["u"]:
            words[-1] = self._epoch(words[0]) + values["u"]
        return " ".join(words)

    def _epoch(self, name: str) -> str:
        """Return the epoch of the package's versions in this repository, with its colon."""
        return f"{self._repository['epoch']}:" if any(fnmatch.fnmatch(name, each) for each in self._epochs) else ""

    def _required_with_epoch(self) -> Iterator[str]:
        """Yield the names that a recorded requirement gives with an epoch."""
        for row in self._rows.values():
            for entries in row.get("depends_by_version", {}).values():
                yield from (_name(entry) for entry in entries if entry.endswith("= epoch:version"))


def _versions(row: Mapping[str, Any]) -> list[str]:
    """Return the versions that are recorded or derived completely, without those marked as incomplete."""
    known = dict.fromkeys([*row.get("versions", ()), *row.get("versions_derived", ())])
    return [version for version in known if _VERSION.fullmatch(version)]


def _applies(limits: Sequence[str], branch: int) -> bool:
    """Return whether the branch is within limits: ``580``, ``from 580``, ``up to 595 seen``, other text: all."""
    numbers = [int(limit) for limit in limits if limit.isdigit()]
    matches = [match for limit in limits if (match := _LIMIT.search(limit))]
    within = all(_LIMITS[match[1]](branch, int(match[2])) for match in matches)
    return within and (not numbers or branch in numbers)


def _name(entry: str) -> str:
    return entry.split(" ", maxsplit=1)[0]


def _bare(entry: str) -> str:
    """Return a relation of a deb without the remark that some records have in the version's field."""
    match = re.match(r"[a-z0-9.+-]+( \([<>=][^)]*\))?", entry)
    return match[0] if match else entry


def _open(entry: str) -> str:
    """Return the dependency with the open modules in place of the proprietary ones, for branches that have only open
    ones.
    """
    return re.sub(
        r"^nvidia-(dkms|kernel-source)(?= )", r"nvidia-\1-open", entry.replace("kernel-dkms", "kernel-open-dkms")
    )


def _is_template(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether a row without a version of its own belongs to the driver, in the branch of its name."""
    return name.startswith("cuda-drivers-") or bool(_BRANCH_IN_NAME.search(name) and not _versions(row))


def _branch(release: str) -> int:
    head = release.rpartition(":")[2].partition(".")[0]
    return int(head) if head.isdigit() else 0


def _point(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))
