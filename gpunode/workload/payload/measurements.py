"""The measurements of each level, their devices and processes, and their records."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpunode.workload.payload import copies, external, fabric, gemm, nccl, pairs, pipeline, storage, training
from gpunode.workload.payload.devices import CudaDevice
from gpunode.workload.payload.group import Seat, seat_of
from gpunode.workload.payload.isolate import Clock, Job, Outcome, Task, record, run_jobs

MEASUREMENTS = ("copy", "gemm", "fabric", "nccl", "memory", "steps", "ddp", "storage", "input", "tools", "burn")
"""In the order in which they run: those with the most heat come last."""
AT_ONCE = 8
RANKS_ON_PROCESSOR = {"standard": 2, "deep": 4}
RANK_LIMIT_S = {"standard": 30.0, "deep": 60.0}
REPETITIONS = {"standard": 10, "deep": 30}
GEMM_S = {"standard": 1.5, "deep": 6.0}
GEMM_ON_PROCESSOR_S = 0.3
BURN_S, BURN_ON_PROCESSOR_S = 120.0, 2.0
INPUT_S = {"standard": 1.0, "deep": 4.0}
FIO_S = {"standard": 3.0, "deep": 8.0}
INPUT_LIMIT_S = 600.0
TOOL_LIMIT_S = {"nvbandwidth": 300.0, "dcgm-diag": 420.0, "nccl-tests": 240.0}
DCGM_LEVEL = {"standard": 1, "deep": 2}
"""Level 2 takes about two minutes; level 3 takes a quarter of an hour, and gpunode's own loads replace it."""
SECONDS = {
    "copy": {"standard": 15, "deep": 40},
    "gemm": {"standard": 90, "deep": 150},
    "fabric": {"standard": 60, "deep": 60},
    "nccl": {"standard": 45, "deep": 240},
    "memory": {"standard": 30, "deep": 40},
    "steps": {"standard": 20, "deep": 30},
    "ddp": {"standard": 40, "deep": 60},
    "storage": {"standard": 40, "deep": 100},
    "input": {"standard": 40, "deep": 100},
    "tools": {"standard": 60, "deep": 400},
    "burn": {"standard": 160, "deep": 160},
}
"""Approximate duration of each, for estimating the time left: derived from the times above, not measured on a GPU."""
NO_PAIR = "only one rank: no link to another"


