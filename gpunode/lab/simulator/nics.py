"""Simulated network adapters: /sys/class/infiniband and the classes of their devices, for ibstat and the probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import pci, state

CLASS = "/run/gpunode-lab/sys/class/infiniband"
VERBS = "/run/gpunode-lab/sys/class/infiniband_verbs"
MAD = "/run/gpunode-lab/sys/class/infiniband_mad"
_LANES = {400: "400 Gb/sec (4X NDR)", 200: "200 Gb/sec (4X HDR)", 100: "100 Gb/sec (4X EDR)"}
_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_xmit_discards",
    "port_xmit_wait",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
# A port's link-local address and its IPv4 address, each for both versions of RoCE.
_GID_TYPES = ("IB/RoCE v1", "RoCE v2")
_HW_COUNTERS = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "roce_adp_retrans")


def write(hardware: dict[str, Any]) -> None:
    """Write every adapter of the description; without adapters, no folder."""
    for number, nic in enumerate(hardware["nics"]):
        _write_devices(number, nic["name"])
        folder = pci.folder(nic) / "infiniband" / nic["name"]
        _write_adapter(folder, nic)
        if nic["link_layer"] == "Ethernet":
            _write_gids(folder / "ports" / "1", number, nic)
        link = state.path(CLASS) / nic["name"]
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to("../../devices/{}/infiniband/{}".format(pci.sysfs_folder(nic), nic["name"]))
        if nic["role"] == "nvswitch":
            # The fabric manager's start script finds the device of the NVSwitches by this.
            (pci.folder(nic) / "vpd").write_bytes(_vital_product_data("SW_MNG"))


def _write_devices(number: int, name: str) -> None:
    """Write the files that ib_uverbs and ib_umad create for an adapter with one port."""
    state.write_text(state.path(VERBS) / "abi_version", "6\n")
    state.write_text(state.path(VERBS) / f"uverbs{number}" / "ibdev", name + "\n")
    state.write_text(state.path(MAD) / "abi_version", "5\n")
    state.write_text(state.path(MAD) / f"umad{number}" / "ibdev", name + "\n")
    state.write_text(state.path(MAD) / f"umad{number}" / "port", "1\n")


def _write_adapter(folder: Path, nic: dict[str, Any]) -> None:
    values = {
        "fw_ver": nic["firmware"],
        "hca_type": nic["hca_type"],
        "board_id": "MT_0000000838",
        "hw_rev": "0",
        "node_type": "1: CA",
        "node_guid": nic["guid"],
        "sys_image_guid": nic["guid"],
        "node_desc": nic["name"],
    }
    for name, value in values.items():
        state.write_text(folder / name, value + "\n")
    if not (folder / "device").is_symlink():
        (folder / "device").symlink_to("../..")
    port = folder / "ports" / "1"
    values = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": _LANES.get(nic["rate_gbit_per_s"], f"{nic['rate_gbit_per_s']} Gb/sec (4X)"),
        "link_layer": nic["link_layer"],
        "lid": "0x{:x}".format(nic["lid"]),
        "lid_mask_count": "0",
        "sm_lid": "0x1",
        "sm_sl": "0",
        "cap_mask": "0xa751e848",
    }
    for name, value in values.items():
        state.write_text(port / name, value + "\n")
    for name in _COUNTERS:
        state.write_text(port / "counters" / name, "0\n")
    for name in _HW_COUNTERS:
        state.write_text(port / "hw_counters" / name, "0\n")


def _write_gids(port: Path, number: int, nic: dict[str, Any]) -> None:
    """Write the table of a RoCE port with one IPv4 address. The network interface with it is not simulated."""
    host = int(nic["guid"].replace(":", ""), 16)
    local = "fe80:0000:0000:0000:" + nic["guid"]
    ipv4 = f"0000:0000:0000:0000:0000:ffff:{0x0A64 + number:04x}:{1 + host % 0xFFFE:04x}"
    for index, (address, kind) in enumerate((address, kind) for address in (local, ipv4) for kind in _GID_TYPES):
        state.write_text(port / "gids" / str(index), address + "\n")
        state.write_text(port / "gid_attrs" / "types" / str(index), kind + "\n")


def _vital_product_data(text: str) -> bytes:
    """Return one identifier string and the end tag."""
    data = text.encode("ascii")
    return b"\x82" + len(data).to_bytes(2, "little") + data + b"\x78"
