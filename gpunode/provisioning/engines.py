"""Container engines of a node: the installed one, its CDI support, and the effects of a restart."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.daemon_json import read_document
from gpunode.text import listed

EngineSource = Literal["docker", "distribution", "other"]
ENGINES: Mapping[str, EngineSource] = {
    "docker-ce": "docker",
    "docker.io": "distribution",
    "moby-engine": "other",
    "docker-ee": "other",
}
"""The engine's own package by its publisher. A dockerd in any other package is foreign and is not changed."""
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
"""Packages with upgrades that restart the engine, or replace the runtime of its containers."""


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """The Docker engine among the installed packages; every field empty if there is none."""

    source: EngineSource | None = None
    package: str | None = None
    version: str | None = None
    packages: tuple[str, ...] = ()
    """Those that must not be upgraded while a job runs."""


@dataclass(frozen=True, slots=True)
class EngineSupport:
    """CDI support of one version of an engine."""

    version: str | None
    cdi: Literal["default", "feature", "none"] | None
    """``feature``: if it is enabled there; None: the version is unknown."""
    additional_gids: bool | None
    """It reads CDI 0.7.0."""


def number(text: Any) -> str | None:
    """Return the engine's own version from that of a package or program: ``5:28.3.3-1~debian.12`` is ``28.3.3``."""
    match = re.match(r"(?:\d+:)?v?(\d+(?:\.\d+)*)", str(text or "").strip())
    return match[1] if match else None


def installed_engine(installed: Mapping[str, Any] | None) -> InstalledEngine:
    """Return the engine among the installed packages (name to version)."""
    have = installed or {}
    package = next((name for name in ENGINES if name in have), None)
    if package is None:
        return InstalledEngine()
    moving = tuple(sorted(name for name in MOVING if name in have))
    return InstalledEngine(ENGINES[package], package, number(have[package]), moving)


def engine_support(version: Any, engine: str = "docker") -> EngineSupport:
    """Return the CDI support of this version of an engine, from the catalog. Raises UsageError for an unknown name."""
    try:
        row = load().container_engines[engine]
    except KeyError:
        raise UsageError(f"the catalog has no container engine {engine!r}") from None
    known = number(version)
    if known is None:
        return EngineSupport(None, None, None)
    have = Version(known)
    cdi: Literal["default", "feature", "none"] = "none"
    if have >= Version(row.cdi):
        cdi = "default" if have >= Version(row.cdi_default) else "feature"
    return EngineSupport(known, cdi, have >= Version(row.additional_gids))


def engines_before_cdi_07(engines: Mapping[str, EngineSupport]) -> list[str]:
    """Return the engines (by their names) that cannot read CDI 0.7.0, as ``NAME VERSION``."""
    return sorted(f"{name} {engine.version}" for name, engine in engines.items() if engine.additional_gids is False)


def restart_obstacles(running: int, live_restore: bool, node: NodeFacts, text: str | None) -> list[str]:
    """Return why a restart of Docker would interrupt something; empty if it may be restarted.

    ``running`` containers and ``live_restore`` are the daemon's answer (0 and False without one), ``text`` is the
    daemon.json that the new daemon reads: without live-restore in it, it ends the containers that the old one left
    running.
    """
    obstacles = []
    try:
        stays = read_document(text).get("live-restore") is True
    except ValueError:
        stays = False
    if running and not (live_restore and stays):
        obstacles.append(f"{running} container{'s run' if running > 1 else ' runs'} and would end: live-restore is off")
    return obstacles + gpu_users(node)


def gpu_users(node: NodeFacts) -> list[str]:
    """Return who computes on the node's GPUs, in one sentence; unknown users count as users."""
    if node.gpu_processes is None:
        return ["the processes that use the GPUs could not be determined"]
    users = [process.title for process in node.gpu_processes if process.computes]
    return [f"GPUs are in use by {listed(users, 5)}"] if users else []


def tcp_addresses(text: str | None, command: str | None) -> list[str]:
    """Return the TCP addresses on which dockerd listens: in daemon.json, and in the options of its command line."""
    try:
        hosts = read_document(text).get("hosts") or []
    except ValueError:
        hosts = []
    named = [str(host) for host in hosts] if isinstance(hosts, list) else []
    return sorted({host for host in [*named, *re.findall(r"tcp://[^\s;\"']*", command or "")] if "tcp://" in host})


def unknown_options(keys: Iterable[str], options: Iterable[str]) -> list[str]:
    """Return the keys of daemon.json that this dockerd does not support; ``options`` are those in its --help.

    For engines before 23, in which dockerd cannot validate a file.
    """
    known = {*options, *KEYS_WITHOUT_OPTION}
    singular = {"registry-mirrors": "registry-mirror", "insecure-registries": "insecure-registry"}
    return sorted(key for key in keys if not {key, singular.get(key, key), key.removesuffix("s")} & known)


KEYS_WITHOUT_OPTION = {
    "builder",
    "containerd-snapshotter",
    "default-address-pools",
    "features",
    "hosts",
    "proxies",
    "runtimes",
}
"""Keys of daemon.json without an option of dockerd of the same name."""
