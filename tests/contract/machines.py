# ruff: noqa: E501 - lines are as long as the tools print them
"""Whole nodes as the probe would print them: written for these tests, simulated, never seen on a machine.

A ``Machine`` says what is in a node; ``bundle`` writes the raw text that the tools of such a node print. What Debian's
packages look like once they are installed is not written but taken from the recorded ``debian-12-driver.json``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
DRIVER_NODE = FIXTURES / "bundles" / "debian-12-driver.json"
GPU_XML = FIXTURES / "smi" / "gpu.xml"
PCI = "/sys/bus/pci/devices/"
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
BRIDGE = "PCI_CLASS=60400\nPCI_ID=1000:C030\n"

Document = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One GPU model as its tools print it."""

    name: str
    architecture: str
    device_id: str
    subsystem_id: str
    memory_mib: int
    power_w: int
    sm_clock: int
    memory_clock: int
    gen: int
    speed: str
    """In sysfs."""
    links: int = 0
    link_speed: str = ""
    mig: str = "N/A"
    fabric: tuple[str, str, str, str] = ("N/A", "N/A", "N/A", "N/A")
    pages: bool = False
    """Retires pages (up to Turing) where later ones remap rows."""
    slowdown_c: int | None = None
    """None: it tells how far it is from its limit (T.Limit)."""


JOINED = ("Completed", "Success", "0", "00000000-0000-0000-0000-000000000000")
H100 = Model(
    "NVIDIA H100 80GB HBM3",
    "Hopper",
    "2330",
    "16C1",
    81559,
    700,
    1980,
    2619,
    5,
    "32.0 GT/s PCIe",
    18,
    "26.562 GB/s",
    "Disabled",
    JOINED,
)
L40S = Model("NVIDIA L40S", "Ada Lovelace", "26B9", "1851", 46068, 350, 2520, 9001, 4, "16.0 GT/s PCIe")
T4 = Model("Tesla T4", "Turing", "1EB8", "12A2", 15360, 70, 1590, 5001, 3, "8.0 GT/s PCIe", pages=True, slowdown_c=93)
GH200 = Model(
    "NVIDIA GH200 480GB", "Hopper", "2342", "16EB", 97871, 900, 1980, 2619, 5, "32.0 GT/s PCIe", mig="Disabled"
)


@dataclass(frozen=True)
class Gpu:
    """Where a GPU sits."""

    slot: str
    ports: tuple[str, ...] = ()
    """Bridges above it, from the root down."""
    numa: int = 0


@dataclass(frozen=True)
class Machine:
    """What is in a node."""

    name: str
    model: Model
    gpus: tuple[Gpu, ...]
    driver: str
    flavour: str = "proprietary"
    nvidia_repository: bool = False
    """Packages of NVIDIA's repository on Ubuntu; else Debian's own, as recorded."""
    kernel: str = "6.1.0-56-cloud-amd64"
    architecture: str = "x86_64"
    virtualization: str = "none"
    gpu_virtualization: str = "None"
    sockets: int = 2
    cores: int = 32
    """Of each socket."""
    memory_gib: int = 512
    nvswitches: tuple[str, ...] = ()
    hcas: tuple[tuple[str, str], ...] = ()
    """(name, slot) of InfiniBand devices."""
    nvme: bool = True
    way: str = "SYS"
    """Between any two GPUs, in the words of nvidia-smi topo."""
    pcie_link: bool = True
    """False: sysfs tells no link (virtual machines)."""
    docker: bool = True
    extra_units: tuple[str, ...] = field(default=())


