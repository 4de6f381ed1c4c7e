"""A change of daemon.json by one of the roles that write it: files, and the reload or restart of the running daemon."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from gpunode.provisioning.answers import DockerState
from gpunode.provisioning.daemon_json import (
    DaemonMemory,
    Document,
    MergedDaemon,
    merge_daemon,
    read_document,
    read_memory,
)
from gpunode.provisioning.engines import InstalledEngine, restart_obstacles, unknown_options
from gpunode.provisioning.manifest import USER_IN_URL, ManagedFile, UnitState
from gpunode.provisioning.state import Look, NodeState

DAEMON = "/etc/docker/daemon.json"
BEFORE = "/etc/docker/daemon.json.before-gpunode"
KEPT = "/etc/docker/daemon.json.kept"
"""A copy of the file while the package nvidia-docker2, which owns it, is purged: purging removes it."""
MEMORY = "/var/lib/gpunode/docker/daemon-{}.json"
RESTART = "/run/gpunode/docker-restart"
"""If newer than the daemon's process, a restart is pending. Removed by the next boot, which makes it unnecessary."""
RELOAD = "/run/gpunode/docker-reload"
UNIT = "docker.service"
LIVE = ("docker", "info", "--format", "{{.LiveRestoreEnabled}}")
"""Command that prints whether live-restore is active: the daemon applies a reload later than systemd reports it."""
OWNERS = ("docker", "nvidia_container_toolkit")
VALIDATES = Version("23")
"""From this version on dockerd validates a file itself."""
VALIDATION = ("dockerd", "--validate", "--config-file=%s")
LOOK = Look(
    paths=(BEFORE,),
    contents=(DAEMON, KEPT, RESTART, RELOAD, *(MEMORY.format(owner) for owner in OWNERS)),
)


