"""Runs in the vendor's image: builds every package of the plan with the real tools, and the unsigned indices.

Nothing here depends on a lab: keys, signatures and what holds a key come later (``publish.py``).
"""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path("/srv/www")
LIMIT_S = 600
EPOCH = "1790000000"  # one time for all files, so that the same plan gives the same packages


def main(plan_file: str) -> None:
    """Build what the plan names below ``ROOT``."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        tools = Tools(Path(folder))
        for repository in plan.values():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(
                    pool.map(
                        lambda package, to=ROOT / repository["path"]: _place(tools, package, to), repository["packages"]
                    )
                )
            _index(repository)


def _place(tools: "Tools", package: dict[str, Any], root: Path) -> None:
    """Build a package to where its repository has it."""
    folder = root
    if package["suite"]:
        source = package["fields"].get("Source", package["name"])
        folder = root / "pool" / package["suite"] / package["component"] / source[0] / source
    folder.mkdir(parents=True, exist_ok=True)
    tools.deb(package, folder)


def _index(repository: dict[str, Any]) -> None:
    """Write the repository's unsigned indices."""
    where = ROOT / repository["path"]
    if repository["kind"] == "flat":
        (where / "Packages").write_bytes(run(["apt-ftparchive", "packages", "."], cwd=where))
    elif repository["kind"] == "suites":
        for suite in sorted({package["suite"] for package in repository["packages"]}):
            for component in repository["components"]:
                index = _made(where / "dists" / suite / component / "binary-amd64/Packages")
                pool = f"pool/{suite}/{component}"
                (where / pool).mkdir(parents=True, exist_ok=True)
                index.write_bytes(run(["apt-ftparchive", "packages", pool], cwd=where))


class Tools:
    """The packaging tools at work in one folder; what was made once is linked the second time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def deb(self, package: dict[str, Any], to: Path) -> None:
        """Build one Debian package into ``to``."""
        version = package["version"].partition(":")[2] or package["version"]
        name = f"{package['name']}_{version}_{package['architecture']}.deb"
        cached = self._folder / f"{_digest(package)}.deb"
        if not cached.exists():
            tree = Path(tempfile.mkdtemp(dir=self._folder))
            self._tree(package, tree)
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

    def _tree(self, package: dict[str, Any], tree: Path) -> None:
        for entry in package["files"]:
            path = _made(tree / entry["path"])
            path.write_text(entry["text"], encoding="utf-8")
            path.chmod(int(entry["mode"], 8))
        for entry in package["links"]:
            _made(tree / entry["path"]).symlink_to(entry["to"])
        for entry in package["libraries"]:
            path = _made(tree / entry["path"])
            shutil.copyfile(self._library(entry["soname"], package["release"]), path)
            path.chmod(0o644)
        for entry in package["modules"]:
            _made(tree / entry["path"]).write_bytes(self._module(entry, package["release"]))
        for to, source in package.get("copies", {}).items():
            shutil.copyfile(source, _made(tree / to))
        note = _made(tree / "usr/share/doc" / package["name"] / "copyright")
        note.write_text("Made by gpunode lab. Simulated: nothing of NVIDIA's is in this package.\n")

    def _library(self, soname: str, release: str) -> Path:
        """A shared object of that soname which holds its release as the symbol ``gpunode_lab_release``."""
        made = self._folder / f"{soname}-{release}"
        if not made.exists():
            source = (
                ".section .rodata\n.globl gpunode_lab_release\n.type gpunode_lab_release, @object\n"
                f'gpunode_lab_release: .asciz "{release}"\n.size gpunode_lab_release, . - gpunode_lab_release\n'
                '.section .note.GNU-stack,"",@progbits\n'
            )
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                run(["as", "-o", f"{folder}/o", "-"], source.encode())
                run(["ld", "-shared", "-soname", soname, "-s", "-o", f"{folder}/so", f"{folder}/o"])
                Path(folder, "so").rename(made)
        return made

    def _module(self, entry: dict[str, str], release: str) -> bytes:
        """A kernel module that says what ``modinfo`` asks it, signed as the kernel's own ``sign-file`` does it."""
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


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _digest(package: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(package, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1])
