"""Faults of a simulated node: set, healed and listed; produced by their real mechanism where possible.

On the node, as root: ``fault --list``, ``fault [COMPONENT] FAULT [KEY=VALUE]…``, ``fault [COMPONENT] [FAULT] --heal``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import daemons, effects, kernel, modules, pci, state
from .readings import THROTTLES
from .state import FaultError

WRONG = 2
Fault = dict[str, Any]

_PERSISTENT = frozenset(
    "library-mismatch gpu-lost nvlink-down pcie-narrow throttle fabric-manager-version fabric-not-completed".split()  # noqa: SIM905
)
"""The others end with the reboot."""
_XIDS = {
    13: "Graphics Exception: ESR 0x505730=0xc0e0009, 0x505734=0x20, 0x505728=0x4c1eb72, 0x50572c=0x174",
    31: "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2b_b2a00000. "
    "Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    43: "Ch 00000008",
    45: "Ch 00000008",
    48: "DBE (double bit error) ECC Error: DED at physical address: 0x2b1f3c0",
    63: "Row Remapper: New row (0x00000000af19e2f0) marked for remapping, reset gpu to activate.",
    64: "Row Remapper: Failed to remap row",
    74: "NVLink: fatal error detected on link 2(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
    79: "GPU has fallen off the bus.",
    94: "Contained: CE User Channel (0x9). RST: No, D-RST: No",
    95: "Uncontained: FBHUB. RST: Yes, D-RST: No",
    119: "Timeout after 45s of waiting for RPC response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL)",
}
_UNKNOWN_XID = "Unknown error"
_NODE = "node"
_COMPONENT = re.compile(rf"gpu\d|{_NODE}$")
_AMPERE_ON = ("ampere", "hopper", "blackwell")


@dataclass(frozen=True)
class FaultKind:
    """One fault: its component type (``node``, ``gpu``, ``link``), description, details with defaults, functions."""

    where: str
    means: str
    details: dict[str, int | str]
    begin: Callable[[Fault], None]
    end: Callable[[Fault], None] = lambda _: None


# --- mechanisms


def gpu_of(fault: Fault) -> dict[str, Any]:
    """Return the GPU's entry in the hardware description."""
    index = int(re.match(r"gpu(\d+)", fault["component"])[1])  # type: ignore[index]
    gpu: dict[str, Any] = state.hardware()["gpus"][index]
    return gpu


def number_of(gpu: dict[str, Any]) -> int:
    """Return the position of a GPU among all functions, from which its addresses are derived."""
    slots = [function["pci_bus_id"] for function in pci.functions(state.hardware())]
    return slots.index(gpu["pci_bus_id"])


def _say_xid(fault: Fault, number: int, text: str | None = None) -> None:
    line = kernel.xid(gpu_of(fault)["pci_bus_id"], number, text or _XIDS.get(number, _UNKNOWN_XID))
    fault.setdefault("log", []).append(line)


def _log(fault: Fault, text: str) -> None:
    fault.setdefault("log", []).append(kernel.log(text, kernel.ERROR))


def _lose(fault: Fault) -> None:
    gpu = gpu_of(fault)
    pci.fall_off(gpu)
    _log(fault, f"NVRM: GPU at PCI:{gpu['pci_bus_id'].rsplit('.', 1)[0]}: {gpu['uuid']}")
    _say_xid(fault, 79)
    _log(fault, f"NVRM: GPU {gpu['pci_bus_id']}: GPU has fallen off the bus.")


def _find_again(fault: Fault) -> None:
    gpu = gpu_of(fault)
    pci.write_function(gpu, number_of(gpu))
    modules.take(gpu)


def _uncorrected(fault: Fault) -> None:
    gpu = gpu_of(fault)
    _say_xid(fault, 48)
    if gpu["architecture"] in _AMPERE_ON:
        _say_xid(fault, 94)


def _remap(fault: Fault) -> None:
    _say_xid(fault, 63)


def _narrow(fault: Fault) -> None:
    gpu = gpu_of(fault)
    gen, width = int(fault["gen"] or gpu["pcie_gen"]), int(fault["width"])
    if not 1 <= gen <= gpu["pcie_gen"] or width not in (1, 2, 4, 8, 16) or width > gpu["pcie_width"]:
        best = f"gen {gpu['pcie_gen']} x{gpu['pcie_width']}"
        raise FaultError(f"pcie-narrow: gen={gen} width={width}: the link's best is {best}")
    fault["gen"] = gen
    pci.set_link_and_port(state.hardware(), gpu, gen, width)


def _widen(fault: Fault) -> None:
    gpu = gpu_of(fault)
    pci.set_link_and_port(state.hardware(), gpu, gpu["pcie_gen"], gpu["pcie_width"])


def _xid(fault: Fault) -> None:
    _say_xid(fault, int(fault["number"]), str(fault["text"]) or None)


def _link_down(fault: Fault) -> None:
    link = fault["component"].partition("/link")[2]
    _say_xid(fault, 74, f"NVLink: fatal error detected on link {link or 0}(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)")


