"""One run of the payload: its parts, devices, processes and records."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpunode.workload.payload import copies, frameworks, image, libcuda, nccl, nvml, pytorch, tf
from gpunode.workload.payload.devices import CudaDevice, computing
from gpunode.workload.payload.isolate import Clock, Job, Outcome, Task, record, run_jobs
from gpunode.workload.payload.measurements import MEASUREMENTS, Measurements

TESTS = ("versions", "gpus", "frameworks", *MEASUREMENTS)
AT_ONCE = 8
"""Maximum number of devices in parallel: MIG creates up to 56 of them."""
HOLD_S = 60.0
NO_DEVICE = "none of the passed GPUs can compute (records versions.nvml and versions.cuda)"
ON_EACH: tuple[tuple[str, Callable[..., dict[str, Any]], float], ...] = (
    ("frameworks.tensor", frameworks.tensor, 180),
    ("frameworks.amp", frameworks.amp, 180),
    ("frameworks.matmul", frameworks.matmul, 240),
    ("frameworks.cudnn", frameworks.convolution, 180),
    ("frameworks.fp8", frameworks.fp8, 180),
    ("frameworks.memory", frameworks.memory, 300),
)
"""Parts of PyTorch that every device runs, first those without which the others are meaningless."""


class PayloadSession:
    """The state of one run: facts of the image and of the devices.

    ``settings``: ``compile_min_capability``, the compute capability that torch.compile needs; ``gpus`` and ``force``,
    see devices.computing; ``user_site``, packages of the user who runs it count; ``interface``, the network interface
    of ranks; ``starter``, see fabric.seat_from_environment; others, see measurements.Measurements. ``progress`` is
    called with the current step, and the estimated seconds left.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        clock: Clock,
        folder: str | None = None,
        progress: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._folder = folder
        self._progress = progress
        self._devices: list[CudaDevice] = []
        self._torch = Outcome(0.0)
        self._present = False
        """There are GPUs inside, whether anything may be started on them or not."""

    @property
    def _idle(self) -> list[CudaDevice]:
        return [device for device in self._devices if device.busy is None]

    def records(self, tests: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yield all records of the tests, as they arrive."""
        requested = set(tests)
        if "versions" in requested:
            yield from self._node(Task("versions.system", image.system, (), 30))
            yield from self._node(Task("versions.limits", image.limits, (), 30))
        # The devices are determined for every test, and reported if requested.
        looked: dict[str, Outcome] = {}
        for name, look, limit_s in (("versions.nvml", nvml.versions, 60), ("versions.cuda", libcuda.versions, 120)):
            # If /proc shows no module inside, NVML reports the module's version.
            module = (looked["versions.nvml"].values.get("driver_version"),) if looked else ()
            for job, each, outcome in run_jobs([Job((Task(name, look, module, limit_s),))], 1, self._clock):
                looked[name] = outcome
                if "versions" in requested:
                    yield record(each, job, outcome)
        management = looked["versions.nvml"].values
        self._devices = computing(management, looked["versions.cuda"].values, self._settings)
        self._present = any(outcome.values.get("gpus") for outcome in looked.values())
        with nvml.held(self._clock.left(HOLD_S)) if management.get("gpus") else contextlib.nullcontext(False):
            yield from self._after(requested)

    def _after(self, requested: set[str]) -> Iterator[dict[str, Any]]:
        if requested & {"versions", "frameworks", *MEASUREMENTS}:
            task = Task("versions.torch", pytorch.versions, (), 180)
            # With MIG devices a process must see only one: PyTorch counts the cards, and finds a single device.
            divided = [device for device in self._idle if device.mig is not None]
            environment = divided[0].environment if divided else {}
            for job, each, outcome in run_jobs([Job((task,), environment=environment)], 1, self._clock):
                self._torch = outcome
                if "versions" in requested:
                    yield record(each, job, outcome)
        if "versions" in requested:
            yield from self._node(Task("versions.tensorflow", tf.versions, (), 180), self._all())
        if "gpus" in requested:
            yield from self._kernels()
        if "frameworks" in requested:
            yield from self._frameworks()
        if requested & set(MEASUREMENTS):
            yield from self._measurements(requested)

    def _node(self, task: Task, environment: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
        job = Job((task,), environment=environment or {})
        for _, each, outcome in run_jobs([job], 1, self._clock):
            yield record(each, job, outcome)

    def _all(self) -> dict[str, str]:
        """Return the variables that make all possible devices visible: every whole GPU, else the first MIG device."""
        idle = self._idle
        whole = [device for device in idle if device.mig is None]
        if not idle or (len(whole) == len(self._devices) and all(device.uuid is None for device in whole)):
            return {}
        if not whole:
            return idle[0].environment
        return {"CUDA_VISIBLE_DEVICES": ",".join(device.environment["CUDA_VISIBLE_DEVICES"] for device in whole)}

    def _kernels(self) -> Iterator[dict[str, Any]]:
        jobs = []
        if not self._devices:
            yield record(Task("gpus.kernel", libcuda.kernel), Job(()), Outcome(0.0, skipped=NO_DEVICE))
        for device in self._devices:
            task = Task("gpus.kernel", libcuda.kernel, (device.uuid,), 120)
            job = Job((task,), device.component, device.identity, device.environment)
            if device.busy is not None:
                yield record(task, job, Outcome(0.0, "cuda", undetermined=device.busy))
            else:
                jobs.append(job)
        for job, task, outcome in run_jobs(jobs, AT_ONCE, self._clock):
            yield record(task, job, outcome)

    def _frameworks(self) -> Iterator[dict[str, Any]]:
        """Run PyTorch on every device, or once on the processor; then the parts for one device or for all together."""
        built = self._torch.values.get("cuda") is not None and self._torch.skipped is None
        idle = self._idle if built else []
        where = idle[0].uuid or idle[0].component if idle else None
        least = self._settings.get("compile_min_capability")
        alone = (
            Task("frameworks.compile", frameworks.compiled, (where, least), 420),
            Task("frameworks.dataloader", frameworks.dataloader, (where,), 180),
        )
        reason = self._no_torch(built)
        if reason is not None:
            groups = (Task("frameworks.p2p", copies.peer_access), Task("frameworks.collective", nccl.rank))
            job = Job((*tasks_of(ON_EACH, None), *alone, *groups))
            for task in job.tasks:
                yield record(task, job, Outcome(0.0, skipped=reason))
        else:
            jobs = [
                Job(
                    tasks_of(ON_EACH, device.uuid or device.component),
                    device.component,
                    device.identity,
                    device.environment,
                )
                for device in idle
            ] or [Job(tasks_of(ON_EACH, None))]
            for job, task, outcome in run_jobs(jobs, AT_ONCE, self._clock):
                yield record(task, job, outcome)
            first = idle[0] if idle else None
            # Each in a process of its own: workers are not forked from one in which CUDA runs.
            pair = [Job((task,), environment=first.environment if first else {}) for task in alone]
            for job, task, outcome in run_jobs(pair, 1, self._clock):
                if task.run is frameworks.compiled and outcome.values:
                    # The next process of a user finds what this one left in the cache.
                    again = [each.values.get("compile_seconds") for _, _, each in run_jobs([job], 1, self._clock)]
                    outcome.values["cached_seconds"] = again[0]
                yield record(task, job, outcome)
            yield from self._together([device for device in idle if device.mig is None], on_gpus=bool(idle))
        others = (
            Task("frameworks.tensorflow", tf.run, (), 300),
            Task("frameworks.tensorflow-training", tf.training, (), 420),
            Task("frameworks.dali", frameworks.dali, (), 180),
        )
        for task in others:
            if self._present and not self._idle:
                # They would use any GPU that they find.
                yield record(task, Job(()), Outcome(0.0, skipped=self._none_idle()))
            else:
                yield from self._node(task, self._all())

    def _measurements(self, requested: set[str]) -> Iterator[dict[str, Any]]:
        built = self._torch.values.get("cuda") is not None and self._torch.skipped is None
        yield from Measurements(
            devices=self._idle if built else [],
            idle=self._idle,
            environment=self._all(),
            settings=self._settings,
            clock=self._clock,
            folder=self._folder,
            no_torch=self._no_torch(built),
            progress=self._progress,
        ).records(requested)

    def _no_torch(self, built: bool) -> str | None:
        """Return why no part of PyTorch is run; None if they are."""
        if self._torch.skipped is not None:
            return self._torch.skipped
        fell = self._torch.undetermined or self._torch.error
        if fell is not None:
            return f"PyTorch did not run (record versions.torch): {fell}"
        return self._none_idle() if built and not self._idle else None

    def _none_idle(self) -> str:
        """Return why nothing is started on any GPU."""
        if self._devices:
            return f"no GPU is idle any more: {self._devices[0].busy}"
        return NO_DEVICE

    def _together(self, whole: list[CudaDevice], *, on_gpus: bool) -> Iterator[dict[str, Any]]:
        """Run copies between GPUs, and an all-reduce over all of them; by Gloo on a processor."""
        job = Job((), environment=self._all() if on_gpus else {})
        peer = Task("frameworks.p2p", copies.peer_access, ([device.uuid or "" for device in whole],), 240)
        reduce = Task("frameworks.collective", nccl.rank, (), nccl.WAIT_S + 120)
        if on_gpus and len(whole) < 2:
            reason = "MIG devices do not talk to each other" if not whole else "only one GPU"
            for task in (peer, reduce):
                yield record(task, job, Outcome(0.0, skipped=reason))
            return
        if on_gpus:
            yield from self._node(peer, job.environment)
        else:
            yield record(peer, job, Outcome(0.0, skipped="no GPUs to copy between"))
        yield record(reduce, job, self._reduced(reduce, len(whole) if on_gpus else 2, job.environment, on_gpus=on_gpus))

    def _reduced(self, task: Task, size: int, environment: dict[str, str], *, on_gpus: bool) -> Outcome:
        backend = "nccl" if on_gpus else "gloo"
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-", dir=self._folder))
            except OSError as err:
                return Outcome(0.0, undetermined=f"no folder for the ranks to meet in: {err}")
            jobs = [
                Job(
                    (Task(task.name, nccl.rank, (number, size, folder, backend), task.limit_s),),
                    str(number),
                    environment=environment,
                )
                for number in range(size)
            ]
            outcomes = {job.component: outcome for job, _, outcome in run_jobs(jobs, size, self._clock)}
        return nccl.together([outcomes[str(number)] for number in range(size)], backend, size)


def tasks_of(parts: Iterable[tuple[str, Callable[..., dict[str, Any]], float]], where: str | None) -> tuple[Task, ...]:
    """Return the parts for one device, None for the processor."""
    return tuple(Task(name, run, (where,), limit_s) for name, run, limit_s in parts)
