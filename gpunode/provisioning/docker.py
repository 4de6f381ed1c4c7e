"""The role docker: an engine if there is none, its daemon.json, its users, and no restart while a job runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpunode.catalog import load
from gpunode.facts.node import OperatingSystem
from gpunode.provisioning.archives import Archive, ArchiveFiles, archive_files
from gpunode.provisioning.context import Context
from gpunode.provisioning.daemon_json import daemon_request, read_document
from gpunode.provisioning.departures import departures, installed_by_role
from gpunode.provisioning.docker_daemon import DAEMON, RELOAD, RESTART, daemon_change, daemon_memory
from gpunode.provisioning.docker_daemon import LOOK as DAEMON_LOOK
from gpunode.provisioning.docker_state import DockerState, docker_of
from gpunode.provisioning.engines import InstalledEngine, installed_engine, tcp_addresses
from gpunode.provisioning.manifest import (
    AptChange,
    DnfChange,
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeQuestion,
    UnitState,
    no_package_manager,
)
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.storage_answer import parsed

ROLE = "docker"
MEMORY = "/var/lib/gpunode/docker"
SOURCES = "/etc/apt/sources.list.d/gpunode-docker.sources"
KEY = "/etc/apt/keyrings/gpunode-docker.asc"
YUM = "/etc/yum.repos.d/gpunode-docker.repo"
RPM_KEY = "/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunode-docker"
UNATTENDED = "/etc/apt/apt.conf.d/52gpunode-docker"
BEFORE, USERS = f"{MEMORY}/packages-before", f"{MEMORY}/users"
DAEMON_BEFORE = "/etc/docker/daemon.json.before-gpunode"
DATA = ("/var/lib/docker", "/var/lib/containerd")
DROP_INS = "/etc/systemd/system/docker.service.d"
DATA_ROOT = "data_root"
"""Name of the question for the owner of the engine's data folder."""
MOUNT = f"{DROP_INS}/gpunode-data-root.conf"
LOOK = Look(
    paths=(SOURCES, KEY, YUM, RPM_KEY, UNATTENDED, MEMORY, DROP_INS, MOUNT, *DATA, *DAEMON_LOOK.paths),
    contents=(BEFORE, USERS, KEY, RPM_KEY, *DAEMON_LOOK.contents),
)
# An engine of another source is removed first: its packages conflict with the new ones.
REPLACED = {
    "docker": ("docker.io", "docker-cli", "docker-buildx", "docker-compose", "containerd", "runc"),
    "distribution": ("docker-ce*", "docker-buildx-plugin", "docker-compose-plugin", "containerd.io"),
}
OWN_PACKAGES = ("docker.io", "docker-*", "containerd", "containerd.io")


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role."""
    docker = docker_of(state)
    if state.manager is None:
        return no_package_manager(ROLE)
    if settings["state"] == "absent":
        return _absent(state, settings, context, docker)
    return _present(state, settings, context, docker)


def _present(state: NodeState, settings: Mapping[str, Any], context: Context, docker: DockerState) -> Manifest:
    now = installed_engine(state.installed)
    # In check mode what the transaction would have installed by now.
    engine = installed_engine(context.planned.installed(state.installed))
    source = settings["source"] if settings["source"] != "auto" else now.source or "docker"
    switches = now.source is not None and now.source != source
    busy = bool(context.settings_of("preflight")["gpunode_allow_busy"])
    refusals = [*_source_refusals(state, source)]
    if switches and not settings["switch"]:
        refusals.append(
            f"{now.package} {now.version} is installed: set docker_source to auto to keep it, or docker_switch to true "
            f"to replace it by that of {source}"
        )
    elif switches and docker.in_use and not busy:
        refusals.append(
            f"changing the engine ends its containers, and {docker.in_use}, or set gpunode_allow_busy to true"
        )
    archive = ArchiveFiles() if source != "docker" else archive_files(_archive(state, settings), state, context)
    if archive.questions:
        return Manifest(role=ROLE, questions=dict(archive.questions), refusals=tuple(refusals))
    request = daemon_request(
        settings,
        state.contents.get(DAEMON),
        bool(docker.info and docker.info.in_swarm),
        memory=daemon_memory(state, ROLE),
        command=docker.command,
    )
    change = daemon_change(state, docker, engine, ROLE, request.values, allow_busy=busy)
    refusals += [*archive.refusals, *([request.problem] if request.problem else []), *change.refusals]
    root = _data_root(change.merged.text)
    if root and DATA_ROOT not in context.answers:
        question = NodeQuestion(kind="block_devices", body={"disks": [], "paths": [root]})
        return Manifest(role=ROLE, questions={DATA_ROOT: question}, refusals=tuple(refusals))
    refusals += _data_refusals(root, context)
    missing = _missing_data(root, context)
    there = {*(docker.group or ())}
    users = [name for name in settings["users"] if name not in there]
    files = [*archive.files, _mount(change.merged.text), *_unattended(state, settings, engine), *change.files]
    if source != "docker":
        files += [ManagedFile(path=path, content=None) for path in _archive_paths(state)]
    return Manifest(
        role=ROLE,
        files=tuple(files),
        folders=(ManagedFolder(path=MEMORY),),
        packages=_packages(state, settings, source, switches, archive),
        units=(UnitState(name="docker.service", enabled=True, state="started"),) if engine.package else (),
        refusals=tuple(refusals),
        notes=(*_socket_notes(state, docker), *request.notes, *change.restart_notes),
        restarts={"docker.service": "; ".join(change.restart_reasons)} if change.restart_notes else {},
        due_reasons=(
            *change.due_reasons,
            *(f"{path} is missing" for path in missing),
            *(f"{name} is not in the group docker" for name in users),
        ),
        values={
            **change.values,
            "state": "present",
            "data_folders": [{"path": path, "mode": "0710"} for path in missing],
            "keep_data": switches,
            "engine": now.package is not None,
            "users": users,
            "known": [name for name in users if name not in context.planned.users],
            "known_users": sorted({*_remembered_users(state), *users}),
            "users_file": USERS,
        },
    )


def _source_refusals(state: NodeState, source: str) -> list[str]:
    if state.apt is None and source == "distribution":
        return ["docker_source distribution: distributions with dnf do not ship Docker; set docker, or use Podman"]
    return []


def _archive_paths(state: NodeState) -> tuple[str, str]:
    return (SOURCES, KEY) if state.apt is not None else (YUM, RPM_KEY)


def _archive(state: NodeState, settings: Mapping[str, Any]) -> Archive:
    row = load().container_engines["docker"]
    system = state.facts.os or OperatingSystem(id="", version_id=None, pretty_name=None, codename=None)
    base = settings["repository_url"] or row.repository
    sources, key_file = _archive_paths(state)
    if state.apt is not None:
        uri, suite, components = f"{base}/{system.id}", system.codename or "", "stable"
        key, fingerprints = row.key, row.fingerprints
    else:
        # Docker builds for RHEL and for CentOS; systems like RHEL use the latter.
        family = "rhel" if system.id == "rhel" else "centos"
        uri, suite, components = f"{base}/{family}/{(system.version_id or '').split('.')[0]}/$basearch/stable", "", ""
        key, fingerprints = row.rpm_key, row.rpm_fingerprints
    own = settings["repository_key"]
    return Archive(
        role=ROLE,
        purpose="Docker's packages",
        file=sources,
        key_file=key_file,
        uri=uri,
        key=own or key or "",
        fingerprints=() if own else fingerprints,
        suite=suite,
        components=components,
    )


def _requested(state: NodeState, settings: Mapping[str, Any], source: str) -> tuple[str, ...]:
    """Return the requested packages, ``NAME`` or ``NAME=PATTERN``."""
    version = str(settings["version"])
    if source == "docker":
        packages = [*load().container_engines["docker"].packages]
        if version != "keep":
            packages = [
                f"{name}=*:{version}-*" if name in {"docker-ce", "docker-ce-cli"} else name for name in packages
            ]
    elif source == "distribution":
        packages = ["docker.io" if version == "keep" else f"docker.io={version}[!0-9]*"]
        system = state.facts.os
        if system is not None and system.id == "debian" and int((system.version_id or "0").split(".")[0]) >= 13:
            packages.append("docker-cli")
    else:
        packages = []
    return (*packages, *map(str, settings["extra_packages"]))


def _packages(
    state: NodeState, settings: Mapping[str, Any], source: str, switches: bool, archive: ArchiveFiles
) -> AptChange | DnfChange | None:
    requested = _requested(state, settings, source)
    if not requested:
        return None
    gone = REPLACED.get(source, ()) if switches else ()
    wait = int(settings["lock_wait_s"])
    if state.apt is None:
        return DnfChange(install=requested, remove=gone, memory=BEFORE, lock_wait_s=wait)
    return AptChange(install=requested, purge=gone, memory=BEFORE, files=archive.texts, lock_wait_s=wait)


def _data_root(text: str | None) -> str | None:
    """Return where daemon.json moves the engine's data; None if it does not."""
    root = read_document(text).get("data-root")
    return root if isinstance(root, str) and re.fullmatch(r"/[A-Za-z0-9/._+-]+", root) is not None else None


