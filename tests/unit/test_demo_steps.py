"""The demos' steps: times on the screen, output in files, one line for what goes wrong, and nothing left running."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from programs import runs

from gpunode.lab.state import LabState

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEMO = """
import sys
sys.path.insert(0, {scripts!r})
import demo_steps
from pathlib import Path
demo_steps.ROOT = Path({root!r})
demo_steps.LOGS = demo_steps.ROOT / "logs"

def main():
    demo = demo_steps.Demo("demo", 2)
    demo.step("counting", ["/bin/sh", "-c", {script!r}], limit_s={limit_s})
    return 0

demo_steps.run(main, {name!r})
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with logs and lab of its own."""
    spec = importlib.util.spec_from_file_location("demo_steps_of_a_test", SCRIPTS / "demo_steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_steps_of_a_test", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setenv("GPUNODE_LAB_HOME", str(tmp_path / "labs"))
    return module


def program(folder: Path, script: str, limit_s: float = 60) -> list[str]:
    name = f"demo-{folder.name}"
    text = DEMO.format(scripts=str(SCRIPTS), root=str(folder), script=script, limit_s=limit_s, name=name)
    return [sys.executable, "-c", text]


def test_a_step_shows_its_number_and_time_and_keeps_its_output_in_a_file(
    steps: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = steps.Demo("demo", 3)
    commands = [["/bin/sh", "-c", "echo one"], ["/usr/bin/env", "echo", "two"]]
    assert demo.step("counting", *commands, limit_s=60) == 0
    assert demo.step("checking", ["/bin/sh", "-c", "exit 1"], limit_s=60, fine=(0, 1)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d:\d\d", "TIME", line) for line in lines] == ["[1/3] counting … TIME", "[2/3] checking … TIME"]
    assert {path.name: path.read_text(encoding="utf-8").split()[-1] for path in tmp_path.glob("1-*")} == {
        "1-sh.log": "one",
        "1-env.log": "two",
    }


@pytest.mark.parametrize(("script", "why"), [("seq 50; exit 4", "exit 4"), ("seq 50; sleep 60", "no end within 1 s")])
def test_the_output_of_a_failed_step_is_shown_and_its_file_is_named(
    steps: ModuleType, capsys: pytest.CaptureFixture[str], script: str, why: str
) -> None:
    started = time.monotonic()
    with pytest.raises(steps.DemoError, match=rf"^counting: {why}; all of its output is in 1-sh.log$"):
        steps.Demo("demo", 3).step("counting", ["/bin/sh", "-c", script], limit_s=1 if "sleep" in script else 60)
    assert time.monotonic() - started < 30
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == [str(n) for n in range(21, 51)]


def test_a_failure_ends_the_command_beside_it(steps: ModuleType) -> None:
    started = time.monotonic()
    with pytest.raises(steps.DemoError, match=r"^counting: exit 5; "):
        steps.Demo("demo", 3).step("counting", ["/bin/sleep", "60"], ["/bin/sh", "-c", "exit 5"], limit_s=60)
    assert time.monotonic() - started < 30


def test_nodes_of_a_demo_that_did_not_end_are_removed(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(steps.Demo, "step", lambda *_arguments, **_options: 0)
    monkeypatch.setattr(steps, "quiet", lambda *words, **_options: calls.append(words))
    demo = steps.Demo("demo", 3)
    demo.prepare("first")
    demo.marker.parent.mkdir(parents=True)
    assert calls == []
    demo.prepare("an unfinished one before")
    assert [words[1:] for words in calls] == [("lab", "down", "--name", "demo")]
    assert demo.finished(["a difference"]) == 1
    demo.prepare("a failed one before")
    assert len(calls) == 2
    assert demo.finished([]) == 0
    demo.prepare("a finished one before")
    assert len(calls) == 2


def test_a_full_disk_is_one_line(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FREE_GIB", 10**6)
    with pytest.raises(steps.DemoError, match=r"GiB free, the demo needs \d+ GiB: free disk space there$"):
        steps.Demo("demo", 3).prepare("first")


def test_a_second_run_beside_the_first_is_one_line(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as lock:
        lock.bind(f"\0gpunode-make/demo-{tmp_path.name}")
        done = subprocess.run(
            program(tmp_path, "true"), capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
        )
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"make \S+: another make \S+ runs on this machine: wait for it\n", done.stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_command_as_by_ctrl_c(tmp_path: Path, number: int) -> None:
    script = "trap 'echo removed > removed; kill $child; exit 1' INT; sleep 600 & child=$!; echo $child > pid; wait"
    argv = ["env", "--default-signal=INT", *program(tmp_path, script)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text(encoding="ascii"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; the next one begins with new nodes" in error
    assert "Traceback" not in error
    assert (tmp_path / "removed").exists()
    child = int((tmp_path / "pid").read_text(encoding="ascii"))
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_just_being_started_when_it_is_interrupted_is_ended_too(
    steps: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    started = []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), number)
        time.sleep(0)  # Python calls the handler here
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(steps.subprocess, "Popen", start)
    signal.signal(number, steps._interrupt)
    with pytest.raises(KeyboardInterrupt):
        steps.Demo("demo", 1).step("started", ["/bin/sleep", "600"], limit_s=60)
    assert len(started) == 1
    left = started[0].poll() is None
    started[0].kill()
    started[0].wait()
    assert not left
    assert signal.getsignal(number) is steps._interrupt


def test_the_mark_of_a_finished_demo_goes_with_its_lab(steps: ModuleType, tmp_path: Path) -> None:
    demo = steps.Demo("demo", 3)
    demo.marker.parent.mkdir(parents=True)
    demo.finished([])
    assert demo.marker.exists()
    LabState.of("demo").remove()
    assert not demo.marker.parent.exists()
