"""Facts about the machine and its operating system."""

import re

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line, word
from gpunode.facts.errors import ParseError
from gpunode.facts.models.base import Fact, FactArea, fact

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
