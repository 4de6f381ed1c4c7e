"""The SSH daemon of a node, and private keys on it."""

from gpunode.facts.models.base import Fact


class SshDaemon(Fact):
    """What sshd runs with."""

    settings: dict[str, str]
    """Names in small letters; of a setting that is printed more than once, the first."""


class KeyFile(Fact):
    """A private key on disk; of the key itself nothing is known but its kind."""

    path: str
    mode: str
    """In octal digits."""
    owner: str
    type: str
    """Of the public key beside it: ``ssh-ed25519``; empty where there is none."""
    bits: int
    modified_s: int
    """Seconds since 1970."""
