"""Description of a node's hardware with its place on the PCI bus, and the files of it that a node gets."""

import hashlib
import json
import math
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from gpunode.catalog import Gpu, Platform, load
from gpunode.catalog.hardware import FIRST_OPEN_BRANCH, NVLINK_LINE_GB_PER_S
from gpunode.errors import UsageError
from gpunode.lab.recipe import Entry
from gpunode.lab.simulator import boot, kernel
from gpunode.lab.simulator.entry_points import TOOLS, script
from gpunode.text import listed
from gpunode.yaml_file import LOADER

Data = Mapping[str, Any]
LAB_ARCHITECTURE = "x86_64"
REQUIRED = ("subsystem", "root_port", "vendor", "product", "memory_mib", "power_w", "pcie")
"""Fields that an entry of ``hardware.yml`` has, unless the catalog's GPU has them."""
BASES = {"nics": "switch", "nvswitches": "switch", "switch_managers": "switch", "storage_nics": "nics"}
"""Fields of an entry, with the field that each of them needs."""


@cache
def _data() -> dict[str, Data]:
    text = files("gpunode.lab.hardware").joinpath("hardware.yml").read_text(encoding="utf-8")
    content: dict[str, Data] = yaml.load(text, LOADER)  # noqa: S506 (a safe one)
    return content


def names() -> tuple[str, ...]:
    """Return the hardware that a lab can show: that of x86_64 machines."""
    return tuple(name for name, data in _data().items() if _platform(name, data).hosts[0] == LAB_ARCHITECTURE)


def _platform(name: str, data: Data) -> Platform:
    """Return the catalog's row, or for an entry with ``gpu`` a machine with nothing but these GPUs."""
    for field in ("gpus", "gpu" if "gpu" in data else "platform"):
        if not data.get(field):
            raise UsageError(f"hardware.yml: {name}: {field}: missing")
    if "platform" in data:
        return load().platform(str(data["platform"]))
    gpu = load().gpu(str(data["gpu"]))
    return Platform(id=name, name=name, kind="pcie", gpus={gpu.id: len(data["gpus"])}, source=gpu.source, date=gpu.date)


def describe(name: str, node: str) -> dict[str, Any]:
    """Return the description of that hardware for a node; UUIDs and serial numbers are derived from the node's name.

    Raises UsageError with the known names for an unknown name, and for an entry without a required field.
    """
    if name not in _data():
        raise UsageError(f"--hardware {name}: unknown hardware; known: {', '.join(names())}")
    data = {field: value for field, value in _data()[name].items() if value is not None}
    platform = _platform(name, data)
    (model, count), *others = platform.gpus.items()
    gpu = load().gpu(model)
    required = (*REQUIRED, *dict.fromkeys(base for field, base in BASES.items() if data.get(field)))
    if missing := [field for field in required if field not in data and getattr(gpu, field, None) is None]:
        raise UsageError(f"hardware.yml: {name}: {listed(missing)}: missing, in the catalog's {model} too")
    buses = data["gpus"]
    if others or count != len(buses):
        raise ValueError(f"{name}: {len(buses)} bus addresses for the GPUs {platform.gpus}")
    tree = place(data, platform)
    gpus = [_gpu(gpu, data, index, tree["gpus"][index], f"{node}/{index}") for index in range(count)]
    return {
        "name": name,
        "simulated": True,
        "platform": data.get("platform"),
        "system": {"vendor": data["vendor"], "product": data["product"]},
        "cpu": {"architecture": platform.hosts[0], "sockets": tree["numa_nodes"]},
        "numa_nodes": tree["numa_nodes"],
        "cuda_of_branch": {name: row.native_cuda for name, row in load().branches.items() if row.native_cuda},
        "gpus": gpus,
        "nvswitches": tree["nvswitches"],
        "nics": [nic | _ports(f"{node}/{nic['name']}") for nic in tree["nics"]],
        "bridges": tree["bridges"],
        "services": list(platform.services),
        "kernel_modules": list(platform.kernel_modules),
        "topology": _topology(gpus, tree["nics"], platform, data.get("linked")),
    }


