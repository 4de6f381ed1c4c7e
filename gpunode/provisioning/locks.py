"""Lines of dnf's versionlock that keep installed packages at their versions."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase


def lock_lines(installed: Mapping[str, str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each installed package that fits one of the shell patterns, of any architecture."""
    wanted = tuple(patterns)
    return tuple(
        f"{name}-{version if ':' in version else '0:' + version}.*"
        for name, version in sorted(installed.items())
        if any(fnmatchcase(name, pattern) for pattern in wanted)
    )
