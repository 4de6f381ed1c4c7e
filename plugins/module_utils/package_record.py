# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""The record of the packages that a role's transactions installed: a removal removes those and no others.

The file has one name per line below ``MARK``. Records of earlier releases list, without that line, the packages that
were there before the role's first transaction. What is in neither list may have been installed by others since then:
of those packages, only those that did not change since the record was written count as the role's.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ansible_collections.gpunode.node.plugins.module_utils import file_access

MARK = "# installed by gpunode"
FIRST_TRANSACTION_S = 3600
"""Longest time from the writing of an old record to the end of the transaction that it precedes."""


def lists(text: str) -> tuple[list[str] | None, list[str]]:
    """Return the packages that were there before the role, None if that is not recorded, and those of the role."""
    before, mark, added = text.partition(MARK)
    return before.split() if before.strip() or not mark else None, added.split()


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the shell patterns matches the name of a package."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def owned(path: str | None, names: Iterable[str], changed_at: Callable[[str], float | None]) -> set[str]:
    """Return the packages among ``names`` that the role's transactions installed; none without a record.

    ``changed_at`` returns when a package was installed or changed last; None: unknown.
    """
    if not path or not Path(path).is_file():
        return set()
    before, added = lists(file_access.text(path))
    if before is None:
        return {*names} & {*added}
    end = Path(path).stat().st_mtime + FIRST_TRANSACTION_S
    times = {name: changed_at(name) for name in {*names} - {*before} - {*added}}
    return ({*names} & {*added}) | {name for name, time in times.items() if time is None or time < end}


def note(path: str | None, names: Iterable[str]) -> None:
    """Write packages that a transaction is about to install into the record."""
    if path:
        record = file_access.text(path) if Path(path).is_file() else ""
        _write(path, record, {*lists(record)[1], *names})


def settle(path: str | None, installed: Iterable[str]) -> None:
    """Remove packages from the record that are not installed: a transaction failed, or somebody removed them."""
    if path and Path(path).is_file():
        record = file_access.text(path)
        if MARK in record:
            _write(path, record, {*lists(record)[1]} & {*installed})


def _write(path: str, record: str, added: set[str]) -> None:
    head = record.partition(MARK)[0]
    text = f"{head}{MARK}\n" + "".join(f"{name}\n" for name in sorted(added))
    if text == record:
        return
    # Of an old record, the time at which it was written counts.
    times = (Path(path).stat().st_atime, Path(path).stat().st_mtime) if head else None
    file_access.write(path, text.encode(), 0o644, file_access.own_ids())
    if times is not None:
        os.utime(path, times)
