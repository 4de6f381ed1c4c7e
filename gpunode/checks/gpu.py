"""Checks on GPUs being there: on the bus, with the driver, in /dev, answering."""

from collections.abc import Iterator

from gpunode.catalog import load
from gpunode.checks.gpus import CATALOG, LOST, SeenGpu, gpu_check, match_of, model_of, seen_gpus, smi_document
from gpunode.checks.registry import Expectation, Status, Verdict, no_gpu, registry
from gpunode.checks.words import counted, listed
from gpunode.errors import UsageError
from gpunode.facts.node import DeviceNode, NodeFacts

SITE = "site file"


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


@registry.check(
    "gpu.model",
    needs=("pci",),
    needs_gpu=True,
    means="Every GPU on the bus is of the model that the site says; where it says none, of a model that the catalog "
    "knows. What a GPU should have (links, clocks, ECC) is judged by its model.",
    remedy="Compare lspci -nn -d 10de: with what was ordered; correct `model` in the file of --expect where that is "
    "wrong.",
)
def gpu_model(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
    names: dict[str, list[str]] = {}
    unknown = []
    for device in node.gpus_on_bus or ():
        match = model_of(device)
        if match is None:
            unknown.append(f"{device.vendor_id}:{device.device_id}")
        names.setdefault(_name_of(device.device_id, device.subsystem_id), []).append(device.slot)
    measured = listed([f"{len(slots)} x {name}" for name, slots in names.items()])
    if expect.model is not None:
        yield _as_expected(node, expect.model, measured)
    elif unknown:
        ids = listed(sorted(set(unknown)))
        yield Verdict(Status.SKIP, f"the catalog does not know {ids}: what such a GPU should have is not judged")
    else:
        yield Verdict(Status.PASS, measured, measured=measured, source=CATALOG)


def _name_of(device_id: str, subsystem_id: str | None) -> str:
    match = match_of(f"10de:{device_id}", subsystem_id)
    return " or ".join(gpu.name for gpu in match.gpus) if match else f"10de:{device_id}"


def _as_expected(node: NodeFacts, wanted: str, measured: str) -> Verdict:
    try:
        ids = {gpu.id for gpu in load().find_gpu(wanted).gpus}
    except UsageError as err:
        return Verdict(Status.ERROR, f"site file: model: {err}", expected=wanted, measured=measured, source=SITE)
    others = []
    for device in node.gpus_on_bus or ():
        match = model_of(device)
        if match is None or not ids.intersection(gpu.id for gpu in match.gpus):
            others.append(f"{device.slot} is {_name_of(device.device_id, device.subsystem_id)}")
    if others:
        message = f"not {wanted}: {listed(others)}"
        return Verdict(Status.FAIL, message, expected=wanted, measured=measured, source=SITE)
    return Verdict(Status.PASS, measured, expected=wanted, measured=measured, source=SITE)


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
    "gpu.device-nodes",
    needs=("loaded_driver", "driver_gpus", "device_nodes"),
    needs_gpu=True,
    means="The device files that programs and containers open are there: /dev/nvidiactl, /dev/nvidiaN for each GPU, "
    "and /dev/nvidia-uvm, which CUDA needs.",
    remedy="nvidia-modprobe -u -c 0 makes them; role nvidia_driver, tag nvidia_driver_service loads the modules that "
    "they belong to. A plain file in a device's place has to be removed first.",
)
def gpu_device_nodes(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    if node.loaded_driver is None:
        yield Verdict(Status.SKIP, "no NVIDIA module is loaded (driver.module-loaded says why)")
        return
    numbers = [gpu.minor for gpu in node.driver_gpus or () if not gpu.excluded]
    if not numbers or None in numbers:
        yield Verdict(Status.ERROR, "the driver does not tell the device numbers of its GPUs")
        return
    nodes = {device.path: device for device in node.device_nodes or ()}
    wanted = ["/dev/nvidiactl", *(f"/dev/nvidia{number}" for number in numbers)]
    missing = [path for path in wanted if not _is_device(nodes.get(path))]
    if missing:
        message = f"missing: {listed([_what_is_there(path, nodes.get(path)) for path in missing])}"
        yield Verdict(Status.FAIL, message, expected=len(wanted), measured=len(wanted) - len(missing), unit="devices")
    elif not _is_device(nodes.get("/dev/nvidia-uvm")):
        yield Verdict(
            Status.WARN,
            "/dev/nvidia-uvm is missing: the first CUDA program has to make it, and in a container it cannot",
            expected="/dev/nvidia-uvm",
        )
    else:
        message = f"/dev/nvidiactl, /dev/nvidia-uvm and {counted(len(numbers), 'GPU')} have their device files"
        yield Verdict(Status.PASS, message, expected=len(wanted), measured=len(wanted), unit="devices")


def _is_device(found: DeviceNode | None) -> bool:
    return found is not None and found.kind == "character"


def _what_is_there(path: str, found: DeviceNode | None) -> str:
    return path if found is None else f"{path} (a {found.kind} is in its place)"


@registry.check(
    "gpu.answers",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means='Every GPU gives values where it is asked for values, not "GPU is lost", "ERR!" or "Unknown Error".',
    remedy="dmesg has the driver's own words (Xid). Drain the node and restart it; power it off if that does not help, "
    "then check seating, power and temperature.",
)
def gpu_answers(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    gpus = seen_gpus(node)
    if isinstance(gpus, Verdict):
        yield gpus
        return
    for gpu in gpus:
        yield _answers(gpu)


def _answers(gpu: SeenGpu) -> Verdict:
    where = gpu.said.get("pci_bus_id") or "at an unknown place"
    if not gpu.faults:
        return Verdict(Status.PASS, f"{gpu.name} {where} answers", gpu.component)
    lost = LOST.intersection(gpu.faults)
    status = Status.FAIL if lost else Status.WARN
    return Verdict(status, f"{gpu.name} {where} says {listed(gpu.faults)}", gpu.component, measured=listed(gpu.faults))


@gpu_check(
    "gpu.recovery",
    means="No GPU waits for a reset, a drain or a reboot: the driver says so of itself.",
    remedy="Drain the node, then do what the driver asks for: nvidia-smi --gpu-reset -i GPU, or a reboot.",
)
def gpu_recovery(gpu: SeenGpu) -> Verdict:
    action, reset = gpu.said.get("recovery_action"), gpu.said.get("reset_required")
    if action not in (None, "None"):
        return Verdict(Status.FAIL, f"the driver asks for: {action}", expected="None", measured=action)
    if reset:
        return Verdict(Status.FAIL, "the driver asks for a reset", expected=False, measured=True)
    if action is None and reset is None:
        return Verdict(Status.SKIP, "this driver does not tell whether a GPU needs a reset")
    return Verdict(Status.PASS, "no reset or reboot is asked for", measured=action)
