"""OpenPGP keys of package repositories, reduced to the publisher's key and armored by us.

What a node trusts is never the file that was fetched: verifiers read armor in different ways, so a file in which this
module sees one key may contain two for apt or rpm.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SIGNATURE, PUBLIC_KEY, USER_ID, SUBKEY, USER_ATTRIBUTE = 2, 6, 13, 14, 17
SUBKEY_BINDING = 0x18
RSA = (1, 2, 3)
LONGEST_KEY = 0xFFFF
"""Maximum size of a key in bytes: fingerprints and signatures of keys have two bytes for it (RFC 4880, 12.2)."""
BEGIN, END = "-----BEGIN PGP PUBLIC KEY BLOCK-----", "-----END PGP PUBLIC KEY BLOCK-----"
BLOCK = re.compile(f"{BEGIN}[^\n]*\n(?P<body>.*?){END}", re.DOTALL)
DIGESTS = {
    2: ("sha1", "3021300906052b0e03021a05000414"),
    8: ("sha256", "3031300d060960864801650304020105000420"),
    9: ("sha384", "3041300d060960864801650304020205000430"),
    10: ("sha512", "3051300d060960864801650304020305000440"),
    11: ("sha224", "302d300d06096086480165030402040500041c"),
}
"""Hash algorithms by number (RFC 4880, 9.4), with the prefix of their digest in an RSA signature (RFC 8017, 9.2)."""


class KeyRefusedError(ValueError):
    """The reason why a key must not be trusted, in one line."""


@dataclass
class OpenpgpKey:
    """One primary key with the packets that belong to it."""

    body: bytes
    packets: list[bytes] = field(default_factory=list)
    """The primary key, its user ids and their signatures."""
    subkeys: list[tuple[bytes, list[bytes]]] = field(default_factory=list)
    """Body and packets of each subkey."""

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of a key of version 4."""
        return hashlib.sha1(_hashed(self.body)).hexdigest().upper()  # noqa: S324 - RFC 4880, 12.2

    def written(self, every: bool) -> bytes:
        """Return the key as packets; without ``every``, only with the subkeys that the primary key has signed."""
        kept = [packets for body, packets in self.subkeys if every or _is_bound(self.body, body, packets)]
        return b"".join([*self.packets, *(packet for packets in kept for packet in packets)])


def trusted_key(data: bytes, source: str, fingerprints: Collection[str] = (), sha256: str = "") -> str:
    """Return the keys with one of these fingerprints as armored text. Raise KeyRefusedError if there is none.

    ``source`` is the origin of the data: a file on the controller, or an address. ``sha256`` is for a key without a
    recorded fingerprint: the checksum of its armored file without the Version line. Without both, the key is the site's
    own and all of it is trusted.
    """
    try:
        keys = public_keys(data)
    except (ValueError, IndexError, binascii.Error):
        keys = []
    if not keys and re.match(rb"\s*<(!doctype|html|\?xml)", data, re.IGNORECASE):
        raise KeyRefusedError(f"{source} contains no OpenPGP key but an HTML page, of a proxy or a login")
    if not keys:
        raise KeyRefusedError(f"{source} contains no OpenPGP key: export it with gpg --export --armor")
    if sha256 and not fingerprints:
        text = _without_version(data)
        if (digest := hashlib.sha256(text).hexdigest()) != sha256:
            raise KeyRefusedError(f"{source} without its Version line has the checksum {digest}, expected {sha256}")
        return text.decode()
    pinned = {name.replace(" ", "").upper() for name in fingerprints}
    kept = [key for key in keys if not pinned or (key.body[:1] == b"\x04" and key.fingerprint in pinned)]
    if not kept:
        names = ", ".join(key.fingerprint for key in keys)
        raise KeyRefusedError(
            f"{source} contains the key {names}, expected {', '.join(sorted(pinned))}: do not trust it; "
            "if the publisher announced a new key, set it as a file on the controller"
        )
    return armored(b"".join(key.written(every=not pinned) for key in kept))


