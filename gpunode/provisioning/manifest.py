"""The manifest of a role: the complete target state of a node, computed once from state and settings.

Its comparison with the state shows whether changes are pending; unknown state counts as a difference.
"""

import hashlib
import re
from base64 import b64decode
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

from pydantic import Field, SerializeAsAny, model_validator

from gpunode.frozen import Frozen
from gpunode.provisioning.state import AptState, DnfState, NodeState
from gpunode.provisioning.transaction import Transaction, lock_lines
from gpunode.text import matches_any

USER_IN_URL = re.compile(r"://([^\s/@\"']{1,500}|[^\s/@\"':]{0,200}:[^\s@\"']{1,500})@(?:[^\s/@\"']{0,500}@)*")
"""User information in a URL: a proxy's or a mirror's password, also one with a slash that is not encoded."""
KEY_FILE = re.compile(r"/etc/apt/keyrings/|/etc/pki/rpm-gpg/")


class ManagedFile(Frozen):
    """One file of the role in its target state."""

    path: str
    content: str | None
    """None: the file must not exist."""
    encoding: Literal["utf-8", "base64"] = "utf-8"
    """Encoding of the file's bytes in ``content``."""
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    phase: Literal["first", "before", "after", "last", "guarded"] = "before"
    """By a task of the role that comes first; before or after the packages; after everything else: a record of what was
    applied; or with the manifest's guarded change.
    """
    validate_with: tuple[str, ...] | None = None
    """Command that must accept the file; ``%s`` is the temporary file."""
    backup: bool = False
    """Keep a copy of the previous file, as ``PATH.TIME~``."""
    expect_sha256: str | None = None
    """Digest of the file that the content was computed from: with another digest, it was changed in the meantime."""
    private: bool = False
    """Contains a secret, or a key that people do not read: its content is in no diff and in no log."""

    @property
    def data(self) -> bytes | None:
        """Return the bytes of the file; None if it must not exist."""
        if self.content is None:
            return None
        return b64decode(self.content) if self.encoding == "base64" else self.content.encode()

    @model_validator(mode="before")
    @classmethod
    def _passwords_and_keys_are_private(cls, data: Any) -> Any:
        if isinstance(data, dict) and (
            USER_IN_URL.search(str(data.get("content") or "")) or KEY_FILE.match(str(data.get("path")))
        ):
            return {**data, "private": True}
        return data

    @model_validator(mode="after")
    def _path_is_absolute(self) -> Self:
        if not self.path.startswith("/"):
            raise ValueError(f"{self.path}: write an absolute path")
        return self


class ManagedFolder(Frozen):
    """One folder: present with a mode, or removed if it is empty."""

    path: str
    state: Literal["present", "absent_if_empty"] = "present"
    mode: str = "0755"
    phase: Literal["first", "before", "after", "last"] = "before"


class UnitState(Frozen):
    """One systemd unit in its target state."""

    name: str
    enabled: bool | None = None
    state: Literal["started", "stopped", "restarted", "reloaded"] | None = None
    phase: Literal["before", "after"] = "after"
    """Before or after the packages: a unit is stopped before the removal of its package."""
    reason: str | None = None
    """Why it is restarted or reloaded."""
    ready: tuple[str, ...] = ()
    """Command that has to print ``true`` before that."""
    mark: str | None = None
    """File that records that it is pending; it is removed afterwards."""


class RevertibleChange(Frozen):
    """What can lock out whoever runs this: the node restores the old state unless a new login succeeds.

    Its files are those of the phase ``guarded``; the fields are options of the module ``guarded_change``.
    """

    keep: tuple[str, ...] = ()
    """Further files that ``activate`` changes."""
    units: tuple[str, ...] = ()
    checks: tuple[tuple[str, ...], ...] = ()
    """Commands that must accept the files before any change."""
    show: tuple[str, ...] = ()
    activate: tuple[tuple[str, ...], ...] = ()
    restore: tuple[tuple[str, ...], ...] | None = None
    """Commands that activate the old state; None: those of ``activate``."""
    limit_s: int


class NodeCommand(Frozen):
    """One command that applies files; it is run whenever changes of the role are pending."""

    argv: tuple[str, ...]
    changes: bool = True
    """Whether it counts as a change."""
    creates: str | None = None
    """File that makes the command unnecessary."""
    may_fail: bool = False
    """It fails if the node is as requested already: then nothing changed, and the run continues."""
    phase: Literal["before", "after"] = "after"
    """Before or after the packages."""


