"""A node as the probe recorded it, and the means to change what it printed.

``debian-12-driver.json`` is the probe's answer from a Debian 12 container in which Debian's nvidia-driver was built by
DKMS for one kernel. The project made it; host name and kernel command line were replaced.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import facts_host
from facts_host import answer

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.probe import Bundle, CommandResult

__all__ = ["VERSION", "answer", "change", "facts_with", "gpu_facts_with", "gpu_node_bundle", "recorded_bundle"]

RECORDED = Path(__file__).parent / "debian-12-driver.json"
VERSION = "535.309.01"

NVRM = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Tue Jun  3 17:26:33 UTC 2025\n"
UEVENT = "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:1EB8\nPCI_SUBSYS_ID=10DE:12A2\nPCI_SLOT_NAME=0000:00:1E.0\n"
SHOW = (
    "Id=nvidia-persistenced.service\nLoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState=enabled\n\n"
    "Id=nvidia-imex.service\nLoadState=not-found\nActiveState=inactive\nSubState=dead\nUnitFileState=\n"
)
SMI = f"""<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>{VERSION}</driver_version>
  <cuda_version>12.2</cuda_version>
  <attached_gpus>1</attached_gpus>
  <gpu id="00000000:00:1E.0">
    <product_name>Tesla T4</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <gpu_virtualization_mode><virtualization_mode>None</virtualization_mode></gpu_virtualization_mode>
    <processes>
      <process_info><pid>4242</pid><type>C</type><process_name>python</process_name>
        <used_memory>300 MiB</used_memory></process_info>
    </processes>
  </gpu>
</nvidia_smi_log>
"""


def change(
    bundle: Bundle,
    commands: Mapping[str, CommandResult | None] | None = None,
    files: Mapping[str, str | None] | None = None,
    without: tuple[str, ...] = (),
) -> Bundle:
    """The bundle with commands (None: not run) and files replaced, and files left out."""
    merged = {**bundle.commands, **(commands or {})}
    kept = {key: result for key, result in merged.items() if result is not None}
    texts = {path: text for path, text in {**bundle.files, **(files or {})}.items() if path not in without}
    return bundle.model_copy(update={"commands": kept, "files": texts})


@cache
def recorded_bundle() -> Bundle:
    """Debian 12 with the driver built, in a container without systemd and without a GPU."""
    return Bundle.from_json(RECORDED.read_text(encoding="utf-8"), str(RECORDED))


@cache
def gpu_node_bundle() -> Bundle:
    """The recorded node with a T4, its module loaded, systemd, EFI, a host: the additions are typed, not recorded."""
    efivar = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    return change(
        recorded_bundle(),
        {
            **facts_host.COMMANDS,
            "uname": answer("Linux 6.1.0-56-cloud-amd64 x86_64\n"),
            "systemd-detect-virt": answer("none\n", rc=1),
            "systemctl-failed": answer("apt-daily.service loaded failed failed Daily apt download activities\n"),
            "systemctl-units": answer(SHOW + facts_host.SHOW_MORE),
            "nvidia-smi-xml": answer(SMI, 0, "", "nvidia-smi", "-q", "-x"),
            "device-holders": answer(
                "900\tnvpd\tnvidia-persiste\t/dev/nvidia0\n4242\talice\tpython\t/dev/nvidia-uvm /dev/nvidia0\n"
            ),
            "process-owners": answer("4242\talice\tpython\n"),
        },
        {
            **facts_host.FILES,
            "/proc/modules": "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0 (POE)\n",
            "/proc/driver/nvidia/version": NVRM,
            "/sys/bus/pci/devices/0000:00:1e.0/uevent": UEVENT,
            "/run/systemd/system/": "",
            "/sys/firmware/": "acpi\nefi\n",
            "/sys/firmware/efi/efivars/": efivar.rpartition("/")[2] + "\n",
            efivar: "\x06\x00\x00\x00\x01",
        },
    ).model_copy(update={"results": [LIMITS_RECORD]})


LIMITS_RECORD = {
    "record": "defaults.limits",
    "schema": "gpunode.record/1",
    "device": "cpu",
    "component": "node",
    "seconds": 0.1,
    "values": {"shm_bytes": 67108864, "memlock_bytes": -1, "of_tomorrow": True},
    "error": None,
    "skipped": None,
    "undetermined": None,
    "container": {"image": "lab", "engine": "docker 20.10.24", "gpus": None},
    "simulated": True,
}


def facts_with(
    commands: Mapping[str, CommandResult | None] | None = None,
    files: Mapping[str, str | None] | None = None,
    without: tuple[str, ...] = (),
) -> NodeFacts:
    """Facts of the recorded bundle with the changes that ``change`` takes."""
    return facts_from_bundle(change(recorded_bundle(), commands, files, without))


def gpu_facts_with(
    commands: Mapping[str, CommandResult | None] | None = None,
    files: Mapping[str, str | None] | None = None,
    without: tuple[str, ...] = (),
) -> NodeFacts:
    """Facts of the GPU node with the changes that ``change`` takes."""
    return facts_from_bundle(change(gpu_node_bundle(), commands, files, without))
