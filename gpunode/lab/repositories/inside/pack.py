"""The content of a package as a folder, and Debian packages of it, with the real tools."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

DEBS = Path("/srv/gpunode/debs")
"""Debian packages from which some of the lab's packages are built."""
LIMIT_S = 600
_KEPT = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Multi-Arch", "Breaks", "Replaces")
EPOCH = "1790000000"  # one time for all files, so that the same plan results in the same packages


class Tools:
    """The packaging tools, working in one folder; a file that was built once is linked the second time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def deb(self, package: dict[str, Any], to: Path) -> None:
        """Build one Debian package into ``to``."""
        version = package["version"].partition(":")[2] or package["version"]
        name = f"{package['name']}_{version}_{package['architecture']}.deb"
        cached = self._folder / f"{digest(package)}.deb"
        if not cached.exists():
            tree = Path(tempfile.mkdtemp(dir=self._folder))
            debian = tree / "DEBIAN"
            control = {"Package": package["name"], "Version": package["version"]}
            control |= {"Architecture": package["architecture"], **package["fields"]}
            control["Description"] = package["description"]
            if package["repack"]:
                self._unpack(package, tree, control)
            else:
                debian.mkdir()
                self.tree(package, tree)
                if package["conffiles"]:
                    (debian / "conffiles").write_text("".join(f"/{path}\n" for path in package["conffiles"]))
                if package["libraries"]:
                    (debian / "triggers").write_text("activate-noawait ldconfig\n")
            (debian / "control").write_text("".join(f"{key}: {value}\n" for key, value in control.items()))
            for script, text in package["scripts"].items():
                (debian / script).write_text(text)
                (debian / script).chmod(0o755)
            new = Path(f"{cached}.new")
            new.write_bytes(deb_of(tree))
            new.rename(cached)
            shutil.rmtree(tree)
        (to / name).unlink(missing_ok=True)  # of a build that was cut off
        os.link(cached, to / name)

    def _unpack(self, package: dict[str, Any], tree: Path, control: dict[str, str]) -> None:
        """Unpack a Debian package, scripts included; keep its dependencies, drop its version."""
        self.repacked(package, tree)
        original = (tree / "DEBIAN/control").read_text(encoding="utf-8")
        kept = {key: text for key, text in re.findall(r"^(\S+): (.+)$", original, re.MULTILINE) if key in _KEPT}
        control |= kept | {key: control[key] for key in kept if key in package["fields"]}

    def repacked(self, package: dict[str, Any], tree: Path) -> None:
        """Unpack the files and scripts of a Debian package, with our version in its program's output.

        If several are named, the scripts are those of the first.
        """
        first, *others = package["repack"].split()
        for name in others:
            (more,) = DEBS.glob(f"{name}_*.deb")
            run(["dpkg-deb", "--extract", str(more), str(tree)])
        (source,) = DEBS.glob(f"{first}_*.deb")
        run(["dpkg-deb", "--extract", str(source), str(tree)])
        run(["dpkg-deb", "--control", str(source), str(tree / "DEBIAN")])
        old = source.name.split("_")[1].partition("-")[0]
        new = package["version"].rpartition(":")[2].partition("-")[0]
        for path in tree.rglob(first):
            # The length of a compiled program must not change.
            if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] != b"\x7fELF":
                text = path.read_text(encoding="utf-8", errors="surrogateescape")
                path.write_text(text.replace(old, new), encoding="utf-8", errors="surrogateescape")

    def tree(self, package: dict[str, Any], tree: Path) -> None:
        """Write the package's content below the folder ``tree``."""
        for entry in package["files"]:
            path = made(tree / entry["path"])
            path.write_text(entry["text"], encoding="utf-8")
            path.chmod(int(entry["mode"], 8))
        for entry in package["links"]:
            made(tree / entry["path"]).symlink_to(entry["to"])
        for entry in package["libraries"]:
            path = made(tree / entry["path"])
            shutil.copyfile(self.library(entry["soname"], package["release"]), path)
            path.chmod(0o644)
        for entry in package["modules"]:
            made(tree / entry["path"]).write_bytes(self.module(entry, package["release"]))
        for to, source in package.get("copies", {}).items():
            shutil.copyfile(source, made(tree / to))
        note = made(tree / "usr/share/doc" / package["name"] / "copyright")
        note.write_text("Made by gpunode lab. Simulated: nothing of NVIDIA's is in this package.\n")

    def library(self, soname: str, release: str) -> Path:
        """Return a shared object of that soname with its release as the symbol ``gpunode_lab_release``."""
        cached = self._folder / f"{soname}-{release}"
        if not cached.exists():
            source = (
                ".section .rodata\n.globl gpunode_lab_release\n.type gpunode_lab_release, @object\n"
                f'gpunode_lab_release: .asciz "{release}"\n.size gpunode_lab_release, . - gpunode_lab_release\n'
                '.section .note.GNU-stack,"",@progbits\n'
            )
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                run(["as", "-o", f"{folder}/o", "-"], source.encode())
                run(["ld", "-shared", "-soname", soname, "-s", "-o", f"{folder}/so", f"{folder}/o"])
                Path(folder, "so").rename(cached)
        return cached

    def module(self, entry: dict[str, str], release: str, *, signed: bool = True) -> bytes:
        """Return a kernel module with the fields that ``modinfo`` reads; ``signed`` by the kernel's ``sign-file``."""
        fields = {
            "version": release,
            "license": entry["license"],
            "description": "simulated by gpunode lab",
            "name": entry["name"].replace("-", "_"),
            "depends": "" if entry["name"] == "nvidia" else "nvidia",
            "retpoline": "Y",
            "vermagic": f"{entry['kernel']} SMP preempt mod_unload modversions ",
        }
        words = [f"{key}={text}" for key, text in fields.items()]
        if entry["name"] == "nvidia":
            words += [f"alias=pci:v000010DEd*sv*sd*bc{code}i00*" for code in ("03sc00", "03sc02", "06sc80")]
            words += [f"firmware=nvidia/{release}/gsp_{chip}.bin" for chip in ("tu10x", "ga10x")]
        source = '.section .modinfo,"a"\n' + "".join(f'.asciz "{word}"\n' for word in words)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            run(["as", "-o", f"{folder}/ko", "-"], source.encode())
            unsigned = Path(folder, "ko").read_bytes()
            if not signed:
                return unsigned
            cms = ["openssl", "cms", "-sign", "-binary", "-noattr", "-nocerts", "-nosmimecap", "-md", "sha512"]
            key, certificate = self._signer()
            files = ["-signer", str(certificate), "-inkey", str(key), "-outform", "DER", "-in", f"{folder}/ko"]
            signature = run([*cms, *files])
        # struct module_signature of the kernel: PKCS#7, and its length
        tail = struct.pack(">BBBBBxxxI", 0, 0, 2, 0, 0, len(signature))
        return unsigned + signature + tail + b"~Module signature appended~\n"

    def _signer(self) -> tuple[Path, Path]:
        """Return the key and certificate with which the look-alike of Canonical signs modules."""
        with self._lock:
            key, certificate = self._folder / "modules.key", self._folder / "modules.crt"
            if not certificate.exists():
                request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3650", "-sha512"]
                subject = ["-subj", "/CN=Simulated Kernel Module Signing (gpunode lab)"]
                run([*request, *subject, "-keyout", str(key), "-out", str(certificate)])
            return key, certificate


