"""Profiles: one planted pattern in a trace of each format is the one that is named, and damaged files are refused.

The events have the shapes that NVIDIA's exporter page and Kineto document; no export of a GPU was recorded here.
"""

import _thread
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.fleet.process import descendants
from gpunode.onnode import profile_hook as hook
from gpunode.profiling import run as running
from gpunode.profiling.activity import ProfileActivity, ProfileError, common, length, merged, parse_nsys, parse_torch
from gpunode.profiling.patterns import RunNotes, patterns, stack_patterns

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
PLAIN = "ampere_sgemm_128x64_nn"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass
class Planted:
    """Steps of a training, in microseconds, with one part that is too long."""

    kernel: str = GEMM
    kernel_us: int = 900
    kernels: int = 10
    gap_us: int = 5
    loading_us: int = 100
    copy_us: int = 50
    pageable: bool = False
    nccl_us: int = 50
    host_us: int = 0
    sync_us: int = 0
    malloc_us: int = 0
    steps: int = 10
    events: list[tuple[str, str, int, int]] = field(default_factory=list)
    """Kind, name, start, duration."""

    def __post_init__(self) -> None:
        now = 1_000_000
        for _ in range(self.steps):
            self.events.append(("loading", "MultiProcessing", now, self.loading_us))
            now += self.loading_us
            self.events.append(("copy", "Pageable" if self.pageable else "Pinned", now, self.copy_us))
            now += self.copy_us
            for _ in range(self.kernels):
                self.events.append(("kernel", self.kernel, now, self.kernel_us))
                now += self.kernel_us + self.gap_us
            self.events.append(("kernel", ALL_REDUCE, now, self.nccl_us))
            now += self.nccl_us + self.host_us
            self.events.append(("call", "cudaStreamSynchronize", now - self.sync_us, self.sync_us))
            self.events.append(("call", "cudaMalloc", now, self.malloc_us))
            now += self.malloc_us


def as_torch(planted: Planted) -> ProfileActivity:
    """The trace as Kineto writes it."""

    def event(kind: str, name: str, start: int, duration: int) -> dict[str, Any]:
        category, shown, arguments = {
            "kernel": ("kernel", name, {"device": 0, "stream": 7}),
            "copy": ("gpu_memcpy", f"Memcpy HtoD ({name} -> Device)", {"device": 0, "bytes": 1_000_000}),
            "call": ("cuda_runtime", name, {}),
            "loading": ("user_annotation", f"enumerate(DataLoader)#_{name}DataLoaderIter.__next__", {}),
        }[kind]
        return {"ph": "X", "cat": category, "name": shown, "tid": 1, "ts": start, "dur": duration, "args": arguments}

    return parse_torch(json.dumps({"traceEvents": [event(*row) for row in planted.events]}))


def as_nsys(planted: Planted, path: Path) -> ProfileActivity:
    """The export as NVIDIA documents it."""
    path.unlink(missing_ok=True)
    names: dict[str, int] = {}
    with sqlite3.connect(path) as database:
        database.executescript(
            "PRAGMA synchronous=OFF; CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
            "CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER, name TEXT, label TEXT);"
            "INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'CUDA_MEMOPR_MEMORY_KIND_PAGEABLE', 'Pageable'),"
            "(1, 'CUDA_MEMOPR_MEMORY_KIND_PINNED', 'Pinned'), (2, 'CUDA_MEMOPR_MEMORY_KIND_DEVICE', 'Device');"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, demangledName INT,"
            " shortName INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT, bytes INT, copyKind INT,"
            " srcKind INT, dstKind INT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, nameId INT);"
            "CREATE TABLE NVTX_EVENTS (start INT, end INT, text TEXT);"
        )
        for kind, name, start, duration in planted.events:
            times = (start * 1000, (start + duration) * 1000)
            text = names.setdefault(f"{name}_v3020" if kind == "call" else name, len(names))
            if kind == "kernel":
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, ?, ?)", (*times, text, text))
            elif kind == "copy":
                row = (*times, 1_000_000, 0 if name == "Pageable" else 1)
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, ?, 1, ?, 2)", row)
            elif kind == "call":
                database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?)", (*times, text))
            else:
                text_of = f"enumerate(DataLoader)#_{name}DataLoaderIter.__next__"
                database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?)", (*times, text_of))
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, name) for name, number in names.items()])
    return parse_nsys(path)


