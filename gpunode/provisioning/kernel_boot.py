"""The kernel's command line: which boot loader has it, how a word gets there, and whether a boot has taken it up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpunode.provisioning import kernel_files
from gpunode.provisioning.due import file_reasons
from gpunode.provisioning.manifest import ManagedFile
from gpunode.provisioning.reboot import BOOT_ID
from gpunode.provisioning.state import Look, NodeState

UPDATE_GRUB = "/usr/sbin/update-grub"
GRUBBY = "/usr/sbin/grubby"
KERNEL_INSTALL = "/usr/bin/kernel-install"
KERNEL_COMMAND_LINE = "/etc/kernel/cmdline"
RECORD = "/var/lib/gpunode/kernel_tuning/command-line"
"""The words that were set and the boot in which that was; a later boot has to have them."""
LOOK = Look(
    paths=(UPDATE_GRUB, GRUBBY, KERNEL_INSTALL, kernel_files.GRUB, RECORD),
    globs=("/lib/modules/*/vmlinuz", "/boot/vmlinuz-*"),
    contents=(KERNEL_COMMAND_LINE, RECORD),
)


@dataclass(frozen=True)
class BootPlan:
    """What the command line needs."""

    files: tuple[ManagedFile, ...] = ()
    command: dict[str, Any] | None = None
    """``argvs`` of the boot loader's program, and ``record``, the text that is kept once they succeeded."""
    reboot_reasons: tuple[str, ...] = ()
    due_reasons: tuple[str, ...] = ()


def plan(state: NodeState, wanted: tuple[str, ...], notes: list[str]) -> BootPlan:
    """Return how the words come onto the command line, and those of earlier runs off it."""
    boot_id, recorded = _record(state)
    if not wanted and not recorded and state.files[kernel_files.GRUB].kind == "absent":
        return BootPlan()
    loader = _loader(state)
    if loader is None:
        if wanted:
            notes.append(
                f"the kernel command line is not changed: update-grub, grubby, and {KERNEL_COMMAND_LINE} with "
                f"kernel-install and a kernel for it are all missing: add {' '.join(wanted)} by hand"
            )
        return BootPlan()
    files: list[ManagedFile] = []
    going = tuple(word for word in recorded if word not in wanted)
    argvs: list[list[str]] = []
    if loader == UPDATE_GRUB:
        files.append(
            ManagedFile(path=kernel_files.GRUB, content=kernel_files.grub(wanted) if wanted else None, phase="before")
        )
        argvs = [[UPDATE_GRUB]]
    elif loader == GRUBBY:
        added = [f"--args={' '.join(wanted)}"] if wanted else []
        removed = [f"--remove-args={' '.join(going)}"] if going else []
        argvs = [[GRUBBY, "--update-kernel=ALL", *added, *removed]]
    else:
        words = (state.contents[KERNEL_COMMAND_LINE] or "").split()
        text = " ".join([*(word for word in words if word not in (*going, *wanted)), *wanted]) + "\n"
        files.append(ManagedFile(path=KERNEL_COMMAND_LINE, content=text, phase="before"))
        # As the packages of kernels call it. Its add-all is missing from systemd 252, and sees no kernel of Debian's.
        argvs = [[KERNEL_INSTALL, "add", *kernel] for kernel in _kernels(state)]
    now = (state.contents.get(BOOT_ID) or "").strip()
    # A drop-in that was damaged may have been taken up by an upgrade of the kernel meanwhile.
    damaged = loader == UPDATE_GRUB and any(True for _ in file_reasons(files[0], state))
    changed = set(wanted) != set(recorded) or damaged
    record = f"{now}\n{' '.join(wanted)}\n" if wanted else ""
    due = (
        f"the boot loader has {' '.join(recorded) or 'none'} of the role's arguments, expected "
        f"{' '.join(wanted) or 'none'}",
    )
    booted = (state.facts.command_line or "").split()
    missing = [word for word in wanted if word not in booted]
    left = [word for word in going if word in booted]
    reasons = []
    if changed or boot_id == now:
        reasons += [f"{' '.join(missing)} is added to the kernel command line"] if missing else []
        reasons += [f"{' '.join(left)} is removed from the kernel command line"] if left else []
    elif missing:
        # A reboot for it would come to the same: nobody is sent round in circles.
        notes.append(
            f"{' '.join(missing)} was set, but the kernel booted without it: the node does not boot with "
            f"{loader}'s boot loader"
        )
    return BootPlan(
        files=tuple(files),
        command={"argvs": argvs, "record": record, "path": RECORD} if changed else None,
        reboot_reasons=tuple(reasons),
        due_reasons=due if changed else (),
    )


def _record(state: NodeState) -> tuple[str, tuple[str, ...]]:
    """Return (boot in which words were set, the words)."""
    lines = (state.contents.get(RECORD) or "").splitlines()
    return (lines[0].strip(), tuple(lines[1].split())) if len(lines) > 1 else ("", ())


def _loader(state: NodeState) -> str | None:
    """Return the program that writes the boot loader's configuration."""
    for path in (UPDATE_GRUB, GRUBBY):
        if path in state.files and state.files[path].kind in ("file", "link"):
            return path
    installer = state.files.get(KERNEL_INSTALL)
    there = installer is not None and installer.kind == "file"
    return KERNEL_INSTALL if there and state.contents.get(KERNEL_COMMAND_LINE) and _kernels(state) else None


def _kernels(state: NodeState) -> list[tuple[str, str]]:
    """Return release and image of each kernel."""
    found = []
    for kernel in state.facts.kernels or ():
        paths = (f"/lib/modules/{kernel.release}/vmlinuz", f"/boot/vmlinuz-{kernel.release}")
        image = next((path for path in paths if path in state.files and state.files[path].kind == "file"), None)
        if image is not None:
            found.append((kernel.release, image))
    return found
