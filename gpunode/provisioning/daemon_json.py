"""/etc/docker/daemon.json, which users and several roles write: merged and restored key by key."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
LIMITED_LOG_DRIVERS = ("json-file", "local")
SHM_SIZE = "default-shm-size"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtp]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """The requested content of daemon.json by the role's settings."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was omitted, and why."""
    problem: str | None = None


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
    memory: dict[str, Any] | None = None
    """To be kept for the next merge; None: nothing to keep."""
    problem: str | None = None


def daemon_request(
    settings: Mapping[str, Any],
    text: str | None,
    swarm: bool = False,
    *,
    memory: Mapping[str, Any] | None = None,
    command: str = "",
) -> DaemonRequest:
    """Return the requested content of daemon.json.

    ``settings``: ``live_restore``, ``log_max_size``, ``log_max_files``, ``shm_size``, ``storage_driver``,
    ``no_new_privileges``, ``userns_remap``, ``daemon`` (further keys, which take precedence). ``text`` is the current
    file, ``memory`` is from an earlier merge, ``command`` is dockerd's command line: dockerd does not start if an
    option is set there and in the file.
    """
    daemon: dict[str, Any] = dict(settings.get("daemon") or {})
    problem = _request_problem(settings, daemon, command)
    if problem is not None:
        return DaemonRequest(problem=problem)
    remap = str(settings.get("userns_remap") or "")
    notes: list[str] = []
    values: dict[str, Any] = {}
    if settings.get("live_restore"):
        if swarm:
            notes.append("live-restore is not set: this node is in a swarm, and dockerd does not start with both")
        else:
            values["live-restore"] = True
    try:
        present = read_document(text)
    except ValueError:
        present = {}
    driver = daemon.get("log-driver", present.get("log-driver", "json-file"))
    limits = {"max-size": settings.get("log_max_size"), "max-file": settings.get("log_max_files")}
    limits = {key: str(value) for key, value in limits.items() if value}
    if limits and driver in LIMITED_LOG_DRIVERS:
        values["log-opts"] = limits
    elif limits:
        notes.append(f"log limits are not set: the log driver {driver} has its own limits")
    size = str(settings.get("shm_size") or "")
    if size and _less(present.get(SHM_SIZE), size, memory):
        values[SHM_SIZE] = size
    if settings.get("storage_driver"):
        values["storage-driver"] = settings["storage_driver"]
    if settings.get("no_new_privileges"):
        values["no-new-privileges"] = True
    if remap:
        values["userns-remap"] = remap
    for key in [key for key in values if _is_option(key, command)]:
        del values[key]
        notes.append(f"{key} is not set: dockerd's command line sets it, and dockerd does not start with both")
    return DaemonRequest(_merged(values, daemon), tuple(notes))


def _request_problem(settings: Mapping[str, Any], daemon: Mapping[str, Any], command: str) -> str | None:
    if "hosts" in daemon:
        return (
            "docker_daemon must not set hosts: systemd owns the socket, and access to a TCP socket is root access to "
            "the node; use /run/docker.sock over SSH instead"
        )
    twice = next((key for key in daemon if _is_option(key, command)), None)
    if twice is not None:
        return (
            f"docker_daemon must not set {twice}: dockerd's command line sets it, and dockerd does not start with "
            "both; remove the option from docker.service or /etc/default/docker"
        )
    remap, size = str(settings.get("userns_remap") or ""), str(settings.get("shm_size") or "")
    if remap and not _USER.fullmatch(remap):
        return f"docker_userns_remap: {remap} is neither default nor USER[:GROUP]"
    if size and _bytes(size) is None:
        return f"docker_shm_size: {size} is not a size (examples: 1g, 512m)"
    return None


def _is_option(key: str, command: str) -> bool:
    """Return whether dockerd's command line sets this key; options of lists are singular."""
    return any(re.search(rf"(?<![\w-])--{re.escape(name)}(?![\w-])", command) for name in {key, key.removesuffix("s")})