def run(argv: list[str], stdin: bytes = b"", *, cwd: Path | None = None) -> bytes:
    """Return the tool's output; exit with the tool's messages if it fails."""
    env = os.environ | {"SOURCE_DATE_EPOCH": EPOCH, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        argv, input=stdin, capture_output=True, timeout=LIMIT_S, check=False, cwd=cwd, env=env, start_new_session=True
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def compressed(path: Path) -> None:
    """Write ``path``.gz next to it."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 6, mtime=0))


def made(path: Path) -> Path:
    """Create the folders above the path; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def deb_of(tree: Path) -> bytes:
    """Return the Debian package of a folder with ``DEBIAN`` in it, everything owned by root (deb(5))."""
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": _tar_gz(tree / "DEBIAN", frozenset()),
        "data.tar.gz": _tar_gz(tree, frozenset({"DEBIAN"})),
    }
    archive = b"!<arch>\n"
    for name, data in parts.items():
        head = f"{name:<16}{EPOCH:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n"
        archive += head.encode() + data + b"\n" * (len(data) % 2)
    return archive


def _tar_gz(folder: Path, without: frozenset[str]) -> bytes:
    def owned(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = int(EPOCH)
        if entry.isdir():
            entry.mode = 0o755
        return entry

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(owned(archive.gettarinfo(str(folder), "./")))
        for path in sorted(folder.iterdir()):
            if path.name not in without:
                archive.add(path, f"./{path.name}", filter=owned)
    return gzip.compress(data.getvalue(), 1, mtime=0)


def digest(package: dict[str, Any]) -> str:
    """Return a digest of everything that distinguishes this package."""
    return hashlib.sha256(json.dumps(package, sort_keys=True).encode()).hexdigest()
