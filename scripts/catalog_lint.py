"""Verify the catalog and overlays as their maintainer: all that gpunode refuses, and figures, dates and bounds.

    python scripts/catalog_lint.py [FILE …]

Prints one line per problem, with its rule; exit code 2 if there are any.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from packaging.version import Version as Number

from gpunode.catalog import Catalog, lint
from gpunode.catalog.hardware import ExpectedFigure, Gpu, Pcie, nvlink_gb_per_s, pcie_gb_per_s, tensor_tflops
from gpunode.catalog.lint import Found, Rows
from gpunode.catalog.read import Key, Problem, read
from gpunode.catalog.rows import Row, first_day, last_day
from gpunode.catalog.software import OriginOffer, PackageSet, Pinning
from gpunode.errors import Exit, GpunodeError
from gpunode.text import did_you_mean, nearest

NVLINK_GB_PER_S = {1: (40.0,), 2: (50.0,), 3: (50.0, 28.125), 4: (50.0,), 5: (100.0,)}
"""One link, both directions, by generation; GA102 has the slower links of the third."""
ARCHIVES = ("ubuntu", "debian")
RANGES: Mapping[tuple[str, str], tuple[float, float]] = {
    ("gpus", "memory_gb"): (1, 1000),
    ("gpus", "memory_mib"): (1000, 1_000_000),
    ("gpus", "memory_bandwidth_gb_per_s"): (50, 30_000),
    ("gpus", "power_w"): (10, 3000),
    ("gpus", "sm_clock_mhz"): (300, 5000),
    ("gpus", "memory_clock_mhz"): (300, 20_000),
    ("gpus", "mig_instances"): (0, 7),
    ("gpus", "nvlink.gb_per_s"): (50, 10_000),
    ("gpus", "nvlink.gen"): (1, 10),
    ("gpus", "pcie.gen"): (1, 8),
    ("gpus", "tflops.fp32"): (0.5, 1000),
    ("gpus", "tflops.bf16"): (1, 20_000),
    ("gpus", "tflops.fp16"): (1, 20_000),
    ("platforms", "nic_rate_gbit_per_s"): (1, 3200),
    ("platforms", "nics"): (1, 128),
    ("bands", "share"): (0.05, 1),
}
"""Plausible ranges: wide enough for years to come, too narrow for a value in another unit."""
BETA = timedelta(days=183)
"""The longest time between the first betas and a branch's release."""
IN_SWITCH = 1.1
"""With reductions in the switch, bus bandwidth was measured 7 % above the rate of the links."""

Rule = Callable[[Rows], Found]
RULES: dict[str, Rule] = dict(lint.RULES)


