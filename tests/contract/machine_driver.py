# ruff: noqa: E501 - lines are as long as the tools print them
"""What the driver and its tools print of a simulated node."""

import hashlib
import json
from collections.abc import Iterator
from string import Template

from machine_shapes import FIXTURES, Document, Machine, answer

SETTINGS, SETTINGS_REPORT = "/etc/gpunode/gpu-settings.json", "/run/gpunode/gpu-settings.json"
GPU_XML = FIXTURES / "smi" / "gpu.xml"


def settings_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    """The rules of the role gpu_settings, and the report of its unit."""
    if not machine.gpu_settings:
        yield from ((path, None) for path in (SETTINGS, SETTINGS_REPORT))
        return
    rules = [{"gpus": "all", "power_limit": "default", "sm_clock_mhz": [345, 1755]}]
    text = json.dumps({"schema": "gpunode.gpu-settings/1", "rules": rules}, indent=1) + "\n"
    applied = {
        "power_limit_w": {"value": float(machine.model.power_w), "result": "kept", "message": ""},
        "sm_clock_mhz": {"value": [345, 1755], "result": "applied", "message": ""},
    }
    report = {
        "schema": "gpunode.gpu-settings-report/1",
        "settings_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "finished_at": 1700000000,
        "gpus": {
            f"GPU-00000000-0000-4000-8000-00000000000{number}": {
                "index": number,
                "name": machine.model.name,
                "settings": applied,
            }
            for number in range(len(machine.gpus))
        },
    }
    yield SETTINGS, text
    yield SETTINGS_REPORT, json.dumps(report, indent=1) + "\n"


def driver_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield from settings_files(machine)
    kind = "Open Kernel Module for x86_64" if machine.flavour == "open" else "x86_64 Kernel Module"
    yield (
        "/proc/driver/nvidia/version",
        (
            f"NVRM version: NVIDIA UNIX {kind}  {machine.driver}  Release Build  (dvs-builder@U22)  Tue Jul  1 00:00:00 UTC 2025\n"
        ),
    )
    yield "/proc/driver/nvidia/params", "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n"
    yield "/proc/driver/nvidia/gpus/", "".join(f"{gpu.slot}\n" for gpu in machine.gpus)
    for number, gpu in enumerate(machine.gpus):
        yield (
            f"/proc/driver/nvidia/gpus/{gpu.slot}/information",
            (
                f"Model: \t\t {machine.model.name}\nGPU UUID: \t GPU-00000000-0000-4000-8000-00000000000{number}\n"
                f"Bus Location: \t {gpu.slot}\nDevice Minor: \t {number}\nGPU Excluded:\t No\n"
            ),
        )
    yield (
        "/proc/modules",
        (
            "nvidia_uvm 1540096 0 - Live 0x0000000000000000 (POE)\n"
            "nvidia 56823808 1 nvidia_uvm, Live 0x0000000000000000 (POE)\n"
        ),
    )
    yield "/sys/module/", "ext4\nnvidia\nnvidia_uvm\n"


def xml(machine: Machine) -> str:
    """nvidia-smi -q -x."""
    model = machine.model
    template = Template(GPU_XML.read_text(encoding="utf-8"))
    gpus = "".join(
        template.substitute(
            SLOT=gpu.slot.upper(),
            index=number,
            name=model.name,
            architecture=model.architecture,
            device_id=model.device_id,
            subsystem_id=model.subsystem_id,
            driver=machine.driver,
            virtualization=machine.gpu_virtualization,
            mig=model.mig,
            gen=model.gen,
            memory=model.memory_mib,
            power=model.power_w,
            sm_clock=model.sm_clock,
            memory_clock=model.memory_clock,
            ecc=PAGES_XML if model.pages else ROWS_XML,
            temperature=TLIMIT_XML if model.slowdown_c is None else SLOWDOWN_XML.format(slowdown=model.slowdown_c),
            fabric_state=model.fabric[0],
            fabric_status=model.fabric[1],
            fabric_clique=model.fabric[2],
            fabric_cluster=model.fabric[3],
        )
        for number, gpu in enumerate(machine.gpus)
    )
    return (
        '<?xml version="1.0" ?>\n<!-- Simulated: written for gpunode\'s tests. -->\n'
        '<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"\t<timestamp>Fri Nov 20 12:00:00 2026</timestamp>\n\t<driver_version>{machine.driver}</driver_version>\n"
        f"\t<cuda_version>{'13.0' if machine.driver > '580' else '12.2'}</cuda_version>\n"
        f"\t<attached_gpus>{len(machine.gpus)}</attached_gpus>\n{gpus}</nvidia_smi_log>\n"
    )


ROWS_XML = """\
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>0</dram_correctable>
				<dram_uncorrectable>0</dram_uncorrectable>
			</volatile>
			<aggregate>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>0</dram_correctable>
				<dram_uncorrectable>0</dram_uncorrectable>
				<sram_threshold_exceeded>No</sram_threshold_exceeded>
			</aggregate>
		</ecc_errors>
		<retired_pages>
			<pending_retirement>N/A</pending_retirement>
		</retired_pages>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr>
			<remapped_row_unc>0</remapped_row_unc>
			<remapped_row_pending>No</remapped_row_pending>
			<remapped_row_failure>No</remapped_row_failure>
		</remapped_rows>"""
PAGES_XML = """\
		<ecc_errors>
			<volatile>
				<single_bit><total>0</total></single_bit>
				<double_bit><total>0</total></double_bit>
			</volatile>
			<aggregate>
				<single_bit><total>0</total></single_bit>
				<double_bit><total>0</total></double_bit>
			</aggregate>
		</ecc_errors>
		<retired_pages>
			<multiple_single_bit_retirement><retired_count>0</retired_count></multiple_single_bit_retirement>
			<double_bit_retirement><retired_count>0</retired_count></double_bit_retirement>
			<pending_blacklist>No</pending_blacklist>
			<pending_retirement>No</pending_retirement>
		</retired_pages>
		<remapped_rows>N/A</remapped_rows>"""
