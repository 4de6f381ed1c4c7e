"""Values of options that request a stack, as people write them: each refusal names the option and what is known."""

import re

from gpunode.catalog import Catalog
from gpunode.errors import UsageError
from gpunode.stack.question import LATEST, WORDS, framework_named, is_range, number, specifiers
from gpunode.text import is_whole, nearest, unknown

MOST_NAMES = 12
"""Maximum number of known names in an error message."""


def driver_request(requested: str | None, catalog: Catalog, option: str = "--driver") -> str | None:
    """Return the request of an option for a driver. Raises UsageError for an unknown one."""
    if requested is None or requested in WORDS:
        return requested
    if is_range(requested):
        return _range(requested, catalog, option)
    text, latest = requested.lower().removeprefix("r"), ""
    if text.endswith(LATEST) and "." not in text:
        text, latest = text.removesuffix(LATEST), LATEST
    if text.split(".")[0] not in catalog.branches or not all(is_whole(part) for part in text.split(".")):
        known = [*WORDS, *catalog.branches, *(point for row in catalog.branches.values() for point in row.points)]
        if nearest(requested, known):
            raise UsageError(f"{option}: {unknown('driver', requested, known)}")
        raise UsageError(f"{option}: unknown driver {requested!r}; known: {', '.join(known[:MOST_NAMES])} …")
    return text + latest


def _range(requested: str, catalog: Catalog, option: str) -> str:
    try:
        allowed = specifiers(requested)
    except UsageError as err:
        raise UsageError(f"{option}: {err}") from None
    points = [point for row in catalog.branches.values() for point in row.points]
    if not any(allowed.contains(point, prereleases=True) for point in points):
        raise UsageError(f"{option} {requested}: no known release matches; the newest is {max(points, key=number)}")
    return requested.replace(" ", "")


def framework_request(text: str | None, catalog: Catalog) -> str | None:
    """Return the request of ``--framework``, with the catalog's names. Raises UsageError."""
    if text is None:
        return None
    try:
        row = framework_named(text, catalog)
    except UsageError as err:
        raise UsageError(f"--{err}") from None
    return f"{row.name}=={row.version}"


def cuda_request(option: str, text: str | None, catalog: Catalog) -> str | None:
    """Return the request of an option for a series of CUDA. Raises UsageError for another text, or an unknown one."""
    if text is not None:
        if text.isdigit():
            raise UsageError(f"{option} {text}: expected X.Y (example: {_newest_series(text, catalog)})")
        try:
            catalog.toolkit(text)
        except UsageError as err:
            raise UsageError(f"{option}: {err}") from None
    return text


def _newest_series(major: str, catalog: Catalog) -> str:
    """Return the newest CUDA of a major; the newest of all if the major is unknown."""
    series = [row.series for row in catalog.toolkits.values()]
    return next((name for name in series if name.startswith(f"{major}.")), series[0])


def kernel_release(release: str | None) -> str | None:
    """Return the release of ``--kernel``. Raises UsageError for another text."""
    if release is not None and not re.match(r"\d+\.\d+", release):
        raise UsageError(f"--kernel {release!r}: expected a release as printed by uname -r (example: 6.8.0-60-generic)")
    return release
