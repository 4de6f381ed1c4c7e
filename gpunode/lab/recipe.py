"""Recipe of a lab node's image: Debian's mirror, packages, files and settings. A change here results in a new image."""

import hashlib
import io
import json
import os
import platform
import re
import shlex
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.packages.lookalike import LOOKALIKES, files_of, packages_of, setup_of


@dataclass(frozen=True)
class Entry:
    """A file, or a folder where ``text`` is None; ``path`` has no leading slash."""

    path: str
    text: str | None
    mode: int
    uid: int = 0
    gid: int = 0


def tar_of(entries: Iterable[Entry]) -> bytes:
    """Return the entries as an uncompressed tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.mode, info.uid, info.gid = entry.mode, entry.uid, entry.gid
            if entry.text is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
                continue
            data = entry.text.encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


MIRROR_VARIABLE = "GPUNODE_LAB_MIRROR"
APT_LIMIT_S = 60
"""For one answer of apt's tools, which read its lists."""
_NEEDS_MIRROR = f"set a Debian mirror with --mirror URL or {MIRROR_VARIABLE}=URL (security updates: URL-security)"


@dataclass(frozen=True)
class Mirror:
    """Two archives (URLs without a closing slash) and the proxies for them.

    ``proxies`` maps ``http`` and ``https`` to a proxy's URL, as apt writes it; a proxy may carry a password, so
    proxies are never printed.
    """

    archive: str
    security: str
    proxies: tuple[tuple[str, str], ...] = ()

    @property
    def proxies_for_nodes(self) -> tuple[tuple[str, str], ...]:
        """Return the proxies that a node can reach too, without those on this machine's loopback."""
        return tuple((scheme, url) for scheme, url in self.proxies if not _is_loopback(url))


def find_mirror(requested: str | None = None) -> Mirror:
    """Return the mirror given as argument, else the one in the environment, else the one this machine's apt uses.

    Raises UsageError for an invalid URL, UndeterminedError if this machine's apt has no Debian archive configured.
    """
    proxies = _proxies(_run(["apt-config", "dump"]))
    if named := requested or os.environ.get(MIRROR_VARIABLE):
        archive = _checked(named)
        return Mirror(archive, f"{archive}-security", proxies)
    targets = _run(["apt-get", "indextargets", "--format", "$(ORIGIN)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)"])
    known, security = parse_targets(targets)
    if known is None:
        raise UndeterminedError(f"apt on this machine has no Debian archive: apt-get update, or {_NEEDS_MIRROR}")
    return Mirror(known, security or f"{known}-security", proxies)


def parse_targets(text: str) -> tuple[str | None, str | None]:
    """Parse archive and security archive from the lines ``origin|release|component|uri`` of apt's index targets."""
    archive = security = None
    for line in text.splitlines():
        origin, release, component, uri = [*line.split("|", 3), "", "", ""][:4]
        if origin != "Debian" or component != "main" or not uri.startswith(("http://", "https://")):
            continue
        if release.endswith("-security"):
            security = security or uri.rstrip("/")
        elif not release.endswith(("-backports", "-updates")):
            archive = archive or uri.rstrip("/")
    return archive, security


def parse_proxies(text: str) -> tuple[tuple[str, str], ...]:
    """Parse the proxies from the output of ``apt-config dump``."""
    proxies = {}
    for line in text.splitlines():
        key, _, rest = line.partition(" ")
        for scheme in ("http", "https"):
            if key.lower() == f"acquire::{scheme}::proxy":
                url = (shlex.split(rest.rstrip(";")) or [""])[0]
                if url and url != "DIRECT":
                    proxies[scheme] = url
    return tuple(sorted(proxies.items()))


