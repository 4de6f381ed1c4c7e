"""The policy for firewalld: a zone of its own, which becomes the default zone."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpunode.provisioning.firewall_policy import FirewallPolicy, Network, port_ranges
from gpunode.provisioning.sections import completed

ZONE = "gpunode"
ZONE_FILE = f"/etc/firewalld/zones/{ZONE}.xml"
CONF = "/etc/firewalld/firewalld.conf"
_DEFAULT = re.compile(r"(?m)^[ \t]*DefaultZone[ \t]*=[ \t]*(.*?)[ \t]*$")


class ZoneRule(NamedTuple):
    """What a network may reach; without ports: everything."""

    network: Network
    ports: str = ""
    protocol: str = ""
    rate: int = 0


def zone_rules(policy: FirewallPolicy) -> list[ZoneRule]:
    """Return the rules of the zone, which rejects traffic that none of them accepts."""
    return [
        *map(ZoneRule, policy.cluster),
        *(
            ZoneRule(network, ports, service.protocol, service.rate)
            for service in policy.services
            for network in service.networks
            for ports in port_ranges(service.ports)
        ),
    ]


def with_default_zone(conf: str, zone: str) -> str:
    """Return firewalld.conf with another default zone."""
    if _DEFAULT.search(conf):
        return _DEFAULT.sub(f"DefaultZone={zone}", conf, count=1)
    return f"{completed(conf)}DefaultZone={zone}\n"


def default_zone(conf: str) -> str:
    """Return the default zone in firewalld.conf; firewalld's built-in default is ``public``."""
    match = _DEFAULT.search(conf)
    return match[1] if match and match[1] else "public"
