"""Checks on modes of the driver that break CUDA or go unnoticed: HMM with open modules, GSP firmware switched off."""

from collections.abc import Iterator

from gpunode.checks.compare import failed, passed, skipped, warned
from gpunode.checks.driver import ROLE, loaded_driver
from gpunode.checks.gpus import CATALOG, model_of
from gpunode.checks.links import gpus_of
from gpunode.checks.registry import CheckResult, registry
from gpunode.facts.node import NodeFacts

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