def redacted(text: str) -> str:
    """Return the text without the user names and passwords in its URLs."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _proxies(apt_config: str) -> tuple[tuple[str, str], ...]:
    """Return apt's proxies, completed from the environment, as apt itself does."""
    proxies = {scheme: url for scheme in ("http", "https") if (url := os.environ.get(f"{scheme}_proxy"))}
    return tuple(sorted((proxies | dict(parse_proxies(apt_config))).items()))


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or set(url) & set(" \t\n\"'[]"):
        raise UsageError(f"{url!r} is not the URL of a Debian mirror: {_NEEDS_MIRROR}")
    return url.rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _run(argv: list[str]) -> str:
    """Return the output of one of apt's tools; empty without apt. Raises UndeterminedError if it does not end."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=APT_LIMIT_S, check=False, start_new_session=True
        )
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        raise UndeterminedError(
            f"{argv[0]} did not answer within {APT_LIMIT_S} s: is this machine overloaded?"
        ) from None
    return done.stdout if done.returncode == 0 else ""


KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ADMIN = "admin"  # sudo without a password, as Ansible's account has on most servers
OPERATOR = "operator"  # sudo asks for a password
UIDS = {ADMIN: 1000, OPERATOR: 1001}
GID = 100  # users


@dataclass(frozen=True)
class LabSystem:
    """An operating system of nodes; the names of its nodes begin with ``short``.

    ``codename`` is the Debian release that the tree is built from. A look-alike has Debian's packages under another
    system's name: programs that look at os-release, package manager and kernel packages behave as on that system.
    """

    id: str
    codename: str
    short: str

    @property
    def lookalike(self) -> bool:
        """Return whether the tree is Debian's under another name."""
        return self.id in LOOKALIKES


SYSTEMS = {
    "debian-12": LabSystem("debian-12", "bookworm", "deb12"),
    "debian-13": LabSystem("debian-13", "trixie", "deb13"),
    "ubuntu-22.04": LabSystem("ubuntu-22.04", "bookworm", "ubu2204"),
    "ubuntu-24.04": LabSystem("ubuntu-24.04", "bookworm", "ubu2404"),
    "ubuntu-26.04": LabSystem("ubuntu-26.04", "trixie", "ubu2604"),  # has the nearest apt and initramfs-tools
    "rocky-9": LabSystem("rocky-9", "bookworm", "rocky9"),
    "rocky-10": LabSystem("rocky-10", "trixie", "rocky10"),
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# Packages of a server installation that Ansible needs. The kernel is installed as on a server, with its initramfs, but
# never runs: a node runs the host's kernel, which no package of the node owns.
PACKAGES = (
    "apt",
    "ca-certificates",
    "dbus",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "libpam-systemd",
    "openssh-server",
    "pciutils",
    "procps",
    "python3",
    "sudo",
    "systemd",
    "systemd-sysv",
    "unattended-upgrades",
    "udev",
)

# Manuals and translations are half of a small image. dpkg keeps these filters, so that its database stays consistent.
DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
    "force-unsafe-io",  # the packages of a node need not survive a power failure
)

# In place before the kernel is installed. The initramfs of a node never boots: it has few modules and is packed fast.
EARLY_FILES = {"etc/initramfs-tools/conf.d/gpunode-lab": "MODULES=list\nCOMPRESS=gzip\nCOMPRESSLEVEL=1\n"}

# Units that start on a timer: apt's would hold the package lock during a test. Units that cannot work in a container
# have a condition of their own and do not start.
MASKED_UNITS = ("apt-daily.timer", "apt-daily-upgrade.timer")

