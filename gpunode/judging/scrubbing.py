"""Removal of what identifies a site from bundles: each name and number is replaced, the same by the same everywhere.

The form of a value stays (an address is an address of the same network, a serial number has as many digits), so that
parsers and checks answer as before. The replacement depends on a key that is made for one archive and not kept.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PUBLIC = (
    *("debian.org", "ubuntu.com", "canonical.com", "nvidia.com", "nvidia.github.io", "docker.com", "redhat.com"),
    *("rockylinux.org", "almalinux.org", "fedoraproject.org", "centos.org", "kernel.org"),
)
"""Domains of distributions and vendors: their addresses name the origin of packages, not a site."""
EFI_VARIABLES = "8be4df61-93ca-11d2-aa0d-00e098032b8c"
"""The UUID of the firmware's own variables, the same on each machine."""
PLAIN_USERS = frozenset({"root", "admin", "ubuntu", "debian", "user", "operator"})
NO_ADDRESSES = re.compile(
    r"^(dpkg|apt|rpm|dnf|repository|dkms|modinfo|find-modules|ldconfig|library-files|version|dcgmi-versions|uname|lscpu"
    r"|nvidia-smi|container-runtime)"
)
"""Commands that print versions, of which some have four numbers as an address has."""
URL_HOST = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+]*://)(?P<login>[^/\s@\"']+@)?(?P<host>[A-Za-z0-9.-]+)")
UUID = re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")
MACHINE_ID = re.compile(r"\b[0-9a-f]{32}\b")
MAC = re.compile(r"(?<![0-9A-Fa-f:.-])(?:[0-9A-Fa-f]{2}:){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:])")
GUID = re.compile(r"(?i)(?P<before>guid\"?[ \t]*[:=][ \t]*)(?P<value>(?:0x)?[0-9a-f]{4}(?::?[0-9a-f]{4}){3})")
SERIAL = re.compile(
    r"(?i)(?P<before>serial(?:_number|number| number)?(?:\"?[ \t]*[:=][ \t]*\"?|>|[ \t]+))"
    r"(?P<value>(?=[^\s<\"]*\d)[0-9A-Z][0-9A-Z-]{5,})"
)
KEY = re.compile(r"\b(?P<before>ssh-[a-z0-9-]+ |ecdsa-[a-z0-9-]+ |SHA256:)(?P<value>[A-Za-z0-9+/=]{20,})")
MAIL = re.compile(r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+\b")
GROUPS = "/etc/group"
GROUP = re.compile(r"(?m)^(?P<name>[^:\n]+):(?P<secret>[^:\n]*):(?P<number>\d+):(?P<members>[^:\n]*)$")
FIRST_USER, LAST_USER = 1000, 59999
"""Numbers of the groups of people."""
HOME = re.compile(r"(?P<before>/home/)(?P<value>[A-Za-z_][A-Za-z0-9_.-]*)")
IPV4 = re.compile(r"(?<![\w.+~-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.+~-]|\.\d)")
IPV6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f:]*:[0-9A-Fa-f:]*:)[0-9A-Fa-f:]{2,39}(?![\w:.])")
PROCESS = re.compile(r"(?P<before><process_name>)(?P<value>[^<]+)")
PLAIN_PROCESSES = frozenset({"python", "python3", "xorg", "gnome-shell", "java", "nvidia-smi", "all_reduce_perf"})


