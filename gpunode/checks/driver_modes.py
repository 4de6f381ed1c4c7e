"""Checks on what the driver supports of a GPU, and on its modes that break CUDA or go unnoticed (HMM, GSP)."""

import re
from collections.abc import Iterator, Sequence

from packaging.version import Version

from gpunode.catalog import Gpu, Platform, driver_rules, load
from gpunode.checks.compare import failed, passed, skipped, warned
from gpunode.checks.driver import loaded_driver
from gpunode.checks.gpus import CATALOG, model_of
from gpunode.checks.links import gpus_of
from gpunode.checks.packages import ROLE
from gpunode.checks.registry import CheckResult, registry
from gpunode.errors import UsageError
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.node import NodeFacts

Objection = tuple[str, str | int, bool]
"""Message, expected value, and whether the fact is sure."""


def fits(loaded: LoadedDriver, models: Sequence[Gpu], boards: Sequence[Platform]) -> CheckResult:
    """Return the result for a driver, the models that a PCI id stands for, and the platforms that the node may be.

    An objection fails only if it applies to all models; if it applies to some, or depends on an unsure fact, it warns.
    """
    objections = [_objection(loaded, model, boards) for model in models]
    against = [objection for objection in objections if objection is not None]
    if against:
        message, expected, _ = against[0]
        all_refuse = len(against) == len(objections) and all(sure for _, _, sure in against)
        refused = failed if all_refuse else warned
        return refused(message, expected=expected, measured=loaded.version, source=CATALOG)
    doubt = _not_listed(loaded, models[0])
    flavour = f" ({loaded.flavour})" if loaded.flavour else ""
    good = f"driver {loaded.version}{flavour} fits {models[0].name}"
    return (warned if doubt else passed)(doubt or good, measured=loaded.version, source=CATALOG)


def _objection(loaded: LoadedDriver, gpu: Gpu, boards: Sequence[Platform]) -> Objection | None:
    version = _number(loaded.version)
    last = driver_rules.last_branch(gpu, version.major)
    if last is not None:
        return f"branch {last.value} is the last that drives {gpu.name}", int(last.value), last.sure
    only = driver_rules.modules(load(), gpu, loaded.flavour)
    if only is not None:
        message = f"{gpu.name} needs the {only.value} kernel modules, the {loaded.flavour} ones are loaded"
        return message, only.value, only.sure
    return _below_minimum(version, gpu, boards) or _too_old_for_cuda(version, gpu)


def _below_minimum(version: Version, gpu: Gpu, boards: Sequence[Platform]) -> Objection | None:
    """Return the objection by the documented minimum of the model, the platform, or all boards of the model; else
    None."""
    of_model = driver_rules.min_driver(gpu, version)
    if of_model is not None:
        return f"{gpu.name} needs driver {of_model.value} or newer", of_model.value, of_model.sure
    of_boards = [(board, bound) for board in boards if (bound := driver_rules.min_driver(board, version)) is not None]
    if of_boards and len(of_boards) == len(boards):
        board, bound = min(of_boards, key=lambda pair: _number(pair[1].value))
        return f"{board.name} needs driver {bound.value} or newer", bound.value, bound.sure
    of_all = None if boards else driver_rules.min_driver_of_boards(load(), gpu, version)
    if of_all is not None:
        return f"{gpu.name} is on boards that require driver {of_all.value} or newer", of_all.value, of_all.sure
    return None


def _too_old_for_cuda(version: Version, gpu: Gpu) -> Objection | None:
    """Return the objection to a driver with a CUDA older than the first with code for the model; else None."""
    try:
        branch = load().branch_of(str(version.major))
    except UsageError:
        return None
    first = None if branch.native_cuda is None else driver_rules.first_cuda(load(), gpu, branch.native_cuda)
    if first is None:
        return None
    known = f"CUDA {first.value} is the first"
    message = f"branch {branch.id} (CUDA {branch.native_cuda}) does not support {gpu.name}: {known}"
    return message, first.value, first.sure


def _not_listed(loaded: LoadedDriver, gpu: Gpu) -> str | None:
    """Return why the README of the open kernel modules casts doubt on a release; None if it lists the model."""
    version = _number(loaded.version)
    first = driver_rules.first_listed(gpu, version.major, version)
    if loaded.flavour != "open" or first is None:
        return None
    which = "" if first.value == "never" else f" before {first.value}"
    return f"no release of branch {version.major}{which} lists {gpu.name} among the GPUs of its open modules"


