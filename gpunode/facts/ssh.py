"""Settings of sshd, private keys on the node, and accounts without a password."""

import re

from gpunode.facts.bundle_reader import BundleReader, first_line, whole
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact

_SETTING = re.compile(r"([a-z0-9]{1,60}) (.{1,4000})")
_MOST = 1024
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
    for line in bundle.output("sshd-settings").splitlines()[:_MOST]:
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
    for path, mode, owner, kind, bits, modified in bundle.rows("private-keys", 6)[:_MOST]:
        size, time = whole(bits), whole(modified)
        if not re.fullmatch(r"[0-7]{4}", mode) or size is None or time is None:
            raise ParseError(f"expected mode, bits and time of {first_line(path)}, found {first_line(mode)}")
        keys.append(KeyFile(path=path, mode=mode, owner=owner, type=kind, bits=size, modified_s=time))
    return tuple(keys)


def read_empty_passwords(bundle: BundleReader) -> tuple[str, ...]:
    """Return the accounts that have a shell and need no password."""
    return bundle.look("empty-passwords")[:_MOST]


class SshFacts(FactArea):
    """The SSH daemon and keys."""

    ssh_daemon: SshDaemon | None = fact(read_ssh_daemon, needs_root=True, none_means="the node has no OpenSSH server")
    private_keys: tuple[KeyFile, ...] | None = fact(read_private_keys, needs_root=True)
    """The daemon's host keys, and keys in the home folders below /home and in root's."""
    empty_passwords: tuple[str, ...] | None = fact(read_empty_passwords, needs_root=True)
    """Accounts with a shell that need no password."""
