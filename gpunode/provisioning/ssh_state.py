"""State of a node's SSH daemon and of its accounts, in types and bounded."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=4096)]
Words = Annotated[tuple[Text, ...], Field(max_length=1000)]
Content = Annotated[str, Field(max_length=1 << 20)]


class Reported(BaseModel):
    """Base of models of a node's report: immutable; unknown fields are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class PublicKey(Reported):
    """One key of authorized_keys."""

    type: Text
    bits: int
    blob: Annotated[str, Field(max_length=16384)]
    options: Annotated[str, Field(max_length=16384)] = ""


class Account(Reported):
    """One account that can have a shell: local, or one that was looked up by its name."""

    name: Text
    uid: int
    group: Text
    home: Text
    shell: Text
    groups: Words
    password: Text
    """``none``, ``locked`` (``*``), ``closed`` (``!``: sshd without PAM refuses keys, too), ``set`` or ``unknown``."""
    keys: Annotated[tuple[PublicKey, ...], Field(max_length=1000)]
    keys_problem: Text = ""
    document: Content | None = None
    """Text of ``~/.ssh/authorized_keys``."""
    document_problem: Text = ""
    """Why that file, which exists, could not be read."""
    folder: Text = "absent"
    """State of ``~/.ssh``."""


class HostKey(Reported):
    """One private host key of the daemon."""

    path: Text
    type: Text
    bits: int
    mode: Text
    owner: Text
    group: Text
    mtime: float


class SshUnit(Reported):
    """State of one of the daemon's units in systemd."""

    load: Text
    active: Text
    enabled: Text
    listen: Text


class Login(Reported):
    """The login over which the node was queried."""

    user: Text
    address: Text
    port: int


class SshState(Reported):
    """The daemon: its effective settings, its algorithms, its files, and the accounts."""

    version: Text
    effective: Content | None
    """Output of ``sshd -T``; None if it failed."""
    error: Text | None
    offered: dict[Text, Words]
    """Output of ``ssh -Q``, by kind."""
    contents: Annotated[dict[Text, Content | None], Field(max_length=200)]
    unreadable: Annotated[dict[Text, Text], Field(max_length=200)] = Field(default_factory=dict)
    """Those of them that exist and could not be read, with the reason."""
    host_keys: Annotated[tuple[HostKey, ...], Field(max_length=200)]
    weak_moduli: int | None
    accounts: Annotated[tuple[Account, ...], Field(max_length=1000)]
    login: Login | None
    listening: Annotated[tuple[int, ...], Field(max_length=70_000)]
    units: dict[Text, SshUnit]
    selinux: bool

    def unit(self, *names: str) -> str | None:
        """Return the first of these units that is loaded."""
        return next((name for name in names if name in self.units and self.units[name].load == "loaded"), None)

    def active(self, name: str | None) -> bool:
        """Return whether a unit runs or listens."""
        return name in self.units and self.units[name].active == "active"

    def account(self, name: str) -> Account | None:
        """Return an account by its name."""
        return next((account for account in self.accounts if account.name == name), None)


def effective_values(text: str) -> dict[str, tuple[str, ...]]:
    """Return the settings that ``sshd -T`` printed, each with its values; names are in lower case."""
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name.lower(), []).append(value.strip())
    return {name: tuple(values) for name, values in settings.items()}
