"""The kernel that a simulated node "runs", its log, and the driver's device files and their numbers.

It is the newest of the node's kernel packages, as of the last boot. Containers share the host's kernel, and uname(2)
reports that one. A library that the dynamic linker loads into every program replaces the answer by the node's own
kernel, so that all programs (``uname``, Ansible, DKMS, kmod) see the same kernel until the next reboot. Programs that
do not use the dynamic linker (Go's) still see the host's.

No driver serves the device files: opening one for reading fails.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time
from typing import Any

from . import state

LIBRARY = "/usr/lib/gpunode-lab/uname.so"
PRELOAD = "/etc/ld.so.preload"
_FIELD = 65
_RELEASE_AT = 2 * _FIELD
# mov eax, SYS_uname; syscall; test eax, eax; jnz fail; lea rsi, [rip+release]; add rdi, 130; mov ecx, 65; rep movsb;
# xor eax, eax; ret; fail: mov eax, -1; ret
_CODE = bytes.fromhex("b83f0000000f0585c07518488d3517000000")
_CODE += b"\x48\x81\xc7" + struct.pack("<I", _RELEASE_AT) + b"\xb9" + struct.pack("<I", _FIELD)
_CODE += bytes.fromhex("f3a431c0c3b8ffffffffc3")


def newest() -> str | None:
    """Return the newest kernel with an image in /boot, as a boot loader chooses it; None if there is none."""
    images = [entry.name[len("vmlinuz-") :] for entry in state.path("/boot").glob("vmlinuz-*")]
    return max(images, key=order, default=None)


def order(release: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts kernel releases by their numbers."""
    parts = re.findall(r"\d+|[a-z]+", release)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


def release() -> str:
    """Return the release of the running kernel, as the node sees it."""
    return str(state.running().get("kernel") or os.uname().release)


def boot() -> str:
    """Run the newest kernel from now on; return its release."""
    chosen = newest() or os.uname().release
    with state.change() as (_, running):
        running["kernel"] = chosen
    library = state.path(LIBRARY)
    new = library.with_name(library.name + ".new")
    new.write_bytes(uname_library(chosen))
    new.chmod(0o755)
    new.replace(library)
    preload = state.path(PRELOAD)
    lines = preload.read_text(encoding="ascii").split() if preload.exists() else []
    if LIBRARY not in lines:
        state.write_text(preload, "".join(line + "\n" for line in [*lines, LIBRARY]))
    return chosen


def uname_library(name: str) -> bytes:
    """Return a shared object for x86_64 with one function: uname(2) with that release in its answer."""
    text = _CODE + name.encode("ascii")[: _FIELD - 1].ljust(_FIELD, b"\0")
    strings = b"\0uname\0gpunode-lab-uname.so\0"
    headers = 64 + 4 * 56
    hash_at = headers
    hash_table = struct.pack("<6I", 1, 2, 1, 0, 0, 0)  # one bucket, which leads to symbol 1
    symbols_at = hash_at + len(hash_table)
    strings_at = symbols_at + 2 * 24
    text_at = (strings_at + len(strings) + 15) & ~15
    end = text_at + len(text)
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, text_at, len(_CODE))
    dynamic_at = 0x1000
    tags = ((14, 7), (4, hash_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0)
    rows = (
        (1, 5, 0, 0, end, 0x1000),  # code: read and execute
        (1, 6, dynamic_at, dynamic_at, len(dynamic), 0x1000),  # written by the linker
        (2, 6, dynamic_at, dynamic_at, len(dynamic), 8),
        (0x6474E551, 6, 0, 0, 0, 16),  # no executable stack
    )
    for kind, flags, offset, address, size, alignment in rows:
        header += struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size, alignment)
    body = (header + hash_table + symbols + strings).ljust(text_at, b"\0") + text
    return body.ljust(dynamic_at, b"\0") + dynamic


LOG = "/run/gpunode-lab/kmsg"
WARNING = 4
NOTICE = 5
INFO = 6
ERROR = 3


def begin_log(release: str, hardware: str) -> None:
    """Write the first lines of a boot."""
    state.write_text(state.path(LOG), "")
    log(f"Linux version {release} (gpunode-lab) #1 SMP PREEMPT_DYNAMIC", NOTICE)
    log(f"gpunode-lab: simulated hardware: {hardware}", INFO)


