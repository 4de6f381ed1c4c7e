"""Properties of a node that limit its performance, as input of the expectations."""

import re

from gpunode.checks.gpus import SeenGpu, listed_gpus
from gpunode.checks.links import GENERATIONS, port_above
from gpunode.checks.machine import nvswitches, platforms
from gpunode.expectations import Shape
from gpunode.expectations.shape import Pair
from gpunode.facts.node import NodeFacts

NVLINKS = re.compile(r"NV(\d{1,3})")


def shape_of(node: NodeFacts) -> Shape:
    """Return the node's shape by nvidia-smi, the bus and the catalog."""
    gpus = listed_gpus(node)
    models = {gpu.match.gpu.id: gpu.match.gpu for gpu in gpus if gpu.match and gpu.match.gpu}
    known = len(models) == 1 and all(gpu.match and gpu.match.gpu for gpu in gpus)
    rows = platforms(node)
    return Shape(
        gpu=next(iter(models.values())) if known else None,
        count=len(gpus),
        nvswitch=bool(nvswitches(node)) or any(row.nvswitches for row in rows) or _in_rack(gpus),
        links=links_of(node, gpus),
        pcie={gpu.reported.index: link for gpu in gpus if (link := _pcie(node, gpu)) is not None},
        platforms=frozenset(name for row in rows for name in (row.id, row.board) if name is not None),
    )


def _in_rack(gpus: list[SeenGpu]) -> bool:
    return any(gpu.known.get("fabric") == "rack" for gpu in gpus)


def _pcie(node: NodeFacts, gpu: SeenGpu) -> tuple[int, int] | None:
    """Return generation and width that both ends support; None if nvidia-smi does not print them."""
    gen, lanes = gpu.reported.pcie.gen_max, gpu.reported.pcie.width_max
    if not gen or not lanes:
        return None
    width = int(lanes)
    port = port_above(node, gpu.device) if gpu.device is not None else None
    above = port.link if port is not None else None
    if above is not None and above.width_max:
        width = min(width, above.width_max)
    if above is not None and above.speed_max_gt_per_s in GENERATIONS:
        gen = min(gen, GENERATIONS[above.speed_max_gt_per_s])
    return gen, width


def links_of(node: NodeFacts, gpus: list[SeenGpu]) -> dict[Pair, int] | None:
    """Return the NVLinks between every two GPUs by ``nvidia-smi topo -m``; None without the whole matrix."""
    by_pair: dict[Pair, int] = {}
    indices = sorted(gpu.reported.index for gpu in gpus)
    for position, first in enumerate(indices):
        for second in indices[position + 1 :]:
            cell = node.gpu_links.get(f"GPU{first}", {}).get(f"GPU{second}")
            if cell is None:
                return None
            links = NVLINKS.fullmatch(cell)
            by_pair[first, second] = int(links[1]) if links else 0
    return by_pair