def _throttle(fault: Fault) -> None:
    if fault["reason"] not in THROTTLES:
        raise FaultError(f"throttle: reason={fault['reason']}: known: {', '.join(THROTTLES)}")


def _load(fault: Fault) -> None:
    for name in ("utilization", "memory", "power"):
        if fault[name] > 100:
            raise FaultError(f"load: {name}={fault[name]}: expected a percentage, 0 to 100")


def _join_fabric(_: Fault) -> None:
    """Complete the fabric setup if a fabric manager was started in the meantime and runs."""
    with state.change() as (_, running):
        if running.get("fabric") and daemons.is_running(running.get("fabric_manager")):
            running["fabric"] = dict(daemons.COMPLETED)


def _entry_only(fault: Fault) -> None:
    """Do nothing: the simulated tools read the fault from the list."""


KINDS: dict[str, FaultKind] = {
    "library-mismatch": FaultKind(
        "node",
        "a second NVML library of another release is installed, and the linker uses it",
        {},
        effects.add_library,
        effects.remove_library,
    ),
    "gpu-lost": FaultKind("gpu", "falls off the bus (Xid 79); after a reboot it is not there", {}, _lose, _find_again),
    "ecc-uncorrected": FaultKind("gpu", "uncorrectable memory errors (Xid 48, 94)", {"count": 1}, _uncorrected),
    "remap-pending": FaultKind("gpu", "a row waits for a reset to be remapped (Xid 63)", {}, _remap),
    "xid": FaultKind("gpu", "the driver reports this Xid", {"number": 31, "text": ""}, _xid),
    "nvlink-down": FaultKind("link", "a link is down (Xid 74)", {}, _link_down),
    "pcie-narrow": FaultKind("gpu", "the PCIe link runs below its maximum", {"width": 8, "gen": 0}, _narrow, _widen),
    "throttle": FaultKind("gpu", "its clocks are held down", {"reason": "hw_thermal_slowdown"}, _throttle),
    "smi-hangs": FaultKind("node", "nvidia-smi does not return", {}, _entry_only),
    "fabric-manager-version": FaultKind(
        "node",
        "the fabric manager's program is of another release",
        {"version": ""},
        effects.swap_fabric_manager,
        effects.restore_fabric_manager,
    ),
    "fabric-not-completed": FaultKind("node", "GPUs do not get into the NVLink fabric", {}, _entry_only, _join_fabric),
    "load": FaultKind(
        "gpu",
        "utilization of GPU and memory, share of the power limit, PCIe rates in MB/s",
        {"utilization": 100, "memory": 11, "power": 90, "received": 0, "sent": 0},
        _load,
    ),
    "gpu-busy": FaultKind(
        "gpu", "a process uses the GPU", {"user": "admin", "memory_mib": 512}, effects.hold_gpu, effects.release_gpu
    ),
}


# --- the list


def at_boot() -> None:
    """Apply a reboot to faults: passing ones end, and leave what InfoROM keeps; the others are set again."""
    with state.change_faults() as faults:
        before = list(faults)
        faults[:] = [{**fault, "log": []} for fault in before if fault["fault"] in _PERSISTENT]
    for fault in before:
        if fault["fault"] in ("ecc-uncorrected", "remap-pending"):
            _keep(fault)
    for fault in faults:
        if fault["fault"] == "gpu-lost":
            pci.remove(gpu_of(fault))
        elif fault["fault"] == "pcie-narrow":
            _narrow(fault)


def at_reset(index: int) -> None:
    """Apply a GPU's reset to its faults: error counts start at zero, and rows are remapped."""
    with state.change_faults() as faults:
        gpu_faults = [fault for fault in faults if fault["component"] == f"gpu{index}"]
        ended = [fault for fault in gpu_faults if fault["fault"] in ("ecc-uncorrected", "remap-pending")]
        faults[:] = [fault for fault in faults if fault not in ended]
    for fault in ended:
        _keep(fault)


def _keep(fault: Fault) -> None:
    """Record the lasting effect of a memory fault in the GPU's InfoROM."""
    with state.change() as (kept, _):
        inforom = kept.setdefault("gpus", {}).setdefault(str(gpu_of(fault)["index"]), {})
        if fault["fault"] == "ecc-uncorrected":
            errors = inforom.setdefault("ecc_errors", {})
            errors["uncorrected"] = errors.get("uncorrected", 0) + fault["count"]
        else:
            rows = inforom.setdefault("remapped", {})
            rows["uncorrectable"] = rows.get("uncorrectable", 0) + 1


def begin(name: str, component: str | None, details: dict[str, str]) -> Fault:
    """Set a fault; raise FaultError if that is not possible."""
    kind = known(name)
    target = _component(name, kind, component)
    if unknown := sorted(set(details) - set(kind.details)):
        has = f"it has {', '.join(kind.details)}" if kind.details else "it has none"
        raise FaultError(f"{name}: no detail {unknown[0]}: {has}")
    fault: Fault = {"fault": name, "component": target}
    for key, default in kind.details.items():
        detail = details.get(key)
        if detail is not None and isinstance(default, int) and not re.fullmatch(r"\d{1,9}", detail):
            raise FaultError(f"{name}: {key}={detail}: expected a number")
        fault[key] = default if detail is None else int(detail) if isinstance(default, int) else detail
    if any(_same(fault, other) for other in state.faults()):
        raise FaultError(f"{shown(fault)} is set already: heal it first")
    kind.begin(fault)
    with state.change_faults() as faults:
        faults.append(fault)
    return fault