def _gpu(gpu: Gpu, data: Data, index: int, where: Data, key: str) -> dict[str, Any]:
    power = data.get("power_w", gpu.power_w)
    low, high = gpu.power_range_w or (_least_power(power), power)
    digest = hashlib.sha256(f"gpunode-lab/{key}".encode()).hexdigest()
    nvlink = gpu.nvlink if gpu.nvlink and (gpu.nvlink.form == "sxm" or "linked" in data) else None
    memory = data.get("memory_mib", gpu.memory_mib)
    inforom = data.get("inforom", {})
    return {
        "index": index,
        "model": gpu.id,
        "name": (*gpu.product_names, gpu.name)[0],
        **where,
        "pci_device_id": gpu.pci[0],
        "pci_subsystem_id": data["subsystem"],
        "pci_class": "030200",
        "uuid": f"GPU-{uuid.UUID(digest[:32])}",
        "serial": str(1_320_000_000_000 + int(digest[32:40], 16)),
        "architecture": gpu.architecture,
        "compute_capability": str(gpu.compute_capability),
        "memory_total_mib": memory,
        "bar1_total_mib": data.get("bar1_mib", 1024 * 2 ** math.ceil(math.log2(memory / 1024))),
        "power_limit_w": power,
        "power_min_w": low,
        "power_max_w": high,
        "max_sm_clock_mhz": gpu.sm_clock_mhz,
        "max_memory_clock_mhz": gpu.memory_clock_mhz,
        "application_clocks_mhz": (
            {"graphics": gpu.application_clocks_mhz.graphics, "memory": gpu.application_clocks_mhz.memory}
            if gpu.application_clocks_mhz
            else None
        ),
        "vbios_version": data.get("vbios"),
        "board_part_number": data.get("board_part_number"),
        "gpu_part_number": data.get("gpu_part_number"),
        "inforom_version": inforom.get("image"),
        "inforom": inforom,
        "minor_number": index,
        "module_id": (data["module_ids"][index] if "module_ids" in data else 1),
        "first_branch": _first_branch(gpu),
        "last_branch": gpu.last_branch,
        "modules": gpu.modules,
        "nvlinks": nvlink.links if nvlink else 0,
        "nvlink_speed_gb_per_s": NVLINK_LINE_GB_PER_S[nvlink.gen] if nvlink else None,
        "mig_capable": gpu.mig_instances > 0,
        "ecc": True,
        "mig_profiles": data.get("mig"),
        **data.get("readings", {}),
    }


def _first_branch(gpu: Gpu) -> int | None:
    """Return the first branch that supports a GPU; None if all of the catalog may: no list is older than the GPU."""
    first = min((branch for branch, release in gpu.first_listed.items() if release), default=None)
    return gpu.first_branch or (None if first == FIRST_OPEN_BRANCH else first)


def _least_power(power: float) -> float:
    """Return the lowest power limit in W of a board without a range in the catalog: a round share of the limit."""
    return 50 * math.floor(power / 150)


def _ports(key: str) -> dict[str, Any]:
    digest = hashlib.sha256(f"gpunode-lab/{key}".encode()).hexdigest()
    guid = f"b8cef603{digest[:8]}"
    return {"guid": ":".join(guid[at : at + 4] for at in range(0, 16, 4)), "lid": 1 + int(digest[8:11], 16)}


def _topology(gpus: list[dict[str, Any]], nics: list[Data], platform: Platform, linked: str | None) -> dict[str, Any]:
    """Return the links between GPUs and NICs in the notation of ``nvidia-smi topo -m``."""
    devices = {f"GPU{gpu['index']}": gpu for gpu in gpus} | {f"NIC{at}": nic for at, nic in enumerate(nics)}
    links: dict[str, dict[str, str]] = {}
    for name, device in devices.items():
        links[name] = {}
        for other, peer in devices.items():
            if name == other:
                continue
            both = name.startswith("GPU") and other.startswith("GPU")
            bridged = both and linked == "pairs" and device["index"] // 2 == peer["index"] // 2
            switched = both and platform.nvswitches and device["nvlinks"]
            if both and linked == "all":
                links[name][other] = f"NV{device['nvlinks'] // (len(gpus) - 1)}"
            else:
                links[name][other] = f"NV{device['nvlinks']}" if bridged or switched else _pcie_word(device, peer)
    return links


def _pcie_word(device: Data, peer: Data) -> str:
    """Return the kind of PCIe connection: one switch, one host bridge, one socket, or across the sockets."""
    if device["bridges_above"][0] == peer["bridges_above"][0]:
        return "PIX" if len(device["bridges_above"]) > 1 else "PHB"
    if device["numa_node"] == peer["numa_node"]:
        return "NODE"
    return "SYS"


