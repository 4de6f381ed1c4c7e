"""Archives of packages that are in a node's sources already, or that must leave them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

OLD_TOOLKIT = re.compile(
    r"nvidia\.github\.io/(nvidia-docker|nvidia-container-runtime)\b"
    r"|nvidia\.github\.io/libnvidia-container/(?!stable/(deb|rpm)\b)"
)
"""Repositories of nvidia-docker2 and its predecessors; their packages are in the toolkit's one repository now."""


def archive_file(sources: Iterable[Mapping[str, Any]], uri: str, own_file: str) -> str | None:
    """Return the file in which a user already has the archive ``uri``; None where only ``own_file`` has it, or nobody.

    apt refuses to work where one archive has two keys, so a second entry must not be written.
    """
    wanted = _plain_uri(uri)
    for entry in sources or ():
        if entry["file"] != own_file and "deb" in entry["types"] and wanted in map(_plain_uri, entry["uris"]):
            return str(entry["file"])
    return None


def old_toolkit_files(sources: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the files of sources that name nothing but the repositories of nvidia-docker2; they clash with ours."""
    uris: dict[str, list[str]] = {}
    for entry in sources or ():
        uris.setdefault(entry["file"], []).extend(entry["uris"])
    return sorted(file for file, all_of in uris.items() if all_of and all(map(OLD_TOOLKIT.search, all_of)))


def _plain_uri(uri: str) -> str:
    return re.sub(r"/(\$\(ARCH\)|amd64|arm64)?/*$", "", str(uri))