def rule(name: str) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as a rule of the linter."""

    def register(function: Rule) -> Rule:
        if name in RULES:
            raise ValueError(f"lint rule {name} is registered twice")
        RULES[name] = function
        return function

    return register


def problems(catalog: Catalog) -> list[Problem]:
    """Return all problems, by file and line; an empty list is a valid catalog."""
    return lint.lint(catalog, RULES)


@rule("unsure-field")
def unsure(rows: Rows) -> Found:
    """Check that ``unsure`` names fields of the row."""
    for section in rows:
        for row in rows[section].values():
            for name in getattr(row, "unsure", {}):
                if name.split(".", maxsplit=1)[0] not in type(row).model_fields:
                    hint = did_you_mean(nearest(name, type(row).model_fields))
                    yield (section, row.id, "unsure", name), f"is not a field of the row{hint and f'; {hint}'}"


def _at(row: Any, path: str) -> Any:
    for part in path.split("."):
        row = getattr(row, part, None)
    return row


@rule("range")
def ranges(rows: Rows) -> Found:
    """Check that each number is in its plausible range; a number in another unit mostly is not."""
    for (section, path), (low, high) in RANGES.items():
        for row in rows[section].values():
            value = _at(row, path)
            if value is not None and not low <= value <= high:
                message = f"{value:g} is outside {low:g} to {high:g}: check the unit"
                yield (section, row.id, *path.split(".")), message


@rule("memory")
def memory(rows: Rows) -> Found:
    """Check that nominal and printed memory agree: 80 GB is printed as 81920 MiB at most, less with ECC in the
    memory."""
    for row in rows["gpus"].values():
        if row.memory_gb and row.memory_mib and abs(row.memory_mib * 1.048576 / 1000 / row.memory_gb - 1) > 0.12:
            message = f"{row.memory_mib} MiB does not fit {row.memory_gb:g} GB"
            yield ("gpus", row.id, "memory_mib"), message, (("gpus", row.id, "memory_gb"),)


@rule("power")
def power(rows: Rows) -> Found:
    """Check that the default power limit is within the range of limits."""
    for row in rows["gpus"].values():
        if row.power_range_w is None:
            continue
        low, high = row.power_range_w
        per_gpu = None if row.power_w is None else row.power_w / row.gpus_per_board
        if low > high or (per_gpu is not None and not low <= per_gpu <= high):
            yield (
                ("gpus", row.id, "power_range_w"),
                f"{low:g} to {high:g} W does not hold power_w, {row.power_w or 0:g}",
                (("gpus", row.id, "power_w"), ("gpus", row.id, "gpus_per_board")),
            )


@rule("capability")
def capability(rows: Rows) -> Found:
    """Check that a GPU has a compute capability of its architecture, and that the architecture has its first CUDA."""
    for row in rows["gpus"].values():
        parent = rows["architectures"].get(row.architecture)
        if parent is not None and row.compute_capability not in parent.compute_capabilities:
            known = ", ".join(parent.compute_capabilities)
            yield (
                ("gpus", row.id, "compute_capability"),
                f"{row.compute_capability} is not one of {parent.name}: {known}",
                (("gpus", row.id, "architecture"), ("architectures", parent.id, "compute_capabilities")),
            )
    for row in rows["architectures"].values():
        if set(row.first_cuda) != set(row.compute_capabilities):
            message = "lists capabilities that differ from compute_capabilities"
            yield ("architectures", row.id, "first_cuda"), message, (("architectures", row.id, "compute_capabilities"),)


@rule("cuda-floor")
def cuda_floor(rows: Rows) -> Found:
    """Check that ``last_cuda`` of the architectures and ``min_compute_capability`` of the CUDA majors agree."""
    for arch in rows["architectures"].values():
        highest = max(map(Number, arch.compute_capabilities))
        for major in rows["cuda_majors"].values():
            known = arch.last_cuda is None or major.number <= arch.last_cuda
            if known != (highest >= Number(major.min_compute_capability)):
                verb = "supports" if known else "does not support"
                message = f"CUDA {major.id} {verb} {arch.name}, but requires capability {major.min_compute_capability}"
                compared = (("architectures", arch.id, "compute_capabilities"),)
                floor = ("cuda_majors", major.id, "min_compute_capability")
                yield ("architectures", arch.id, "last_cuda"), message, (*compared, floor)


@rule("version-branch")
def version_branch(rows: Rows) -> Found:
    """Check that a driver version belongs to the branch of its row: 580.95.05 to 580."""
    for key, branch, version in _versions(rows):
        if version is not None and version.split(".", maxsplit=1)[0] != str(branch):
            yield key, f"{version} is not a release of branch {branch}"


def _versions(rows: Rows) -> Iterator[tuple[Key, int, str | None]]:
    for row in rows["toolkits"].values():
        for field in ("driver", "runfile_driver", "recommended_driver", "floor"):
            yield ("toolkits", row.id, field), row.branch, getattr(row, field)
    for row in rows["cuda_majors"].values():
        yield ("cuda_majors", row.id, "floor"), row.branch, row.floor
    for row in rows["gpus"].values():
        for branch, version in row.first_listed.items():
            yield ("gpus", row.id, "first_listed"), branch, version
    for row in rows["systems"].values():
        for name, offer in row.origins.items():
            for branch, flavours in offer.versions.items():
                for version in (version for versions in flavours.values() for version in versions):
                    yield ("systems", row.id, "origins", name, "versions"), branch, version


@rule("date-order")
def dates(rows: Rows) -> Found:
    """Check that ends are after releases, and that no row has a date later than the day it was checked."""
    for section in rows:
        for row in rows[section].values():
            if section == "sources":
                continue
            released = getattr(row, "released", None)
            for field in ("eol_vendor", "eol_computed"):
                end = getattr(row, field, None)
                if released and end and last_day(end) < first_day(released):
                    message = f"{end} is before the release, {released}"
                    yield (section, row.id, field), message, ((section, row.id, "released"),)
            if released and _after(released, row.date):
                message = f"{released} is after the day the row was checked, {row.date}"
                yield (section, row.id, "released"), message, ((section, row.id, "date"),)
    for row in rows["branches"].values():
        # An end before the release was reported above; every point would only repeat it.
        end = row.eol if row.eol and (not row.released or first_day(row.released) <= row.eol) else None
        for version, when in row.points.items():
            if when and _after(when, row.date):
                message = f"{when} is after the day the row was checked, {row.date}"
                yield ("branches", row.id, "points", version), message, (("branches", row.id, "date"),)
            elif when and end and first_day(when) > end:
                message = f"{when} is after the end of the branch, {end}"
                ends = tuple(("branches", row.id, field) for field in ("eol_vendor", "eol_computed"))
                yield ("branches", row.id, "points", version), message, ends
            elif when and row.released and last_day(when) + BETA < first_day(row.released):
                message = f"{when} is long before the branch was released, {row.released}"
                yield ("branches", row.id, "points", version), message, (("branches", row.id, "released"),)


def _after(when: str, checked: str) -> bool:
    return first_day(when) > last_day(checked)


@rule("vendor-figure")
def vendor_figure(rows: Rows) -> Found:
    """Check that no measured figure exceeds the vendor's. Rows that are unsure are not checked."""
    for row in rows["expectations"].values():
        gpu = rows["gpus"].get(row.gpu)
        if gpu is None or not row.sure():
            continue
        limit = _limit(row, gpu)
        if limit is not None and row.value > limit:
            message = f"{row.value:g} {row.unit} exceeds the maximum of {gpu.name}, {limit:.4g}: check the unit"
            compared = tuple(("gpus", gpu.id, field) for field in _LIMITING)
            yield ("expectations", row.id, "value"), message, compared