HGX = Machine(
    "hgx-h100-8",
    H100,
    tuple(
        Gpu(f"0000:{bus}:00.0", (f"0000:{root}:01.0", f"0000:{port}:00.0"), number // 4)
        for number, (bus, root, port) in enumerate(
            zip(
                ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db"),
                ("15", "26", "37", "59", "97", "a7", "b7", "d7"),
                ("16", "28", "38", "5b", "98", "a9", "b8", "d9"),
                strict=True,
            )
        )
    ),
    driver="580.95.05",
    flavour="open",
    nvidia_repository=True,
    kernel="6.8.0-60-generic",
    cores=56,
    memory_gib=2048,
    nvswitches=("0000:07:00.0", "0000:08:00.0", "0000:09:00.0", "0000:0a:00.0"),
    hcas=tuple((f"mlx5_{number}", f"0000:{bus}:00.0") for number, bus in enumerate(("1a", "2c", "3c", "5f"))),
    way="NV18",
    extra_units=("nvidia-fabricmanager.service",),
)
PCIE_4 = Machine(
    "l40s-4",
    L40S,
    tuple(
        Gpu(f"0000:{bus}:00.0", (f"0000:{root}:01.0",), number // 2)
        for number, (bus, root) in enumerate((("1a", "19"), ("3d", "3c"), ("9a", "99"), ("bd", "bc")))
    ),
    driver="535.261.03",
)
PCIE_2 = replace(PCIE_4, name="l40s-2", gpus=PCIE_4.gpus[:2])
T4_1 = Machine(
    "t4-1",
    T4,
    (Gpu("0000:3b:00.0", ("0000:3a:00.0",), 0),),
    driver="535.261.03",
    sockets=1,
    cores=16,
    memory_gib=64,
)
GUEST = Machine(
    "guest-l40s-1",
    L40S,
    (Gpu("0000:00:05.0"),),
    driver="535.261.03",
    virtualization="kvm",
    gpu_virtualization="Pass-Through",
    sockets=1,
    cores=8,
    memory_gib=64,
    nvme=False,
    pcie_link=False,
    docker=False,
)
GRACE = Machine(
    "gh200-1",
    GH200,
    (Gpu("0009:01:00.0", ("0009:00:00.0",), 0),),
    driver="580.95.05",
    flavour="open",
    nvidia_repository=True,
    kernel="6.8.0-1030-nvidia-64k",
    architecture="aarch64",
    sockets=1,
    cores=72,
    memory_gib=480,
)
MACHINES = {machine.name: machine for machine in (HGX, PCIE_4, T4_1, GUEST, GRACE)}


def answer(stdout: str = "", rc: int = 0, stderr: str = "", argv: tuple[str, ...] = ("tool",)) -> Document:
    """A command's answer."""
    return {
        "argv": list(argv),
        "rc": rc,
        "stdout": stdout,
        "stderr": stderr,
        "seconds": 0.1,
        "timed_out": False,
        "truncated": False,
    }


@cache
def recorded_text() -> str:
    """The recorded bundle."""
    return DRIVER_NODE.read_text(encoding="utf-8")


def recorded() -> Document:
    """The recorded bundle: Debian's driver installed, built and held; no GPU; an older probe."""
    document: Document = json.loads(recorded_text())
    return document


def bundle(machine: Machine) -> Document:
    """The node's bundle: everything is good."""
    document = recorded()
    document |= {"host": machine.name, "simulated": True}
    commands, files = document["commands"], document["files"]
    files |= dict(host_files(machine)) | dict(pci_files(machine)) | dict(driver_files(machine))
    commands |= host_commands(machine) | driver_commands(machine) | pci_commands(machine)
    if machine.nvidia_repository:
        as_from_nvidia(machine, commands, files)
    return document


# The driver and its tools


def driver_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
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


def driver_commands(machine: Machine) -> dict[str, Document]:
    number, model = len(machine.gpus), machine.model
    manager = machine.driver if machine.nvswitches else None
    uuids = [
        f"GPU {index}: {model.name} (UUID: GPU-00000000-0000-4000-8000-00000000000{index})\n" for index in range(number)
    ]
    status = "".join(
        head + "".join(f"\t Link {link}: {model.link_speed}\n" for link in range(model.links)) for head in uuids
    )
    errors = "".join(
        head
        + "".join(
            f"\t Link {link}: Replay Errors: 0\n\t Link {link}: Recovery Errors: 0\n\t Link {link}: CRC Errors: 0\n"
            for link in range(model.links)
        )
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


# The PCI bus


def pci_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    model, number = machine.model, len(machine.gpus)
    bridges = sorted({port for gpu in machine.gpus for port in gpu.ports})
    slots = [*(gpu.slot for gpu in machine.gpus), *bridges, *machine.nvswitches, *(slot for _, slot in machine.hcas)]
    slots += ["0000:c3:00.0"] if machine.nvme else []
    yield PCI, "".join(f"{slot}\n" for slot in sorted(slots))
    for index, gpu in enumerate(machine.gpus):
        place = f"{PCI}{gpu.slot}/"
        yield (
            place + "uevent",
            (
                f"DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:{model.device_id}\nPCI_SUBSYS_ID=10DE:{model.subsystem_id}\n"
                f"PCI_SLOT_NAME={gpu.slot}\n"
            ),
        )
        yield from link(place, model.speed, machine.pcie_link)
        yield place + "numa_node", f"{gpu.numa if machine.sockets > 1 else -1}\n"
        yield place + "local_cpulist", f"{gpu.numa * machine.cores}-{(gpu.numa + 1) * machine.cores - 1}\n"
        yield place + "power_state", "D0\n"
        if machine.virtualization == "none":
            yield place + "iommu_group/type", "identity\n"
        assert index < number
    for slot in bridges:
        yield f"{PCI}{slot}/uevent", BRIDGE
        yield from link(f"{PCI}{slot}/", model.speed, machine.pcie_link)
    for slot in machine.nvswitches:
        yield (
            f"{PCI}{slot}/uevent",
            f"DRIVER=nvidia-nvswitch\nPCI_CLASS=68000\nPCI_ID=10DE:22A3\nPCI_SLOT_NAME={slot}\n",
        )
    for name, slot in machine.hcas:
        yield f"{PCI}{slot}/uevent", f"DRIVER=mlx5_core\nPCI_CLASS=20700\nPCI_ID=15B3:1021\nPCI_SLOT_NAME={slot}\n"
        yield from infiniband(name, slot)
    yield "/sys/class/infiniband/", "".join(f"{name}\n" for name, _ in machine.hcas) or None
    yield "/sys/class/iommu/", "dmar0\n" if machine.virtualization == "none" else ""


def link(place: str, speed: str, told: bool) -> Iterator[tuple[str, str]]:
    if told:
        yield place + "current_link_speed", f"{speed}\n"
        yield place + "max_link_speed", f"{speed}\n"
        yield place + "current_link_width", "16\n"
        yield place + "max_link_width", "16\n"


def infiniband(name: str, slot: str) -> Iterator[tuple[str, str]]:
    place = f"/sys/class/infiniband/{name}/"
    yield place + "fw_ver", "28.39.1002\n"
    yield place + "board_id", "MT_0000000838\n"
    yield place + "hca_type", "MT4129\n"
    yield place + "device/uevent", f"PCI_SLOT_NAME={slot}\n"
    yield place + "ports/1/state", "4: ACTIVE\n"
    yield place + "ports/1/phys_state", "5: LinkUp\n"
    yield place + "ports/1/rate", "400 Gb/sec (4X NDR)\n"
    yield place + "ports/1/link_layer", "InfiniBand\n"
    for counter in ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors"):
        yield f"{place}ports/1/counters/{counter}", "0\n"


def pci_commands(machine: Machine) -> dict[str, Document]:
    paths = "".join(f"{gpu.slot}\t{' '.join(gpu.ports)}\t{number + 10}\n" for number, gpu in enumerate(machine.gpus))
    bridges = sorted({port for gpu in machine.gpus for port in gpu.ports})
    commands = {"pci-paths": answer(paths, argv=("(probe)", "resolve links"))}
    if bridges:
        lines = "".join(f"{slot}\t005f\t0000\n" for slot in bridges)
        commands["pci-acs"] = answer(lines, argv=("(probe)", "read configuration space"))
    return commands


# The host


def host_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield "/run/systemd/system/", ""
    yield "/proc/cmdline", f"BOOT_IMAGE=/boot/vmlinuz-{machine.kernel} root=/dev/sda1 ro\n"
    yield (
        "/proc/meminfo",
        (
            f"MemTotal:       {machine.memory_gib * 1024 * 1024 - 4_000_000} kB\nMemAvailable:   {machine.memory_gib * 1000 * 1000} kB\n"
            "SwapTotal:             0 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n"
        ),
    )
    yield "/proc/uptime", "86400.00 1000000.00\n"
    yield "/proc/loadavg", "0.52 0.58 0.59 1/1234 4242\n"
    yield "/proc/sys/vm/swappiness", "10\n"
    yield "/sys/firmware/", "acpi\nefi\n"
    yield "/sys/firmware/efi/efivars/", SECURE_BOOT.rpartition("/")[2] + "\n"
    yield SECURE_BOOT, "\x06\x00\x00\x00\x00"
    yield "/sys/kernel/security/lockdown", "[none] integrity confidentiality\n"
    yield "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"
    for name in ("sys_vendor", "product_name", "board_name", "bios_version", "bios_date"):
        yield f"/sys/class/dmi/id/{name}", f"simulated {name}\n"
    nodes = range(machine.sockets)
    yield "/sys/devices/system/node/", "".join(f"node{node}\n" for node in nodes)
    for node in nodes:
        place = f"/sys/devices/system/node/node{node}/"
        yield place + "cpulist", f"{node * machine.cores}-{(node + 1) * machine.cores - 1}\n"
        yield place + "distance", " ".join("10" if node == other else "21" for other in nodes) + "\n"
        yield place + "meminfo", f"Node {node} MemTotal:       100000000 kB\n"
    guest = machine.virtualization != "none"
    yield "/sys/devices/system/edac/mc/", None if guest else "mc0\n"
    if not guest:
        yield "/sys/devices/system/edac/mc/mc0/mc_name", "Simulated IMC\n"
        yield "/sys/devices/system/edac/mc/mc0/ce_count", "0\n"
        yield "/sys/devices/system/edac/mc/mc0/ue_count", "0\n"
    yield from disks(machine)
    yield "/etc/security/limits.conf", "# empty\n"
    yield "/etc/security/limits.d/", "90-gpu.conf\n"
    yield "/etc/security/limits.d/90-gpu.conf", "* - memlock unlimited\n* - nofile 1048576\n"
    yield "/etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}\n'
    for path in (
        "/etc/nvidia-container-runtime/config.toml",
        "/etc/containerd/config.toml",
        "/run/reboot-required.pkgs",
        "/var/log/nvidia-installer.log",
    ):
        yield path, None
    yield "/sys/class/net/", "eth0\nlo\n"
    yield "/sys/class/net/eth0/operstate", "up\n"
    yield "/sys/class/net/eth0/device/uevent", "DRIVER=e1000e\n"


def disks(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield "/sys/block/", "nvme0n1\nsda\n" if machine.nvme else "sda\n"
    yield "/sys/block/sda/size", "1875385008\n"
    yield "/sys/block/sda/queue/rotational", "0\n"
    yield "/sys/class/nvme/", "nvme0\n" if machine.nvme else None
    if machine.nvme:
        yield "/sys/block/nvme0n1/size", "7501476528\n"
        yield "/sys/block/nvme0n1/ro", "0\n"
        yield "/sys/class/nvme/nvme0/model", "Simulated NVMe\n"
        yield "/sys/class/nvme/nvme0/state", "live\n"
        yield "/sys/class/nvme/nvme0/device/uevent", "DRIVER=nvme\nPCI_SLOT_NAME=0000:c3:00.0\n"
        yield (
            f"{PCI}0000:c3:00.0/uevent",
            "DRIVER=nvme\nPCI_CLASS=10802\nPCI_ID=144D:A80A\nPCI_SLOT_NAME=0000:c3:00.0\n",
        )


def unit(name: str, active: str = "active", sub: str = "running", load: str = "loaded") -> str:
    """One block of systemctl show."""
    return (
        f"Id={name}\nLoadState={load}\nActiveState={active}\nSubState={sub}\nUnitFileState=enabled\n"
        "StateChangeTimestamp=Fri 2026-11-20 09:00:01 UTC\nNRestarts=0\nLimitNOFILE=524288\nLimitMEMLOCK=infinity\n"
    )


def host_commands(machine: Machine) -> dict[str, Document]:
    running = ["nvidia-persistenced.service", "chrony.service", *machine.extra_units]
    running += ["docker.service"] if machine.docker else []
    absent = [name for name in ("nvidia-fabricmanager.service", "nvidia-imex.service") if name not in running]
    units = [unit(name) for name in running] + [unit(name, "inactive", "dead", "not-found") for name in absent]
    guest = machine.virtualization != "none"
    cpus = machine.sockets * machine.cores * (1 if machine.architecture == "aarch64" else 2)
    governor = "" if guest else f"scaling_driver\tintel_pstate\t{cpus}\nscaling_governor\tperformance\t{cpus}\n"
    no = "No such file or directory"
    commands = {
        "uname": answer(f"Linux {machine.kernel} {machine.architecture}\n", argv=("uname", "-srm")),
        "lscpu": answer(lscpu(machine, cpus), argv=("lscpu",)),
        "systemd-detect-virt": answer(f"{machine.virtualization}\n", 0 if guest else 1, argv=("systemd-detect-virt",)),
        "systemctl-units": answer("\n".join(units), argv=("systemctl", "show")),
        "systemctl-failed": answer(argv=("systemctl", "list-units", "--failed")),
        "systemctl-defaults": answer(
            "DefaultLimitMEMLOCK=8388608\nDefaultLimitNOFILE=524288\n", argv=("systemctl", "show")
        ),
        "timedatectl": answer("NTP=yes\nNTPSynchronized=yes\nTimezone=Etc/UTC\n", argv=("timedatectl", "show")),
        "chronyc-tracking": answer(
            "C0A80001,192.168.0.1,3,1700000000.1,-0.000012,0.1,0.1,1.0,0.1,0.1,0.1,0.1,64.1,Normal\n", argv=("chronyc",)
        ),
        "signs": answer("/usr/bin/unattended-upgrade\n/usr/bin/nvidia-smi\n", argv=("(probe)", "look for paths")),
        "apt-config": answer(
            'Unattended-Upgrade "";\nUnattended-Upgrade::Origins-Pattern:: "origin=Debian,label=Debian";\n'
            'APT::Periodic "";\nAPT::Periodic::Unattended-Upgrade "1";\n',
            argv=("apt-config", "dump"),
        ),
        "variables": answer(
            "/etc/environment\tNCCL_DEBUG\tWARN\n", argv=("(probe)", "read settings of the environment")
        ),
        "repository-files": answer(argv=("(probe)", "look for package sources")),
        "cpu-clocks": answer(governor, argv=("(probe)", "read cpufreq")),
        "df-local": answer(DF, argv=("df", "-l", "-k")),
        "journal-kernel": answer(
            f"2026-11-20T09:00:00+0000 {machine.name} kernel: Linux version {machine.kernel} (simulated)\n",
            argv=("journalctl", "-k", "-b"),
        ),
        "stuck-processes": answer(argv=("(probe)", "read /proc/*/stat twice")),
        "cdi-specs": answer(cdi(machine) if machine.docker else "", argv=("(probe)", "read CDI specifications")),
        "library-files": answer(
            "/lib/x86_64-linux-gnu/libcuda.so\t/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03\n"
            "/lib/x86_64-linux-gnu/libcuda.so.1\t/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03\n"
            "/lib/x86_64-linux-gnu/libnvidia-ml.so.1\t/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.261.03\n",
            argv=("(probe)", "look for libraries"),
        ),
        "version-docker": answer("Docker version 28.5.1, build e180ab8\n", argv=("docker", "--version")),
        "version-nvidia-ctk": answer("NVIDIA Container Toolkit CLI version 1.18.0\n", argv=("nvidia-ctk", "--version")),
    }
    for tool in ("containerd", "podman", "runc", "crun"):
        commands[f"version-{tool}"] = answer("", 127, f"{tool}: {no}", (tool, "--version"))
    if machine.nvme:
        commands["nvme-nvme0"] = answer(
            '{"critical_warning":0,"avail_spare":100,"percent_used":3,"media_errors":0}\n', argv=("nvme", "smart-log")
        )
    if machine.docker:
        commands["docker-info"] = answer(DOCKER_INFO, argv=("docker", "info", "--format"))
        commands["dpkg-packages"] = answer(recorded()["commands"]["dpkg-packages"]["stdout"] + toolkit("amd64"))
    return commands


DF = """\
Type     1K-blocks      Avail   Inodes    IFree Mounted on
ext4     264212084  180837624 16777216 16292685 /
vfat        126710     114500        -        - /boot/efi
"""
DOCKER_INFO = """\
version="28.5.1"
default="runc"
cgroup_driver="systemd"
cgroup_version="2"
storage="overlay2"
live_restore=true
runtime="io.containerd.runc.v2"
runtime="nvidia"
runtime="runc"
"""


def lscpu(machine: Machine, cpus: int) -> str:
    threads = cpus // (machine.sockets * machine.cores)
    return (
        f"Architecture:            {machine.architecture}\nCPU(s):                  {cpus}\n"
        f"  Model name:            Simulated\n    Thread(s) per core:  {threads}\n"
        f"    Core(s) per socket:  {machine.cores}\n    Socket(s):           {machine.sockets}\n"
    )


def cdi(machine: Machine) -> str:
    names = "".join(f"name\t{number}\n" for number in range(len(machine.gpus)))
    return f"file\t/var/run/cdi/nvidia.yaml\t12345\ncdiVersion\t0.7.0\ndriver\t{machine.driver}\nkind\tnvidia.com/gpu\nname\tall\n{names}"


# Packages of NVIDIA's repository on Ubuntu

NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"
OF_DRIVER = (
    "libnvidia-cfg1-580",
    "libnvidia-compute-580",
    "nvidia-compute-utils-580",
    "nvidia-dkms-580-open",
    "nvidia-driver-580-open",
    "nvidia-kernel-common-580",
    "nvidia-kernel-source-580-open",
    "nvidia-utils-580",
)
OF_TOOLKIT = (
    "libnvidia-container-tools",
    "libnvidia-container1",
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
)


def package(name: str, version: str, architecture: str, source: str, held: bool) -> str:
    """One line of the probe's dpkg-query."""
    wish = "hold" if held else "install"
    return f"{name}\t{version}\t{architecture}\t{wish} ok installed\t{source}\t{version}\t{NVIDIA}\n"


def toolkit(architecture: str) -> str:
    return "".join(package(name, "1.18.0-1", architecture, name, held=False) for name in OF_TOOLKIT)


def as_from_nvidia(machine: Machine, commands: Document, files: Document) -> None:
    """Put NVIDIA's packages, and what they install, in the place of Debian's."""
    version, kernel = machine.driver, machine.kernel
    dpkg = "arm64" if machine.architecture == "aarch64" else "amd64"
    lib = f"{machine.architecture}-linux-gnu"
    names = [*OF_DRIVER, *(["nvidia-fabricmanager", "libnvidia-nscq"] if machine.nvswitches else [])]
    module = f"/lib/modules/{kernel}/updates/dkms/nvidia.ko"
    native = "AArch64" if dpkg == "arm64" else "x86-64"
    commands |= {
        "dpkg-packages": answer(
            "".join(
                package(name, f"{version}-0ubuntu1", dpkg, "nvidia-graphics-drivers-580", held=True) for name in names
            )
            + toolkit(dpkg),
            argv=("dpkg-query", "-W"),
        ),
        "dpkg-kernels": answer(
            f"linux-image-{kernel}: /boot/vmlinuz-{kernel}\nlinux-headers-{kernel}: /lib/modules/{kernel}/build\n",
            argv=("dpkg-query", "-S"),
        ),
        "dkms-status": answer(
            f"nvidia/{version}, {kernel}, {machine.architecture}: installed\n", argv=("dkms", "status")
        ),
        "find-modules": answer(f"{module}\n", argv=("find", "/lib/modules/")),
        "modinfo": answer(
            f"filename:       {module}\nversion:        {version}\nlicense:        Dual MIT/GPL\n"
            f"vermagic:       {kernel} SMP preempt mod_unload modversions\nsig_id:         PKCS#7\n",
            argv=("modinfo", module),
        ),
        "ldconfig": answer(
            f"\tlibnvidia-ml.so.1 (libc6,{native}) => /lib/{lib}/libnvidia-ml.so.1\n"
            f"\tlibcuda.so.1 (libc6,{native}) => /lib/{lib}/libcuda.so.1\n",
            argv=("ldconfig", "-p"),
        ),
        "readlink-libnvidia-ml": answer(f"/usr/lib/{lib}/libnvidia-ml.so.{version}\n", argv=("readlink", "-e")),
        "library-files": answer(
            f"/lib/{lib}/libcuda.so.1\t/usr/lib/{lib}/libcuda.so.{version}\n"
            f"/lib/{lib}/libnvidia-ml.so.1\t/usr/lib/{lib}/libnvidia-ml.so.{version}\n",
            argv=("(probe)", "look for libraries"),
        ),
    }
    files |= {
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\n',
        "/lib/modules/": f"{kernel}\n",
        f"/lib/modules/{kernel}/": "build\nkernel\nmodules.dep\n",
        f"/lib/modules/{kernel}/build/": "Makefile\nscripts\n",
    }
