"""Selection of checks: ``--select`` and ``--skip``."""

from collections.abc import Iterable

from gpunode.checks import registry
from gpunode.errors import UsageError
from gpunode.text import unknown


def selected_checks(selected: Iterable[str], skipped: Iterable[str]) -> set[str]:
    """Return the ids after ``--select`` and ``--skip``; raise UsageError for an unknown one, and if none is left."""
    if not all(_ids([value]) for value in selected):
        # An empty variable of a script must not select all of them.
        raise UsageError("--select: no check given; see gpunode checks")
    names = {"--select": _ids(selected), "--skip": _ids(skipped)}
    known = [check.id for check in registry]
    for option, ids in names.items():
        for name in ids:
            if name not in registry:
                raise UsageError(f"{option}: {unknown('check', name, known)}")
    chosen = set(names["--select"] or known) - set(names["--skip"])
    if not chosen:
        raise UsageError("--skip excludes all selected checks")
    return chosen


def _ids(values: Iterable[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]
