"""Properties of a machine that limit its performance: its GPUs and their links."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpunode.catalog import Catalog, Gpu, Platform

Pair = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """One node, or one node of several equal ones."""

    gpu: Gpu | None
    """The model of its GPUs; None: they are not all one model of the catalog."""
    count: int
    """Number of its GPUs."""
    nvswitch: bool = False
    """True if NVSwitches are on its board or in its rack."""
    links: Mapping[Pair, int] | None = None
    """NVLinks between two GPUs, the lower index first; 0: none. None: unknown."""
    pcie: Mapping[int, tuple[int | None, int | None]] = field(default_factory=dict)
    """Generation and width of a GPU's PCIe link that both ends support; default: its model's."""
    platforms: frozenset[str] = frozenset()
    """Ids of the catalog's platforms that it may be."""
    network_gb_per_s: float | None = None
    """Rate of all adapters for GPU traffic, in one direction; None: unknown."""
    network_sure: bool = True

    def links_between(self, first: int, second: int) -> int | None:
        """Return the NVLinks between two GPUs, behind NVSwitches those of one GPU; None if they are unknown."""
        if self.nvswitch and self.gpu is not None and self.gpu.nvlink is not None:
            return self.gpu.nvlink.links
        if self.links is None:
            return None
        return self.links.get((min(first, second), max(first, second)))

    @property
    def ring_of_nvlinks(self) -> bool | None:
        """Return whether NVLinks form a ring over all GPUs; None if the links are unknown.

        Switches and meshes do, and so does a cube of eight, in which not every two GPUs are linked. Bridged pairs and
        islands of four do not.
        """
        if self.nvswitch:
            return True
        if self.links is None:
            return None
        near: dict[int, set[int]] = {}
        for (first, second), number in self.links.items():
            if number:
                near.setdefault(first, set()).add(second)
                near.setdefault(second, set()).add(first)
        reached, waiting = set[int](), [*near][:1]
        while waiting:
            gpu = waiting.pop()
            reached.add(gpu)
            waiting += near[gpu] - reached
        return len(reached) == self.count > 1 and all(len(others) >= min(2, self.count - 1) for others in near.values())


def of_platform(catalog: Catalog, platform: Platform) -> Shape:
    """Return the shape of a platform of the catalog, as described by its rows."""
    ids = list(platform.gpus)
    gpu = catalog.gpus[ids[0]] if len(ids) == 1 else None
    rate = platform.nic_rate_gbit_per_s
    return Shape(
        gpu=gpu,
        count=platform.gpu_count,
        nvswitch=platform.nvswitches > 0 or (gpu is not None and gpu.fabric == "rack"),
        links=_links(gpu, platform),
        platforms=frozenset({platform.id, *([platform.board] if platform.board else [])}),
        network_gb_per_s=rate * platform.nics / 8 if rate is not None and platform.nics is not None else None,
        network_sure=platform.sure("nics") and platform.sure("nic_rate_gbit_per_s"),
    )


def _links(gpu: Gpu | None, platform: Platform) -> dict[Pair, int] | None:
    """Return the links of a mesh of up to four GPUs with all links in use, and none for models without NVLink."""
    pairs = [(first, second) for first in range(platform.gpu_count) for second in range(first + 1, platform.gpu_count)]
    if gpu is None:
        return None
    if gpu.nvlink is None:
        return dict.fromkeys(pairs, 0)
    others = platform.gpu_count - 1
    meshed = gpu.nvlink.form == "sxm" and 1 <= others <= 3 and not platform.nvswitches
    # The position of bridges depends on the installation; a cube of eight V100 has pairs with two, one and no link.
    return dict.fromkeys(pairs, gpu.nvlink.links // others) if meshed else None
