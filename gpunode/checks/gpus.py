"""Base of the checks on each GPU: nvidia-smi's report with the PCI function and the catalog's row."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from gpunode.catalog import Gpu, GpuMatch, load
from gpunode.checks.driver import MISMATCH, loaded_driver
from gpunode.checks.registry import CheckResult, NotJudged, Skip, Status, registry
from gpunode.facts.models.smi import SmiGpu, SmiLog
from gpunode.facts.node import NodeFacts
from gpunode.facts.parsers.smi_base import error_kind
from gpunode.facts.parsers.values import bus_id
from gpunode.facts.pci import PciDevice
from gpunode.onnode.gpu_settings import requested, resolved
from gpunode.text import listed

CATALOG = "catalog (gpus.yml)"
LOST = frozenset({"GPU is lost", "GPU requires reset"})
TOOLS = "driver.tools-answer reports the cause"
ANSWERS = "gpu.answers reports the cause"
MODEL = "gpu.model"
LOST_STATUS = 15
"""Exit status of nvidia-smi: a GPU has fallen off the bus."""
OFF_THE_BUS = 79
"""The Xid for the same event."""
_SLOT = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
RESET = "nvidia-smi --gpu-reset"
HOLDERS = (
    "gpunode-exporter.service",
    "nvidia-dcgm-exporter.service",
    "nvidia-dcgm.service",
    "dcgm.service",
    "nvidia-persistenced.service",
)
"""Services that hold GPUs, in the order in which they are stopped: exporters use DCGM's host engine."""
SERVED = ("nv-hostengine", "nvidia-persiste", "nvidia-persistenced")
"""Processes of these services; the kernel cuts names after 15 characters."""
NOTHING: Mapping[str, Any] = {}


@lru_cache(maxsize=256)
def match_of(device_id: str, subsystem_id: str | None) -> GpuMatch | None:
    """Return the catalog's models of a PCI id (``10de:2330``); None if it has none."""
    return load().gpu_by_pci(device_id, subsystem_id)


@lru_cache(maxsize=256)
def match_of_name(name: str) -> GpuMatch | None:
    """Return the catalog's models that print exactly this product name; None if it has none."""
    return load().gpu_by_product_name(name)


def model_of(device: PciDevice) -> GpuMatch | None:
    """Return the catalog's models of a PCI function."""
    return match_of(device.pci_id, device.subsystem_id)


@dataclass(frozen=True)
class SeenGpu:
    """One GPU as nvidia-smi reports it, with its PCI function and the catalog's data of its model.

    The model is that of the PCI id; if the catalog lacks the id, that of the exact product name.
    """

    reported: SmiGpu
    device: PciDevice | None
    match: GpuMatch | None
    requested: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the role gpu_settings requests for this GPU, by their names."""
    lost: str | None = None
    """nvidia-smi's message about a GPU that it cannot reach, or its text in place of values; None: the GPU responds."""

    @property
    def component(self) -> str:
        """Return ``gpu3``, by nvidia-smi's order."""
        return f"gpu{self.reported.index}"

    @property
    def known(self) -> Mapping[str, Any]:
        """Return the catalog's facts on which all models with this PCI id agree; empty for an unknown model."""
        return self.match.common if self.match else NOTHING

    def sure(self, field: str) -> bool:
        """Return True if the catalog is sure of this field of the model, so that a result may fail on it."""
        return self.match is not None and all(row.sure(field) for row in self.match.gpus)

    @property
    def name(self) -> str:
        """Return the catalog's name of the model, else nvidia-smi's."""
        model = self.match.gpu if self.match else None
        return model.name if model else self.reported.name or "unknown GPU"

    @property
    def is_vgpu(self) -> bool:
        """Return True for a slice that a hypervisor made: it hides the properties of the card."""
        return self.reported.virtualization_mode == "VGPU"

    @property
    def mig(self) -> bool:
        """Return True if MIG is enabled."""
        return self.reported.mig_mode is True

    @property
    def faults(self) -> tuple[str, ...]:
        """Return the texts that nvidia-smi prints in place of values: ``GPU is lost`` …"""
        return self.reported.errors

    @property
    def for_servers(self) -> bool:
        """Return True for a data-centre model: it has ECC, and reports it. A market derived from a name does not
        count."""
        return self.known.get("market") == "datacenter" and all(row.sure("market") for row in self._models)

    @property
    def _models(self) -> tuple[Gpu, ...]:
        return self.match.gpus if self.match else ()

    @cached_property
    def plain(self) -> Mapping[str, Any]:
        """Return the GPU as ``gpunode parse`` prints it, for the program of gpu_settings, which runs on nodes."""
        return self.reported.model_dump(mode="json")

    def not_reported(self, field: str, *, expected: bool) -> CheckResult:
        """Return the result for a value that nvidia-smi does not report: ``error`` if this model should have it."""
        if self.mig:
            return CheckResult(Status.SKIP, f"nvidia-smi does not report {field} of a GPU in MIG mode")
        if expected:
            return CheckResult(Status.ERROR, f"nvidia-smi does not report {field} of {self.name}")
        if self.match is None:
            return CheckResult(Status.SKIP, f"nvidia-smi does not report {field} of a model that is unknown ({MODEL})")
        return CheckResult(Status.SKIP, f"nvidia-smi does not report {field} of {self.name}, a model that may lack it")


