"""Whole nodes as the probe prints them: simulated, never seen on a machine.

A ``Machine`` has what is in a node. Its hardware and nvidia-smi are the lab's simulator, laid below a folder with the
files of a host and read by the real probe; what Debian's packages look like once they are installed is taken from the
recorded ``debian-12-driver.json``.
"""

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest import mock

from machine_driver import driver_commands, driver_files, pci_commands, pci_files
from machine_exposure import exposure_commands, exposure_files, ssh_commands
from machine_host import host_commands, host_files
from machine_packages import as_from_nvidia
from machine_records import records
from machine_shapes import (
    DRIVER_NODE,
    GRACE,
    GUEST,
    HGX,
    HGX_4,
    HGX_B200,
    PCI,
    PCIE_2,
    PCIE_4,
    RECORDED_DRIVER,
    SECURE_BOOT,
    T4_1,
    V100_2,
    Document,
    Machine,
    answer,
    recorded,
)
from simulated import kernel_files_in_place, lay, lay_kernel_files, node_at, nvidia_smi

from gpunode.onnode import probe as script

__all__ = [
    "DRIVER_NODE",
    "GRACE",
    "GUEST",
    "HGX",
    "HGX_4",
    "HGX_B200",
    "PCI",
    "PCIE_2",
    "PCIE_4",
    "SECURE_BOOT",
    "T4_1",
    "V100_2",
    "Document",
    "Machine",
    "bundle",
    "recorded",
    "text_of",
]

LIMIT_S = 300
HARDWARE = ("/proc/driver/", "/proc/modules", "/sys/")
"""What of the recorded files is the hardware's, which the simulator has."""
LINK = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")


class FolderProbe(script.Probe):
    """The probe on a node below a folder. nvidia-smi is the simulator's, what other programs answer is given."""

    def __init__(self, root: Path, answers: Mapping[str, Document]) -> None:
        super().__init__(root=str(root), path=str(root / "none"), passive_s=LIMIT_S, budget_s=2 * LIMIT_S)
        self.answers = answers

    def run(self, key: str, argv: list[str], *_: object, **__: object) -> script.Answer | None:
        if argv[0] == "nvidia-smi":
            code, text = nvidia_smi(*argv[1:])
            reply = answer(text, code)
        else:
            reply = self.answers.get(key) or answer(rc=127, stderr=f"{argv[0]}: No such file or directory")
        self.note_answer(key, {**reply, "argv": argv})
        return self.commands.get(key)

    def execute(self, argv: list[str], *_: object, **__: object) -> script.Answer:
        if argv[0] == "sshd":
            return dict(self.answers["sshd-settings"])
        return answer(rc=127, stderr=f"{argv[0]}: No such file or directory", argv=tuple(argv))


@cache
def text_of(machine: Machine) -> str:
    """Return the bundle that the real probe collects on that node, as JSON."""
    document = recorded()
    commands = document["commands"]
    files = {path: text for path, text in document["files"].items() if not path.startswith(HARDWARE)}
    files |= dict(host_files(machine)) | dict(pci_files(machine)) | dict(driver_files(machine))
    files |= dict(exposure_files(machine))
    commands |= host_commands(machine) | driver_commands(machine) | pci_commands(machine)
    commands |= exposure_commands(machine) | ssh_commands()
    if machine.nvidia_repository:
        as_from_nvidia(machine, commands, files)
    else:
        commands, files = json.loads(json.dumps([commands, files]).replace(RECORDED_DRIVER, machine.driver))
    with tempfile.TemporaryDirectory(prefix="gpunode-node-") as folder:
        collected = collect(Path(folder), machine, commands, files)
    return json.dumps(collected)


def collect(
    root: Path, machine: Machine, commands: Mapping[str, Document], files: Mapping[str, str | None]
) -> Document:
    """Lay the node below ``root`` and read it with the probe; what the probe looks at itself may be given too."""
    with node_at(root, machine.driver), kernel_files_in_place(machine.processors):
        modes = {str(gpu["index"]): {"ecc": True, "mig": False, "persistence": True} for gpu in machine.gpus}
        lay(
            root,
            machine.hardware,
            machine.driver,
            modes,
            module={"version": machine.driver, "flavour": machine.flavour},
            fabric={"state": "Completed", "status": "Success"},
        )
        lay_kernel_files(machine.hardware, machine.driver, machine.flavour)
        if machine.virtualization != "none":
            hide_links(root, machine)
        else:
            isolate(root, machine)
        write(root, files)
        probe = FolderProbe(root, commands)
        with mock.patch.object(script, "STUCK_S", 0.0):
            document = probe.collect()
    unasked = [
        key for key, reply in commands.items() if reply["argv"][0] != "(probe)" and key not in document["commands"]
    ]
    assert not unasked, f"{machine.name}: the probe does not ask for {unasked}"
    prepared = {key: reply for key, reply in commands.items() if reply["argv"][0] == "(probe)"}
    # The log of a node is of that day, so is its bundle.
    head = {"host": machine.name, "collected_at": recorded()["collected_at"]}
    return {**document, **head, "commands": {**document["commands"], **prepared}}


def hide_links(root: Path, machine: Machine) -> None:
    """Remove what a hypervisor does not pass on of a GPU's place on the bus."""
    for slot in machine.slots:
        for name in LINK:
            (root / f"sys/bus/pci/devices/{slot}/{name}").unlink()


def isolate(root: Path, machine: Machine) -> None:
    """Put each GPU into an IOMMU group of its own."""
    for number, slot in enumerate(machine.slots, start=10):
        group = root / f"sys/kernel/iommu_groups/{number}"
        group.mkdir(parents=True)
        (group / "type").write_text("identity\n", encoding="ascii")
        (root / f"sys/bus/pci/devices/{slot}/iommu_group").symlink_to(group)


def write(root: Path, files: Mapping[str, str | None]) -> None:
    """Write files; a path with a slash at its end is a folder with these names in it; None: there is no such thing."""
    folders = {path: text for path, text in files.items() if path.endswith("/") and text is not None}
    for path, text in files.items():
        target = root / path.lstrip("/")
        if text is None:
            target.unlink(missing_ok=True)
        elif path not in folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text.encode("latin-1"))
    for path, text in folders.items():
        for name in ["", *text.splitlines()]:
            target = root / path.lstrip("/") / name
            if not target.exists():
                target.mkdir(parents=True)


def bundle(machine: Machine) -> Document:
    """Return the node's bundle: everything is good."""
    document: Document = json.loads(text_of(machine))
    return document | {"simulated": True, "results": records(machine)}
