"""Exposure: nftables, listening sockets, addresses, groups with root privileges, sshd, private keys, passwords."""

import hashlib
import json
import re
from ipaddress import ip_address
from typing import Any

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact

_MOST = 20_000
"""Maximum number of sockets, addresses or objects of a rule set that are read."""
_SOCKET = re.compile(r"(tcp|udp)\s+\S+\s+\d+\s+\d+\s+(\S+):(\d{1,5})\s+\S+(?:\s+(.*))?")
_PROCESS = re.compile(r'users:\(\("([^"]{1,64})"')
_ADDRESS = re.compile(r"\d+:\s+(\S{1,32})\s+inet6?\s+([0-9a-fA-F.:]{2,45})(?:/\d+|\s)")
_REFUSALS = ("drop", "reject")


class PacketFilter(Fact):
    """The rules of nftables, including those that iptables writes through it."""

    tables: tuple[str, ...]
    """Family and name: ``inet gpunode``, ``ip filter``."""
    refusing: tuple[str, ...]
    """Tables with an input chain that drops or rejects every packet that none of its rules accepts."""
    ipv4_refused: bool
    """True if packets that no rule accepts are refused over IPv4."""
    ipv6_refused: bool
    own: str | None
    """SHA-256 of the table of the role firewall as nft lists it; None: it is not loaded."""


class Listener(Fact):
    """A socket that waits for connections or datagrams."""

    protocol: str
    """``tcp`` or ``udp``."""
    address: str
    """``0.0.0.0``, ``::``, ``*`` (both) or one address of the node."""
    port: int
    process: str | None
    """Name of the process; None if it could not be determined."""


class Address(Fact):
    """An address of one of the node's interfaces."""

    interface: str
    address: str


def read_packet_filter(bundle: BundleReader) -> PacketFilter | None:
    """Return the rules that ``nft -j list ruleset`` prints; None if nft is not installed."""
    result = bundle.command("nft-ruleset")
    if result.missing:
        return None
    objects = parse_ruleset(bundle.output("nft-ruleset"))
    refusing = sorted(_refusing(objects))
    families = {name.partition(" ")[0] for name in refusing}
    listing = bundle.command("nft-own")
    if listing.rc not in {0, 1}:
        raise UnknownFactError(f"nft list table failed: {first_line(listing.stderr)}")
    return PacketFilter(
        tables=tuple(f"{table['family']} {table['name']}" for table in _of(objects, "table", "family", "name")),
        refusing=tuple(refusing),
        ipv4_refused=bool(families & {"inet", "ip"}),
        ipv6_refused=bool(families & {"inet", "ip6"}),
        own=hashlib.sha256(listing.stdout.encode()).hexdigest() if listing.rc == 0 else None,
    )


