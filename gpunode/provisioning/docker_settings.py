"""The variables of the role docker, and what they request in daemon.json."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from gpunode.provisioning.daemon_json import DaemonMemory, Document, merged, read_document
from gpunode.provisioning.role import PackageSettings, option

LIMITED_LOG_DRIVERS = ("json-file", "local")
SHM_SIZE = "default-shm-size"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgtp]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,31})?")


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