def looked_at(activity: ProfileActivity) -> set[str]:
    return {row.pattern for row in patterns(activity, RunNotes()) if row.status == "look"}


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (Planted(), set()),
        (Planted(loading_us=9000), {"device share", "data loading"}),
        (Planted(host_us=9000), {"device share", "host gaps"}),
        (Planted(kernel_us=4, gap_us=20, kernels=400), {"device share", "launch-bound"}),
        (Planted(copy_us=4000, pageable=True), {"copies"}),
        (Planted(nccl_us=4000), {"NCCL"}),
        (Planted(kernel=PLAIN), {"tensor cores"}),
        (Planted(sync_us=6000), {"synchronization"}),
        (Planted(malloc_us=800), {"allocation"}),
    ],
)
def test_the_planted_pattern_is_the_named_one_in_both_formats(
    planted: Planted, named: set[str], tmp_path: Path
) -> None:
    of_torch, of_nsys = as_torch(planted), as_nsys(planted, tmp_path / "profile.sqlite")
    assert looked_at(of_torch) == looked_at(of_nsys) == named
    for torch_row, nsys_row in zip(patterns(of_torch, RunNotes()), patterns(of_nsys, RunNotes()), strict=True):
        assert (torch_row.pattern, torch_row.status) == (nsys_row.pattern, nsys_row.status)
        assert torch_row.value == pytest.approx(nsys_row.value, rel=1e-3)
    assert all(row.change for row in patterns(of_nsys, RunNotes()) if row.status == "look")


def test_pageable_memory_is_the_cause_of_slow_copies() -> None:
    (row,) = [
        row for row in patterns(as_torch(Planted(copy_us=4000, pageable=True)), RunNotes()) if row.pattern == "copies"
    ]
    assert "pin_memory=True" in row.change
    (row,) = [row for row in patterns(as_torch(Planted(copy_us=4000)), RunNotes()) if row.pattern == "copies"]
    assert "pin_memory=True" not in row.change


@pytest.mark.parametrize(
    ("single", "notes", "cause", "change"),
    [
        (True, {"loading_s": 1.0, "loading_active_s": 0.05}, "waits for samples (active 5 %)", "num_workers above 0"),
        (
            True,
            {"loading_s": 1.0, "loading_active_s": 0.97, "cpus": 8},
            "prepares samples itself",
            "num_workers up to 7",
        ),
        (False, {"workers": 2, "workers_active_s": 0.1, "cpus": 8}, "2 workers wait (active 5 %)", "more workers"),
        (False, {"workers": 2, "workers_active_s": 1.9, "cpus": 8}, "2 workers compute (active 95 %", "up to 7"),
        (False, {"workers": 8, "workers_active_s": 7.0, "cpus": 8}, "on 8 cores compute", "cheaper samples"),
        (False, {"workers": 8, "workers_active_s": 0.2, "cpus": 8}, "8 workers wait", "more workers"),
        (False, {}, "deliver too slowly", "validate --level deep --data"),
    ],
)
def test_why_a_loader_is_slow(single: bool, notes: dict[str, Any], cause: str, change: str) -> None:
    activity = ProfileActivity(1.0, loading=[(0.0, 0.9)], single_process=single)
    (row,) = [row for row in patterns(activity, RunNotes(window_s=1.0, **notes)) if row.pattern == "data loading"]
    assert (row.status, cause in row.cause, change in row.change) == ("look", True, True), row


def test_operations_are_counted_without_those_that_they_call() -> None:
    events = [("aten::linear", 0, 100), ("aten::addmm", 10, 80), ("aten::relu", 100, 50)]
    rows = [{"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": ts, "dur": dur} for name, ts, dur in events]
    activity = parse_torch(json.dumps({"traceEvents": rows}))
    assert activity.operations == pytest.approx({"aten::linear": 20e-6, "aten::addmm": 80e-6, "aten::relu": 50e-6})


