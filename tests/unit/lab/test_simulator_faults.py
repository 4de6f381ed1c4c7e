"""Faults of simulated GPUs, as nvidia-smi shows them; everything else stays as it was."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from simulated_node import SimulatedNode, node  # noqa: F401

from gpunode.facts.parsers.kinds import parsed
from gpunode.lab.simulator import modules, smi


def gpus(node: SimulatedNode) -> list[dict[str, Any]]:  # noqa: F811
    listed: list[dict[str, Any]] = parsed("nvidia-smi-xml", node.ask("-q", "-x"))["gpus"]
    return listed


def differing(node: SimulatedNode, fault: str, component: str = "gpu3", **details: Any) -> set[str]:  # noqa: F811
    """Fields of GPU 3 that the fault changes; no other GPU changes."""
    node.lay("hgx-h100-8")
    before = gpus(node)
    node.fault(fault, component, **details)
    after = gpus(node)
    changed = [number for number in range(8) if before[number] != after[number]]
    assert changed == [3]
    return {name for name in before[3] if before[3][name] != after[3][name]}


def test_a_lost_gpu_gives_no_value(node: SimulatedNode) -> None:  # noqa: F811
    changed = differing(node, "gpu-lost")
    assert {"temperature_c", "power_w", "memory_total_mib", "clocks_mhz", "ecc", "errors"} <= changed
    assert not {"uuid", "name", "pci_bus_id", "serial"} & changed
    lost = gpus(node)[3]
    assert lost["errors"] == ["GPU is lost"]
    table = parsed("nvidia-smi-table", node.ask())
    assert [line for line in table["errors"] if "GPU 3" in line]
    assert all("GPU 3 " in line for line in table["errors"])
    listing = parsed("nvidia-smi-list", node.ask("-L"))
    assert len(listing["gpus"]) == 7
    assert "GPU is lost" in listing["messages"][0]
    assert node.run("-i", "3", "-pm", "1")[0] == 15


def test_uncorrectable_errors_count(node: SimulatedNode) -> None:  # noqa: F811
    assert differing(node, "ecc-uncorrected", count=2) == {"ecc", "recovery_action"}
    ecc = gpus(node)[3]["ecc"]
    assert (ecc["volatile_uncorrected"], ecc["aggregate_uncorrected"]) == (2, 2)
    assert node.cells("ecc.errors.uncorrected.volatile.total", 3) == ["2"]
    assert parsed("nvidia-smi-table", node.ask())["gpus"][3]["ecc_uncorrected"] == 2


def test_a_row_waits_to_be_remapped(node: SimulatedNode) -> None:  # noqa: F811
    assert differing(node, "remap-pending") == {"remapped_rows", "recovery_action"}
    assert gpus(node)[3]["remapped_rows"] == {"correctable": 0, "uncorrectable": 1, "pending": True, "failure": False}
    assert node.cells("remapped_rows.pending,remapped_rows.uncorrectable", 3) == ["Yes", "1"]


def test_old_gpus_retire_pages_instead(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("v100-2")
    node.fault("remap-pending", "gpu0")
    assert gpus(node)[0]["retired_pages"] == {"single_bit": 0, "double_bit": 1, "pending": True}


@pytest.mark.parametrize(("component", "down"), [("gpu3/link5", [5]), ("gpu3", list(range(18)))])
def test_links_are_inactive(node: SimulatedNode, component: str, down: list[int]) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.fault("nvlink-down", component)
    listed = parsed("nvidia-smi-nvlink", node.ask("nvlink", "--status"))["gpus"]
    assert [link["link"] for link in listed[3]["links"] if not link["active"]] == (down if len(down) < 18 else [])
    assert listed[3]["all_inactive"] is (len(down) == 18)
    assert all(link["active"] for gpu in listed if gpu["index"] != 3 for link in gpu["links"])


def test_a_narrow_link(node: SimulatedNode) -> None:  # noqa: F811
    assert differing(node, "pcie-narrow", width=4, gen=3) == {"pcie"}
    pcie = gpus(node)[3]["pcie"]
    assert (pcie["width_current"], pcie["width_max"], pcie["gen_current"], pcie["gen_max"]) == (4, 16, 3, 5)
    assert node.cells("pcie.link.width.current,pcie.link.gen.current", 3) == ["4", "3"]


@pytest.mark.parametrize("reason", ["hw_thermal_slowdown", "sw_power_cap", "hw_power_brake_slowdown"])
def test_a_throttled_smi_gpus_the_reason(node: SimulatedNode, reason: str) -> None:  # noqa: F811
    assert "throttle_reasons" in differing(node, "throttle", reason=reason)
    assert reason in gpus(node)[3]["throttle_reasons"]
    assert node.cells(f"clocks_event_reasons.{reason}", 3) == ["Active"]


def test_a_fabric_that_is_not_complete(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.fault("fabric-not-completed")
    assert {gpu["fabric"]["state"] for gpu in gpus(node)} == {"In Progress"}
    assert "OK" not in node.ask("topo", "-p2p", "r").partition("Legend")[0]


def test_a_busy_gpu_names_its_process(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.busy(3)
    listed = gpus(node)
    assert [len(gpu["processes"]) for gpu in listed] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert listed[3]["processes"][0]["memory_used_mib"] == 512
    assert listed[3]["memory_used_mib"] >= 512
    assert parsed("nvidia-smi-table", node.ask())["processes"][0]["gpu"] == 3
    apps = node.ask("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader").strip()
    assert apps.startswith(node.hardware["gpus"][3]["uuid"])


def test_a_process_that_is_gone_is_listed_no_more(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.running(processes=[{"gpu": 3, "pid": 2**22 + 1, "name": "python3", "memory_mib": 512}])
    assert gpus(node)[3]["processes"] == []


def test_a_hung_driver_keeps_nvidia_smi(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    node.lay("hgx-h100-8")
    node.fault("smi-hangs")
    node.run("-L")
    assert slept == [smi.HANG_S]


def test_the_list_of_modules_is_at_no_time_empty(tmp_path: Path) -> None:
    """The fabric manager's start script reads it while other programs write it."""
    file = tmp_path / "proc-modules"
    texts = (b"ib_umad 20480 0 - Live 0x0\n" * 40, b"ib_umad 20480 0 - Live 0x0\n")
    modules.overwrite(file, texts[0])
    inode, ended, seen = file.stat().st_ino, threading.Event(), set[bool]()

    def read() -> None:
        while not ended.is_set():
            seen.add(file.read_bytes().startswith(b"ib_umad "))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2000):
        modules.overwrite(file, texts[number % 2])
    ended.set()
    reader.join(10)
    assert seen == {True}
    assert (file.read_bytes(), file.stat().st_ino) == (texts[1], inode)


def test_a_load_is_shown(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.fault("load", "gpu3", utilization=42, memory=3, power=15, received=21846, sent=6849)
    assert node.cells("utilization.gpu,utilization.memory,power.draw", 3) == ["42", "3", "105.00"]
    assert node.cells("utilization.gpu", 2) == ["0"]
    rows = node.ask("dmon", "-s", "t", "-d", "1", "-c", "1").splitlines()
    # Header and columns as recorded from real drivers: right-aligned, with a blank at the end of each line.
    assert rows[:2] == ["# gpu  rxpci  txpci ", "# Idx   MB/s   MB/s "]
    assert rows[5] == "    3  21846   6849 "
    assert node.run("dmon", "-s", "u")[0] == 2


def test_a_query_is_repeated_until_it_fails(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    node.lay("l40s-4")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            node.running(module=None)

    monkeypatch.setattr(time, "sleep", sleep)
    code, text = node.run("--query-gpu=index", "--format=csv,noheader", "-l", "2")
    assert (code, slept) == (smi.NO_DRIVER, [2.0, 2.0, 2.0])
    assert text.startswith("0\n1\n2\n3\n" * 3 + "NVIDIA-SMI has failed")
