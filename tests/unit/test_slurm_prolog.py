"""roles/slurm_node/files/gpunode-prolog with a controller that answers, and with one that never does."""

import os
import subprocess
import time
from pathlib import Path

import pytest

PROLOG = Path(__file__).parents[2] / "roles" / "slurm_node" / "files" / "gpunode-prolog"
NODE = """\
NodeName=gpu1 Arch=x86_64 CoresPerSocket=1
   NodeAddr=127.0.0.1 NodeHostName=gpu1 Version=22.05.8
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   BootTime=1795421657 SlurmdStartTime=1795466020
"""
"""Some lines of ``scontrol show node`` of Slurm 22.05 with SLURM_TIME_FORMAT=%s; tests/integration asks a real one."""
LINES = {"drain": "drain: gpu.count gpu3 is missing", "none": "none: ", "unknown": "unknown: nvidia-smi did not answer"}


def start(
    folder: Path, line: str, *, hangs: bool, job: bool, state: str = "IDLE", reason: str = ""
) -> tuple[int, list[str], float]:
    """Exit code, calls of scontrol and seconds of one start; scontrol is a program of the test."""
    node = NODE.format(state=state) + (f"   Reason={reason} [root@1795466032]\n" if reason else "")
    (folder / "node").write_text(node)
    programs = {
        "gpunode": f"echo '{line}'",
        "hostname": "echo gpu1",
        "scontrol": f'echo "$*" >> {folder}/calls; {"sleep 60 & wait" if hangs else f"cat {folder}/node"}',
        "sinfo": "printf 'gpu1|none\\ngpu2|none\\n'",
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    text = PROLOG.read_text()
    assert text.count("PATH=/usr/local/sbin:") == text.count("timeout -k 1 5 ") == 1
    text = text.replace("PATH=/usr/local/sbin:", f"PATH={folder}:/usr/local/sbin:")
    text = text.replace("timeout -k 1 5 ", "timeout -k 1 1 ").replace("/etc/default/", f"{folder}/")
    (folder / "prolog").write_text(text)
    environment = {
        "GPUNODE": f"{folder}/gpunode",
        "GPUNODE_RUN": f"{folder}/run",
        **({"SLURM_JOB_ID": "7"} if job else {}),
    }
    started = time.monotonic()
    done = subprocess.run(
        ["/bin/sh", str(folder / "prolog")], env={"PATH": os.defpath, **environment}, check=False, timeout=50,
        capture_output=True,
    )  # fmt: skip
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [], time.monotonic() - started


ASKED = "show node gpu1"
RESUMED = "update nodename=gpu1 state=resume"
DRAINED = "update nodename=gpu1 state=drain reason=gpunode: gpu.count gpu3 is missing"
RENAMED = "update nodename=gpu1 reason=gpunode: gpu.count gpu3 is missing"


@pytest.mark.parametrize(
    ("verdict", "job", "state", "reason", "code", "calls"),
    [
        ("none", True, "IDLE", "", 0, []),
        ("unknown", True, "IDLE", "", 0, []),
        ("drain", True, "IDLE", "", 1, []),
        ("none", False, "IDLE", "", 0, [ASKED]),
        ("none", False, "IDLE+DRAIN", "gpunode: before", 0, [ASKED, RESUMED]),
        ("none", False, "IDLE+DRAIN", "RMA ticket 4711", 0, [ASKED]),
        ("none", False, "DOWN*", "gpunode: before", 0, [ASKED]),
        ("none", False, "IDLE+DRAIN", "gpunode-upgrade 7f3a", 0, [ASKED]),
        ("none", False, "IDLE+DRAIN", "Prolog error", 0, [ASKED]),
        ("drain", False, "MIXED", "", 1, [ASKED, DRAINED]),
        ("drain", False, "IDLE+DRAIN", "gpunode: before", 1, [ASKED, RENAMED]),
        ("drain", False, "IDLE+DRAIN", "gpunode: gpu.count gpu3 is missing", 1, [ASKED]),
        ("drain", False, "IDLE+DRAIN", "RMA ticket 4711", 1, [ASKED]),
        ("drain", False, "DOWN*+DRAIN", "Not responding", 1, [ASKED]),
    ],
)
def test_the_controller_is_called_only_where_there_is_something_to_report(
    tmp_path: Path, *, verdict: str, job: bool, state: str, reason: str, code: int, calls: list[str]
) -> None:
    answer = start(tmp_path, LINES[verdict], hangs=False, job=job, state=state, reason=reason)
    assert answer[:2] == (code, calls)


@pytest.mark.parametrize(("seconds", "calls"), [(0, [ASKED, RESUMED]), (-50, [ASKED, RESUMED]), (70, [ASKED])])
def test_slurms_own_drain_is_ended_only_after_a_refusal_by_this_prolog(
    tmp_path: Path, seconds: int, calls: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    mark = tmp_path / "run" / "prolog-refused"
    mark.touch()
    os.utime(mark, (1795466032 + seconds,) * 2)
    answer = start(tmp_path, LINES["none"], hangs=False, job=False, state="IDLE+DRAIN", reason="Prolog error")
    assert answer[:2] == (0, calls)
    assert mark.exists() is (RESUMED not in calls)


@pytest.mark.parametrize(("state", "job", "code"), [("drain", True, 1), ("none", False, 0), ("none", True, 0)])
def test_a_controller_that_hangs_delays_no_job(tmp_path: Path, state: str, job: bool, code: int) -> None:
    rc, _, seconds = start(tmp_path, LINES[state], hangs=True, job=job)
    assert (rc, seconds < 40) == (code, True)
