"""What the role nvidia_fabric asks of a node's facts: driver release, PCI ids of conditions, addresses of a domain."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.facts import NodeFacts
    from gpunode.stack import picture_from_facts
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None


def _node(facts: Mapping[str, Any]) -> NodeFacts:
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")
    try:
        return NodeFacts.model_validate(plain(facts))
    except ValueError as err:
        raise AnsibleFilterError(f"not a NodeFacts document: {err}") from None


def installed_driver(facts: Mapping[str, Any]) -> str:
    """The release of the installed driver (``580.95.05``); empty where none is installed or its packages disagree."""
    installed = picture_from_facts(_node(facts), load()).installed
    return (installed.version if installed else None) or ""


def pci_ids(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """PCI ids as sysfs writes them (``0x10de:0x22a3``): ``switches`` and ``gpus`` on the node, and ``known_switches``
    of the catalog."""
    node = _node(facts)
    known = {pci for pci, part in load().pci_parts.items() if part.role == "nvswitch"}
    functions = [(f"{device.vendor_id}:{device.device_id}", device.is_nvidia_gpu) for device in node.pci or ()]

    def sysfs(ids: Iterable[str]) -> list[str]:
        return sorted({"0x" + pci.replace(":", ":0x") for pci in ids})

    return {
        "switches": sysfs(pci for pci, _ in functions if pci in known),
        "gpus": sysfs(pci for pci, is_gpu in functions if is_gpu),
        "known_switches": sysfs(known),
    }


def imex_addresses(hosts: Iterable[str], variables: Mapping[str, Any]) -> list[str]:
    """Addresses of the hosts of an NVLink domain, in the hosts' order, each once.

    ``variables`` is ``hostvars``. A host's address is its ``nvidia_fabric_imex_address``, else its ``ansible_host``,
    else its name; one that is no IP address is an error that names the host.
    """
    found: dict[str, None] = {}
    for host in hosts:
        own = variables[host]
        text = str(own.get("nvidia_fabric_imex_address") or own.get("ansible_host") or host)
        try:
            found[str(ipaddress.ip_address(text))] = None
        except ValueError:
            raise AnsibleFilterError(
                f"{host}: {text} is no IP address, and IMEX takes no names: set nvidia_fabric_imex_address"
            ) from None
    return list(found)


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"installed_driver": installed_driver, "pci_ids": pci_ids, "imex_addresses": imex_addresses}
