"""The catalog: all facts, typed, with look-ups. Files are read on first use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import cache, cached_property
from importlib.resources import as_file, files
from typing import Any, TypeVar

from packaging.version import Version as Number
from pydantic import BaseModel

from gpunode.catalog import hardware, open_modules, origins, pci_ids, software
from gpunode.catalog.gpus import GpuIndex, GpuMatch, normal, similar
from gpunode.catalog.pci_ids import texts
from gpunode.catalog.read import Document, Problem, dotted, location_of, read, section
from gpunode.catalog.rows import Source, first_day, no_such, typed_row
from gpunode.errors import UsageError

FILES: Mapping[str, Mapping[str, type[BaseModel]]] = {
    "sources.yml": {"sources": Source},
    "gpus.yml": {
        "architectures": hardware.Architecture,
        "chips": hardware.Chip,
        "gpus": hardware.Gpu,
        "pci_parts": hardware.PciPart,
    },
    "drivers.yml": {"branches": software.Branch},
    "cuda.yml": {
        "cuda_majors": software.CudaMajor,
        "toolkits": software.Toolkit,
        "forward_compat": software.ForwardCompat,
    },
    "libraries.yml": {
        "cudnn": software.Cudnn,
        "nccl": software.Nccl,
        "dcgm": software.Dcgm,
        "container_toolkit": software.ContainerToolkit,
        "container_engines": software.ContainerEngine,
        "frameworks": software.Framework,
        "wheels": software.WheelArchitectures,
        "workload_images": software.WorkloadImage,
        "kubernetes": software.Kubernetes,
    },
    "packages.yml": {
        "systems": software.System,
        "packages": software.PackageSet,
        "pinning": software.Pinning,
        "kernel_flavours": software.KernelFlavour,
    },
    "platforms.yml": {"platforms": hardware.Platform},
    "xids.yml": {"xids": hardware.Xid},
    "messages.yml": {"messages": software.ErrorMessage},
    "expectations.yml": {"expectations": hardware.ExpectedFigure, "bands": hardware.Band},
}
"""The package's files, their sections, the model of each section's rows. An overlay may contain any of the sections."""

MODELS: Mapping[str, type[BaseModel]] = {name: model for kinds in FILES.values() for name, model in kinds.items()}

BY_VERSION = ("branches", "toolkits", "container_toolkit")
"""Sections that are sorted, newest first: an overlay's rows are inserted in this order."""

INHERITED: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "gpus": ("architecture", "architectures", ("modules", "first_branch", "last_branch")),
    "platforms": (
        "board",
        "platforms",
        ("gpus", "hosts", "nvswitch", "nvswitches", "services", "kernel_modules", "min_driver"),
    ),
}
"""Sections with rows that inherit fields from another row: the field that names it, its section, the inherited
fields."""

STALE_DAYS = 90
"""In drivers.yml the eight branches of 2025 and 2026 came 92 days apart on average, and the releases of 580 every 23
days: an older catalog lacks a branch."""

R = TypeVar("R", bound=BaseModel)


