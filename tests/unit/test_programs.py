"""The runner of the tests' programs: what it returns, and that nothing outlives its limit."""

import importlib.util
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from programs import run_program, runs

STARTS_OTHERS = """
sleep 60 & beside=$!
setsid sleep 60 & in_a_session_of_its_own=$!
echo "$$ $beside $in_a_session_of_its_own" > "$0.new"
mv "$0.new" "$0"
wait
"""


def test_signals_that_a_test_ignores_are_not_ignored_after_it() -> None:
    spec = importlib.util.spec_from_file_location("hooks_of_all_tests", Path(__file__).parents[1] / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    before = [signal.getsignal(number) for number in hooks.ENDING]
    around = hooks.pytest_runtest_protocol()
    next(around)
    for number in hooks.ENDING:
        signal.signal(number, signal.SIG_IGN)
    with suppress(StopIteration):
        around.send(True)
    assert [signal.getsignal(number) for number in hooks.ENDING] == before


def test_exit_code_streams_and_surroundings(tmp_path: Path) -> None:
    done = run_program(
        ["sh", "-c", 'cat; pwd; echo "$WORD" >&2; exit 3'], limit_s=30, env={"WORD": "w"}, cwd=tmp_path, stdin="in\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, f"in\n{tmp_path}\n", "w\n")


def test_at_its_limit_a_program_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """Also what leads a session of its own, as Ansible's workers do."""
    file = tmp_path / "pids"
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["sh", "-c", STARTS_OTHERS, file], limit_s=2)
    pids = [int(word) for word in file.read_text().split()]
    end = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [pid for pid in pids if runs(pid)]
    for pid in left:
        os.kill(pid, 9)
    assert (len(pids), left) == (3, [])
