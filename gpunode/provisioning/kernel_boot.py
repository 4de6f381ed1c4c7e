"""The kernel's command line: its boot loader, how parameters are added, and whether a boot has applied them."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.provisioning.manifest import ManagedFile, NodeCommand, file_reasons
from gpunode.provisioning.role import Texts
from gpunode.provisioning.state import Look, NodeState

GRUB = "/etc/default/grub.d/90-gpunode.cfg"
UPDATE_GRUB = "/usr/sbin/update-grub"
GRUBBY = "/usr/sbin/grubby"
KERNEL_INSTALL = "/usr/bin/kernel-install"
KERNEL_COMMAND_LINE = "/etc/kernel/cmdline"
RECORD = "/var/lib/gpunode/kernel_tuning/command-line"
"""The parameters that were set and the boot id of that boot; a later boot has to have them."""
LOOK = Look(
    paths=(UPDATE_GRUB, GRUBBY, KERNEL_INSTALL, GRUB, RECORD),
    globs=("/lib/modules/*/vmlinuz", "/boot/vmlinuz-*"),
    contents=(KERNEL_COMMAND_LINE, RECORD),
)


@dataclass(frozen=True)
class BootPlan:
    """Changes of the command line."""

    files: tuple[ManagedFile, ...] = ()
    commands: tuple[NodeCommand, ...] = ()
    """Of the boot loader's program; the record among the files is written once they succeeded."""
    reboot_reasons: tuple[str, ...] = ()
    pending_reasons: tuple[str, ...] = ()


def plan(state: NodeState, requested: tuple[str, ...], notes: list[str], text: Texts) -> BootPlan:
    """Return how to add the parameters to the command line, and remove those of earlier runs."""
    boot_id, recorded = _record(state)
    if not requested and not recorded and state.files[GRUB].kind == "absent":
        return BootPlan()
    loader = _loader(state)
    if loader is None:
        if requested:
            notes.append(
                f"the kernel command line is not changed: update-grub, grubby, and {KERNEL_COMMAND_LINE} with "
                f"kernel-install and a kernel for it are all missing: add {' '.join(requested)} by hand"
            )
        return BootPlan()
    files: list[ManagedFile] = []
    going = tuple(argument for argument in recorded if argument not in requested)
    argvs: list[list[str]] = []
    if loader == UPDATE_GRUB:
        files.append(
            ManagedFile(
                path=GRUB,
                content=text("grub.cfg.j2", arguments=requested) if requested else None,
                phase="after",
            )
        )
        argvs = [[UPDATE_GRUB]]
    elif loader == GRUBBY:
        added = [f"--args={' '.join(requested)}"] if requested else []
        removed = [f"--remove-args={' '.join(going)}"] if going else []
        argvs = [[GRUBBY, "--update-kernel=ALL", *added, *removed]]
    else:
        arguments = (state.contents[KERNEL_COMMAND_LINE] or "").split()
        others = (argument for argument in arguments if argument not in (*going, *requested))
        line = " ".join([*others, *requested]) + "\n"
        files.append(ManagedFile(path=KERNEL_COMMAND_LINE, content=line, phase="after"))
        # As kernel packages call it. Its add-all is missing from systemd 252, and does not see Debian's kernels.
        argvs = [[KERNEL_INSTALL, "add", *kernel] for kernel in _kernels(state)]
    now = state.boot_id
    # A damaged drop-in may have been applied by an upgrade of the kernel in the meantime.
    damaged = loader == UPDATE_GRUB and any(True for _ in file_reasons(files[0], state))
    changed = set(requested) != set(recorded) or damaged
    if changed:
        record = f"{now}\n{' '.join(requested)}\n" if requested else None
        files.append(ManagedFile(path=RECORD, content=record, phase="last"))
    pending = (
        f"the boot loader has {' '.join(recorded) or 'none'} of the role's arguments, expected "
        f"{' '.join(requested) or 'none'}",
    )
    booted = (state.facts.command_line or "").split()
    missing = [argument for argument in requested if argument not in booted]
    left = [argument for argument in going if argument in booted]
    reasons = []
    if changed or boot_id == now:
        reasons += [f"{' '.join(missing)} is added to the kernel command line"] if missing else []
        reasons += [f"{' '.join(left)} is removed from the kernel command line"] if left else []
    elif missing:
        # A reboot would not change it: the node must not be rebooted again and again.
        notes.append(
            f"{' '.join(missing)} was set, but the kernel booted without it: the node does not boot with "
            f"{loader}'s boot loader"
        )
    return BootPlan(
        files=tuple(files),
        commands=tuple(NodeCommand(argv=tuple(argv)) for argv in argvs) if changed else (),
        reboot_reasons=tuple(reasons),
        pending_reasons=pending if changed else (),
    )


def _record(state: NodeState) -> tuple[str, tuple[str, ...]]:
    """Return (boot id of the boot in which parameters were set, the parameters)."""
    lines = (state.contents.get(RECORD) or "").splitlines()
    return (lines[0].strip(), tuple(lines[1].split())) if len(lines) > 1 else ("", ())


def _loader(state: NodeState) -> str | None:
    """Return the program that writes the boot loader's configuration."""
    for path in (UPDATE_GRUB, GRUBBY):
        if state.kind(path) in ("file", "link"):
            return path
    present = state.kind(KERNEL_INSTALL) == "file"
    return KERNEL_INSTALL if present and state.contents.get(KERNEL_COMMAND_LINE) and _kernels(state) else None


def _kernels(state: NodeState) -> list[tuple[str, str]]:
    """Return release and image of each kernel."""
    kernels = []
    for kernel in state.facts.kernels or ():
        paths = (f"/lib/modules/{kernel.release}/vmlinuz", f"/boot/vmlinuz-{kernel.release}")
        image = next((path for path in paths if state.kind(path) == "file"), None)
        if image is not None:
            kernels.append((kernel.release, image))
    return kernels
