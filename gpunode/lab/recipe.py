"""What a lab node's image is made of: packages, files and settings. A change here is a new image."""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass

from gpunode.errors import UsageError
from gpunode.lab.archive import Entry, tar_of
from gpunode.lab.mirror import Mirror
from gpunode.lab.packages.lookalike import LOOKALIKES, files_of, packages_of, setup_of

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
ADMIN = "admin"  # sudo without a password, as Ansible's account has on most servers
OPERATOR = "operator"  # sudo that asks for a password
UIDS = {ADMIN: 1000, OPERATOR: 1001}
GID = 100  # users


@dataclass(frozen=True)
class LabSystem:
    """An operating system that a node can have; ``short`` begins the names of its nodes.

    ``codename`` is Debian's release that the tree is made of. A look-alike has Debian's packages under another system's
    name: what goes by os-release, package manager and kernel packages acts as there.
    """

    id: str
    codename: str
    short: str

    @property
    def lookalike(self) -> bool:
        """Whether the tree is Debian's under another name."""
        return self.id in LOOKALIKES


SYSTEMS = {
    "debian-12": LabSystem("debian-12", "bookworm", "deb12"),
    "debian-13": LabSystem("debian-13", "trixie", "deb13"),
    "ubuntu-22.04": LabSystem("ubuntu-22.04", "bookworm", "ubu2204"),
    "ubuntu-24.04": LabSystem("ubuntu-24.04", "bookworm", "ubu2404"),
    "ubuntu-26.04": LabSystem("ubuntu-26.04", "trixie", "ubu2604"),  # the nearest apt and initramfs-tools
    "rocky-9": LabSystem("rocky-9", "bookworm", "rocky9"),
    "rocky-10": LabSystem("rocky-10", "trixie", "rocky10"),
}
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# What a server installation has and Ansible needs. The kernel is installed as on a server, with its initramfs,
# but never runs: a node runs the host's kernel, which belongs to no package of the node.
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

# Manuals and translations are half of a small image. dpkg keeps these filters, so that it stays consistent.
DPKG_OPTIONS = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/man/*",
)

# Units that would act at a moment of their own choosing: apt's timers would take the package lock under a test.
# Everything that cannot work in a container has a condition of its own and stays away by itself.
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

# Every boot gets a boot id of its own, as systemd-nspawn does it: the kernel's is the host's and never changes, and
# Ansible's reboot module would wait for it.
_INIT = """\
cat /proc/sys/kernel/random/uuid > /run/boot-id &&
mount --bind /run/boot-id /proc/sys/kernel/random/boot_id &&
exec /sbin/init
"""


@dataclass(frozen=True)
class Recipe:
    """One image: everything that decides what is in it."""

    system: LabSystem
    architecture: str
    mirror: Mirror

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages to install beside the essential ones."""
        if self.system.lookalike:
            return (*PACKAGES, *packages_of(self.system.id))
        return (*PACKAGES, f"linux-image-cloud-{self.architecture}")

    @property
    def sources(self) -> list[str]:
        """The archive's lines as mmdebstrap takes them."""
        code = self.system.codename
        suites = ((self.mirror.archive, code), (self.mirror.archive, f"{code}-updates"))
        return [
            f"deb [signed-by={KEYRING}] {url} {suite} main"
            for url, suite in (*suites, (self.mirror.security, f"{code}-security"))
        ]

    @property
    def files(self) -> dict[str, str]:
        """Files put into the tree, by path."""
        code = self.system.codename
        apt = [
            f"Types: deb\nURIs: {url}\nSuites: {suites}\nComponents: main\nSigned-By: {KEYRING}\n"
            for url, suites in (
                (self.mirror.archive, f"{code} {code}-updates"),
                (self.mirror.security, f"{code}-security"),
            )
        ]
        files = {
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
    def setup(self) -> str:
        """Shell script, run inside the tree when all packages and files are in it."""
        return _SETUP + setup_of(self.system.id) if self.system.lookalike else _SETUP

    @property
    def init(self) -> tuple[str, ...]:
        """What the container starts; it becomes systemd."""
        return ("/bin/sh", "-c", _INIT)

    @property
    def digest(self) -> str:
        """Twelve hex digits that change whenever the image would."""
        parts = [asdict(self), self.packages, DPKG_OPTIONS, self.sources, self.files, self.setup, self.init]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def tree(self) -> bytes:
        """``files`` as a tar archive, owned by root."""
        return tar_of([Entry(path, text, 0o440 if "sudoers.d" in path else 0o644) for path, text in self.files.items()])


def system_named(name: str) -> LabSystem:
    """The system of that name; UsageError names those there are."""
    if name not in SYSTEMS:
        raise UsageError(f"--os {name}: unknown lab system; known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def architecture() -> str:
    """Debian's name for this machine's architecture; UsageError where the lab has no kernel for it."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise UsageError(f"lab nodes exist for {' and '.join(_ARCHITECTURES)}; this machine is {machine}")
    return _ARCHITECTURES[machine]