class NodeQuery(Frozen):
    """A question to the node that a plan needs before it is complete; ``Context.answers`` of the next call has the
    answer.
    """

    kind: Literal[
        "block_devices",
        "nft_check",
        "package_offers",
        "package_transaction",
        "signing_key",
        "contents",
        "ssh_login",
    ]
    body: dict[str, Any] = Field(default_factory=dict)


class Manifest(Frozen):
    """The target state of a node for one role, and whether changes are pending."""

    role: str
    files: tuple[ManagedFile, ...] = ()
    folders: tuple[ManagedFolder, ...] = ()
    packages: Transaction | None = None
    units: tuple[UnitState, ...] = ()
    modules: tuple[str, ...] = ()
    """Kernel modules that are loaded before the files that list them for the boot: one that does not load would fail at
    every boot.
    """
    kernel_values: dict[str, str] | None = None
    """Path below /proc/sys or /sys to value, set in the running kernel; others of the role are restored. None: the role
    sets none.
    """
    kernel_memory: str | None = None
    """File on the node that records the values from before the first change."""
    commands: tuple[NodeCommand, ...] = ()
    guarded: RevertibleChange | None = None
    questions: dict[str, NodeQuery] = Field(default_factory=dict)
    """If not empty, the plan is incomplete; it is computed again with the answers."""
    refusals: tuple[str, ...] = ()
    """Why the node must not be changed, one line each."""
    notes: tuple[str, ...] = ()
    """Notes for the owner, one line each."""
    reboot_reasons: tuple[str, ...] = ()
    restarts: dict[str, str] = Field(default_factory=dict)
    """Units with a deferred restart, with the reason."""
    restart_mark: str | None = None
    """File that records that new packages require a restart; it is removed when a unit was restarted."""
    restart_text: str = "new packages are installed\n"
    """Its content: a role that reads it again writes what it needs."""
    marks: tuple[ManagedFile, ...] = ()
    """Records of restarts and reloads that the files require, written before them: the next run then completes an
    aborted one.
    """
    problems: tuple[str, ...] = ()
    """What is wrong on the node: a run that changed something fails with it."""
    result: SerializeAsAny[Frozen] | None = None
    """Typed data for the role's own tasks."""
    pending_reasons: tuple[str, ...] = ()
    """Why changes are pending, one line each: the role's own, completed by ``compared``."""

    @property
    def source_files(self) -> dict[str, str]:
        """Return files of apt's folders in their target state, and keys that these name, empty text: absent; dnf's
        repositories.
        """
        return {
            file.path: file.content or ""
            for file in self.files
            if file.encoding == "utf-8"
            and (file.path.startswith("/etc/apt/") or (file.path.startswith("/etc/yum.repos.d/") and file.content))
        }

    @property
    def manages(self) -> bool:
        """Return False if the role has nothing to do with this node, as with ``ROLE_state: keep``."""
        return bool(self.files or self.folders or self.packages or self.units or self.result)

    def updated(self, **changes: Any) -> Self:
        """Return the manifest with some fields replaced."""
        return self.model_copy(update=changes)

    @property
    def pending(self) -> bool:
        """Return True if the node differs from the manifest."""
        return bool(self.pending_reasons)


def no_package_manager(role: str) -> Manifest:
    """Return the manifest of a role that installs packages, on a node without apt and dnf."""
    return Manifest(role=role, refusals=(f"no-package-manager: the role {role} installs with apt or dnf",))


def compared(manifest: Manifest, state: NodeState) -> Manifest:
    """Return the manifest with all reasons why changes are pending, the role's own first, each one line."""
    reasons = [*manifest.pending_reasons]
    for file in manifest.files:
        reasons += file_reasons(file, state)
    for folder in manifest.folders:
        reasons += folder_reasons(folder, state)
    reasons += package_reasons(manifest.packages, state)
    reasons += [f"module {name} is not loaded" for name in manifest.modules]
    for unit in manifest.units:
        reasons += unit_reasons(unit, state)
    return manifest.updated(pending_reasons=tuple(dict.fromkeys(reasons)))


def file_reasons(file: ManagedFile, state: NodeState) -> Iterator[str]:
    """Yield how a file on the node differs from the manifest."""
    actual = state.files.get(file.path)
    if actual is None or actual.kind == "unknown":
        yield f"{file.path} could not be determined"
    elif (data := file.data) is None:
        if actual.kind != "absent":
            yield f"{file.path} must be removed"
    elif actual.kind == "absent":
        yield f"{file.path} is missing"
    elif actual.kind != "file":
        yield f"{file.path} is a {actual.kind}, not a file"
    else:
        if actual.sha256 != hashlib.sha256(data).hexdigest():
            yield f"{file.path} differs"
        if actual.mode != file.mode:
            yield f"{file.path} has mode {actual.mode}, not {file.mode}"
        if (actual.owner, actual.group) != (file.owner, file.group):
            yield f"{file.path} belongs to {actual.owner}:{actual.group}, not {file.owner}:{file.group}"


