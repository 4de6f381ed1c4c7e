"""Facts about the machine, its management controller (BMC), and its operating system.

The formats of the BMC are those of ipmitool's manual (``sdr type``, ``sel list``); the tests contain lines of real
controllers.
"""

import re
from datetime import datetime
from typing import Literal

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, word
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact

_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_DF_LINE = re.compile(r".*?\s+[0-9-]+\s+[0-9-]+\s+(-?[0-9]{1,18})\s+(?:[0-9]+%|-)\s+(/.*)")
_CONTAINER_SIGNS = {
    "/.dockerenv": "docker",
    "/run/.containerenv": "podman",
    "/run/systemd/container": "container-other",
}
_HYPERVISOR = re.compile(
    r"^Hypervisor vendor:[ \t]{1,60}(\S[^\n]{0,60}?)[ \t]*\nVirtualization type:[ \t]{1,60}(?:full|para)$", re.MULTILINE
)
_HYPERVISORS = {"KVM": "kvm", "Xen": "xen", "VMware": "vmware", "Microsoft": "microsoft"}
"""What util-linux's lscpu prints, with systemd-detect-virt's words for it."""
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


class OperatingSystem(Fact):
    """The operating system, from os-release."""

    id: str
    version_id: str | None
    codename: str | None
    pretty_name: str | None
    id_like: tuple[str, ...] = ()


def read_os(bundle: BundleReader) -> OperatingSystem:
    """Return the content of ``/etc/os-release``, or of the one in ``/usr/lib`` if that is missing."""
    text = bundle.text("/etc/os-release")
    if text is None:
        text = bundle.text("/usr/lib/os-release")
    if text is None:
        raise UnknownFactError("no os-release file")
    return parse_os_release(text)


def parse_os_release(text: str) -> OperatingSystem:
    """Parse os-release(5); raise ParseError if it contains no setting. A missing ``ID`` is ``linux``."""
    settings = {}
    for line in text.splitlines():
        match = _SETTING.fullmatch(line.strip())
        if match:
            settings[match[1]] = _unquoted(match[2])
    if not settings:
        raise ParseError(f"expected KEY=VALUE lines of os-release, found '{first_line(text)}'")
    return OperatingSystem(
        id=settings.get("ID") or "linux",
        version_id=settings.get("VERSION_ID") or None,
        codename=settings.get("VERSION_CODENAME") or None,
        pretty_name=settings.get("PRETTY_NAME") or None,
        id_like=tuple(settings.get("ID_LIKE", "").split()),
    )


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return re.sub(r"\\(.)", r"\1", value[1:-1])
    return value


def uname(bundle: BundleReader) -> tuple[str, str]:
    """Return (kernel release, architecture) from ``uname -srm``."""
    words = bundle.output("uname").split()
    if len(words) != 3:
        raise ParseError(f"expected three words from uname -srm, found {len(words)}")
    return word(words[1], "a kernel release"), word(words[2], "an architecture")


def read_architecture(bundle: BundleReader) -> str:
    """Return the kernel's architecture: ``x86_64``, ``aarch64`` …"""
    return uname(bundle)[1]


def read_command_line(bundle: BundleReader) -> str:
    """Return the kernel's command line."""
    text = bundle.text("/proc/cmdline")
    if text is None:
        raise UnknownFactError("/proc/cmdline is not there")
    return text.strip()


def read_virtualization(bundle: BundleReader) -> str:
    """Return the output of systemd-detect-virt; it exits 1 when it prints ``none``.

    Small images lack it: there a guest is known by what lscpu reads of the processor, a container by the file of its
    engine. Of a container in a guest the guest counts: buses and links are its. Bare metal has neither sign, as other
    containers have: it stays unknown.
    """
    if bundle.command("systemd-detect-virt").missing:
        if bundle.ran("lscpu") and (hypervisor := _HYPERVISOR.search(bundle.output("lscpu"))):
            return _HYPERVISORS.get(hypervisor[1], "vm-other")
        signs = bundle.output("signs").splitlines() if bundle.ran("signs") else []
        if container := next((name for path, name in _CONTAINER_SIGNS.items() if path in signs), None):
            return container
    word = bundle.output("systemd-detect-virt", good=(0, 1)).strip()
    if not re.fullmatch(r"[a-z0-9-]{1,40}", word):
        raise ParseError(f"expected one word from systemd-detect-virt, found '{first_line(word)}'")
    return word


