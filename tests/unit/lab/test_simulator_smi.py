"""The output of the simulated nvidia-smi, read with gpunode's own parsers, matches the hardware description."""

from importlib import import_module
from typing import Any

import pytest
import yaml
from simulated_node import SimulatedNode, node  # noqa: F401

from gpunode.catalog import load
from gpunode.facts.gpu import parse_peer_access
from gpunode.facts.models.smi import PeerAccess
from gpunode.facts.parsers.kinds import parsed
from gpunode.lab.hardware import names

DRIVERS = ("570.211.01", "580.95.05", "595.71.05")


def test_each_branch_has_the_cuda_version_of_the_catalog(node: SimulatedNode) -> None:  # noqa: F811
    known = {int(name): row.native_cuda for name, row in load().branches.items() if row.native_cuda}
    for branch in (470, 535, 580):
        node.lay("t4-1", f"{branch}.10.01")
        assert parsed("nvidia-smi-xml", node.ask("-q", "-x"))["cuda_version"] == known[branch]
    between = f"{max(known) + 1}.10"
    node.lay("t4-1", between)
    assert parsed("nvidia-smi-q", node.ask("-q"))["cuda_version"] == known[max(known)]


def test_a_model_to_simulate_is_one_entry(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    entry = """
        platform: l4-1
        subsystem: 10de:0001
        vbios: 00.00.00.00.01
        inforom: {image: 0000.0000.00.01}
        gpus: [0x3b]
        root_port: 8086:2030
        vendor: Vendor
        product: Product
    """
    monkeypatch.setattr(
        import_module("gpunode.lab.hardware.describe"), "_data", lambda: {"one-l4": yaml.safe_load(entry)}
    )
    node.lay("one-l4")
    (gpu,) = parsed("nvidia-smi-xml", node.ask("-q", "-x"))["gpus"]
    row = load().gpu("l4")
    assert (gpu["name"], gpu["pci_device_id"]) == (row.product_names[0], row.pci[0])
    assert (gpu["memory_total_mib"], gpu["power_limit_w"]) == (row.memory_mib, row.power_w)
    assert (gpu["max_clocks_mhz"]["sm"], gpu["max_clocks_mhz"]["memory"]) == (row.sm_clock_mhz, row.memory_clock_mhz)
    assert row.power_range_w is not None
    assert (gpu["power_min_limit_w"], gpu["power_max_limit_w"]) == row.power_range_w


def test_its_help_states_that_it_is_simulated(node: SimulatedNode) -> None:  # noqa: F811
    assert "Simulated by gpunode lab" in node.ask("--help")


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("hardware", names())
def test_xml_and_text_describe_the_hardware(node: SimulatedNode, hardware: str, driver: str) -> None:  # noqa: F811
    node.lay(hardware, driver)
    document = parsed("nvidia-smi-xml", node.ask("-q", "-x"))
    text = parsed("nvidia-smi-q", node.ask("-q"))
    assert document["driver_version"] == text["driver_version"] == driver
    assert document["attached_gpus"] == len(document["gpus"]) == len(node.hardware["gpus"])
    for output, in_text, real in zip(document["gpus"], text["gpus"], node.hardware["gpus"], strict=True):
        # The text of -q has no list of supported clocks, the XML has.
        assert bool(output.pop("supported_clocks_mhz")["memory"]) is bool(real["max_memory_clock_mhz"])
        assert in_text.pop("supported_clocks_mhz") == {"memory": [], "graphics_min": None}
        assert output == in_text
        assert output["errors"] == []
        expected: dict[str, Any] = {
            "name": real["name"],
            "uuid": real["uuid"],
            "serial": real["serial"],
            "pci_bus_id": real["pci_bus_id"],
            "pci_device_id": real["pci_device_id"],
            "pci_subsystem_id": real["pci_subsystem_id"],
            "vbios_version": real["vbios_version"],
            "memory_total_mib": real["memory_total_mib"],
            "power_limit_w": real["power_limit_w"],
            "power_max_limit_w": real["power_max_w"],
            "mig_mode": False if real["mig_capable"] else None,
            "persistence_mode": False,
        }
        assert {name: output[name] for name in expected} == expected
        assert output["ecc"]["enabled"] is True
        assert output["pcie"]["width_current"] == real["pcie_width"]
        assert output["max_clocks_mhz"]["sm"] == real["max_sm_clock_mhz"]
        in_fabric = real["architecture"] in ("hopper", "blackwell") and "fabric-manager" in node.hardware["services"]
        assert output["fabric"]["state"] == ("Completed" if in_fabric else None)


@pytest.mark.parametrize("hardware", names())
def test_the_listings_describe_the_hardware(node: SimulatedNode, hardware: str) -> None:  # noqa: F811
    node.lay(hardware)
    gpus = node.hardware["gpus"]
    labels = [f"GPU{gpu['index']}" for gpu in gpus]
    assert [gpu["uuid"] for gpu in parsed("nvidia-smi-list", node.ask("-L"))["gpus"]] == [gpu["uuid"] for gpu in gpus]
    table = parsed("nvidia-smi-table", node.ask())
    assert [gpu["pci_bus_id"] for gpu in table["gpus"]] == [gpu["pci_bus_id"] for gpu in gpus]
    assert table["errors"] == []
    assert table["processes"] == []
    topology = parsed("nvidia-smi-topo", node.ask("topo", "-m"))
    assert topology["gpus"] == labels
    assert list(topology["nic_names"].values()) == [nic["name"] for nic in node.hardware["nics"]]
    assert topology["links"] == node.hardware["topology"]
    assert topology["numa_affinity"] == {f"GPU{gpu['index']}": str(gpu["numa_node"]) for gpu in gpus}
    access = parse_peer_access(node.ask("topo", "-p2p", "r"))
    assert isinstance(access, PeerAccess)
    assert list(access.gpus) == labels
    for listing in ("--status", "-e"):
        links = parsed("nvidia-smi-nvlink", node.ask("nvlink", listing))["gpus"]
        assert [len(gpu["links"]) for gpu in links] == [gpu["nvlinks"] for gpu in gpus]


def test_a_query_has_units_and_header_as_asked(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    whole = node.ask("--query-gpu=index,memory.total,clocks.sm", "--format=csv").splitlines()
    assert whole[:2] == ["index, memory.total [MiB], clocks.current.sm [MHz]", "0, 81559 MiB, 345 MHz"]
    assert node.ask("--query-gpu=memory.total", "--format=csv,noheader,nounits").splitlines() == ["81559"] * 8
    assert parsed("nvidia-smi-query", "\n".join(whole))["rows"][7]["memory.total [MiB]"] == 81559
    code, text = node.run("--query-gpu=memory.totally", "--format=csv")
    assert (code, text) == (2, 'Field "memory.totally" is not a valid field to query.\n\n')
    assert node.run("--query-gpu=name")[0] == 2


def test_gpus_are_chosen_by_index_uuid_and_bus_id(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    gpu = node.hardware["gpus"][5]
    for word in ("5", gpu["uuid"], gpu["pci_bus_id"], gpu["pci_bus_id"].upper().rjust(16, "0")):
        assert node.ask("-i", word, "--query-gpu=uuid", "--format=csv,noheader").strip() == gpu["uuid"]
    assert node.run("-i", "8")[0] == 6


def test_sections_print_their_blocks_alone(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("l40s-4")
    text = node.ask("-q", "-d", "ECC,TEMPERATURE")
    assert "ECC Mode" in text
    assert "GPU Current Temp" in text
    assert "Product Name" not in text
    assert node.run("-q", "-d", "WEATHER")[0] == 2


class TestRefusals:
    def test_library_and_module_of_two_releases(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        node.library("580.178.04")
        code, text = node.run("-q", "-x")
        assert code == 18
        assert text == "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.178\n"
        error = parsed("nvidia-smi-xml", text)["error"]
        assert error["kind"] == "driver-library-mismatch"

    def test_no_module(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        node.running(module=None)
        code, text = node.run()
        assert code == 9
        assert parsed("nvidia-smi-table", text)["error"]["kind"] == "driver-not-loaded"

    def test_no_library(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        for file in (node.root / "usr/lib").rglob("libnvidia-ml*"):
            file.unlink()
        assert node.run()[0] == 12

    def test_no_gpu_that_the_driver_took(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        node.running(gpus={"9": {}})
        code, text = node.run("-L")
        assert (code, text) == (6, "No devices were found\n")

    def test_an_unknown_word(self, node: SimulatedNode) -> None:  # noqa: F811
        node.lay("l40s-4")
        for words in (["--frobnicate"], ["-pl"], ["topo", "-x"], ["nvlink"]):
            assert node.run(*words)[0] == 2


def test_a_container_sees_the_gpus_of_its_device_files(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    (node.root / "etc/gpunode/lab-node").unlink()
    (node.root / "dev").mkdir()
    for name in ("nvidia2", "nvidia6", "nvidiactl"):
        (node.root / "dev" / name).touch()
    uuids = [node.hardware["gpus"][number]["uuid"] for number in (2, 6)]
    assert [gpu["uuid"] for gpu in parsed("nvidia-smi-list", node.ask("-L"))["gpus"]] == uuids
    assert node.cells("index,gpu_bus_id", 1)[0] == "1"
    topology = parsed("nvidia-smi-topo", node.ask("topo", "-m"))
    assert topology["links"]["GPU0"]["GPU1"] == "NV18"


def test_a_container_that_lost_its_device_files(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    (node.root / "etc/gpunode/lab-node").unlink()
    code, text = node.run("-L")
    assert code == 255
    assert parsed("nvidia-smi-list", text)["error"]["kind"] == "nvml-unknown"
