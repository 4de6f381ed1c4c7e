"""Rules about bounds: fields that the resolver needs to refuse a plan, and figures that must be consistent."""

from packaging.version import Version as Number

from gpunode.catalog.hardware import Gpu
from gpunode.catalog.lint_rules import Found, Rows, rule
from gpunode.catalog.rows import Row

NVLINK_GB_PER_S = {1: (40.0,), 2: (50.0,), 3: (50.0, 28.125), 4: (50.0,), 5: (100.0,)}
"""One link, both directions, by generation; GA102 has the slower links of the third."""
ARCHIVES = ("ubuntu", "debian")


def _admits(row: Row, *fields: str) -> bool:
    """Return True if the row itself lists one of the fields as unknown, with a reason."""
    return row.confidence != "sure" or any(name.split(".")[-1] in fields or name in fields for name in row.unsure)


@rule("required-bound")
def required(rows: Rows) -> Found:
    """Check that branches have CUDA and end of life, GPUs their first release, repositories first branch and toolkit.

    Unknown values are listed in ``unsure`` with the reason.
    """
    for row in rows["branches"].values():
        if row.native_cuda is None and not _admits(row, "native_cuda"):
            yield (
                ("branches", row.id),
                "native_cuda is missing: the GPUs that the branch supports are unknown",
            )
        ended = row.eol is not None or row.superseded_by is not None
        if not ended and not _admits(row, "eol_vendor", "eol_computed"):
            yield ("branches", row.id), "eol_vendor, eol_computed or superseded_by is missing"
    for row in rows["gpus"].values():
        if row.known_from == "sources" and not _has_floor(row) and not _admits(row, "first_listed"):
            yield ("gpus", row.id), "first_listed, first_branch or min_driver is missing: which release first drives it"
    for row in rows["systems"].values():
        for name, offer in row.origins.items():
            where = f"origins.{name}"
            if offer.first_branch is None and not offer.branches and not _admits(row, where):
                yield ("systems", row.id, "origins", name), "first_branch or branches is missing"
            if name not in ARCHIVES and offer.first_toolkit is None and not _admits(row, where):
                yield ("systems", row.id, "origins", name), "first_toolkit is missing"


def _has_floor(gpu: Gpu) -> bool:
    return bool(gpu.first_listed) or gpu.first_branch is not None or gpu.min_driver is not None


@rule("nvlink-rate")
def nvlink_rate(rows: Rows) -> Found:
    """Check that the links of a GPU times the rate of its generation equal its total."""
    for row in rows["gpus"].values():
        link = row.nvlink
        if link is None or link.gen not in NVLINK_GB_PER_S:
            continue
        totals = [rate * link.links for rate in NVLINK_GB_PER_S[link.gen]]
        if link.gb_per_s not in totals and link.gb_per_s >= min(NVLINK_GB_PER_S[link.gen]):
            expected = " or ".join(f"{total:g}" for total in totals)
            what = f"{link.gb_per_s:g} is not what {link.links} links of generation {link.gen} carry: {expected}"
            key = ("gpus", row.id, "nvlink")
            yield (*key, "gb_per_s"), what, ((*key, "links"), (*key, "gen"))


@rule("toolkit-driver")
def toolkit_driver(rows: Rows) -> Found:
    """Check that the driver released with a toolkit is among the releases of its branch."""
    for row in rows["toolkits"].values():
        field = "runfile_driver" if row.runfile_driver else "driver"
        version, branch = getattr(row, field), rows["branches"].get(str(row.branch))
        if version is None or branch is None or not version.startswith(f"{branch.id}."):
            continue  # a version of another branch violates a rule of its own
        if not any(Number(version) == Number(point) for point in branch.points) and field not in row.unsure:
            compared = (("branches", branch.id, "points"),)
            yield ("toolkits", row.id, field), f"{version} is not a release of branch {branch.id}", compared