@dataclass(frozen=True, slots=True)
class DaemonChange:
    """A role's change of daemon.json and of the daemon."""

    merged: MergedDaemon
    files: tuple[ManagedFile, ...] = ()
    marks: tuple[ManagedFile, ...] = ()
    reload: bool = False
    restart_reasons: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()
    live_restore_first: bool = False
    """The reload enables live-restore, which has to be active before the restart."""
    refusals: tuple[str, ...] = ()

    @property
    def units(self) -> tuple[UnitState, ...]:
        """Return the daemon to be reloaded, and restarted if no obstacle exists."""
        units = []
        if self.reload:
            units.append(UnitState(name=UNIT, state="reloaded", mark=RELOAD))
        if self.restart_reasons and not self.obstacles:
            # Without live-restore in force a restart ends the containers.
            ready = LIVE if self.live_restore_first else ()
            reason = "; ".join(self.restart_reasons)
            units.append(UnitState(name=UNIT, state="restarted", reason=reason, ready=ready, mark=RESTART))
        return tuple(units)

    @property
    def deferred(self) -> dict[str, str]:
        """Return the daemon with the reasons of its restart if that is deferred."""
        return {UNIT: "; ".join(self.restart_reasons)} if self.restart_reasons and self.obstacles else {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return why a pending restart is deferred."""
        why = "; ".join(self.obstacles)
        return tuple(
            f"Docker was not restarted: {why}. A restart is pending: {reasons}" for reasons in self.deferred.values()
        )


def daemon_change(  # noqa: PLR0913
    state: NodeState,
    docker: DockerState,
    engine: InstalledEngine,
    owner: str,
    values: Document,
    *,
    also: Iterable[str] = (),
    allow_busy: bool = False,
) -> DaemonChange:
    """Return the change that merges ``values`` of ``owner`` into daemon.json.

    ``engine`` is the one that reads the file: installed, or planned in check mode. ``also`` are further reasons for a
    restart. Empty ``values`` restore what was there before.
    """
    path = KEPT if state.contents.get(KEPT) is not None else DAEMON
    text = state.contents.get(path)
    memory_file = MEMORY.format(owner)
    memories = {}
    for each in OWNERS:
        try:
            memories[each] = read_memory(state.contents.get(MEMORY.format(each)))
        except ValueError as err:
            return DaemonChange(MergedDaemon(), refusals=(f"{MEMORY.format(each)}: {err}: remove the file",))
    other = next(each for each in OWNERS if each != owner)
    merged = merge_daemon(text, values, memories[owner], memories[other])
    if merged.problem is not None:
        problem = f"{DAEMON}: {merged.problem}: repair it or move it, then run this again"
        return DaemonChange(merged, refusals=(problem,))
    validates = Version(engine.version or "0") >= VALIDATES
    unknown = unknown_options(values, docker.options) if merged.changed and not validates and docker.options else []
    if unknown:
        problem = f"Docker {engine.version} does not support {', '.join(unknown)} in {DAEMON}"
        return DaemonChange(merged, refusals=(problem,))
    runs = docker.started is not None
    to_reload = [key for key in merged.keys if key not in merged.restart] if runs else []
    reasons = [*_held_back(state, docker), *also]
    if runs and merged.restart:
        reasons.append(f"daemon.json: {', '.join(merged.restart)}")
    if runs and docker.info and engine.version and not docker.info.version.startswith(engine.version):
        reasons.append(f"Docker {engine.version} is installed, {docker.info.version} runs")
    reload = bool(to_reload) or (runs and state.contents.get(RELOAD) is not None)
    obstacles, switched_on = _obstacles(state, docker, merged, reload, allow_busy)
    # The copy from before the purge of nvidia-docker2 is removed once daemon.json exists again.
    kept = (ManagedFile(path=KEPT, content=None, phase="after", private=True),) if path == KEPT else ()
    return DaemonChange(
        merged,
        # In check mode the engine may only be planned: then dockerd cannot be queried.
        files=(*_files(state, merged, path, memory_file, validates and bool(docker.options)), *kept),
        marks=_marks(merged, to_reload, reasons, runs),
        reload=reload,
        restart_reasons=tuple(dict.fromkeys(reasons)) if runs else (),
        obstacles=obstacles,
        live_restore_first=switched_on,
    )


def daemon_memory(state: NodeState, owner: str) -> DaemonMemory | None:
    """Return the memory of an owner's earlier merge; None if it cannot be read, which ``daemon_change`` refuses."""
    try:
        return read_memory(state.contents.get(MEMORY.format(owner)))
    except ValueError:
        return None


def _held_back(state: NodeState, docker: DockerState) -> list[str]:
    """Return the reasons of a restart that an earlier run left pending, without those that were made since."""
    marker = state.files.get(RESTART)
    if docker.started is None or marker is None or marker.mtime is None or marker.mtime <= docker.started:
        return []
    return [reason for reason in (state.contents.get(RESTART) or "").strip().split("; ") if reason]


def _obstacles(
    state: NodeState, docker: DockerState, merged: MergedDaemon, reload: bool, allow_busy: bool
) -> tuple[tuple[str, ...], bool]:
    """Return (why a restart would interrupt something, whether live-restore has to be active first)."""
    info = docker.info
    live_restore = bool(info and info.live_restore)
    switched_on = False
    if reload and not live_restore and info is not None:
        try:
            switched_on = live_restore = read_document(merged.text).get("live-restore") is True
        except ValueError:
            switched_on = False
    if allow_busy:
        return (), switched_on
    silent = ("dockerd does not answer, so its containers are unknown",) if docker.silent else ()
    running = info.running if info else 0
    return (*silent, *restart_obstacles(running, live_restore, state.facts, merged.text)), switched_on and running > 0


def _marks(merged: MergedDaemon, to_reload: list[str], reasons: list[str], runs: bool) -> tuple[ManagedFile, ...]:
    files = []
    if to_reload:
        files.append(ManagedFile(path=RELOAD, content="".join(f"{key}\n" for key in to_reload)))
    if runs and merged.restart:
        files.append(ManagedFile(path=RESTART, content="; ".join(dict.fromkeys(reasons)) + "\n"))
    return tuple(files)


def _files(
    state: NodeState, merged: MergedDaemon, path: str, memory_file: str, validates: bool
) -> tuple[ManagedFile, ...]:
    """Return the files, the memory before daemon.json: a value without memory would have no owner."""
    memory = ManagedFile(
        path=memory_file,
        content=None if merged.memory is None else merged.memory.text,
        mode="0600",
        phase="after",
        private=True,
    )
    if not merged.changed and path == DAEMON:
        return (memory,)
    # An existing file keeps its owner and mode: the address of a proxy may contain a password.
    attributes = state.attributes(path)
    first = state.contents.get(path)
    copies = []
    remembered = any(state.contents.get(MEMORY.format(owner)) is not None for owner in OWNERS)
    if first is not None and not remembered and merged.changed and not state.exists(BEFORE):
        copies.append(ManagedFile(path=BEFORE, content=first, phase="after", private=True, **attributes))
    if USER_IN_URL.search(memory.content or ""):
        attributes["mode"] = "0600"
    daemon = ManagedFile(
        path=DAEMON,
        content=merged.text,
        phase="after",
        validate_with=VALIDATION if validates else None,
        expect_sha256=state.files[DAEMON].sha256 if state.kind(DAEMON) == "file" else "absent",
        **attributes,
    )
    return (*copies, memory, daemon) if merged.memory is not None else (*copies, daemon, memory)
