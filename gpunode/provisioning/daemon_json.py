"""/etc/docker/daemon.json, which users and several roles write: merged and restored key by key."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, ValidationError

from gpunode.frozen import Frozen, invalid_field

Document = dict[str, JsonValue]
"""A JSON object."""

RELOADED = {
    "authorization-plugins",
    "debug",
    "default-runtime",
    "default-shm-size",
    "insecure-registries",
    "labels",
    "live-restore",
    "max-concurrent-downloads",
    "max-concurrent-uploads",
    "max-download-attempts",
    "registry-mirrors",
    "runtimes",
    "shutdown-timeout",
}
"""Keys that dockerd applies on SIGHUP; everything else needs a restart.

``features`` is not one of them: the CDI driver is set up when the daemon starts. A removed key is not noticed either.
"""
_MISSING: Any = object()


class OwnValue(Frozen):
    """A value of a role in the file, and the previous one, which is not set if there was none."""

    path: tuple[str, ...]
    value: JsonValue
    before: JsonValue = None

    @property
    def previous(self) -> Any:
        """Return the previous value."""
        return self.before if "before" in self.model_fields_set else _MISSING


class DaemonMemory(Frozen):
    """What a role keeps on the node from one merge to the next."""

    created: bool = False
    keys: tuple[OwnValue, ...] = ()

    @property
    def text(self) -> str:
        """Return the file on the node."""
        return json.dumps(self.model_dump(exclude_unset=True), indent=4, ensure_ascii=False, sort_keys=True) + "\n"


@dataclass(frozen=True, slots=True)
class MergedDaemon:
    """daemon.json after a merge."""

    text: str | None = None
    """None: the file must not exist."""
    changed: bool = False
    keys: tuple[str, ...] = ()
    """Changed keys, dotted."""
    restart: tuple[str, ...] = ()
    """Those among ``keys`` that a reload does not apply."""
    memory: DaemonMemory | None = None
    """To be kept for the next merge; None: nothing to keep."""
    problem: str | None = None


def merge_daemon(
    text: str | None,
    values: Document,
    memory: DaemonMemory | None = None,
    others: DaemonMemory | None = None,
) -> MergedDaemon:
    """Return daemon.json with ``values`` merged key by key; keys that were not requested stay unchanged.

    ``memory`` is from an earlier merge: our values and the previous ones. A value that is no longer requested is
    replaced by the previous one, unless it was changed since. Values in the memory of ``others`` belong to them and
    are not changed. Options in ``exec-opts`` are merged by their names.
    """
    try:
        before = _with_options(read_document(text))
    except ValueError as err:
        return MergedDaemon(problem=str(err))
    after = copy.deepcopy(before)
    record = {entry.path: entry for entry in memory.keys} if memory else {}
    foreign = {entry.path for entry in others.keys} if others else set()
    requested = {path: value for path, value in _leaves(_with_options(values)) if path not in foreign}
    for path in [path for path in record if path not in requested]:
        entry = record.pop(path)
        if path not in foreign and _get(after, path) == entry.value:
            _put(after, path, entry.previous)
    for path, value in requested.items():
        present = _get(after, path)
        if present == value:
            continue
        stood = record[path].previous if path in record else present
        before_it = {} if stood is _MISSING else {"before": stood}
        try:
            _put(after, path, value)
        except TypeError:
            return MergedDaemon(
                problem=f"{'.'.join(path[:-1])} is not an object, so {'.'.join(path)} cannot be set in it"
            )
        record[path] = OwnValue(path=path, value=value, **before_it)
    for path in [path for path in record if _get(after, path) != record[path].value]:
        del record[path]
    # The last owner that leaves removes a file that the first one created.
    created = memory.created if memory else text is None or bool(others and others.created)
    gone = not after and created
    keys = tuple(".".join(path) for path in _differing(before, after))
    return MergedDaemon(
        text=None if gone or (text is None and not after) else _written(after) if keys else text,
        changed=bool(keys) or (gone and text is not None),
        keys=keys,
        restart=tuple(key for key in keys if (top := key.partition(".")[0]) not in RELOADED or top not in after),
        memory=DaemonMemory(created=created, keys=tuple(record[path] for path in sorted(record))) if record else None,
    )


def read_memory(text: str | None) -> DaemonMemory | None:
    """Parse the memory of a merge; None without one. Raises ValueError with the reason."""
    try:
        return DaemonMemory.model_validate(read_document(text)) if text and text.strip() else None
    except ValidationError as err:
        raise ValueError(": ".join(invalid_field(err))) from None


def read_document(text: str | None) -> Document:
    """Parse a JSON object; empty text is an empty object. Raises ValueError with the reason."""
    try:
        document = json.loads(text) if text and text.strip() else {}
    except json.JSONDecodeError as err:
        raise ValueError(f"it is not JSON: {err.msg} in line {err.lineno}") from None
    except RecursionError:
        raise ValueError("it is not valid JSON: nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it does not contain an object")  # noqa: TRY004 (one kind for all that is wrong with a text)
    return document


def _written(document: Document) -> str:
    return json.dumps(_without_options(document), indent=4, ensure_ascii=False) + "\n"


def _with_options(document: Document) -> Document:
    """Return the document with ``exec-opts`` as an object, so that each option can have its own owner."""
    options = document.get("exec-opts")
    texts = [option for option in options if isinstance(option, str)] if isinstance(options, list) else []
    if texts != options:
        return document
    pairs = (option.partition("=") for option in texts)
    return {**document, "exec-opts": {key: value if equals else None for key, equals, value in pairs}}


def _without_options(document: Document) -> Document:
    options = document.get("exec-opts")
    if not isinstance(options, dict):
        return document
    return {**document, "exec-opts": [key if value is None else f"{key}={value}" for key, value in options.items()]}


def merged(below: Document, above: Mapping[str, JsonValue]) -> Document:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def _leaves(node: Mapping[str, JsonValue], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    """Yield paths and values; an empty object is a value, None requests nothing."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(key)))
        elif value is not None:
            yield (*path, str(key)), value


def _get(node: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(node, dict) or key not in node:
            return _MISSING
        node = node[key]
    return node


def _put(node: Document, path: tuple[str, ...], value: Any) -> None:
    """Set a value, or remove it and the objects that become empty; TypeError if a value is in the way."""
    if len(path) > 1:
        below = node.setdefault(path[0], {})
        if not isinstance(below, dict):
            raise TypeError(path[0])
        _put(below, path[1:], value)
        if value is _MISSING and not below:
            del node[path[0]]
    elif value is _MISSING:
        node.pop(path[0], None)
    else:
        node[path[0]] = value


def _differing(before: Document, after: Document) -> list[tuple[str, ...]]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return sorted(path for path in {**old, **new} if old.get(path, _MISSING) != new.get(path, _MISSING))