def slot_in(message: str) -> str | None:
    """Return the PCI address in a message of nvidia-smi, in the form of sysfs; None if it has none."""
    return next(slots_in(message), None)


def slots_in(message: str) -> Iterator[str]:
    """Yield the PCI addresses in a message, in the form of sysfs."""
    yield from map(bus_id, _SLOT.findall(message))


def lost_slots(node: NodeFacts) -> dict[str, str]:
    """Return the GPUs that nvidia-smi could not reach: PCI address, and its message about each."""
    by_slot: dict[str, str] = {}
    for answer in (node.smi, node.topology, node.peer_access, node.nvlink, node.nvlink_errors):
        messages = (answer.error_message or "", *answer.messages) if answer else ()
        for message in messages:
            slot = slot_in(message)
            if slot is not None and error_kind(message) == "gpu-lost":
                by_slot.setdefault(slot, message)
    return by_slot


def off_the_bus(node: NodeFacts) -> set[str]:
    """Return the PCI addresses of GPUs that fell off the bus, according to the driver's log."""
    events = node.kernel_log.events if node.kernel_log else ()
    return {
        event.pci_bus_id for event in events if event.kind == "xid" and event.xid == OFF_THE_BUS and event.pci_bus_id
    }


def reports_loss(node: NodeFacts) -> bool:
    """Return whether nvidia-smi's exit status reports a GPU that it cannot reach; it does not name the GPU."""
    return any(
        run.ended == "exit" and run.exit_status == LOST_STATUS and run.command.startswith("nvidia-smi")
        for run in node.tool_runs or ()
    )


def lost_gpus(node: NodeFacts) -> set[str]:
    """Return the PCI addresses of the GPUs that ``gpu.answers`` reports: by message, value, or exit status and Xid."""
    silent = [gpu.reported.pci_bus_id for gpu in listed_gpus(node) if gpu.lost is not None]
    named = {*lost_slots(node), *(slot for slot in silent if slot)}
    return off_the_bus(node) if not named and reports_loss(node) else named


def smi_document(node: NodeFacts) -> SmiLog:
    """Return nvidia-smi's answer; raise Skip without one, with the check that reports the cause."""
    loaded_driver(node)
    smi = node.smi
    if smi is None:
        raise Skip(f"nvidia-smi is not installed ({TOOLS})")
    if smi.error_kind == MISMATCH:
        raise Skip("nvidia-smi cannot answer (driver.library-matches-module reports the cause)")
    if smi.error_kind == "no-devices":
        return SmiLog(attached_gpus=0)
    if smi.document is None:
        cause = ANSWERS if smi.error_kind == "gpu-lost" else TOOLS
        raise Skip(f"nvidia-smi cannot answer ({cause})")
    return smi.document


def listed_gpus(node: NodeFacts) -> list[SeenGpu]:
    """Return every GPU that nvidia-smi reports; empty if it fails."""
    try:
        return seen_gpus(node)
    except Skip:
        return []