def heal(name: str | None, component: str | None) -> list[Fault]:
    """Heal the faults that match, all without a name; return those that were set. FaultError for an unknown one."""
    if name is not None:
        kind = known(name)
        component = _component(name, kind, component) if component else None
    elif component is not None and component != _NODE:
        _gpu_named(component, state.hardware()["gpus"])
    with state.change_faults() as faults:
        healed = [
            fault
            for fault in faults
            if name in (None, fault["fault"]) and component in (None, fault["component"] or _NODE)
        ]
        faults[:] = [fault for fault in faults if fault not in healed]
    for fault in healed:
        KINDS[fault["fault"]].end(fault)
        kernel.forget_lines(fault.get("log", []))
    return healed


def known(name: str) -> FaultKind:
    """Return the fault of that name; FaultError lists the known ones."""
    if name not in KINDS:
        raise FaultError(f"{name}: unknown fault; known: {', '.join(KINDS)}")
    return KINDS[name]


def shown(fault: Fault) -> str:
    """Return a fault in one line: component, name, details."""
    details = [f"{key}={fault[key]}" for key in KINDS[fault["fault"]].details if fault.get(key) not in ("", None)]
    return " ".join([fault["component"] or _NODE, fault["fault"], *details])


def _same(fault: Fault, other: Fault) -> bool:
    keys = ("fault", "component", "number") if fault["fault"] == "xid" else ("fault", "component")
    return all(fault.get(key) == other.get(key) for key in keys)


def _component(name: str, kind: FaultKind, component: str | None) -> str | None:
    hardware = state.hardware()
    if kind.where == "node":
        if component not in (None, _NODE):
            raise FaultError(f"{component}: {name} is a fault of the node: omit the component")
        return None
    target = component or "gpu0"
    gpu, link = _gpu_named(target, hardware["gpus"])
    links = gpu["nvlinks"]
    if kind.where == "link" and not links:
        raise FaultError(f"{name}: the GPUs of {hardware['name']} have no NVLink")
    if kind.where == "gpu" and link is not None:
        raise FaultError(f"{target}: {name} is a fault of a whole GPU: omit the link")
    if link is not None and link >= links:
        raise FaultError(f"{target}: gpu{gpu['index']} has link0 to link{links - 1}")
    return target


def _gpu_named(component: str, gpus: list[dict[str, Any]]) -> tuple[dict[str, Any], int | None]:
    """Return the GPU of ``gpu3`` or ``gpu3/link5``, and the link; FaultError lists the GPUs."""
    match = re.fullmatch(r"gpu(\d+)(?:/link(\d+))?", component)
    if not match or int(match[1]) >= len(gpus):
        names = "gpu0" if len(gpus) == 1 else f"gpu0 to gpu{len(gpus) - 1}"
        raise FaultError(f"{component}: no such GPU; this node has {names}")
    return gpus[int(match[1])], int(match[2]) if match[2] else None


# --- the tool


def main(argv: list[str]) -> int:
    """Run as ``fault``; return its exit status: 2 for an invalid fault, with the reason on stderr."""
    words = [word for word in argv if not word.startswith("--")]
    try:
        if "--list" in argv:
            _print_list()
        elif "--heal" in argv:
            for fault in heal(*_healed(words)):
                sys.stdout.write(f"healed {shown(fault)}\n")
        else:
            sys.stdout.write(f"set {shown(begin(*_request(words)))}\n")
    except FaultError as err:
        sys.stderr.write(f"{err}\n")
        return WRONG
    return 0


def _healed(words: list[str]) -> tuple[str | None, str | None]:
    """Parse fault and component from the arguments; either may be missing."""
    left = list(words)
    component = left.pop(0) if left and _COMPONENT.match(left[0]) else None
    if len(left) > 1:
        raise FaultError(f"{' '.join(words)}: --heal expects only [COMPONENT] [FAULT]")
    return left[0] if left else None, component


def _request(words: list[str]) -> tuple[str, str | None, dict[str, str]]:
    """Parse fault, component and details from the arguments."""
    plain = [word for word in words if "=" not in word]
    if not 1 <= len(plain) <= len(("component", "fault")) or _COMPONENT.match(plain[-1]):
        raise FaultError(f"{' '.join(words) or 'nothing'}: expected [COMPONENT] FAULT [KEY=VALUE]...")
    details = dict(word.split("=", 1) for word in words if "=" in word)
    return plain[-1], plain[0] if len(plain) > 1 else None, details


def _print_list() -> None:
    for fault in state.faults():
        sys.stdout.write(f"set\t{shown(fault)}\n")
    for name, kind in KINDS.items():
        details = " ".join(f"{key}={value}" for key, value in kind.details.items())
        sys.stdout.write(f"can\t{kind.where}\t{name}\t{kind.means}\t{details}\n")