TLIMIT_XML = """\
			<gpu_temp>35 C</gpu_temp>
			<gpu_temp_tlimit>52 C</gpu_temp_tlimit>
			<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>
			<memory_temp>40 C</memory_temp>"""
SLOWDOWN_XML = """\
			<gpu_temp>35 C</gpu_temp>
			<gpu_temp_slow_threshold>{slowdown} C</gpu_temp_slow_threshold>"""


COUNTERS = (("Replay Errors", "0"), ("Recovery Errors", "0"), ("CRC Errors", "0"))
COUNTERS_OF_NVLINK_5 = (
    ("Tx packets", "112233445566"),
    ("Tx bytes", "14365881032448"),
    ("Rx packets", "112233445001"),
    ("Rx bytes", "14365880960128"),
    ("Malformed packet Errors", "0"),
    ("Buffer overrun Errors", "0"),
    ("Rx Errors", "0"),
    ("Rx remote Errors", "0"),
    ("Rx General Errors", "0"),
    ("Local link integrity Errors", "0"),
    ("Tx discards", "0"),
    ("Link recovery successful events", "1"),
    ("Link recovery failed events", "0"),
    ("Total link recovery events", "1"),
    ("Effective Errors", "0"),
    ("Effective BER", "15e-255"),
    ("Symbol Errors", "0"),
    ("Symbol BER", "15e-255"),
    ("Raw Errors Lane 0", "82"),
    ("Raw Errors Lane 1", "17"),
    ("FEC Errors - 0", "36140749276"),
    ("FEC Errors - 1", "61"),
    ("FEC Errors - 2", "0"),
    ("PLR Rcv Codes", "12"),
    ("PLR Xmit Blocks", "7301"),
    ("PLR Xmit Retry Blocks", "3"),
)
"""What a link in good health has counted."""


def driver_commands(machine: Machine) -> dict[str, Document]:
    number, model = len(machine.gpus), machine.model
    manager = machine.driver if "nvidia-fabricmanager.service" in machine.extra_units else None
    counters = COUNTERS_OF_NVLINK_5 if model.architecture == "Blackwell" else COUNTERS
    uuids = [
        f"GPU {index}: {model.name} (UUID: GPU-00000000-0000-4000-8000-00000000000{index})\n" for index in range(number)
    ]
    status = "".join(
        head + "".join(f"\t Link {link}: {model.link_speed}\n" for link in range(model.links)) for head in uuids
    )
    errors = "".join(
        head
        + "".join(f"\t Link {link}: {counter}: {value}\n" for link in range(model.links) for counter, value in counters)
        for head in uuids
    )
    absent = "" if model.links else "".join(f"{head}Device does not have or support Nvlink\n" for head in uuids)
    devices = "".join(f"/dev/nvidia{index}\tcharacter\t0666\troot\troot\t195\t{index}\n" for index in range(number))
    held = " ".join(f"/dev/nvidia{index}" for index in range(number))
    return {
        "nvidia-smi-xml": answer(xml(machine), argv=("nvidia-smi", "-q", "-x")),
        "nvidia-smi-topo": answer(topology(machine), argv=("nvidia-smi", "topo", "-m")),
        "nvidia-smi-p2p": answer(peers(number), argv=("nvidia-smi", "topo", "-p2p", "r")),
        "nvidia-smi-nvlink": answer(absent or status, argv=("nvidia-smi", "nvlink", "--status")),
        "nvidia-smi-nvlink-errors": answer(absent or errors, argv=("nvidia-smi", "nvlink", "-e")),
        "version-nv-fabricmanager": answer(
            f"Fabric Manager version is : {manager}\n" if manager else "",
            0 if manager else 127,
            argv=("nv-fabricmanager", "--version"),
        ),
        "version-nv-hostengine": answer("", 127, argv=("nv-hostengine", "--version")),
        "version-dcgmi": answer("", 127, argv=("dcgmi", "--version")),
        "device-nodes": answer(
            devices
            + "/dev/nvidiactl\tcharacter\t0666\troot\troot\t195\t255\n/dev/nvidia-uvm\tcharacter\t0666\troot\troot\t510\t0\n",
            argv=("(probe)", "look at /dev/nvidia*"),
        ),
        "device-holders": answer(
            f"900\tnvpd\tnvidia-persiste\t/dev/nvidiactl {held}\n", argv=("(probe)", "read /proc/*/fd")
        ),
    }


def topology(machine: Machine) -> str:
    """nvidia-smi topo -m."""
    number = len(machine.gpus)
    per_socket = machine.cores * 2
    lines = ["".join(f"\tGPU{index}" for index in range(number)) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"]
    for one in range(number):
        cells = "".join("\t X " if one == other else f"\t{machine.way}" for other in range(number))
        numa = machine.gpus[one].numa
        lines.append(f"GPU{one}{cells}\t{numa * per_socket}-{(numa + 1) * per_socket - 1}\t{numa}\t\tN/A\n")
    return "".join(lines) + "\nLegend:\n\n  X    = Self\n"


def peers(number: int) -> str:
    """nvidia-smi topo -p2p r."""
    rows = [
        f" GPU{one}" + "".join("\tX" if one == other else "\tOK" for other in range(number)) + "\n"
        for one in range(number)
    ]
    head = " " + "".join(f"\tGPU{index}" for index in range(number)) + "\n"
    return head + "".join(rows) + "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