def seen_gpus(node: NodeFacts) -> list[SeenGpu]:
    """Return every GPU that nvidia-smi reports; raise Skip if there is none to check."""
    document = smi_document(node)
    if not document.gpus:
        raise Skip("the driver has no GPU (gpu.count reports the cause)")
    by_slot = {device.slot: device for device in node.pci or ()}
    lost = lost_slots(node)
    rules = node.gpu_settings.plain_rules() if node.gpu_settings else []
    gpus = [_seen(gpu, by_slot.get(gpu.pci_bus_id or ""), lost) for gpu in document.gpus]
    if not rules:
        return gpus
    return [replace(gpu, requested=resolved(requested(rules, gpu.plain), gpu.plain)[0]) for gpu in gpus]


def _seen(gpu: SmiGpu, device: PciDevice | None, lost: Mapping[str, str]) -> SeenGpu:
    by_id = match_of(gpu.pci_device_id, gpu.pci_subsystem_id) if gpu.pci_device_id else None
    match = by_id if gpu.pci_device_id else model_of(device) if device else None
    if match is None and gpu.name:
        match = match_of_name(gpu.name)
    words = LOST.intersection(gpu.errors)
    gone = lost.get(gpu.pci_bus_id or "") or (sorted(words)[0] if words else None)
    return SeenGpu(gpu, device, match, lost=gone)


OfOneGpu = Callable[[SeenGpu], CheckResult]


def gpu_check(check_id: str, *, seen_by_guest: bool = False, **declared: Any) -> Callable[[OfOneGpu], OfOneGpu]:
    """Return a decorator that registers a function of one GPU as a check of all GPUs.

    A lost GPU is skipped, because ``gpu.answers`` reports it. ``seen_by_guest``: applies to a vGPU too, which hides all
    other properties.
    """

    def decorate(function: OfOneGpu) -> OfOneGpu:
        def judge(node: NodeFacts) -> Iterator[CheckResult]:
            for gpu in seen_gpus(node):
                result = of_one_gpu(function, gpu, seen_by_guest=seen_by_guest)
                yield with_holders(node, result, declared["remedy"])

        about = {"scope": "gpu", **declared}
        registry.check(check_id, needs=("loaded_driver", "smi"), needs_gpu=True, **about)(judge)
        return function

    return decorate


def with_holders(node: NodeFacts, result: CheckResult, remedy: str) -> CheckResult:
    """Return a result, with a remedy that resets a GPU extended by what must be stopped before: the driver refuses a
    reset while a process holds the GPU."""
    text = result.remedy or remedy
    if result.status not in (Status.WARN, Status.FAIL) or RESET not in text:
        return result
    running = {unit.name for unit in node.units or () if unit.active == "active"}
    stop = [name for name in HOLDERS if name in running]
    others = sorted(
        {f"{process.name} ({process.pid})" for process in node.gpu_processes or () if process.name not in SERVED}
    )
    steps = [f"stop {listed(others)}"] if others else []
    steps += [f"systemctl stop {' '.join(stop)}"] if stop else []
    if not steps:
        return result
    again = f"; afterwards systemctl start {' '.join(reversed(stop))}" if stop else ""
    mig = "; systemctl restart gpunode-gpu-settings.service makes its MIG instances again" if node.gpu_settings else ""
    return replace(
        result, remedy=f"{text} A reset is refused while a process holds the GPU: {', then '.join(steps)}{again}{mig}."
    )


def of_one_gpu(
    function: Callable[..., CheckResult], gpu: SeenGpu, *, seen_by_guest: bool = False, **named: Any
) -> CheckResult:
    """Return a function's result for a GPU (and the named arguments), or why it has none."""
    try:
        reason = hidden(gpu, seen_by_guest=seen_by_guest)
        verdict = CheckResult(Status.SKIP, reason) if reason else function(gpu, **named)
    except NotJudged as error:
        verdict = error.verdict
    return verdict.at(gpu.component)


def hidden(gpu: SeenGpu, *, seen_by_guest: bool = True) -> str | None:
    """Return why a GPU cannot be checked: it is lost, or a slice of its host's card; None if it can."""
    if gpu.lost is not None:
        return f"the GPU does not answer ({ANSWERS})"
    return "a vGPU: visible only on its host" if gpu.is_vgpu and not seen_by_guest else None
