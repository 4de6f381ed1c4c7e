"""The role docker: an engine if there is none, its daemon.json, its users, and no restart while a job runs."""

from __future__ import annotations

import re

from gpunode.catalog import load
from gpunode.facts.system import OperatingSystem
from gpunode.frozen import Frozen
from gpunode.provisioning.answers import DockerState, docker_of, storage_of
from gpunode.provisioning.base import brings_users
from gpunode.provisioning.context import Context
from gpunode.provisioning.daemon_json import DockerSettings, daemon_request, read_document
from gpunode.provisioning.docker_daemon import BEFORE as DAEMON_BEFORE
from gpunode.provisioning.docker_daemon import DAEMON, RELOAD, RESTART, UNIT, daemon_change, daemon_memory
from gpunode.provisioning.docker_daemon import LOOK as DAEMON_LOOK
from gpunode.provisioning.engines import InstalledEngine, installed_engine, tcp_addresses
from gpunode.provisioning.kubernetes_node import CONTAINERD, uses_containerd
from gpunode.provisioning.manifest import (
    ManagedFile,
    ManagedFolder,
    Manifest,
    NodeCommand,
    NodeQuery,
    UnitState,
)
from gpunode.provisioning.repository import PackageRepository, RepositoryFiles, repository_files, repository_paths
from gpunode.provisioning.role import Role, Texts, keeping
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.transaction import Transaction, installed_by_role

SOURCES, KEY, YUM, RPM_KEY = repository_paths("docker")
UNATTENDED = "/etc/apt/apt.conf.d/52gpunode-docker"
USERS = "/var/lib/gpunode/docker/users"
CONTAINERD_DATA = "/var/lib/containerd"
DATA = ("/var/lib/docker", CONTAINERD_DATA)
DROP_INS = "/etc/systemd/system/docker.service.d"
DATA_ROOT = "data_root"
"""Name of the question for the owner of the engine's data folder."""
MOUNT = f"{DROP_INS}/gpunode-data-root.conf"
PURGES = ("/usr/share/docker.io/contrib/nuke-graph-directory.sh", "/var/lib/docker/nuke-graph-directory.sh")
"""Scripts with which purging docker.io removes every image and volume."""
# An engine of another source is removed first: its packages conflict with the new ones.
REPLACED = {
    "docker": ("docker.io", "docker-cli", "docker-buildx", "docker-compose", "containerd", "runc"),
    "distribution": ("docker-ce*", "docker-buildx-plugin", "docker-compose-plugin", "containerd.io"),
}


class DockerResult(Frozen):
    """What the role's own tasks do."""

    known: tuple[str, ...] = ()
    """Users that the node must have."""
    folders: tuple[ManagedFolder, ...] = ()
    """The missing folder of the engine's data."""
    data: tuple[str, ...] = ()
    """Folders to clear: images, containers and volumes."""


ROLE = Role(
    name="docker",
    title="Install and configure Docker Engine, without a restart under a running job",
    about=(
        "Installs the engine if missing, merges the requested keys into C(/etc/docker/daemon.json), and runs it.",
        "Removes everything with O(docker_state=absent).",
    ),
    settings=DockerSettings,
    for_images=True,
    reads=("engine", "gpus"),
    result=DockerResult,
    files=(SOURCES, KEY, YUM, RPM_KEY, UNATTENDED, MOUNT, DAEMON_BEFORE, USERS, RESTART, RELOAD),
    folders=(DROP_INS,),
    packages=("docker.io", "docker-*", "containerd", "containerd.io"),
    more=Look(paths=(*PURGES, *DATA, *DAEMON_LOOK.paths), contents=(USERS, KEY, RPM_KEY, *DAEMON_LOOK.contents)),
)


