"""The lab's hardware on its PCI bus beside a recording of lspci on a machine of that kind."""

from typing import Any

import pytest
from captured import FOLDER

from gpunode.facts.parsers.kinds import parsed
from gpunode.lab.hardware import describe


def recorded(name: str) -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = parsed("lspci", (FOLDER / "lspci" / name).read_text(encoding="utf-8"))["devices"]
    return devices


@pytest.mark.captures("lspci/gpud-lspci-vvv-8gpu.txt")
def test_hgx_h100_has_the_recorded_functions_at_the_recorded_places() -> None:
    hardware = describe("hgx-h100-8", "node")
    # This recording names NVIDIA's functions by number: "NVIDIA Corporation Device 2330".
    real = {f"0000:{device['slot']}": device for device in recorded("gpud-lspci-vvv-8gpu.txt")}
    for kind, number in (("gpus", "2330"), ("nvswitches", "22a3")):
        places = [
            slot for slot, device in real.items() if f"NVIDIA Corporation Device {number}" in device["description"]
        ]
        assert [function["pci_bus_id"] for function in hardware[kind]] == places
    for function in (*hardware["gpus"], *hardware["nvswitches"]):
        link = real[function["pci_bus_id"]]["link"]
        speeds = {8.0: 3, 16.0: 4, 32.0: 5}
        assert (function["pcie_gen"], function["pcie_width"]) == (speeds[link["speed_max_gt_per_s"]], link["width_max"])


@pytest.mark.captures("lspci/gpud-lspci-vvv-8gpu.txt")
def test_hgx_h100_has_its_gpus_below_the_recorded_bridges() -> None:
    hardware = describe("hgx-h100-8", "node")
    real = {f"0000:{device['slot']}": device for device in recorded("gpud-lspci-vvv-8gpu.txt")}
    root, upstream, _ = hardware["gpus"][0]["bridges_above"]
    assert "Intel Corporation Device 352a" in real[root]["description"]
    assert "PEX890xx PCIe Gen 5 Switch" in real[upstream]["description"]
    ids = {bridge["pci_bus_id"]: bridge["pci_device_id"] for bridge in hardware["bridges"]}
    assert (ids[root], ids[upstream]) == ("8086:352a", "1000:c030")


@pytest.mark.captures("lspci/gpud-lspci.nn.a100.txt")
def test_a_recording_of_eight_a100_has_the_ids_of_ours() -> None:
    hardware = describe("dgx-a100-8", "node")
    real = recorded("gpud-lspci.nn.a100.txt")
    for kind in ("gpus", "nvswitches"):
        (device,) = {function["pci_device_id"] for function in hardware[kind]}
        same = [each for each in real if f"{each['vendor_id']}:{each['device_id']}" == device]
        assert len(same) == len(hardware[kind])
        assert {each["class_id"] for each in same} == {function["pci_class"][:4] for function in hardware[kind]}