def key_of_file(path: str) -> str:
    """Return the key in a file on the controller as armored text. Raise KeyRefusedError if it has none."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as err:
        raise KeyRefusedError(f"{path}: {err.strerror}: set it to a file on the controller") from None
    return trusted_key(data, path)


def public_keys(data: bytes) -> list[OpenpgpKey]:
    """Return the primary keys in data, armored or not, with the packets that belong to each. Raise ValueError if the
    data are not OpenPGP.
    """
    keys: list[OpenpgpKey] = []
    for tag, whole, body in packets_of(_binary(data)):
        if tag in (PUBLIC_KEY, SUBKEY) and len(body) > LONGEST_KEY:
            raise ValueError("a key is too long")
        if tag == PUBLIC_KEY:
            keys.append(OpenpgpKey(body, [whole]))
        elif keys and tag == SUBKEY:
            keys[-1].subkeys.append((body, [whole]))
        elif keys and tag in (SIGNATURE, USER_ID, USER_ATTRIBUTE):
            (keys[-1].subkeys[-1][1] if keys[-1].subkeys else keys[-1].packets).append(whole)
    return keys


def without_keys(data: bytes, fingerprints: Collection[str]) -> bytes:
    """Return a keyring without keys with these fingerprints and the packets that belong to them; others stay as they
    are. Raise ValueError or IndexError if the data are not OpenPGP.
    """
    kept, going = [], False
    for tag, whole, body in packets_of(data):
        if tag == PUBLIC_KEY:
            going = len(body) <= LONGEST_KEY and OpenpgpKey(body).fingerprint in fingerprints
        if not going:
            kept.append(whole)
    return b"".join(kept)


def _binary(data: bytes) -> bytes:
    """Return the packets of all armored blocks; data without such a block are packets already."""
    if BEGIN.encode() not in data:
        return data
    text = data.decode("ascii", "replace").replace("\r", "")
    return b"".join(_decoded(block["body"].split("\n")) for block in BLOCK.finditer(text))


def _without_version(data: bytes) -> bytes:
    """Return an armored file without the Version lines of its headers. Such a line below them is part of the key."""
    lines = data.splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if not line.strip()), 0)
    return b"".join(line for number, line in enumerate(lines) if number > end or not line.startswith(b"Version"))


def _decoded(lines: list[str]) -> bytes:
    """Return the packets of a block: its headers end at the first blank line, a line with = is a checksum."""
    blank = [number for number, line in enumerate(lines) if not line.strip()]
    if not blank:
        raise ValueError("no blank line ends the headers")
    return base64.b64decode(
        "".join(line.strip() for line in lines[blank[0] :] if not line.startswith("=")), validate=True
    )


def packets_of(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield tag, packet and body of each packet (RFC 4880, 4.2). Raise ValueError or IndexError for other data."""
    at = 0
    while at < len(data):
        first = data[at]
        if not first & 0x80:
            raise ValueError("not OpenPGP")
        if first & 0x40:
            tag, length, head = first & 0x3F, data[at + 1], 2
            if 192 <= length < 224:
                length, head = ((length - 192) << 8) + data[at + 2] + 192, 3
            elif length == 255:
                length, head = int.from_bytes(data[at + 2 : at + 6], "big"), 6
            elif length >= 224:
                raise ValueError("partial length")
        else:
            if first & 3 == 3:
                raise ValueError("indeterminate length")
            tag, size = first >> 2 & 0xF, 1 << (first & 3)
            length, head = int.from_bytes(data[at + 1 : at + 1 + size], "big"), 1 + size
        body = data[at + head : at + head + length]
        if len(body) != length:
            raise ValueError("cut short")
        yield tag, data[at : at + head + length], body
        at += head + length


def armored(data: bytes) -> str:
    """Return packets as armored text, which every verifier of apt and rpm reads in the same way."""
    body = base64.b64encode(data).decode("ascii")
    lines = [body[start : start + 64] for start in range(0, len(body), 64)]
    check = base64.b64encode(_crc24(data).to_bytes(3, "big")).decode("ascii")
    return "\n".join([BEGIN, "", *lines, f"={check}", END]) + "\n"


def _crc24(data: bytes) -> int:
    """Return the checksum of OpenPGP's armor (RFC 4880, 6.1)."""
    crc = 0xB704CE
    for byte in data:
        crc ^= byte << 16
        for _ in range(8):
            crc = (crc << 1) ^ 0x1864CFB if crc & 0x800000 else crc << 1
    return crc & 0xFFFFFF


def _hashed(body: bytes) -> bytes:
    """Return a key's body as signatures and fingerprints hash it."""
    return b"\x99" + len(body).to_bytes(2, "big") + body


def _is_bound(primary: bytes, subkey: bytes, packets: Iterable[bytes]) -> bool:
    """Return whether an RSA primary key has signed a subkey (RFC 4880, 5.2.4).

    Without this, a foreign key that is appended as a subkey depends on the verifier, and old versions of rpm accept it
    (CVE-2021-3521).
    """
    signatures = [body for whole in packets for tag, _, body in packets_of(whole) if tag == SIGNATURE]
    return any(_verified(primary, subkey, body) for body in signatures)


def _verified(primary: bytes, subkey: bytes, signature: bytes) -> bool:
    try:
        version, kind, algorithm, digest = signature[:4]
        if version != 4 or kind != SUBKEY_BINDING or algorithm not in RSA or primary[5] not in RSA:
            return False
        end = 6 + int.from_bytes(signature[4:6], "big")
        name, prefix = DIGESTS[digest]
        signed = _hashed(primary) + _hashed(subkey) + signature[:end] + b"\x04\xff" + end.to_bytes(4, "big")
        unhashed = end + 2 + int.from_bytes(signature[end : end + 2], "big")
        (value,) = _numbers(signature[unhashed + 2 :], 1)
        modulus, exponent = _numbers(primary[6:], 2)
    except (ValueError, KeyError, IndexError):
        return False
    size = (modulus.bit_length() + 7) // 8
    tail = b"\0" + bytes.fromhex(prefix) + hashlib.new(name, signed).digest()
    expected = b"\0\x01" + b"\xff" * (size - 2 - len(tail)) + tail
    return pow(value, exponent, modulus) == int.from_bytes(expected, "big")


def _numbers(data: bytes, count: int) -> list[int]:
    """Return the first numbers in data (RFC 4880, 3.2)."""
    numbers = []
    for _ in range(count):
        size = (int.from_bytes(data[:2], "big") + 7) // 8
        if len(data) < 2 + size or size == 0:
            raise ValueError("cut short")
        numbers.append(int.from_bytes(data[2 : 2 + size], "big"))
        data = data[2 + size :]
    return numbers
