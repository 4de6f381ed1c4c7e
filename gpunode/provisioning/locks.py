"""Lines of dnf's versionlock that keep installed packages at their versions."""

from collections.abc import Iterable, Mapping

from gpunode.provisioning.state import DnfState
from gpunode.text import matches_any

PLUGIN = "python3-dnf-plugin-versionlock"


def lock_lines(installed: Mapping[str, str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each installed package that matches one of the shell patterns, for any architecture."""
    selected = tuple(patterns)
    return tuple(
        f"{name}-{version if ':' in version else '0:' + version}.*"
        for name, version in sorted(installed.items())
        if matches_any(name, selected)
    )


def plugin(dnf: DnfState | None) -> tuple[str, ...]:
    """Return the package of the plugin that applies the lines, if the node lacks it."""
    return (PLUGIN,) if dnf is not None and not dnf.versionlock else ()
