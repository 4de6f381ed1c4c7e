"""Errors in the kernel's log: driver messages, PCI Express errors, killed processes, machine checks."""

import re

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.models.outputs import Dmesg, LogEvent
from gpunode.facts.models.smi import Failure
from gpunode.facts.parsers import nvrm
from gpunode.facts.parsers.values import bus_id

_SIMULATED = re.compile(r"Linux version \S{1,100} \(gpunode-lab\)")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:[+-]\d\d:?\d\d|Z)?)\s+(?:\S{1,255} kernel: )?(.*)"
)
_ADDRESS = r"\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\b"
_KILLED = re.compile(r"Killed process (\d{1,9}) \(([^)]{1,64})\)")
_UNCORRECTED = re.compile(r"severity=Uncorrect|Uncorrected \(|\(Non-Fatal\)|\(Fatal\)|type=Fatal", re.I)
_CORRECTED = re.compile(r"severity=Correct|Corrected error|Correctable", re.I)
_OTHERS = (
    (
        "aer",
        re.compile(rf"(?:\S{{1,40}} {_ADDRESS}: )?(?:(?:AER: )?PCIe Bus Error|AER: (?:Multiple |Correct|Uncorrect))"),
    ),
    ("oom", re.compile(r"Out of memory|oom-kill:")),
    ("uvm", re.compile(r"nvidia-uvm: \S.*\berr\b")),
    ("mce", re.compile(r"(?:\{\d{1,10}\}|\w{1,12}: )?\[Hardware Error\]|mce: .*(?:error|check)", re.I)),
    # node-problem-detector, config/kernel-monitor.json (TaskHung, KernelOops, Ext4Error, FilesystemIsReadOnly,
    # XfsHasShutdown); as kernels since 5.0 print them: kernel/watchdog.c, arch/x86/mm/fault.c, lib/bug.c,
    # kernel/module/signing.c.
    ("lockup", re.compile(r"(?:watchdog: )?(?:BUG: soft lockup - |.{0,40}detected hard LOCKUP )", re.I)),
    ("hung-task", re.compile(r"INFO: task .{1,40}:\d{1,10} blocked for more than \d{1,9} seconds")),
    (
        "oops",
        re.compile(
            r"BUG: (?:unable to handle|kernel NULL pointer)|(?:Internal error: )?Oops\b|divide error: |kernel BUG at "
        ),
    ),
    (
        "file-system",
        re.compile(
            r"EXT4-fs error |(?:EXT4-fs|XFS|BTRFS)\b.{0,80}(?:emounting filesystem read-only|Shutting down filesystem)"
        ),
    ),
    ("module-rejected", re.compile(r"Loading of (?:unsigned )?module(?: with unavailable key)? is rejected")),
)
_LINE_LIMIT = 4096


class KernelEvent(Fact):
    """One line of the kernel's log that reports an error."""

    kind: str
    """``xid``, ``sxid``, ``nvrm``, ``nouveau``, ``aer`` (PCI Express), ``oom`` (a process was killed), ``mce``,
    ``lockup``, ``hung-task``, ``oops``, ``file-system``, ``module-rejected``, ``uvm`` (nvidia-uvm reports an error)."""
    message: str
    time: str | None = None
    """As printed."""
    xid: int | None = None
    """The number of an Xid or SXid."""
    pci_bus_id: str | None = None
    """``0000:1a:00.0``."""
    pid: int | None = None
    process: str | None = None
    fatal: bool | None = None
    """For ``aer``: uncorrected. For ``sxid``: as the driver prints it. None if the line does not contain it."""


class BootLog(Fact):
    """Xids and SXids of a boot before this one."""

    began: str | None
    """Time of the boot's first line; None if that line is no longer kept."""
    events: tuple[KernelEvent, ...]


class KernelLog(Fact):
    """The kernel's log of this boot, filtered on the node."""

    source: str
    """``journal`` or ``dmesg``."""
    complete: bool
    """True if the log starts at the boot. Otherwise older events may have been lost."""
    simulated: bool = False
    """True for the log of a lab node's simulated hardware, as opposed to that of the host's kernel."""
    events: tuple[KernelEvent, ...]


