"""Checks that ask every GPU the same: what nvidia-smi says of it, beside what the bus and the catalog know."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gpunode.catalog import GpuMatch, load
from gpunode.checks.driver import MISMATCH
from gpunode.checks.registry import Expectation, Status, Verdict, registry
from gpunode.facts.node import NodeFacts, PciDevice

CATALOG = "catalog (gpus.yml)"
LOST = frozenset({"GPU is lost", "GPU requires reset"})
NOTHING: Mapping[str, Any] = {}


@lru_cache(maxsize=256)
def match_of(device_id: str, subsystem_id: str | None) -> GpuMatch | None:
    """The catalog's models of a PCI id (``10de:2330``); None where it has none."""
    return load().gpu_by_pci(device_id, subsystem_id)


def model_of(device: PciDevice) -> GpuMatch | None:
    """The catalog's models of a PCI function."""
    return match_of(f"{device.vendor_id}:{device.device_id}", device.subsystem_id)


@dataclass(frozen=True)
class SeenGpu:
    """One GPU in nvidia-smi's words (``said``), with its PCI function and what the catalog knows of its model."""

    said: Mapping[str, Any]
    device: PciDevice | None
    match: GpuMatch | None

    @property
    def component(self) -> str:
        """``gpu3``, by nvidia-smi's order."""
        return f"gpu{self.said['index']}"

    @property
    def known(self) -> Mapping[str, Any]:
        """The catalog's facts on which all models with this PCI id agree; empty for a model that it has not."""
        return self.match.common if self.match else NOTHING

    @property
    def name(self) -> str:
        """As the catalog calls the model, else as nvidia-smi does."""
        one = self.match.gpu if self.match else None
        return one.name if one else str(self.said.get("name") or "unknown GPU")

    @property
    def is_vgpu(self) -> bool:
        """A slice that a hypervisor made: the card itself is not seen here."""
        return self.said.get("virtualization_mode") == "VGPU"

    @property
    def mig(self) -> bool:
        """The GPU is divided by MIG."""
        return self.said.get("mig_mode") is True

    @property
    def faults(self) -> tuple[str, ...]:
        """nvidia-smi's words in place of values: ``GPU is lost`` …"""
        return tuple(self.said.get("errors") or ())

    @property
    def for_servers(self) -> bool:
        """A model made for data centres: it has ECC, and tells of it."""
        return self.known.get("market") == "datacenter"

    def part(self, name: str) -> Mapping[str, Any]:
        """A group of values, empty where nvidia-smi has none: ``ecc``, ``pcie`` …"""
        return self.said.get(name) or NOTHING

    def untold(self, what: str, *, expected: bool) -> Verdict:
        """The verdict on a value that nvidia-smi does not tell: ``error`` where this model should have it."""
        if self.mig:
            return Verdict(Status.SKIP, f"nvidia-smi does not tell {what} of a GPU in MIG mode")
        if expected:
            return Verdict(Status.ERROR, f"nvidia-smi does not tell {what} of {self.name}")
        return Verdict(Status.SKIP, f"nvidia-smi does not tell {what} of {self.name}, and it need not have that")


def smi_document(node: NodeFacts) -> Mapping[str, Any] | Verdict:
    """What nvidia-smi answered, or the verdict on there being no answer.

    A node whose module is not loaded or does not match its library has a check that says so; here it is ``skip``.
    """
    if node.loaded_driver is None:
        return Verdict(Status.SKIP, "no NVIDIA module is loaded (driver.module-loaded says why)")
    smi = node.smi
    if smi is None:
        return Verdict(
            Status.ERROR,
            "nvidia-smi is not installed",
            remedy="Install it: role nvidia_driver, tag nvidia_driver_install.",
        )
    if smi.error_kind == MISMATCH:
        return Verdict(Status.SKIP, "nvidia-smi cannot answer (driver.library-matches-module says why)")
    if smi.error_kind == "no-devices":
        return {"attached_gpus": 0, "gpus": []}
    if smi.document is None:
        return Verdict(
            Status.FAIL if smi.error_kind == "gpu-lost" else Status.ERROR,
            f"nvidia-smi: {smi.error_message or smi.error_kind or 'no answer'}",
            remedy="dmesg has the driver's own words; a lost GPU needs a reboot or a power cycle.",
        )
    return smi.document


def seen_gpus(node: NodeFacts) -> list[SeenGpu] | Verdict:
    """Every GPU that nvidia-smi has, or the verdict on there being none to look at."""
    document = smi_document(node)
    if isinstance(document, Verdict):
        if document.status is Status.FAIL:
            return Verdict(Status.SKIP, f"{document.message} (gpu.count says more)")
        return document
    if not document["gpus"]:
        return Verdict(Status.SKIP, "the driver has no GPU to look at (gpu.count says why)")
    by_slot = {device.slot: device for device in node.pci or ()}
    return [_seen(said, by_slot.get(said.get("pci_bus_id") or "")) for said in document["gpus"]]


def _seen(said: Mapping[str, Any], device: PciDevice | None) -> SeenGpu:
    device_id, subsystem_id = said.get("pci_device_id"), said.get("pci_subsystem_id")
    if device_id:
        return SeenGpu(said, device, match_of(device_id, subsystem_id))
    return SeenGpu(said, device, model_of(device) if device else None)


OfOneGpu = Callable[[SeenGpu], Verdict]


def gpu_check(check_id: str, *, means: str, remedy: str, seen_by_guest: bool = False) -> Callable[[OfOneGpu], OfOneGpu]:
    """Register a function of one GPU as a check of all.

    A lost GPU is left to ``gpu.answers``. ``seen_by_guest``: holds of a vGPU too, of which all else is hidden.
    """

    def decorate(function: OfOneGpu) -> OfOneGpu:
        def judge(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
            gpus = seen_gpus(node)
            if isinstance(gpus, Verdict):
                yield gpus
                return
            for gpu in gpus:
                yield replace(_hidden(gpu, seen_by_guest=seen_by_guest) or function(gpu), component=gpu.component)

        registry.check(check_id, needs=("loaded_driver", "smi"), needs_gpu=True, means=means, remedy=remedy)(judge)
        return function

    return decorate


def _hidden(gpu: SeenGpu, *, seen_by_guest: bool) -> Verdict | None:
    if LOST.intersection(gpu.faults):
        return Verdict(Status.SKIP, "the GPU does not answer (gpu.answers says more)")
    if gpu.is_vgpu and not seen_by_guest:
        return Verdict(Status.SKIP, "a vGPU: only its host sees the card")
    return None
