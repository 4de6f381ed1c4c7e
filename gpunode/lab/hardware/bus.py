"""Placement of a machine's functions on its PCI bus: root ports, switches, GPUs, NICs, NVSwitches."""

from collections.abc import Mapping
from typing import Any

from gpunode.catalog import Platform, load

Data = Mapping[str, Any]

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
