"""Read OpenPGP keyrings. Standard library only."""

import base64
import binascii
import hashlib
import re

PUBLIC_KEY = 6
LONGEST_KEY = 0xFFFF
"""Maximum size of a key in bytes: fingerprints and signatures of keys have two bytes for it (RFC 4880, 12.2)."""

BEGIN, END = b"-----BEGIN PGP PUBLIC KEY BLOCK-----", b"-----END PGP PUBLIC KEY BLOCK-----"
BLOCK = re.compile(BEGIN + rb"[^\n]*\n(.*?)" + END, re.DOTALL)


def dearmored(data):
    """Return the binary form of keys, armored or not: all blocks. Raise ValueError if the armor is damaged."""
    if BEGIN not in data:
        return data
    blocks = BLOCK.findall(data.replace(b"\r", b""))
    try:
        found = b"".join(decoded(block.split(b"\n")) for block in blocks)
    except binascii.Error as error:
        raise ValueError(f"the armor is damaged: {error}") from None
    if not found:
        raise ValueError("the armor is damaged")
    return found


def decoded(lines):
    """Return the packets of an armored block: its headers end at the first blank line, a line with = is a checksum."""
    blank = [number for number, line in enumerate(lines) if not line.strip()]
    if not blank:
        raise ValueError("the armor is damaged: no blank line ends its headers")
    words = [line.strip() for line in lines[blank[0] :] if not line.startswith(b"=")]
    return base64.b64decode(b"".join(words), validate=True)


def packets(data):
    """Yield (tag, header and body, body) of each OpenPGP packet. Raise ValueError for other data."""
    at = 0
    while at < len(data):
        first = data[at]
        if not first & 0x80:
            raise ValueError("not OpenPGP")
        try:
            if first & 0x40:
                tag, length, head = first & 0x3F, data[at + 1], 2
                if 192 <= length < 224:
                    length, head = ((length - 192) << 8) + data[at + 2] + 192, 3
                elif length == 255:
                    length, head = int.from_bytes(data[at + 2 : at + 6], "big"), 6
                elif length >= 224:
                    raise ValueError("partial length")
            elif first & 3 == 3:
                raise ValueError("indeterminate length")
            else:
                tag, size = first >> 2 & 0xF, 1 << (first & 3)
                length, head = int.from_bytes(data[at + 1 : at + 1 + size], "big"), 1 + size
        except IndexError:
            raise ValueError("cut off") from None
        whole = data[at : at + head + length]
        if len(whole) != head + length:
            raise ValueError("cut off")
        yield tag, whole, whole[head:]
        at += head + length


def keys(data):
    """Return (fingerprint, bytes) of each public key in a keyring, armoured or not. Raise ValueError for other data."""
    found = []
    for tag, whole, body in packets(dearmored(data)):
        if tag == PUBLIC_KEY:
            if len(body) > LONGEST_KEY:
                raise ValueError("a key is too long")
            fingerprint = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324
            found.append((fingerprint, whole))
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + whole)
    return found
