"""Checks on GPUs: on the bus, with the driver, persistence."""

from collections.abc import Iterator
from typing import Any

from gpunode.checks.driver import MISMATCH
from gpunode.checks.registry import Expectation, Status, Verdict, no_gpu, registry
from gpunode.checks.words import counted, listed
from gpunode.facts.node import NodeFacts

SITE = "site file"
PERSISTENCE_UNIT = "nvidia-persistenced.service"
PERSISTENCE_REMEDY = "Switch persistence on: role nvidia_driver, tag nvidia_driver_service."


@registry.check(
    "gpu.present",
    needs=("pci",),
    means="NVIDIA GPUs are on the PCI bus, as many as the site says where it says a number. A node without a GPU "
    "cannot be judged as a GPU node unless the site says that it is meant to have none.",
    remedy="Look at lspci -d 10de:, the firmware's PCIe settings, power and seating; in a virtual machine, at the "
    "passthrough. A node that is meant to have none: `gpus: 0` in the file of --expect.",
)
def gpu_present(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
    slots = [device.slot for device in node.gpus_on_bus or ()]
    wanted = expect.gpus
    source = None if wanted is None else SITE
    if not slots:
        reason = no_gpu(node, expect) or ""
        status = Status.SKIP if wanted == 0 else Status.ERROR
        yield Verdict(status, reason, expected=wanted, measured=0, source=source)
    elif wanted is not None and wanted != len(slots):
        message = f"{counted(len(slots), 'NVIDIA GPU')} on the PCI bus ({listed(slots, most=8)}), {wanted} expected"
        yield Verdict(Status.FAIL, message, expected=wanted, measured=len(slots), source=source)
    else:
        message = f"{counted(len(slots), 'NVIDIA GPU')} on the PCI bus: {listed(slots, most=8)}"
        yield Verdict(Status.PASS, message, expected=wanted, measured=len(slots), source=source)


def smi_document(node: NodeFacts) -> dict[str, Any] | Verdict:
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


@registry.check(
    "gpu.count",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means="The driver has taken every NVIDIA GPU that is on the PCI bus.",
    remedy="dmesg says why the driver did not take a GPU (NVRM, Xid); reseat it or power-cycle the node.",
)
def gpu_count(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    document = smi_document(node)
    if isinstance(document, Verdict):
        yield document
        return
    on_bus = [device.slot for device in node.gpus_on_bus or ()]
    with_driver = {gpu.get("pci_bus_id") for gpu in document["gpus"]}
    attached = document.get("attached_gpus")
    seen = len(document["gpus"]) if attached is None else attached
    if seen == len(on_bus):
        yield Verdict(
            Status.PASS, f"the driver has {counted(seen, 'GPU')}, as the bus", expected=len(on_bus), measured=seen
        )
        return
    missing = [slot for slot in on_bus if slot not in with_driver]
    which = f" (not taken: {listed(missing)})" if missing else ""
    message = f"{counted(len(on_bus), 'GPU')} on the bus, {seen} with the driver{which}"
    yield Verdict(Status.FAIL, message, expected=len(on_bus), measured=seen)


@registry.check(
    "gpu.persistence",
    needs=("loaded_driver", "smi", "units"),
    needs_gpu=True,
    means="Persistence mode is on for every GPU, and the daemon that keeps it on is active: without it the driver "
    "lets go of an idle GPU, and its settings and fast start with it.",
    remedy=PERSISTENCE_REMEDY,
)
def persistence(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    document = smi_document(node)
    if isinstance(document, Verdict):
        yield document
        return
    if not document["gpus"]:
        yield Verdict(Status.ERROR, "the driver has no GPU to ask")
        return
    for gpu in document["gpus"]:
        yield _mode_of(gpu)
    daemon = next((unit for unit in node.units or () if unit.name == PERSISTENCE_UNIT), None)
    state = daemon.active if daemon is not None else "not installed"
    if state == "active":
        yield Verdict(Status.PASS, "the persistence daemon is active", component="nvidia-persistenced", measured=state)
    else:
        yield Verdict(
            Status.WARN,
            f"the persistence daemon is {state}: the mode is not set again after a reboot",
            component="nvidia-persistenced",
            expected="active",
            measured=state,
        )


def _mode_of(gpu: dict[str, Any]) -> Verdict:
    component, mode = f"gpu{gpu['index']}", gpu.get("persistence_mode")
    if mode is None:
        return Verdict(Status.ERROR, "nvidia-smi does not say the persistence mode", component)
    if mode:
        return Verdict(Status.PASS, "persistence mode is on", component, expected=True, measured=True)
    return Verdict(Status.FAIL, "persistence mode is off", component, expected=True, measured=False)