@ROLE.present
def present(state: NodeState, settings: DockerSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    docker, now = docker_of(state), installed_engine(state.installed)
    # In check mode what the transaction would have installed by now.
    engine = installed_engine(context.planned.installed(state.installed))
    source = settings.source if settings.source != "auto" else now.source or "docker"
    switches = now.source is not None and now.source != source
    refusals = []
    if state.manager == "dnf" and source == "distribution":
        refusals = ["docker_source distribution: distributions with dnf do not ship Docker; set docker, or use Podman"]
    if switches and not settings.switch:
        refusals.append(
            f"{now.package} {now.version} is installed: set docker_source to auto to keep it, or docker_switch to true "
            f"to replace it by that of {source}"
        )
    elif switches and docker.in_use and not context.allow_busy:
        refusals.append(
            f"changing the engine ends its containers, and {docker.in_use}, or set gpunode_allow_busy to true"
        )
    archive = RepositoryFiles() if source != "docker" else repository_files(_archive(state, settings), state, context)
    if archive.questions:
        return Manifest(role=ROLE.name, questions=dict(archive.questions), refusals=tuple(refusals))
    request = daemon_request(
        settings,
        state.contents.get(DAEMON),
        bool(docker.info and docker.info.in_swarm),
        memory=daemon_memory(state, ROLE.name),
        command=docker.command,
    )
    change = daemon_change(state, docker, engine, ROLE.name, request.values, allow_busy=context.allow_busy)
    refusals += [*archive.refusals, *([request.problem] if request.problem else []), *change.refusals]
    root = _data_root(change.merged.text)
    if root and DATA_ROOT not in context.answers:
        question = NodeQuery(kind="block_devices", body={"disks": [], "paths": [root]})
        return Manifest(role=ROLE.name, questions={DATA_ROOT: question}, refusals=tuple(refusals))
    refusals += _data_refusals(root, context)
    missing = _missing_data(root, context)
    users = [name for name in settings.users if name not in (docker.group or ())]
    text = ROLE.texts(context)
    # Without its mount, the daemon would fill the root file system.
    mount = ManagedFile(path=MOUNT, content=text("mount.conf.j2", folder=root) if root else None)
    files = [*archive.files, mount, *_unattended(state, settings, engine, text), *change.files]
    if source != "docker":
        files += [
            ManagedFile(path=path, content=None) for path in state.by_manager(apt=(SOURCES, KEY), dnf=(YUM, RPM_KEY))
        ]
    if switches:
        files += [ManagedFile(path=path, content=None) for path in PURGES]
    if users and now.package:
        recorded = sorted({*_recorded_users(state), *users})
        files.append(ManagedFile(path=USERS, content="".join(f"{name}\n" for name in recorded), phase="after"))
    known = [] if brings_users(state, context) else [name for name in users if name not in context.planned.users]
    return Manifest(
        role=ROLE.name,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=_packages(state, settings, source, switches, archive),
        commands=tuple(NodeCommand(argv=("gpasswd", "--add", name, "docker")) for name in users if now.package),
        units=(UnitState(name=UNIT, enabled=True, state="started"), *change.units) if engine.package else (),
        marks=change.marks,
        refusals=tuple(refusals),
        notes=(*_socket_notes(state, docker), *request.notes, *change.notes),
        restarts=change.deferred,
        pending_reasons=(
            *(f"{path} is missing" for path in missing),
            *(f"{name} is not in the group docker" for name in users),
        ),
        result=DockerResult(
            known=tuple(known),
            folders=tuple(ManagedFolder(path=path, mode="0710") for path in missing),
        ),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with daemon.json as it was; an engine from before the role stays."""
    docker, now = docker_of(state), installed_engine(state.installed)
    by_role = now.package in installed_by_role(state, ROLE.record)
    refusals = []
    if by_role and docker.in_use and not context.allow_busy:
        refusals.append(f"{docker.in_use}, or set gpunode_allow_busy to true")
    change = daemon_change(state, docker, now, ROLE.name, {}, allow_busy=context.allow_busy)
    stays = now.package is not None and not by_role
    # kubelet's pods run in it.
    kubelet = uses_containerd(context)
    manifest = keeping(manifest, state, CONTAINERD if kubelet else ())
    users = [name for name in _recorded_users(state) if name in (docker.group or ())]
    clears = ROLE.of(context).remove_data and not stays
    kept = {CONTAINERD_DATA} if kubelet else set[str]()
    data = [folder for folder in DATA if clears and folder not in kept and _filled(state, folder)]
    restored = [file.model_copy(update={"phase": "before"}) for file in change.files]
    restored += [ManagedFile(path=path, content=None) for path in PURGES if by_role]
    more = {
        "files": (*restored, *manifest.files),
        "packages": None if stays else manifest.packages,
        # gpasswd fails for a user who is gone, or left the group.
        "commands": (
            *manifest.commands,
            *(
                NodeCommand(argv=("gpasswd", "--delete", name, "docker"), phase="before", may_fail=True)
                for name in users
            ),
        ),
        "units": change.units if stays else (),
        "refusals": (*refusals, *change.refusals),
        "notes": change.notes if stays else (),
        "pending_reasons": (
            *(() if stays else manifest.pending_reasons),
            *(f"{name} is in the group docker" for name in users),
            *(f"{folder} holds images, containers or volumes" for folder in data),
        ),
        "result": DockerResult(data=tuple(data)),
    }
    return manifest.updated(**more)


def _archive(state: NodeState, settings: DockerSettings) -> PackageRepository:
    row = load().container_engines["docker"]
    system = state.facts.os or OperatingSystem(id="", version_id=None, pretty_name=None, codename=None)
    base = settings.repository_url or row.repository
    if state.manager == "apt":
        uri, suite, components = f"{base}/{system.id}", system.codename or "", "stable"
        key, fingerprints = row.key, row.fingerprints
    else:
        # Docker builds for RHEL and for CentOS; systems like RHEL use the latter.
        family = "rhel" if system.id == "rhel" else "centos"
        uri, suite, components = f"{base}/{family}/{(system.version_id or '').split('.')[0]}/$basearch/stable", "", ""
        key, fingerprints = row.rpm_key, row.rpm_fingerprints
    site_key = settings.repository_key
    return PackageRepository(
        role=ROLE.name,
        purpose="Docker's packages",
        name="docker",
        uri=uri,
        key=site_key or key or "",
        fingerprints=() if site_key else fingerprints,
        variable="docker_repository_key",
        suite=suite,
        components=components,
    )


def _requested(state: NodeState, settings: DockerSettings, source: str) -> tuple[str, ...]:
    """Return the requested packages, ``NAME`` or ``NAME=PATTERN``."""
    version = settings.version
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
    return (*packages, *settings.extra_packages)


def _packages(
    state: NodeState, settings: DockerSettings, source: str, switches: bool, archive: RepositoryFiles
) -> Transaction | None:
    requested = _requested(state, settings, source)
    if not requested:
        return None
    gone = REPLACED.get(source, ()) if switches else ()
    return ROLE.transaction(state, settings, requested, remove=gone, files=archive.texts)


def _data_root(text: str | None) -> str | None:
    """Return where daemon.json moves the engine's data; None if it does not."""
    root = read_document(text).get("data-root")
    return root if isinstance(root, str) and re.fullmatch(r"/[A-Za-z0-9/._+-]+", root) is not None else None


def _data_refusals(root: str | None, context: Context) -> list[str]:
    """Return why the engine must not use its data folder: its owner could add containers that run as root."""
    if root is None:
        return []
    seen = storage_of(context.answers[DATA_ROOT])
    if seen.error:
        return [f"data-root: {root} could not be queried: {seen.error}"]
    folder = seen.at(root)
    if folder.kind != "other" and folder.owner in (None, 0):
        return []
    return [
        f"data-root: {root} or a directory above it does not belong to root: its owner could start containers as root: "
        "remove it, or choose another directory"
    ]


def _missing_data(root: str | None, context: Context) -> list[str]:
    """Return the data folder if it is missing: in a scratch directory, users could create it before the engine."""
    folder = storage_of(context.answers[DATA_ROOT]).paths.get(root) if root is not None else None
    return [root] if root is not None and folder is not None and folder.kind == "absent" else []


def _unattended(state: NodeState, settings: DockerSettings, engine: InstalledEngine, text: Texts) -> list[ManagedFile]:
    """Return the file that excludes the engine's packages from apt's unattended upgrades."""
    if state.manager == "dnf":
        return []
    if settings.unattended_upgrades:
        return [ManagedFile(path=UNATTENDED, content=None, phase="after")]
    why = "an upgrade restarts the engine; an administrator runs it."
    return [
        ManagedFile(path=UNATTENDED, content=text("unattended.conf.j2", why=why, names=engine.packages), phase="after")
    ]


def _socket_notes(state: NodeState, docker: DockerState) -> tuple[str, ...]:
    addresses = tcp_addresses(state.contents.get(DAEMON), docker.command)
    if not addresses:
        return ()
    return (
        f"dockerd listens at {', '.join(addresses)}: whoever can connect there has root access to this node. The role "
        "does not change it; use /run/docker.sock over SSH instead (docker -H ssh://HOST)",
    )


def _recorded_users(state: NodeState) -> list[str]:
    return (state.contents.get(USERS) or "").split()


def _filled(state: NodeState, folder: str) -> bool:
    return state.kind(folder) == "folder" and bool(state.files[folder].entries)