def log(text: str, level: int = WARNING) -> str:
    """Append one line, with the time as the host's kernel counts it; return the line."""
    seconds = time.clock_gettime(time.CLOCK_MONOTONIC)
    line = f"<{level}>[{seconds:12.6f}] {text}\n"
    descriptor = os.open(str(state.path(LOG)), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode("utf-8"))
    finally:
        os.close(descriptor)
    return line


def forget_lines(lines: list[str]) -> None:
    """Remove lines from the log, as if they had never been written."""
    log = state.path(LOG)
    if lines and log.exists():
        kept = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line not in lines]
        state.write_text(log, "".join(kept))


def xid(pci_bus_id: str, number: int, text: str, process: str = "pid='<unknown>', name=<unknown>") -> str:
    """Write an Xid as the driver reports it; return the line."""
    slot = pci_bus_id.rsplit(".", 1)[0]
    return log(f"NVRM: Xid (PCI:{slot}): {number}, {process}, {text}", ERROR)


NVIDIA = 195
UVM = 510
NVSWITCH = 509
CAPS = 508
INFINIBAND = 231
_FIRST_VERBS = 192
"""Of /dev/infiniband/uverbs0; umad0 is minor 0 (drivers/infiniband/core, uverbs_main.c and user_mad.c)."""
_CONTROL = 255
_MODESET = 254
DEVICE_NUMBERS = {
    "nvidia": NVIDIA,
    "nvidia-uvm": UVM,
    "nvidia-nvswitch": NVSWITCH,
    "nvidia-caps": CAPS,
    "infiniband_mad": INFINIBAND,
    "infiniband_verbs": INFINIBAND,
}
"""Names and major numbers, as in /proc/devices."""


def device_files(hardware: dict[str, Any], modules: set[str]) -> list[tuple[str, int, int, int]]:
    """Return (path, major, minor, mode) of the files that belong to these loaded modules."""
    files = []
    if "nvidia" in modules:
        files += [(f"/dev/nvidia{gpu['index']}", NVIDIA, gpu["index"], 0o666) for gpu in hardware["gpus"]]
        files += [("/dev/nvidiactl", NVIDIA, _CONTROL, 0o666)]
        files += [
            (f"/dev/nvidia-caps/nvidia-cap{minor}", CAPS, minor, mode) for minor, mode in ((1, 0o400), (2, 0o444))
        ]
        if hardware["nvswitches"]:
            files += [("/dev/nvidia-nvswitchctl", NVSWITCH, _CONTROL, 0o666)]
            files += [(f"/dev/nvidia-nvswitch{at}", NVSWITCH, at, 0o666) for at in range(len(hardware["nvswitches"]))]
    if "nvidia_modeset" in modules:
        files += [("/dev/nvidia-modeset", NVIDIA, _MODESET, 0o666)]
    if "nvidia_uvm" in modules:
        files += [("/dev/nvidia-uvm", UVM, 0, 0o666), ("/dev/nvidia-uvm-tools", UVM, 1, 0o666)]
    return files


def adapter_files(hardware: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    """Return (path, major, minor, mode) of the files of RDMA adapters, which exist from the boot on."""
    numbers = range(len(hardware["nics"]))
    mads = [(f"/dev/infiniband/umad{at}", INFINIBAND, at, 0o600) for at in numbers]
    return mads + [(f"/dev/infiniband/uverbs{at}", INFINIBAND, _FIRST_VERBS + at, 0o666) for at in numbers]


def make_devices(hardware: dict[str, Any], modules: set[str]) -> None:
    """Create the missing files. Those of unloaded modules stay, as the real ones do until the reboot."""
    for name, major, minor, mode in device_files(hardware, modules) + adapter_files(hardware):
        file = state.path(name)
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(str(file), stat.S_IFCHR | mode, os.makedev(major, minor))
        file.chmod(mode)


def device_holders() -> dict[int, list[str]]:
    """Return process number to the device files that the process holds open."""
    files_by_process: dict[int, list[str]] = {}
    for process in state.path("/proc").glob("[0-9]*"):
        try:
            targets = {str(entry.readlink()) for entry in (process / "fd").iterdir()}
        except OSError:
            continue  # It ended, or closed the file, in the meantime.
        held = sorted(target for target in targets if target.startswith("/dev/nvidia"))
        if held:
            files_by_process[int(process.name)] = held
    return files_by_process


def hold_device(name: str) -> int:
    """Open a device file so that other programs see it in use; return the descriptor."""
    return os.open(str(state.path(name)), os.O_PATH | os.O_CLOEXEC)
