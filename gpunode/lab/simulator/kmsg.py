"""The simulated kernel's log: the output of dmesg on a node with simulated hardware."""

from __future__ import annotations

import os
import time

from . import state

LOG = "/run/gpunode-lab/kmsg"
WARNING = 4
NOTICE = 5
INFO = 6
ERROR = 3


def begin(release: str, hardware: str) -> None:
    """Write the first lines of a boot."""
    state.write_text(state.path(LOG), "")
    write(f"Linux version {release} (gpunode-lab) #1 SMP PREEMPT_DYNAMIC", NOTICE)
    write(f"gpunode-lab: simulated hardware: {hardware}", INFO)


def write(text: str, level: int = WARNING) -> str:
    """Append one line, with the time as the host's kernel counts it; return the line."""
    seconds = time.clock_gettime(time.CLOCK_MONOTONIC)
    line = f"<{level}>[{seconds:12.6f}] {text}\n"
    descriptor = os.open(str(state.path(LOG)), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode("utf-8"))
    finally:
        os.close(descriptor)
    return line


def forget(lines: list[str]) -> None:
    """Remove lines from the log, as if they had never been written."""
    log = state.path(LOG)
    if lines and log.exists():
        kept = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line not in lines]
        state.write_text(log, "".join(kept))


def xid(pci_bus_id: str, number: int, text: str, process: str = "pid='<unknown>', name=<unknown>") -> str:
    """Write an Xid as the driver reports it; return the line."""
    slot = pci_bus_id.rsplit(".", 1)[0]
    return write(f"NVRM: Xid (PCI:{slot}): {number}, {process}, {text}", ERROR)
