"""Processes of ours: all that descends from one is found and ended, while others come and go."""

import os
import subprocess
import threading
import time

from gpunode.fleet.process import descendants, kill_tree

TREE = "setsid sh -c 'sleep 305 & wait' & sleep 306 & echo up; wait"


def test_a_tree_is_found_and_killed_across_sessions() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", TREE], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        while len(found := descendants(process.pid)) < 3:
            assert process.poll() is None
    finally:
        kill_tree(process)
        process.wait(10)
    assert process.pid not in found
    end = time.monotonic() + 10
    while any(map(_runs, found)) and time.monotonic() < end:
        time.sleep(0.01)
    assert [pid for pid in found if _runs(pid)] == []


def test_processes_that_end_meanwhile_are_no_harm() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["/bin/true"], check=True, timeout=30)

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            assert os.getpid() in descendants(os.getppid())
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)


def _runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:  # noqa: PTH123
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