_LIMITING = ("memory_bandwidth_gb_per_s", "tflops", "pcie", "nvlink")
"""Fields of a GPU that limit a measurement."""


def _limit(row: ExpectedFigure, gpu: Gpu) -> float | None:
    one_way = nvlink_gb_per_s(gpu.nvlink) if gpu.nvlink else _pcie(gpu.pcie)
    match row.metric:
        case "memory_bandwidth":
            return gpu.memory_bandwidth_gb_per_s
        case "gemm_bf16" | "gemm_fp8":
            return tensor_tflops(gpu, row.metric.removeprefix("gemm_"))
        case "host_to_device":
            return _pcie(gpu.pcie) if gpu.pcie_judged else None
        case "peer_to_peer":
            return one_way
        case "all_reduce_busbw":
            return None if one_way is None else one_way * IN_SWITCH


def _pcie(pcie: Pcie | None) -> float | None:
    return pcie_gb_per_s(pcie.gen, pcie.width) if pcie else None


@rule("services")
def services(rows: Rows) -> Found:
    """Check that the services of a platform's nodes match its GPUs and switches."""
    for row in rows["platforms"].values():
        gpus = [rows["gpus"][name] for name in row.gpus if name in rows["gpus"]]
        required = set()
        if any(gpu.fabric == "rack" for gpu in gpus):
            required.add("imex")
        if row.nvswitches and any(gpu.fabric == "board" for gpu in gpus):
            required.add("fabric-manager")
            if any(gpu.nvlink and gpu.nvlink.gen >= 5 for gpu in gpus):
                required.add("nvlsm")
        if (
            len(gpus) == len(row.gpus)
            and set(row.services) != required
            and row.sure("services")
            and row.sure("nvswitches")
        ):
            names = ", ".join(sorted(required)) or "none"
            compared = tuple(("platforms", row.id, field) for field in ("gpus", "nvswitches"))
            yield ("platforms", row.id, "services"), f"by its GPUs and switches it needs: {names}", compared


@rule("forward-compat")
def forward_compat(rows: Rows) -> Found:
    """Check that a branch is in one list only of a cuda-compat package."""
    for row in rows["forward_compat"].values():
        listed = [*row.works_on, *row.needless_on, *row.refused_on]
        for branch in sorted({branch for branch in listed if listed.count(branch) > 1}):
            yield ("forward_compat", row.id, "works_on"), f"branch {branch} is in two lists"


@rule("future")
def checked(rows: Rows) -> Found:
    """Check that no row was checked in the future."""
    today = date.today()
    for section in rows:
        for row in rows[section].values():
            if section != "sources" and first_day(row.date) > today:
                yield (section, row.id, "date"), f"{row.date} is in the future"


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
            message = f"{link.gb_per_s:g} is not what {link.links} links of generation {link.gen} carry: {expected}"
            key = ("gpus", row.id, "nvlink")
            yield (*key, "gb_per_s"), message, ((*key, "links"), (*key, "gen"))


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


@rule("branch-order")
def branch_order(rows: Rows) -> Found:
    """Check that a range of branches starts before it ends."""
    bounded: list[tuple[Key, OriginOffer | PackageSet | Pinning]] = [
        ((section, row.id), row) for section in ("packages", "pinning") for row in rows[section].values()
    ]
    for row in rows["systems"].values():
        bounded += [(("systems", row.id, "origins", name), offer) for name, offer in row.origins.items()]
    for key, item in bounded:
        if item.first_branch is not None and item.last_branch is not None and item.first_branch > item.last_branch:
            yield (*key, "last_branch"), f"{item.last_branch} is before first_branch, {item.first_branch}"


def main(files: Sequence[str]) -> int:
    """Print the problems of the catalog with these files overlaid; return the exit code."""
    try:
        faults = problems(Catalog([read(Path(file)) for file in files]))
    except GpunodeError as err:
        print(f"catalog_lint.py: {err}", file=sys.stderr)
        return err.exit_code
    for problem in faults:
        print(f"{problem} [{problem.rule}]")
    return Exit.USAGE if faults else Exit.GOOD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
