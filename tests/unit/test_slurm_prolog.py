"""contrib/slurm/gpunode-prolog with a controller that answers, and with one that never does."""

import os
import subprocess
import time
from pathlib import Path

import pytest

PROLOG = Path(__file__).parents[2] / "contrib" / "slurm" / "gpunode-prolog"
LINES = {"drain": "drain: gpu.count gpu3 is missing", "none": "none: ", "unknown": "unknown: nvidia-smi did not answer"}


def start(folder: Path, line: str, *, hangs: bool, job: bool) -> tuple[int, list[str], float]:
    """Exit code, calls of scontrol and seconds of one start; scontrol is a program of the test."""
    programs = {
        "gpunode": f"echo '{line}'",
        "hostname": "echo gpu1",
        "scontrol": f'echo "$*" >> {folder}/calls; {"sleep 60 & wait" if hangs else "echo Reason=gpunode: before"}',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    text = PROLOG.read_text()
    assert text.count("PATH=/usr/local/sbin:") == text.count("timeout -k 1 5 scontrol") == 1
    text = text.replace("PATH=/usr/local/sbin:", f"PATH={folder}:/usr/local/sbin:")
    text = text.replace("timeout -k 1 5 scontrol", "timeout -k 1 1 scontrol").replace("/etc/default/", f"{folder}/")
    (folder / "prolog").write_text(text)
    environment = {"GPUNODE": f"{folder}/gpunode", **({"SLURM_JOB_ID": "7"} if job else {})}
    started = time.monotonic()
    done = subprocess.run(
        ["/bin/sh", str(folder / "prolog")], env={"PATH": os.defpath, **environment}, check=False, timeout=50,
        capture_output=True,
    )  # fmt: skip
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], time.monotonic() - started


@pytest.mark.parametrize(
    ("state", "job", "code", "calls"),
    [
        ("none", True, 0, []),
        ("unknown", True, 0, []),
        ("none", False, 0, ["show node gpu1", "update nodename=gpu1 state=resume"]),
        ("drain", True, 1, ["update nodename=gpu1 state=drain reason=gpunode: gpu.count gpu3 is missing"]),
    ],
)
def test_the_controller_is_called_only_where_there_is_something_to_report(
    tmp_path: Path, state: str, job: bool, code: int, calls: list[str]
) -> None:
    assert start(tmp_path, LINES[state], hangs=False, job=job)[:2] == (code, calls)


@pytest.mark.parametrize(("state", "job", "code"), [("drain", True, 1), ("none", False, 0), ("none", True, 0)])
def test_a_controller_that_hangs_delays_no_job(tmp_path: Path, state: str, job: bool, code: int) -> None:
    rc, _, seconds = start(tmp_path, LINES[state], hangs=True, job=job)
    assert (rc, seconds < 40) == (code, True)
