"""Install what the tests of a tier need and this machine lacks: on Debian and Ubuntu, as root, once.

Services that come with a package are neither started nor enabled. Where this program cannot install, it prints the
command that does. Usage: scripts/needs.py TIER …
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NEEDS: Mapping[str, Mapping[str, str]] = {
    "lint": {"shellcheck": "shellcheck"},
    "unit": {
        "git": "git",
        "ssh": "openssh-client",
        "openssl": "openssl",
        "gpg": "gnupg",
        "rpmkeys": "rpm",
        "gcc": "gcc",
        "/usr/include/stdio.h": "libc6-dev",
        "/usr/bin/python3": "python3",
    },
    "contract": {
        "git": "git",
        "ssh": "openssh-client",
        "/usr/bin/python3": "python3",
        "promtool": "prometheus",
    },
    "integration": {
        "ssh": "openssh-client",
        "sshd": "openssh-server",
        "docker": "docker-cli | docker.io",
        "dockerd": "docker.io",
        "nft": "nftables",
        "ip": "iproute2",
        "iptables-save": "iptables",
        "mkfs.xfs": "xfsprogs",
        "mke2fs": "e2fsprogs",
        "sfdisk": "fdisk",
        "slurmd": "slurmd",
        "slurmctld": "slurmctld",
        "srun": "slurm-client",
        "munged": "munge",
        "mpirun": "openmpi-bin",
        "kubectl": "kubernetes-client",
        "gcc": "gcc",
        "chromium": "chromium",
        "npm": "npm",
        "rclone": "rclone",
        "s3fs": "s3fs",
        "sshfs": "sshfs",
        "fusermount3": "fuse3",
        "zsh": "zsh",
        "fish": "fish",
        "man": "man-db",
        "/usr/bin/python3": "python3",
    },
    "lab": {
        "dockerd": "docker.io",
        "docker-registry": "docker-registry",
        "mmdebstrap": "mmdebstrap",
        "ssh": "openssh-client",
        "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
    },
    "vm": {
        "qemu-system-x86_64": "qemu-system-x86",
        "qemu-img": "qemu-utils",
        "mmdebstrap": "mmdebstrap",
        "mke2fs": "e2fsprogs",
        "/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring",
    },
}
"""Tier, to the programs (or files) that it needs, to the packages of Debian and Ubuntu with them. Of alternatives the
first that this system has is installed. The Docker engine is started by scripts/docker-engine.
"""
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
OS_RELEASE = Path("/etc/os-release")
POLICY = Path("/usr/sbin/policy-rc.d")
DENIED = "#!/bin/sh\n# gpunode's scripts/needs.py: no service starts while it installs.\nexit 101\n"
LOCK = Path("/run/lock/gpunode-apt")
"""Held by scripts/bootstrap and scripts/docker-engine too while they install."""
UPDATE_LIMIT_S = 300
INSTALL_LIMIT_S = 900

TORCH = "torch==2.13.0 numpy pillow pyarrow"
"""The others read images and tables, as the input pipeline does."""
TORCH_VARIABLE = "GPUNODE_TORCH_PYTHON"
TENSORFLOW = "tensorflow-cpu==2.21.0"
TENSORFLOW_VARIABLE = "GPUNODE_TENSORFLOW_PYTHON"
S3_SERVER = "moto[server]==5.2.5"
S3_SERVER_VARIABLE = "GPUNODE_MOTO_PYTHON"
TORCH_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpunode" / "test-torch"
_CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
_OF_CUDA = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of packages of several GB that a build of PyTorch for CUDA brings."""

AXE = "axe-core@4.14.0"
AXE_SHA512 = "9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ=="
"""Of the package, as npm's registry lists it (read 2026-11-23)."""
AXE_LIMIT_S = 120


def say(text: str) -> None:
    """Print one line on the error stream."""
    print(f"needs: {text}", file=sys.stderr, flush=True)


def here(name: str) -> bool:
    """Return whether a program is in PATH or in the system's folders, or whether a file exists."""
    if name.startswith("/"):
        return Path(name).exists()
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}") is not None


