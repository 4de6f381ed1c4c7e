"""State of a simulated node: its hardware, what survives a reboot, what does not, and its faults.

======================= ======================================= ===========================================
what                    file                                    ends with
======================= ======================================= ===========================================
``hardware()``          /etc/gpunode/lab-hardware.json          the node
``kept()``              /var/lib/gpunode-lab/state.json         the node; what InfoROM and disks keep
``faults()``            /var/lib/gpunode-lab/faults.json        the fault's healing
``running()``           /run/gpunode-lab/state.json             the reboot
======================= ======================================= ===========================================

``kept``: ``{"gpus": {"0": {"ecc": bool, "mig": bool, "remapped": {…}, "ecc_errors": {…}}}}``, by the GPU's index as
text: the modes that the next load of the module applies. What is absent is as delivered.

``running``: ``{"module": {"version", "flavour"} | None, "modules": [names], "gpus": {"0": {"ecc", "mig", …}}, …}``.

Each file is read whole and written by rename; ``change`` holds a lock over reading and writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("GPUNODE_LAB_ROOT", "/"))
LOCK_MODE = 0o600
Document = dict[str, Any]


def path(name: str) -> Path:
    """Return where a path of the node is, below a root that a test may have set."""
    return ROOT / name.lstrip("/")


def hardware() -> Document:
    """Return the node's hardware description; raises OSError if it has none."""
    return _document(path("/etc/gpunode/lab-hardware.json").read_text(encoding="utf-8"))


def kept() -> Document:
    """Return what survives a reboot."""
    return _read(path("/var/lib/gpunode-lab/state.json"))


def running() -> Document:
    """Return what ends with the reboot."""
    return _read(path("/run/gpunode-lab/state.json"))


def faults() -> list[Document]:
    """Return the faults that are set: ``{"fault", "component": "gpu3" | "gpu3/link5" | None, …}``."""
    active_faults: list[Document] = _read(path("/var/lib/gpunode-lab/faults.json")).get("faults", [])
    return active_faults


@contextlib.contextmanager
def change() -> Iterator[tuple[Document, Document]]:
    """Yield ``(kept, running)`` under the lock; both are written when the block is left without an exception."""
    with _locked():
        before, now = kept(), running()
        yield before, now
        write(path("/var/lib/gpunode-lab/state.json"), before)
        write(path("/run/gpunode-lab/state.json"), now)


@contextlib.contextmanager
def change_faults() -> Iterator[list[Document]]:
    """Yield the list of faults under the lock; it is written when the block is left without an exception."""
    with _locked():
        active_faults = faults()
        yield active_faults
        write(path("/var/lib/gpunode-lab/faults.json"), {"faults": active_faults})


def write(file: Path, document: Document) -> None:
    """Write a JSON file in one step, readable by all users, because all users may call nvidia-smi."""
    write_text(file, json.dumps(document, indent=1, sort_keys=True) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a file of mode 0644 in one step, and create the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.chmod(0o644)
    new.replace(file)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    file = path("/run/gpunode-lab/lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(str(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(file: Path) -> Document:
    try:
        return _document(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _document(text: str) -> Document:
    document: Document = json.loads(text)
    return document


class FaultError(Exception):
    """A fault cannot be set or healed; the message is one line with the reason and the possible values."""
