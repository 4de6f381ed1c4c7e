"""What nvidia-smi sets on simulated GPUs, what it refuses, and what a reset and a reboot leave of it."""

import os

import pytest
from simulated_node import SimulatedNode, node  # noqa: F401

from gpunode.lab.simulator import smi_settings, state


def test_persistence_is_set_and_said_once(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("l40s-4")
    first, again = node.ask("-pm", "1"), node.ask("-pm", "1")
    assert first.splitlines()[0] == "Enabled persistence mode for GPU 00000000:16:00.0."
    assert first.splitlines()[-1] == again.splitlines()[-1] == "All done."
    assert again.startswith("Persistence mode is already Enabled for GPU 00000000:16:00.0.")
    assert node.cells("persistence_mode") == ["Enabled"]
    node.ask("-i", "2", "-pm", "0")
    assert [node.cells("persistence_mode", gpu)[0] for gpu in range(4)] == ["Enabled", "Enabled", "Disabled", "Enabled"]


def test_the_power_limit_stays_in_its_range(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    assert "was set to 500.00 W from 700.00 W" in node.ask("-pl", "500")
    assert node.cells("power.limit,power.default_limit,power.max_limit") == ["500.00", "700.00", "700.00"]
    code, text = node.run("-pl", "900")
    assert code == 2
    assert "should be between 200.00 W and 700.00 W" in text
    assert node.cells("power.limit") == ["500.00"]
    assert node.run("-pl", "much")[0] == 2


def test_clocks_are_locked_and_freed(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    assert 'GPU clocks set to "(gpuClkMin 1980, gpuClkMax 1980)"' in node.ask("-lgc", "1980,1980")
    assert node.cells("clocks.sm") == ["1980"]
    node.ask("-rgc")
    assert node.cells("clocks.sm") == ["345"]
    node.ask("-lmc", "2619")
    assert node.run("-lgc", "fast")[0] == 2


def test_old_gpus_lock_no_memory_clock(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("t4-1")
    assert node.run("-lmc", "5001")[0] == 3


def test_application_clocks_are_pairs_that_the_gpu_has(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("v100-2", "570.211.01", flavour="proprietary")
    node.ask("-ac", "877,1380")
    assert node.cells("clocks.applications.memory,clocks.applications.graphics") == ["877", "1380"]
    assert node.run("-ac", "877,9999")[0] == 2
    node.ask("-rac")
    assert node.cells("clocks.applications.graphics") == ["1230"]


def test_ecc_changes_with_the_next_load_of_the_driver(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("l40s-4")
    assert "A reboot is required." in node.ask("-e", "0")
    assert node.cells("ecc.mode.current,ecc.mode.pending") == ["Enabled", "Disabled"]
    assert state.kept()["gpus"]["0"]["ecc"] is False
    node.ask("-i", "0", "-r")
    assert node.cells("ecc.mode.current,ecc.mode.pending") == ["Disabled", "Disabled"]
    assert node.cells("ecc.errors.uncorrected.volatile.total") == ["[N/A]"]


@pytest.mark.parametrize(("hardware", "kept"), [("dgx-a100-8", True), ("hgx-h100-8", False)])
def test_mig_mode_outlives_the_driver_on_ampere_alone(node: SimulatedNode, hardware: str, kept: bool) -> None:  # noqa: F811
    node.lay(hardware)
    assert node.ask("-i", "0", "-mig", "1").startswith("Enabled MIG Mode for GPU")
    assert node.cells("mig.mode.current,mig.mode.pending") == ["Enabled", "Enabled"]
    assert state.kept().get("gpus", {}).get("0", {}).get("mig", False) is kept
    assert "Nvlink queries are not supported" in node.ask("nvlink", "--status")
    assert "No MIG devices found" in node.ask()
    assert node.cells("utilization.gpu") == ["[N/A]"]


def test_mig_mode_of_a_busy_gpu_waits_or_is_refused(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("dgx-a100-8")
    node.busy(0)
    assert "pending enable state" in node.ask("-i", "0", "-mig", "1")
    assert node.cells("mig.mode.current,mig.mode.pending") == ["Disabled", "Enabled"]
    assert "Enabled*" in node.ask()
    node.lay("hgx-h100-8")
    node.busy(0)
    assert node.run("-i", "0", "-mig", "1")[0] == smi_settings.IN_USE


def test_a_gpu_without_mig_says_so(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("l40s-4")
    code, text = node.run("-mig", "1")
    assert code == 3
    assert "Not Supported" in text


def test_a_reset_is_refused_while_the_gpu_is_busy(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.ask("-pl", "500")
    node.busy(2)
    code, text = node.run("-i", "2", "-r")
    assert code == smi_settings.IN_USE
    assert "currently in use by another process" in text
    assert node.cells("power.limit", 2) == ["500.00"]
    assert node.ask("-i", "1", "-r").startswith("GPU 00000000:3B:00.0 was successfully reset.")
    assert node.cells("power.limit", 1) == ["700.00"]


def test_a_reset_remaps_the_rows_that_waited(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("dgx-a100-8")
    with state.change() as (kept, _):
        kept["gpus"] = {"0": {"remapped": {"uncorrectable": 1, "pending": True}}}
    assert node.cells("remapped_rows.pending") == ["Yes"]
    node.ask("-i", "0", "-r")
    assert node.cells("remapped_rows.pending,remapped_rows.uncorrectable") == ["No", "1"]


def test_a_reset_ends_what_a_fault_of_memory_left(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.fault("ecc-uncorrected", "gpu0", count=2)
    node.fault("remap-pending", "gpu0")
    node.fault("remap-pending", "gpu1")
    fields = "ecc.errors.uncorrected.volatile.total,ecc.errors.uncorrected.aggregate.total,remapped_rows.pending"
    assert node.cells(fields) == ["2", "2", "Yes"]
    node.ask("-i", "0", "-r")
    assert node.cells(f"{fields},remapped_rows.uncorrectable") == ["0", "2", "No", "1"]
    assert node.cells("remapped_rows.pending", 1) == ["Yes"]


def test_compute_mode(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("t4-1")
    node.ask("-c", "EXCLUSIVE_PROCESS")
    assert node.cells("compute_mode") == ["Exclusive_Process"]
    assert "E. Process" in node.ask()
    assert node.run("-c", "7")[0] == 2


def test_who_is_not_root_sets_nothing(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    node.lay("l40s-4")
    monkeypatch.delenv("GPUNODE_LAB_ROOT")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, text = node.run("-pm", "1")
    assert code == 4
    assert "Insufficient Permissions" in text
    assert node.cells("persistence_mode") == ["Disabled"]
