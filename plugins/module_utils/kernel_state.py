"""Compare, set and restore values of the running kernel below /proc/sys and /sys."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

TREES = ("/proc/sys/", "/sys/kernel/mm/")
CHOSEN = re.compile(r"\[([^\]\s]+)\]")
LARGEST = 4096


class KernelChangeRefusedError(Exception):
    """The reason why nothing was changed, in one line."""


def inside(path: str) -> bool:
    """Return whether a path is that of a kernel setting."""
    return os.path.normpath(path) == path and path.startswith(TREES)


def value_of(path: str, root: str = "") -> str | None:
    """Return a setting's value, with several numbers separated by one blank; None if the kernel does not have it.

    The value of ``always [madvise] never`` is the word in brackets.
    """
    try:
        with Path(root + path).open(encoding="utf-8", errors="replace") as file:
            text = file.read(LARGEST)
    except OSError:
        return None
    chosen = CHOSEN.search(text)
    return chosen[1] if chosen else " ".join(text.split())


def put(path: str, value: str, root: str = "") -> str | None:
    """Set a value; return why the kernel refused it, None on success."""
    try:
        with Path(root + path).open("w", encoding="utf-8") as file:
            file.write(value + "\n")
    except OSError as err:
        return f"{path}: the kernel refuses {value}: {err.strerror}"
    now = value_of(path, root)
    return None if now == value else f"{path} is {now} after {value} was set"


def remembered(memory: str, root: str = "") -> dict[str, str]:
    """Return the recorded values from before the first change. Raise KernelChangeRefusedError for a malformed file."""
    try:
        text = Path(root + memory).read_text(encoding="utf-8")
    except OSError:
        return {}
    try:
        document: Any = json.loads(text)
    except ValueError as err:
        raise KernelChangeRefusedError(f"{memory} is not valid JSON: {err}") from None
    if not isinstance(document, dict) or not all(inside(str(path)) for path in document):
        raise KernelChangeRefusedError(f"{memory} contains no kernel settings")
    return {str(path): str(value) for path, value in document.items()}


def remember(memory: str, values: dict[str, str], root: str = "") -> None:
    """Record the values from before the first change, by one rename."""
    path = Path(root + memory)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    draft.replace(path)


def applied(
    wanted: dict[str, str], memory: str, *, check: bool, root: str = ""
) -> tuple[list[dict[str, str]], list[str]]:
    """Set values; return (diffs, refusals of the kernel). The old values are recorded first, once.

    A recorded setting that is no longer requested is restored to its old value.
    """
    for path in wanted:
        if not inside(path):
            raise KernelChangeRefusedError(
                f"{path} is not a kernel setting: expected a path below {' or '.join(TREES)}"
            )
    before = remembered(memory, root)
    goals = {**{path: value for path, value in before.items() if path not in wanted}, **wanted}
    now = {path: value_of(path, root) for path in goals}
    pending = {path: value for path, value in goals.items() if now[path] is not None and now[path] != value}
    kept = {path: value for path, value in before.items() if path in wanted}
    kept |= {path: str(now[path]) for path in wanted if path in pending and path not in before}
    if not check and kept.keys() - before.keys():
        remember(memory, {**before, **kept}, root)
    problems = [f"{path}: the kernel has no such setting" for path in wanted if now[path] is None]
    diffs = []
    for path, value in pending.items():
        refused = None if check else put(path, value, root)
        if refused is not None:
            problems.append(refused)
        else:
            diffs.append({"path": path, "before": str(now[path]), "after": value})
    if not check and before and not wanted:
        Path(root + memory).unlink()
    elif not check and kept.keys() != before.keys() and wanted:
        remember(memory, kept, root)
    return diffs, problems
