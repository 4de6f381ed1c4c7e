"""What nvidia-smi sets on simulated GPUs, what it refuses, and what a reset and a reboot leave of it."""

import os

import pytest
from simulated_node import SimulatedNode, node  # noqa: F401

from gpunode.lab.simulator import smi_settings, state


def test_persistence_is_set_and_reported_once(node: SimulatedNode) -> None:  # noqa: F811
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
    node.ask("-pm", "1")
    assert "was set to 500.00 W from 700.00 W" in node.ask("-pl", "500")
    assert node.cells("power.limit,power.default_limit,power.max_limit") == ["500.00", "700.00", "700.00"]
    code, text = node.run("-pl", "900")
    assert code == 2
    assert "should be between 200.00 W and 700.00 W" in text
    assert node.cells("power.limit") == ["500.00"]
    assert node.run("-pl", "much")[0] == 2


def test_clocks_are_locked_and_freed(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.ask("-pm", "1")
    assert 'GPU clocks set to "(gpuClkMin 1980, gpuClkMax 1980)"' in node.ask("-lgc", "1980,1980")
    assert node.cells("clocks.sm") == ["1980"]
    node.ask("-rgc")
    assert node.cells("clocks.sm") == ["345"]
    node.ask("-lmc", "2619")
    assert node.run("-lgc", "fast")[0] == 2


def test_old_gpus_lock_no_memory_clock(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("t4-1")
    node.ask("-pm", "1")
    # Recorded: nvidia-smi prints this and exits with 0.
    assert node.ask("-lmc", "5001").splitlines() == [
        "Setting locked Memory clocks is not supported for GPU 00000000:3B:00.0.",
        "Treating as warning and moving on.",
        "All done.",
    ]


def test_what_is_set_is_forgotten_with_the_last_user_of_a_gpu(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    assert "persistence mode is disabled" in node.ask("-i", "0", "-pl", "500")
    assert node.cells("power.limit") == ["700.00"]
    node.busy(1)
    node.ask("-i", "1", "-pl", "500")
    assert node.cells("power.limit", 1) == ["500.00"]


def test_accounting(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("t4-1")
    assert node.ask("-am", "1").startswith("Enabled Accounting Mode for GPU 00000000:")
    assert node.cells("accounting.mode") == ["Enabled"]


def test_mig_instances_find_room_largest_first_as_recorded(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("dgx-a100-8")
    assert node.run("mig", "-lgi") == (6, "No MIG-enabled devices found.\n")
    node.ask("-i", "0", "-mig", "1")
    assert node.run("mig", "-lgi", "-i", "0") == (6, "No GPU instances found: Not Found\n")
    code, text = node.run("mig", "-cgi", "19,19,14,9", "-C", "-i", "0")
    assert code != 0
    assert "Unable to create a GPU instance on GPU  0 using profile 9: Insufficient Resources" in text
    assert node.run("mig", "-dgi", "-i", "0")[0] == smi_settings.IN_USE
    node.ask("mig", "-dci", "-i", "0")
    node.ask("mig", "-dgi", "-i", "0")
    assert node.ask("mig", "-cgi", "9,19,14,1g.10gb", "-C", "-i", "0").count("Successfully created") == 8
    listed = node.ask("mig", "-lgi", "-i", "0")
    assert [line.split()[3] for line in listed.splitlines() if " MIG " in line] == [
        "3g.40gb",
        "2g.20gb",
        "1g.10gb",
        "1g.10gb",
    ]
    assert node.ask("-L").count("  MIG 1g.10gb     Device ") == 2
    assert node.ask("-q", "-x", "-i", "0").count("<mig_device>") == 4
    code, text = node.run("-i", "0", "-mig", "0")
    assert code == smi_settings.IN_USE


@pytest.mark.parametrize(
    ("hardware", "line"),
    [
        ("dgx-a100-8", "|   0  MIG 3g.40gb         9     2/2        39.25       No     42     2     0   |"),
        ("hgx-h100-8", "|   0  MIG 1g.10gb+me     20     1/1         9.75       No     16     1     0   |"),
    ],
)
def test_profiles_are_those_of_the_model(node: SimulatedNode, hardware: str, line: str) -> None:  # noqa: F811
    node.lay(hardware)
    node.ask("-i", "0", "-mig", "1")
    listed = node.ask("mig", "-lgip", "-i", "0")
    assert " ".join(line.split()) in [" ".join(each.split()) for each in listed.splitlines()]
    assert "1/1" not in [word for each in listed.splitlines() if "MIG 2g" in each for word in each.split()]
    code, text = node.run("mig", "-cgi", "7g.40gb", "-C", "-i", "0")
    assert code == 2
    assert "Unable to create a GPU instance on GPU  0 using profile 7g.40gb: Invalid Argument" in text


def test_application_clocks_are_pairs_that_the_gpu_has(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("v100-2", "570.211.01", flavour="proprietary")
    node.ask("-pm", "1")
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


def test_a_gpu_without_mig_reports_it(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("l40s-4")
    code, text = node.run("-mig", "1")
    assert code == 3
    assert "Not Supported" in text


def test_a_reset_is_refused_while_the_gpu_is_busy(node: SimulatedNode) -> None:  # noqa: F811
    node.lay("hgx-h100-8")
    node.ask("-pm", "1")
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
