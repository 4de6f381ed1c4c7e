"""The simulated kernel's log: what dmesg shows on a node with simulated hardware."""

import os
import time

from . import state

LOG = "/run/gpunode-lab/kmsg"
WARNING = 4
NOTICE = 5
INFO = 6
ERROR = 3


def begin(release: str, hardware: str) -> None:
    """The first lines of a boot."""
    state.write_text(state.path(LOG), "")
    write("Linux version %s (gpunode-lab) #1 SMP PREEMPT_DYNAMIC" % release, NOTICE)
    write("gpunode-lab: simulated hardware: %s" % hardware, INFO)


def write(text: str, level: int = WARNING, at: float | None = None) -> None:
    """Append one line. ``at`` is seconds since the host's boot, as the kernel counts them; default: now."""
    seconds = time.clock_gettime(time.CLOCK_MONOTONIC) if at is None else at
    line = "<%d>[%12.6f] %s\n" % (level, seconds, text)
    descriptor = os.open(str(state.path(LOG)), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode("utf-8"))
    finally:
        os.close(descriptor)


def xid(pci_bus_id: str, number: int, text: str, process: str = "pid=0, name=unknown") -> None:
    """An Xid as the driver reports it."""
    slot = pci_bus_id.rsplit(".", 1)[0]
    write("NVRM: Xid (PCI:%s): %d, %s, %s" % (slot, number, process, text), ERROR)
