"""The toolkit's runtime in containerd: the configuration for ``nvidia-ctk`` to write, and the original one."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gpunode.provisioning.engines import gpu_users
from gpunode.provisioning.manifest import ManagedFile, NodeCommand, UnitState
from gpunode.provisioning.state import Look, NodeState

CRI, CRI_VERSION = "io.containerd.grpc.v1.cri", 2
FOLDER = "/etc/containerd"
CONFIG = f"{FOLDER}/config.toml"
DROP_IN = f"{FOLDER}/conf.d/99-nvidia.toml"
BEFORE = "/var/lib/gpunode/nvidia_container_toolkit/containerd-before.toml"
SUMS = "/var/lib/gpunode/nvidia_container_toolkit/containerd.sha256"
MARKER = "/run/gpunode/containerd-restart"
"""A restart is pending. The file is removed by the next boot, which makes the restart unnecessary."""
UNIT, REASON = "containerd.service", "the runtime nvidia was registered"
# Refuse a configuration that containerd cannot read. What it prints, also of an error, may hold a registry's password.
CHECKED = (
    "sh",
    "-c",
    "containerd config dump > /dev/null 2>&1"
    " || { echo 'containerd cannot read its configuration: run containerd config dump on the node' >&2; exit 1; }",
)
# sha256sum fails where one of the files is missing, and prints the sums of the others.
RECORDED = (
    "sh",
    "-c",
    '{ printf "%s\\n" "$1"; sha256sum "$2" "$3" 2> /dev/null; } > "$4.new"; mv "$4.new" "$4"',
    "sh",
)
_MARKS = (ManagedFile(path=MARKER, content=f"{REASON}\n"),)
LOOK = Look(paths=(DROP_IN,), contents=(CONFIG, BEFORE, SUMS, MARKER))


@dataclass(frozen=True, slots=True)
class ContainerdChange:
    """A role's change of containerd."""

    files: tuple[ManagedFile, ...] = ()
    commands: tuple[NodeCommand, ...] = ()
    units: tuple[UnitState, ...] = ()
    marks: tuple[ManagedFile, ...] = ()
    deferred: dict[str, str] = field(default_factory=dict)
    """containerd with the reason, if its restart is deferred."""
    pending_reasons: tuple[str, ...] = ()


def containerd_change(
    state: NodeState, *, drop_in: bool, cdi: bool, default_runtime: bool, busy_allowed: bool
) -> ContainerdChange:
    """Return the registration of the runtime; ``drop_in``: the toolkit writes one."""
    # It writes a drop-in and its import, in the format of the configuration that is there.
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
                ManagedFile(path=CONFIG, content=expected, phase="after", private=True, **state.attributes(CONFIG))
            )
    change = restarted(state, register, busy_allowed, REASON, files)
    if not register:
        return change
    record = NodeCommand(argv=(*RECORDED, head, CONFIG, DROP_IN, SUMS), changes=False)
    return replace(
        change,
        commands=(NodeCommand(argv=tuple(command)), NodeCommand(argv=CHECKED, changes=False), record),
        pending_reasons=(f"{CONFIG} or {DROP_IN} was changed after nvidia-ctk wrote it",),
    )


def containerd_restored(state: NodeState, busy_allowed: bool) -> ContainerdChange:
    """Return how to restore containerd's configuration.

    A file that was changed since stays: an import without a match has no effect.
    """
    sums = state.contents.get(SUMS)
    files = []
    if sums is not None and _recorded(sums, CONFIG) is not None and _recorded(sums, CONFIG) == _digest(state, CONFIG):
        before = state.contents.get(BEFORE)
        files.append(
            ManagedFile(path=CONFIG, content=before, private=True, **state.attributes(CONFIG))
            if before is not None
            else ManagedFile(path=CONFIG, content=None, private=True)
        )
    if sums is not None:
        files += [ManagedFile(path=path, content=None, private=True) for path in (DROP_IN, BEFORE, SUMS)]
    gone = sums is not None and state.exists(DROP_IN)
    return restarted(state, gone, busy_allowed, REASON, files)


def restarted(
    state: NodeState, changes: bool, busy_allowed: bool, reason: str, files: Iterable[ManagedFile] = ()
) -> ContainerdChange:
    """Return files with the restart of containerd that they require, deferred while processes use a GPU.

    ``changes``: they change now; a restart that an earlier run deferred is pending without that.
    """
    change = ContainerdChange(tuple(files), marks=_MARKS if changes else ())
    if not changes and state.contents.get(MARKER) is None:
        return change
    if obstacles := [] if busy_allowed else gpu_users(state.facts):
        return replace(change, deferred={UNIT: f"{reason}; {'; '.join(obstacles)}"})
    return replace(change, units=(UnitState(name=UNIT, state="restarted", reason=reason, mark=MARKER),))


