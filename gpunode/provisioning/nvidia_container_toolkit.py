"""The role nvidia_container_toolkit: four packages in one version, the engines' runtime, one CDI specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from gpunode.provisioning.archives import Archive, ArchiveFiles, archive_files, old_toolkit_files
from gpunode.provisioning.cdi import (
    REFRESH_ENV,
    RefreshEnvironment,
    refresh_environment,
    refresh_reason,
    stale_specifications,
)
from gpunode.provisioning.containerd import LOOK as CONTAINERD_LOOK
from gpunode.provisioning.containerd import MARKER, ContainerdChange, containerd_change, containerd_restored
from gpunode.provisioning.context import Context
from gpunode.provisioning.daemon_json import MergedDaemon, read_document
from gpunode.provisioning.departures import departures
from gpunode.provisioning.docker_daemon import DAEMON, KEPT, DaemonChange, daemon_change
from gpunode.provisioning.docker_daemon import LOOK as DAEMON_LOOK
from gpunode.provisioning.docker_state import DockerState, docker_of
from gpunode.provisioning.engines import (
    EngineSupport,
    InstalledEngine,
    engine_support,
    engines_before_cdi_07,
    installed_engine,
)
from gpunode.provisioning.locks import plugin
from gpunode.provisioning.manifest import (
    AptChange,
    DnfChange,
    ManagedFile,
    ManagedFolder,
    Manifest,
    UnitState,
    no_package_manager,
)
from gpunode.provisioning.node_stack import of_context
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.toolkit import ToolkitRequest, toolkit_daemon, toolkit_request
from gpunode.tuning import WORKLOADS, Profile, Workload, env_file, tune

ROLE = "nvidia_container_toolkit"
MEMORY = f"/var/lib/gpunode/{ROLE}"
SOURCES = "/etc/apt/sources.list.d/gpunode-nvidia-container-toolkit.sources"
KEY = "/etc/apt/keyrings/gpunode-nvidia-container-toolkit.asc"
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-container-toolkit.pref"
YUM = "/etc/yum.repos.d/gpunode-nvidia-container-toolkit.repo"
RPM_KEY = "/etc/pki/rpm-gpg/RPM-GPG-KEY-gpunode-nvidia-container-toolkit"
DOCKER_MEMORY = "/var/lib/gpunode/docker"
BEFORE = f"{MEMORY}/packages-before"
ENV = "/etc/gpunode/container.env"
ENV_FOLDER = ENV.rpartition("/")[0]
REFRESH_FOLDER = "/etc/nvidia-container-toolkit"
BASE = "nvidia-container-toolkit-base"
LOCK_MARK = f"gpunode (role {ROLE})"
SINCE_UNIT = Version("1.18")
"""The unit that updates the CDI specification, and drop-ins of containerd, exist since this version."""
RELEASES = {
    "libnvidia-container": "release o=*nvidia.github.io/libnvidia-container/*",
    "cuda": "release o=NVIDIA, l=NVIDIA CUDA",
}
"""Two repositories have the toolkit, in versions of their own: the one not chosen must not win by its priority."""
LOOK = Look(
    paths=(
        SOURCES,
        PREFERENCES,
        YUM,
        ENV,
        MEMORY,
        DOCKER_MEMORY,
        REFRESH_FOLDER,
        ENV_FOLDER,
        *DAEMON_LOOK.paths,
        *CONTAINERD_LOOK.paths,
    ),
    contents=(KEY, RPM_KEY, BEFORE, REFRESH_ENV, *DAEMON_LOOK.contents, *CONTAINERD_LOOK.contents),
)
LATE = "--gpus, which Docker offers where it finds the toolkit at its start"


@dataclass(frozen=True, slots=True)
class Engines:
    """The container engines of a node that use the toolkit."""

    docker: InstalledEngine
    docker_support: EngineSupport
    podman: EngineSupport
    containerd: EngineSupport | None
    """None: containerd only serves Docker."""

    @property
    def old_cdi(self) -> bool:
        """Return whether one of them cannot read CDI 0.7.0."""
        engines = {"Docker": self.docker_support, "Podman": self.podman}
        if self.containerd is not None:
            engines["containerd"] = self.containerd
        return bool(engines_before_cdi_07(engines))


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role."""
    if state.manager is None:
        return no_package_manager(ROLE)
    stack = of_context(state.facts, context).stack
    planned = stack.container_toolkit if stack is not None else None
    row = {"version": planned.version, "packages": planned.packages} if planned is not None else None
    request = toolkit_request(str(settings["version"]), state.installed, row)
    if settings["state"] == "absent":
        return _absent(state, settings, context, request)
    if request.version is None:
        reason = "no stack is resolved for this node"
        if stack is not None:
            why = stack.reasons.get("container_toolkit")
            reason = why.text if why is not None else "the stack has none"
        note = f"no container toolkit: {reason}; {ROLE}_version: VERSION installs NVIDIA's nevertheless"
        return Manifest(role=ROLE, notes=() if settings["version"] == "none" else (note,))
    if settings["env"] and settings["env"] not in WORKLOADS:
        return Manifest(
            role=ROLE, refusals=(f"{ROLE}_env: {settings['env']} is not a workload ({', '.join(WORKLOADS)})",)
        )
    return _present(state, settings, context, request)


