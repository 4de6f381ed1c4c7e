"""Builds the two stub libraries of stub/, describes machines to them, and runs the payload on those."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunode.facts.models.workload import Record
from gpunode.workload.payload import payload_zip

COMPILER = shutil.which("gcc") or shutil.which("cc")
SOURCES = Path(__file__).with_name("stub")


@dataclass(frozen=True)
class Gpu:
    """One GPU of a machine; ``state`` and ``mig`` as stub/machine.h has them."""

    name: str = "NVIDIA H100 80GB HBM3"
    capability: str = "9.0"
    mib: int = 81559
    used: int = 4
    mig: str = "off"
    state: str = "ok"
    parts: int = 0
    """MIG devices of profile 1g.10gb."""


PART_MIB = 9984
"""Of 1g.10gb: utku-h100-mig-590.48.01-q-idle.txt."""


@dataclass(frozen=True)
class Machine:
    """What the stub libraries answer from."""

    gpus: Sequence[Gpu]
    driver: str = "580.95.05"
    cuda: int = 13000
    """Of libcuda: 1000 * major + 10 * minor."""
    nvml_init: int = 0
    cu_init: int = 0
    libcuda: str | None = None
    """Its version, where it is not the driver's."""
    folder: str = "lib"
    """Of libcuda."""
    first: int = 0
    """Number of the first GPU, for UUIDs."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def hex(self, index: int, part: int | None = None) -> str:
        """32 digits: the GPU's, or those of a MIG device of it."""
        return f"{self.first + index:08x}00004000800000000000{0 if part is None else part + 1:04x}{index:08x}"[:32]

    def uuid(self, index: int, part: int | None = None) -> str:
        """As NVML writes it."""
        number = self.hex(index, part)
        kind = "GPU" if part is None else "MIG"
        return f"{kind}-{number[:8]}-{number[8:12]}-{number[12:16]}-{number[16:20]}-{number[20:]}"

    def text(self) -> str:
        """The file for GPUNODE_STUB."""
        lines = [f"driver|{self.driver}|{self.cuda}", f"nvml_init|{self.nvml_init}", f"cu_init|{self.cu_init}"]
        for index, gpu in enumerate(self.gpus):
            fields = (self.hex(index), f"{0x18 + index:x}", gpu.name, gpu.capability, gpu.mib, gpu.used, gpu.mig)
            lines.append("gpu|" + "|".join(map(str, (*fields, gpu.state))))
        for index, gpu in enumerate(self.gpus):
            lines += [f"mig|{index}|{part}|{self.hex(index, part)}|1g.10gb|{PART_MIB}" for part in range(gpu.parts)]
        return "\n".join(lines) + "\n"


@functools.cache
def built(name: str) -> bytes:
    """A stub library, compiled once."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "library.so")
        subprocess.run(
            [str(COMPILER), "-shared", "-fPIC", "-w", "-o", str(target), str(SOURCES / f"{name}.c")],
            check=True,
            timeout=60,
        )
        return target.read_bytes()


def install(machine: Machine, root: Path) -> dict[str, str]:
    """Put the libraries of a machine below a folder; the environment that finds them."""
    libraries = root / "lib"
    libcuda = machine.libcuda or machine.driver
    write(libraries / f"libnvidia-ml.so.{machine.driver}", "libnvidia-ml.so.1", built("nvml"))
    write(root / machine.folder / f"libcuda.so.{libcuda}", "libcuda.so.1", built("cuda"))
    # cuda-compat brings its own compiler for PTX too.
    write(root / machine.folder / f"libnvidia-ptxjitcompiler.so.{libcuda}", "libnvidia-ptxjitcompiler.so.1", b"")
    (root / "machine").write_text(machine.text())
    folders = ":".join(dict.fromkeys([str(root / machine.folder), str(libraries)]))
    return {"GPUNODE_STUB": str(root / "machine"), "LD_LIBRARY_PATH": folders, **machine.environment}


def write(path: Path, link: str, content: bytes) -> None:
    """A library under its version, and the name that programs load."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.parent.joinpath(link).unlink(missing_ok=True)
    path.parent.joinpath(link).symlink_to(path.name)


def run(
    machine: Machine,
    root: Path,
    tests: str = "versions,gpus",
    settings: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> list[Record]:
    """The payload's records on a machine."""
    archive = root / "payload.pyz"
    root.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(payload_zip())
    answer = subprocess.run(
        [python, "-I", str(archive), "--tests", tests, "--settings", json.dumps(dict(settings or {}))],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
        env={"PATH": os.environ["PATH"], **install(machine, root)},
    )
    *lines, end = (json.loads(line) for line in answer.stdout.splitlines())
    assert end == {"record": "end", "records": len(lines)}
    return [Record.model_validate(line) for line in lines]


def python_with_torch(folder: Path) -> str:
    """A Python with the stub of PyTorch as its only package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.copytree(SOURCES / "torch", site / "torch")
    return str(folder / "bin" / "python")
