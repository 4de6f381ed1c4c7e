"""What may stand in a lock. Ansible runs templates in its variable files, and parts of a stack are a node's answers."""

import re
from collections.abc import Iterator
from typing import Any

from gpunode.errors import UsageError

FREE_TEXT = "text"
"""Reasons and warnings quote what was seen; they are for people alone."""
NODE_WORDS = frozenset({"kernel", "remove", "driver.version"})
"""Fields that hold a node's words, unlike those that the catalogue or the command line decides."""
_NODE_WORD = re.compile(r"[\w.+~:^-]{0,255}", re.ASCII)
_CATALOG_WORD = re.compile(r"[\w.+~:^*/, ()\[\]-]{0,255}", re.ASCII)
_SHOWN = 60


def refuse_templates(document: dict[str, Any], name: str) -> None:
    """Raise UsageError for the first string of a stack that is no plain word, and for a brace anywhere.

    The parsers refuse these too; a lock is written through this gate whatever they let through.
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
