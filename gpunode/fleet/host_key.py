"""Whether a node's host key is trusted: as OpenSSH with its files, but nothing is ever asked or stored."""

import logging

import paramiko

from gpunode.fleet import known_hosts
from gpunode.fleet.known_hosts import KnownKey, fingerprint
from gpunode.fleet.session import NodeFailure
from gpunode.fleet.ssh_config import SshSettings

log = logging.getLogger(__name__)


def trusted_keys(settings: SshSettings) -> list[KnownKey]:
    """Keys that known_hosts files list for this host, without certificate authorities."""
    files = settings.known_hosts_files
    if settings.host_key_alias is not None:
        names = [settings.host_key_alias]
    else:
        # OpenSSH, too, takes the entry without a port where there is none with it.
        names = [known_hosts.lookup_name(settings.hostname, settings.port), settings.hostname.lower()]
    for name in names:
        found = known_hosts.find(files, name)
        revoked = {key.blob for key in found if key.marker == "revoked"}
        keys = [key for key in found if key.marker is None and key.blob not in revoked]
        if keys:
            return keys
    return []


class HostKeyPolicy(paramiko.MissingHostKeyPolicy):
    """Refuses host keys that no file lists, unless StrictHostKeyChecking says otherwise; nothing is ever stored."""

    def __init__(self, settings: SshSettings, trusted: list[KnownKey], name: str) -> None:
        self._settings = settings
        self._trusted = trusted
        self._name = settings.host_key_alias or name

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002
        """Called by Paramiko for a name that it knows no key of."""
        shown = f"{key.get_name()} {fingerprint(key.asbytes())}"
        settings = self._settings
        listed = known_hosts.find(settings.known_hosts_files, self._name)
        if any(known.marker == "revoked" and known.blob == key.asbytes() for known in listed):
            raise NodeFailure(f"its host key {shown} is revoked in known_hosts")
        if settings.strict_host_key_checking in ("no", "accept-new"):
            log.warning(
                "%s: host key %s is taken unchecked (StrictHostKeyChecking=%s) and not stored",
                settings.alias,
                shown,
                settings.strict_host_key_checking,
            )
            return
        port = f" -p {settings.port}" if settings.port != 22 else ""
        files = ", ".join(settings.known_hosts_files[:2]) or "no file is set"
        if any(known.marker == "cert-authority" for known in listed):
            raise NodeFailure(
                f"{self._name} is known by a certificate authority alone, which gpunode cannot check: "
                f"add its host key {shown} to known_hosts"
            )
        raise NodeFailure(
            f"unknown host key: {shown} of {self._name} is not in known_hosts ({files}); compare the fingerprint, "
            f"then add it, for example by one login: ssh{port} {settings.user}@{settings.hostname}"
        )

    def changed(self, key: paramiko.PKey) -> str:
        """The line for a host whose key is another than the listed ones."""
        place = self._trusted[0]
        listed = known_hosts.find((place.file,), self._name)
        name = self._name if listed else self._settings.hostname
        return (
            f"the host key has changed: {key.get_name()} {fingerprint(key.asbytes())} is not the one in {place.file} "
            f"line {place.line}; if the node was installed anew, remove the old one: "
            f"ssh-keygen -f {place.file} -R '{name}', else somebody may stand in between"
        )