def can_install() -> bool:
    """Return whether this is a Debian or an Ubuntu, and this user root."""
    try:
        text = OS_RELEASE.read_text(encoding="utf-8")
    except OSError:
        return False
    rows = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    names = f"{rows.get('ID', '')} {rows.get('ID_LIKE', '')}".replace('"', "").split()
    return os.geteuid() == 0 and bool({"debian", "ubuntu"} & set(names)) and shutil.which("apt-get") is not None


def install(tier: str) -> str | None:
    """Install the packages that a tier lacks; return None, or what is still missing with the command to run."""
    missing = _missing(tier)
    if not missing:
        return None
    names = ", ".join(f"{package} ({name})" for name, package in missing.items())
    if can_install():
        say(f"installing for the tier {tier}: {names}")
        with tempfile.TemporaryFile() as log, _alone(), no_services():
            if _output("dpkg", "--audit"):
                say("finishing an installation that was interrupted")
                bounded(["dpkg", "--configure", "-a"], limit_s=INSTALL_LIMIT_S, log=log)
            # The lists of a fresh machine are empty, those of an old one name packages that are gone.
            _apt(log, "update", limit_s=UPDATE_LIMIT_S)
            packages = _packages(missing)
            before = _enabled()
            rc = _apt(log, "install", "--yes", "--no-install-recommends", *packages, limit_s=INSTALL_LIMIT_S)
            if new := sorted(_enabled() - before):
                bounded(["systemctl", "disable", *new], limit_s=60, log=log)
            if rc:
                log.seek(0)
                lines = log.read().decode(errors="replace").splitlines()
                say(f"apt-get install ended with {rc}: {' / '.join(line for line in lines if line.strip())[-600:]}")
        missing = _missing(tier)
        if not missing:
            return None
    return f"missing: {', '.join(missing)}; run as root: apt-get install {' '.join(_packages(missing))}"


def _packages(missing: Mapping[str, str]) -> list[str]:
    """Return the packages to install: of alternatives the first that apt knows."""
    packages = set()
    for alternatives in missing.values():
        *first, last = alternatives.split(" | ")
        packages.add(next((name for name in first if _output("apt-cache", "show", "--no-all-versions", name)), last))
    return sorted(packages)


def _missing(tier: str) -> dict[str, str]:
    return {name: package for name, package in NEEDS.get(tier, {}).items() if not here(name)}


@contextmanager
def _alone() -> Iterator[None]:
    """Let one process at a time install, so that none restores another's policy; the kernel ends the lock."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def no_services() -> Iterator[None]:
    """Refuse starts of services to the scripts of packages; restore what was there, also after a killed run."""
    before = POLICY.read_bytes() if POLICY.exists() else None
    mode = POLICY.stat().st_mode & 0o7777 if before is not None else 0o755
    if before == DENIED.encode():
        before = None
    _write(POLICY, DENIED.encode(), 0o755)
    try:
        yield
    finally:
        if before is None:
            POLICY.unlink(missing_ok=True)
        else:
            _write(POLICY, before, mode)


def _write(path: Path, content: bytes, mode: int) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}", delete=False) as draft:
        draft.write(content)
    Path(draft.name).chmod(mode)
    Path(draft.name).replace(path)


def _enabled() -> set[str]:
    """Return the units that start with the system."""
    listed = _output("systemctl", "list-unit-files", "--state=enabled", "--no-legend", "--no-pager")
    return {line.split()[0] for line in listed.splitlines() if line.strip()}


def _apt(log: IO[bytes], *words: str, limit_s: float) -> int:
    options = ("-q", "-o", "Dpkg::Use-Pty=0", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300")
    return bounded(["apt-get", *options, *words], limit_s=limit_s, log=log)


def _output(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, start_new_session=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def bounded(argv: Sequence[str | Path], *, limit_s: float, log: IO[bytes] | None = None) -> int:
    """Run a program with its output in the log; return its exit code, 124 if it ran past its limit."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1", "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=log or subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)


def torch_python() -> tuple[Path | None, str]:
    """Return a Python with PyTorch for the processor, or None, and a line about it."""
    return _framework_python("PyTorch", TORCH, TORCH_VARIABLE, ([], ["--extra-index-url", _CPU_BUILDS]))


