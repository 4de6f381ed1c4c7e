"""A simulated node's files below a folder, as its boot leaves them, and its nvidia-smi asked in this process."""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from gpunode.lab.simulator import modules, nics, pci, smi, state

Document = dict[str, Any]


@contextlib.contextmanager
def node_at(root: Path, driver: str) -> Iterator[None]:
    """Let the simulator's tools work on the node below ``root`` with the nvidia-smi of that driver's package."""
    environment = {"GPUNODE_LAB_ROOT": str(root), "GPUNODE_LAB_PACKAGE_VERSION": driver}
    with mock.patch.object(state, "ROOT", root), mock.patch.dict(os.environ, environment):
        yield


_WHERE_THE_KERNEL_HAS_THEM = (
    (pci, "DEVICES", "/sys/devices"),
    (pci, "SLOTS", "/sys/bus/pci/devices"),
    (pci, "DRIVERS", "/sys/bus/pci/drivers"),
    (nics, "CLASS", "/sys/class/infiniband"),
    (nics, "VERBS", "/sys/class/infiniband_verbs"),
    (nics, "MAD", "/sys/class/infiniband_mad"),
    (pci, "NUMA_FOLDER", "/sys/devices/system/node"),
    (modules, "DRIVER", "/proc/driver/nvidia"),
)


@contextlib.contextmanager
def kernel_files_in_place(processors: int) -> Iterator[None]:
    """Let the simulator write the kernel's files where a node has them, for a host with so many processors.

    A node has them elsewhere, and mounts over what the host's kernel shows.
    """
    with contextlib.ExitStack() as stack:
        for module, name, folder in _WHERE_THE_KERNEL_HAS_THEM:
            stack.enter_context(mock.patch.object(module, name, folder))
        stack.enter_context(mock.patch.object(pci, "processors", return_value=list(range(processors))))
        yield


def lay_kernel_files(hardware: Document, driver: str, flavour: str) -> None:
    """Write bus, adapters, NUMA nodes and the driver's folder of a node with a driver that is bound to its GPUs."""
    with state.change() as (_, running):
        running["numa_nodes"] = hardware["numa_nodes"]
    pci.write(hardware)
    nics.write(hardware)
    pci.write_numa(hardware["numa_nodes"])
    for gpu in hardware["gpus"]:
        pci.bind(gpu, "nvidia")
    for switch in hardware["nvswitches"]:
        pci.bind(switch, "nvidia-nvswitch")
    modules.write_driver_folder(hardware["gpus"], driver, flavour, "Tue Jul  1 00:00:00 UTC 2025", [])


def lay(root: Path, hardware: Document, driver: str, modes: Mapping[str, Document], **running: Any) -> None:
    """Write a node with a driver on disk and in memory; ``modes`` and ``running`` are those of ``state.running``."""
    library(root, driver)
    running = {"module": {"version": driver, "flavour": "open"}, **running}
    write(root, "etc/gpunode/lab-hardware.json", hardware)
    write(root, "etc/gpunode/lab-node", {})
    write(root, "run/gpunode-lab/state.json", {"gpus": dict(modes), **running})


def library(root: Path, driver: str) -> None:
    """Put the driver's libraries of a release on disk, in the place of those that were there."""
    folder = root / f"usr/lib/{os.uname().machine}-linux-gnu"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libnvidia-ml", "libcuda"):
        (folder / f"{name}.so.{driver}").touch()
        (folder / f"{name}.so.1").unlink(missing_ok=True)
        (folder / f"{name}.so.1").symlink_to(f"{name}.so.{driver}")


def write(root: Path, name: str, document: object) -> None:
    """Write a JSON file of the node."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(document), encoding="utf-8")


def output_of(main: Callable[[list[str]], int], *words: str) -> tuple[int, str]:
    """Return the exit code and stdout of one of the simulator's tools with these arguments."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        code = main(list(words))
    return code, stdout.getvalue()


def nvidia_smi(*words: str) -> tuple[int, str]:
    """Return the exit code and stdout of nvidia-smi with these arguments."""
    return output_of(smi.main, *words)
