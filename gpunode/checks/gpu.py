"""Checks on the presence of GPUs: on the bus, in the driver, in /dev, in nvidia-smi."""

from collections.abc import Iterator

from gpunode.catalog import load
from gpunode.checks.compare import equals, failed, passed, skipped, undetermined, warned
from gpunode.checks.driver import LOG, loaded_driver
from gpunode.checks.gpus import (
    ANSWERS,
    CATALOG,
    LOST_STATUS,
    OFF_THE_BUS,
    SeenGpu,
    gpu_check,
    listed_gpus,
    lost_gpus,
    lost_slots,
    match_of,
    match_of_name,
    model_of,
    reports_loss,
    seen_gpus,
    slot_in,
    smi_document,
)
from gpunode.checks.machine import TooFew, fewer_than_before, too_few
from gpunode.checks.registry import CheckResult, Expectation, Skip, Status, Undetermined, no_gpu, registry
from gpunode.errors import UsageError
from gpunode.facts.driver import DeviceNode
from gpunode.facts.node import NodeFacts
from gpunode.facts.parsers.smi_base import error_kind
from gpunode.facts.parsers.smi_gpu import NOT_LISTED
from gpunode.facts.tools import ToolRun, meaning_of
from gpunode.text import counted, listed

SITE = "site file"
MANUAL = "nvidia-smi(1), RETURN VALUE"
DCGM = "DCGM health watch of the infoROM (DCGM_FR_CORRUPT_INFOROM: warn)"
INFOROM = "inforom is corrupted"
INFOROM_REMEDY = "Drain the node and run dcgmi diag -r 3; if the warning stays after a reset, return the card."
NONE_FOUND_STATUS, INFOROM_STATUS = 6, 14
SEVERE = frozenset({8, 10, 11, 16})
NO_ANSWER = frozenset({3, 13})
"""Exit statuses of queries for features that a GPU or a driver does not have."""
XML_COMMAND = "nvidia-smi -q -x"
NEWER = "Update gpunode: a newer catalog may have the model. gpunode catalog list gpus lists those of this one."


