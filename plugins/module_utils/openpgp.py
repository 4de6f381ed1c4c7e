"""Read OpenPGP keyrings. Standard library only."""

import base64
import binascii
import hashlib
import re

PUBLIC_KEY = 6


def dearmored(data):
    """Return the binary form of a key, armoured or not. Raise ValueError if the armor is damaged."""
    if b"-----BEGIN PGP PUBLIC KEY BLOCK-----" not in data:
        return data
    # Headers end at the empty line; the line that begins with = is a checksum.
    found = re.search(
        rb"-----BEGIN[^\n]*\n(?:[^\n]+:[^\n]*\n)*[ \t\r]*\n(.*?)(?:\n=[^\n]*)?\s*-----END", data, re.DOTALL
    )
    if found is None:
        raise ValueError("the armor is damaged")
    try:
        return base64.b64decode(found[1])
    except binascii.Error as error:
        raise ValueError(f"the armor is damaged: {error}") from None


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
            else:
                tag, size = first >> 2 & 0xF, 1 << (first & 3)
                length, head = int.from_bytes(data[at + 1 : at + 1 + size], "big"), 1 + size
        except IndexError:
            raise ValueError("cut off") from None
        whole = data[at : at + head + length]
        yield tag, whole, whole[head:]
        at += head + length


def keys(data):
    """Return (fingerprint, bytes) of each public key in a keyring, armoured or not. Raise ValueError for other data."""
    found = []
    for tag, whole, body in packets(dearmored(data)):
        if tag == PUBLIC_KEY:
            fingerprint = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324
            found.append((fingerprint, whole))
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + whole)
    return found
