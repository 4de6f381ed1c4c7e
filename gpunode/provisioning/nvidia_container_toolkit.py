"""The role nvidia_container_toolkit: four packages in one version, the engines' runtime, one CDI specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from packaging.version import InvalidVersion, Version
from pydantic import BeforeValidator

from gpunode.provisioning.answers import DockerState, docker_of
from gpunode.provisioning.containerd import LOOK as CONTAINERD_LOOK
from gpunode.provisioning.containerd import ContainerdChange, containerd_change, containerd_restored
from gpunode.provisioning.context import Context
from gpunode.provisioning.daemon_json import MergedDaemon, read_document
from gpunode.provisioning.docker_daemon import DAEMON, KEPT, DaemonChange, daemon_change
from gpunode.provisioning.docker_daemon import LOOK as DAEMON_LOOK
from gpunode.provisioning.engines import (
    EngineSupport,
    InstalledEngine,
    engine_support,
    engines_before_cdi_07,
    installed_engine,
)
from gpunode.provisioning.kubernetes_node import uses_containerd
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, UnitState
from gpunode.provisioning.node_stack import of_context
from gpunode.provisioning.repository import (
    PackageRepository,
    RepositoryFiles,
    old_toolkit_files,
    repository_files,
    repository_paths,
)
from gpunode.provisioning.role import PackageSettings, Role, Texts, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.toolkit import (
    REFRESH_ENV,
    RefreshEnvironment,
    ToolkitRequest,
    refresh_environment,
    refresh_reason,
    stale_specifications,
    toolkit_daemon,
    toolkit_request,
)
from gpunode.tuning import WORKLOADS, Profile, Workload, env_file, tune

SOURCES, KEY, YUM, RPM_KEY = repository_paths("nvidia-container-toolkit")
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-container-toolkit.pref"
ENV = "/etc/gpunode/container.env"
BASE = "nvidia-container-toolkit-base"
REFRESH = "nvidia-cdi-refresh"
SINCE_UNIT = Version("1.18")
"""The unit that updates the CDI specification, and drop-ins of containerd, exist since this version."""
RELEASES = {
    "libnvidia-container": "release o=*nvidia.github.io/libnvidia-container/*",
    "cuda": "release o=NVIDIA, l=NVIDIA CUDA",
}
"""Two repositories have the toolkit, in versions of their own: the one not chosen must not win by its priority."""
LATE = "--gpus, which Docker offers where it finds the toolkit at its start"


class NvidiaContainerToolkitSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): the toolkit is installed, registered and held. V(absent): everything that this role deployed is "
        "removed.",
    )
    repository: Literal["libnvidia-container", "cuda"] = option(
        "libnvidia-container",
        "Which of the two repositories that have the toolkit: V(libnvidia-container) (its own; it has every version) "
        "or V(cuda) (NVIDIA's CUDA repository, which the role nvidia_repository then keeps on the node with any driver "
        "source). The other one gets a negative priority for the toolkit's packages.",
    )
    url: str = option(
        "", "The toolkit's repository or a mirror of it, up to C(libnvidia-container). Empty: NVIDIA's own."
    )
    key: str = option(
        "",
        "The repository's key, armored: a file on the controller, or a URL that the node can reach. Empty: NVIDIA's "
        "own.",
    )
    version: str = option(
        "keep",
        "V(keep): the installed version where all packages carry it, else the stack's; V(stack): the stack's; "
        "V(none): no toolkit is installed and an installed one is not changed; or an exact version such as V(1.20.0).",
    )
    cdi: bool = option(True, "Use CDI if the engine supports it.")
    default_runtime: bool = option(False, "Make nvidia the default runtime of containers.")
    containerd: Annotated[Literal["auto", "true", "false"], BeforeValidator(lambda value: str(value).lower())] = option(
        "auto",
        "Register the runtime with containerd: V(true), V(false), or V(auto): if containerd is used by more than "
        "Docker.",
    )
    env: str = option(
        "pytorch", "Workload that C(/etc/gpunode/container.env) is made for, such as pytorch. Empty: no such file."
    )


ROLE = Role(
    name="nvidia_container_toolkit",
    title="Make GPUs available to containers by CDI or the runtime's hook, depending on the engine",
    about=(
        "Installs the four packages of NVIDIA's container toolkit in one version, holds them, registers the runtime, "
        "and keeps one CDI specification.",
        "Removes everything with O(nvidia_container_toolkit_state=absent).",
    ),
    settings=NvidiaContainerToolkitSettings,
    for_gpus=True,
    for_images=True,
    reads=("engine", "engines", "gpus", "topology"),
    files=(SOURCES, KEY, PREFERENCES, YUM, RPM_KEY, ENV),
    # The memory of daemon.json is next to that of the role docker; its folder may be the last to be removed.
    folders=("/var/lib/gpunode/docker", "/etc/nvidia-container-toolkit", "/etc/gpunode"),
    packages=("nvidia-container-toolkit*", "libnvidia-container*"),
    locks=True,
    restart_mark="/run/gpunode/nvidia-cdi-refresh",
    more=Look(
        paths=(*DAEMON_LOOK.paths, *CONTAINERD_LOOK.paths),
        contents=(KEY, RPM_KEY, REFRESH_ENV, *DAEMON_LOOK.contents, *CONTAINERD_LOOK.contents),
    ),
)


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


@ROLE.present
def present(state: NodeState, settings: NvidiaContainerToolkitSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    stack = of_context(state.facts, context).stack
    request = toolkit_request(settings.version, state.installed, stack.container_toolkit if stack is not None else None)
    if request.version is None:
        text = "no stack is resolved for this node"
        if stack is not None:
            why = stack.reasons.get("container_toolkit")
            text = why.text if why is not None else "the stack has none"
        note = f"no container toolkit: {text}; {ROLE.name}_version: VERSION installs NVIDIA's nevertheless"
        return Manifest(role=ROLE.name, notes=() if settings.version == "none" else (note,))
    workload = next((name for name in WORKLOADS if name == settings.env), None)
    if settings.env and workload is None:
        problem = f"{ROLE.name}_env: {settings.env} is not a workload ({', '.join(WORKLOADS)})"
        return Manifest(role=ROLE.name, refusals=(problem,))
    docker = docker_of(state)
    by_cuda = settings.repository == "cuda"
    archive = RepositoryFiles() if by_cuda else repository_files(_archive(state, settings, request), state, context)
    if archive.questions:
        return Manifest(role=ROLE.name, questions=dict(archive.questions))
    engines = engines_of(state, settings, context)
    change = DaemonChange(MergedDaemon())
    if engines.docker.package is not None:
        change = _daemon(state, settings, docker, engines, context.allow_busy)
    has_unit = _number(request.version) >= SINCE_UNIT
    refresh = refresh_environment(state.contents.get(REFRESH_ENV), engines.old_cdi)
    containerd = ContainerdChange()
    if engines.containerd is not None:
        containerd = containerd_change(
            state,
            drop_in=has_unit,
            cdi=settings.cdi and engines.containerd.cdi in {"feature", "default"},
            default_runtime=settings.default_runtime,
            busy_allowed=context.allow_busy,
        )
    stale = stale_specifications(state.facts.cdi_specs, refresh.output) if has_unit else []
    reason = refresh_reason(state.facts, refresh.output) if has_unit else None
    installed = BASE in context.planned.installed(state.installed)
    sources = (*archive.files, *_apt_files(state, settings, request, by_cuda, ROLE.texts(context)))
    environment = _environment(state, refresh, has_unit and (installed or bool(refresh.text)))
    units: tuple[UnitState, ...] = ()
    if has_unit and installed:
        new = state.contents.get(str(ROLE.restart_mark)) is not None
        differs = any(state.contents.get(file.path) != file.content for file in environment)
        rewrites = can_refresh(state) and bool(reason or stale or new or differs)
        units = (
            UnitState(name=f"{REFRESH}.path", enabled=True, state="started"),
            UnitState(
                name=f"{REFRESH}.service", enabled=True, state="restarted" if rewrites else None, mark=ROLE.restart_mark
            ),
        )
    old = tuple(name for name in request.replaces if name in state.installed)
    return Manifest(
        role=ROLE.name,
        files=(
            *sources,
            *_kept(state, old),
            *change.files,
            *environment,
            *(ManagedFile(path=path, content=None, phase="after") for path in stale),
            *containerd.files,
            _container_env(state, workload, context.settings_of("preflight")["gpunode_profile"]),
        ),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(
            state,
            settings,
            (f"{name}={request.version}-*" for name in request.packages),
            remove=old,
            hold=request.packages,
            files={file.path: file.content or "" for file in sources},
        ),
        commands=containerd.commands,
        units=(*units, *change.units, *containerd.units),
        marks=(*change.marks, *containerd.marks),
        restart_mark=ROLE.restart_mark,
        refusals=(*archive.refusals, *change.refusals),
        notes=change.notes,
        restarts={**change.deferred, **containerd.deferred},
        pending_reasons=(*containerd.pending_reasons, *([reason] if reason else ())),
        problems=(f"{REFRESH}.service has run, and {reason}: see journalctl -u {REFRESH}.service",) if reason else (),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with the engines' configuration as it was."""
    change = daemon_change(
        state, docker_of(state), installed_engine(state.installed), ROLE.name, {}, allow_busy=context.allow_busy
    )
    containerd = containerd_restored(state, context.allow_busy)
    engine = installed_engine(state.installed)
    serves = engine.package is not None and context.settings_of("docker")["state"] == "present"
    environment = state.contents.get(REFRESH_ENV)
    refresh = refresh_environment(environment, False)
    # The packages are removed between the files and the restarts: a run that fails there leaves these to the next.
    restored = [*(change.marks if serves else ()), *containerd.marks]
    restored += [file.model_copy(update={"phase": "before"}) for file in (*change.files, *containerd.files)]
    if environment is not None:
        restored.append(ManagedFile(path=REFRESH_ENV, content=refresh.text or None))
    # The unit that updated it is removed: it would not follow the next driver. One in another folder, or an
    # unreadable one, is not among the facts.
    installed = state.contents.get(ROLE.record) is not None
    stale = (ManagedFile(path=refresh.output, content=None, phase="after"),) if installed else ()
    more = {
        "files": (*restored, *manifest.files, *stale),
        "units": (*(change.units if serves else ()), *containerd.units),
        "refusals": change.refusals,
        "notes": change.notes if serves else (),
        "restarts": containerd.deferred,
    }
    return manifest.updated(**more)


