"""Whether the Python package gpunode can be used: it is there, and of the version of the collection."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def collection_version() -> str | None:
    """Return the version of an installed collection; None in a checkout and in the wheel, where both halves are one."""
    file = ROOT / "MANIFEST.json"
    if not file.is_file():
        return None
    return str(json.loads(file.read_text(encoding="utf-8"))["collection_info"]["version"])


def unusable(err: ImportError | None = None) -> str | None:
    """Return why the package gpunode cannot be used: missing, incomplete, or of another version; None if it can be."""
    try:
        installed = version("gpunode")
    except PackageNotFoundError:
        installed = None
    release = collection_version()
    if release is None and (ROOT / "pyproject.toml").is_file():
        request = shlex.quote(str(ROOT))
    else:
        request = f"gpunode{f'=={release}' if release else ''} (or from a checkout: pip install .)"
    install = f"install it with {sys.executable} -m pip install {request}"
    if err is not None and (installed is None or release in (None, installed)):
        return f"the Python package gpunode is required on the controller ({err}): {install}"
    if release not in (None, installed):
        return f"the collection gpunode.node is {release}, but the Python package gpunode is {installed}: {install}"
    return None
