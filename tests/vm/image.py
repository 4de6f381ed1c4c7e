"""The disk that virtual machines of the tests start from: Debian 12 with its own kernel and GRUB, on one ext4 file."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpunode.lab.recipe import Mirror, find_mirror

CACHE_VARIABLE = "GPUNODE_TEST_VM_CACHE"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
BUILD_LIMIT_S = 1800
SIZE = "12G"
LABEL = "gpunode-root"
USER = "admin"
PACKAGES = (
    "apt",
    "ca-certificates",
    "dbus",
    "e2fsprogs",
    "grub-pc",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "libpam-systemd",
    "linux-image-cloud-amd64",
    "openssh-server",
    "pciutils",
    "procps",
    "python3",
    "sudo",
    "systemd-sysv",
    "udev",
)
# SeaBIOS loads boot.img and core.img from a disk of their own; core.img finds the rest on the root file system.
BOOT_SCRIPT = f"""\
search.fs_label {LABEL} root
set prefix=($root)/boot/grub
"""
FILES = {
    "etc/fstab": f"LABEL={LABEL} / ext4 errors=remount-ro 0 1\n",
    "etc/hostname": "vm\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 vm\n",
    "etc/resolv.conf": "nameserver 10.0.2.3\n",
    "etc/systemd/network/20-wired.network": "[Match]\nType=ether\nKind=!*\n\n[Network]\nDHCP=ipv4\n",
    "etc/initramfs-tools/conf.d/test-vm": "MODULES=list\n",
    "etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\next4\n",
    "etc/default/grub.d/10-test-vm.cfg": (
        "GRUB_TIMEOUT=0\nGRUB_TERMINAL=console\nGRUB_DISABLE_OS_PROBER=true\n"
        'GRUB_CMDLINE_LINUX_DEFAULT=""\nGRUB_CMDLINE_LINUX="console=ttyS0"\n'
    ),
    f"etc/sudoers.d/{USER}": f"{USER} ALL=(ALL) NOPASSWD: ALL\n",
    "root/early.cfg": BOOT_SCRIPT,
}
SETUP = f"""\
set -eu
useradd --create-home --shell /bin/bash {USER}
systemctl enable --quiet systemd-networkd
systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer systemd-networkd-wait-online.service
update-initramfs -u >/dev/null
mkdir -p /boot/grub
cp -r /usr/lib/grub/i386-pc /boot/grub/
grub-mkimage -O i386-pc -c /root/early.cfg -p /boot/grub -o /root/core.img biosdisk ext2 search search_label normal
cat /usr/lib/grub/i386-pc/boot.img /root/core.img > /root/boot.img
kernel=$(basename /boot/vmlinuz-*)
# grub-mkconfig needs the disk that the tree is not on yet: the first boot has this, and every update-grub replaces it.
cat > /boot/grub/grub.cfg <<END
linux /boot/$kernel root=LABEL={LABEL} ro console=ttyS0
initrd /boot/initrd.img-${{kernel#vmlinuz-}}
boot
END
rm -f /etc/ssh/ssh_host_*
"""


@dataclass(frozen=True)
class Image:
    """What a build left in its folder."""

    folder: Path

    @property
    def disk(self) -> Path:
        """The root file system; machines write to an overlay."""
        return self.folder / "root.ext4"

    @property
    def boot(self) -> Path:
        """The disk with GRUB's first part."""
        return self.folder / "boot.img"

    @property
    def key(self) -> Path:
        """The private key of ``admin``."""
        return self.folder / "key"

    @property
    def host_key(self) -> str:
        """Type and key of the machine's sshd; empty for an image without one."""
        if not (self.folder / "host_key.pub").exists():
            return ""
        return " ".join((self.folder / "host_key.pub").read_text(encoding="ascii").split()[:2])


def built(*more: str, components: str = "main", setup: str = "") -> Image:
    """Return the image, with more packages; build it where this recipe was never built here. One build at a time.

    Packages are installed by this machine's own processor: the emulated one takes ten times as long. ``setup`` is a
    script that runs at the end, outside of the tree (its first argument), with apt configured for it.
    """
    mirror = find_mirror()
    cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "gpunode" / "test-vm")
    cache.mkdir(parents=True, exist_ok=True)
    packages = (*PACKAGES, *more)
    recipe = repr((packages, FILES, SETUP, SIZE, mirror.archive, *([components, setup] if setup else [])))
    folder = cache / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in cache.glob("*.new"):
                shutil.rmtree(old)
            draft = folder.with_suffix(".new")
            draft.mkdir()
            build(draft, mirror, packages, components, setup)
            draft.rename(folder)
    return Image(folder)


def build(
    folder: Path, mirror: Mirror, packages: tuple[str, ...], components: str, setup: str, *, sealed: bool = False
) -> Image:
    """Make disk, boot disk and keys in a folder; ``sealed``: the setup removed the identity, and it stays removed."""
    for name in ("key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(folder / name))
    with tempfile.TemporaryDirectory(prefix="gpunode-vm-", dir="/var/tmp") as work:
        extra, tree = Path(work) / "extra", Path(work) / "tree"
        for path, text in FILES.items():
            target = extra / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            target.chmod(0o440 if "sudoers" in path else 0o644)
        archive, security = mirror.archive, mirror.security
        hook = Path(work) / "setup"
        hook.write_text(f"#!/bin/bash\nset -eu\n{setup}", encoding="utf-8")
        hook.chmod(0o700)
        _run(
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            "--format=directory",
            f"--include={','.join(packages)}",
            '--essential-hook=echo "grub-pc grub-pc/install_devices_empty boolean true"'
            ' | chroot "$1" debconf-set-selections',
            f"--customize-hook=sync-in {extra} /",
            f'--customize-hook=chroot "$1" sh -c {_quoted(SETUP)}',
            f"--customize-hook={hook}",
            "bookworm",
            str(tree),
            f"deb [signed-by={KEYRING}] {archive} bookworm {components}",
            f"deb [signed-by={KEYRING}] {archive} bookworm-updates {components}",
            f"deb [signed-by={KEYRING}] {security} bookworm-security {components}",
            env={f"{scheme}_proxy": url for scheme, url in mirror.proxies},
        )
        ssh = tree / "home" / USER / ".ssh"
        ssh.mkdir(mode=0o700)
        shutil.copy(folder / "key.pub", ssh / "authorized_keys")
        owner = (tree / "home" / USER).stat()
        for owned in (ssh, ssh / "authorized_keys"):
            os.chown(owned, owner.st_uid, owner.st_gid)
        if sealed:
            for name in ("host_key", "host_key.pub"):
                (folder / name).unlink()
        else:
            _identify(folder, tree)
        shutil.move(tree / "root/boot.img", folder / "boot.img")
        with (folder / "boot.img").open("ab") as boot:
            boot.truncate(1 << 20)
        _run("mke2fs", "-q", "-t", "ext4", "-L", LABEL, "-d", str(tree), str(folder / "root.ext4"), SIZE)
    return Image(folder)


def _identify(folder: Path, tree: Path) -> None:
    """Give the machine a host key that its tester knows, and no machine id."""
    shutil.copy(folder / "host_key", tree / "etc/ssh/ssh_host_ed25519_key")
    shutil.copy(folder / "host_key.pub", tree / "etc/ssh/ssh_host_ed25519_key.pub")
    (tree / "etc/machine-id").write_text("", encoding="ascii")


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"


def _run(*argv: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        argv,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_LIMIT_S,
        env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
        start_new_session=True,
    )
    assert done.returncode == 0, f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}"
