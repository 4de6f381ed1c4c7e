"""Missing components in a node's apt sources, as deb822 stanzas."""

from collections.abc import Iterable, Mapping
from typing import Any

# Suites of one release by their names in sources, after the codename.
SUITES = ("", "-updates", "-security", "/updates")
# Options about which files are fetched, not whether they are trusted; the node's own values are kept.
NOT_COPIED = {"types", "uris", "suites", "components", "enabled", "description"}


def missing_components(
    sources: Iterable[Mapping[str, Any]], codename: str, components: Iterable[str], own_file: str
) -> list[dict[str, Any]]:
    """Return stanzas that add ``components`` to the distribution's own archives, as far as no other file has them.

    ``sources`` is what ``apt_state.py`` reports: per entry ``{file, types, uris, suites, components, options,
    origins}``; entries of ``own_file`` are ignored. Debian's own archive is identified by its Release file (origin
    Debian), by its keyring if nothing was fetched yet, and by its component ``main``. Returned is
    ``[{uris, suites, components, options}]``, one stanza per archive, in the order of the sources.
    """
    entries = [entry for entry in sources if entry["file"] != own_file and "deb" in entry["types"]]
    requested = list(components)
    release = {codename + suffix for suffix in SUITES}
    present: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        for pair in _archives(entry):
            present.setdefault(pair, set()).update(entry["components"])
    stanzas: dict[tuple[Any, ...], dict[str, Any]] = {}
    done: set[tuple[str, str]] = set()
    for entry in entries:
        if "main" not in entry["components"]:
            continue
        options = {key: value for key, value in entry["options"].items() if key.lower() not in NOT_COPIED}
        for uri, suite in _archives(entry):
            lacking = tuple(name for name in requested if name not in present[uri, suite])
            if (uri, suite) in done or not lacking or not _is_debians(entry, suite, release):
                continue
            done.add((uri, suite))
            key = (uri, lacking, tuple(sorted(options.items())))
            stanza = {"uris": [uri], "suites": [], "components": list(lacking), "options": options}
            stanzas.setdefault(key, stanza)["suites"].append(suite)
    return list(stanzas.values())


def _archives(entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(uri, suite) for uri in entry["uris"] for suite in entry["suites"]]


def _is_debians(entry: Mapping[str, Any], suite: str, release: set[str]) -> bool:
    """Return True for an archive of the running Debian release; its Release file takes precedence over its keyring."""
    seen = entry["origins"].get(suite)
    if seen is not None:
        return bool(seen["origin"] == "Debian" and seen["codename"] in release)
    keyring = next((value for key, value in entry["options"].items() if key.lower() == "signed-by"), "")
    return suite in release and (not keyring or "debian-archive" in keyring or "BEGIN PGP" in keyring)
