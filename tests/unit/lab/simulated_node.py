"""A simulated node below a folder, with its settings, faults and processes, and its nvidia-smi."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated import lay, library, node_at, nvidia_smi

from gpunode.lab.hardware.describe import describe
from gpunode.lab.simulator import state

DRIVER = "580.95.05"
FABRIC = {"state": "Completed", "status": "Success"}


class SimulatedNode:
    """Answers as nvidia-smi on a node with that hardware and driver."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hardware: dict[str, Any] = {}

    def lay(self, hardware: str, driver: str = DRIVER, *, flavour: str = "open", fabric: bool = True) -> None:
        """Driver on disk and in memory, fabric manager through."""
        self.hardware = describe(hardware, "node")
        modes = {str(gpu["index"]): {"ecc": gpu["ecc"], "mig": False} for gpu in self.hardware["gpus"]}
        module = {"version": driver, "flavour": flavour}
        lay(self.root, self.hardware, driver, modes, module=module, **({"fabric": FABRIC} if fabric else {}))
        if not (self.root / "proc").exists():
            (self.root / "proc").symlink_to("/proc")

    def library(self, driver: str) -> None:
        """The driver's libraries of another release on disk."""
        library(self.root, driver)

    def running(self, **values: Any) -> None:
        """Change what a reboot loses."""
        with state.change() as (_, running):
            running.update(values)

    def fault(self, name: str, component: str | None = None, **details: Any) -> None:
        with state.change_faults() as faults:
            faults.append({"fault": name, "component": component, **details})

    def busy(self, gpu: int) -> None:
        self.running(processes=[{"gpu": gpu, "pid": os.getpid(), "name": "python3", "memory_mib": 512}])

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and stdout of nvidia-smi."""
        return nvidia_smi(*words)

    def ask(self, *words: str) -> str:
        """Stdout of an nvidia-smi that succeeds."""
        code, text = self.run(*words)
        assert code == 0, text
        return text

    def cells(self, fields: str, gpu: int = 0) -> list[str]:
        """One GPU's cells of --query-gpu, without header and units."""
        line = self.ask(f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()[gpu]
        return [cell.strip() for cell in line.split(",")]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SimulatedNode]:
    with node_at(tmp_path, DRIVER):
        yield SimulatedNode(tmp_path)
