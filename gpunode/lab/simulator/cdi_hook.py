"""``nvidia-cdi-hook``: the hooks that a CDI specification runs while a container is created.

Called by the OCI runtime with the container's state on stdin; works on the root folder that the bundle names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .node import package_release

LDCONFIG_S = 60


class HookError(Exception):
    """The hook failed; the container does not start."""


def main(argv: list[str]) -> int:
    """Run one hook; return its exit code."""
    words = [word for word in argv if word not in ("--debug", "--quiet")]
    if words[:1] in (["--version"], ["-v"]):
        sys.stdout.write(f"NVIDIA CDI Hook version {package_release() or 'unknown'}\ncommit: gpunode-lab\n")
        return 0
    hooks: dict[str, Callable[[Path, list[str]], None]] = {
        "create-symlinks": _create_symlinks,
        "update-ldcache": _update_ldcache,
        "chmod": lambda _root, _words: None,
        "enable-cuda-compat": lambda _root, _words: None,
        "disable-device-node-modification": lambda _root, _words: None,
    }
    if not words or words[0] not in hooks:
        sys.stderr.write(f"No help topic for '{' '.join(words)}'\n")
        return 1
    try:
        hooks[words[0]](container_root(), words[1:])
    except (HookError, OSError, subprocess.SubprocessError) as err:
        sys.stderr.write(f"nvidia-cdi-hook {words[0]}: {err}\n")
        return 1
    return 0


def container_root() -> Path:
    """Return the container's root folder, from the state on stdin. Raises HookError."""
    try:
        bundle = Path(json.loads(sys.stdin.read())["bundle"])
        config: dict[str, Any] = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        root = Path(str(config["root"]["path"]))
    except (ValueError, KeyError, TypeError, OSError) as err:
        raise HookError(f"failed to determine container root: {err}") from None
    return root if root.is_absolute() else bundle / root


def values_of(words: list[str], option: str) -> list[str]:
    """Return the values of an option that may be given several times."""
    values = [words[index + 1] for index, word in enumerate(words[:-1]) if word == option]
    return values + [word.partition("=")[2] for word in words if word.startswith(option + "=")]


def inside(root: Path, path: str) -> Path:
    """Return a path of the container below its root; raise HookError if a link leads outside."""
    target = root / path.lstrip("/")
    parent = target.parent.resolve()
    if root.resolve() not in (parent, *parent.parents):
        raise HookError(f"{path} leads out of the container")
    return target


def _create_symlinks(root: Path, words: list[str]) -> None:
    for pair in values_of(words, "--link"):
        target, _, link = pair.partition("::")
        make_link(root, target, link)


def make_link(root: Path, target: str, link: str) -> None:
    """Create a symbolic link in the container; an existing one stays."""
    path = inside(root, link)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink() and not path.exists():
        path.symlink_to(target)


def _update_ldcache(root: Path, words: list[str]) -> None:
    update_ldcache(root, values_of(words, "--folder"))


def update_ldcache(root: Path, folders: list[str]) -> None:
    """Add the driver's libraries to the container's linker cache; an image without a linker cache needs none."""
    if not (root / "etc").is_dir():
        return
    if folders and (root / "etc/ld.so.conf.d").is_dir():
        text = "".join(folder + "\n" for folder in folders)
        inside(root, "/etc/ld.so.conf.d/00-nvcr-gpunode-lab.conf").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["ldconfig", "-r", str(root), "-C", "/etc/ld.so.cache", *folders],
        check=False, timeout=LDCONFIG_S, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    if done.returncode:
        raise HookError(f"error updating ldcache: {done.stderr.decode(errors='replace').strip()}")