def _data_refusals(root: str | None, context: Context) -> list[str]:
    """Return why the engine must not use its data folder: its owner could add containers that run as root."""
    if root is None:
        return []
    seen = parsed(context.answers[DATA_ROOT])
    if seen.error:
        return [f"data-root: {root} could not be queried: {seen.error}"]
    place = seen.place(root)
    if place.kind != "other" and place.owner in (None, 0):
        return []
    return [
        f"data-root: {root} or a directory above it does not belong to root: its owner could start containers as root: "
        "remove it, or choose another directory"
    ]


def _missing_data(root: str | None, context: Context) -> list[str]:
    """Return the data folder if it is missing: in a scratch directory, users could create it before the engine."""
    place = parsed(context.answers[DATA_ROOT]).paths.get(root) if root is not None else None
    return [root] if root is not None and place is not None and place.kind == "absent" else []


def _mount(text: str | None) -> ManagedFile:
    """Return the drop-in that makes the daemon wait for the mount below its data, if daemon.json moves them."""
    root = _data_root(text)
    lines = (
        "# Managed by gpunode (role docker): without this mount the daemon would fill the root file system.",
        "[Unit]",
        f"RequiresMountsFor={root}",
    )
    return ManagedFile(path=MOUNT, content="".join(f"{line}\n" for line in lines) if root else None)