def _present(state: NodeState, settings: Mapping[str, Any], context: Context, request: ToolkitRequest) -> Manifest:
    docker = docker_of(state)
    by_cuda = settings["repository"] == "cuda"
    archive = ArchiveFiles() if by_cuda else archive_files(_archive(state, settings, request), state, context)
    if archive.questions:
        return Manifest(role=ROLE, questions=dict(archive.questions))
    engines = engines_of(state, settings, context)
    busy = bool(context.settings_of("preflight")["gpunode_allow_busy"])
    change = DaemonChange(MergedDaemon())
    if engines.docker.package is not None:
        change = _daemon(state, settings, docker, engines, busy)
    has_unit = _number(request.version) >= SINCE_UNIT
    refresh = refresh_environment(state.contents.get(REFRESH_ENV), engines.old_cdi)
    containerd = ContainerdChange()
    if engines.containerd is not None:
        containerd = containerd_change(
            state,
            drop_in=has_unit,
            cdi=bool(settings["cdi"]) and engines.containerd.cdi in {"feature", "default"},
            default_runtime=bool(settings["default_runtime"]),
            busy_allowed=busy,
        )
    stale = stale_specifications(state.facts.cdi_specs, refresh.output) if has_unit else []
    reason = refresh_reason(state.facts, refresh.output) if has_unit else None
    there = BASE in context.planned.installed(state.installed)
    files = [*archive.files, *_apt_files(state, settings, request, by_cuda), *_kept(state, request), *change.files]
    environment = _environment(state, refresh, has_unit and (there or bool(refresh.text)))
    files += [*environment, *(ManagedFile(path=path, content=None, phase="after") for path in stale)]
    files += [
        *containerd.files,
        _container_env(state, settings["env"], context.settings_of("preflight")["gpunode_profile"]),
    ]
    units = (
        UnitState(name="nvidia-cdi-refresh.path", enabled=True, state="started"),
        UnitState(name="nvidia-cdi-refresh.service", enabled=True),
    )
    restarts = {"docker.service": "; ".join(change.restart_reasons)} if change.restart_notes else {}
    return Manifest(
        role=ROLE,
        files=tuple(files),
        folders=(ManagedFolder(path=MEMORY),),
        packages=_packages(state, settings, request, (*archive.files, *_apt_files(state, settings, request, by_cuda))),
        units=units if has_unit and there else (),
        refusals=(*archive.refusals, *change.refusals),
        notes=change.restart_notes,
        restarts={**restarts, **containerd.restarts},
        due_reasons=(*change.due_reasons, *containerd.due_reasons, *([reason] if reason else ())),
        values={
            **change.values,
            "state": "present",
            "containerd": containerd.values,
            "can_refresh": has_unit and can_refresh(state),
            "refresh": bool(reason or stale or _differs(state, environment)),
            "refresh_reason": reason,
        },
    )


