"""The start of the zipapp: unpacks it once for each build, because Python imports no compiled module from a zip.

Any Python 3 can run this file, so that one that is too old gets a message.
"""

import atexit
import json
import os
import platform
import pwd
import shutil
import stat
import sys
import tempfile
import traceback
import zipfile
from pathlib import Path

FOLDER = "GPUNODE_UNPACK_DIR"
"""Environment variable: the folder for unpacking, in place of the user's cache."""


def main() -> None:
    """Run gpunode; end with 2 and one line if this file does not match the machine."""
    archive = Path(__file__).parent
    with zipfile.ZipFile(str(archive)) as whole:
        made = json.loads(whole.read("made-for.json").decode())
        python, machine = f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine()
        if python not in made["pythons"] or machine not in made["machines"]:
            pythons, machines = " ".join(made["pythons"]), " ".join(made["machines"])
            refuse(f"{archive} is for Python {pythons} on {machines}, and this is Python {python} on {machine}")
        folder = unpacked(whole, made["build"])
    sys.path[0] = str(folder / "site")
    try:
        from gpunode.cli import main as gpunode  # noqa: PLC0415 (it is there only now)
    except ImportError as err:
        refuse(f"{err} (unpacked in {folder}; {FOLDER}=DIR for a folder on a file system without noexec)")
    gpunode()


def refuse(why: str) -> None:
    """End with one line."""
    sys.stderr.write(f"gpunode: {why}\n")
    sys.exit(2)


def unpacked(whole: zipfile.ZipFile, build: str) -> Path:
    """Return the folder with this build's files: kept in the user's cache, or else for this run only."""
    home = pwd.getpwuid(os.geteuid()).pw_dir  # Not HOME: sudo may keep that of a user who is not root.
    chosen = os.environ.get(FOLDER)
    base = Path(chosen) if chosen else Path(home) / ".cache" / "gpunode"
    kept = base / build
    if is_ours(kept):
        return kept
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = tempfile.mkdtemp(prefix=".", dir=str(base))
    except OSError as err:
        if chosen:
            refuse(f"{FOLDER}={chosen}: {err.strerror}")
        once = tempfile.mkdtemp(prefix="gpunode-")
        atexit.register(shutil.rmtree, once, ignore_errors=True)
        whole.extractall(once)
        return Path(once)
    try:
        whole.extractall(beside)
        # Completely or not at all; if another run was faster, its files are the same.
        Path(beside).rename(kept)
    except OSError as err:
        shutil.rmtree(beside, ignore_errors=True)
        if not is_ours(kept):
            refuse(f"cannot be unpacked in {base}: {err.strerror} ({FOLDER}=DIR for another folder)")
    return kept


def is_ours(folder: Path) -> bool:
    """Return whether the folder exists and no other user could have written to it."""
    try:
        inode = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(inode.st_mode) and inode.st_uid == os.geteuid() and not inode.st_mode & 0o022


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # Python's own exit code, 1, is that of a failed check.
        traceback.print_exc()
        sys.exit(3)
