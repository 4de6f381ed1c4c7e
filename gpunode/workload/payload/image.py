"""Facts of an image and its limits that need no library: files, the linker's cache, the kernel."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1")
IMAGE_LIBRARIES = ("libcudart", "libcudnn", "libnccl")
_FOLDERS = (
    "usr/local/cuda*/lib64",
    "usr/local/cuda*/targets/*/lib",
    "usr/lib/*-linux-gnu",
    "usr/lib64",
    "opt/conda/lib",
)
MAX_LIBRARIES = 24
LIMIT_S = 10.0
MAX_DEVICES = 64


def system() -> dict[str, Any]:
    """Return the values of ``versions.system``."""
    cache = linker_cache()
    return {
        "device": "cpu",
        "python": platform.python_version(),
        "os": os_name(),
        "module_version": module_version(),
        "driver_libraries": {
            name: version_in_name(os.path.realpath(cache[name])) for name in DRIVER_LIBRARIES if name in cache
        },
        "cuda": image_cuda(),
        "libraries": image_libraries(cache),
        "build": build_tools(cache),
        "devices": sorted(str(path) for path in Path("/dev").glob("nvidia*"))[:MAX_DEVICES],
    }


def text(path: str) -> str | None:
    """Return the text of a small file, None if it does not exist."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return None


def os_name() -> str | None:
    """Return the image's name of its system."""
    match = re.search(r'^PRETTY_NAME="?([^"\n]{1,200})', text("/etc/os-release") or "", re.M)
    return match.group(1) if match else None


def module_version() -> str | None:
    """Return the kernel module's version as visible inside; None if it is not."""
    match = re.search(r"Kernel Module.*?\s(\d{3,4}\.\d+(?:\.\d+)?)\s", text("/proc/driver/nvidia/version") or "")
    return match.group(1) if match else None


def linker_cache() -> dict[str, str]:
    """Return name to path from the linker's cache, for programs like this one; LD_LIBRARY_PATH comes first."""
    paths: dict[str, str] = {}
    try:
        answer = subprocess.run(
            ["/sbin/ldconfig", "-p"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, check=False
        )
        lines = answer.stdout.decode(errors="replace").splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    wide = sys.maxsize > 2**32
    for line in lines:
        match = re.match(r"\s+(\S+) \(([^)]*)\) => (\S+)", line)
        if match and ("64" in match.group(2)) == wide:
            paths.setdefault(match.group(1), match.group(3))
    for name in DRIVER_LIBRARIES:
        for folder in _FOLDERS:
            for path in Path("/").glob(f"{folder}/{name}"):
                paths.setdefault(name, str(path))
        for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":")[::-1]:
            if folder and Path(folder, name).exists():
                paths[name] = str(Path(folder, name))
    return paths


def version_in_name(path: str) -> str | None:
    """Return 580.95.05 for ``libcuda.so.580.95.05``, 13 for ``libcudart.so.13``; None if the name has no version."""
    match = re.search(r"\.so\.(\d+(?:\.\d+)*)$", path)
    return match.group(1) if match else None


def image_cuda() -> str | None:
    """Return the CUDA version of NVIDIA's images: from the toolkit's own file, else from the variable."""
    document = text("/usr/local/cuda/version.json")
    if document:
        try:
            version = json.loads(document)["cuda"]["version"]
        except (ValueError, KeyError, TypeError):
            version = None
        if isinstance(version, str):
            return version
    return os.environ.get("CUDA_VERSION") or None


def image_libraries(cache: dict[str, str]) -> list[dict[str, str | None]]:
    """Return CUDA runtimes, cuDNN and NCCL: in the linker's cache, in well-known folders, and in Python's packages."""
    paths = {path for name, path in cache.items() if name.split(".so")[0] in IMAGE_LIBRARIES}
    packages = [f"{folder[1:]}/nvidia/*/lib" for folder in sys.path if folder.endswith("-packages")]
    for folder in (*_FOLDERS, *packages):
        for name in IMAGE_LIBRARIES:
            paths.update(str(path) for path in Path("/").glob(f"{folder}/{name}.so*"))
    real = sorted({os.path.realpath(path) for path in paths})
    return [
        {"name": Path(path).name.split(".so")[0], "path": path, "version": version_in_name(path)}
        for path in real[:MAX_LIBRARIES]
    ]


def build_tools(cache: dict[str, str], root: str = "/") -> dict[str, Any]:
    """Return what compiles extensions of PyTorch at run time: found in the order of torch.utils.cpp_extension."""
    in_path = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if not home and in_path:
        home = str(Path(in_path).resolve().parents[1])
    if not home and Path(root, "usr/local/cuda").is_dir():
        home = str(Path(root, "usr/local/cuda"))
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    return {
        "cuda_home": home,
        "nvcc": nvcc_version(str(Path(home, "bin", "nvcc"))) if home else None,
        "nvcc_in_path": nvcc_version(in_path) if in_path else None,
        "compiler": printed([compiler, "-dumpfullversion", "-dumpversion"]).strip() or None if compiler else None,
        "ninja": shutil.which("ninja") is not None,
        "libaio": Path(root, "usr/include/libaio.h").exists() and any(name.startswith("libaio.so") for name in cache),
    }


def nvcc_version(path: str) -> str | None:
    """Return 12.8 of ``release 12.8, V12.8.93``; None if the program does not exist or prints none."""
    match = re.search(r"release (\d{1,3}\.\d{1,3}),", printed([path, "--version"]))
    return match.group(1) if match else None


def printed(argv: list[str]) -> str:
    """Return the first kilobytes that a program prints within its limit; empty if it fails."""
    try:
        answer = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout[:4096].decode("utf-8", "replace")


def limits() -> dict[str, Any]:
    """Return the values of ``versions.limits``: the hard limits, up to which a program may raise its own."""
    return {
        "device": "cpu",
        "shm_bytes": size_of_file_system("/dev/shm"),  # noqa: S108 - looked at, not written
        "memlock_bytes": hard_limit(resource.RLIMIT_MEMLOCK),
        "stack_bytes": soft_limit(resource.RLIMIT_STACK),
        "nofile": hard_limit(resource.RLIMIT_NOFILE),
        "cpus": len(os.sched_getaffinity(0)),
    }


def size_of_file_system(path: str) -> int | None:
    """Return the bytes of the file system at a path; None if the path does not exist."""
    try:
        seen = os.statvfs(path)
    except OSError:
        return None
    return seen.f_blocks * seen.f_frsize


def hard_limit(which: int) -> int:
    """Return the hard limit, -1 for unlimited."""
    limit = resource.getrlimit(which)[1]
    return -1 if limit == resource.RLIM_INFINITY else limit


def soft_limit(which: int) -> int:
    """Return the current limit, -1 for unlimited: threads get stacks of this size, and programs do not raise it."""
    limit = resource.getrlimit(which)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit
