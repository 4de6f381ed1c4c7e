"""The manifest of a role: everything that it wants of a node, computed once from state and settings."""

from base64 import b64decode
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gpunode.frozen import Frozen


class ManagedFile(Frozen):
    """One file that the role owns, as it has to be."""

    path: str
    content: str | None
    """None: the file must not exist."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """How ``content`` stands for the bytes of the file."""
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    phase: Literal["before", "after"] = "before"
    """Before or after the packages."""
    validate_with: tuple[str, ...] | None = None
    """Command that must accept the file; ``%s`` is the temporary file."""
    backup: bool = False
    """Keep a copy of what was there before, as ``PATH.TIME~``."""
    expect_sha256: str | None = None
    """Digest of the file that the content was computed from: another one means that somebody else wrote meanwhile."""
    private: bool = False
    """Holds a secret, or a key that no person reads: its content is in no diff and in no log."""

    @property
    def data(self) -> bytes | None:
        """The bytes of the file; None where it must not exist."""
        if self.content is None:
            return None
        return b64decode(self.content) if self.encoding == "base64" else self.content.encode()

    @model_validator(mode="after")
    def _path_is_absolute(self) -> Self:
        if not self.path.startswith("/"):
            raise ValueError(f"{self.path}: write an absolute path")
        return self


class ManagedFolder(Frozen):
    """One folder: present with a mode, or removed where nothing is in it."""

    path: str
    state: Literal["present", "absent_if_empty"] = "present"
    mode: str = "0755"
    phase: Literal["before", "after"] = "before"


class AptChange(Frozen):
    """What apt is to do, in one transaction. ``roles`` read it as the options of ``package_transaction``."""

    manager: Literal["apt"] = "apt"
    state: Literal["present", "absent"] = "present"
    install: tuple[str, ...] = ()
    """``NAME`` or ``NAME=PATTERN``, a shell pattern of versions. Installed packages that fit are left alone."""
    purge: tuple[str, ...] = ()
    """Shell patterns of packages that go in the same transaction."""
    purge_new: tuple[str, ...] = ()
    """With absent: what goes too, unless ``memory`` lists it."""
    restore: tuple[str, ...] = ()
    """With absent: packages that stay and return from NVIDIA's version to the distribution's."""
    never: tuple[str, ...] = ()
    """Shell patterns of packages that the transaction must not touch."""
    hold: tuple[str, ...] = ()
    """Shell patterns of packages that are held afterwards; with absent: that go where they are held and new."""
    unhold: tuple[str, ...] = ()
    """Names of packages whose hold is released."""
    memory: str | None = None
    """File on the node that lists the packages that were there before the first change; written once."""
    files: dict[str, str | dict[str, str]] = Field(default_factory=dict)
    """Files of apt's folders as they will be, path to text; empty text: absent. Preferences are obeyed before they are
    written, so that a refusal leaves none behind; the others count in check mode."""
    idle_gpus: bool = False
    """Fail where a process computes on a GPU when all is fetched and nothing changed yet."""
    lock_wait_s: int = 300
    limit_s: int = 3600


class DnfChange(Frozen):
    """What dnf is to do, in one transaction."""

    manager: Literal["dnf"] = "dnf"
    state: Literal["present", "absent"] = "present"
    install: tuple[str, ...] = ()
    """``NAME`` or ``NAME=PATTERN``, a shell pattern of ``VERSION-RELEASE`` or ``EPOCH:VERSION-RELEASE``."""
    bound: tuple[str, ...] = ()
    """Packages that must be there, all at one release: the newest that fits ``constraint`` and that all have."""
    constraint: str = "*"
    free: tuple[str, ...] = ()
    """Packages that must be there, in any version."""
    closure: tuple[str, ...] = ()
    """Installed packages that move to that release, or go where it has none of them."""
    line: dict[str, tuple[str, ...]] = Field({"names": (), "except": ()})
    """Shell patterns of packages that come at that release or not at all, whoever requires them."""
    remove: tuple[str, ...] = ()
    expendable: tuple[str, ...] = ()
    """Shell patterns of packages that may go besides."""
    never: tuple[str, ...] = ()
    stream: str | None = None
    """``MODULE:STREAM`` that is enabled in the same transaction."""
    reset: str | None = None
    """Module whose stream is reset."""
    repositories: tuple[dict[str, str], ...] = ()
    """``id``, ``url``, ``proxy`` and ``key`` of repositories as they will be."""
    hold: tuple[str, ...] = ()
    """Shell patterns of packages that the role's part of the versionlock list keeps at their versions afterwards."""
    lock: tuple[str, ...] | None = None
    """Without ``hold``: the lines of that part; None: the list is left alone, (): the part goes."""
    drop_locks: tuple[str, ...] = ()
    """Lines of others in that list that go."""
    lock_mark: str = "gpunode"
    """What the two lines around the role's part end in."""
    ignore_locks: tuple[str, ...] = ()
    memory: str | None = None
    idle_gpus: bool = False
    lock_wait_s: int = 300
    limit_s: int = 900


PackageChange = AptChange | DnfChange


class UnitState(Frozen):
    """One systemd unit as it has to be."""

    name: str
    enabled: bool | None = None
    state: Literal["started", "stopped", "restarted"] | None = None


class NodeQuestion(Frozen):
    """What a plan has to ask the node before it is complete; the answer is in ``Context.answers`` of the next call."""

    kind: Literal[
        "apt_preview",
        "block_devices",
        "dnf_preview",
        "nft_check",
        "package_offers",
        "repository_key",
        "signing_key",
        "documents",
        "ssh_login",
    ]
    body: dict[str, Any] = Field(default_factory=dict)
    private: bool = False
    """The body holds a secret."""


class Manifest(Frozen):
    """What a role wants of a node, and whether something is due."""

    role: str
    files: tuple[ManagedFile, ...] = ()
    folders: tuple[ManagedFolder, ...] = ()
    packages: AptChange | DnfChange | None = Field(default=None, discriminator="manager")
    units: tuple[UnitState, ...] = ()
    questions: dict[str, NodeQuestion] = Field(default_factory=dict)
    """Not empty: the plan is not complete; it is computed again with the answers."""
    refusals: tuple[str, ...] = ()
    """Why the node must not be changed, one line each."""
    notes: tuple[str, ...] = ()
    """What the owner should know, one line each."""
    reboot_reasons: tuple[str, ...] = ()
    restarts: dict[str, str] = Field(default_factory=dict)
    """Units whose restart is held back, with the reason."""
    values: dict[str, Any] = Field(default_factory=dict)
    """What else the role's tasks read: plain data."""
    due_reasons: tuple[str, ...] = ()
    """Why something is due, one line each: the role's own reasons, completed by ``gpunode.provisioning.due.judged``."""

    @property
    def source_files(self) -> dict[str, str]:
        """Files of apt's folders as they will be, and keys that these name, empty text: absent; dnf's repositories."""
        return {
            one.path: one.content or ""
            for one in self.files
            if one.encoding == "utf-8"
            and (one.path.startswith("/etc/apt/") or (one.path.startswith("/etc/yum.repos.d/") and one.content))
        }

    @property
    def due(self) -> bool:
        """True where the node differs from the manifest."""
        return bool(self.due_reasons)


def no_package_manager(role: str) -> Manifest:
    """Return the manifest of a role that installs packages, on a node without apt and dnf."""
    return Manifest(role=role, refusals=(f"no-package-manager: the role {role} installs with apt or dnf",))
