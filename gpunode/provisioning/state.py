"""State of a node, in types: parsed from the answer of the module ``node_state``, and bounded."""

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpunode.facts import NodeFacts
from gpunode.facts.running import Unit
from gpunode.provisioning.context import FIELDS, NotReadError, partial

Text = Annotated[str, Field(max_length=4096)]
Words = Annotated[tuple[Text, ...], Field(max_length=1000)]
Content = Annotated[str, Field(max_length=1 << 20)]
T = TypeVar("T")
BOOT_ID = "/proc/sys/kernel/random/boot_id"
Names = Annotated[tuple[Text, ...], Field(max_length=50_000)]
Versions = Annotated[dict[Text, Text], Field(max_length=50_000)]
_OWN = re.compile(r"/run/gpunode/|.*/(RPM-GPG-KEY-)?gpunode-[^/]+$")


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


def sysctl_path(name: str) -> str:
    """Return the path of a setting below /proc/sys."""
    return f"/proc/sys/{name.replace('.', '/')}"


def effective_values(text: str) -> dict[str, tuple[str, ...]]:
    """Return the settings that ``sshd -T`` printed, each with its values; names are in lower case."""
    settings: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name.lower(), []).append(value.strip())
    return {name: tuple(values) for name, values in settings.items()}


class FileState(Reported):
    """One path on the node."""

    kind: Literal["file", "folder", "link", "other", "absent", "unknown"]
    sha256: Text | None = None
    mode: Text | None = None
    owner: Text | None = None
    group: Text | None = None
    target: Text | None = None
    """The target of a link."""
    mtime: float | None = None
    entries: int | None = None
    """Number of entries of a folder."""
    problem: Text | None = None
    """Why the path, or its text if that was requested, could not be read."""


class SourceOrigin(Reported):
    """Content of a Release file."""

    origin: Text
    codename: Text


class AptSource(Reported):
    """One enabled entry of apt's sources."""

    file: Text
    types: Names
    uris: Names
    suites: Names
    components: Names
    options: dict[Text, Content] = Field(default_factory=dict)
    origins: dict[Text, SourceOrigin] = Field(default_factory=dict)


class ModuleKey(Reported):
    """The key that signs modules built by DKMS."""

    path: Text
    enrolled: bool | None
    waits: bool
    fresh: bool


class AptState(Reported):
    """State of apt and dpkg."""

    sources: Annotated[tuple[AptSource, ...], Field(max_length=10_000)]
    headers: Names
    publishers: dict[Text, Annotated[tuple[tuple[Text, Text], ...], Field(max_length=1000)]]
    lists: bool
    installed: Versions
    unfinished: Names
    held: Names
    own_holds: Names
    policy_left: bool
    left: Names = ()
    """Packages of a transaction of ours that did not finish."""
    old_keys: Annotated[dict[Text, Content], Field(max_length=1000)] = Field(default_factory=dict)
    """Keyrings that apt trusts for every repository and that may contain NVIDIA's keys, to their content in base64."""
    key: ModuleKey | None
    architecture: Text
    lock_holder: Text | None
    runfile: bool


class DnfRepository(Reported):
    """One repository of yum.repos.d."""

    id: Text
    file: Text
    urls: Names


class DnfState(Reported):
    """State of dnf and rpm."""

    error: Text | None
    lock_holder: Text | None = None
    unfinished: Names = ()
    installed: Versions = Field(default_factory=dict)
    twice: Names = ()
    streams: Versions = Field(default_factory=dict)
    repositories: Annotated[tuple[DnfRepository, ...], Field(max_length=10_000)] = ()
    locks: Names = ()
    own_locks: Names = ()
    version: Text | None = None
    versionlock: bool = False
    runfile: bool = False
    key: ModuleKey | None = None


class Connection(Reported):
    """The SSH connection over which the node was queried, as the node sees it."""

    client: Text
    """Address of the client."""
    port: int
    """Port of the node."""


