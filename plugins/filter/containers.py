"""What the roles docker and nvidia_container_toolkit decide: engines and their versions, daemon.json, what is stale."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from packaging.version import Version

    from gpunode.catalog import load
    from gpunode.checks.words import listed
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

# The engine's own package by who built it; what else carries a dockerd belongs to somebody else and is left alone.
ENGINES = {"docker-ce": "docker", "docker.io": "distribution", "moby-engine": "other", "docker-ee": "other"}
# Packages whose upgrade restarts the engine, or takes the ground from under its containers.
MOVING = (
    *ENGINES,
    "docker-ce-cli",
    "docker-cli",
    "moby-cli",
    "containerd.io",
    "containerd",
    "moby-containerd",
    "runc",
    "moby-runc",
)
# dockerd takes these on SIGHUP; everything else waits for a restart. `features` is not among them: the CDI driver is
# set up when the daemon starts. A key that is gone it does not notice.
RELOADED = {
    "authorization-plugins",
    "debug",
    "default-runtime",
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
# Keys of daemon.json that no option of dockerd has the name of.
KEYS_WITHOUT_OPTION = {
    "builder",
    "containerd-snapshotter",
    "default-address-pools",
    "features",
    "hosts",
    "proxies",
    "runtimes",
}
LIMITED_LOG_DRIVERS = ("json-file", "local")
GPU_KIND = "nvidia.com/gpu"
# What nvidia-docker2 and its kin put into apt's sources. All of it is in the toolkit's one repository now.
OLD_REPOSITORY = re.compile(
    r"nvidia\.github\.io/(nvidia-docker|nvidia-container-runtime)\b|nvidia\.github\.io/libnvidia-container/(?!stable/deb\b)"
)
_MISSING = object()


def _need_gpunode() -> None:
    if MISSING is not None:
        raise AnsibleFilterError(
            f"the Python package gpunode is needed beside Ansible on the controller ({MISSING}): "
            "install it into the environment that ansible-playbook runs from, with pip install gpunode"
        )


def number(text: Any) -> str | None:
    """The engine's own version in a package's or a program's: ``5:28.3.3-1~debian.12~bookworm`` is ``28.3.3``."""
    found = re.match(r"(?:\d+:)?v?(\d+(?:\.\d+)*)", str(text or "").strip())
    return found[1] if found else None


def docker_engine(installed: Mapping[str, Any] | None) -> dict[str, Any]:
    """The engine among the installed packages (name to version): ``{source, package, version, packages}``.

    ``source`` is ``docker``, ``distribution`` or ``other``; None, as the rest, where there is none. ``packages``
    are the installed ones that must not move under a running job.
    """
    have = dict(plain(installed or {}))
    package = next((name for name in ENGINES if name in have), None)
    moving = sorted(name for name in MOVING if name in have)
    return {
        "source": ENGINES[package] if package else None,
        "package": package,
        "version": number(have[package]) if package else None,
        "packages": moving if package else [],
    }


def container_engine(version: str | None, engine: str = "docker") -> dict[str, Any]:
    """What an engine of this version does with CDI, from the catalog.

    ``cdi``: ``default``, ``feature`` (where it is switched on), ``none``, or None where the version is not known;
    ``additional_gids``: whether it reads CDI 0.7.0; ``repository``, ``key``, ``fingerprints`` and ``packages`` are the
    publisher's own.
    """
    _need_gpunode()
    try:
        row = load().container_engines[engine]
    except KeyError:
        raise AnsibleFilterError(f"the catalog has no container engine {engine!r}") from None
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None
    known = number(version)
    cdi, gids = None, None
    if known is not None:
        have = Version(known)
        cdi = "default" if have >= Version(row.cdi_default) else "feature" if have >= Version(row.cdi) else "none"
        gids = have >= Version(row.additional_gids)
    return {
        "version": known,
        "cdi": cdi,
        "additional_gids": gids,
        "repository": row.repository,
        "key": row.key,
        "fingerprints": list(row.fingerprints),
        "packages": list(row.packages),
    }


