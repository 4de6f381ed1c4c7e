"""Take NVIDIA's keys out of the keyrings that apt trusts for every repository, and print which files that touched.

Runs as ``python3 -I -c`` standard library alone; with the argument ``--tell`` nothing is changed. A key given to
apt-key vouches for every repository of the node; the repository names its own key instead.
"""

import hashlib
import sys
from pathlib import Path

KEYS = ("7FA2AF80", "3BF863CC", "8793F200")
PUBLIC_KEY = 6


def packets(data):
    """(tag, header and body, body) of each OpenPGP packet; ValueError where it is none."""
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
            tag, size = first >> 2 & 0xF, 1 << (first & 3)
            length, head = int.from_bytes(data[at + 1 : at + 1 + size], "big"), 1 + size
        whole = data[at : at + head + length]
        yield tag, whole, whole[head:]
        at += head + length


def without_ours(data):
    """The keyring without NVIDIA's keys."""
    kept, keeps = [], True
    for tag, whole, body in packets(data):
        if tag == PUBLIC_KEY:
            fingerprint = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()  # noqa: S324
            keeps = not fingerprint.endswith(KEYS)
        if keeps:
            kept.append(whole)
    return b"".join(kept)


def main():
    """Print one path a line."""
    for path in (Path("/etc/apt/trusted.gpg"), *sorted(Path("/etc/apt/trusted.gpg.d").glob("*.gpg"))):
        try:
            data = path.read_bytes()
            left = without_ours(data)
        except (OSError, ValueError, IndexError):
            continue
        if left != data:
            sys.stdout.write(f"{path}\n")
            if "--tell" in sys.argv:
                continue
            if left:
                draft = path.with_name(path.name + ".new")
                draft.write_bytes(left)
                draft.chmod(0o644)
                draft.replace(path)
            else:
                path.unlink()


if __name__ == "__main__":
    main()