def parse_ruleset(text: str) -> list[dict[str, Any]]:
    """Return the objects of ``nft -j list ruleset``; raise ParseError for other text."""
    try:
        objects = json.loads(text)["nftables"]
        whole = [nft_object for nft_object in objects if isinstance(nft_object, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ParseError(f"expected a JSON rule set from nft, found '{first_line(text)}'") from None
    if not whole or "metainfo" not in whole[0]:
        raise ParseError("expected metainfo at the head of nft's rule set")
    if len(whole) > _MOST:
        raise ParseError(f"nft lists more than {_MOST} objects")
    return whole


def _of(objects: list[dict[str, Any]], kind: str, *names: str) -> list[dict[str, Any]]:
    """Return the objects of a kind that have these texts."""
    bodies = [nft_object[kind] for nft_object in objects if isinstance(nft_object.get(kind), dict)]
    return [body for body in bodies if all(isinstance(body.get(name), str) and len(body[name]) < 256 for name in names)]


def _refusing(objects: list[dict[str, Any]]) -> set[str]:
    """Return ``FAMILY TABLE`` of tables that refuse input by policy, or by a last rule without condition."""
    last: dict[tuple[str, str, str], Any] = {}
    for rule in _of(objects, "rule", "family", "table", "chain"):
        last[rule["family"], rule["table"], rule["chain"]] = rule.get("expr")
    tables = set()
    for chain in _of(objects, "chain", "family", "table", "name"):
        if chain.get("hook") != "input" or chain.get("type") != "filter":
            continue
        end = last.get((chain["family"], chain["table"], chain["name"]))
        parts = [part for part in end or () if isinstance(part, dict)]
        words = [word for part in parts for word in part if word not in {"counter", "log"}]
        if chain.get("policy") == "drop" or (len(words) == 1 and words[0] in _REFUSALS):
            tables.add(f"{chain['family']} {chain['table']}")
    return tables


def read_listeners(bundle: BundleReader) -> tuple[Listener, ...]:
    """Return the sockets that ``ss -Hlntup`` prints."""
    listeners = {}
    for line in bundle.output("sockets").splitlines()[:_MOST]:
        match = _SOCKET.fullmatch(line.strip())
        if match is None or int(match[3]) > 65535:
            raise ParseError(f"expected a line of ss -Hlntup, found '{first_line(line)}'")
        process = _PROCESS.search(match[4] or "")
        address = match[2].partition("%")[0].strip("[]")
        listener = Listener(
            protocol=match[1], address=address, port=int(match[3]), process=process[1] if process else None
        )
        listeners[listener.protocol, listener.address, listener.port] = listener
    return tuple(listeners[key] for key in sorted(listeners))


def read_addresses(bundle: BundleReader) -> tuple[Address, ...]:
    """Return the addresses that ``ip -o address show`` prints."""
    addresses = []
    for line in bundle.output("addresses").splitlines()[:_MOST]:
        match = _ADDRESS.match(line.strip())
        if match is None:
            raise ParseError(f"expected a line of ip -o address show, found '{first_line(line)}'")
        try:
            addresses.append(Address(interface=match[1].partition("@")[0], address=str(ip_address(match[2]))))
        except ValueError:
            raise ParseError(f"expected an address of ip -o address show, found '{match[2]}'") from None
    if not addresses:
        raise ParseError("expected addresses from ip -o address show, found none")
    return tuple(addresses)


def read_root_groups(bundle: BundleReader) -> dict[str, tuple[str, ...]]:
    """Return the members of the groups that grant root: ``docker`` without a password, ``sudo`` and ``wheel``."""
    text = bundle.text("/etc/group")
    if text is None:
        raise UnknownFactError("/etc/group does not exist")
    groups = {}
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) != 4:
            raise ParseError(f"expected four fields of /etc/group, found '{first_line(line)}'")
        groups[fields[0]] = tuple(name for name in fields[3].split(",") if name)
    return groups


class ExposureFacts(FactArea):
    """What the network can reach."""

    packet_filter: PacketFilter | None = fact(read_packet_filter, needs_root=True, none_means="nft is not installed")
    listeners: tuple[Listener, ...] | None = fact(read_listeners, volatile=True)
    addresses: tuple[Address, ...] | None = fact(read_addresses, volatile=True)
    root_groups: dict[str, tuple[str, ...]] | None = fact(read_root_groups)
    """Members of ``docker``, ``sudo``, ``wheel`` and ``admin``, if the node has these groups."""


_SETTING = re.compile(r"([a-z0-9]{1,60}) (.{1,4000})")
_MOST_ROWS = 1024
_NAMED = "passwordauthentication"
"""Printed by every release of sshd; output without it is not an answer."""


class SshDaemon(Fact):
    """The settings that sshd runs with."""

    settings: dict[str, str]
    """Names in lower case; for a setting that is printed more than once, the first value."""


class KeyFile(Fact):
    """A private key on disk. Only its metadata is collected."""

    path: str
    mode: str
    """In octal digits."""
    owner: str
    type: str
    """From the public key beside it: ``ssh-ed25519``; empty if there is none."""
    bits: int
    modified_s: int
    """Seconds since 1970."""


def read_ssh_daemon(bundle: BundleReader) -> SshDaemon | None:
    """Return the settings that ``sshd -T`` prints; None if the node has no OpenSSH server."""
    if bundle.command("sshd-settings").missing:
        return None
    settings: dict[str, str] = {}
    for line in bundle.output("sshd-settings").splitlines()[:_MOST_ROWS]:
        match = _SETTING.fullmatch(line)
        if match is None:
            raise ParseError(f"expected a setting from sshd -T, found '{first_line(line)}'")
        settings.setdefault(match[1], match[2].strip())
    if _NAMED not in settings:
        raise ParseError(f"expected {_NAMED} from sshd -T, found nothing of it")
    return SshDaemon(settings=settings)


def read_private_keys(bundle: BundleReader) -> tuple[KeyFile, ...]:
    """Return the private keys that the probe found."""
    keys = []
    for path, mode, owner, kind, bits, modified in bundle.rows("private-keys", 6)[:_MOST_ROWS]:
        size, time = whole(bits), whole(modified)
        if not re.fullmatch(r"[0-7]{4}", mode) or size is None or time is None:
            raise ParseError(f"expected mode, bits and time of {first_line(path)}, found {first_line(mode)}")
        keys.append(KeyFile(path=path, mode=mode, owner=owner, type=kind, bits=size, modified_s=time))
    return tuple(keys)


def read_empty_passwords(bundle: BundleReader) -> tuple[str, ...]:
    """Return the accounts that have a shell and need no password."""
    return bundle.look("empty-passwords")[:_MOST_ROWS]


class SshFacts(FactArea):
    """The SSH daemon and keys."""

    ssh_daemon: SshDaemon | None = fact(read_ssh_daemon, needs_root=True, none_means="the node has no OpenSSH server")
    private_keys: tuple[KeyFile, ...] | None = fact(read_private_keys, needs_root=True)
    """The daemon's host keys, and keys in the home folders below /home and in root's."""
    empty_passwords: tuple[str, ...] | None = fact(read_empty_passwords, needs_root=True)
    """Accounts with a shell that need no password."""
