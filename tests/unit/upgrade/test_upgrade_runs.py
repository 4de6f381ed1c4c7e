"""One run at a time on one controller, also if that is killed."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpunode.errors import UsageError
from gpunode.upgrade.runs import one_at_a_time

UPGRADE = """
import os, signal, subprocess, sys
from pathlib import Path
from gpunode.fleet import playbook
from gpunode.upgrade.runs import one_at_a_time
class Killed(subprocess.Popen):
    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        os.kill(os.getpid(), signal.SIGKILL)
if len(sys.argv) > 2:
    subprocess.Popen = Killed
with one_at_a_time(Path(sys.argv[1])):
    program = f"cd {sys.argv[1]} && echo $$ > new && mv new begun && exec sleep 60"
    playbook.run(["/bin/sh", "-c", program], dict(os.environ), None)
"""


@pytest.mark.parametrize("moment", [[], ["as soon as it runs"]])
def test_after_kill_9_nothing_starts_beside_a_playbook_that_still_runs(tmp_path: Path, moment: list[str]) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", UPGRADE, folder, *moment], start_new_session=True) as controller:
        if not moment:
            _until((folder / "begun").exists)
            controller.kill()

    def runs() -> bool:
        begun = folder / "begun"
        return begun.exists() and Path("/proc", begun.read_text().strip(), "exe").exists()

    def may_start() -> bool:
        try:
            with one_at_a_time(folder):
                assert not runs()
        except UsageError:
            return False
        return True

    _until(may_start)
    time.sleep(1)  # for one that was about to begin
    assert not runs()


def _until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