def _unattended(state: NodeState, settings: Mapping[str, Any], engine: InstalledEngine) -> list[ManagedFile]:
    """Return the file that excludes the engine's packages from apt's unattended upgrades."""
    if state.apt is None:
        return []
    if settings["unattended_upgrades"]:
        return [ManagedFile(path=UNATTENDED, content=None, phase="after")]
    # The list contains regular expressions.
    names = [name.replace(".", "[.]").replace("+", "[+]") for name in engine.packages]
    lines = [
        "// Managed by gpunode (role docker): an upgrade restarts the engine; an administrator runs it.",
        "Unattended-Upgrade::Package-Blacklist {",
        *(f'  "^{name}$";' for name in names),
        "};",
    ]
    return [ManagedFile(path=UNATTENDED, content="".join(f"{line}\n" for line in lines), phase="after")]


def _socket_notes(state: NodeState, docker: DockerState) -> tuple[str, ...]:
    addresses = tcp_addresses(state.contents.get(DAEMON), docker.command)
    if not addresses:
        return ()
    return (
        f"dockerd listens at {', '.join(addresses)}: whoever can connect there has root access to this node. The role "
        "does not change it; use /run/docker.sock over SSH instead (docker -H ssh://HOST)",
    )


def _remembered_users(state: NodeState) -> list[str]:
    return (state.contents.get(USERS) or "").split()


def _absent(state: NodeState, settings: Mapping[str, Any], context: Context, docker: DockerState) -> Manifest:
    now = installed_engine(state.installed)
    remembered = state.contents.get(BEFORE)
    ours = now.package in installed_by_role(state, BEFORE)
    busy = bool(context.settings_of("preflight")["gpunode_allow_busy"])
    refusals = []
    if ours and docker.in_use and not busy:
        refusals.append(f"{docker.in_use}, or set gpunode_allow_busy to true")
    change = daemon_change(state, docker, now, ROLE, {}, allow_busy=busy)
    goes = ours or (remembered is not None and now.package is None)
    packages: AptChange | DnfChange | None = None
    leaving: list[str] = []
    if goes:
        patterns = (*OWN_PACKAGES, *map(str, settings["extra_packages"]))
        packages, leaving = departures(state, patterns, memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"]))
    data = [
        folder
        for folder in DATA
        if settings["remove_data"] and (ours or now.package is None) and _filled(state, folder)
    ]
    users = [name for name in _remembered_users(state) if name in (docker.group or ())]
    own = (SOURCES, KEY, YUM, RPM_KEY, UNATTENDED, MOUNT, DAEMON_BEFORE, USERS, BEFORE, RESTART, RELOAD)
    stays = now.package is not None and not ours
    return Manifest(
        role=ROLE,
        files=(
            *(file.model_copy(update={"phase": "before"}) for file in change.files),
            *(ManagedFile(path=path, content=None, phase="after") for path in own),
        ),
        folders=tuple(ManagedFolder(path=path, state="absent_if_empty", phase="after") for path in (MEMORY, DROP_INS)),
        packages=packages,
        refusals=(*refusals, *change.refusals),
        notes=change.restart_notes if stays else (),
        due_reasons=(
            *leaving,
            *(f"{name} is in the group docker" for name in users),
            *(f"{folder} holds images, containers or volumes" for folder in data),
        ),
        values={
            **change.values,
            "state": "absent",
            "keep_data": ours,
            "engine": stays,
            "restart": change.restart and stays,
            "reload": change.reload and stays,
            "users": users,
            "data": data,
        },
    )


def _filled(state: NodeState, folder: str) -> bool:
    there = state.files.get(folder)
    return there is not None and there.kind == "folder" and bool(there.entries)