class NodeState(Reported):
    """Everything that the plans read. What belongs to a part that was not read raises NotReadError."""

    facts: NodeFacts
    apt: AptState | None
    dnf: DnfState | None
    files: Annotated[dict[Text, FileState], Field(max_length=10_000)] = Field(default_factory=dict)
    """By path; a path that was not requested is missing."""
    contents: Annotated[dict[Text, Content | None], Field(max_length=1000)] = Field(default_factory=dict)
    """Documents of at most 1 MiB; None: absent, or ``unreadable``."""
    ssh: SshState | None = None
    """The SSH daemon, its keys and the accounts."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Answer of the container engine: ``{"info": {…} | null, "silent": bool}``, bounded when it was read."""
    connection: Connection | None = None
    """None if the node was not reached over SSH, or that is unknown."""
    unread: Names = ()
    """Parts that were not read."""

    @model_validator(mode="after")
    def _withheld(self) -> Self:
        if self.unread:
            object.__setattr__(self, "facts", partial(self.facts, self.unread))
        return self

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute; raise NotReadError for a field of a part that was not read."""
        if name in FIELDS and FIELDS[name] in self.unread:
            raise NotReadError(FIELDS[name])
        return super().__getattribute__(name)

    def attributes(self, path: str) -> dict[str, str]:
        """Return mode and owner of a file, for a new text of it; none if it does not exist."""
        actual = self.files.get(path)
        if actual is None or actual.kind != "file":
            return {}
        known = {"mode": actual.mode, "owner": actual.owner, "group": actual.group}
        return {name: value for name, value in known.items() if value}

    def kind(self, path: str) -> str:
        """Return the kind of a path; unknown if it was not requested, or could not be read."""
        return self.files[path].kind if path in self.files else "unknown"

    def exists(self, path: str) -> bool:
        """Return whether a path that was requested exists."""
        return path in self.files and self.files[path].kind != "absent"

    def unit(self, name: str) -> Unit | None:
        """Return a unit that the probe reads; None if it is not installed or unknown."""
        return next((unit for unit in self.facts.units or () if unit.name == name and unit.load == "loaded"), None)

    def with_files(self, planned: Mapping[str, str | None]) -> "NodeState":
        """Return the state with planned files, path to text or None: only those that are known by now."""
        files, contents = dict(self.files), dict(self.contents)
        for path, text in planned.items():
            actual = files.get(path)
            if actual is not None and text is None:
                files[path] = FileState(kind="absent")
            elif actual is not None and text is not None:
                fresh = (
                    actual if actual.kind == "file" else FileState(kind="file", mode="0644", owner="root", group="root")
                )
                files[path] = fresh.model_copy(update={"sha256": sha256(text.encode()).hexdigest()})
            if path in contents:
                contents[path] = text
        return self.model_copy(update={"files": files, "contents": contents})

    def unreadable(self, paths: Iterable[str]) -> Iterator[str]:
        """Yield why documents that exist could not be read: a role that changes one of them would lose its content.

        A file that is the role's alone is not one of them: it is replaced.
        """
        for path in paths:
            actual = self.files.get(path)
            if self.contents.get(path) is not None or actual is None or actual.kind == "absent" or _OWN.match(path):
                continue
            yield actual.problem or f"{path} could not be read"

    @property
    def boot_id(self) -> str:
        """Return the id of the node's boot; empty: unknown."""
        return (self.contents.get(BOOT_ID) or "").strip()

    @property
    def manager(self) -> Literal["apt", "dnf"] | None:
        """Return the node's package manager; None if it has neither."""
        return "apt" if self.apt is not None else "dnf" if self.dnf is not None else None

    @property
    def package_manager(self) -> Literal["apt", "dnf"]:
        """Return the node's package manager; ValueError without one, where ``Role.plan`` refuses first."""
        if self.manager is None:
            raise ValueError("the node has no package manager")
        return self.manager

    def by_manager(self, *, apt: T, dnf: T) -> T:
        """Return what is for the node's package manager; ValueError without one."""
        return apt if self.package_manager == "apt" else dnf

    @property
    def installed(self) -> dict[str, str]:
        """Return installed packages, name to version, of the node's package manager."""
        manager = self.apt or self.dnf
        return manager.installed if manager is not None else {}


class Look(BaseModel):
    """What ``node_state`` reads for a role in addition to the parts for every role."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: tuple[str, ...] = ()
    """Digest, mode and owner of each."""
    globs: tuple[str, ...] = ()
    """The same for matching paths."""
    contents: tuple[str, ...] = ()
    """Documents to read; they are among ``files`` too."""
