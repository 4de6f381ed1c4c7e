"""The policy for firewalld: a zone of its own, which becomes the default zone."""

from __future__ import annotations

import re
from xml.sax.saxutils import quoteattr

from gpunode.provisioning.firewall_policy import FirewallPolicy, Network, OpenPorts, merged_ports
from gpunode.provisioning.sections import completed

ZONE = "gpunode"
ZONE_FILE = f"/etc/firewalld/zones/{ZONE}.xml"
CONF = "/etc/firewalld/firewalld.conf"
_DEFAULT = re.compile(r"(?m)^[ \t]*DefaultZone[ \t]*=[ \t]*(.*?)[ \t]*$")


def zone_text(policy: FirewallPolicy) -> str:
    """Return the zone; traffic that no rule accepts is rejected."""
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        "<!-- Managed by gpunode (role firewall). -->",
        "<zone>",
        f"  <short>{ZONE}</short>",
        "  <description>Allows what the role firewall of gpunode lists.</description>",
    ]
    lines += [_rule(network, "") for network in policy.cluster]
    for service in policy.services:
        lines += [_rule(network, port, service.rate) for network in service.networks for port in _ports(service)]
    return "\n".join([*lines, "</zone>", ""])


def _ports(service: OpenPorts) -> list[str]:
    texts = (str(first) if first == last else f"{first}-{last}" for first, last in merged_ports(service.ports))
    return [f"<port port={quoteattr(text)} protocol={quoteattr(service.protocol)}/>" for text in texts]


def _rule(network: Network, element: str, rate: int = 0) -> str:
    source = "" if network.prefixlen == 0 else f"<source address={quoteattr(str(network))}/>"
    accept = f'<accept><limit value="{rate}/m"/></accept>' if rate else "<accept/>"
    return f'  <rule family="ipv{network.version}">{source}{element}{accept}</rule>'


def with_default_zone(conf: str, zone: str) -> str:
    """Return firewalld.conf with another default zone."""
    if _DEFAULT.search(conf):
        return _DEFAULT.sub(f"DefaultZone={zone}", conf, count=1)
    return f"{completed(conf)}DefaultZone={zone}\n"


def default_zone(conf: str) -> str:
    """Return the default zone in firewalld.conf; firewalld's built-in default is ``public``."""
    found = _DEFAULT.search(conf)
    return found[1] if found and found[1] else "public"
