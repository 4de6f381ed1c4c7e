"""Checks on NVLink: number, state, speed and errors of a GPU's links."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpunode.checks.compare import equals, failed, passed, skipped, undetermined
from gpunode.checks.gpus import CATALOG, MODEL, SeenGpu, hidden, seen_gpus
from gpunode.checks.links import answer_of
from gpunode.checks.machine import is_guest
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.models.smi import NvlinkGpu, NvlinkLink
from gpunode.facts.node import NodeFacts
from gpunode.facts.parsers.smi_links import UNSUPPORTED
from gpunode.text import counted, listed

LOOK = "nvidia-smi nvlink --status and -e, and dmesg (Xid 74, 136, 144 to 150; SXid) show details."
LEAST_OF_SPEED = Threshold(
    "nvlink.speed.least",
    0.95,
    "of the data sheet's rate",
    "A slower link is a failure, also on models without a known line rate.",
    source="our choice",
    most=1,
)
LEAST_OF_LINE = Threshold(
    "nvlink.speed.line",
    0.99,
    "of the line rate",
    "A slower link that still has the data sheet's rate warns.",
    source="our choice, for rounding: Health Validation's nvlink_bandwidth_count_speed names the rate itself",
    most=1,
)
ERRORS_MOST = Threshold(
    "nvlink.errors.most",
    0,
    "errors",
    "More data that was sent again on all links of a GPU warns; a link that went down is always a failure.",
    source="our choice: the counters stay 0 on a healthy link",
)
OPTIONAL = ("bridge", "module")
"""Forms of NVLink that may be unconnected."""
UNSUPPORTED_TEXT = re.compile(r"not supported|unsupported|does not have or support", re.I)
WENT_DOWN = ("recovery", "link_recovery_failed", "link_recovery_failed_events")
"""Counters of links that went down; the others count retransmissions, which only cost time."""
ERRORS = re.compile(
    r"replay|recovery|crc\w*|ecc\w*|malformed_packet|buffer_overrun|rx|rx_remote|rx_general|local_link_integrity"
    r"|tx_discards|link_recovery_failed(?:_events)?|effective|symbol"
)
"""Counters that stay 0 on a healthy link. NVLink 5 has others that do not: the histogram of forward error correction
(bucket 0 counts codewords without error), raw errors (before correction), retransmissions by the physical layer, all
recovery events. No source has limits for these, nor for bit error rates: they are not checked."""


@dataclass(frozen=True)
class Linked:
    """A GPU with the links that nvidia-smi lists for it."""

    gpu: SeenGpu
    links: tuple[NvlinkLink, ...]
    all_inactive: bool
    """True if nvidia-smi prints that all links are inactive; it then lists none."""
    reason: str | None = None
    """Why its links are not checked; None: they are."""

    @property
    def expected(self) -> int | None:
        """Return the number of links of the model; None if the catalog does not have it."""
        nvlink = self.gpu.known.get("nvlink")
        return nvlink.links if nvlink else None

    @property
    def doubt(self) -> str | None:
        """Return why the catalog is not sure of the model's NVLink; None if it is. Unsure figures warn and never
        fail."""
        models = self.gpu.match.gpus if self.gpu.match else ()
        return next((row.unsure.get("nvlink", "its row") for row in models if not row.sure("nvlink")), None)

    @property
    def gb_per_s(self) -> float | None:
        """Return one link's rate in one direction by the data sheet; None if the catalog does not have it or is not
        sure."""
        nvlink = self.gpu.known.get("nvlink")
        return nvlink.sheet_gb_per_s if nvlink and self.doubt is None else None

    @property
    def line_gb_per_s(self) -> float | None:
        """Return the same rate as nvidia-smi prints it."""
        nvlink = self.gpu.known.get("nvlink")
        return nvlink.line_gb_per_s if nvlink and self.doubt is None else None


def linked_gpus(node: NodeFacts) -> list[Linked]:
    """Return the node's GPUs with their NVLinks; raise Skip with the reasons if none can be checked."""
    listing = answer_of(node, node.nvlink, "nvidia-smi nvlink --status")
    by_index = {gpu.index: gpu for gpu in listing.gpus}
    gpus = []
    for gpu in seen_gpus(node):
        reported = by_index.get(gpu.reported.index, NvlinkGpu(index=gpu.reported.index))
        reason = hidden(gpu) or _why_not_judged(node, gpu, reported.links) or _unsupported(gpu, reported, listing.gpus)
        gpus.append(Linked(gpu, reported.links, bool(reported.all_inactive), reason))
    reasons = [linked.reason for linked in gpus if linked.reason is not None]
    if len(reasons) == len(gpus):
        raise Skip("; ".join(dict.fromkeys(reasons)))
    return gpus


