"""What holds the payload: its limit, its end with the launcher, nothing left; run as on a node, by ``python3 -c``."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunode.onnode import program_text, watchdog
from gpunode.workload.launch import START

Started = Callable[..., "subprocess.Popen[bytes]"]
SLEEP = "import time\nprint('there', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """``started(payload, limit_s=…)``: the watchdog with that program as its payload; its temporary folder is ours."""
    running: list[subprocess.Popen[bytes]] = []

    def start(text: str, *arguments: str, limit_s: float = 30.0) -> "subprocess.Popen[bytes]":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr("__main__.py", text)
        watchdog = program_text("watchdog").encode()
        lengths = (str(len(watchdog)), str(len(packed.getvalue())))
        process = subprocess.Popen(
            [sys.executable, "-c", START, *lengths, str(limit_s), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            start_new_session=True,
        )
        running.append(process)
        assert process.stdin is not None
        process.stdin.write(watchdog + packed.getvalue())
        process.stdin.flush()
        return process

    yield start
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def ended(process: "subprocess.Popen[bytes]", limit_s: float = 15) -> tuple[list[str], dict[str, Any]]:
    """What it printed, and its last line; stdin stays open until then, as the launcher's does."""
    assert process.stdout is not None
    deadline, lines = time.monotonic() + limit_s, list[str]()
    for raw in process.stdout:
        assert time.monotonic() < deadline
        lines.append(raw.decode().strip())
    last: dict[str, Any] = json.loads(lines[-1])
    assert last.pop("record") == "watchdog"
    return [line for line in lines[:-1] if line], last


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def test_the_payload_runs_with_its_arguments_in_a_folder_that_goes_with_it(started: Started, tmp_path: Path) -> None:
    program = "import os, sys\nprint(sys.argv[1:], os.getcwd() == os.environ['HOME'], os.environ['GPUNODE_LIMIT_S'])\n"
    lines, last = ended(started(f"{program}print(repr(sys.stdin.read()))\n", "--tests", "versions"))
    assert lines == ["['--tests', 'versions'] True 30", "''"]
    assert last == {"ended": "exit", "exit_code": 0}
    assert list(tmp_path.iterdir()) == []


def test_a_payload_that_falls_is_reported(started: Started) -> None:
    assert ended(started("raise SystemExit(7)"))[1] == {"ended": "exit", "exit_code": 7}
    killed = ended(started("import os\nos.kill(os.getpid(), 9)"))[1]
    assert killed == {"ended": "signal", "exit_code": 9}


def test_the_limit_ends_the_payload_and_what_it_started(started: Started, tmp_path: Path) -> None:
    program = "import subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n" + SLEEP
    began = time.monotonic()
    lines, last = ended(started(program, limit_s=1.5))
    assert 1.0 < time.monotonic() - began < 10
    assert last == {"ended": "time-limit", "exit_code": None}
    assert soon(lambda: gone(int(lines[0])))
    assert list(tmp_path.iterdir()) == []


def test_a_launcher_that_has_gone_ends_it_at_once(started: Started, tmp_path: Path) -> None:
    process = started(SLEEP, limit_s=600)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"there\n"
    process.stdin.close()
    process.stdin = None
    assert ended(process)[1] == {"ended": "alone", "exit_code": None}
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_it_and_it_cleans_up(started: Started, tmp_path: Path) -> None:
    process = started(SLEEP, limit_s=600)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert ended(process)[1] == {"ended": "stopped", "exit_code": None}
    assert list(tmp_path.iterdir()) == []


def test_a_python_that_is_too_old_is_reported(tmp_path: Path) -> None:
    old = START.replace("sys.version_info <", "(3, 6, 1) <").replace("sys.version_info[:2]", "(3, 6)")
    done = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, "python3 is 3.6, 3.8 or later is needed")


# --- forward compatibility

CUDA = """
int cuInit(unsigned flags) {{ return flags ? 1 : {result}; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler here")
@pytest.mark.parametrize(
    ("compat", "driver", "enabled"),
    [
        ({"result": 0, "version": 13020}, {"result": 0, "version": 12040}, True),
        ({"result": 0, "version": 13020}, {"result": 0, "version": 13020}, False),  # the driver needs none
        ({"result": 803, "version": 12080}, {"result": 0, "version": 13020}, False),  # a newer module refuses it
        ({"result": 804, "version": 13020}, {"result": 0, "version": 12040}, False),  # not on this GPU
        ({"result": 0, "version": 13020}, {"result": 999, "version": 12040}, True),
        ({"result": 0, "version": 13020}, None, True),
        (None, {"result": 0, "version": 12040}, False),
    ],
)
def test_forward_compatibility_is_enabled_where_the_entrypoint_of_nvidias_images_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compat: dict[str, int] | None,
    driver: dict[str, int] | None,
    enabled: bool,
) -> None:
    host, image = tmp_path / "host", tmp_path / "compat" / "lib.real"
    for folder, values in ((host, driver), (image, compat)):
        folder.mkdir(parents=True)
        if values is not None:
            (folder / "cuda.c").write_text(CUDA.format(**values))
            command = ["gcc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "cuda.c")]
            subprocess.run(command, check=True, timeout=60, start_new_session=True)
    monkeypatch.setattr(watchdog, "COMPAT", str(image))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(host))
    watchdog.enable_compat(30)
    assert os.environ["LD_LIBRARY_PATH"] == (f"{image}:{host}" if enabled else str(host))