def _less(present: Any, size: str, memory: Mapping[str, Any] | None) -> bool:
    """Return whether the default size of /dev/shm is this role's, or less than requested; others may have more."""
    own = {"path": [SHM_SIZE], "value": present}
    if any(own.items() <= entry.items() for entry in (memory or {}).get("keys", ())):
        return True
    return (_bytes(present) or 0) < (_bytes(size) or 0)


def _bytes(size: Any) -> float | None:
    """Return a size as dockerd reads it, in bytes; None if it is not a size."""
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    return float(found[1]) * 1024.0 ** " kmgtp".index(found[2].lower() or " ") if found else None


def merge_daemon(
    text: str | None,
    values: Mapping[str, Any] | None,
    memory: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
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
    ours = {tuple(entry["path"]): dict(entry) for entry in (memory or {}).get("keys", ())}
    theirs = {tuple(entry["path"]) for entry in (others or {}).get("keys", ())}
    requested = {path: value for path, value in _leaves(_with_options(dict(values or {}))) if path not in theirs}
    for path in [path for path in ours if path not in requested]:
        entry = ours.pop(path)
        if path not in theirs and _get(after, path) == entry["value"]:
            _put(after, path, entry.get("before", _MISSING))
    for path, value in requested.items():
        present = _get(after, path)
        if present == value:
            continue
        entry = {"path": list(path), "value": value}
        stood = ours[path].get("before", _MISSING) if path in ours else present
        if stood is not _MISSING:
            entry["before"] = stood
        try:
            _put(after, path, value)
        except TypeError:
            return MergedDaemon(
                problem=f"{'.'.join(path[:-1])} is not an object, so {'.'.join(path)} cannot be set in it"
            )
        ours[path] = entry
    for path in [path for path in ours if _get(after, path) != ours[path]["value"]]:
        del ours[path]
    # The last owner that leaves removes a file that the first one created.
    created = bool((memory or {}).get("created", text is None or (others or {}).get("created")))
    gone = not after and created
    keys = tuple(".".join(path) for path in _differing(before, after))
    return MergedDaemon(
        text=None if gone or (text is None and not after) else _written(after) if keys else text,
        changed=bool(keys) or (gone and text is not None),
        keys=keys,
        restart=tuple(key for key in keys if (top := key.partition(".")[0]) not in RELOADED or top not in after),
        memory={"created": created, "keys": [ours[path] for path in sorted(ours)]} if ours else None,
    )


def read_document(text: str | None) -> dict[str, Any]:
    """Parse a JSON object; empty text is an empty object. Raises ValueError with the reason."""
    try:
        found = json.loads(text) if text and text.strip() else {}
    except json.JSONDecodeError as err:
        raise ValueError(f"it is not JSON: {err.msg} in line {err.lineno}") from None
    except RecursionError:
        raise ValueError("it is not valid JSON: nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it does not contain an object")  # noqa: TRY004 (one kind for all that is wrong with a text)
    return found


def _written(document: dict[str, Any]) -> str:
    return json.dumps(_without_options(document), indent=4, ensure_ascii=False) + "\n"


def _with_options(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with ``exec-opts`` as an object, so that each option can have its own owner."""
    options = document.get("exec-opts")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return document
    pairs = (option.partition("=") for option in options)
    return {**document, "exec-opts": {key: value if equals else None for key, equals, value in pairs}}


def _without_options(document: dict[str, Any]) -> dict[str, Any]:
    options = document.get("exec-opts")
    if not isinstance(options, dict):
        return document
    return {**document, "exec-opts": [key if value is None else f"{key}={value}" for key, value in options.items()]}


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def _leaves(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
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


def _put(node: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
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


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, ...]]:
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return sorted(path for path in {**old, **new} if old.get(path, _MISSING) != new.get(path, _MISSING))