_SSHD = """\
# Managed by gpunode lab: keys alone, and the one host key that the controller knows.
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""

_SETUP = f"""\
set -eu
useradd --create-home --shell /bin/bash --gid {GID} --uid {UIDS[ADMIN]} {ADMIN}
useradd --create-home --shell /bin/bash --gid {GID} --uid {UIDS[OPERATOR]} {OPERATOR}
systemctl mask --quiet {" ".join(MASKED_UNITS)}
rm -f /etc/ssh/ssh_host_* /etc/apt/sources.list
"""

# Every boot gets a boot id of its own, as in systemd-nspawn: the host kernel's id never changes, and Ansible's reboot
# module would wait for a change.
_INIT = """\
cat /proc/sys/kernel/random/uuid > /run/boot-id &&
mount --bind /run/boot-id /proc/sys/kernel/random/boot_id &&
exec /sbin/init
"""


@dataclass(frozen=True)
class Recipe:
    """One image: everything that decides its content."""

    system: LabSystem
    architecture: str
    mirror: Mirror

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the packages to install in addition to the essential ones."""
        if self.system.lookalike:
            return (*PACKAGES, *packages_of(self.system.id))
        return (*PACKAGES, f"linux-image-cloud-{self.architecture}")

    @property
    def sources(self) -> list[str]:
        """Return the archive's lines as mmdebstrap reads them."""
        code = self.system.codename
        suites = ((self.mirror.archive, code), (self.mirror.archive, f"{code}-updates"))
        return [
            f"deb [signed-by={KEYRING}] {url} {suite} main"
            for url, suite in (*suites, (self.mirror.security, f"{code}-security"))
        ]

    @property
    def files(self) -> dict[str, str]:
        """Return the files added to the tree, by path."""
        code = self.system.codename
        apt = [
            f"Types: deb\nURIs: {url}\nSuites: {suites}\nComponents: main\nSigned-By: {KEYRING}\n"
            for url, suites in (
                (self.mirror.archive, f"{code} {code}-updates"),
                (self.mirror.security, f"{code}-security"),
            )
        ]
        files = {
            "etc/apt/apt.conf.d/90lab-languages": 'Acquire::Languages "none";\n',
            "etc/apt/sources.list.d/debian.sources": "\n".join(apt),
            "etc/gpunode/lab-node": f"{self.system.id}\n",
            "etc/ssh/sshd_config.d/10-gpunode-lab.conf": _SSHD,
            "etc/sudoers.d/gpunode-lab": f"{ADMIN} ALL=(ALL) NOPASSWD: ALL\n{OPERATOR} ALL=(ALL) ALL\n",
        }
        if self.system.lookalike:
            files |= files_of(self.system.id)
        if proxies := self.mirror.proxies_for_nodes:
            lines = [f'Acquire::{scheme}::Proxy "{url}";\n' for scheme, url in proxies]
            lines.append('Acquire::http::Proxy::vendor "DIRECT";\n')  # the lab's own repository
            files["etc/apt/apt.conf.d/90gpunode-lab-proxy"] = "".join(lines)
        return files

    @property
    def keeps_lists(self) -> bool:
        """Return whether the image has apt's lists, as an installed server does: a node fetches what changed since.

        A look-alike has other sources than those that its tree is built from.
        """
        return not self.system.lookalike

    @property
    def setup(self) -> str:
        """Return a shell script, run inside the tree when all packages and files are in it."""
        return _SETUP + setup_of(self.system.id) if self.system.lookalike else _SETUP

    @property
    def init(self) -> tuple[str, ...]:
        """Return the command that the container starts and that then executes systemd."""
        return ("/bin/sh", "-c", _INIT)

    @property
    def digest(self) -> str:
        """Return twelve hex digits that change with the content of the image."""
        parts = [
            asdict(self),
            self.packages,
            DPKG_OPTIONS,
            EARLY_FILES,
            self.sources,
            self.files,
            self.keeps_lists,
            self.setup,
            self.init,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def tree(self) -> bytes:
        """Return ``files`` as a tar archive, owned by root."""
        return tar_of([Entry(path, text, 0o440 if "sudoers.d" in path else 0o644) for path, text in self.files.items()])

    @property
    def early_tree(self) -> bytes:
        """Return the files that precede the packages as a tar archive, owned by root."""
        return tar_of([Entry(path, text, 0o644) for path, text in EARLY_FILES.items()])


def system_named(name: str) -> LabSystem:
    """Return the system of that name; UsageError lists the known ones."""
    if name not in SYSTEMS:
        raise UsageError(f"--os {name}: unknown lab system; known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def architecture() -> str:
    """Return Debian's name for this machine's architecture; UsageError if the lab has no kernel for it."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise UsageError(f"lab nodes exist for {' and '.join(_ARCHITECTURES)}; this machine is {machine}")
    return _ARCHITECTURES[machine]