def inherit(name: str, rows: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Fill fields that a row inherits: a GPU from its architecture, a platform from its board."""
    if name not in INHERITED:
        return rows
    link, section_of_parents, fields = INHERITED[name]
    parents = rows if section_of_parents == name else others[section_of_parents]
    full = {}
    for key, row in rows.items():
        parent = parents.get(str(row.get(link))) if isinstance(row, Mapping) else None
        if isinstance(parent, Mapping):
            taken = {field: parent[field] for field in fields if parent.get(field) is not None}
            full[key] = {**taken, **row}
        else:
            full[key] = row
    return full


@cache
def _packaged(file: str) -> Document:
    """Return one of the package's files, which no run changes."""
    with as_file(files("gpunode.catalog").joinpath(file)) as path:
        return read(path, f"gpunode/catalog/{file}")


class Catalog:
    """All facts. Sections are mappings from id to row, in the order of their file.

    Created by ``load``. Raises UsageError with ``file:line: key: what`` if a file that is read is malformed.
    """

    def __init__(self, overlays: Sequence[Document] = ()) -> None:
        self._overlays = tuple(overlays)
        self._sections: dict[str, Mapping[str, Any]] = {}
        self._raw: dict[str, dict[str, Any]] = {}

    def documents(self, name: str) -> tuple[Document, ...]:
        """Return the files that may contain rows of a section, the package's first."""
        for file, kinds in FILES.items():
            if name in kinds:
                return (_packaged(file), *self._overlays)
        raise KeyError(name)

    @property
    def overlays(self) -> tuple[Document, ...]:
        """Return the user's own files."""
        return self._overlays

    def raw(self, name: str) -> dict[str, Any]:
        """Return a section as text: overlays merged, defaults and inherited fields filled in."""
        if name not in self._raw:
            if name == "gpus":
                self._raw[name] = self._with_architecture(section(self.documents(name), name, self._from_pci_ids()))
            else:
                self._raw[name] = inherit(name, section(self.documents(name), name), {})
        return self._raw[name]

    def _with_architecture(self, gpus: dict[str, Any]) -> dict[str, Any]:
        gpus = {key: _with_listing(row) for key, row in gpus.items()}
        return inherit("gpus", gpus, {"architectures": section(self.documents("architectures"), "architectures")})

    def _from_pci_ids(self) -> dict[str, Any]:
        """Return rows of the GPUs that no catalog file has; an id that a file has is excluded."""
        written = section(self.documents("gpus"), "gpus")
        chips = section(self.documents("chips"), "chips")
        return pci_ids.rows(pci_ids.table(), chips, written, pci_ids.table_date())

    def rows(self, name: str) -> Mapping[str, Any]:
        """Return a section's rows by id."""
        if name not in self._sections:
            rows = self._typed(name, self.raw(name))
            self._sections[name] = dict(sorted(rows.items(), key=_newest_first)) if name in BY_VERSION else rows
        return self._sections[name]

    def validated(self, name: str) -> tuple[Mapping[str, Any], list[Problem]]:
        """Return a section's valid rows, and the problems of the others."""
        return self._validated(name, self.raw(name))

    def _typed(self, name: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        rows, problems = self._validated(name, raw)
        if problems:
            raise UsageError(str(problems[0]))
        return rows

    def _validated(self, name: str, raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Problem]]:
        rows, problems = {}, []
        for key, fields in raw.items():
            row, wrong = typed_row(MODELS[name], key, fields, name, self.documents(name))
            if row is not None:
                rows[key] = row
            problems += self._without_parent(name, key, fields, wrong) if wrong else []
        return rows, problems

    def _without_parent(self, name: str, key: str, fields: Any, wrong: list[Problem]) -> list[Problem]:
        """Return the problems of a row; if it names no row to inherit from, that name in place of the inherited
        fields."""
        if name not in INHERITED or not isinstance(fields, Mapping):
            return wrong
        link, parents, taken = INHERITED[name]
        known = section(self.documents(parents), parents)
        if fields.get(link) is None or str(fields[link]) in known:
            return wrong
        where = (name, key, link)
        file, line = location_of(self.documents(name), where)
        untaken = {dotted((name, key, field)) for field in taken}
        rest = [problem for problem in wrong if problem.rule != "missing-key" or problem.key not in untaken]
        message = no_such(parents.rstrip("s"), str(fields[link]), known)
        return [Problem(file, line, dotted(where), message, "reference"), *rest]

    def prepare(self) -> None:
        """Read what judging a node with GPUs needs, so that processes forked from this one find it read."""
        of_node = ("architectures", "branches", "pci_parts", "platforms")
        of_workload = ("cuda_majors", "cudnn", "forward_compat", "nccl", "wheels")
        for name in (*of_node, *of_workload):
            self.rows(name)
        origins.table()
        self._described_index.by_pci("10de:0000", None)

    @property
    def sources(self) -> Mapping[str, Source]:
        """Return the sources that rows name in ``source``."""
        return self.rows("sources")

    @property
    def chips(self) -> Mapping[str, hardware.Chip]:
        """Return the GPU chips by their name in ``pci.ids``."""
        return self.rows("chips")

    @property
    def architectures(self) -> Mapping[str, hardware.Architecture]:
        """Return the GPU architectures, oldest first; callers rely on the order."""
        return self.rows("architectures")

    @property
    def gpus(self) -> Mapping[str, hardware.Gpu]:
        """Return the GPU models."""
        return self.rows("gpus")

    @property
    def pci_parts(self) -> Mapping[str, hardware.PciPart]:
        """Return the NVSwitches and bridges."""
        return self.rows("pci_parts")

    @property
    def branches(self) -> Mapping[str, software.Branch]:
        """Return the driver branches, newest first."""
        return self.rows("branches")

    @property
    def cuda_majors(self) -> Mapping[str, software.CudaMajor]:
        """Return the CUDA majors with their driver floors."""
        return self.rows("cuda_majors")

    @property
    def toolkits(self) -> Mapping[str, software.Toolkit]:
        """Return the CUDA toolkits, newest first."""
        return self.rows("toolkits")

    @property
    def forward_compat(self) -> Mapping[str, software.ForwardCompat]:
        """Return the cuda-compat packages by CUDA series."""
        return self.rows("forward_compat")

    @property
    def cudnn(self) -> Mapping[str, software.Cudnn]:
        """Return the cuDNN series."""
        return self.rows("cudnn")

    @property
    def nccl(self) -> Mapping[str, software.Nccl]:
        """Return the NCCL releases."""
        return self.rows("nccl")

    @property
    def dcgm(self) -> Mapping[str, software.Dcgm]:
        """Return the DCGM series."""
        return self.rows("dcgm")

    @property
    def container_toolkit(self) -> Mapping[str, software.ContainerToolkit]:
        """Return the container toolkit releases, newest first."""
        return self.rows("container_toolkit")

    @property
    def container_engines(self) -> Mapping[str, software.ContainerEngine]:
        """Return the CDI support of Docker, Podman and containerd."""
        return self.rows("container_engines")

    @property
    def frameworks(self) -> Mapping[str, software.Framework]:
        """Return the PyTorch and TensorFlow series."""
        return self.rows("frameworks")

    @property
    def wheels(self) -> Mapping[str, software.WheelArchitectures]:
        """Return the compute capabilities in PyTorch wheels."""
        return self.rows("wheels")

    @property
    def workload_images(self) -> Mapping[str, software.WorkloadImage]:
        """Return the images in which a workload is run, newest first."""
        return self.rows("workload_images")

    @property
    def kubernetes(self) -> Mapping[str, software.Kubernetes]:
        """Return the device plugin and the GPU operator."""
        return self.rows("kubernetes")

    @property
    def systems(self) -> Mapping[str, software.System]:
        """Return the operating systems."""
        return self.rows("systems")

    @property
    def packages(self) -> Mapping[str, software.PackageSet]:
        """Return the package names."""
        return self.rows("packages")

    @property
    def pinning(self) -> Mapping[str, software.Pinning]:
        """Return the pinning mechanisms."""
        return self.rows("pinning")

    @property
    def kernel_flavours(self) -> Mapping[str, software.KernelFlavour]:
        """Return the kernel packages of Ubuntu by flavour."""
        return self.rows("kernel_flavours")

    @property
    def platforms(self) -> Mapping[str, hardware.Platform]:
        """Return boards, servers and cloud shapes."""
        return self.rows("platforms")

    @property
    def xids(self) -> Mapping[str, hardware.Xid]:
        """Return the Xid errors by number as text."""
        return self.rows("xids")

    @property
    def messages(self) -> Mapping[str, software.ErrorMessage]:
        """Return error texts of programs, with their meaning."""
        return self.rows("messages")

    @property
    def expectations(self) -> Mapping[str, hardware.ExpectedFigure]:
        """Return the expected figures."""
        return self.rows("expectations")

    @property
    def bands(self) -> Mapping[str, hardware.Band]:
        """Return the shares of physical limits."""
        return self.rows("bands")

    @cached_property
    def _described(self) -> Mapping[str, hardware.Gpu]:
        """Return the GPU models of the package's file if no overlay changes them; most look-ups need no other."""
        if self._overlays:
            return self.gpus
        rows = self._with_architecture(section(self.documents("gpus"), "gpus"))
        return self._typed("gpus", rows)

    @cached_property
    def _described_index(self) -> GpuIndex:
        return GpuIndex(self._described.values())

    @cached_property
    def _gpu_index(self) -> GpuIndex:
        return GpuIndex(self.gpus.values())

    def gpu_by_pci(self, device_id: str, subsystem_id: str | None = None) -> GpuMatch | None:
        """Return the GPU model of a PCI id (``10de:2330`` or ``2330``); None if the catalog has none."""
        described = self._described_index.by_pci(device_id, subsystem_id)
        return described or self._gpu_index.by_pci(device_id, subsystem_id)

    def models_of(self, ids: Iterable[tuple[str, str | None]]) -> tuple[hardware.Gpu, ...]:
        """Return every model that GPUs with these PCI ids and subsystem ids may be."""
        matches = [self.gpu_by_pci(device_id, subsystem_id) for device_id, subsystem_id in ids]
        return tuple(gpu for match in matches if match is not None for gpu in match.gpus)

    def gpu_by_product_name(self, name: str) -> GpuMatch | None:
        """Return the GPU models that print exactly this product name; None if the catalog has none."""
        return self._described_index.by_product(name)

    def find_gpu(self, text: str) -> GpuMatch:
        """Return the models that a GPU's name stands for; raise UsageError with the nearest known names if there is
        none."""
        return self._described_index.known(text) or self._gpu_index.find(text)

    def gpu(self, gpu_id: str) -> hardware.Gpu:
        """Return a GPU model by its id."""
        return self._described.get(gpu_id) or _get(self.gpus, gpu_id, "GPU model")

    def platform(self, name: str) -> hardware.Platform:
        """Return a platform by id, name or alias; raise UsageError with the nearest known names."""
        return _named(self.platforms, name, "platform", lambda row: (row.id, row.name, *row.aliases))

    def platforms_with(self, gpus: Mapping[str, int]) -> tuple[hardware.Platform, ...]:
        """Return the platforms that have exactly these GPUs (id → number), boards and servers before cloud shapes."""
        requested = dict(gpus)
        platforms = [row for row in self.platforms.values() if row.gpus == requested]
        return tuple(sorted(platforms, key=lambda row: row.kind == "cloud"))

    def os(self, name: str) -> software.System:
        """Return an operating system by id, codename, alias or NVIDIA's directory name; raise UsageError with the
        nearest."""
        return _named(self.systems, name, "operating system", _system_names)

    def os_of(self, os_id: str, version_id: str | None) -> software.System | None:
        """Return the system of os-release's ID and VERSION_ID (``rocky``, ``9.4`` is rhel-9); None if unknown."""
        for row in self.systems.values():
            same = os_id == row.os or os_id in row.like
            if (
                same
                and version_id is not None
                and (version_id == row.version or version_id.startswith(f"{row.version}."))
            ):
                return row
        return None

    def branch(self, name: str | int) -> software.Branch:
        """Return a driver branch by its number; raise UsageError with the known ones."""
        return _get(self.branches, str(name).upper().removeprefix("R"), "driver branch")

    def branch_of(self, version: str) -> software.Branch:
        """Return the branch of a driver version, which is its first number."""
        return self.branch(version.split(".", maxsplit=1)[0])

    def toolkit(self, name: str) -> software.Toolkit:
        """Return a CUDA toolkit by version, or the newest one of a series (``13.0``); raise UsageError with the
        nearest.

        A CUDA that exists only in a driver (12.7) is a row with ``driver_only``.
        """
        if name in self.toolkits:
            return self.toolkits[name]
        series = [row for row in self.toolkits.values() if row.series == name]
        if series:
            return max(series, key=lambda row: Number(row.id))
        carried = [row for row in self.branches.values() if row.native_cuda == name]
        if carried:
            first = min(carried, key=lambda row: row.number)
            return software.Toolkit(
                id=name, label=name, branch=first.number, driver_only=True, source=first.source, date=first.date
            )
        return _get(self.toolkits, name, "CUDA toolkit")

    @cached_property
    def read_on(self) -> date:
        """Return the day on which drivers or toolkits were last checked against a source, which may be an index."""
        days = [row.date for rows in (self.branches, self.toolkits) for row in rows.values()]
        for document in self._overlays:
            rows = document.sections.get("sources")
            named = rows.items() if isinstance(rows, Mapping) else ()
            days += [row["date"] for key, row in named if key.startswith("index-") and isinstance(row, Mapping)]
        return max(first_day(day) for day in days)

    def stale(self, today: date) -> str | None:
        """Return a sentence if the catalog is older than ``STALE_DAYS``; else None."""
        age = (today - self.read_on).days
        if age <= STALE_DAYS:
            return None
        return (
            f"the catalog is of {self.read_on}, {age} days before {today}: drivers released since are unknown: "
            "install a newer gpunode, or add them in an overlay (docs/catalog.md)"
        )

    def xid(self, number: int) -> hardware.Xid | None:
        """Return an Xid by number."""
        return self.xids.get(str(number))


def _with_listing(row: Any) -> Any:
    """Return a raw row of a GPU with the releases of NVIDIA's open modules that list it, if it has none of its own."""
    if not isinstance(row, Mapping) or "first_listed" in row or not row.get("source"):
        return row
    listing = open_modules.fields(texts(row.get("pci")), texts(row.get("subsystems")))
    if not listing:
        return row
    unsure = row.get("unsure", {})
    if row.get("known_from") == "pci.ids" and isinstance(unsure, Mapping):
        unsure = {"first_listed": "the list omits a few ids that its driver supports (T4)", **unsure}
    return {**row, **listing, "unsure": unsure, "source": [*texts(row.get("source")), open_modules.SOURCE]}


def _newest_first(item: tuple[str, Any]) -> Any:
    return tuple(-part for part in Number(item[0]).release)


def _system_names(row: software.System) -> tuple[str, ...]:
    directory = row.origins["nvidia"].repository if "nvidia" in row.origins else None
    others = tuple(f"{name}-{row.version}" for name in row.like)
    extra = tuple(name for name in (row.codename, directory) if name)
    return (row.id, row.name, *row.aliases, *others, *extra)


def _get(rows: Mapping[str, R], name: str, kind: str) -> R:
    if name in rows:
        return rows[name]
    raise UsageError(f"the catalog has no {kind} {name!r}; {similar(name, {key: key for key in rows})}")


def _named(rows: Mapping[str, R], name: str, kind: str, names: Callable[[R], Iterable[str]]) -> R:
    shown: dict[str, str] = {}
    for key, row in rows.items():
        for text in names(row):
            if normal(text) == normal(name):
                return row
            shown.setdefault(normal(text), key)
    raise UsageError(f"the catalog has no {kind} {name!r}; {similar(normal(name), shown)}")