def engines_of(state: NodeState, settings: Mapping[str, Any], context: Context) -> Engines:
    """Return the engines that use the toolkit on this node."""
    # In check mode what the previous roles would have installed.
    installed = context.planned.installed(state.installed)
    docker = installed_engine(installed)
    # If one program does not print its version, all are unknown: then the packages' versions are used.
    tools: Mapping[str, str | None] = state.facts.tool_versions or {
        name: installed[package]
        for package, name in (("containerd", "containerd"), ("containerd.io", "containerd"), ("podman", "podman"))
        if package in installed
    }
    uses = str(settings["containerd"]).lower()
    others = {"kubelet", "cri-tools", "nerdctl"} & state.installed.keys()
    used = uses == "true" or (uses == "auto" and "containerd" in tools and (docker.package is None or bool(others)))
    return Engines(
        docker=docker,
        docker_support=engine_support(docker.version),
        podman=engine_support(tools.get("podman"), "podman"),
        containerd=engine_support(tools.get("containerd"), "containerd") if used else None,
    )


def can_refresh(state: NodeState) -> bool:
    """Return whether the unit can describe the GPUs now.

    With a loaded module of another release the driver cannot be queried; the unit runs at the boot that is required.
    """
    node, version = state.facts, state.installed.get(BASE)
    if node.loaded_driver is None or node.driver_library_version not in (None, node.loaded_driver.version):
        return False
    return version is not None and _number(version.rpartition("-")[0] or version) >= SINCE_UNIT


def _number(version: str | None) -> Version:
    try:
        return Version(version or "0")
    except InvalidVersion:
        return Version("0")


def _daemon(
    state: NodeState, settings: Mapping[str, Any], docker: DockerState, engines: Engines, busy: bool
) -> DaemonChange:
    text = state.contents.get(KEPT) or state.contents.get(DAEMON)
    try:
        present = read_document(text)
    except ValueError:
        present = {}
    keys = toolkit_daemon(
        engines.docker_support,
        bool(settings["cdi"]),
        bool(settings["default_runtime"]),
        docker.info.cgroup_driver if docker.info else None,
        present,
    )
    late = docker.hook_changed is not None and docker.started is not None and docker.hook_changed > docker.started
    return daemon_change(state, docker, engines.docker, ROLE, keys, also=[LATE] if late else [], allow_busy=busy)


def _archive(state: NodeState, settings: Mapping[str, Any], request: ToolkitRequest) -> Archive:
    base, own = settings["url"] or request.repository, settings["key"]
    by_apt = state.apt is not None
    architecture = state.apt.architecture if state.apt is not None else "$basearch"
    return Archive(
        role=ROLE,
        purpose="NVIDIA's container toolkit",
        file=SOURCES if by_apt else YUM,
        key_file=KEY if by_apt else RPM_KEY,
        uri=f"{base}/stable/{'deb' if by_apt else 'rpm'}/{architecture}",
        key=own or request.key,
        fingerprints=() if own else request.fingerprints,
        # NVIDIA signs the metadata of this repository, not its rpm packages.
        signed_packages=False,
    )


def _apt_files(
    state: NodeState, settings: Mapping[str, Any], request: ToolkitRequest, by_cuda: bool
) -> list[ManagedFile]:
    """Return pins, and sources to remove, also those of nvidia-docker2: their archives are gone, which stops apt."""
    if state.apt is None:
        gone = [YUM, RPM_KEY] if by_cuda else []
        return [ManagedFile(path=path, content=None) for path in gone]
    old = old_toolkit_files([row.model_dump() for row in state.apt.sources])
    gone = [*old, *([SOURCES, KEY] if by_cuda else [])]
    return [
        *(ManagedFile(path=path, content=None) for path in gone),
        ManagedFile(
            path=PREFERENCES, content=preferences(request.packages, request.version or "", settings["repository"])
        ),
    ]


def preferences(packages: tuple[str, ...], version: str, repository: str) -> str:
    """Return pins that bind the packages to one version and exclude every other version of the other repository."""
    names = " ".join(packages)
    text = (
        f"# Managed by gpunode (role {ROLE}): all packages of the toolkit come in this one version.\n"
        f"Package: {names}\nPin: version {version}-*\nPin-Priority: 1001\n"
    )
    for other, release in RELEASES.items():
        if other != repository:
            text += (
                f"\n# No other version comes from {other}: {repository} is the repository of the toolkit.\n"
                f"Package: {names}\nPin: {release}\nPin-Priority: -1\n"
            )
    return text


