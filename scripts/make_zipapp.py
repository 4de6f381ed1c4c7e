"""Build gpunode as one file (``gpunode.pyz``) for several Pythons: with all dependencies except Ansible.

pip downloads the dependencies with the hashes of requirements.lock. Compiled modules have their Python version in their
names, so those of several Pythons are side by side in one archive. Ansible is excluded: its programs do not run from an
archive, so inventories (-i) and ``provision`` need an installed gpunode.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"ansible-core"}
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_GLIBC_MINOR, NEWEST_GLIBC_MINOR = 17, 28
"""manylinux_2_17 to manylinux_2_28: those that Debian 12 and RHEL 9 can load."""
PIP_LIMIT_S = 600


def needed() -> list[str]:
    """Return the names of all packages that an installed gpunode needs, from the environment of this interpreter."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [Requirement(text) for text in project["dependencies"]]
    names: list[str] = []
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.append(name)
        waiting += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return sorted(names)


def locked(names: Sequence[str]) -> str:
    """Return their lines of requirements.lock, hashes included; SystemExit for a name that is not locked."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    by_name: dict[str, list[str]] = {}
    for entry in re.finditer(r"^([A-Za-z0-9._-]+)==.*(?:\n {4}--hash=.*)+", text, re.MULTILINE):
        by_name.setdefault(canonicalize_name(entry[1]), []).append(entry[0])
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SystemExit(f"zipapp: not in requirements.lock: {', '.join(missing)} (make lock)")
    return "\n".join(line for name in names for line in by_name[name]) + "\n"


def pip(*words: str | Path) -> None:
    """Run pip; SystemExit if it fails."""
    argv = [sys.executable, "-I", "-m", "pip", *map(str, words), "--quiet", "--no-input"]
    done = subprocess.run(argv, check=False, timeout=PIP_LIMIT_S, stdin=subprocess.DEVNULL, start_new_session=True)
    if done.returncode:
        raise SystemExit(f"zipapp: pip {words[0]} failed (exit {done.returncode})")


def collect(pythons: Sequence[str], machines: Sequence[str], work: Path) -> Path:
    """Return a folder with gpunode and all its dependencies, for these Pythons."""
    site, wheels = work / "site", work / "wheels"
    requirements = work / "requirements.txt"
    requirements.write_text(locked(needed()), encoding="utf-8")
    pip("wheel", "--no-deps", "--require-hashes", "--requirement", requirements, "--wheel-dir", wheels)
    compiled = sorted(canonicalize_name(path.name.split("-")[0]) for path in wheels.glob("*.whl") if _compiled(path))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ROOT)
    pure = [path for path in wheels.glob("*.whl") if not _compiled(path)]
    pip("install", "--target", site, "--no-deps", "--no-compile", "--no-index", *pure)
    requirements.write_text(locked(compiled), encoding="utf-8")
    for machine in machines:
        tags = [f"manylinux_2_{minor}_{machine}" for minor in range(OLDEST_GLIBC_MINOR, NEWEST_GLIBC_MINOR + 1)]
        platforms = [word for tag in (*tags, f"manylinux2014_{machine}") for word in ("--platform", tag)]
        for python in pythons:
            target = work / f"{machine}-{python}"
            pip(
                *("install", "--target", target, "--no-deps", "--no-compile", "--require-hashes"),
                *("--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms),
                *("--requirement", requirements),
            )
            shutil.copytree(target, site, dirs_exist_ok=True)
    shutil.rmtree(site / "bin", ignore_errors=True)
    return site


def _compiled(wheel: Path) -> bool:
    return not wheel.name.endswith("-none-any.whl")


def pack(site: Path, made_for: dict[str, object], out: Path) -> None:
    """Write the archive completely or not at all; the same content results in the same bytes."""
    files = {
        f"site/{path.relative_to(site).as_posix()}": path.read_bytes() for path in site.rglob("*") if path.is_file()
    }
    files["__main__.py"] = (ROOT / "scripts" / "zipapp_main.py").read_bytes()
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    files["made-for.json"] = json.dumps({**made_for, "build": digest.hexdigest()[:16]}).encode()
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as stream:
            stream.write(b"#!/usr/bin/env -S python3 -I\n")
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in sorted(files):
                    archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
        beside.chmod(0o755)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/zipapp", description=str(__doc__).partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write: gpunode.pyz")
    parser.add_argument("--python", action="append", metavar="3.N", help=f"repeatable; default: {' '.join(PYTHONS)}")
    parser.add_argument(
        "--arch", action="append", choices=("x86_64", "aarch64"), help="repeatable; default: that of this machine"
    )
    chosen = parser.parse_args()
    pythons, machines = chosen.python or list(PYTHONS), chosen.arch or [platform.machine()]
    if wrong := [python for python in pythons if not re.fullmatch(r"3\.(1[1-9]|[2-9]\d)", python)]:
        parser.error(f"--python {wrong[0]}: 3.11 or later")
    with tempfile.TemporaryDirectory(prefix="gpunode-zipapp-") as work:
        site = collect(pythons, machines, Path(work))
        pack(site, {"pythons": pythons, "machines": machines}, chosen.out)
    print(f"{chosen.out}: {chosen.out.stat().st_size / 1e6:.1f} MB, Python {' '.join(pythons)} on {' '.join(machines)}")


if __name__ == "__main__":
    main()
