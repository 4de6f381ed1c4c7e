"""Commands that misbehave: the probe comes back in time, reports what happened, and leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs import runs

from gpunode.onnode import probe as script
from gpunode.onnode.probe import Answer, Probe
from gpunode.probe import Bundle

LIMIT_S = 1.0


def tool(folder: Path, name: str, body: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def run(folder: Path, body: str, limit_s: float = LIMIT_S) -> Answer:
    tool(folder, "tool", body)
    answer = Probe(path=f"{folder}:/usr/bin:/bin").run("key", ["tool", "-x"], limit_s)
    assert answer is not None
    return answer


def gone(pid_file: Path, within_s: float = 5.0) -> bool:
    """True once the process with the number that a tool wrote has ended (or is a zombie nobody has waited for)."""
    pid = int(pid_file.read_text())
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not runs(pid):
            return True
        time.sleep(0.02)
    return False


def test_a_good_command(tmp_path: Path) -> None:
    answer = run(tmp_path, "echo out; echo err >&2; exit 3")
    assert (answer["argv"], answer["rc"], answer["stdout"], answer["stderr"]) == (["tool", "-x"], 3, "out\n", "err")
    assert not answer["timed_out"]
    assert not answer["truncated"]


def test_a_missing_tool_is_127(tmp_path: Path) -> None:
    answer = Probe(path=str(tmp_path)).run("key", ["no-such-tool"])
    assert answer is not None
    assert answer["rc"] == 127
    assert not answer["timed_out"]


def test_a_tool_that_may_not_be_run_is_126(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("rubbish")
    (tmp_path / "tool").chmod(0o644)
    answer = Probe(path=str(tmp_path)).run("key", ["tool"])
    assert answer is not None
    assert answer["rc"] == 126


@pytest.mark.parametrize(
    "body",
    [
        "echo before; sleep 60",
        "trap '' TERM HUP INT; echo before; while :; do sleep 60; done",
        "echo before; sleep 60 & wait",
        "echo before; exec >&- 2>&-; sleep 60",
    ],
    ids=["sleeps", "ignores SIGTERM", "waits for a child", "closes its output"],
)
def test_a_tool_that_hangs_costs_its_limit(tmp_path: Path, body: str) -> None:
    started = time.monotonic()
    answer = run(tmp_path, f"echo $$ > {tmp_path}/pid; {body}")
    assert time.monotonic() - started < LIMIT_S + 3
    assert (answer["rc"], answer["timed_out"], answer["stdout"]) == (124, True, "before\n")
    assert "no answer within 1 s" in answer["stderr"]
    assert gone(tmp_path / "pid")


def test_a_child_that_holds_the_pipe_does_not_hold_the_probe(tmp_path: Path) -> None:
    answer = run(tmp_path, f"echo out; sleep 60 & echo $! > {tmp_path}/pid; exit 0", limit_s=30)
    assert (answer["rc"], answer["timed_out"], answer["stdout"]) == (0, False, "out\n")
    assert answer["seconds"] < 5
    assert gone(tmp_path / "pid")


def test_a_child_that_left_the_group_does_not_hold_the_probe(tmp_path: Path) -> None:
    answer = run(tmp_path, f"echo out; setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 20' & sleep 0.3", limit_s=30)
    try:
        assert (answer["rc"], answer["stdout"]) == (0, "out\n")
        assert answer["seconds"] < 5
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_flood_is_cut_and_ended(tmp_path: Path) -> None:
    answer = run(tmp_path, f"echo $$ > {tmp_path}/pid; exec yes", limit_s=60)
    assert answer["truncated"]
    assert not answer["timed_out"]
    assert len(answer["stdout"]) == script.OUTPUT_BYTES
    assert answer["seconds"] < 30
    assert gone(tmp_path / "pid")


def test_a_flood_of_errors_is_cut_too(tmp_path: Path) -> None:
    answer = run(tmp_path, "exec yes >&2", limit_s=60)
    assert answer["truncated"]
    assert len(answer["stderr"]) <= script.OUTPUT_BYTES


def test_a_killed_tool_has_the_shells_status(tmp_path: Path) -> None:
    assert run(tmp_path, "kill -SEGV $$")["rc"] == 128 + signal.SIGSEGV


def test_a_process_that_cannot_be_killed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in state D: the signal is sent, and nothing comes of it."""
    real_killpg = os.killpg
    groups = []
    monkeypatch.setattr(os, "killpg", lambda group, _signal: groups.append(group))
    monkeypatch.setattr(script, "KILL_WAIT_S", 0.3)
    try:
        answer = run(tmp_path, "exec sleep 60")
    finally:
        real_killpg(groups[0], signal.SIGKILL)
        os.waitpid(groups[0], 0)
    assert (answer["rc"], answer["timed_out"]) == (124, True)
    assert "still there after being killed: state S" in answer["stderr"]
    assert answer["seconds"] < LIMIT_S + 3


def test_tools_have_no_input_and_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET", "s3cret")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other")
    answer = run(tmp_path, "cat; env", limit_s=5)
    assert answer["rc"] == 0
    assert "LC_ALL=C\n" in answer["stdout"]
    assert "s3cret" not in answer["stdout"]
    assert "/opt/other" not in answer["stdout"]


def node_with_module(root: Path) -> Path:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text("NVRM version: ...\n")
    (root / "bin").mkdir()
    return root / "bin"


def test_after_a_tool_that_hangs_no_other_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = node_with_module(tmp_path)
    tool(tools, "nvidia-smi", f'echo "$1" >> {tmp_path}/calls; [ "$1" = topo ] || exec sleep 60')
    rows = (("nvidia-smi-xml", ["nvidia-smi", "-q", "-x"]), ("nvidia-smi-topo", ["nvidia-smi", "topo", "-m"]))
    monkeypatch.setattr(script, "NVIDIA_TOOLS", rows)
    probe = Probe(root=str(tmp_path), path=f"{tools}:/usr/bin:/bin", nvidia_tool_s=LIMIT_S)
    bundle = Bundle.from_json(json.dumps(probe.collect()), "the probe")
    assert bundle.commands["nvidia-smi-xml"].timed_out
    topo = bundle.commands["nvidia-smi-topo"]
    assert (topo.rc, topo.timed_out) == (124, True)
    assert topo.stderr == "not run: nvidia-smi-xml did not come back before it"
    assert (tmp_path / "calls").read_text() == "-q\n"


def test_after_a_tool_that_fails_the_next_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = node_with_module(tmp_path)
    tool(tools, "nvidia-smi", '[ "$1" = topo ] && echo matrix || exit 9')
    rows = (("nvidia-smi-xml", ["nvidia-smi", "-q", "-x"]), ("nvidia-smi-topo", ["nvidia-smi", "topo", "-m"]))
    monkeypatch.setattr(script, "NVIDIA_TOOLS", rows)
    commands = Probe(root=str(tmp_path), path=f"{tools}:/usr/bin:/bin").collect()["commands"]
    assert (commands["nvidia-smi-xml"]["rc"], commands["nvidia-smi-topo"]["stdout"]) == (9, "matrix\n")


def test_passive_sources_come_before_nvidias_tools(tmp_path: Path) -> None:
    tools = node_with_module(tmp_path)
    tool(tools, "dkms", f"sleep 0.5; echo dkms >> {tmp_path}/calls")
    tool(tools, "nvidia-smi", f"echo smi >> {tmp_path}/calls")
    Probe(root=str(tmp_path), path=f"{tools}:/usr/bin:/bin").collect()
    smi_rows = sum(argv[0] == "nvidia-smi" for _, argv in script.NVIDIA_TOOLS)
    assert (tmp_path / "calls").read_text() == "dkms\n" + "smi\n" * smi_rows


def test_a_source_that_hangs_in_a_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck_source(probe: Probe) -> None:
        probe.read("/etc/os-release")
        time.sleep(20)

    monkeypatch.setattr(script, "PASSIVE", (stuck_source, script.plain_files))
    (tmp_path / "bin").mkdir()
    started = time.monotonic()
    bundle = Probe(root=str(tmp_path), path=str(tmp_path / "bin"), passive_s=1).collect()
    assert time.monotonic() - started < 5
    assert "stuck_source: not finished within 1 s" in bundle["commands"]["probe-read"]["stderr"]
    assert "/proc/cmdline" in bundle["files"]


def test_ended_from_outside_it_takes_its_commands_along(tmp_path: Path) -> None:
    tool(tmp_path, "dkms", f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 60")
    code = (
        "import functools; from gpunode.onnode import probe as script; "
        f"script.Probe = functools.partial(script.Probe, path='{tmp_path}:/usr/bin:/bin'); script.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        end = time.monotonic() + 20
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.02)
        process.terminate()
        stdout, _ = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 128 + signal.SIGTERM
    assert stdout == b""
    assert gone(tmp_path / "pid")


@pytest.mark.parametrize(
    ("limit", "own_limit", "words"),
    [(30.0, 30.0, "no answer within 30 s"), (6.04, 30.0, "no answer within 6.0 s, which was left of the time")],
)
def test_the_limit_that_ended_a_command_is_named(limit: float, own_limit: float, words: str) -> None:
    assert script.late(limit, own_limit).startswith(words)


def test_a_tool_for_which_no_time_is_left_is_not_run(tmp_path: Path) -> None:
    probe = Probe(root=str(tmp_path), path=str(tmp_path))
    probe.files["/proc/modules"] = "nvidia 1 0 - Live 0x0\n"
    probe.deadline = time.monotonic() + script.NVIDIA_LEAST_S - 1
    script.nvidia_tools(probe)
    reasons = {probe.commands[key]["stderr"] for key, _ in script.NVIDIA_TOOLS}
    assert len(reasons) == 1
    assert reasons.pop().startswith("not run: the time for the whole probe is used up")


def test_the_time_grows_with_the_gpus(tmp_path: Path) -> None:
    probe = Probe(root=str(tmp_path), path=str(tmp_path))
    for number in range(8):
        probe.files[f"{script.PCI_FOLDER}0000:0{number}:00.0/uevent"] = "PCI_CLASS=30200\nPCI_ID=10DE:2330\n"
    probe.files[f"{script.PCI_FOLDER}0000:0a:00.0/uevent"] = "PCI_CLASS=68000\nPCI_ID=10DE:22A3\n"
    assert script.gpus_on_bus(probe) == 8
    assert script.TOTAL_S + 8 * script.TOTAL_PER_GPU_S <= script.TOTAL_MOST_S < 120


WAITS = "<gpu id=X><gpu_util>100 %</gpu_util><memory_util>0 %</memory_util>"
WORKS = WAITS.replace("0 %</memory", "40 %</memory")


@pytest.mark.parametrize(
    ("xml", "budget_s", "recorded"),
    [
        (WAITS * 2, None, (0, "sample\n")),
        (WAITS + WORKS, None, None),
        (WAITS.replace("100", "98") * 8, None, None),
        (WAITS * 2, 0.5, (124, "")),
    ],
)
def test_gpus_that_wait_for_each_other_are_sampled_again(
    xml: str,
    budget_s: float | None,
    recorded: tuple[int, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(script, "USAGE_AGAIN_S", 0.0 if budget_s is None else 10.0)
    tool(tmp_path, "nvidia-smi", "echo sample")
    probe = Probe(path=f"{tmp_path}:/usr/bin:/bin", budget_s=budget_s)
    probe.note_answer("nvidia-smi-xml", script.answer(["nvidia-smi"], 0, xml, "", 0.1))
    script.usage_again(probe, 0.0)
    reply = probe.commands.get("nvidia-smi-usage")
    assert (None if reply is None else (reply["rc"], reply["stdout"])) == recorded
