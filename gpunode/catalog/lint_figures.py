"""Rules about figures: plausible ranges (a wrong unit is outside), the vendor's figures, versions, dates."""

from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from typing import Any

from packaging.version import Version as Number

from gpunode.catalog.hardware import ExpectedFigure, Gpu, Pcie
from gpunode.catalog.limits import nvlink_gb_per_s, pcie_gb_per_s, tensor_tflops
from gpunode.catalog.lint_rules import Found, Rows, rule
from gpunode.catalog.read import Key
from gpunode.catalog.rows import first_day, last_day

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
UNITS: Mapping[str, str] = {
    "gemm_bf16": "TFLOPS",
    "gemm_fp8": "TFLOPS",
}
"""Unit of a metric; all others are GB/s."""
BETA = timedelta(days=183)
"""The longest time between the first betas and a branch's release."""
IN_SWITCH = 1.1
"""With reductions in the switch, bus bandwidth was measured 7 % above the rate of the links."""


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
                what = f"{value:g} is outside {low:g} to {high:g}: check the unit"
                yield (section, row.id, *path.split(".")), what


@rule("memory")
def memory(rows: Rows) -> Found:
    """Check that nominal and printed memory agree: 80 GB is printed as 81920 MiB at most, less with ECC in the
    memory."""
    for row in rows["gpus"].values():
        if row.memory_gb and row.memory_mib and abs(row.memory_mib * 1.048576 / 1000 / row.memory_gb - 1) > 0.12:
            what = f"{row.memory_mib} MiB does not fit {row.memory_gb:g} GB"
            yield ("gpus", row.id, "memory_mib"), what, (("gpus", row.id, "memory_gb"),)


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
            what = "lists capabilities that differ from compute_capabilities"
            yield ("architectures", row.id, "first_cuda"), what, (("architectures", row.id, "compute_capabilities"),)


@rule("cuda-floor")
def cuda_floor(rows: Rows) -> Found:
    """Check that ``last_cuda`` of the architectures and ``min_compute_capability`` of the CUDA majors agree."""
    for arch in rows["architectures"].values():
        highest = max(map(Number, arch.compute_capabilities))
        for major in rows["cuda_majors"].values():
            known = arch.last_cuda is None or major.number <= arch.last_cuda
            if known != (highest >= Number(major.min_compute_capability)):
                verb = "supports" if known else "does not support"
                what = f"CUDA {major.id} {verb} {arch.name}, but requires capability {major.min_compute_capability}"
                compared = (("architectures", arch.id, "compute_capabilities"),)
                floor = ("cuda_majors", major.id, "min_compute_capability")
                yield ("architectures", arch.id, "last_cuda"), what, (*compared, floor)


@rule("version-branch")
def version_branch(rows: Rows) -> Found:
    """Check that a driver version belongs to the branch of its row: 580.95.05 to 580."""
    for key, branch, version in _versions(rows):
        if version is not None and version.split(".", maxsplit=1)[0] != str(branch):
            yield key, f"{version} is not a release of branch {branch}"


def _versions(rows: Rows) -> Iterator[tuple[Key, int, str | None]]:
    for row in rows["branches"].values():
        for version in row.points:
            yield ("branches", row.id, "points", version), row.number, version
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
                for version in (one for versions in flavours.values() for one in versions):
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
                    what = f"{end} is before the release, {released}"
                    yield (section, row.id, field), what, ((section, row.id, "released"),)
            if released and _after(released, row.date):
                what = f"{released} is after the day the row was checked, {row.date}"
                yield (section, row.id, "released"), what, ((section, row.id, "date"),)
    for row in rows["branches"].values():
        # An end before the release was reported above; every point would only repeat it.
        end = row.eol if row.eol and (not row.released or first_day(row.released) <= row.eol) else None
        for version, when in row.points.items():
            if when and _after(when, row.date):
                what = f"{when} is after the day the row was checked, {row.date}"
                yield ("branches", row.id, "points", version), what, (("branches", row.id, "date"),)
            elif when and end and first_day(when) > end:
                what = f"{when} is after the end of the branch, {end}"
                ends = tuple(("branches", row.id, field) for field in ("eol_vendor", "eol_computed"))
                yield ("branches", row.id, "points", version), what, ends
            elif when and row.released and last_day(when) + BETA < first_day(row.released):
                what = f"{when} is long before the branch was released, {row.released}"
                yield ("branches", row.id, "points", version), what, (("branches", row.id, "released"),)


def _after(when: str, checked: str) -> bool:
    return first_day(when) > last_day(checked)


@rule("metric-unit")
def metric_unit(rows: Rows) -> Found:
    """Check that a metric is stored in its own unit."""
    for row in rows["expectations"].values():
        unit = UNITS.get(row.metric, "GB/s")
        if row.unit != unit:
            yield ("expectations", row.id, "unit"), f"wrong unit: {row.metric} is stored in {unit}"


@rule("band")
def band(rows: Rows) -> Found:
    """Check that a measured figure has a band around it, and that a floor has none."""
    for row in rows["expectations"].values():
        if (row.kind == "measured") != (row.band is not None):
            yield ("expectations", row.id, "band"), f"{row.kind}: {'is missing' if row.band is None else 'has none'}"
        elif row.band is not None and not -1 < row.band[0] <= 0 <= (row.band[1] or 0):
            yield ("expectations", row.id, "band"), "is relative: from above -1 to 0, and from 0 up"


@rule("vendor-figure")
def vendor_figure(rows: Rows) -> Found:
    """Check that no measured figure exceeds the vendor's. Rows that are unsure are not checked."""
    for row in rows["expectations"].values():
        gpu = rows["gpus"].get(row.gpu)
        if gpu is None or not row.sure():
            continue
        limit = _limit(row, gpu)
        if limit is not None and row.value > limit:
            what = f"{row.value:g} {row.unit} exceeds the maximum of {gpu.name}, {limit:.4g}: check the unit"
            compared = tuple(("gpus", gpu.id, field) for field in _LIMITING)
            yield ("expectations", row.id, "value"), what, compared


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