@registry.check(
    "gpu.present",
    needs=("pci",),
    means="NVIDIA GPUs are on the PCI bus, in the number that the site file sets; without one, not fewer than in the "
    "node's previous run, than the node's board has by the catalog, or than most nodes of this run have with the same "
    "machine and GPUs. Where that is not certain (an odd number of cards, a part of a board), fewer warn. A node "
    "without GPUs is an error unless the site file sets gpus to 0.",
    remedy="Look at lspci -d 10de:, the firmware's PCIe settings, power and seating; in a virtual machine, at the "
    "passthrough. Set `gpus` in the file of --expect for a node that has fewer GPUs by design (`gpus: 0` for none).",
    state="drain",
    actions=("power_cycle", "replace_hardware"),
)
def gpu_present(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    slots = [device.slot for device in node.gpus_on_bus or ()]
    expected = expect.gpus
    source = None if expected is None else SITE
    if not slots:
        reason = no_gpu(node, expect) or ""
        status = Status.SKIP if expected == 0 else Status.ERROR
        yield CheckResult(status, reason, expected=expected, measured=0, source=source)
    elif expected is not None and expected != len(slots):
        message = f"{counted(len(slots), 'NVIDIA GPU')} on the PCI bus ({listed(slots, most=8)}), {expected} expected"
        yield failed(message, expected=expected, measured=len(slots), source=source)
    elif expected is None and (fewer := _fewer(node, expect)) is not None:
        message = f"{counted(fewer.measured, 'NVIDIA GPU')} on the PCI bus ({listed(slots, most=8)}): {fewer.reason}"
        status = Status.FAIL if fewer.certain else Status.WARN
        yield CheckResult(status, message, expected=fewer.expected, measured=fewer.measured, source=fewer.source)
    else:
        message = f"{counted(len(slots), 'NVIDIA GPU')} on the PCI bus: {listed(slots, most=8)}"
        yield passed(message, expected=expected, measured=len(slots), source=source)


def _fewer(node: NodeFacts, expect: Expectation) -> TooFew | None:
    """Return what is missing by the first source that finds it; the fleet's majority is compared after all nodes."""
    earlier = expect.earlier_gpus
    return (fewer_than_before(node, earlier) if earlier is not None else None) or too_few(node)


@registry.check(
    "gpu.model",
    needs=("pci",),
    needs_gpu=True,
    means="Every GPU on the bus is of the model in the site file or, without one, of a model in the catalog. "
    "nvidia-smi prints the product name of that model, and all SXM modules are of one model. Links, clocks and "
    "ECC are compared with the model.",
    remedy="Compare lspci -nn -d 10de: with the order; if `model` in the file of --expect is wrong, correct it.",
    state="drain",
    actions=("fix_configuration",),
)
def gpu_model(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
    names: dict[str, list[str]] = {}
    for device in node.gpus_on_bus or ():
        names.setdefault(_name_of(device.device_id, device.subsystem_id), []).append(device.slot)
    measured = listed([f"{len(slots)} x {name}" for name, slots in names.items()])
    others = [*_unknown(node), *_contradicted(node)]
    yield from others
    if expect.model is not None:
        yield _as_expected(node, expect.model, measured)
    elif not others:
        yield passed(measured, measured=measured, source=CATALOG)
    yield from _mixed(node, measured)


def _unknown(node: NodeFacts) -> Iterator[CheckResult]:
    """Yield results for GPUs with a PCI id that the catalog lacks: by their product name, or undetermined."""
    named = {gpu.reported.pci_bus_id: gpu for gpu in listed_gpus(node)}
    ids: dict[str, str | None] = {}
    for device in node.gpus_on_bus or ():
        if model_of(device) is None:
            gpu = named.get(device.slot)
            ids[device.pci_id] = gpu.name if gpu and gpu.match else None
    lacking = sorted(number for number, name in ids.items() if name is None)
    if lacking:
        message = f"the catalog does not have {listed(lacking)}: what such a GPU needs is unknown"
        yield undetermined(message, source=CATALOG, remedy=NEWER)
    for number, name in ids.items():
        if name is not None:
            message = f"the catalog does not have {number}; its product name is that of {name}"
            yield warned(message, source=CATALOG, remedy=NEWER)


def _contradicted(node: NodeFacts) -> Iterator[CheckResult]:
    """Yield results for GPUs that print the product name of another model than that of their PCI id."""
    for gpu in listed_gpus(node):
        printed = gpu.reported.name
        named = match_of_name(printed) if printed and not gpu.is_vgpu else None
        by_id = match_of(gpu.reported.pci_device_id or "", gpu.reported.pci_subsystem_id)
        if named is None or by_id is None or {row.id for row in named.gpus} & {row.id for row in by_id.gpus}:
            continue
        sure = all(row.sure("product_names") and row.sure("pci") for row in (*named.gpus, *by_id.gpus))
        known = " or ".join(row.name for row in by_id.gpus)
        yield CheckResult(
            Status.FAIL if sure else Status.WARN,
            f"nvidia-smi prints {printed}, its PCI id {gpu.reported.pci_device_id} is that of {known}",
            gpu.component,
            expected=known,
            measured=printed,
            source=CATALOG,
        )


def _mixed(node: NodeFacts, measured: str) -> Iterator[CheckResult]:
    """Yield results for several models on a board that is sold with one: SXM modules and those of racks."""
    matches = [match for device in node.gpus_on_bus or () if (match := model_of(device)) is not None]
    modules = {" or ".join(row.name for row in match.gpus) for match in matches if match.common.get("form") == "sxm"}
    if len(modules) > 1:
        message = f"{len(modules)} models of SXM modules in one node: {measured}"
        yield warned(message, expected=1, measured=len(modules), unit="models", source=CATALOG)


def _name_of(device_id: str, subsystem_id: str | None) -> str:
    match = match_of(f"10de:{device_id}", subsystem_id)
    return " or ".join(gpu.name for gpu in match.gpus) if match else f"10de:{device_id}"


def _as_expected(node: NodeFacts, expected: str, measured: str) -> CheckResult:
    try:
        ids = {gpu.id for gpu in load().find_gpu(expected).gpus}
    except UsageError as err:
        return undetermined(f"site file: model: {err}", expected=expected, measured=measured, source=SITE)
    others = []
    for device in node.gpus_on_bus or ():
        match = model_of(device)
        if match is None or not ids.intersection(gpu.id for gpu in match.gpus):
            others.append(f"{_name_of(device.device_id, device.subsystem_id)} at {device.slot}")
    if others:
        message = f"{expected} expected, found {listed(others)}"
        return failed(message, expected=expected, measured=measured, source=SITE)
    return passed(measured, expected=expected, measured=measured, source=SITE)


@registry.check(
    "gpu.count",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means="The driver has every NVIDIA GPU that is on the PCI bus, and nvidia-smi lists every GPU that it counts.",
    remedy="dmesg has the driver's reason for leaving out a GPU (NVRM, Xid); reseat it or power-cycle the node.",
    state="drain",
    actions=("restart_os", "power_cycle", "replace_hardware"),
)
def gpu_count(node: NodeFacts) -> Iterator[CheckResult]:
    document = smi_document(node)
    on_bus = [device.slot for device in node.gpus_on_bus or ()]
    listed_slots = [gpu.pci_bus_id for gpu in document.gpus]
    attached = document.attached_gpus
    seen = len(listed_slots) if attached is None else attached
    missing = [slot for slot in on_bus if slot not in listed_slots]
    lost = lost_slots(node)
    if missing and all(slot in lost for slot in missing):
        raise Skip(f"nvidia-smi cannot reach {listed(missing)} ({ANSWERS})")
    which = f" (not with the driver: {listed(missing)})" if missing else ""
    if seen != len(listed_slots) and seen == len(on_bus):
        message = f"nvidia-smi counts {counted(seen, 'GPU')} and lists {len(listed_slots)}{which}"
        yield failed(message, expected=len(on_bus), measured=len(listed_slots))
        return
    bad = f"{counted(len(on_bus), 'GPU')} on the bus, {seen} with the driver{which}"
    yield equals(seen, len(on_bus), f"the driver has all {counted(seen, 'GPU')} of the bus", bad)


@registry.check(
    "gpu.device-nodes",
    needs=("loaded_driver", "driver_gpus", "device_nodes"),
    needs_gpu=True,
    means="The device files that programs and containers open exist: /dev/nvidiactl, /dev/nvidiaN for each GPU, "
    "and /dev/nvidia-uvm, which CUDA needs.",
    remedy="Run nvidia-modprobe -u -c 0 to create them; role nvidia_driver, tag nvidia_driver_service loads "
    "their modules. Remove a regular file at a device's path first.",
    state="drain",
    actions=("run_role:nvidia_driver:nvidia_driver_service",),
)
def gpu_device_nodes(node: NodeFacts) -> Iterator[CheckResult]:
    loaded_driver(node)
    numbers = [gpu.minor for gpu in node.driver_gpus or () if not gpu.excluded]
    if not numbers or None in numbers:
        raise Undetermined("the driver does not report the device numbers of its GPUs")
    nodes = {device.path: device for device in node.device_nodes or ()}
    expected = ["/dev/nvidiactl", *(f"/dev/nvidia{number}" for number in numbers)]
    missing = [path for path in expected if not _is_device(nodes.get(path))]
    if missing:
        message = f"missing: {listed([_what_is_there(path, nodes.get(path)) for path in missing])}"
        yield failed(message, expected=len(expected), measured=len(expected) - len(missing), unit="devices")
    elif not _is_device(nodes.get("/dev/nvidia-uvm")):
        yield warned(
            "/dev/nvidia-uvm is missing: the first CUDA program must create it, which is not possible in a container",
            expected="/dev/nvidia-uvm",
        )
    else:
        message = f"/dev/nvidiactl, /dev/nvidia-uvm and {counted(len(numbers), 'GPU')} have their device files"
        yield passed(message, expected=len(expected), measured=len(expected), unit="devices")


def _is_device(device: DeviceNode | None) -> bool:
    return device is not None and device.kind == "character"


def _what_is_there(path: str, device: DeviceNode | None) -> str:
    return path if device is None else f"{path} (a {device.kind} exists instead)"


@registry.check(
    "gpu.answers",
    needs=("loaded_driver", "smi"),
    needs_gpu=True,
    means='nvidia-smi reaches every GPU and reads values of it, not "GPU is lost", "ERR!" or "Unknown Error". Checks '
    "that need values of a GPU that is lost are skipped and point here.",
    remedy=f"{LOG} Drain the node and restart it; power it off if that does not help, then check seating, power and "
    "temperature.",
    state="drain",
    actions=("restart_os", "power_cycle", "replace_hardware"),
    scope="gpu",
)
def gpu_answers(node: NodeFacts) -> Iterator[CheckResult]:
    smi = node.smi
    lost = lost_slots(node)
    answering = listed_gpus(node)
    if reports_loss(node) and not lost and not any(gpu.lost for gpu in answering):
        yield from _lost_by_status(node, answering)
        return
    named = {gpu.reported.pci_bus_id for gpu in answering}
    for gpu in answering:
        yield _answers(gpu)
    for slot, message in lost.items():
        if slot not in named:
            yield failed(message, component=f"gpu at {slot}", measured="lost")
    if smi is not None and smi.error_kind == "gpu-lost" and not lost:
        yield failed(smi.error_message or "a GPU is lost", measured="lost")
    elif not answering and not lost:
        seen_gpus(node)  # raises Skip with the reason


def _lost_by_status(node: NodeFacts, answering: list[SeenGpu]) -> Iterator[CheckResult]:
    """Yield results that name the GPU by the Xid in the kernel's log, if there is one; the exit status does not name
    it."""
    fallen = lost_gpus(node)
    for gpu in answering:
        if gpu.reported.pci_bus_id not in fallen:
            yield _answers(gpu)
    printed = node.smi.error_message if node.smi and node.smi.error_kind == "gpu-lost" else None
    message = printed or f"nvidia-smi ends with {meaning_of(LOST_STATUS)}"
    index = {gpu.reported.pci_bus_id: gpu.component for gpu in answering}
    for slot in sorted(fallen):
        named = f"{slot}: {message} (Xid {OFF_THE_BUS} in the kernel's log)"
        yield failed(named, component=index.get(slot, f"gpu at {slot}"), measured="lost")
    if not fallen:
        yield failed(message, measured="lost")


def _smi_runs(node: NodeFacts) -> list[ToolRun]:
    return [run for run in node.tool_runs or () if run.command.startswith("nvidia-smi")]


def _answers(gpu: SeenGpu) -> CheckResult:
    where = gpu.reported.pci_bus_id or "at an unknown address"
    if gpu.lost is not None:
        return failed(f"{gpu.name} {where}: {gpu.lost}", component=gpu.component, measured="lost")
    if gpu.faults:
        words = listed(gpu.faults)
        return warned(f"{gpu.name} {where}: values read {words}", component=gpu.component, measured=words)
    return passed(f"{gpu.name} {where} answers", component=gpu.component)


@registry.check(
    "gpu.messages",
    needs=("loaded_driver", "smi", "tool_runs"),
    needs_gpu=True,
    means="nvidia-smi exits with status 0 and prints no warning. Its exit statuses report power cables, "
    "interrupts and a corrupted infoROM, independent of the values.",
    remedy="nvidia-smi -q; echo $? shows message and exit status. Power cables and interrupts: power the node off and "
    "reseat the card.",
    state="drain",
    actions=("power_cycle", "replace_hardware"),
    scope="gpu",
)
def gpu_messages(node: NodeFacts) -> Iterator[CheckResult]:
    document = smi_document(node)
    index = {gpu.pci_bus_id: f"gpu{gpu.index}" for gpu in document.gpus}
    messages = [message for message in _messages(node) if error_kind(message) != "gpu-lost"]
    inforom = [message for message in messages if INFOROM in message.lower()]
    for message in messages:
        slot = slot_in(message)
        component = index.get(slot, f"gpu at {slot}") if slot else "node"
        corrupted = message in inforom
        source, remedy = (DCGM, INFOROM_REMEDY) if corrupted else (None, None)
        yield warned(message, component=component, measured=message[:80], source=source, remedy=remedy)
    statuses: dict[int, list[str]] = {}
    for run in _smi_runs(node):
        if run.ended == "exit" and run.exit_status != 0:
            statuses.setdefault(run.exit_status, []).append(run.command)
    explained = {LOST_STATUS} | ({INFOROM_STATUS} if inforom else set())
    if not document.gpus:
        explained.add(NONE_FOUND_STATUS)
    left = {status: commands for status, commands in statuses.items() if status not in explained}
    for status, commands in left.items():
        if status in NO_ANSWER and XML_COMMAND not in commands:
            continue  # A valid answer: the GPUs have no NVLink, or the driver does not support the query.
        message = f"{listed(commands)} ended with {meaning_of(status)}"
        severe = Status.FAIL if status in SEVERE else Status.WARN
        yield CheckResult(severe, message, expected=0, measured=status, source=MANUAL)
    if not messages and not [run for run, commands in left.items() if run not in NO_ANSWER or XML_COMMAND in commands]:
        yield passed("nvidia-smi prints no warning", expected=0, measured=0)


def _messages(node: NodeFacts) -> list[str]:
    """Return messages that nvidia-smi printed, each line once; gpu.count reports the number of listed GPUs."""
    answers = (node.smi, node.topology, node.peer_access, node.nvlink, node.nvlink_errors)
    lines = [line for answer in answers if answer for line in answer.messages]
    return [line for line in dict.fromkeys(lines) if not line.endswith(NOT_LISTED)]


@gpu_check(
    "gpu.recovery",
    means="The driver requests no reset, drain or reboot of the GPU.",
    remedy="Drain the node, then do what the driver requests: nvidia-smi --gpu-reset -i GPU, or a reboot.",
    state="drain",
    actions=("reset_gpu", "restart_os"),
)
def gpu_recovery(gpu: SeenGpu) -> CheckResult:
    action, reset = gpu.reported.recovery_action, gpu.reported.reset_required
    drain = gpu.reported.drain_and_reset_recommended
    if action not in (None, "None"):
        message = f"the driver requests: {action}"
        steps = ("restart_os",) if "reboot" in action.lower() else None
        return failed(message, expected="None", measured=action, actions=steps)
    if reset:
        return failed("the driver requests a reset", expected=False, measured=True)
    if drain:
        return failed("the driver recommends a drain and a reset", expected=False, measured=True)
    if action is None and reset is None and drain is None:
        return skipped("this driver has no value for whether a GPU needs a reset")
    return passed("no reset or reboot is requested", measured=action)
