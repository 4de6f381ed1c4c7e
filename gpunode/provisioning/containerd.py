"""The toolkit's runtime in containerd: the configuration for ``nvidia-ctk`` to write, and the original one."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

from gpunode.provisioning.engines import gpu_users
from gpunode.provisioning.manifest import ManagedFile
from gpunode.provisioning.state import FileState, Look, NodeState

CRI, CRI_VERSION = "io.containerd.grpc.v1.cri", 2
FOLDER = "/etc/containerd"
CONFIG = f"{FOLDER}/config.toml"
DROP_IN = f"{FOLDER}/conf.d/99-nvidia.toml"
BEFORE = "/var/lib/gpunode/nvidia_container_toolkit/containerd-before.toml"
SUMS = "/var/lib/gpunode/nvidia_container_toolkit/containerd.sha256"
MARKER = "/run/gpunode/containerd-restart"
"""A restart is due. The file is removed by the next boot, which makes the restart unnecessary."""
REASON = "the runtime nvidia was registered"
LOOK = Look(paths=(DROP_IN,), contents=(CONFIG, BEFORE, SUMS, MARKER))


@dataclass(frozen=True, slots=True)
class ContainerdChange:
    """A role's change of containerd."""

    files: tuple[ManagedFile, ...] = ()
    restarts: dict[str, str] = field(default_factory=dict)
    """containerd, if its restart is deferred."""
    due_reasons: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=lambda: {"register": False, "restart": False})
    """Read by the task file ``containerd.yml``."""


def containerd_change(
    state: NodeState, *, drop_in: bool, cdi: bool, default_runtime: bool, busy_allowed: bool
) -> ContainerdChange:
    """Return the registration of the runtime; ``drop_in``: the toolkit writes one."""
    command = ["nvidia-ctk", "runtime", "configure", "--runtime=containerd"]
    # The first toolkit with drop-ins writes them to a folder that nothing reads.
    command += [f"--drop-in-config={DROP_IN}"] if drop_in else []
    command += ["--cdi.enabled"] if cdi else []
    command += ["--set-as-default"] if default_runtime else []
    head = f"# {' '.join(command)}"
    text = state.contents.get(CONFIG)
    expected = containerd_config(text)
    sums = state.contents.get(SUMS) or ""
    as_left = head in sums.splitlines() and _recorded(sums, CONFIG) == _digest(state, CONFIG)
    as_left = as_left and (not drop_in or _recorded(sums, DROP_IN) == _digest(state, DROP_IN))
    register = not as_left or expected != text
    files = []
    if register:
        if state.contents.get(SUMS) is None and state.contents.get(BEFORE) is None and text is not None:
            files.append(ManagedFile(path=BEFORE, content=text, mode="0600", phase="after", private=True))
        if expected != text:
            files.append(
                ManagedFile(
                    path=CONFIG, content=expected, phase="after", private=True, **_attributes(state.files.get(CONFIG))
                )
            )
    due = [f"{CONFIG} or {DROP_IN} was changed after nvidia-ctk wrote it"] if register else []
    obstacles = [] if busy_allowed else gpu_users(state.facts)
    return _with_restart(state, register, obstacles, files, due, {"command": command, "head": head})


def containerd_restored(state: NodeState, busy_allowed: bool) -> ContainerdChange:
    """Return how to restore containerd's configuration.

    A file that was changed since stays: an import without a match has no effect.
    """
    sums = state.contents.get(SUMS)
    drop_in = state.files.get(DROP_IN)
    files = []
    if sums is not None and _recorded(sums, CONFIG) is not None and _recorded(sums, CONFIG) == _digest(state, CONFIG):
        before = state.contents.get(BEFORE)
        files.append(
            ManagedFile(path=CONFIG, content=before, private=True, **_attributes(state.files.get(CONFIG)))
            if before is not None
            else ManagedFile(path=CONFIG, content=None, private=True)
        )
    if sums is not None:
        files += [ManagedFile(path=path, content=None, private=True) for path in (DROP_IN, BEFORE, SUMS)]
    gone = sums is not None and drop_in is not None and drop_in.kind != "absent"
    return _with_restart(state, gone, [] if busy_allowed else gpu_users(state.facts), files, [], {})


def _with_restart(  # noqa: PLR0913, PLR0917
    state: NodeState,
    changes: bool,
    obstacles: list[str],
    files: list[ManagedFile],
    due: list[str],
    values: dict[str, Any],
) -> ContainerdChange:
    needed = changes or state.contents.get(MARKER) is not None
    restart = needed and not obstacles
    return ContainerdChange(
        files=tuple(files),
        restarts={"containerd.service": f"{REASON}; {'; '.join(obstacles)}"} if needed and obstacles else {},
        due_reasons=(*due, *(["containerd has to be restarted"] if restart else [])),
        values={"register": bool(values) and changes, "restart": restart, "needed": needed, **values},
    )


def _recorded(sums: str, path: str) -> str | None:
    """Return the digest of a path from sha256sum's output; None if it is not listed."""
    found = re.search(rf"(?m)^([0-9a-f]{{64}}) [ *]{re.escape(path)}$", sums)
    return found[1] if found else None


def _digest(state: NodeState, path: str) -> str | None:
    there = state.files.get(path)
    return there.sha256 if there is not None and there.kind == "file" else None


def _attributes(there: FileState | None) -> dict[str, str]:
    """Return mode and owner for the file to keep: it may contain a registry's password."""
    if there is None or there.kind != "file" or not (there.mode and there.owner and there.group):
        return {}
    return {"mode": there.mode, "owner": there.owner, "group": there.group}


def containerd_config(text: str | None) -> str:
    """Return containerd's configuration with its default runtime in addition to the toolkit's; None: there is no file.

    containerd 1 defaults to runc only if its file names no runtime at all: with only the toolkit's, its plugin for
    Kubernetes does not start. Comments stay.
    """
    text = text or "version = 2\n"
    runc = f'\n[plugins."{CRI}".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
    try:
        document = tomllib.loads(text)
        settings = document.get("plugins", {}).get(CRI, {}).get("containerd", {})
        known = settings.get("default_runtime_name", "runc") != "runc" or "runc" in settings.get("runtimes", {})
        tomllib.loads(text + runc)
    except (ValueError, AttributeError):
        return text  # nvidia-ctk reports what is wrong with such a file
    return text if known or document.get("version") != CRI_VERSION else text + runc