def engines_of(state: NodeState, settings: NvidiaContainerToolkitSettings, context: Context) -> Engines:
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
    uses = settings.containerd
    others = {"kubelet", "cri-tools", "nerdctl"} & state.installed.keys()
    kubelet = bool(others) or uses_containerd(context)
    used = uses == "true" or (uses == "auto" and "containerd" in tools and (docker.package is None or kubelet))
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
    state: NodeState, settings: NvidiaContainerToolkitSettings, docker: DockerState, engines: Engines, busy: bool
) -> DaemonChange:
    text = state.contents.get(KEPT) or state.contents.get(DAEMON)
    try:
        present = read_document(text)
    except ValueError:
        present = {}
    keys = toolkit_daemon(
        engines.docker_support,
        settings.cdi,
        settings.default_runtime,
        docker.info.cgroup_driver if docker.info else None,
        present,
    )
    late = docker.hook_changed is not None and docker.started is not None and docker.hook_changed > docker.started
    return daemon_change(state, docker, engines.docker, ROLE.name, keys, also=[LATE] if late else [], allow_busy=busy)


def _archive(state: NodeState, settings: NvidiaContainerToolkitSettings, request: ToolkitRequest) -> PackageRepository:
    base, site_key = settings.url or request.repository, settings.key
    folder = f"deb/{state.apt.architecture}" if state.apt is not None else "rpm/$basearch"
    return PackageRepository(
        role=ROLE.name,
        purpose="NVIDIA's container toolkit",
        name="nvidia-container-toolkit",
        uri=f"{base}/stable/{folder}",
        key=site_key or request.key,
        fingerprints=() if site_key else request.fingerprints,
        # NVIDIA signs the metadata of this repository, not its rpm packages.
        signed_packages=False,
    )