def _why_not_judged(node: NodeFacts, gpu: SeenGpu, links: tuple[NvlinkLink, ...]) -> str | None:
    nvlink = gpu.known.get("nvlink")
    if gpu.is_vgpu:
        return "a vGPU: visible only on its host"
    if gpu.mig:
        return "the driver reports no NVLink of a GPU in MIG mode"
    if any(link.active or _sleeps(link) for link in links):
        return None
    if nvlink is None:
        if gpu.match is None and not links:
            return f"nvidia-smi lists no NVLink of a model that the catalog does not have ({MODEL} reports it)"
        return f"{gpu.name} has no NVLink" if not links else f"no NVLink of {gpu.name} is in use"
    if nvlink.form in OPTIONAL:
        return f"nothing connects NVLinks of {gpu.name}"
    return "a virtual machine without NVLink: its host divides the board" if is_guest(node) else None


def _unsupported(gpu: SeenGpu, reported: NvlinkGpu, others: tuple[NvlinkGpu, ...]) -> str | None:
    """Return the reason if nvidia-smi has no data of a GPU's NVLinks, and of no other GPU of that name."""
    told = UNSUPPORTED_TEXT.search(reported.message or "") is not None
    told = told or any(link.state == UNSUPPORTED or link.errors for link in reported.links)
    if told and not any(_has_data(link) for other in others if other.name == reported.name for link in other.links):
        return f"nvidia-smi reports NVLink of {gpu.name} as not supported"
    return None


def _has_data(link: NvlinkLink) -> bool:
    return link.state not in (None, UNSUPPORTED) or any(value is not None for value in link.errors.values())


def _each(node: NodeFacts, judge: Callable[[Linked], CheckResult]) -> Iterator[CheckResult]:
    """Yield one result for each GPU."""
    for linked in linked_gpus(node):
        verdict = judge(linked) if linked.reason is None else skipped(linked.reason)
        yield verdict.at(linked.gpu.component)


def _sleeps(link: NvlinkLink) -> bool:
    return link.state == "sleep"


@registry.check(
    "nvlink.count",
    needs=("loaded_driver", "smi", "nvlink", "virtualization"),
    needs_gpu=True,
    means="Every GPU with NVLink has as many links as its model.",
    remedy=f"Drain the node, reset all GPUs or restart it. {LOOK}",
    state="drain",
    actions=("reset_gpu", "restart_os", "replace_hardware"),
    scope="gpu",
)
def count(node: NodeFacts) -> Iterator[CheckResult]:
    return _each(node, _count_of)


def _count_of(linked: Linked) -> CheckResult:
    number, expected = len(linked.links), linked.expected
    if linked.all_inactive and not number:
        return skipped("all links are inactive (nvlink.state)")
    if not number:
        return undetermined(f"nvidia-smi nvlink --status lists no link of {linked.gpu.name}", expected=expected)
    if expected is None:
        return skipped(f"{number} links; the catalog has no number for {linked.gpu.name}")
    bad = f"{number} links of {expected}"
    if linked.doubt is not None:
        bad = f"{number} links; by the catalog {expected}, which is not sure: {linked.doubt}"
    fault = Status.FAIL if linked.doubt is None else Status.WARN
    return equals(number, expected, f"{number} links", bad, fault=fault, unit="links", source=CATALOG)


@registry.check(
    "nvlink.state",
    needs=("loaded_driver", "smi", "nvlink", "virtualization"),
    needs_gpu=True,
    means="Every NVLink of a GPU is active. Links that are asleep are ignored.",
    remedy=f"Check fabric.manager and dmesg, then drain the node and reset all GPUs or restart it. {LOOK}",
    state="drain",
    actions=("restart_service:nvidia-fabricmanager.service", "reset_gpu", "restart_os", "replace_hardware"),
    scope="gpu",
)
def state(node: NodeFacts) -> Iterator[CheckResult]:
    return _each(node, _state_of)


def _state_of(linked: Linked) -> CheckResult:
    down = [str(link.link) for link in linked.links if link.active is False]
    asleep = [str(link.link) for link in linked.links if _sleeps(link)]
    unknown = [link for link in linked.links if link.active is None and not _sleeps(link)]
    total = len(linked.links)
    if linked.all_inactive:
        return failed("all links are inactive", expected=linked.expected, measured=0, unit="active links")
    if down:
        nvlink = linked.gpu.known.get("nvlink")
        # Boards may be joined by fewer bridges than they have room for.
        status = Status.WARN if nvlink is not None and nvlink.form in OPTIONAL else Status.FAIL
        message = f"inactive: link {listed(down, most=18)} of {counted(total, 'link')}"
        return CheckResult(status, message, expected=total, measured=total - len(down), unit="active links")
    if unknown or not total:
        return undetermined(f"nvidia-smi does not report the state of NVLinks of {linked.gpu.name}")
    if asleep:
        message = (
            f"asleep: link {listed(asleep, most=18)} of {counted(total, 'link')}, which is normal; check under load"
        )
        return skipped(message)
    return passed(f"{total} links are active", expected=total, measured=total, unit="active links")