def docker_wishes(settings: Mapping[str, Any], text: str | None, swarm: bool = False) -> dict[str, Any]:
    """What daemon.json is to hold, from the role's settings: ``{wished, notes, problem}``.

    ``settings``: ``live_restore``, ``log_max_size``, ``log_max_files``, ``storage_driver``, ``daemon`` (further keys,
    which win). ``text`` is the file as it is. ``notes`` says what was left out and why.
    """
    daemon: dict[str, Any] = plain(settings.get("daemon") or {})
    notes: list[str] = []
    if "hosts" in daemon:
        return {
            "wished": {},
            "notes": [],
            "problem": "docker_daemon must not set hosts: the socket is systemd's, and whoever reaches one over TCP "
            "is root on the node; carry /run/docker.sock over SSH instead",
        }
    wished: dict[str, Any] = {}
    if settings.get("live_restore"):
        if swarm:
            notes.append("live-restore is left out: this node is in a swarm, with which dockerd does not start")
        else:
            wished["live-restore"] = True
    try:
        present = _document(text)
    except ValueError:
        present = {}
    driver = daemon.get("log-driver", present.get("log-driver", "json-file"))
    limits = {"max-size": settings.get("log_max_size"), "max-file": settings.get("log_max_files")}
    limits = {key: str(value) for key, value in limits.items() if value}
    if limits and driver in LIMITED_LOG_DRIVERS:
        wished["log-opts"] = limits
    elif limits:
        notes.append(f"log limits are left out: the log driver {driver} has limits of its own")
    if settings.get("storage_driver"):
        wished["storage-driver"] = settings["storage_driver"]
    return {"wished": _merged(wished, daemon), "notes": notes, "problem": None}


