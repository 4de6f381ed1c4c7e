# ruff: noqa: PTH100, PTH118, PTH120, PTH123
"""Loaded as sitecustomize by the profiled command's Python 3.8 or later: it records steps with PyTorch's own profiler.

It needs no change of the command. ``GPUNODE_PROFILE`` names the folder for ``trace-PID.json`` and ``notes-PID.json``. A
step is a call of an optimizer, or a batch of a DataLoader if no optimizer is used. Nothing that fails here reaches the
command.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

FOLDER = os.environ.get("GPUNODE_PROFILE", "")
WARMUP = int(os.environ.get("GPUNODE_PROFILE_WARMUP", "5"))
STEPS = int(os.environ.get("GPUNODE_PROFILE_STEPS", "20"))
LIMIT_S = 60.0
"""Of the recorded part: a trace of slow steps ends after fewer of them."""
OPTIMIZER, LOADER = "torch.optim.optimizer", "torch.utils.data.dataloader"


class ActivityRecorder:
    """Counts steps, runs the profiler for some of them, and writes what it found."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.thread = threading.get_ident()
        self.steps = {"optimizer": 0, "loader": 0}
        self.profiler: Any = None
        self.began = 0.0
        self.notes: dict[str, Any] = {
            "pid": self.process,
            "rank": os.environ.get("RANK", "0"),
            "state": "no step was seen",
        }
        self.workers: dict[int, float] = {}
        self.done = False

    def step(self, kind: str) -> None:
        """Count a step; start or end the recording."""
        if os.getpid() != self.process or threading.get_ident() != self.thread or self.done:
            return
        self.steps[kind] += 1
        if kind == "loader" and (self.steps["optimizer"] or self.steps["loader"] <= 3 + WARMUP):
            return
        if self.profiler is None:
            if self.steps[kind] >= WARMUP:
                self.start(kind)
            else:
                self.notes["state"] = f"ended during the {WARMUP} warm-up steps"
            return
        self.notes["steps"] += 1
        if self.notes["steps"] >= STEPS or time.perf_counter() - self.began > LIMIT_S:
            self.end()

    def start(self, kind: str) -> None:
        """Start the profiler in this thread, which is that of the steps."""
        torch: Any = importlib.import_module("torch")

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities)
        self.notes.update(
            steps=0,
            step=kind,
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            cpus=len(os.sched_getaffinity(0)),
            loading_s=0.0,
            loading_active_s=0.0,
            state="recording",
        )
        self.profiler.start()
        self.began, self.workers = time.perf_counter(), {}

    def end(self) -> None:
        """Stop the profiler and write its trace and the notes."""
        if self.done:
            return
        self.done = True
        if self.profiler is not None:
            self.notes["window_s"] = time.perf_counter() - self.began
            used = [active_seconds(str(pid)) for pid in self.workers]
            pairs = [(now, first) for now, first in zip(used, self.workers.values()) if now is not None]
            self.notes["workers"] = len(self.workers)
            self.notes["workers_active_s"] = sum(now - first for now, first in pairs) if pairs else None
            self.profiler.stop()
            self.profiler.export_chrome_trace(os.path.join(FOLDER, f"trace-{self.process}.json"))
            self.notes["state"] = "recorded"
        with open(os.path.join(FOLDER, f"notes-{self.process}.json"), "w") as file:
            json.dump(self.notes, file)

    def loaded(self, loader: Any, wall_s: float, active_s: float) -> None:
        """Add the time of one batch, and the processes that prepare batches."""
        if self.profiler is None or self.done or os.getpid() != self.process:
            return
        self.notes["loading_s"] += wall_s
        self.notes["loading_active_s"] += active_s
        for worker in getattr(loader, "_workers", ()):
            if worker.pid not in self.workers:
                first = active_seconds(str(worker.pid))
                if first is not None:
                    self.workers[worker.pid] = first


def active_seconds(task: str) -> float | None:
    """Return how long a process or thread has run, or has waited for a core; None if it ended.

    A thread on a busy machine waits for a core and not for data. The kernel counts both (schedstat).
    """
    try:
        with open(f"/proc/{task}/schedstat") as file:
            running, queued = file.read().split()[:2]
        return (int(running) + int(queued)) / 1e9
    except (OSError, ValueError):
        return None


def quietly(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function; a failure is written to the notes and goes no further."""
    try:
        function(*arguments)
    except Exception as err:
        RECORDER.notes["state"] = f"failed: {type(err).__name__}: {err}"
        RECORDER.done = RECORDER.done or RECORDER.profiler is not None


def watch(module: Any) -> None:
    """Register for the steps of the module that was just loaded."""
    if module.__name__ == OPTIMIZER:
        module.register_optimizer_step_post_hook(lambda *_: quietly(RECORDER.step, "optimizer"))
        return
    kind = module._BaseDataLoaderIter
    plain = kind.__next__

    def following(self: Any) -> Any:
        began, active = time.perf_counter(), active_seconds("thread-self") or 0.0
        try:
            return plain(self)
        finally:
            used = (active_seconds("thread-self") or 0.0) - active
            quietly(RECORDER.loaded, self, time.perf_counter() - began, used)
            quietly(RECORDER.step, "loader")

    kind.__next__ = following


class Finder:
    """Finds the two modules as Python does, and watches them once they are loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own specification with a loader that watches; None for all others."""
        if name not in (OPTIMIZER, LOADER):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def run(module: Any) -> None:
            plain(module)
            quietly(watch, module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def hidden() -> None:
    """Run the sitecustomize that this one hides, such as the distribution's own."""
    folder = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


RECORDER = ActivityRecorder()
if FOLDER and __name__ == "sitecustomize":
    quietly(hidden)
    sys.meta_path.insert(0, Finder())
    atexit.register(lambda: quietly(RECORDER.end) if os.getpid() == RECORDER.process else None)
