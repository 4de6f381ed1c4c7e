"""The driver of a running node: its release, who uses its GPUs, and the services of its NVLink fabric."""

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpunode.catalog import load
from gpunode.catalog.origins import upstream_version
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.context import Context
from gpunode.provisioning.state import NodeState
from gpunode.stack import Stack, picture_from_facts

FABRIC_MANAGER = "nvidia-fabricmanager.service"
IMEX = "nvidia-imex.service"
STOPPABLE = ("nvidia-dcgm.service", IMEX, FABRIC_MANAGER, "nvidia-persistenced.service")
"""Our units that keep the module in use, in the order in which they are stopped."""
_MANAGER_PACKAGE = re.compile(r"nvidia-fabric-?manager(-[0-9]+)?")
_IMEX_PACKAGE = re.compile(r"nvidia-imex(-[0-9]+)?")


def manager_version(state: NodeState) -> str:
    """Return the fabric manager's release: the program's own report takes precedence over its package."""
    return (state.facts.nvidia_tool_versions or {}).get("nv-fabricmanager") or _packaged(state, _MANAGER_PACKAGE)


def imex_version(state: NodeState) -> str:
    """Return the release of IMEX; empty if it is not installed."""
    return _packaged(state, _IMEX_PACKAGE)


def _packaged(state: NodeState, name: re.Pattern[str]) -> str:
    versions = (version for package, version in sorted(state.installed.items()) if name.fullmatch(package))
    return next((upstream_version(version) for version in versions), "")


def gpus_in_use(facts: NodeFacts) -> bool:
    """Return whether a process computes on a GPU; True if that could not be determined."""
    return facts.gpu_processes is None or any(process.computes for process in facts.gpu_processes)


def must_be_idle(context: Context) -> bool:
    """Return whether the driver must not change while processes compute."""
    return not context.settings_of("preflight")["gpunode_allow_busy"]


def unserved_fabric(stack: Stack, context: Context) -> Iterator[str]:
    """Yield why a board with NVSwitches would have a driver without the fabric manager, which CUDA needs there."""
    if stack.fabric_manager is not None and context.settings_of("nvidia_fabric")["state"] == "absent":
        yield (
            "fabric-manager: CUDA does not start on a board with NVSwitches until its fabric manager runs, and "
            "nvidia_fabric_state is absent: set it to present, or remove the driver too (nvidia_driver_state: absent)"
        )


def installed_driver(node: NodeFacts) -> str:
    """Return the release of the installed driver (``580.95.05``); empty if there is none or its packages disagree."""
    installed = picture_from_facts(node, load()).installed
    return (installed.version if installed else None) or ""


def pci_ids(node: NodeFacts) -> dict[str, list[str]]:
    """Return PCI ids as sysfs writes them (``0x10de:0x22a3``): ``switches`` and ``gpus`` on the node, and
    ``known_switches`` of the catalog.
    """
    known = {pci for pci, part in load().pci_parts.items() if part.role == "nvswitch"}
    functions = [(device.pci_id, device.is_nvidia_gpu) for device in node.pci or ()]

    def sysfs(ids: Iterable[str]) -> list[str]:
        return sorted({"0x" + pci.replace(":", ":0x") for pci in ids})

    return {
        "switches": sysfs(pci for pci, _ in functions if pci in known),
        "gpus": sysfs(pci for pci, is_gpu in functions if is_gpu),
        "known_switches": sysfs(known),
    }


def imex_addresses(hosts: Iterable[str], variables: Mapping[str, Any]) -> list[str]:
    """Return the addresses of the hosts of an NVLink domain, in the hosts' order, each once.

    ``variables`` is ``hostvars``. A host's address is its ``nvidia_fabric_imex_address``, else its ``ansible_host``,
    else its name; one that is not an IP address is an error that names the host.
    """
    addresses: dict[str, None] = {}
    for host in hosts:
        host_variables = variables[host]
        text = str(host_variables.get("nvidia_fabric_imex_address") or host_variables.get("ansible_host") or host)
        try:
            addresses[str(ipaddress.ip_address(text))] = None
        except ValueError:
            raise UsageError(
                f"{host}: {text} is not an IP address, and IMEX does not resolve names: set nvidia_fabric_imex_address"
            ) from None
    return list(addresses)
