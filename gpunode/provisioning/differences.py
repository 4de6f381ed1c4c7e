"""Comparison of a manifest with a node's state: whether changes are pending. Unknown state counts as a difference."""

import hashlib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from gpunode.provisioning.locks import lock_lines
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.state import AptState, DnfState, NodeState
from gpunode.provisioning.transaction import Transaction
from gpunode.text import matches_any


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
