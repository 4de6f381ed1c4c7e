"""Files of a site that the role gpu_tools deploys: their target state, and which of them were there before."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpunode.frozen import Frozen
from gpunode.provisioning.manifest import ManagedFile
from gpunode.provisioning.role import option
from gpunode.provisioning.state import NodeState

RECORD = "/var/lib/gpunode/gpu_tools/site-files.json"
"""Paths that the role wrote, each with whether a file was there before; and which of them are private."""


class SiteFile(Frozen):
    """One file of the site."""

    path: str = option(..., "Absolute path.")
    content: str = option(..., "Text of the file.", no_log=False)
    mode: str = option("0644", "Mode in octal digits.")
    owner: str = option("root", "Name of the owner.")
    group: str = option("root", "Name of the group.")
    private: bool = option(False, "Leave the text out of diffs and logs.")


@dataclass(frozen=True)
class SiteFiles:
    """The files that a manifest needs for those of the site."""

    files: tuple[ManagedFile, ...]
    notes: tuple[str, ...]


def bad_files(files: tuple[SiteFile, ...]) -> Iterator[str]:
    """Yield what is wrong in the list of files."""
    seen = set[str]()
    for file in files:
        path = file.path
        if (
            path != posixpath.normpath(path)
            or not path.startswith("/")
            or path in ("/", "//")
            or not path.isprintable()
        ):
            yield f"gpunode_extra_files: {path!r} is not the absolute path of a file (example: /etc/motd)"
        elif path in seen:
            yield f"gpunode_extra_files: {path} is listed twice"
        elif not (file.mode.isdigit() and set(file.mode) <= set("01234567") and 3 <= len(file.mode) <= 4):
            yield f"gpunode_extra_files: {path}: {file.mode} is not a valid mode (example: '0644')"
        seen.add(path)


def site_files(state: NodeState, requested: tuple[SiteFile, ...]) -> SiteFiles:
    """Return the files, and the removal of those that the role wrote in an earlier run and that are not listed now."""
    known = recorded(state)
    now = {file.path: known.get(file.path, state.exists(file.path)) for file in requested}
    left = {path: existed for path, existed in known.items() if path not in now}
    # A text that was private is left out of the diff with which it becomes public.
    secret = _secret(state)
    public = {file.path for file in requested if file.path in secret and not file.private}
    files = [
        ManagedFile(
            path=file.path,
            content=file.content,
            mode=file.mode.zfill(4),
            owner=file.owner,
            group=file.group,
            phase="after",
            # The text from before the role is kept beside it.
            backup=file.path not in known and now[file.path],
            private=file.private or file.path in public,
        )
        for file in requested
    ]
    private = {file.path for file in requested if file.private}
    # What is written is recorded before, and what is removed is recorded until then.
    if (left or public) and (now.keys() - known.keys() or private - secret):
        files.append(ManagedFile(path=RECORD, content=_text(known | now, secret | private)))
    text = _text(now, private) if now else None
    record = ManagedFile(path=RECORD, content=text, phase="last" if left or public else "before")
    gone, notes = removed(left)
    return SiteFiles((*files, *gone, record), notes)


def removed(known: Mapping[str, bool]) -> tuple[tuple[ManagedFile, ...], tuple[str, ...]]:
    """Return the removal of files that the role made, and notes on those that were there before it."""
    notes = (
        f"gpunode_extra_files: {path} stays: it was there before the role, with the text of {path}.TIME~"
        for path, existed in known.items()
        if existed
    )
    paths = (path for path, existed in known.items() if not existed)
    # Whether their text was private is not recorded.
    gone = tuple(ManagedFile(path=path, content=None, phase="after", private=True) for path in paths)
    return gone, tuple(notes)


def recorded(state: NodeState) -> dict[str, bool]:
    """Return the paths that the role wrote, each with whether a file was there before."""
    try:
        document = json.loads(state.contents.get(RECORD) or "{}")
        return {str(path): bool(existed) for path, existed in document.items() if str(path).startswith("/")}
    except (ValueError, AttributeError):
        return {}


def _secret(state: NodeState) -> set[str]:
    """Return the paths of which the role wrote a private text."""
    try:
        return set(map(str, json.loads(state.contents.get(RECORD) or "{}").get("private", ())))
    except (ValueError, AttributeError, TypeError):
        return set()


def _text(files: Mapping[str, bool], private: set[str]) -> str:
    more = {"private": sorted(private)} if private else {}
    return json.dumps({**files, **more}, indent=1, sort_keys=True) + "\n"