class Measurements:
    """The measurements of one run.

    ``settings``: ``level``; ``storage``, a directory to measure; ``data``, a directory to read, with ``model_rate``;
    ``burn_s``; ``seats``, those of this container's ranks in a group over several containers, in place of a group of
    its own; ``fabric``, see fabric.run, and ``collectives``, those of a group over several nodes.
    """

    def __init__(  # noqa: PLR0913
        self,
        *,
        devices: list[CudaDevice],
        idle: list[CudaDevice],
        environment: dict[str, str],
        settings: dict[str, Any],
        clock: Clock,
        folder: str | None,
        no_torch: str | None,
        progress: Callable[[str, float], None],
    ) -> None:
        self._devices, self._environment = devices, environment
        """The devices that PyTorch measures; none: the processor. The environment makes all of them visible to a
        process.
        """
        self._gpus = [device for device in idle if device.mig is None]
        """The devices that external programs measure, independent of the image's PyTorch."""
        self._whole = [device for device in devices if device.mig is None]
        self._settings, self._clock, self._folder = settings, clock, folder
        self._no_torch, self._progress = no_torch, progress
        self._level = "deep" if settings.get("level") == "deep" else "standard"
        self._busbw: dict[str, float] = {}
        """Bus bandwidth of this run's all-reduce in GB/s, by bytes."""

    def records(self, requested: set[str]) -> Iterator[dict[str, Any]]:
        """Yield all records of the requested measurements, as they arrive."""
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "copy": self._copies,
            "gemm": self._products,
            "fabric": self._fabric,
            "nccl": self._collectives,
            "memory": self._memory,
            "steps": self._steps,
            "ddp": self._training,
            "storage": self._storage,
            "input": self._input,
            "tools": self._tools,
            "burn": self._burn,
        }
        names = [name for name in MEASUREMENTS if name in requested]
        for number, name in enumerate(names):
            left_s = sum(self._about_s(measurement) for measurement in names[number:])
            self._progress(f"measuring {name} ({number + 1} of {len(names)})", min(left_s, self._clock.left(left_s)))
            yield from parts[name]()

    def _about_s(self, name: str) -> float:
        """Return about how many seconds a measurement takes."""
        longer_s = float(self._settings.get("burn_s") or BURN_S) - BURN_S if name == "burn" else 0.0
        return SECONDS[name][self._level] + longer_s

    # --- each device by itself

    def _each(
        self, tasks: Callable[[str | None, str | None], tuple[Task, ...]], at_once: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the results of the tasks on every device, by its UUID and that of its GPU, or once on the processor
        (None).
        """
        jobs = [
            Job(
                tasks(device.uuid or device.component, device.gpu_uuid),
                device.component,
                device.identity,
                device.environment,
            )
            for device in self._devices
        ] or [Job(tasks(None, None))]
        yield from self._run(jobs, at_once)

    def _run(self, jobs: list[Job], at_once: int) -> Iterator[dict[str, Any]]:
        if self._no_torch is not None:
            for job in jobs[:1]:
                for task in job.tasks:
                    yield record(task, Job(()), Outcome(0.0, skipped=self._no_torch))
            return
        for job, task, outcome in run_jobs(jobs, at_once, self._clock):
            yield record(task, job, outcome)

    def _copies(self) -> Iterator[dict[str, Any]]:
        number = REPETITIONS[self._level]
        # One device after another: they share the host's memory and links.
        yield from self._each(
            lambda where, _: (
                Task("copy.host", copies.host, (where, number), 120),
                Task("copy.device", copies.within, (where, number), 60),
            ),
            1,
        )
        task = Task("copy.peer", copies.peers, ([device.uuid or "" for device in self._whole], number), 240)
        if len(self._whole) < 2 and self._no_torch is None:
            reason = "only one GPU" if self._whole else "no whole GPUs to copy between"
            yield record(task, Job(()), Outcome(0.0, skipped=reason))
        else:
            yield from self._run([Job((task,), environment=self._environment)], 1)

    def _products(self) -> Iterator[dict[str, Any]]:
        seconds = GEMM_S[self._level] if self._devices else GEMM_ON_PROCESSOR_S
        yield from self._each(
            lambda where, gpu: tuple(
                Task(f"gemm.{name}", gemm.run, (where, gpu, name, seconds), 120) for name in gemm.FORMATS
            ),
            AT_ONCE,
        )

    def _memory(self) -> Iterator[dict[str, Any]]:
        number = REPETITIONS[self._level]
        yield from self._each(
            lambda where, gpu: (Task("memory.stream", copies.memory_bandwidth, (where, gpu, number), 120),), AT_ONCE
        )

    def _steps(self) -> Iterator[dict[str, Any]]:
        number = REPETITIONS[self._level]
        # One device after another: their hosts' threads share the processor.
        yield from self._each(lambda where, _: (Task("steps.device", training.steps, (where, number), 120),), 1)

    def _burn(self) -> Iterator[dict[str, Any]]:
        default_s = BURN_S if self._devices else BURN_ON_PROCESSOR_S
        seconds = float(self._settings.get("burn_s") or default_s)
        yield from self._each(
            lambda where, gpu: (Task("burn.gemm", gemm.burn, (where, gpu, seconds), seconds + 120),), AT_ONCE
        )

    # --- all devices together

    def _seats(self, folder: str) -> list[Seat]:
        """Return the seats of this container's ranks: in a group of its own, or in the one that the settings name."""
        if self._settings.get("seats"):
            notes = str(Path(self._folder, "missing")) if self._folder else None
            return [seat_of({**values, "notes": notes}) for values in self._settings["seats"]]
        ranks = len(self._whole) if self._devices else RANKS_ON_PROCESSOR[self._level]
        backend = "nccl" if self._devices else "gloo"
        limit_s = RANK_LIMIT_S[self._level]
        return [Seat(rank, ranks, f"file:{folder}", backend, rank, limit_s) for rank in range(ranks)]

    def _together(self, tasks: Callable[[Seat, str], tuple[Task, ...]]) -> Iterator[tuple[Task, Outcome]]:
        """Run each task on all ranks of this container; yield one outcome for each."""
        shown = tasks(Seat(0, 1, "file:", "gloo"), "")
        reason = self._no_torch
        if reason is None and self._devices and not self._whole:
            reason = "MIG devices do not talk to each other"
        if reason is not None:
            yield from ((task, Outcome(0.0, skipped=reason)) for task in shown)
            return
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-", dir=self._folder))
            except OSError as err:
                reason = f"no folder for the ranks to meet in: {err}"
                yield from ((task, Outcome(0.0, undetermined=reason)) for task in shown)
                return
            seats = self._seats(folder)
            jobs = [Job(tasks(seat, folder), str(seat.rank), environment=self._environment) for seat in seats]
            outcomes: dict[str, dict[int, Outcome]] = {}

            def left_after(outcome: Outcome) -> float | None:
                """Return the seconds in which the node's other ranks notice a missing one, which may be ours."""
                return seats[0].notice_s if outcome.values.get("missing") else None

            for job, task, outcome in run_jobs(jobs, len(jobs), self._clock, left_after):
                outcomes.setdefault(task.name, {})[int(job.component)] = outcome
                if len(outcomes[task.name]) == len(seats):
                    yield task, together(outcomes.pop(task.name), seats[0])

    def _collectives(self) -> Iterator[dict[str, Any]]:
        names = nccl.COLLECTIVES if self._level == "deep" else nccl.COLLECTIVES[:2]
        names = tuple(self._settings.get("collectives") or names)

        def tasks(seat: Seat, folder: str) -> tuple[Task, ...]:
            limit_s = 4 * seat.limit_s
            return tuple(
                Task(f"nccl.{name}", nccl.run, (seat, part, folder, name, self._level), limit_s)
                for part, name in enumerate(names)
            )

        for task, outcome in self._together(tasks):
            if task.name == "nccl.all-reduce":
                self._busbw = {
                    str(row["size_bytes"]): row["busbw_gb_per_s"] for row in outcome.values.get("rows") or ()
                }
            yield record(task, Job(()), outcome)
        if self._level == "deep":
            yield from self._links(len(names))

    def _links(self, part: int) -> Iterator[dict[str, Any]]:
        seats = self._seats("")
        if self._no_torch is None and seats and seats[0].size < 2:
            yield record(Task("nccl.pairs", pairs.run), Job(()), Outcome(0.0, skipped=NO_PAIR))
            return
        uuids = [device.uuid for device in self._whole] if not self._settings.get("seats") else []
        for task, outcome in self._together(
            lambda seat, _: (Task("nccl.pairs", pairs.run, (seat, part), 10 * seat.limit_s),)
        ):
            if outcome.values.get("rounds"):
                outcome.values["uuids"] = uuids
            yield record(task, Job(()), outcome)

    def _fabric(self) -> Iterator[dict[str, Any]]:
        settings = self._settings.get("fabric")
        if not isinstance(settings, dict):
            return
        part = len(nccl.COLLECTIVES) + 1 + len(training.KINDS)
        limit_s = float(settings["limit_s"])
        for task, outcome in self._together(
            lambda seat, _: (Task("fabric.links", fabric.run, (seat, part, settings), limit_s),)
        ):
            yield record(task, Job(()), outcome)

    def _training(self) -> Iterator[dict[str, Any]]:
        first = len(nccl.COLLECTIVES) + 1

        def tasks(seat: Seat, _: str) -> tuple[Task, ...]:
            return tuple(
                Task(f"ddp.{kind}", training.run, (seat, first + number, kind, self._busbw), 4 * seat.limit_s)
                for number, kind in enumerate(training.KINDS)
            )

        for task, outcome in self._together(tasks):
            yield record(task, Job(()), outcome)

    # --- the node

    def _storage(self) -> Iterator[dict[str, Any]]:
        directory = self._settings.get("storage")
        task = Task("storage.fio", storage.fio, (directory, FIO_S[self._level]), 600)
        for job, each, outcome in run_jobs([Job((task,))], 1, self._clock):
            yield record(each, job, outcome)
        yield from self._run([Job((Task("storage.dataloader", storage.dataloader, (directory,), 240),))], 1)

    def _input(self) -> Iterator[dict[str, Any]]:
        arguments = (self._settings.get("data"), self._settings.get("model_rate"))
        task = Task("input.pipeline", pipeline.run, (*arguments, len(self._whole), INPUT_S[self._level]), INPUT_LIMIT_S)
        for job, each, outcome in run_jobs([Job((task,), environment=self._environment)], 1, self._clock):
            yield record(each, job, outcome)

    def _tools(self) -> Iterator[dict[str, Any]]:
        tasks = []
        for name, run, arguments in (
            ("nvbandwidth", external.nvbandwidth, ()),
            ("dcgm-diag", external.dcgm_diag, (DCGM_LEVEL[self._level],)),
            ("nccl-tests", external.nccl_tests, (len(self._gpus),)),
        ):
            limit_s = TOOL_LIMIT_S[name]
            tasks.append(Task(f"tools.{name}", run, (*arguments, limit_s), limit_s + 10))
        if not self._gpus:
            for task in tasks:
                yield record(task, Job(()), Outcome(0.0, skipped="no whole GPUs to measure"))
            return
        for task in tasks:
            for job, each, outcome in run_jobs([Job((task,), environment=self._environment)], 1, self._clock):
                yield record(each, job, outcome)


def together(outcomes: dict[int, Outcome], seat: Seat) -> Outcome:
    """Return one outcome of a part for this container's ranks, by rank: the values are the same on all that finished.

    Of several errors the one that names the missing rank is used, with how that rank ended, as far as it is known here.
    """
    seconds = max(outcome.seconds for outcome in outcomes.values())
    for key in ("skipped", "undetermined"):
        reasons = [(rank, getattr(outcome, key)) for rank, outcome in outcomes.items() if getattr(outcome, key)]
        if reasons:
            group_outcome = Outcome(seconds)
            setattr(group_outcome, key, reasons[0][1] if key == "skipped" else f"rank {reasons[0][0]}: {reasons[0][1]}")
            return group_outcome
    broken = {rank: outcome for rank, outcome in outcomes.items() if outcome.error is not None}
    if not broken:
        _, first = min(outcomes.items())
        return Outcome(seconds, first.device, first.values)
    device = "cuda" if seat.backend == "nccl" else "cpu"
    naming = [outcome for outcome in broken.values() if outcome.values.get("missing")]
    if naming:
        missing = naming[0].values["missing"]
        ends = [f"rank {rank} {broken[rank].error}" for rank in missing if rank in broken]
        why = f" ({'; '.join(ends)})" if ends else ""
        return Outcome(seconds, device, naming[0].values, f"{naming[0].error}{why}")
    # Ranks without values of the group ended without a message: the others report a broken connection.
    silent = sorted(rank for rank, outcome in broken.items() if not outcome.values)
    rank = silent[0] if silent else min(broken, key=lambda rank: broken[rank].seconds)
    values = {"backend": seat.backend, "ranks": seat.size, "nodes": seat.nodes, "missing": silent}
    return Outcome(seconds, device, values, f"rank {rank} of {seat.size}: {broken[rank].error}")