def _apt_files(
    state: NodeState,
    settings: NvidiaContainerToolkitSettings,
    request: ToolkitRequest,
    by_cuda: bool,
    text: Texts,
) -> list[ManagedFile]:
    """Return pins, and sources to remove, also those of nvidia-docker2: their archives are gone, which stops apt."""
    if state.apt is None:
        gone = [YUM, RPM_KEY] if by_cuda else []
        return [ManagedFile(path=path, content=None) for path in gone]
    old = old_toolkit_files(state.apt.sources)
    gone = [*old, *([SOURCES, KEY] if by_cuda else [])]
    return [
        *(ManagedFile(path=path, content=None) for path in gone),
        ManagedFile(
            path=PREFERENCES, content=preferences(request.packages, request.version or "", settings.repository, text)
        ),
    ]


def preferences(packages: tuple[str, ...], version: str, repository: str, text: Texts) -> str:
    """Return pins that bind the packages to one version and exclude every other version of the other repository."""
    others = {name: release for name, release in RELEASES.items() if name != repository}
    return text("apt.pref.j2", packages=packages, version=version, repository=repository, others=others)


def _kept(state: NodeState, old: tuple[str, ...]) -> list[ManagedFile]:
    """Return a copy of daemon.json, a file of the package nvidia-docker2: purging removes the file with every key in
    it.
    """
    text = state.contents.get(DAEMON)
    if not old or text is None or state.contents.get(KEPT) is not None:
        return []
    return [ManagedFile(path=KEPT, content=text, mode="0600", private=True)]


def _environment(state: NodeState, refresh: RefreshEnvironment, wants: bool) -> list[ManagedFile]:
    if not wants or (state.contents.get(REFRESH_ENV) is None and not refresh.text):
        return []
    return [ManagedFile(path=REFRESH_ENV, content=refresh.text, phase="after")]


def _container_env(state: NodeState, workload: Workload | None, profile: Profile) -> ManagedFile:
    """Return the environment file for starting a container of the workload."""
    if workload is None:
        return ManagedFile(path=ENV, content=None, phase="last")
    return ManagedFile(path=ENV, content=env_file(tune(state.facts, workload, profile=profile)), phase="last")
