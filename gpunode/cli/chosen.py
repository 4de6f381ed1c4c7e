"""Which checks are run: ``--select`` and ``--skip``."""

from collections.abc import Iterable

from gpunode.checks import registry
from gpunode.errors import UsageError
from gpunode.text import unknown


def wanted_checks(selected: Iterable[str], skipped: Iterable[str]) -> set[str]:
    """Ids after ``--select`` and ``--skip``; raises UsageError for one that is none, and where none is left."""
    if not all(_ids([value]) for value in selected):
        # An empty variable of a script must not stand for all of them.
        raise UsageError("--select: no check given; see gpunode checks")
    names = {"--select": _ids(selected), "--skip": _ids(skipped)}
    known = [check.id for check in registry]
    for option, ids in names.items():
        for name in ids:
            if name not in registry:
                raise UsageError(f"{option}: {unknown('check', name, known)}")
    wanted = set(names["--select"] or known) - set(names["--skip"])
    if not wanted:
        raise UsageError("--skip excludes all selected checks")
    return wanted


def _ids(values: Iterable[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]
