"""The SSH daemon of a node, and its private keys."""

from gpunode.facts.models.base import Fact


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
