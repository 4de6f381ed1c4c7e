"""Facts about the machine and its operating system."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.node import OperatingSystem
from gpunode.facts.seen import Seen, Unseen, first_line, word

_SETTING = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_DF_LINE = re.compile(r".*?\s+[0-9-]+\s+[0-9-]+\s+(-?[0-9]{1,18})\s+(?:[0-9]+%|-)\s+(/.*)")
_SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def operating_system(seen: Seen) -> OperatingSystem:
    """From ``/etc/os-release``, or the one in ``/usr/lib`` where that is missing."""
    text = seen.text("/etc/os-release")
    if text is None:
        text = seen.text("/usr/lib/os-release")
    if text is None:
        raise Unseen("no os-release file")
    return parse_os_release(text)


def parse_os_release(text: str) -> OperatingSystem:
    """Read os-release(5); raise ParseError where it holds no setting. ``ID`` is ``linux`` where it is not given."""
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


def uname(seen: Seen) -> tuple[str, str]:
    """(kernel release, architecture) from ``uname -srm``."""
    words = seen.output("uname").split()
    if len(words) != 3:
        raise ParseError(f"expected three words from uname -srm, found {len(words)}")
    return word(words[1], "a kernel release"), word(words[2], "an architecture")


def architecture(seen: Seen) -> str:
    """``x86_64``, ``aarch64`` …"""
    return uname(seen)[1]


def command_line(seen: Seen) -> str:
    """The kernel's command line."""
    text = seen.text("/proc/cmdline")
    if text is None:
        raise Unseen("/proc/cmdline is not there")
    return text.strip()


def virtualization(seen: Seen) -> str:
    """systemd-detect-virt's word; its exit status is 1 where that is ``none``."""
    word = seen.output("systemd-detect-virt", good=(0, 1)).strip()
    if not re.fullmatch(r"[a-z0-9-]{1,40}", word):
        raise ParseError(f"expected one word from systemd-detect-virt, found '{first_line(word)}'")
    return word


def systemd(seen: Seen) -> bool:
    """True where the node was booted with systemd."""
    return seen.folder("/run/systemd/system/") is not None


def secure_boot(seen: Seen) -> bool:
    """From the EFI variable, whose last byte is the value; False without EFI. Containers hide the firmware."""
    firmware = seen.folder("/sys/firmware/")
    if not firmware:
        raise Unseen("/sys/firmware is empty, as in a container: the firmware cannot be read")
    if "efi" not in firmware:
        return False
    if not seen.folder("/sys/firmware/efi/efivars/"):
        raise Unseen("/sys/firmware/efi/efivars is not mounted")
    value = seen.text(_SECURE_BOOT)
    if value is None:
        return False
    if value[-1:] not in {"\x00", "\x01"}:
        raise ParseError(f"expected 0 or 1 as the last byte of {_SECURE_BOOT}")
    return value[-1] == "\x01"


def disk_free_mib(seen: Seen) -> dict[str, int]:
    """From ``df -Pk PATH...``: one line a path, in the order of the paths."""
    text = seen.output("df")
    paths = [word for word in seen.command("df").argv[1:] if word.startswith("/")]
    lines = text.splitlines()[1:]
    if len(lines) != len(paths):
        raise ParseError(f"expected {len(paths)} lines of df -Pk, found {len(lines)}")
    # A path is no longer than 4096 bytes; on an endless line of blanks the pattern would take for ever.
    matches = [match for line in lines if len(line) < 9000 and (match := _DF_LINE.fullmatch(line))]
    if not paths or len(matches) != len(paths):
        raise ParseError(f"expected {len(paths)} lines of df -Pk, found {len(matches)}")
    return {path: int(match[1]) // 1024 for path, match in zip(paths, matches, strict=True)}
