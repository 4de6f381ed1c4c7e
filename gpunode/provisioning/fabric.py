"""Input of the role nvidia_fabric: driver release, PCI ids of conditions, addresses of an NVLink domain."""

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.stack import picture_from_facts


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
