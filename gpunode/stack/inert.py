"""Text that is allowed in a lock. Ansible evaluates templates in variable files, and a stack contains answers of
nodes."""

import re
from collections.abc import Iterator
from typing import Any

from gpunode.errors import UsageError

FREE_TEXT = "text"
"""Reasons and warnings quote facts of the node; only people read them."""
NODE_WORDS = frozenset({"kernel", "remove", "driver.version"})
"""Fields with text from a node; the others come from the catalog or the command line."""
_NODE_WORD = re.compile(r"[\w.+~:^-]{0,255}", re.ASCII)
_CATALOG_WORD = re.compile(r"[\w.+~:^*/, ()\[\]-]{0,255}", re.ASCII)
_SHOWN = 60


def refuse_templates(document: dict[str, Any], name: str) -> None:
    """Raise UsageError for the first string of a stack with characters that are not allowed, and for a brace anywhere.

    The parsers refuse these too; this check does not rely on them.
    """
    for path, text in _strings(document):
        field = ".".join(part for part in path if not part.isdigit())
        if path[-1] == FREE_TEXT:
            harmless = "{" not in text and "}" not in text
        else:
            harmless = (_NODE_WORD if field in NODE_WORDS else _CATALOG_WORD).fullmatch(text) is not None
        if not harmless:
            shown = "".join(char if char.isprintable() else "?" for char in text[:_SHOWN])
            raise UsageError(
                f"{name}: {'.'.join(path)} is '{shown}', which is not allowed in a lock, because Ansible would "
                "evaluate it as a template; check the node that reports it"
            )


def _strings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (*path, "key"), key
            yield from _strings(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _strings(item, (*path, str(number)))