_NIC_CLASS = {"InfiniBand": "020700", "Ethernet": "020000"}
_SOCKETS = 2


def place(data: Data, platform: Platform) -> dict[str, Any]:
    """Return ``{numa_nodes, gpus, nvswitches, nics, bridges}``.

    Each function has ``pci_bus_id``, ``numa_node``, ``pcie_gen``, ``pcie_width``, and ``bridges_above``: slots from
    the root port down. A bridge also has ``pci_device_id``, its ``kind`` and the bus below it.
    """
    (model, _), *_ = platform.gpus.items()
    pcie = load().gpu(model).pcie
    link = dict(data["pcie"]) if pcie is None else {"pcie_gen": pcie.gen, "pcie_width": pcie.width}
    buses = data["gpus"]
    sockets = _SOCKETS if len(buses) > 1 else 1
    placed: dict[str, Any] = {"numa_nodes": sockets, "gpus": [], "nvswitches": [], "nics": [], "bridges": []}
    for index, bus in enumerate(buses):
        numa = index * sockets // len(buses)
        above = _above_gpu(data, bus, numa, link, placed["bridges"])
        placed["gpus"].append(_function(bus, numa, above, link))
        if "nics" in data:
            placed["nics"].append(_nic(data, platform, bus + 1, index, numa, above, placed["bridges"]))
    if data.get("nvswitches"):
        placed["nvswitches"] = _switches(data["nvswitches"], data, platform, placed["bridges"], sockets - 1)
    for bus in data.get("storage_nics", ()):
        placed["nics"].append(_storage_nic(data, platform, bus, len(placed["nics"]), placed["bridges"]))
    if "switch_managers" in data:
        placed["nics"] += _managers(data, len(placed["nics"]), placed["bridges"])
    return placed


def _slot(bus: int, device: int = 0) -> str:
    return f"0000:{bus:02x}:{device:02x}.0"


def _function(bus: int, numa: int, above: list[str], link: Data) -> dict[str, Any]:
    return {"pci_bus_id": _slot(bus), "numa_node": numa, "bridges_above": above, **link}


def _bridge(  # noqa: PLR0913, PLR0917 (a bridge is just that much)
    bridges: list[dict[str, Any]],
    slot: str,
    kind: str,
    device: str,
    below: int,
    numa: int,
    above: list[str],
    link: Data,
) -> list[str]:
    """Add a bridge; return the slots from the root port down to what is behind it."""
    bridges.append(
        {
            "pci_bus_id": slot,
            "kind": kind,
            "pci_device_id": device,
            "pci_class": "060400",
            "bus_below": below,
            "numa_node": numa,
            "bridges_above": above,
            **link,
        }
    )
    return [*above, slot]


def _above_gpu(data: Data, bus: int, numa: int, link: Data, bridges: list[dict[str, Any]]) -> list[str]:
    if "switch" not in data:
        return _bridge(bridges, _slot(bus - 1, 1), "root-port", data["root_port"], bus, numa, [], link)
    root = _bridge(bridges, _slot(bus - 4, 1), "root-port", data["root_port"], bus - 3, numa, [], link)
    top = _bridge(bridges, _slot(bus - 3), "upstream", data["switch"], bus - 2, numa, root, link)
    return _bridge(bridges, _slot(bus - 2), "downstream", data["switch"], bus, numa, top, link)


def _nic(  # noqa: PLR0913, PLR0917
    data: Data, platform: Platform, bus: int, index: int, numa: int, gpu_above: list[str], bridges: list[dict[str, Any]]
) -> dict[str, Any]:
    nic = data["nics"]
    link = {"pcie_gen": nic["gen"], "pcie_width": nic["width"]}
    top = gpu_above[:-1]
    above = _bridge(bridges, _slot(bus - 3, 1), "downstream", data["switch"], bus, numa, top, link)
    rate = nic.get("rate_gbit_per_s") or platform.nic_rate_gbit_per_s
    return _function(bus, numa, above, link) | _adapter(nic, f"mlx5_{index}", "fabric", rate)


