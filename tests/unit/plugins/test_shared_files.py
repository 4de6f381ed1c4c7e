"""Branches share files under other package names: what a real apt and dpkg make of one transaction, in a folder.

Nobody recorded whether NVIDIA's packages declare conflicts between the names with a branch and those without, only that
they share files. Here they declare none.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    shutil.which("apt-get") is None or os.geteuid() != 0, reason="a real transaction needs apt and root"
)
LIBRARY = "usr/lib/libnvidia-cfg.so.1"


class Root:
    """A file system of its own with apt's and dpkg's state, and a repository of small packages."""

    def __init__(self, folder: Path) -> None:
        self.root, self.repository = folder / "root", folder / "repository"
        for name in ("etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d", "var/lib/dpkg/info"):
            (self.root / name).mkdir(parents=True)
        for name in (
            "var/lib/dpkg/updates",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
            "var/log/apt",
        ):
            (self.root / name).mkdir(parents=True)
        (self.root / "var/lib/dpkg/status").touch()
        (self.root / "etc/apt/sources.list").write_text(f"deb [trusted=yes] file:{self.repository} ./\n")
        self.repository.mkdir()

    def publish(self, *packages: tuple[str, str]) -> None:
        rows = []
        for name, version in packages:
            tree = self.root.parent / "tree"
            (tree / "DEBIAN").mkdir(parents=True)
            (tree / LIBRARY).parent.mkdir(parents=True)
            (tree / LIBRARY).write_text(name)
            control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: x <x@y>\nDescription: x\n"
            (tree / "DEBIAN" / "control").write_text(control)
            file = self.repository / f"{name}.deb"
            run("dpkg-deb", "--build", str(tree), str(file))
            data = file.read_bytes()
            sums = f"Filename: ./{file.name}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
            rows.append(control + sums)
            shutil.rmtree(tree)
        (self.repository / "Packages").write_text("\n".join(rows))

    def apt(self, *words: str) -> None:
        state = f"Dir::State::status={self.root}/var/lib/dpkg/status"
        options = [f"Dir={self.root}", state, "APT::Sandbox::User=root", f"DPkg::Options::=--root={self.root}"]
        options += [f"DPkg::Options::=--log={self.root}/dpkg.log", "DPkg::Path=/usr/sbin:/usr/bin:/sbin:/bin"]
        run("apt-get", *(word for option in options for word in ("-o", option)), "--quiet", "--assume-yes", *words)


def run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("way", [("-580", ""), ("", "-580")], ids=["up", "down"])
def test_what_goes_in_the_transaction_goes_before_the_same_file_comes(tmp_path: Path, way: tuple[str, str]) -> None:
    root = Root(tmp_path)
    old, new = (f"libnvidia-cfg1{suffix}" for suffix in way)
    root.publish((old, "580.178.04-1ubuntu1"), (new, "595.91.07-1ubuntu1"))
    root.apt("update")
    root.apt("install", old)
    root.apt("--purge", "--allow-downgrades", "install", new, f"{old}-")
    assert (root.root / LIBRARY).read_text() == new
    steps = [line.split()[2:4] for line in (root.root / "dpkg.log").read_text().splitlines()]
    assert steps.index(["remove", f"{old}:all"]) < steps.index(["install", f"{new}:all"])
