"""The content of a package as a folder, and Debian packages of it, with the real tools."""

import gzip
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

LIMIT_S = 600
EPOCH = "1790000000"  # one time for all files, so that the same plan gives the same packages


class Tools:
    """The packaging tools at work in one folder; what was made once is linked the second time."""

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
            self.tree(package, tree)
            control = {"Package": package["name"], "Version": package["version"]}
            control |= {"Architecture": package["architecture"], **package["fields"]}
            control["Description"] = package["description"]
            debian = tree / "DEBIAN"
            debian.mkdir()
            (debian / "control").write_text("".join(f"{key}: {value}\n" for key, value in control.items()))
            if package["conffiles"]:
                (debian / "conffiles").write_text("".join(f"/{path}\n" for path in package["conffiles"]))
            if package["libraries"]:
                (debian / "triggers").write_text("activate-noawait ldconfig\n")
            for script, text in package["scripts"].items():
                (debian / script).write_text(text)
                (debian / script).chmod(0o755)
            tree.chmod(0o755)
            run(["dpkg-deb", "--build", "--root-owner-group", "-Zgzip", "-z1", str(tree), f"{cached}.new"])
            Path(f"{cached}.new").rename(cached)
            shutil.rmtree(tree)
        os.link(cached, to / name)

    def tree(self, package: dict[str, Any], tree: Path) -> None:
        """Lay down what the package holds below the folder ``tree``."""
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
        """A shared object of that soname which holds its release as the symbol ``gpunode_lab_release``."""
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
        """A kernel module that says what ``modinfo`` asks it; ``signed`` as the kernel's own ``sign-file`` does it."""
        said = {
            "version": release,
            "license": entry["license"],
            "description": "simulated by gpunode lab",
            "name": entry["name"].replace("-", "_"),
            "depends": "" if entry["name"] == "nvidia" else "nvidia",
            "retpoline": "Y",
            "vermagic": f"{entry['kernel']} SMP preempt mod_unload modversions ",
        }
        words = [f"{key}={text}" for key, text in said.items()]
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
        # struct module_signature of the kernel: PKCS#7, and how long it is
        tail = struct.pack(">BBBBBxxxI", 0, 0, 2, 0, 0, len(signature))
        return unsigned + signature + tail + b"~Module signature appended~\n"

    def _signer(self) -> tuple[Path, Path]:
        """The key and certificate that the look-alike of Canonical signs modules with."""
        with self._lock:
            key, certificate = self._folder / "modules.key", self._folder / "modules.crt"
            if not certificate.exists():
                request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3650", "-sha512"]
                subject = ["-subj", "/CN=Simulated Kernel Module Signing (gpunode lab)"]
                run([*request, *subject, "-keyout", str(key), "-out", str(certificate)])
            return key, certificate


def run(argv: list[str], given: bytes = b"", *, cwd: Path | None = None) -> bytes:
    """The tool's output; it ends this program with its messages where it fails."""
    env = os.environ | {"SOURCE_DATE_EPOCH": EPOCH, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        argv, input=given, capture_output=True, timeout=LIMIT_S, check=False, cwd=cwd, env=env, start_new_session=True
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def compressed(path: Path) -> None:
    """Put ``path``.gz beside it."""
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes(), 6, mtime=0))


def made(path: Path) -> Path:
    """The path, with the folders above it made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def digest(package: dict[str, Any]) -> str:
    """What tells this package from every other."""
    return hashlib.sha256(json.dumps(package, sort_keys=True).encode()).hexdigest()
