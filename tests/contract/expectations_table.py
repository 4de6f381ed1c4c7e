"""The table of docs/expectations.md: ``python tests/contract/expectations_table.py`` writes it, a test compares."""

import re
from pathlib import Path

from gpunode.catalog import Catalog
from gpunode.checks.figures import GROSS
from gpunode.expectations import Figure, Mark, MarkRules, PhysicalLimit, Shape, limit_of, marks_of, of_platform
from gpunode.expectations.limits import Where

PAGE = Path(__file__).parents[2] / "docs/expectations.md"
START = "<!-- table of expectations: written by tests/contract/expectations_table.py -->\n"
END = "<!-- end of the table of expectations -->\n"
COLUMNS = {
    "host to GPU": ("host_to_device", Where()),
    "GPU to GPU": ("peer_to_peer", Where(0, 1)),
    "memory": ("memory_read", Where()),
    "bf16": ("gemm_bf16", Where()),
    "all-reduce": ("all_reduce_busbw", Where()),
}
LARGE = 16 * 2**30
_ROW = re.compile(r"expectations\.yml (\S+): ")


def page(catalog: Catalog) -> str:
    """Return the page with the table as it is now."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    assert start
    assert end
    head = f"| platform | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}\n"
    rows = "".join(row(catalog, name) for name in catalog.platforms)
    return before + START + head + rows + END + after


def row(catalog: Catalog, name: str) -> str:
    """Return one line of the table."""
    shape = of_platform(catalog, catalog.platforms[name])
    cells = [cell(catalog, shape, metric, where) for metric, where in COLUMNS.values()]
    return f"| {name} | {' | '.join(cells)} |\n".replace("|  |", "| |").replace("|  |", "| |")


def cell(catalog: Catalog, shape: Shape, metric: str, where: Where) -> str:
    """Return limit and marks: ``57.6; 48 host-h100-sxm; 46.1 copy-pcie``."""
    if where.peer is not None and shape.count < 2:
        return ""
    rated = Where(where.gpu, where.peer, clock_mhz=rated_clock(shape)) if metric.startswith("gemm") else where
    limit = limit_of(metric, shape, rated)
    rules = MarkRules(gross=GROSS.default, gross_origin=f"expectations.yml {GROSS.name}: ")
    marks = marks_of(Figure(metric, 0.0, rated, LARGE), shape, catalog, rules)
    failing = max((mark for mark in marks if mark.fails), key=lambda mark: mark.value, default=None)
    warning = max((mark for mark in marks if not mark.fails), key=lambda mark: mark.value, default=None)
    if failing is not None and warning is not None and warning.value <= failing.value:
        warning = None
    parts = [in_words(limit), f"fails {mark_in_words(failing)}", f"warns {mark_in_words(warning)}"]
    return "; ".join(part for part in parts if part and not part.endswith(" "))


def rated_clock(shape: Shape) -> float | None:
    """Return the clock at which the peak of the model's tensor cores is quoted."""
    gpu = shape.gpu
    return None if gpu is None or gpu.tflops is None else gpu.tflops.clock_mhz or gpu.sm_clock_mhz


def in_words(limit: PhysicalLimit | None) -> str:
    """Return a limit; with a question mark where it is unsure."""
    return "" if limit is None else f"{limit.value:.4g}{'' if limit.sure else '?'} {limit.path}"


def mark_in_words(mark: Mark | None) -> str:
    """Return a mark with the catalog's row that it is from."""
    if mark is None:
        return ""
    found = _ROW.search(mark.origin)
    return f"{mark.value:.4g} ({found[1] if found else mark.origin})"


if __name__ == "__main__":
    PAGE.write_text(page(Catalog()), encoding="utf-8")
