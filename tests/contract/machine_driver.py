"""What the driver, its tools, the bus and its adapters show on a simulated node beside what the simulator has."""

import hashlib
import json
from collections.abc import Iterator

from machine_shapes import PCI, Document, Machine, answer

from gpunode.lab.simulator import kernel

SETTINGS, SETTINGS_REPORT = "/etc/gpunode/gpu-settings.json", "/run/gpunode/gpu-settings.json"
MODULES = {"nvidia", "nvidia_uvm"}


def settings_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    """The rules of the role gpu_settings, and the report of its unit."""
    if not machine.gpu_settings:
        yield from ((path, None) for path in (SETTINGS, SETTINGS_REPORT))
        return
    rules = [{"gpus": "all", "power_limit": "default", "sm_clock_mhz": [345, 1755]}]
    text = json.dumps({"schema": "gpunode.gpu-settings/1", "rules": rules}, indent=1) + "\n"
    report = {
        "schema": "gpunode.gpu-settings-report/1",
        "settings_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "finished_at": 1700000000,
        "gpus": {
            gpu["uuid"]: {
                "index": gpu["index"],
                "name": gpu["name"],
                "settings": {
                    "power_limit_w": {"value": gpu["power_limit_w"], "result": "kept", "message": ""},
                    "sm_clock_mhz": {"value": [345, 1755], "result": "applied", "message": ""},
                },
            }
            for gpu in machine.gpus
        },
    }
    yield SETTINGS, text
    yield SETTINGS_REPORT, json.dumps(report, indent=1) + "\n"


def driver_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield from settings_files(machine)
    yield (
        "/proc/modules",
        (
            "nvidia_uvm 1540096 0 - Live 0x0000000000000000 (POE)\n"
            "nvidia 56823808 1 nvidia_uvm, Live 0x0000000000000000 (POE)\n"
        ),
    )
    yield "/sys/module/", "ext4\nnvidia\nnvidia_uvm\n"


def device_files(machine: Machine) -> list[tuple[str, int, int, int]]:
    """Return path, major and minor number, and mode of the GPUs' device files."""
    return [file for file in kernel.device_files(machine.hardware, MODULES) if file[0].count("/") == 2]


def driver_commands(machine: Machine) -> dict[str, Document]:
    manager = machine.driver if "nvidia-fabricmanager.service" in machine.extra_units else None
    made = device_files(machine)
    files = "".join(
        f"{path}\tcharacter\t{mode:04o}\troot\troot\t{major}\t{minor}\n" for path, major, minor, mode in made
    )
    held = " ".join(["/dev/nvidiactl", *(f"/dev/nvidia{gpu['minor_number']}" for gpu in machine.gpus)])
    return {
        "version-nv-fabricmanager": answer(
            f"Fabric Manager version is : {manager}\n" if manager else "", 0 if manager else 127
        ),
        "device-nodes": answer(files, argv=("(probe)", "look at /dev/nvidia*")),
        "device-links": answer(
            "".join(f"{path}\t20\tyes\n" for path, *_ in made), argv=("(probe)", "look at /dev/char")
        ),
        **(dcgm_commands() | slurm_commands() if machine.slurm else {}),
        "device-holders": answer(f"900\tnvpd\tnvidia-persiste\t{held}\n", argv=("(probe)", "read /proc/*/fd")),
    }


def slurm_commands() -> dict[str, Document]:
    """What Slurm's programs of Debian 12 printed with a slurmctld on loopback; of scontrol's one line is kept."""
    return {
        "version-slurmd": answer("slurm-wlm 22.05.8\n", argv=("slurmd", "-V")),
        "slurm-controller": answer("SLURM_VERSION           = 22.05.8\n", argv=("scontrol", "show", "config")),
    }


def dcgm_commands() -> dict[str, Document]:
    """What DCGM's programs print: ``dcgmi -v`` as in NVIDIA/DCGM issue 183, the versions are ours."""
    build = "Version : 4.4.1\nBuild ID : 26\nBuild Type : Release\n"
    return {
        "version-nv-hostengine": answer(build, argv=("nv-hostengine", "--version")),
        "version-dcgmi": answer("\ndcgmi  version: 4.4.1\n", argv=("dcgmi", "--version")),
        "dcgmi-versions": answer(f"{build}\nHostengine build info:\n{build}", argv=("dcgmi", "-v")),
    }


NVME_SLOT = "0000:f1:00.0"


def pci_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    bare = machine.virtualization == "none"
    yield "/sys/class/iommu/", "dmar0\n" if bare else ""
    for name, nic in machine.interfaces.items():
        yield f"/sys/class/infiniband/{nic['name']}/ports/1/gid_attrs/ndevs/0", f"{name}\n"
    if machine.nvme:
        yield (
            f"{PCI}{NVME_SLOT}/uevent",
            f"DRIVER=nvme\nPCI_CLASS=10802\nPCI_ID=144D:A80A\nPCI_SLOT_NAME={NVME_SLOT}\n",
        )


# As the manual page of dcb-pfc prints it (iproute2 6.1), with another priority.
PFC = "pfc-cap 8 macsec-bypass off delay 4096 \nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off \n"
# As iproute2 6.1 prints it.
RULES = "0:\tfrom all lookup local\n32766:\tfrom all lookup main\n32767:\tfrom all lookup default\n"


def pci_commands(machine: Machine) -> dict[str, Document]:
    files = sorted(path for path, *_ in kernel.adapter_files(machine.hardware))
    commands = {
        "rdma-nodes": answer(
            "".join(f"{path}\tcharacter\n" for path in files), argv=("(probe)", "look at /dev/infiniband")
        ),
    }
    if machine.hardware["nics"]:
        commands["peer-memory"] = answer("no\n", argv=("(probe)", "look for the peer memory interface"))
    if machine.roce:
        commands["ip-rules"] = answer(RULES)
    for name in machine.interfaces if machine.roce else ():
        commands[f"dcb-pfc-{name}"] = answer(PFC)
        commands[f"dcb-app-{name}"] = answer("dscp-prio 26:3 48:6 \n")
        commands[f"dcb-dcbx-{name}"] = answer("host ieee \n")
    return commands