def _recorded(sums: str, path: str) -> str | None:
    """Return the digest of a path from sha256sum's output; None if it is not listed."""
    match = re.search(rf"(?m)^([0-9a-f]{{64}}) [ *]{re.escape(path)}$", sums)
    return match[1] if match else None


def _digest(state: NodeState, path: str) -> str | None:
    return state.files[path].sha256 if state.kind(path) == "file" else None


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


def kubernetes_config(text: str | None, sandbox_image: str = "") -> tuple[str, str | None]:
    """Return containerd's configuration for kubelet, and why that is not possible; None: there is no file.

    The plugin for Kubernetes is on, runc uses systemd's cgroups as kubelet does, and pods use the site's sandbox image.
    Lines are changed in their place, so that comments stay. containerd 2 reads version 2 too.
    """
    text = text or "version = 2\n"
    try:
        document = tomllib.loads(text)
    except ValueError as err:
        return text, f"{CONFIG} is not valid TOML ({err}): repair it, or move it away"
    version = document.get("version")
    if version is None and "plugins" not in document:
        # containerd.io's own file: outside of plugins the versions are the same.
        version, text = CRI_VERSION, f"version = 2\n{text}"
    if version not in (CRI_VERSION, CRI_VERSION + 1):
        return text, f"{CONFIG} has version {version or 1}: convert it (containerd config migrate), or move it away"
    cri = CRI if version == CRI_VERSION else "io.containerd.cri.v1.runtime"
    images = CRI if version == CRI_VERSION else "io.containerd.cri.v1.images"
    text = re.sub(r"(?m)^([ \t]*disabled_plugins[ \t]*=[ \t]*\[)([^\]]*)\]", _without_cri, text)
    runc = ("plugins", cri, "containerd", "runtimes", "runc")
    values = [(runc, "runtime_type", '"io.containerd.runc.v2"'), ((*runc, "options"), "SystemdCgroup", "true")]
    if sandbox_image and version == CRI_VERSION:
        values.append((("plugins", cri), "sandbox_image", f'"{sandbox_image}"'))
    elif sandbox_image:
        values.append((("plugins", images, "pinned_images"), "sandbox", f'"{sandbox_image}"'))
    try:
        for table, key, value in values:
            text = _with_value(text, table, key, value)
        document = tomllib.loads(text)
    except ValueError as err:
        return text, f"{CONFIG} could not be extended ({err}): write its tables as [plugins...] headings"
    cgroup = document["plugins"][cri]["containerd"]["runtimes"]["runc"]["options"].get("SystemdCgroup")
    off = {"cri", CRI, cri} & {*document.get("disabled_plugins", ())}
    return text, None if cgroup is True and not off else f"{CONFIG}: the plugin for Kubernetes could not be configured"


def _without_cri(line: re.Match[str]) -> str:
    names = [
        name
        for name in (part.strip() for part in line[2].split(","))
        if name and name.strip("\"'").rpartition(".")[2] != "cri"
    ]
    return f"{line[1]}{', '.join(names)}]"


def _with_value(text: str, table: tuple[str, ...], key: str, value: str) -> str:
    """Return a TOML text in which a table has a value; a line that has the key in the table is replaced."""
    document: object = tomllib.loads(text)
    for name in table:
        document = document.get(name, {}) if isinstance(document, dict) else {}
    if isinstance(document, dict) and key in document and document[key] == tomllib.loads(f"x = {value}")["x"]:
        return text
    parts = r"\.".join(rf"[\"']?{re.escape(name)}[\"']?" for name in table)
    head = re.search(rf"(?m)^[ \t]*\[[ \t]*{parts}[ \t]*\][^\n]*\n?", text)
    if head is None:
        names = ".".join(f'"{name}"' if "." in name else name for name in table)
        return f"{text.rstrip()}\n\n[{names}]\n  {key} = {value}\n"
    body = re.match(r"(?:(?![ \t]*\[)[^\n]*\n?)*", text[head.end() :])
    lines = body[0] if body is not None else ""
    line = rf"(?m)^([ \t]*){re.escape(key)}[ \t]*=[^\n]*"
    changed, count = re.subn(line, rf"\g<1>{key} = {value}", lines, count=1)
    rest = text[head.end() + len(lines) :]
    start = text[: head.end()] if text[: head.end()].endswith("\n") else f"{text[: head.end()]}\n"
    return f"{start}{changed if count else f'  {key} = {value}' + chr(10) + lines}{rest}"
