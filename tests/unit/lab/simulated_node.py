"""A simulated node's files below a folder, as its boot leaves them, and the tools asked in this process."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpunode.lab.hardware.describe import describe
from gpunode.lab.simulator import smi, state

DRIVER = "580.95.05"


class SimulatedNode:
    """Answers as nvidia-smi on a node with that hardware and driver."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.capsys = capsys
        self.hardware: dict[str, Any] = {}

    def lay(self, hardware: str, driver: str = DRIVER, *, flavour: str = "open", fabric: bool = True) -> None:
        """Driver on disk and in memory, fabric manager through."""
        self.hardware = describe(hardware, "node")
        self.library(driver)
        modes = {str(gpu["index"]): {"ecc": gpu["ecc"], "mig": False} for gpu in self.hardware["gpus"]}
        running: dict[str, Any] = {"module": {"version": driver, "flavour": flavour}, "gpus": modes}
        if fabric:
            running["fabric"] = {"state": "Completed", "status": "Success"}
        self.write("etc/gpunode/lab-hardware.json", self.hardware)
        self.write("etc/gpunode/lab-node", {})
        self.write("run/gpunode-lab/state.json", running)
        if not (self.root / "proc").exists():
            (self.root / "proc").symlink_to("/proc")

    def library(self, driver: str) -> None:
        """The driver's libraries of another release on disk."""
        folder = self.root / f"usr/lib/{os.uname().machine}-linux-gnu"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("libnvidia-ml", "libcuda"):
            (folder / f"{name}.so.{driver}").touch()
            (folder / f"{name}.so.1").unlink(missing_ok=True)
            (folder / f"{name}.so.1").symlink_to(f"{name}.so.{driver}")

    def write(self, name: str, document: object) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(json.dumps(document), encoding="utf-8")

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
        self.capsys.readouterr()
        code = smi.main(list(words))
        return code, self.capsys.readouterr().out

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
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SimulatedNode:
    monkeypatch.setattr(state, "ROOT", tmp_path)
    monkeypatch.setenv("GPUNODE_LAB_ROOT", str(tmp_path))
    monkeypatch.setenv("GPUNODE_LAB_PACKAGE_VERSION", DRIVER)
    return SimulatedNode(tmp_path, capsys)