def tensorflow_python() -> tuple[Path | None, str]:
    """Return a Python with TensorFlow for the processor, or None, and a line about it."""
    return _framework_python("TensorFlow", TENSORFLOW, TENSORFLOW_VARIABLE, ([],))


def s3_python() -> tuple[Path | None, str]:
    """Return a Python with an S3 server, or None, and a line about it."""
    return _framework_python("S3 server", S3_SERVER, S3_SERVER_VARIABLE, ([],))


def _framework_python(
    title: str, requirement: str, variable: str, sources: Sequence[list[str]]
) -> tuple[Path | None, str]:
    """Return the Python that the variable names, or that of a virtual environment in the user's cache.

    The environment is made once. A build for CUDA is never downloaded: pip first lists what it would install.
    """
    if path := os.environ.get(variable):
        return Path(path), f"{title}: {variable}={path}"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = TORCH_FOLDER / f"{requirement.replace('==', '-').replace(' ', '+')}-py{version}"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python, f"{title}: {folder}, as made before"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "complete").exists():
            return python, f"{title}: {folder}, as made before"
        shutil.rmtree(folder, ignore_errors=True)
        why = _make_environment(folder, requirement, sources)
        if why:
            shutil.rmtree(folder, ignore_errors=True)
            return None, f"{title}: {why}: {variable}=PYTHON names one with it"
        (folder / "complete").touch()
    return python, f"{title}: made {folder}"


def _make_environment(folder: Path, requirement: str, sources: Sequence[list[str]]) -> str | None:
    """Make the virtual environment; return why that is not possible, or None."""
    if shutil.disk_usage(folder.parent).free < 3 << 30:
        return f"less than 3 GiB free at {folder.parent}"
    if bounded([sys.executable, "-I", "-m", "venv", folder], limit_s=120):
        return f"{sys.executable} makes no virtual environment"
    pip: list[str | Path] = [
        folder / "bin" / "python",
        "-I",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    pip += ["--only-binary=:all:", "--retries=1", "--timeout=20", *requirement.split()]
    report = folder / "report.json"
    for source in sources:
        if bounded([*pip, *source, "--dry-run", "--report", report], limit_s=180):
            continue
        rows = json.loads(report.read_text(encoding="utf-8"))["install"]
        if any(row["metadata"]["name"].lower().startswith(_OF_CUDA) for row in rows):
            continue
        say(f"installing {requirement} for the processor in {folder}")
        if bounded([*pip, *source], limit_s=INSTALL_LIMIT_S) == 0:
            return None
    return f"no CPU build of {requirement} for Python {sys.version_info.major}.{sys.version_info.minor} is reachable"


def axe_script() -> tuple[Path | None, str]:
    """Return the script of axe-core, which tests pages for accessibility, or None, and a line about it.

    npm downloads the package once into the user's cache; a package with another hash is refused.
    """
    path = TORCH_FOLDER.parent / f"{AXE.replace('@', '-')}.js"
    if path.exists():
        return path, f"axe-core: {path}, as made before"
    npm = shutil.which("npm", path=f"{os.environ.get('PATH', '')}:{SYSTEM_FOLDERS}")
    if npm is None:
        return None, "axe-core: there is no npm"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        argv = [npm, "pack", AXE, "--pack-destination", folder, "--fetch-retries=1", "--loglevel=error"]
        package = Path(folder, f"{AXE.replace('@', '-')}.tgz")
        if bounded(argv, limit_s=AXE_LIMIT_S) or not package.exists():
            return None, f"axe-core: npm cannot download {AXE}"
        if b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() != AXE_SHA512:
            return None, f"axe-core: npm's {AXE} has another hash than the one in scripts/needs.py"
        with tarfile.open(package) as archive:
            script = archive.extractfile("package/axe.min.js")
            if script is None:
                return None, f"axe-core: {AXE} has no script"
            _write(path, script.read(), 0o644)
    return path, f"axe-core: downloaded {path}"


def main(tiers: Sequence[str]) -> int:
    unknown = set(tiers) - NEEDS.keys()
    if unknown or not tiers:
        say(f"usage: scripts/needs.py TIER … (known: {', '.join(NEEDS)})")
        return 2
    lines = [line for tier in tiers if (line := install(tier))]
    for line in lines:
        say(line)
    return 3 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