class Scrubber:
    """Replacements of one archive."""

    def __init__(self, hosts: Iterable[str], words: Iterable[str] = ()) -> None:
        self._key = secrets.token_bytes(32)
        self.replaced: Counter[str] = Counter()
        """How often a value of each kind was replaced."""
        self._originals: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._words: list[tuple[re.Pattern[str], str, str]] = []
        self._known: dict[str, str] = {}
        for kind, name in sorted({each for host in hosts for each in _names_of(host)}, key=lambda each: -len(each[1])):
            self._add_word(kind, name)
        for word in sorted(words, key=len, reverse=True):
            self._add_word("word", word)

    def _add_word(self, kind: str, word: str) -> None:
        pattern = re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", re.IGNORECASE)
        self._words.append((pattern, kind, self.name(kind, word.partition(".")[0] if kind == "host" else word)))

    def name(self, kind: str, value: str) -> str:
        """Return the name for a value: ``host-1``, ``user-2``."""
        known = self._names.get((kind, value.lower()))
        if known is None:
            number = sum(1 for other, _ in self._names if other == kind) + 1
            known = self._names[kind, value.lower()] = f"{kind}-{number}"
        return known

    def document(self, value: Any, where: str = "") -> Any:
        """Return a document with every text in it replaced, keys included. ``where``: its command or file."""
        if isinstance(value, str):
            return self.text(value, where)
        if isinstance(value, dict):
            return {self.text(str(key), where): self.document(item, where or str(key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.document(item, where) for item in value]
        return value

    def bundle(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a bundle without what identifies its site."""
        parts = {
            key: {name: self.document(item, name) for name, item in content[key].items()}
            for key in ("commands", "files")
            if isinstance(content.get(key), dict)
        }
        parts["files"] = {self.text(name, name): item for name, item in parts.get("files", {}).items()}
        rest = {key: self.document(item, key) for key, item in content.items() if key not in parts}
        return {key: parts.get(key, rest.get(key)) for key in content}

    def text(self, text: str, where: str = "") -> str:
        """Return a text with all replacements."""
        if where == GROUPS:
            text = GROUP.sub(self._group, text)
        text = URL_HOST.sub(self._url, text)
        for pattern, kind, new in self._words:
            text = pattern.sub(lambda match, new=new, kind=kind: self._noted(kind, match[0], new), text)  # type: ignore[misc]
        text = KEY.sub(self._part("key", self._letters), text)
        text = MAIL.sub(self._mail, text)
        text = HOME.sub(self._part("user", self.name, PLAIN_USERS), text)
        text = PROCESS.sub(self._part("process", self._process), text)
        text = UUID.sub(lambda match: self._noted("uuid", match[0], self._hex("uuid", match[0])), text)
        text = MACHINE_ID.sub(lambda match: self._noted("id", match[0], self._hex("id", match[0])), text)
        text = GUID.sub(self._part("guid", self._hex), text)
        text = SERIAL.sub(self._part("serial", self._letters), text)
        text = MAC.sub(lambda match: self._noted("mac", match[0], self._mac(match[0])), text)
        text = IPV6.sub(lambda match: self._noted("address", match[0], self._once(self._ipv6, match[0])), text)
        if not NO_ADDRESSES.match(where):
            text = IPV4.sub(lambda match: self._noted("address", match[0], self._once(self._ipv4, match[0])), text)
        return text

    def left(self, text: str) -> Iterator[str]:
        """Yield replaced values that a JSON text still has."""
        text = re.sub(r"\\[ntr]", " ", text)
        for value, kind in self._originals.items():
            if kind in {"uuid", "id", "mac", "guid", "serial", "key", "mail"} and value in text:
                yield f"{kind} {value}"
        for pattern, kind, _ in self._words:
            if pattern.search(text):
                yield f"{kind} {pattern.pattern}"

    def _noted(self, kind: str, old: str, new: str) -> str:
        if new != old:
            self.replaced[kind] += 1
            self._originals[old] = kind
        return new

    def _part(
        self, kind: str, new: Callable[[str, str], str], kept: frozenset[str] = frozenset()
    ) -> Callable[[re.Match[str]], str]:
        def replace(match: re.Match[str]) -> str:
            value = match["value"]
            return match["before"] + (value if value in kept else self._noted(kind, value, new(kind, value)))

        return replace

    def _url(self, match: re.Match[str]) -> str:
        host = match["host"]
        if match["login"]:
            self._noted("login", match["login"], "")
        if _is_public(host) or host.rpartition(".")[2] == "invalid" or IPV4.fullmatch(host):
            return match["scheme"] + host
        return match["scheme"] + self._noted("site", host, f"{self.name('site', host)}.invalid")

    def _mail(self, match: re.Match[str]) -> str:
        if _is_public(match[0].rpartition("@")[2]) or match[0].endswith(".invalid"):
            return match[0]
        return self._noted("mail", match[0], f"{self.name('mail', match[0])}@example.invalid")

    def _group(self, match: re.Match[str]) -> str:
        """Return a line of /etc/group with other names of people."""
        members = [self._user(name) for name in match["members"].split(",") if name]
        of_people = FIRST_USER <= int(match["number"]) <= LAST_USER
        name = self._user(match["name"]) if of_people else match["name"]
        return f"{name}:{match['secret']}:{match['number']}:{','.join(members)}"

    def _user(self, name: str) -> str:
        return name if name in PLAIN_USERS else self._noted("user", name, self.name("user", name))

    def _process(self, kind: str, value: str) -> str:
        program = value.split(maxsplit=1)[0].rpartition("/")[2] if value.split() else value
        return program if program.lower() in PLAIN_PROCESSES else self.name(kind, program)

    def _digest(self, kind: str, value: str) -> bytes:
        return hmac.new(self._key, f"{kind}\0{value}".encode(), hashlib.sha512).digest()

    def _hex(self, kind: str, value: str) -> str:
        """Return hexadecimal digits in the form of a value; one of zeros alone is kept."""
        if not value.strip("0x:-") or value.lower() == EFI_VARIABLES:
            return value
        digits = iter(self._digest(kind, value.lower()).hex())
        body = value.removeprefix("0x")
        made = "".join(next(digits) if char in "0123456789abcdefABCDEF" else char for char in body)
        return value[: len(value) - len(body)] + (made.upper() if body.isupper() else made)

    def _letters(self, kind: str, value: str) -> str:
        """Return digits for digits and letters for letters."""
        rows = iter(self._digest(kind, value) * 8)
        return "".join(
            str(next(rows) % 10) if char.isdigit() else chr(65 + next(rows) % 26) if char.isalpha() else char
            for char in value
        )

    def _mac(self, value: str) -> str:
        if not value.strip("0:") or not value.strip("fF:"):
            return value
        made = self._hex("mac", value)
        return f"02{made[2:]}"

    def _once(self, replace: Callable[[str], str], value: str) -> str:
        if value not in self._known:
            self._known[value] = replace(value)
        return self._known[value]

    def _ipv4(self, value: str) -> str:
        try:
            address = ipaddress.IPv4Address(value)
        except ValueError:
            return value
        if address.is_loopback or address.is_multicast or address.is_unspecified or value.startswith(("255.", "0.")):
            return value
        return str(ipaddress.IPv4Address(self._within(int(address), 32, _kept_bits(address))))

    def _ipv6(self, value: str) -> str:
        try:
            address = ipaddress.IPv6Address(value)
        except ValueError:
            return value
        if address.is_loopback or address.is_multicast or address.is_unspecified or not int(address) & (2**64 - 1):
            return value
        mapped = address.ipv4_mapped
        if mapped is not None:
            number = (0xFFFF << 32) | int(ipaddress.IPv4Address(self._ipv4(str(mapped))))
        else:
            number = self._within(int(address), 128, 64 if address.is_link_local else 8)
        digits = f"{number:032x}"
        groups = [digits[at : at + 4] for at in range(0, 32, 4)]
        if len(value) == len(":".join(groups)):
            return ":".join(groups)
        # From Python 3.13 on, a mapped address has a decimal part, which another replacement would find.
        return f"::ffff:{groups[6]}:{groups[7]}" if mapped is not None else str(ipaddress.IPv6Address(number))

    def _within(self, number: int, bits: int, kept: int) -> int:
        """Return another address: those that shared their first bits still share as many."""
        made = number
        for at in range(kept, bits):
            before = number >> (bits - at)
            if self._digest("bit", f"{bits}/{at}/{before}")[0] & 1:
                made ^= 1 << (bits - at - 1)
        return made


def _is_public(host: str) -> bool:
    return any(host == domain or host.endswith(f".{domain}") for domain in PUBLIC)


def _names_of(host: str) -> Iterator[tuple[str, str]]:
    """Yield the names by which a text may have a host: whole, short, and its domain."""
    name = host.rpartition("@")[2]
    if name in ("localhost", "") or _is_address(name):
        return
    yield "host", name
    short, _, domain = name.partition(".")
    yield "host", short
    if domain.count("."):
        yield "domain", domain


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _kept_bits(address: ipaddress.IPv4Address) -> int:
    """Return how many first bits determine the kind of the address."""
    for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10"):
        if address in ipaddress.IPv4Network(network):
            return ipaddress.IPv4Network(network).prefixlen
    return 1
