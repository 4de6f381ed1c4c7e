"""``gpunode zipapp``: gpunode as one file, to be copied to nodes.

pip downloads the dependencies with the hashes of requirements.lock. Compiled modules have their Python version in their
names, so those of several Pythons are side by side in one archive. Ansible and the roles are excluded: Ansible's
programs do not run from an archive, so inventories (-i) and ``provision`` need an installed gpunode.
"""

import hashlib
import importlib.metadata
import io
import json
import platform
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gpunode
from gpunode.cli.options import VERBOSE_ACCEPTED
from gpunode.content import lock_file
from gpunode.errors import Exit, UndeterminedError, UsageError
from gpunode.fleet import process
from gpunode.text import last_line, printable
from gpunode.whole import in_place, write_whole

LEFT_OUT = frozenset({"ansible-core"})
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_GLIBC_MINOR, NEWEST_GLIBC_MINOR = 17, 28
"""manylinux_2_17 to manylinux_2_28: those that Debian 12 and RHEL 9 can load."""
PIP_LIMIT_S = 600
PACKAGE = Path(gpunode.__file__).parent
START = PACKAGE / "zipapp_main.py"


@click.command("zipapp")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE")
@click.option("--python", "pythons", multiple=True, metavar="3.N", help=f"Repeatable.  [default: {', '.join(PYTHONS)}]")
@click.option(
    "--arch",
    "machines",
    multiple=True,
    type=click.Choice(["x86_64", "aarch64"]),
    help="Repeatable.  [default: that of this machine]",
)
@VERBOSE_ACCEPTED
def zipapp_command(out: Path, pythons: tuple[str, ...], machines: tuple[str, ...]) -> int:
    """Build gpunode as one file that runs on a node without being installed there.

    The node needs a Python of the versions that the file is built for. Dependencies are downloaded with the hashes that
    gpunode was tested with. Exit codes: 0 built, 2 wrong usage, 3 a dependency could not be downloaded.

    \b
    Example:
      gpunode zipapp gpunode.pyz --python 3.11
      scp gpunode.pyz gpu-01: && ssh gpu-01 sudo python3 gpunode.pyz validate --level quick
    """
    pythons, machines = pythons or PYTHONS, machines or (platform.machine(),)
    if wrong := [python for python in pythons if not re.fullmatch(r"3\.(1[1-9]|[2-9]\d)", python)]:
        raise UsageError(f"--python {wrong[0]}: expected 3.11 or later")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: directory {out.absolute().parent} does not exist")
    with tempfile.TemporaryDirectory(prefix="gpunode-zipapp-") as work:
        site = collect(pythons, machines, Path(work))
        pack(site, {"pythons": pythons, "machines": machines}, out)
    size = f"{out.stat().st_size / 1e6:.1f} MB"
    click.echo(printable(f"{out}: {size}, Python {' '.join(pythons)} on {' '.join(machines)}"))
    return Exit.GOOD


def needed(left_out: frozenset[str] = LEFT_OUT) -> list[str]:
    """Return the names of all packages that an installed gpunode needs, from the environment of this interpreter."""
    waiting = [Requirement(text) for text in importlib.metadata.requires("gpunode") or ()]
    names: list[str] = []
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names or name in left_out or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        names.append(name)
        waiting += [Requirement(text) for text in importlib.metadata.requires(name) or ()]
    return sorted(names)


def locked(names: Sequence[str]) -> str:
    """Return their lines of requirements.lock, hashes included. Raises UsageError for a name that is not locked."""
    text = lock_file().read_text(encoding="utf-8")
    by_name: dict[str, list[str]] = {}
    for entry in re.finditer(r"^([A-Za-z0-9._-]+)==.*(?:\n {4}--hash=.*)+", text, re.MULTILINE):
        by_name.setdefault(canonicalize_name(entry[1]), []).append(entry[0])
    missing = [name for name in names if name not in by_name]
    if missing:
        raise UsageError(f"not in requirements.lock: {', '.join(missing)} (in a checkout: make lock)")
    return "\n".join(line for name in names for line in by_name[name]) + "\n"


class Pip:
    """pip: that of this environment, or of a new one, because ``uv tool install`` installs none."""

    def __init__(self, work: Path) -> None:
        self._python = sys.executable
        if process.run([self._python, "-I", "-m", "pip", "--version"], timeout_s=PIP_LIMIT_S).rc:
            made = process.run([self._python, "-I", "-m", "venv", str(work / "pip")], timeout_s=PIP_LIMIT_S)
            if made.rc:
                raise UsageError(f"{self._python} has no pip: install it (python3-venv on Debian)")
            self._python = str(work / "pip" / "bin" / "python")

    def __call__(self, *words: str | Path) -> None:
        """Run pip; raise UndeterminedError if it fails."""
        argv = [self._python, "-I", "-m", "pip", *map(str, words), "--quiet", "--no-input"]
        done = process.run(argv, timeout_s=PIP_LIMIT_S)
        if done.rc:
            raise UndeterminedError(f"pip {words[0]} failed (exit {done.rc}): {last_line(done.stderr)}")


def collect(pythons: Sequence[str], machines: Sequence[str], work: Path) -> Path:
    """Return a folder with gpunode and all its dependencies, for these Pythons."""
    pip = Pip(work)
    site, wheels = work / "site", work / "wheels"
    requirements = work / "requirements.txt"
    requirements.write_text(locked(needed()), encoding="utf-8")
    pip("wheel", "--no-deps", "--require-hashes", "--requirement", requirements, "--wheel-dir", wheels)
    compiled = sorted(canonicalize_name(path.name.split("-")[0]) for path in wheels.glob("*.whl") if _compiled(path))
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
    shutil.copytree(PACKAGE, site / "gpunode", ignore=shutil.ignore_patterns("__pycache__"))
    _write_metadata(site)
    return site


def _write_metadata(site: Path) -> None:
    """Write the metadata of gpunode, which has its version."""
    text = importlib.metadata.distribution("gpunode").read_text("METADATA")
    if text is not None:
        folder = site / f"gpunode-{gpunode.__version__}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(text, encoding="utf-8")


def _compiled(wheel: Path) -> bool:
    return not wheel.name.endswith("-none-any.whl")


def pack(site: Path, made_for: dict[str, object], out: Path) -> None:
    """Write the archive completely or not at all; the same content results in the same bytes."""
    files = {
        f"site/{path.relative_to(site).as_posix()}": path.read_bytes() for path in site.rglob("*") if path.is_file()
    }
    files["__main__.py"] = START.read_bytes()
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    files["made-for.json"] = json.dumps({**made_for, "build": digest.hexdigest()[:16]}).encode()
    stream = io.BytesIO(b"#!/usr/bin/env -S python3 -I\n")
    stream.seek(0, io.SEEK_END)
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED)
    write_whole(out, stream.getvalue())
    if not in_place(out):
        out.chmod(0o755)