def _packages(
    state: NodeState, settings: Mapping[str, Any], request: ToolkitRequest, files: tuple[ManagedFile, ...]
) -> AptChange | DnfChange:
    wants = tuple(f"{name}={request.version}-*" for name in request.packages)
    old = tuple(name for name in request.replaces if name in state.installed)
    wait = int(settings["lock_wait_s"])
    if state.apt is None:
        return DnfChange(
            install=(*wants, *plugin(state.dnf)),
            remove=old,
            hold=request.packages,
            lock_mark=LOCK_MARK,
            memory=BEFORE,
            lock_wait_s=wait,
        )
    return AptChange(
        install=wants,
        purge=old,
        hold=request.packages,
        memory=BEFORE,
        files={file.path: file.content or "" for file in files},
        lock_wait_s=wait,
    )


def _kept(state: NodeState, request: ToolkitRequest) -> list[ManagedFile]:
    """Return a copy of daemon.json, a file of the package nvidia-docker2: purging removes the file with every key in
    it.
    """
    text = state.contents.get(DAEMON)
    old = [name for name in request.replaces if name in state.installed]
    if not old or text is None or state.contents.get(KEPT) is not None:
        return []
    return [ManagedFile(path=KEPT, content=text, mode="0600", private=True)]


def _environment(state: NodeState, refresh: RefreshEnvironment, wants: bool) -> list[ManagedFile]:
    if not wants or (state.contents.get(REFRESH_ENV) is None and not refresh.text):
        return []
    return [ManagedFile(path=REFRESH_ENV, content=refresh.text, phase="after")]


def _differs(state: NodeState, files: list[ManagedFile]) -> bool:
    return any(state.contents.get(file.path) != file.content for file in files)


def _container_env(state: NodeState, workload: Workload | Literal[""], profile: Profile) -> ManagedFile:
    """Return the environment file for starting a container of the workload."""
    if not workload:
        return ManagedFile(path=ENV, content=None, phase="after")
    return ManagedFile(path=ENV, content=env_file(tune(state.facts, workload, profile=profile)), phase="after")


def _absent(state: NodeState, settings: Mapping[str, Any], context: Context, request: ToolkitRequest) -> Manifest:
    docker, engine = docker_of(state), installed_engine(state.installed)
    busy = bool(context.settings_of("preflight")["gpunode_allow_busy"])
    change = daemon_change(state, docker, engine, ROLE, {}, allow_busy=busy)
    containerd = containerd_restored(state, busy)
    serves = engine.package is not None and context.settings_of("docker")["state"] == "present"
    packages: AptChange | DnfChange | None = None
    leaving: list[str] = []
    gone = [SOURCES, KEY, PREFERENCES, YUM, RPM_KEY, ENV, BEFORE]
    environment = state.contents.get(REFRESH_ENV)
    refresh = refresh_environment(environment, False)
    own = () if environment is None else (ManagedFile(path=REFRESH_ENV, content=refresh.text or None),)
    if state.contents.get(BEFORE) is not None:
        packages, leaving = departures(
            state, request.packages, memory=BEFORE, lock_wait_s=int(settings["lock_wait_s"]), lock_mark=LOCK_MARK
        )
        # The unit that updated it is removed: it would not follow the next driver. One in another folder, or an
        # unreadable one, is not among the facts.
        gone.append(refresh.output)
    return Manifest(
        role=ROLE,
        files=(
            *(file.model_copy(update={"phase": "before"}) for file in (*change.files, *containerd.files)),
            *own,
            *(ManagedFile(path=path, content=None, phase="after", private=path in {KEY, RPM_KEY}) for path in gone),
        ),
        # The memory of daemon.json is next to that of the role docker; its folder may be the last to be removed.
        folders=tuple(
            ManagedFolder(path=path, state="absent_if_empty", phase="after")
            for path in (MEMORY, DOCKER_MEMORY, REFRESH_FOLDER, ENV_FOLDER)
        ),
        packages=packages,
        refusals=change.refusals,
        notes=change.restart_notes if serves else (),
        restarts=containerd.restarts,
        due_reasons=(*leaving, *containerd.due_reasons, *(change.due_reasons if serves else ())),
        values={
            **change.values,
            "state": "absent",
            "restart": change.restart and serves,
            "reload": change.reload and serves,
            "containerd": containerd.values,
        },
    )


__all__ = ["LOOK", "MARKER", "plan"]
