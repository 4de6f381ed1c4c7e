"""The program of the role gpu_settings against simulated GPUs: applies, keeps, refuses, restores."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from programs import runs
from simulated import write
from simulated_node import SimulatedNode, node  # noqa: F401

from gpunode.onnode import gpu_settings as program


class Settings:
    """A node with rules, and what the program makes of them."""

    def __init__(self, simulated: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = simulated
        self.calls: list[tuple[str, ...]] = []

        def call(*arguments: str, limit_s: float = 0) -> str:
            self.calls.append(arguments)
            code, text = simulated.run(*arguments)
            if code != 0:
                raise program.SettingRefusedError(program._first_line(text))
            return text

        monkeypatch.setattr(program, "call", call)
        monkeypatch.setattr(program, "ROOT", simulated.root)

    def apply(self, *rules: dict[str, Any]) -> dict[str, Any]:
        """The report about these rules."""
        write(self.node.root, "etc/gpunode/gpu-settings.json", {"rules": list(rules)})
        assert program.main(["apply"]) == 0
        gpus = program.read(program.REPORT)["gpus"].values()
        return {f"gpu{gpu['index']}": gpu["settings"] for gpu in gpus}

    def changes(self) -> list[tuple[str, ...]]:
        """Calls that set something since the last time."""
        done, self.calls = self.calls, []
        return [call[2:] for call in done if call[0] == "-i"] + [call for call in done if call[:2] == ("mig", "-cgi")]


@pytest.fixture
def settings(node: SimulatedNode, monkeypatch: pytest.MonkeyPatch) -> Settings:  # noqa: F811
    return Settings(node, monkeypatch)


def results(report: dict[str, Any], gpu: str = "gpu0") -> dict[str, str]:
    return {name: entry["result"] for name, entry in report[gpu].items()}


def test_everything_is_set_reported_and_kept_the_second_time(settings: Settings) -> None:
    settings.node.lay("hgx-h100-8")
    settings.node.ask("-pm", "1")
    rule = {
        "gpus": "all",
        "power_limit": "50%",
        "sm_clock_mhz": [345, 1500],
        "memory_clock_mhz": "max",
        "compute_mode": "prohibited",
        "accounting": True,
    }
    first = settings.apply(rule)
    assert set(results(first, "gpu7").values()) == {"applied"}
    assert first["gpu0"]["power_limit_w"] == {"value": 350.0, "result": "applied", "message": "was 700 W"}
    assert settings.node.cells("power.limit,compute_mode,accounting.mode", 5) == ["350.00", "Prohibited", "Enabled"]
    settings.changes()
    again = settings.apply(rule)
    # Locks are not reported by nvidia-smi: they are set again.
    assert results(again) == {
        "compute_mode": "kept",
        "power_limit_w": "kept",
        "sm_clock_mhz": "applied",
        "memory_clock_mhz": "applied",
        "accounting": "kept",
    }
    assert set(settings.changes()) == {("-lgc", "345,1500"), ("-lmc", "2619,2619")}


def test_what_is_no_longer_requested_is_restored(settings: Settings) -> None:
    settings.node.lay("hgx-h100-8")
    settings.node.ask("-pm", "1")
    settings.node.ask("-i", "1", "-pl", "650")
    settings.apply({"gpus": "all", "power_limit": 500, "sm_clock_mhz": 1500, "mig": True})
    report = settings.apply({"gpus": {"indexes": [0]}, "power_limit": 500})
    assert results(report) == {"power_limit_w": "kept"}
    assert results(report, "gpu1") == {}
    assert settings.node.cells("power.limit,mig.mode.current", 0) == ["500.00", "Disabled"]
    assert settings.node.cells("power.limit", 1) == ["650.00"]
    assert "locked_sm_clock_mhz" not in (settings.node.root / "run/gpunode-lab/state.json").read_text()
    assert program.main(["restore"]) == 0
    assert settings.node.cells("power.limit", 0) == ["700.00"]
    assert program.read(program.MEMORY) == {}


def test_the_value_before_the_first_change_is_remembered(settings: Settings) -> None:
    settings.node.lay("l40s-4")
    settings.node.ask("-pm", "1")
    settings.apply({"gpus": "all", "power_limit": 300})
    settings.apply({"gpus": "all", "power_limit": 250})
    assert {values["power_limit_w"] for values in program.read(program.MEMORY).values()} == {350.0}


def test_of_two_starts_at_once_the_second_knows_the_value_before_the_first(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.node.lay("l40s-4")
    settings.node.ask("-pm", "1")
    write(settings.node.root, "etc/gpunode/gpu-settings.json", {"rules": [{"gpus": "all", "power_limit": 300}]})
    real, first_ended, second_runs = program.read, threading.Event(), threading.Event()

    def read(path: str) -> Any:
        content = real(path)
        if path == program.MEMORY and threading.current_thread() is second:
            second_runs.set()
            first_ended.wait(10)
        elif path == program.MEMORY:
            second.start()
            second_runs.wait(0.5)  # with the lock it does not come here
        return content

    second = threading.Thread(target=program.main, args=(["apply"],))
    monkeypatch.setattr(program, "read", read)
    assert program.main(["apply"]) == 0
    first_ended.set()
    second.join(30)
    assert {values["power_limit_w"] for values in real(program.MEMORY).values()} == {350.0}


def test_other_users_cannot_open_what_is_locked(settings: Settings) -> None:
    folder = program.node_path(program.MEMORY).parent
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    with program.locked():
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_lock_that_is_never_released_is_one_line(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "LOCK_LIMIT_S", 0)
    with program.locked():
        assert program.main(["apply"]) == 1
    assert capfd.readouterr().out.count("\n") == 1
    assert settings.calls == []


def test_without_space_for_the_report_nothing_is_set(settings: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    settings.node.lay("l40s-4")
    settings.node.ask("-pm", "1")
    write(settings.node.root, "etc/gpunode/gpu-settings.json", {"rules": [{"gpus": "all", "power_limit": 300}]})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (program.REPORT_BYTES, before[1]))
    try:
        assert program.main(["apply"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert settings.changes() == []
    assert settings.node.cells("power.limit", 0) == ["350.00"]
    assert [line for line in capfd.readouterr().out.splitlines() if "OSError" in line] != []


def test_on_a_card_that_does_not_support_a_value_nothing_is_set(settings: Settings) -> None:
    settings.node.lay("hgx-h100-8")
    settings.node.ask("-pm", "1")
    report = settings.apply(
        {"gpus": "all", "power_limit": 500},
        {"gpus": {"indexes": [2]}, "sm_clock_mhz": 5000, "power_limit": 600},
    )
    assert results(report, "gpu2") == {"sm_clock_mhz": "refused"}
    assert "210 to 1980 MHz" in report["gpu2"]["sm_clock_mhz"]["message"]
    assert settings.node.cells("power.limit", 2) == ["700.00"]
    assert settings.node.cells("power.limit", 3) == ["500.00"]


def test_one_refusal_does_not_stop_the_others(settings: Settings) -> None:
    settings.node.lay("t4-1")
    settings.node.ask("-pm", "1")
    report = settings.apply({"gpus": "all", "memory_clock_mhz": "max", "mig": True, "power_limit": 60})
    assert results(report) == {"mig": "refused", "power_limit_w": "applied", "memory_clock_mhz": "refused"}
    assert report["gpu0"]["mig"]["message"] == "the card has no MIG mode"
    # nvidia-smi ends with status 0 here.
    assert "locked Memory clocks is not supported" in report["gpu0"]["memory_clock_mhz"]["message"]


def test_a_busy_gpu_is_left_alone_until_it_is_idle(settings: Settings) -> None:
    settings.node.lay("hgx-h100-8")
    settings.node.ask("-pm", "1")
    settings.apply({"gpus": "all", "sm_clock_mhz": 1500})
    settings.node.busy(0)
    settings.changes()
    report = settings.apply({"gpus": "all", "sm_clock_mhz": 1500, "power_limit": 500})
    assert results(report) == {"power_limit_w": "busy", "sm_clock_mhz": "kept"}
    assert results(report, "gpu1") == {"power_limit_w": "applied", "sm_clock_mhz": "applied"}
    assert program.main(["restore"]) == 1
    settings.node.running(processes=[])
    assert program.main(["restore"]) == 0


def test_mig_instances_are_made_largest_first_and_kept(settings: Settings) -> None:
    settings.node.lay("dgx-a100-8")
    rule = {"gpus": {"indexes": [0]}, "mig": ["1g.10gb", "3g.40gb", "1g.10gb", "2g.20gb"]}
    report = settings.apply(rule)
    assert results(report) == {"mig": "applied", "mig_layout": "applied"}
    assert report["gpu0"]["mig_layout"]["value"] == ["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]
    settings.changes()
    assert results(settings.apply(rule)) == {"mig": "kept", "mig_layout": "kept"}
    assert settings.changes() == []
    assert results(settings.apply({**rule, "mig": ["7g.80gb"]})) == {"mig": "kept", "mig_layout": "applied"}
    assert program.main(["restore"]) == 0
    assert settings.node.cells("mig.mode.current") == ["Disabled"]


def test_a_layout_that_fails_leaves_the_one_before(settings: Settings) -> None:
    settings.node.lay("hgx-h100-8")
    only = {"gpus": {"indexes": [0]}}
    settings.apply({**only, "mig": ["3g.40gb", "3g.40gb"]})
    lacking = settings.apply({**only, "mig": ["3g.20gb"]})
    assert lacking["gpu0"]["mig_layout"]["message"].startswith("the model has no profile 3g.20gb; it has 1g.10gb,")
    crowded = settings.apply({**only, "mig": ["4g.40gb", "4g.40gb"]})
    assert "Insufficient Resources" in crowded["gpu0"]["mig_layout"]["message"]
    assert settings.node.ask("mig", "-lgi", "-i", "0").count("MIG 3g.40gb") == 2


def test_ecc_waits_for_a_reset(settings: Settings) -> None:
    settings.node.lay("l40s-4")
    report = settings.apply({"gpus": "all", "ecc": False})
    assert report["gpu0"]["ecc"] == {"value": False, "result": "pending", "message": program.LATER}
    settings.node.ask("-r")
    assert results(settings.apply({"gpus": "all", "ecc": False})) == {"ecc": "kept"}


def test_without_a_driver_or_settings_it_ends_with_1_and_writes_nothing(
    node: SimulatedNode,  # noqa: F811
    settings: Settings,
) -> None:
    node.lay("l40s-4")
    assert program.main(["apply"]) == 1
    write(node.root, "etc/gpunode/gpu-settings.json", {"rules": [{"gpus": "all", "power_limit": 300}]})
    node.library("570.211.01")
    assert program.main(["apply"]) == 1
    assert program.read(program.REPORT) is None
    assert program.main(["reset"]) == 2


def test_a_call_that_hangs_ends_with_its_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nsleep 60 &\necho $! > %s\nwait\n" % (tmp_path / "pid"))
    tool.chmod(0o755)
    monkeypatch.setattr(program, "TOOL", str(tool))
    with pytest.raises(program.SettingRefusedError, match=r"no answer within 0.5 s"):
        program.call("-q", limit_s=0.5)
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        if not runs(child):
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        raise AssertionError("the child still runs")


def test_the_program_starts_isolated_and_alone(tmp_path: Path) -> None:
    text = Path(program.__file__).read_text(encoding="utf-8")
    assert "gpunode" not in [
        line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith("from ")
    ]
    assert json.loads(json.dumps(program.TITLES))["mig"] == "MIG mode"


def test_a_process_name_that_is_not_text_stops_nothing() -> None:
    name = "import time; open('/proc/self/comm', 'wb').write(b'\\xff\\xfe'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert program.daemon_runs() in {True, False}
        finally:
            process.kill()
