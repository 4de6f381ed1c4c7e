"""Host keys of nodes: those that are listed, and whether a node's key is trusted, never weaker than OpenSSH with its
files, without prompts, and nothing is stored.

``ssh-keygen -F`` answers what OpenSSH's files list, so no line is parsed here: a second parser of known_hosts would
have to agree with ssh's on every byte. A key that only this one finds is trusted without reason, and a changed key that
only ssh finds is accepted as an unknown one.
"""

import base64
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import paramiko

from gpunode.errors import GpunodeError
from gpunode.fleet import process
from gpunode.fleet.session import NodeFailure
from gpunode.fleet.ssh_config import SshSettings

log = logging.getLogger(__name__)
_TIMEOUT_S = 20.0
_FOUND = re.compile(r"# Host .* found: line (?P<line>\d+) (?P<marker>CA|REVOKED)?\s*")
_TYPES = {
    "RSA": ("ssh-rsa",),
    "ED25519": ("ssh-ed25519",),
    "ECDSA": ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
}
"""Types by ssh-keygen's names of those that Paramiko knows."""


@dataclass(frozen=True)
class KnownKey:
    """One key of one line. ``marker`` is None, ``revoked`` or ``cert-authority``."""

    key_types: tuple[str, ...]
    """Its type; more than one where ssh-keygen's answer does not distinguish them."""
    fingerprint: str
    marker: str | None
    file: str
    line: int


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint as ssh prints it: ``SHA256:`` and base64 without padding."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def lookup_name(hostname: str, port: int) -> str:
    """Return the name under which a host is listed: ``host``, or ``[host]:port`` for any port but 22."""
    return hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}"


def find(files: Iterable[str], name: str) -> list[KnownKey]:
    """Return all keys listed for ``name``, in the order of the files. An absent or unreadable file has none, as in ssh.

    Raises NodeFailure if ssh-keygen does not answer.
    """
    return [key for file in files if os.access(file, os.R_OK) for key in _find(file, name)]


def _find(file: str, name: str) -> list[KnownKey]:
    try:
        done = process.run(["ssh-keygen", "-l", "-E", "sha256", "-F", name, "-f", file], timeout_s=_TIMEOUT_S)
    except GpunodeError as err:
        raise NodeFailure(f"its host key cannot be looked up in {file}: {err}") from None
    # Comments may contain any character but the line feed.
    lines = done.stdout.removesuffix("\n").split("\n") if done.stdout else []
    heads = [_FOUND.fullmatch(line) for line in lines[::2]]
    if done.rc not in (0, 1) or len(lines) % 2 or None in heads:
        complaint = done.stderr.strip().partition("\n")[0] or f"exit code {done.rc}"
        raise NodeFailure(f"its host key cannot be looked up in {file}: ssh-keygen: {complaint}")
    keys = []
    for head, line in zip(heads, lines[1::2], strict=True):
        # NAME TYPE SHA256:... COMMENT
        kind, digest = line.split(" ")[1 + name.count(" ") :][:2]
        marker = {"CA": "cert-authority", "REVOKED": "revoked"}.get(head["marker"] or "") if head else None
        keys.append(KnownKey(_TYPES.get(kind, ()), digest, marker, file, int(head["line"]) if head else 0))
    return keys


