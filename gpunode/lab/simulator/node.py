"""The simulated node as NVIDIA's tools see it: loaded module, library on disk, GPUs and their state."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from . import state
from .gpu import SimulatedGpu
from .versions import numbers

LIBRARY_FOLDERS = ("usr/lib/{arch}-linux-gnu", "usr/lib64", "usr/lib", "lib/{arch}-linux-gnu", "usr/local/lib")
DEVICE_OWNER = "etc/gpunode/lab-node"
MODPROBE_S = 60


class NodeSnapshot:
    """One look at the node. ``release`` is the version of the loaded module, None if none is loaded."""

    def __init__(self) -> None:
        try:
            self.hardware: dict[str, Any] = state.hardware()
        except OSError:
            self.hardware = {"gpus": []}
        self.running = state.running()
        self.kept = state.kept()
        self.faults = state.faults()
        module = self.running.get("module") or {}
        self.release: str | None = module.get("version")
        self.flavour: str | None = module.get("flavour")
        self.library = library_release()
        gpus = [SimulatedGpu(self, entry) for entry in self.hardware.get("gpus", [])]
        self.gpus = [gpu for gpu in gpus if self._is_visible(gpu)]
        for index, gpu in enumerate(self.gpus):
            gpu.index = index

    @property
    def in_container(self) -> bool:
        """Return whether the tool runs in a container of the node."""
        return not (state.ROOT / DEVICE_OWNER).exists()

    def _is_visible(self, gpu: SimulatedGpu) -> bool:
        """Return whether the GPU is visible: on the node if the driver is bound to it, in a container if it has its
        device file.
        """
        taken = self.running.get("gpus")
        if taken and str(gpu.number) not in taken:
            return False
        if not self.in_container:
            return True
        return (state.ROOT / f"dev/nvidia{gpu.minor}").exists()

    @property
    def driver(self) -> str:
        """Return the module's version, which decides the layout; the library's if no module is loaded."""
        return self.release or self.library or "580.95.05"

    @property
    def cuda(self) -> str:
        """Return ``13.0``, the CUDA version of this driver; for a branch between two of the description, the older
        one's.
        """
        listed: dict[str, str] = self.hardware.get("cuda_of_branch") or {}
        known = [int(branch) for branch in listed if int(branch) <= numbers(self.driver)[0]]
        return listed[str(max(known))] if known else "N/A"

    @property
    def services(self) -> frozenset[str]:
        """Return the services that the platform needs in addition to the driver: ``fabric-manager``, ``nvlsm``,
        ``imex``.
        """
        named = self.hardware.get("services")
        if named is not None:
            return frozenset(named)
        return frozenset({"fabric-manager"} if self.hardware.get("nvswitches") else ())

    def has_fault(self, fault: str) -> bool:
        """Return whether this fault of the whole node is set."""
        return any(entry.get("fault") == fault for entry in self.faults)

    def processes(self) -> list[dict[str, Any]]:
        """Return the processes on the visible GPUs; in a container those of other containers are hidden."""
        if self.in_container:
            return []
        listed: list[dict[str, Any]] = self.running.get("processes") or []
        return [entry for entry in listed if (state.ROOT / f"proc/{entry.get('pid')}").exists()]


def loaded() -> NodeSnapshot:
    """Return the node after a first call of the driver's library: root's first call loads the module."""
    node = NodeSnapshot()
    modprobe = state.path("/usr/sbin/modprobe")
    if node.library is None or node.release is not None or os.geteuid() != 0 or not modprobe.exists():
        return node
    subprocess.run(
        [str(modprobe), "nvidia"],
        check=False,
        timeout=MODPROBE_S,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return NodeSnapshot()


def library_release() -> str | None:
    """Return the release in the name of the file that libnvidia-ml.so.1 links to; None if there is none."""
    arch = os.uname().machine
    for folder in LIBRARY_FOLDERS:
        link = state.ROOT / folder.format(arch=arch) / "libnvidia-ml.so.1"
        if link.exists():
            found = re.search(r"\.so\.(\d+(?:\.\d+)+)$", link.resolve().name)
            if found:
                return found[1]
    return None


def package_release() -> str | None:
    """Return the upstream version of the running tool's package: no epoch, no revision."""
    version = os.environ.get("GPUNODE_LAB_PACKAGE_VERSION", "")
    found = re.search(r"(?:^|:)(\d+(?:\.\d+)+)", version)
    return found[1] if found else None