def _storage_nic(
    data: Data, platform: Platform, bus: int, number: int, bridges: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return an adapter like those near the GPUs, on a root port of its own."""
    nic = data["nics"]
    link = {"pcie_gen": nic["gen"], "pcie_width": nic["width"]}
    numa = bus * _SOCKETS // 256
    above = _bridge(bridges, _slot(bus - 1, 1), "root-port", data["root_port"], bus, numa, [], link)
    rate = nic.get("rate_gbit_per_s") or platform.nic_rate_gbit_per_s
    return _function(bus, numa, above, link) | _adapter(nic, f"mlx5_{number}", "storage", rate)


def _adapter(nic: Data, name: str, role: str, rate: int | None) -> dict[str, Any]:
    layer = nic.get("link_layer", "InfiniBand")
    return {
        "name": name,
        "role": role,
        "pci_device_id": nic["pci"],
        "pci_subsystem_id": nic["subsystem"],
        "pci_class": _NIC_CLASS[layer],
        "hca_type": nic["hca"],
        "firmware": nic["firmware"],
        "link_layer": layer,
        "rate_gbit_per_s": rate,
    }


def _switches(
    nvswitches: Data, data: Data, platform: Platform, bridges: list[dict[str, Any]], numa: int
) -> list[dict[str, Any]]:
    """Return all NVSwitches, behind one PCIe switch of the last socket."""
    buses = nvswitches["buses"]
    first = buses[0]
    link = {"pcie_gen": nvswitches["gen"], "pcie_width": nvswitches["width"]}
    root = _bridge(bridges, _slot(first - 3, 1), "root-port", data["root_port"], first - 2, numa, [], link)
    top = _bridge(bridges, _slot(first - 2), "upstream", data["switch"], first - 1, numa, root, link)
    switches = []
    for number, bus in enumerate(buses):
        above = _bridge(bridges, _slot(first - 1, number), "downstream", data["switch"], bus, numa, top, link)
        switches.append(
            _function(bus, numa, above, link)
            | {
                "pci_device_id": platform.nvswitch,
                "pci_subsystem_id": nvswitches["subsystem"],
                "pci_class": "068000",
            }
        )
    return switches


def _managers(data: Data, count: int, bridges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions through which the NVSwitches of HGX B200 are managed."""
    managers = data["switch_managers"]
    first = managers["buses"][0]
    link = {"pcie_gen": managers["gen"], "pcie_width": managers["width"]}
    root = _bridge(bridges, _slot(first - 3, 1), "root-port", data["root_port"], first - 2, 0, [], link)
    top = _bridge(bridges, _slot(first - 2), "upstream", data["switch"], first - 1, 0, root, link)
    functions = []
    for number, bus in enumerate(managers["buses"]):
        above = _bridge(bridges, _slot(first - 1, number), "downstream", data["switch"], bus, 0, top, link)
        functions.append(_function(bus, 0, above, link) | _adapter(managers, f"mlx5_{count + number}", "nvswitch", 400))
    return functions


_LIB = "usr/lib/gpunode-lab"

BOOT = f"/{_LIB}/bin/boot"
"""The command that a node runs before systemd; if it fails, the node still boots and reports the reason."""

BOOT_REPORT = boot.REPORT
"""Empty on a node where BOOT succeeded, else the reason why it failed."""

DEVICE_RULES = tuple(f"c {number}:* rwm" for number in dict.fromkeys(kernel.DEVICE_NUMBERS.values()))
"""Device files that a node may pass on to containers of its own."""

_DMESG = """\
#!/bin/sh
# The simulated kernel's log; the real dmesg formats it, but for --raw --follow: a file is not followed.
[ "$*" != "-r -w" ] || exec tail -n +1 -F /run/gpunode-lab/kmsg
exec /usr/lib/gpunode-lab/real/dmesg -F /run/gpunode-lab/kmsg "$@"
"""


def entries(hardware: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the files of a node with that description."""
    yield Entry("etc/gpunode/lab-hardware.json", json.dumps(hardware, indent=1) + "\n", 0o644)
    yield from simulator()
    for folder in ("var/lib/gpunode-lab", f"{_LIB}/real"):
        yield Entry(folder, None, 0o755)


def simulator() -> Iterator[Entry]:
    """Yield the simulator's package and the scripts that start its tools."""
    package = files("gpunode.lab.simulator")
    for source in sorted(package.iterdir(), key=lambda source: source.name):
        if source.name.endswith((".py", ".json", ".yml")):
            yield Entry(f"{_LIB}/simulator/{source.name}", source.read_text(encoding="utf-8"), 0o644)
    for tool in TOOLS:
        yield Entry(f"{_LIB}/bin/{tool}", script(tool), 0o755)
    yield Entry(f"{_LIB}/bin/dmesg", _DMESG, 0o755)