def test_intervals_against_a_slow_definition() -> None:
    chance = random.Random(1)  # noqa: S311
    for _ in range(200):
        sets = [[(start, start + chance.randrange(6)) for start in chance.choices(range(40), k=5)] for _ in range(2)]
        points = [{point for start, end in intervals for point in range(start, end)} for intervals in sets]
        first, second = map(merged, sets)
        assert (length(first), length(second)) == (len(points[0]), len(points[1]))
        assert common(first, second) == len(points[0] & points[1])


def test_stacks_of_py_spy() -> None:
    text = (
        "<module> (train.py:9);__next__ (torch/utils/data/dataloader.py:7);load (a b.py:3) 30\n<module> (t.py:1) 70\n"
    )
    loading, functions = stack_patterns(text)
    assert (loading.value, loading.status, functions.measured.partition(" 70 %")[0]) == (
        0.3,
        "look",
        "<module> (t.py:1)",
    )
    for bad in ("", "no number\n", "\n\n"):
        with pytest.raises(ProfileError):
            stack_patterns(bad)


def damaged(text: str) -> Iterable[str]:
    chance = random.Random(2)  # noqa: S311
    yield from ("", "[]", "{}", "null", '{"traceEvents": 5}', '{"traceEvents": [{"ph": "X"}]}', text[: len(text) // 2])
    for _ in range(60):
        index = chance.randrange(len(text))
        yield text[:index] + chance.choice('x"{}[]9-') + text[index + chance.randrange(3) :]


def test_a_damaged_file_is_refused_with_one_line_or_read(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": GEMM, "ts": 5, "dur": 7, "args": {"device": 0, "bytes": "many"}}
    refused = 0
    for text in damaged(json.dumps({"traceEvents": [event, {**event, "args": [1], "ts": 90, "cat": "gpu_memcpy"}]})):
        try:
            patterns(parse_torch(text), RunNotes())
        except ProfileError:
            refused += 1
    assert refused > 7
    path = tmp_path / "profile.sqlite"
    as_nsys(Planted(), path)
    whole = path.read_bytes()
    for size in (0, 10, 4096, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ProfileError):
            parse_nsys(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--", "/no/such/program"], "no such program"),
        (["--gpus", "0,x", "--", "true"], "is not a list of GPUs"),
        (["--gpus", "0,0", "--", "true"], "is not a list of GPUs"),
        (["--output", "full", "--", "true"], "is not empty"),
        (["--tool", "nsys", "--", "true"], "Nsight Systems is not installed"),
    ],
)
def test_wrong_usage_is_one_line_and_leaves_nothing(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running.ProfiledMachine, "has", lambda _, name: name == "true")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run(["profile", *arguments]) == 2
    captured = capsys.readouterr()
    assert (words in captured.err, captured.out) == (True, "")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_question_that_is_not_answered_leaves_nothing(interrupted: bool) -> None:
    machine = running.ProfiledMachine(None)
    before = set(descendants(os.getpid()))
    if interrupted:

        def interrupt() -> None:
            while len(set(descendants(os.getpid())) - before) < 3:
                time.sleep(0.01)
            _thread.interrupt_main()

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            machine.ask("sh", "-c", "sleep 60 & sleep 60; :")
    else:
        assert machine.ask("sh", "-c", "sleep 60 & sleep 60; :", limit_s=0.5).returncode == 124
    assert set(descendants(os.getpid())) <= before


class Restricted(running.ProfiledMachine):
    """A machine with programs and files that answer as given."""

    def __init__(self, **answers: str) -> None:
        super().__init__(None)
        self.answers = answers

    def has(self, program: str) -> bool:
        return program.replace("-", "_") in self.answers

    def ask(self, *command: str, **_: Any) -> subprocess.CompletedProcess[bytes]:
        name = Path(command[-1]).name if command[0] == "cat" else command[0].replace("-", "_")
        answer = self.answers.get(name)
        return subprocess.CompletedProcess(command, 0 if answer is not None else 1, (answer or "").encode(), b"")


@pytest.mark.parametrize(
    ("scope", "user", "forbidden"),
    [("0", "1000", False), ("1", "1000", False), ("2", "1000", True), ("2", "0", False), ("3", "0", True)],
)
def test_a_kernel_that_forbids_to_trace_is_the_reason(scope: str, user: str, forbidden: bool) -> None:
    machine = Restricted(py_spy="py-spy 0.4.3", ptrace_scope=f"{scope}\n", id=f"{user}\n")
    request = running.ProfileRequest(command=("python3", "train.py"), tool="py-spy", output=Path("out"))
    if forbidden:
        with pytest.raises(UsageError, match=rf"py-spy: kernel\.yama\.ptrace_scope={scope} forbids it: use root"):
            running.choose(machine, request)
    else:
        assert running.choose(machine, request) == ("py-spy", ["py-spy 0.4.3"])


def test_restricted_counters_are_a_remark() -> None:
    version = "NVIDIA Nsight Systems version 2025.3.1.90"
    for line, remarks in (("RmProfilingAdminOnly: 1", 2), ("RmProfilingAdminOnly: 0", 1)):
        reason, notes = running.usable(Restricted(nsys=version, params=line), ("true",), "nsys")
        assert (reason, notes[0], len(notes)) == (None, version, remarks)


class FakeTorch:
    """The part of PyTorch's profiler that the hook calls."""

    __version__ = "2"

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(is_available=lambda: False)
        self.profiler = SimpleNamespace(ProfilerActivity=SimpleNamespace(CPU=0, CUDA=1), profile=lambda **_: self)
        self.calls: list[str] = []

    def get_num_threads(self) -> int:
        return 1

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


@pytest.mark.parametrize(
    ("kinds", "state", "steps"),
    [
        ("", "no step was seen", 0),
        ("oo", "ended during the 3 warm-up steps", 0),
        ("ooo" + "o" * 9, "recorded", 4),
        ("ooooo", "recorded", 2),
        # Batches are steps only where no optimizer is called.
        ("l" * 20, "recorded", 4),
        ("lo" * 3 + "lo", "recorded", 1),
    ],
)
def test_the_hook_records_the_steps_after_the_warm_up(
    kinds: str, state: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(hook, "FOLDER", str(tmp_path))
    monkeypatch.setattr(hook, "WARMUP", 3)
    monkeypatch.setattr(hook, "STEPS", 4)
    recorder = hook.ActivityRecorder()
    for kind in kinds:
        recorder.step("optimizer" if kind == "o" else "loader")
    recorder.end()
    recorder.end()
    notes = json.loads((tmp_path / f"notes-{recorder.process}.json").read_text())
    assert (notes["state"], notes.get("steps", 0)) == (state, steps)
    assert torch.calls == (["start", "stop"] if state == "recorded" else [])
    known = RunNotes.__dataclass_fields__
    assert state != "recorded" or {"steps", "window_s", "loading_s", "loading_active_s", "workers_active_s"} <= (
        set(notes) & set(known)
    )


def test_a_failing_profiler_does_not_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr(hook, "WARMUP", 0)
    monkeypatch.setattr(hook, "FOLDER", str(tmp_path))
    monkeypatch.setattr(hook, "RECORDER", hook.ActivityRecorder())
    hook.quietly(hook.RECORDER.step, "optimizer")
    assert hook.RECORDER.notes["state"].startswith("failed: AttributeError")


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("sleep 60", "interrupted at the time limit"),
        ("trap '' INT TERM; sleep 60 & wait", "interrupted at the time limit"),
        ("kill -9 $$", "ended by signal 9"),
        ("exit 7", "ended with status 7"),
    ],
)
def test_a_command_without_a_step_is_one_line_with_how_it_ended(
    program: str, ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.2)
    began = time.monotonic()
    options = ["--tool", "torch", "--limit", "1s", "--output", str(tmp_path / "out")]
    assert run(["profile", *options, "--", "sh", "-c", program]) == 3
    assert time.monotonic() - began < 30
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("gpunode")]
    assert ended in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program", ["trap 'echo ended > ended; exit' INT; sleep 5 & wait $!"])
def test_a_job_in_the_background_is_interrupted_too(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "GRACE_S", 5)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(["profile", "--tool", "torch", "--limit", "1s", "--output", "out", "--", "sh", "-c", program]) == 3
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "ended").exists()