@registry.check(
    "nvlink.speed",
    needs=("loaded_driver", "smi", "nvlink", "virtualization"),
    needs_gpu=True,
    means="Every active NVLink runs at the line rate that nvidia-smi prints for its generation (26.562 GB/s on Hopper, "
    "53.125 GB/s on Blackwell), which is up to 6 % above the data sheet's rate (25 and 50 GB/s). A link below the data "
    "sheet's rate fails, one between the two warns.",
    remedy=f"Drain the node, reset all GPUs or restart it. {LOOK}",
    state="drain",
    actions=("reset_gpu", "restart_os", "replace_hardware"),
    scope="gpu",
    thresholds=(LEAST_OF_SPEED, LEAST_OF_LINE),
)
def speed(node: NodeFacts) -> Iterator[CheckResult]:
    return _each(node, _speed_of)


def _speed_of(linked: Linked) -> CheckResult:
    speeds = {link.link: link.speed_gb_per_s for link in linked.links if link.active}
    expected = linked.gb_per_s
    if not speeds:
        return skipped("no link is active (nvlink.state)")
    known = {number: gb_per_s for number, gb_per_s in speeds.items() if gb_per_s is not None}
    if len(known) < len(speeds):
        return undetermined(f"nvidia-smi does not report the speed of NVLinks of {linked.gpu.name}")
    # A model without a row in the catalog is compared with itself: all its links are alike.
    sheet = expected if expected is not None else max(known.values())
    line = linked.line_gb_per_s
    explained = f" (the data sheet's {sheet:g} GB/s)" if line is not None and line != sheet else ""
    least = min(known.values())
    slow = _below(known, LEAST_OF_SPEED.of(linked.gpu.match) * sheet)
    below_line = _below(known, LEAST_OF_LINE.of(linked.gpu.match) * line) if line is not None else []
    message = f"{counted(len(known), 'link')} at {least:g} GB/s{explained}"
    status = Status.FAIL if slow else Status.WARN if below_line else Status.PASS
    if slow:
        message = f"slow: link {listed(slow)} of {line or sheet:g} GB/s{explained}"
    elif below_line:
        message = f"below the line rate of {line:g} GB/s: link {listed(below_line)}{explained}"
    return CheckResult(
        status,
        message,
        expected=line if line is not None else sheet,
        measured=least,
        unit="GB/s per direction",
        source=CATALOG if expected is not None else "the GPU's other links",
    )


def _below(speeds: dict[int, float], floor: float) -> list[str]:
    return [f"{number} at {gb_per_s:g}" for number, gb_per_s in speeds.items() if gb_per_s < floor]


@registry.check(
    "nvlink.errors",
    needs=("loaded_driver", "smi", "nvlink", "nvlink_errors", "virtualization"),
    needs_gpu=True,
    means="No NVLink went down, resent data or lost data since the driver was loaded. Errors that NVLink 5 "
    "corrects itself (FEC, raw errors, physical retries) and bit error rates are ignored.",
    remedy=f"If counters keep rising, reseat the GPU and have the board inspected. {LOOK}",
    state="drain",
    actions=("reset_gpu", "replace_hardware"),
    scope="gpu",
    thresholds=(ERRORS_MOST,),
)
def errors(node: NodeFacts) -> Iterator[CheckResult]:
    gpus = linked_gpus(node)
    listing = answer_of(node, node.nvlink_errors, "nvidia-smi nvlink -e")
    by_index = {gpu.index: gpu for gpu in listing.gpus}
    for linked in gpus:
        index = linked.gpu.reported.index
        reported = by_index.get(index, NvlinkGpu(index=index))
        reason = linked.reason or _unsupported(linked.gpu, reported, listing.gpus)
        verdict = _errors_of(linked, reported.links) if reason is None else skipped(reason)
        yield verdict.at(linked.gpu.component)


def _errors_of(linked: Linked, links: tuple[NvlinkLink, ...]) -> CheckResult:
    counters = {
        (link.link, name): value
        for link in links
        for name, value in link.errors.items()
        if value is not None and ERRORS.fullmatch(name)
    }
    if not counters:
        return undetermined(f"nvidia-smi nvlink -e lists no counter of {linked.gpu.name}")
    raised = {counter: value for counter, value in counters.items() if value > 0}
    total, most = sum(raised.values()), ERRORS_MOST.of(linked.gpu.match)
    if not raised:
        return passed("no error on any link", expected=0, measured=0, unit="errors")
    down = any(name in WENT_DOWN for _, name in raised)
    words = listed([f"link {link} {name.replace('_', ' ')} {value:g}" for (link, name), value in raised.items()])
    status = Status.FAIL if down else Status.WARN if total > most else Status.PASS
    return CheckResult(status, words, expected=most, measured=total, unit="errors")