def merged_daemon(
    text: str | None,
    wished: Mapping[str, Any] | None,
    memory: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """daemon.json with ``wished`` merged into it key by key; what nobody asked for stays as it is.

    ``memory`` is what an earlier call left: the values that are ours and what stood there before. A value that is no
    longer wished gives way to the one before it, unless somebody changed it since. Values in the memory of
    ``others`` are theirs and are not touched. Options in ``exec-opts`` are merged by their names.

    Answer: ``text`` (None: there is to be no file), ``changed``, ``keys`` (what changes, dotted), ``restart`` (those
    that a reload does not bring), ``memory`` (to be kept; None: nothing to keep), ``problem`` (None, or one line).
    """
    try:
        before = _with_options(_document(text))
    except ValueError as err:
        return _refused(str(err))
    after = copy.deepcopy(before)
    ours = {tuple(entry["path"]): dict(entry) for entry in (memory or {}).get("keys", ())}
    theirs = {tuple(entry["path"]) for entry in (others or {}).get("keys", ())}
    wanted = {path: value for path, value in _leaves(_with_options(plain(wished or {}))) if path not in theirs}
    for path in [path for path in ours if path not in wanted]:
        entry = ours.pop(path)
        if path not in theirs and _get(after, path) == entry["value"]:
            _put(after, path, entry.get("before", _MISSING))
    for path, value in wanted.items():
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
            return _refused(f"{'.'.join(path[:-1])} is no object, so {'.'.join(path)} has no place in it")
        ours[path] = entry
    for path in [path for path in ours if _get(after, path) != ours[path]["value"]]:
        del ours[path]
    created = bool((memory or {}).get("created", text is None))
    gone = not after and created
    keys = [".".join(path) for path in _differing(before, after)]
    kept = {"created": created, "keys": [ours[path] for path in sorted(ours)]} if ours else None
    return {
        "text": None if gone or (text is None and not after) else _written(after) if keys else text,
        "changed": bool(keys) or (gone and text is not None),
        "keys": keys,
        "restart": [key for key in keys if (top := key.partition(".")[0]) not in RELOADED or top not in after],
        "memory": kept,
        "problem": None,
    }


def _refused(problem: str) -> dict[str, Any]:
    return {"text": None, "changed": False, "keys": [], "restart": [], "memory": None, "problem": problem}


def unknown_daemon_keys(wished: Mapping[str, Any] | None, options: str) -> list[str]:
    """Wished keys that this dockerd does not know and would not start with; ``options`` is ``dockerd --help``.

    For engines before 23, whose dockerd cannot validate a file.
    """
    known = set(re.findall(r"--([a-z0-9-]+)", options)) | KEYS_WITHOUT_OPTION
    singular = {"registry-mirrors": "registry-mirror", "insecure-registries": "insecure-registry"}
    return sorted(
        key for key in plain(wished or {}) if not {key, singular.get(key, key), key.removesuffix("s")} & known
    )


def restart_obstacles(state: Mapping[str, Any], facts: Mapping[str, Any], text: str | None) -> list[str]:
    """Why a restart of Docker would hurt, in words; empty where it may be restarted.

    ``state`` is what ``docker info`` said (``running``, ``live_restore``; empty without a daemon), ``facts`` a
    NodeFacts document, ``text`` the daemon.json that the new daemon will read: without live-restore in it, that one
    ends what the old one left running.
    """
    _need_gpunode()
    found = []
    try:
        stays = _document(text).get("live-restore") is True
    except ValueError:
        stays = False
    running = int(state.get("running") or 0)
    if running and not (state.get("live_restore") and stays):
        found.append(f"{running} container{'s run' if running > 1 else ' runs'} and would end: live-restore is off")
    processes = NodeFacts.model_validate(plain(facts)).gpu_processes
    if processes is None:
        found.append("it could not be seen who uses the GPUs")
    users = [process.title for process in processes or () if process.computes]
    if users:
        found.append(f"GPUs are in use by {listed(users, 5)}")
    return found


def tcp_sockets(text: str | None, command: str | None) -> list[str]:
    """TCP addresses at which dockerd listens: in daemon.json, and among the options of its command line."""
    try:
        hosts = _document(text).get("hosts") or []
    except ValueError:
        hosts = []
    listed = [str(host) for host in hosts] if isinstance(hosts, list) else []
    return sorted({host for host in [*listed, *re.findall(r"tcp://[^\s;\"']*", command or "")] if "tcp://" in host})


def stale_cdi(specs: Iterable[Mapping[str, Any]] | None, kept: str = "/var/run/cdi/nvidia.yaml") -> list[str]:
    """Specifications of NVIDIA's GPUs beside the one that the toolkit's unit keeps.

    Of two folders the later one counts, so that an old file in /etc/cdi speaks up whenever the unit's is not there;
    within one folder engines give out neither. Other vendors' and other kinds' are not ours.

    ``specs`` are those of NodeFacts.
    """
    found = (str(spec["path"]) for spec in specs or () if spec.get("kind") == GPU_KIND)
    return sorted(path for path in found if path.replace("/var/run/", "/run/") != kept.replace("/var/run/", "/run/"))


def archive_file(sources: Iterable[Mapping[str, Any]], uri: str, own_file: str) -> str | None:
    """The file in which a user already has the archive ``uri``; None where only ``own_file`` has it, or nobody.

    apt refuses to work where one archive has two keys, so a second entry must not be made.
    """
    wanted = _plain_uri(uri)
    for entry in sources or ():
        if entry["file"] != own_file and "deb" in entry["types"] and wanted in map(_plain_uri, entry["uris"]):
            return str(entry["file"])
    return None


def _plain_uri(uri: str) -> str:
    return re.sub(r"/(\$\(ARCH\)|amd64|arm64)?/*$", "", str(uri))


def old_toolkit_files(sources: Iterable[Mapping[str, Any]]) -> list[str]:
    """apt's files that name nothing but the repositories of nvidia-docker2; they clash with the toolkit's own."""
    uris: dict[str, list[str]] = {}
    for entry in sources or ():
        uris.setdefault(entry["file"], []).extend(entry["uris"])
    return sorted(file for file, all_of in uris.items() if all_of and all(map(OLD_REPOSITORY.search, all_of)))


def _document(text: str | None) -> dict[str, Any]:
    """The object in a text; ValueError says what is wrong with it."""
    try:
        found = json.loads(text) if text and text.strip() else {}
    except json.JSONDecodeError as err:
        raise ValueError(f"it is no JSON: {err.msg} in line {err.lineno}") from None
    except RecursionError:
        raise ValueError("it is no JSON that can be read: too deep") from None
    if not isinstance(found, dict):
        raise ValueError("it holds no object")  # noqa: TRY004 (one kind for all that is wrong with a text)
    return found


def _written(document: dict[str, Any]) -> str:
    return json.dumps(_without_options(document), indent=4, ensure_ascii=False) + "\n"


def _with_options(document: dict[str, Any]) -> dict[str, Any]:
    """``exec-opts`` as an object, so that each option can have its own owner."""
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
    """Paths and values; an empty object is a value, None is no wish."""
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
    """Set a value, or take it and the objects that it leaves empty away; TypeError where a value is in the way."""
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


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "docker_engine": docker_engine,
            "container_engine": container_engine,
            "docker_wishes": docker_wishes,
            "merged_daemon": merged_daemon,
            "unknown_daemon_keys": unknown_daemon_keys,
            "restart_obstacles": restart_obstacles,
            "tcp_sockets": tcp_sockets,
            "stale_cdi": stale_cdi,
            "archive_file": archive_file,
            "old_toolkit_files": old_toolkit_files,
        }
