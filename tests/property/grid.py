"""The questions of the property test: every GPU, platform, system, branch and CUDA, and a thinned choice of them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import product
from typing import Any

from checker import Case, Facts

from gpunode.catalog import Catalog
from gpunode.stack import GpuGroup, Installed, NodePicture, Request
from gpunode.stack.model import InstalledPackage

TODAY = date(2026, 11, 20)
EARLIER = date(2026, 1, 15)
"""When 535 and 570 were not past their end of life, so that cuda-compat packages were an answer."""
CUDA = (None, "11.4", "11.8", "12.2", "12.6", "12.8", "12.9", "13.0", "13.2", "13.4", "13.5")
WORDS = (None, "lts", "production", "newest")
POINTS = ("535.54.03", "570.86.15", "570.124.06", "575.51.02", "580.65.06", "580.95.05", "550.40.07", "525.53")
KERNELS = (None, "4.4.0-210-generic", "5.10.0-30-amd64", "6.8.0-60-generic", "6.8.0-1009-aws")
ON_NODE = (
    (),
    (("nvidia-kernel-dkms", "535.261.03-1", "debian"),),
    (("nvidia-dkms-580-open", "580.95.05-1", "nvidia"), ("libnvidia-compute-580", "580.95.05-1", "nvidia")),
    (
        ("nvidia-dkms-580-open", "580.95.05-1", "nvidia"),
        ("libnvidia-compute-580", "580.126.09-0ubuntu0.24.04.1", "ubuntu"),
    ),
)


@dataclass(frozen=True)
class Asked:
    """One question, as the resolver takes it and as the checker takes it."""

    request: Request
    node: NodePicture
    case: Case


class Grid:
    """All questions over one catalog and one compat.yml."""

    def __init__(self, catalog: Catalog, facts: Facts) -> None:
        self.catalog = catalog
        self.gpus = sorted(pci for pci in facts.gpus if catalog.gpu_by_pci(pci, self._subsystem(facts, pci)))
        self.facts = facts

    def _subsystem(self, facts: Facts, pci: str) -> str | None:
        subsystem: str | None = facts.gpus[pci].get("pci_subsystem_id")
        return subsystem

    def group(self, pci: str, count: int | None) -> GpuGroup:
        """The GPUs of one PCI id."""
        match = self.catalog.gpu_by_pci(pci, self._subsystem(self.facts, pci))
        assert match is not None, f"{pci} of compat.yml is not in the catalog"
        return GpuGroup(label=match.gpus[0].name, models=tuple(gpu.id for gpu in match.gpus), count=count)

    def nodes(self) -> Iterator[tuple[NodePicture, tuple[tuple[str, int | None], ...]]]:
        """Every GPU alone, unnumbered and eight times, every platform, and pairs that may or may not go together."""
        for pci, count in product(self.gpus, (None, 1, 8)):
            yield NodePicture(gpus=(self.group(pci, count),)), ((pci, count),)
        for platform in self.catalog.platforms.values():
            pairs = tuple((self.catalog.gpu(gpu).pci[0], count) for gpu, count in platform.gpus.items())
            if all(pci in self.facts.gpus for pci, _ in pairs):
                yield NodePicture(platform=platform.id), pairs
        for first, second in zip(self.gpus, self.gpus[7:] + self.gpus[:7], strict=True):
            group, other = self.group(first, 1), self.group(second, 1)
            if group.label != other.label:
                yield NodePicture(gpus=(group, other)), ((first, 1), (second, 1))
        yield NodePicture(), ()

    def drivers(self) -> tuple[str | None, ...]:
        """Every word, every branch, some releases."""
        return (*WORDS, *self.catalog.branches, *POINTS)

    def thinned(self, one_in: int) -> Iterator[Asked]:
        """GPUs x platforms x systems x branches x CUDA: of each run of so many questions one, chosen by a hash.

        The other requests take turns by a hash of the question, so that all of them meet all.
        """
        nodes, systems, drivers = list(self.nodes()), (*self.catalog.systems, None), self.drivers()
        for first in range(0, len(nodes) * len(systems) * len(drivers) * len(CUDA), one_in):
            number = first + int.from_bytes(hashlib.sha256(str(first).encode()).digest()[:4], "big") % one_in
            number, cuda = divmod(number, len(CUDA))
            number, driver = divmod(number, len(drivers))
            number, system = divmod(number, len(systems))
            if number < len(nodes):
                yield self.question(*nodes[number], systems[system], drivers[driver], CUDA[cuda])

    def question(
        self,
        node: NodePicture,
        pairs: tuple[tuple[str, int | None], ...],
        system: str | None,
        driver: str | None,
        cuda: str | None,
    ) -> Asked:
        """One question with the less important requests taken from a hash of the others."""
        seed = hashlib.sha256(f"{node}{system}{driver}{cuda}".encode()).digest()
        sources = [None, *(self.catalog.systems[system].origins if system else ("nvidia",))]
        return asked(
            self,
            {
                "node": node,
                "pairs": pairs,
                "today": EARLIER if seed[6] % 4 == 0 else TODAY,
                "os": system,
                "arch": (None, "x86_64", "aarch64")[seed[0] % 3],
                "kernel": KERNELS[seed[1] % len(KERNELS)] if seed[1] % 2 else None,
                "source": sources[seed[2] % len(sources)],
                "driver": driver,
                "cuda": cuda,
                "toolkit": cuda if seed[3] % 4 == 0 else None,
                "kernel_module": (None, None, None, "open", "proprietary")[seed[4] % 5],
                "past_eol": "refuse" if seed[5] % 8 == 0 else "warn",
                "installed": ON_NODE[seed[7] % len(ON_NODE)] if seed[7] % 3 == 0 else (),
            },
        )


def asked(grid: Grid, requested: dict[str, Any]) -> Asked:
    """A question from its parts: ``node`` with ``pairs``, or ``gpus`` by name with a ``count``."""
    node, pairs = requested.get("node"), requested.get("pairs", ())
    if node is None:
        ids = [grid.catalog.find_gpu(name).gpus[0].pci[0] for name in requested["gpus"]]
        pairs = tuple((pci, requested.get("count", 1)) for pci in ids)
        node = NodePicture(gpus=tuple(grid.group(pci, count) for pci, count in pairs))
    packages = requested.get("installed", ())
    versions = {version.split("-")[0] for _, version, _ in packages}
    installed = Installed(
        version=versions.pop() if len(versions) == 1 else None,
        packages=tuple(
            InstalledPackage(name=name, version=version, origin=origin, closure=origin)
            for name, version, origin in packages
        ),
    )
    system: dict[str, Any] = {name: requested.get(name) for name in ("os", "arch", "kernel")}
    requests: dict[str, Any] = {
        name: requested.get(name) for name in ("source", "driver", "cuda", "toolkit", "kernel_module", "kernel_policy")
    }
    requests["past_eol"] = requested.get("past_eol", "warn")
    picture = node.model_dump() | system | {"installed": installed if packages else None}
    on_node = tuple((name, origin) for name, _, origin in packages)
    return Asked(
        Request.model_validate(requests),
        NodePicture.model_validate(picture),
        Case(today=requested["today"], gpus=pairs, installed=on_node, **system, **requests),
    )