def _number(version: str) -> Version:
    return Version(".".join(re.findall(r"\d+", version)[:4]) or "0")


HMM_OFF = (
    "echo options nvidia_uvm uvm_disable_hmm=1 > /etc/modprobe.d/nvidia-uvm-hmm.conf, then with idle GPUs "
    "modprobe -r nvidia_uvm && modprobe nvidia_uvm, or reboot."
)
HMM_SOURCE = "NVIDIA, CUDA 13.2 features archive, known issues: CUDA initialization can fail with KASLR"
GSP_SOURCE = "NVIDIA driver 580 README, GSP Firmware"
GSP_NEEDED = ("hopper", "blackwell", "rubin")
GSP_DEFAULT = ("turing", "ampere", "ada", *GSP_NEEDED)


@registry.check(
    "driver.hmm",
    needs=("loaded_driver", "module_parameters", "kernel_log"),
    needs_gpu=True,
    means="Heterogeneous Memory Management does not keep CUDA from starting: on some kernels nvidia-uvm of the open "
    "modules gets no address range for it, and cuInit returns 3, though nvidia-smi works.",
    remedy=HMM_OFF,
    state="drain",
    actions=("fix_configuration", "reload_driver", "restart_os"),
)
def hmm(node: NodeFacts) -> Iterator[CheckResult]:
    loaded, disabled = loaded_driver(node), hmm_disabled(node)
    errors = [event for event in node.kernel_log.events if event.kind == "uvm"] if node.kernel_log else []
    mapped = [event for event in errors if "request_free_mem_region" in event.message]
    if mapped and not disabled:
        message = f"HMM keeps CUDA from starting (cuInit returns 3): {mapped[-1].message}"
        yield failed(message, expected=0, measured=len(mapped), unit="lines", source=HMM_SOURCE)
    elif errors and not disabled:
        message = f"nvidia-uvm reports an error: {errors[-1].message}"
        yield warned(message, expected=0, measured=len(errors), unit="lines")
    elif disabled or loaded.flavour == "proprietary":
        yield passed("HMM is off", expected=0, measured=0, unit="lines")
    else:
        yield passed("nvidia-uvm reports no error", expected=0, measured=0, unit="lines")


def hmm_disabled(node: NodeFacts) -> bool | None:
    """Return whether nvidia-uvm was loaded without HMM; None if it is not loaded or does not report it."""
    value = (node.module_parameters or {}).get("nvidia_uvm", {}).get("uvm_disable_hmm")
    return None if value is None else value in ("Y", "1")


@registry.check(
    "driver.gsp",
    needs=("loaded_driver", "driver_parameters", "driver_gpus", "pci"),
    needs_gpu=True,
    means="The GPU System Processor runs its firmware where the driver uses it by default (Turing and later): "
    "NVreg_EnableGpuFirmware=0, often left from a workaround, switches it off. Open modules and Hopper need it.",
    remedy=f"Remove NVreg_EnableGpuFirmware from /etc/modprobe.d (grep -r EnableGpuFirmware /etc/modprobe.d names the "
    f"file) and from the kernel's command line, rebuild the initramfs, and reboot. Files missing: {ROLE}.",
    state="drain",
    actions=("fix_configuration", "restart_os"),
    scope="gpu",
    architectures=GSP_DEFAULT,
)
def gsp(node: NodeFacts) -> Iterator[CheckResult]:
    loaded = loaded_driver(node)
    enabled = (node.driver_parameters or {}).get("EnableGpuFirmware")
    firmware = {gpu.slot: gpu.firmware for gpu in node.driver_gpus or ()}
    for component, device in gpus_of(node):
        match = model_of(device)
        architecture = match.common.get("architecture") if match is not None else None
        version = firmware.get(device.slot)
        if architecture not in GSP_DEFAULT:
            yield skipped("a model that need not have GSP firmware", component=component)
        elif version is not None:
            yield passed(f"GSP firmware {version} runs", component=component, measured=version)
        elif enabled == "0":
            needed = architecture in GSP_NEEDED or loaded.flavour == "open"
            source = GSP_SOURCE if not needed else f"{GSP_SOURCE}; {CATALOG}"
            message = "GSP firmware is switched off (NVreg_EnableGpuFirmware=0)"
            result = failed if needed else warned
            yield result(message, component=component, expected="on", measured="off", source=source)
        else:
            message = "the driver reports no GSP firmware, and does not switch it off"
            yield skipped(message, component=component)