class HostKeys:
    """The entries of the known_hosts files for one host, under each name that it is looked up by."""

    def __init__(self, settings: SshSettings, address: str | None = None) -> None:
        """Read the entries; ``address`` is the target of the connection if ssh would connect directly."""
        files = settings.known_hosts_files
        if settings.host_key_alias is not None:
            self.names = [settings.host_key_alias]
        else:
            name = lookup_name(settings.hostname, settings.port)
            # OpenSSH, too, uses the entry without a port if there is none with it.
            self.names = list(dict.fromkeys((name, settings.hostname.lower())))
        by_address = lookup_name(address, settings.port) if address is not None else None
        also = [by_address, address] if by_address is not None and address is not None else []
        listed = {name: find(files, name) for name in dict.fromkeys((*self.names, *also))}
        self._of_address: list[KnownKey] = []
        if by_address is not None and settings.check_host_ip and settings.host_key_alias is None:
            self._of_address = [key for key in listed[by_address] if key.marker is None]
        by_name = {name: listed[name] for name in self.names}
        every = [key for keys in by_name.values() for key in keys]
        # A revoked key may be presented under any of its names.
        self._revoked = {key.fingerprint for keys in listed.values() for key in keys if key.marker == "revoked"}
        plain = {name: [key for key in keys if key.marker is None] for name, keys in by_name.items()}
        self.name, self.trusted = next(
            ((name, keys) for name, keys in plain.items() if keys), (self.names[0], list[KnownKey]())
        )
        self.has_authority = any(key.marker == "cert-authority" for key in every)

    @property
    def types(self) -> set[str]:
        """Return the types of the listed keys, to be requested first: a second key would look like a changed one."""
        return {name for key in self.trusted if key.fingerprint not in self._revoked for name in key.key_types}

    def revoked(self, blob: bytes) -> bool:
        """Return True if a line of any file revokes the key for this host, independent of other lines."""
        return fingerprint(blob) in self._revoked

    def known(self, blob: bytes) -> bool:
        """Return True if one of the listed keys is this one; a host may have several, also of one type."""
        return any(key.fingerprint == fingerprint(blob) for key in self.trusted)

    def other_of_address(self, blob: bytes) -> KnownKey | None:
        """Return a listed key of the address, if this one is not among them (CheckHostIP)."""
        listed = self._of_address
        return listed[0] if listed and all(key.fingerprint != fingerprint(blob) for key in listed) else None


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """Check of every host key: Paramiko gets none, because it keeps only one key of each type."""

    def __init__(self, settings: SshSettings, keys: HostKeys) -> None:
        self._settings = settings
        self._keys = keys
        self.unchecked: str | None = None
        """The key in one line, if it is unknown and was accepted because of the user's settings."""

    def missing_host_key(self, _client: paramiko.SSHClient, _hostname: str, key: paramiko.PKey) -> None:
        """Check the key that the node has proven to own, called by Paramiko; raise NodeFailure to refuse it."""
        settings, keys, blob = self._settings, self._keys, key.asbytes()
        shown = f"{key.get_name()} {fingerprint(blob)}"
        if keys.revoked(blob):
            raise NodeFailure(f"its host key {shown} is revoked in known_hosts")
        if key.get_name() == "ssh-rsa" and key.get_bits() < settings.least_rsa_bits:
            raise NodeFailure(
                f"its host key {shown} has {key.get_bits()} bits, RequiredRSASize requires {settings.least_rsa_bits}: "
                "generate a new host key on the node (ssh-keygen -A)"
            )
        if keys.known(blob):
            other = keys.other_of_address(blob)
            if other is None:
                return
            raise NodeFailure(
                f"{other.file} line {other.line} lists another host key for its address (CheckHostIP): remove that "
                f"line if the change is expected, otherwise the connection may be intercepted; the node's key is "
                f"{shown}"
            )
        if keys.trusted:
            raise NodeFailure(self._changed(shown))
        if keys.has_authority:
            raise NodeFailure(
                f"{keys.name} is known only through a certificate authority, which gpunode cannot verify: "
                f"add its host key {shown} to known_hosts"
            )
        if settings.strict_host_key_checking in ("no", "accept-new"):
            self.unchecked = f"{shown} (StrictHostKeyChecking={settings.strict_host_key_checking})"
            log.warning(
                "%s: host key %s is accepted without verification and not stored", settings.alias, self.unchecked
            )
            return
        port = f" -p {settings.port}" if settings.port != 22 else ""
        files = ", ".join(settings.known_hosts_files[:2]) or "no file is set"
        raise NodeFailure(
            f"unknown host key: {shown} of {keys.name} is not in known_hosts ({files}); compare the fingerprint, then "
            f"add it, for example with one login: ssh{port} {settings.user}@{settings.hostname}"
        )

    def _changed(self, shown: str) -> str:
        key = self._keys.trusted[0]
        return (
            f"the host key has changed: {shown} is not the one in {key.file} "
            f"line {key.line}; if the node was reinstalled, remove the old key: "
            f"ssh-keygen -f {key.file} -R '{self._keys.name}'; otherwise the connection may be intercepted"
        )
