"""/etc/docker/daemon.json, which users and several roles write: merged and restored key by key.

The variables of the role docker, and what they request in it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from gpunode.frozen import Frozen, invalid_field
from gpunode.provisioning.role import PackageSettings, option

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
LIMITED_LOG_DRIVERS = ("json-file", "local")
SHM_SIZE = "default-shm-size"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtp]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?")


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


class DockerSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): the engine is installed and configured. V(absent): everything that this role deployed is removed.",
    )
    source: Literal["auto", "docker", "distribution"] = option(
        "auto",
        "Where the engine comes from: V(docker) (Docker's repository or a mirror of it), V(distribution) (docker.io), "
        "or V(auto): an installed engine is kept, a bare node gets Docker's.",
    )
    switch: bool = option(
        False,
        "Replace an installed engine by that of another source: its containers are stopped, its images and volumes "
        "stay.",
    )
    repository_url: str = option(
        "",
        "URL of Docker's repository or a mirror of it, without the name of the distribution. Empty: Docker's own.",
    )
    repository_key: str = option(
        "",
        "The repository's key, armored: a file on the controller, or a URL that the node can reach. Empty: Docker's "
        "own.",
    )
    version: str = option(
        "keep", "V(keep): the installed version, the newest on a bare node; or an exact one such as V(28.3.3)."
    )
    extra_packages: tuple[str, ...] = option((), "Packages to install beside the engine's own.")
    live_restore: bool = option(True, "Keep containers running while the daemon restarts.")
    log_max_size: str = option("100m", "Size at which a container's log is rotated. Empty: never.")
    log_max_files: int = option(5, "Number of log files to keep. V(0): the engine's default.")
    shm_size: str = option(
        "1g",
        "Default size of C(/dev/shm) in containers; NCCL and the DataLoader's workers need more than Docker's 64 MiB. "
        "A greater value in C(daemon.json) stays. Empty: not set.",
    )
    storage_driver: str = option(
        "",
        "Storage driver such as overlay2. Empty: the engine's default. Images and containers of another driver are not "
        "visible.",
    )
    no_new_privileges: bool = option(
        False,
        "Prevent containers from gaining privileges: sudo and other setuid programs have no effect in them.",
    )
    userns_remap: str = option(
        "",
        "User with the subordinate ids for containers: V(default) (Docker creates the user dockremap), or "
        "USER[:GROUP]. Empty: no remapping.",
    )
    daemon: Document = option({}, "Further keys of C(daemon.json), with precedence over those above.")
    users: tuple[str, ...] = option(
        (), "Users that may use Docker without sudo, which is equivalent to root on the node."
    )
    unattended_upgrades: bool = option(False, "Allow unattended upgrades of the engine, which restart it at any time.")
    remove_data: bool = option(False, "With O(docker_state=absent): remove images, containers and volumes too.")


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """The requested content of daemon.json by the role's settings."""

    values: Document = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was omitted, and why."""
    problem: str | None = None


def daemon_request(
    settings: DockerSettings,
    text: str | None,
    swarm: bool = False,
    *,
    memory: DaemonMemory | None = None,
    command: str = "",
) -> DaemonRequest:
    """Return the requested content of daemon.json.

    ``text`` is the current file, ``memory`` is from an earlier merge, ``command`` is dockerd's command line: dockerd
    does not start if an option is set there and in the file.
    """
    daemon = settings.daemon
    problem = _request_problem(settings, daemon, command)
    if problem is not None:
        return DaemonRequest(problem=problem)
    notes: list[str] = []
    values: Document = {}
    if settings.live_restore:
        if swarm:
            notes.append("live-restore is not set: this node is in a swarm, and dockerd does not start with both")
        else:
            values["live-restore"] = True
    try:
        present = read_document(text)
    except ValueError:
        present = {}
    driver = daemon.get("log-driver", present.get("log-driver", "json-file"))
    requested = {"max-size": settings.log_max_size, "max-file": settings.log_max_files}
    limits: Document = {key: str(value) for key, value in requested.items() if value}
    if limits and driver in LIMITED_LOG_DRIVERS:
        values["log-opts"] = limits
    elif limits:
        notes.append(f"log limits are not set: the log driver {driver} has its own limits")
    size = settings.shm_size
    if size and _less(present.get(SHM_SIZE), size, memory):
        values[SHM_SIZE] = size
    if settings.storage_driver:
        values["storage-driver"] = settings.storage_driver
    if settings.no_new_privileges:
        values["no-new-privileges"] = True
    if settings.userns_remap:
        values["userns-remap"] = settings.userns_remap
    for key in [key for key in values if _is_option(key, command)]:
        del values[key]
        notes.append(f"{key} is not set: dockerd's command line sets it, and dockerd does not start with both")
    return DaemonRequest(merged(values, daemon), tuple(notes))


def _request_problem(settings: DockerSettings, daemon: Document, command: str) -> str | None:
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
    remap, size = settings.userns_remap, settings.shm_size
    if remap and not _USER.fullmatch(remap):
        return f"docker_userns_remap: {remap} is neither default nor USER[:GROUP]"
    if size and _bytes(size) is None:
        return f"docker_shm_size: {size} is not a size (examples: 1g, 512m)"
    return None


def _is_option(key: str, command: str) -> bool:
    """Return whether dockerd's command line sets this key; options of lists are singular."""
    return any(re.search(rf"(?<![\w-])--{re.escape(name)}(?![\w-])", command) for name in {key, key.removesuffix("s")})


def _less(present: object, size: str, memory: DaemonMemory | None) -> bool:
    """Return whether the default size of /dev/shm is this role's, or less than requested; others may have more."""
    if memory and any((entry.path, entry.value) == ((SHM_SIZE,), present) for entry in memory.keys):
        return True
    return (_bytes(present) or 0) < (_bytes(size) or 0)


def _bytes(size: object) -> float | None:
    """Return a size as dockerd reads it, in bytes; None if it is not a size."""
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    return float(match[1]) * 1024.0 ** " kmgtp".index(match[2].lower() or " ") if match else None