def folder_reasons(folder: ManagedFolder, state: NodeState) -> Iterator[str]:
    """Yield how a folder differs."""
    actual = state.files.get(folder.path)
    if actual is None or actual.kind == "unknown":
        yield f"{folder.path} could not be determined"
    elif folder.state == "absent_if_empty":
        if actual.kind == "folder" and actual.entries == 0:
            yield f"{folder.path} is empty and must be removed"
    elif actual.kind != "folder":
        yield f"{folder.path} is not a directory"
    elif actual.mode != folder.mode:
        yield f"{folder.path} has mode {actual.mode}, not {folder.mode}"


def package_reasons(change: Transaction | None, state: NodeState) -> Iterator[str]:
    """Yield which packages are missing, have to be removed, or are not held."""
    if change is None:
        return
    apt, dnf = (state.apt, None) if change.manager == "apt" else (None, state.dnf)
    manager = apt or dnf
    if manager is None or (dnf is not None and dnf.error is not None):
        yield f"the state of {change.manager} is unknown"
        return
    if apt is not None:
        yield from _interrupted(change, apt)
    yield from _missing((*change.install, *change.bound), manager.installed)
    for name in sorted({*manager.installed, *manager.unfinished}):
        if matches_any(name, change.remove):
            yield f"{name} must be removed"
    if apt is not None:
        yield from _apt_holds(change, apt)
    if dnf is not None:
        yield from _dnf_streams(change, dnf)
        yield from _dnf_locks(change, dnf)


def _interrupted(change: Transaction, apt: AptState) -> Iterator[str]:
    if apt.policy_left:
        yield "an interrupted run left its policy-rc.d"
    if apt.left:
        yield "an interrupted run left its transaction"
    for name in apt.unfinished:
        if any(name == entry.partition("=")[0] for entry in change.install):
            yield f"{name} is half-configured"


def _apt_holds(change: Transaction, apt: AptState) -> Iterator[str]:
    held = set(apt.held)
    if change.state == "present":
        for name in sorted(apt.installed):
            if name not in held and matches_any(name, change.hold):
                yield f"{name} is not held"
    for name in change.unhold:
        if name in held:
            yield f"{name} is held"


def _dnf_streams(change: Transaction, dnf: DnfState) -> Iterator[str]:
    if change.stream is not None:
        name, _, stream = change.stream.partition(":")
        if dnf.streams.get(name) != stream:
            yield f"the module stream {change.stream} is not enabled"
    if change.reset is not None and change.reset in dnf.streams:
        yield f"the module {change.reset} has a stream enabled"


def _dnf_locks(change: Transaction, dnf: DnfState) -> Iterator[str]:
    # Each role has a section of its own in the list.
    requested = lock_lines(dnf.installed, change.hold) if change.state == "present" else ()
    loose = sorted(set(requested) - {*dnf.own_locks, *dnf.locks})
    if loose:
        yield f"not locked: {', '.join(loose[:5])}"
    yield from (f"the lock {line} prevents the change" for line in change.drop_locks if line in dnf.locks)


def _missing(requested: tuple[str, ...], installed: dict[str, str]) -> Iterator[str]:
    for entry in requested:
        name, _, pattern = entry.partition("=")
        if name not in installed:
            yield f"{name} is not installed"
        elif pattern and not fnmatchcase(installed[name], pattern):
            yield f"{name} is installed at {installed[name]}, not {pattern}"


def unit_reasons(unit: UnitState, state: NodeState) -> Iterator[str]:
    """Yield how a unit differs; one that needs a restart differs."""
    if unit.state in ("restarted", "reloaded"):
        yield f"{unit.name} has to be {unit.state}{f': {unit.reason}' if unit.reason else ''}"
    actual = state.unit(unit.name)
    if actual is None:
        # A unit that is not installed is neither enabled nor running.
        if state.facts.units is None or unit.enabled or unit.state == "started":
            yield f"{unit.name} is not known"
        return
    on = actual.enabled in ("enabled", "enabled-runtime", "static", "indirect", "generated", "alias")
    if unit.enabled is True and not on:
        yield f"{unit.name} is not enabled"
    if unit.enabled is False and actual.enabled == "enabled":
        yield f"{unit.name} is enabled"
    runs = actual.active in ("active", "activating", "reloading")
    if unit.state == "started" and not runs:
        yield f"{unit.name} does not run"
    if unit.state == "stopped" and runs:
        yield f"{unit.name} runs"