def read_systemd(bundle: BundleReader) -> bool:
    """Return True if the node was booted with systemd."""
    return bundle.folder("/run/systemd/system/") is not None


def read_secure_boot(bundle: BundleReader) -> bool:
    """Return the last byte of the EFI variable; False without EFI. Containers hide the firmware."""
    firmware = bundle.folder("/sys/firmware/")
    if not firmware:
        raise UnknownFactError("/sys/firmware is empty, as in a container: the firmware cannot be read")
    if "efi" not in firmware:
        return False
    if not bundle.folder("/sys/firmware/efi/efivars/"):
        raise UnknownFactError("/sys/firmware/efi/efivars is not mounted")
    value = bundle.text(_SECURE_BOOT)
    if value is None:
        return False
    if value[-1:] not in {"\x00", "\x01"}:
        raise ParseError(f"expected 0 or 1 as the last byte of {_SECURE_BOOT}")
    return value[-1] == "\x01"


def read_disk_free_mib(bundle: BundleReader) -> dict[str, int]:
    """Return the free space from ``df -Pk PATH...``: one line per path, in the order of the paths."""
    text = bundle.output("df")
    paths = [word for word in bundle.command("df").argv[1:] if word.startswith("/")]
    lines = text.splitlines()[1:]
    if len(lines) != len(paths):
        raise ParseError(f"expected {len(paths)} lines of df -Pk, found {len(lines)}")
    # A path is at most 4096 bytes long; on a very long line of blanks the pattern would not end.
    matches = [match for line in lines if len(line) < 9000 and (match := _DF_LINE.fullmatch(line))]
    if not paths or len(matches) != len(paths):
        raise ParseError(f"expected {len(paths)} lines of df -Pk, found {len(matches)}")
    return {path: int(match[1]) // 1024 for path, match in zip(paths, matches, strict=True)}


class SystemFacts(FactArea):
    """The operating system."""

    os: OperatingSystem | None = fact(read_os)
    architecture: str | None = fact(read_architecture)
    """Of the kernel: ``x86_64``, ``aarch64``."""
    virtualization: str | None = fact(read_virtualization)
    """``none`` on bare metal, else what systemd-detect-virt prints."""
    systemd: bool | None = fact(read_systemd)
    """True if the node was booted with systemd."""
    command_line: str | None = fact(read_command_line)
    """The kernel's command line."""
    secure_boot: bool | None = fact(read_secure_boot)
    """None with a gap: could not be determined; False if the firmware has no Secure Boot."""
    disk_free_mib: dict[str, int] | None = fact(read_disk_free_mib, volatile=True)
    """Free space under ``/``, ``/boot``, ``/var``, ``/usr`` if they exist, whichever file system they are on."""


_REFUSED = re.compile(r"permission denied|operation not permitted", re.I)
_NO_DEVICE = re.compile(r"could not open device .*no such (?:file|device)", re.I)
_NO_PROGRAM = 127
_LINE_LIMIT = 500
_SENSOR_FIELDS = 5
_EVENT_FIELDS = 5
_DIRECTIONS = {"asserted": True, "deasserted": False}
_STATUS = re.compile(r"ok|ns|us|nc|cr|nr|[lu](?:nc|cr|nr)")


BmcAccess = Literal["read", "no-device", "no-program", "no-permission"]


class BmcSensor(Fact):
    """One line of ``ipmitool sdr type TYPE``."""

    VOLATILE = frozenset({"reading"})

    name: str
    status: str
    """``ok``, ``ns`` (no reading), ``nc`` (not critical), ``cr`` (critical), ``nr`` (not recoverable)."""
    reading: str
    """``5600 RPM``, ``Presence detected, Failure detected``, ``No Reading``."""


class BmcEvent(Fact):
    """One line of ``ipmitool sel list``."""

    sensor: str
    """``Power Supply #0x3b``; the whole text of a line in another format."""
    event: str
    """``Power Supply AC lost``; empty for a line in another format."""
    asserted: bool | None
    """False if the event ended; None if the line does not contain it."""
    time: str | None = None
    """By the BMC's own clock, as ``2021-09-08T06:34:15``; None before that clock was set."""


def read_bmc_access(bundle: BundleReader) -> BmcAccess:
    """Return whether the controller can be queried: needs a kernel device, the program ipmitool, and permission for
    both."""
    if not bundle.look("ipmi-devices"):
        return "no-device"
    answer = bundle.raw("ipmi-fans")
    if answer is None:
        raise bundle.not_collected()
    if answer.rc == _NO_PROGRAM:
        return "no-program"
    if answer.rc != 0 and _REFUSED.search(answer.stderr):
        return "no-permission"
    return "no-device" if answer.rc != 0 and _NO_DEVICE.search(answer.stderr) else "read"


def read_bmc_fans(bundle: BundleReader) -> tuple[BmcSensor, ...]:
    """Return the sensors of ``ipmitool sdr type Fan``; empty if the controller cannot be queried."""
    return _sensors(bundle, "ipmi-fans")


def read_bmc_power_supplies(bundle: BundleReader) -> tuple[BmcSensor, ...]:
    """Return the sensors of ``ipmitool sdr type "Power Supply"``; empty if the controller cannot be queried."""
    return _sensors(bundle, "ipmi-power-supplies")


def read_bmc_events(bundle: BundleReader) -> tuple[BmcEvent, ...]:
    """Return the events of ``ipmitool sel list last N``, in the log's order; empty if the controller cannot be
    queried."""
    if read_bmc_access(bundle) != "read":
        return ()
    return tuple(_event(line[:_LINE_LIMIT]) for line in bundle.output("ipmi-events").splitlines() if "|" in line)


def _sensors(bundle: BundleReader, key: str) -> tuple[BmcSensor, ...]:
    if read_bmc_access(bundle) != "read":
        return ()
    lines = [line[:_LINE_LIMIT] for line in bundle.output(key).splitlines() if line.strip()]
    return tuple(_sensor(line) for line in lines)


def _sensor(line: str) -> BmcSensor:
    """Parse ``PS1 Status       | C8h | ok  | 10.1 | Presence detected``."""
    fields = [field.strip() for field in line.split("|")]
    if len(fields) != _SENSOR_FIELDS or not _STATUS.fullmatch(fields[2]):
        raise ParseError(f"expected a sensor's line of ipmitool sdr, found '{first_line(line)}'")
    return BmcSensor(name=fields[0], status=fields[2], reading=fields[4])


def _event(line: str) -> BmcEvent:
    """Parse ``7 | 09/08/2021 | 06:34:15 | Power Supply #0x3b | Failure detected | Asserted``.

    Some records have no direction, readings after it, or another format (``9 | Linux kernel panic: ...``).
    """
    fields = [field.strip() for field in line.split("|")]
    if len(fields) < _EVENT_FIELDS:
        return BmcEvent(sensor=" ".join(fields[1:]), event="", asserted=None)
    direction = next((word for field in fields[_EVENT_FIELDS:] if (word := field.lower()) in _DIRECTIONS), None)
    return BmcEvent(
        sensor=fields[3],
        event=fields[4],
        asserted=_DIRECTIONS[direction] if direction else None,
        time=_time(fields[1], fields[2]),
    )


def _time(date: str, clock: str) -> str | None:
    """Return ``YYYY-MM-DDTHH:MM:SS``; the date is month first, and AM or PM and the controller's zone may follow the
    clock."""
    words = clock.split()
    hours = words[0] if words else ""
    half = words[1].upper() if len(words) > 1 and words[1].upper() in {"AM", "PM"} else None
    for day in ("%m/%d/%Y", "%m/%d/%y"):
        try:
            form = f"{day} %I:%M:%S %p" if half else f"{day} %H:%M:%S"
            return datetime.strptime(f"{date} {hours}{f' {half}' if half else ''}", form).isoformat()
        except ValueError:
            continue
    return None


class BmcFacts(FactArea):
    """The management controller."""

    bmc_access: BmcAccess | None = fact(read_bmc_access, needs_root=True)
    """If it is not ``read``, the next three are empty."""
    bmc_fans: tuple[BmcSensor, ...] | None = fact(read_bmc_fans, needs_root=True)
    bmc_power_supplies: tuple[BmcSensor, ...] | None = fact(read_bmc_power_supplies, needs_root=True)
    bmc_events: tuple[BmcEvent, ...] | None = fact(read_bmc_events, needs_root=True, volatile=True)