def read_kernel_log(bundle: BundleReader) -> KernelLog:
    """Return the journal's kernel messages of this boot; those of dmesg if the journal has none or is not readable."""
    try:
        journal = bundle.output("journal-kernel")
    except UnknownFactError:
        if not bundle.ran("dmesg"):
            raise
        journal = ""
    if journal.strip():
        return parse(journal, "journal")
    if not bundle.ran("dmesg"):
        raise bundle.not_collected()
    return parse(bundle.output("dmesg"), "dmesg")


def read_earlier_boots(bundle: BundleReader) -> tuple[BootLog, ...]:
    """Return Xids and SXids of earlier boots that the journal keeps, the latest boot first."""
    if bundle.command("journal-xids").missing:
        return ()
    boots: list[list[str]] = [[]]
    for line in bundle.output("journal-xids").split("\n"):
        if nvrm.begins_boot(line):
            boots.append([])
        # The second line of a message is indented: users can write it.
        boots[-1] += [line[:_LINE_LIMIT].rstrip()] if line.strip() and not line[:1].isspace() else []
    # The last begins with this boot's first line; the lines before the first such line belong to an incomplete boot.
    return tuple(_boot(lines) for lines in reversed(boots[:-1]) if lines)


def _boot(lines: list[str]) -> BootLog:
    first = _TIME.match(lines[0]) if nvrm.begins_boot(lines[0]) else None
    parsed = nvrm.parse_log("\n".join(lines))
    if isinstance(parsed, Failure):
        raise UnknownFactError(parsed.error.message)
    return BootLog(began=first[1] if first else None, events=tuple(map(_of_driver, parsed.events)))


def parse(text: str, source: str) -> KernelLog:
    """Parse the lines that the probe kept: first those of the GPU's driver, then the rest, each in the log's order."""
    lines = [line[:_LINE_LIMIT].rstrip() for line in text.split("\n") if not line[:1].isspace()]
    parsed = nvrm.parse_log("\n".join(lines)) if any(lines) else Dmesg()
    if isinstance(parsed, Failure):
        raise UnknownFactError(parsed.error.message)
    of_kernel = (_of_kernel(line) for line in lines)
    return KernelLog(
        source=source,
        complete=any(nvrm.begins_boot(line) for line in lines),
        simulated=any(_SIMULATED.match(nvrm.message_of(line)) for line in lines),
        events=(*map(_of_driver, parsed.events), *(event for event in of_kernel if event)),
    )


def _of_driver(event: LogEvent) -> KernelEvent:
    severity = event.severity if event.kind == "sxid" else None
    return KernelEvent(
        kind=event.kind,
        message=event.message,
        time=event.time,
        xid=event.xid,
        pci_bus_id=event.pci_bus_id,
        pid=event.process.pid if event.process else None,
        process=event.process.name if event.process else None,
        fatal={"fatal": True, "non-fatal": False}.get(severity or ""),
    )


def _of_kernel(line: str) -> KernelEvent | None:
    message = nvrm.message_of(line)
    kind = next((kind for kind, pattern in _OTHERS if pattern.match(message)), None)
    if kind is None:
        return None
    match = _TIME.fullmatch(line)
    time = match[1] if match else None
    address = re.search(_ADDRESS, message) if kind == "aer" else None
    killed = _KILLED.search(message) if kind == "oom" else None
    fatal = None
    if kind == "aer":
        fatal = True if _UNCORRECTED.search(message) else False if _CORRECTED.search(message) else None
    return KernelEvent(
        kind=kind,
        message=message,
        time=time,
        pci_bus_id=bus_id(address[1]) if address else None,
        pid=int(killed[1]) if killed else None,
        process=killed[2] if killed else None,
        fatal=fatal,
    )


class KernelLogFacts(FactArea):
    """The kernel's log."""

    kernel_log: KernelLog | None = fact(read_kernel_log, needs_root=True, volatile=True)
    earlier_boots: tuple[BootLog, ...] | None = fact(read_earlier_boots, needs_root=True, volatile=True)
    """The latest first, limited by the probe and by the journal."""
