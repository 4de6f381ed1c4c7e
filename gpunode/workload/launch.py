"""One run of the payload on one node, and its records. A failure of the node is a record, never an exception."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpunode.facts import NodeFacts
from gpunode.facts.models.smi import SmiGpu
from gpunode.facts.models.workload import Record, RecordContainer
from gpunode.onnode import program_text
from gpunode.workload import container, devices, engine
from gpunode.workload.causes import REGENERATE
from gpunode.workload.container import KIND, Confinement, ContainerJob, Devices, PythonProgram
from gpunode.workload.devices import Use
from gpunode.workload.engine import Engine
from gpunode.workload.image import Image, ImageFile, provide
from gpunode.workload.output import DEFAULTS, LAUNCHERS, BoundedOutput
from gpunode.workload.payload import LIMITS, MAIN, payload_zip
from gpunode.workload.transport import LaunchFailure, Transport

TESTS = {
    "standard": "versions,gpus,frameworks,copy,gemm,nccl",
    "deep": "versions,gpus,frameworks,copy,gemm,nccl,memory,steps,ddp,storage,input,tools,burn",
}
"""What the payload runs at each level."""
_END_S = 10.0
"""Seconds between the payload's limit and the node's: for the end of its processes and of the container."""
STOP_S = 4.0
"""Seconds between the payload's own limit and the watchdog's: for ending a part that hangs, and the last records."""
_LEAST_S = 8.0
DEFAULTS_S = 20.0
"""Seconds for a container that reads its own limits."""
_START_S = 60.0
"""Seconds for creating and removing it: an engine may copy the image for that."""

# Python reads its own text and the payload by their lengths, and leaves stdin open behind them.
START = """\
import sys
if sys.version_info < (3, 8):
    sys.exit("python3 is %d.%d, 3.8 or later is needed" % sys.version_info[:2])
text, payload = (sys.stdin.buffer.read(int(length)) for length in sys.argv[1:3])
names = {"__name__": "watchdog"}
exec(text, names)
names["watch"](payload, sys.argv[4:], float(sys.argv[3]))
"""


@dataclass(frozen=True)
class WorkloadRequest:
    """What is to be run, the same for all nodes."""

    image: Callable[[NodeFacts], str]
    """Returns the image for a node; it may raise LaunchFailure."""
    named: bool = False
    """The user named the image: it is tried on a node without a GPU too."""
    file: ImageFile | None = None
    in_container: bool = True
    python: str | None = None
    """The nodes' Python of a run on the host; None: that of the probe."""
    force: bool = False
    """Use busy GPUs too."""
    image_limit_s: float = 1800.0
    """Seconds for the image: pulling or loading, and extraction."""
    run_limit_s: float = 900.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the payload."""
    level: Literal["standard", "deep"] = "standard"
    storage: str | None = None
    """A directory of the node for measuring its storage; with ``data`` all that the container gets of the node."""
    data: str | None = None
    """A directory of the node with the user's files: read, never written."""
    model_rate: float | None = None
    """Samples per second that a GPU uses."""
    burn_s: float | None = None
    """Seconds of the sustained load; None: the payload's default."""


@dataclass
class _Run:
    """The state of a run so far, for its record."""

    node: NodeFacts
    started: float = field(default_factory=time.monotonic)
    use: Use = field(default_factory=Use)
    values: dict[str, Any] = field(default_factory=dict)
    container: RecordContainer | None = None
    output: BoundedOutput = field(default_factory=BoundedOutput)
    defaults: Record | None = None


def launch(
    transport: Transport, node: NodeFacts, request: WorkloadRequest, deadline: float, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run the payload; return its records, with the launcher's own, ``container``, as the last.

    ``deadline`` is a time.monotonic() value; ``progress`` gets one line for each step.
    """
    run = _Run(node, output=BoundedOutput(progress))
    run.values["level"] = request.level
    kind, error = "done", None
    try:
        run.use = devices.choose(node, force=request.force, without=request.named or not request.in_container)
        if request.in_container:
            run.use = devices.without_empty_mig(run.use, node)
        if run.use.skipped is not None:
            kind = "busy" if run.use.busy else "skipped"
        elif request.in_container:
            _in_container(run, transport, request, deadline, progress)
        else:
            _on_host(run, transport, request, deadline)
    except LaunchFailure as err:
        kind, error = err.kind, str(err)
    return _records(run, kind, error)


def failed(reason: str, level: str) -> list[dict[str, Any]]:
    """Return the records of a run that was lost; a saved bundle is judged at its level again.

    They do not have ``simulated``: the bundle that they are added to knows.
    """
    unknown = NodeFacts(host="", collected_at="", simulated=False)
    (record,) = _records(_Run(unknown, values={"level": level}), "unknown", reason)
    del record["simulated"]
    return [record]


def _in_container(
    run: _Run, transport: Transport, request: WorkloadRequest, deadline: float, progress: Callable[[str], None]
) -> None:
    name = request.image(run.node)
    run.container = RecordContainer(image=name)  # reported also if the engine refuses
    with engine.connected(transport, deadline) as node_engine:
        gpu_devices = devices_for(node_engine, run.use, run.node)
        run.container = RecordContainer(image=name, engine=node_engine.label, gpus=gpu_devices.recorded)
        run.values |= {"engine_version": node_engine.version, "api_version": node_engine.api_version}
        run.values["security"] = list(node_engine.security)
        run.values["removed_stale"] = len(container.sweep(node_engine))
        with node_engine.within(request.image_limit_s, "--image-timeout") as bringing:
            image = provide(bringing, name, request.file, progress)
        run.values |= {"image_id": image.id, "brought": image.brought}
        progress("running")
        ends = min(deadline, time.monotonic() + request.run_limit_s)
        limit_s = _limit(ends)
        job = ContainerJob(
            image,
            gpu_devices,
            _program(run, request, limit_s),
            limit_s,
            devices.open_to_all(run.node),
            storage=request.storage,
            data=request.data,
        )
        began = time.monotonic()
        confinement = container.run(replace(node_engine, deadline=ends), job, run.output)
        took_s = time.monotonic() - began
        run.output.judge(limit_s)
        run.defaults = _defaults(node_engine, image, confinement)
        _need_all(run.output, took_s, limit_s)


def _defaults(node_engine: Engine, image: Image, confinement: Confinement) -> Record:
    """Return the limits of a container without requested limits: those of a user's plain ``docker run`` here."""
    started, output = time.monotonic(), BoundedOutput()
    job = ContainerJob(image, Devices("none"), sent(LIMITS, DEFAULTS_S), DEFAULTS_S, plain=True)
    reason = None
    try:
        container.run(replace(node_engine, deadline=started + DEFAULTS_S + _START_S), job, output, confinement)
        output.judge(DEFAULTS_S)
    except LaunchFailure as err:
        reason = f"the engine's limits are unknown: {err}"
    values = output.records[0].get("values") if output.records else None
    return Record(
        record=DEFAULTS,
        device="cpu",
        seconds=round(time.monotonic() - started, 3),
        values=values if isinstance(values, dict) and reason is None else {},
        undetermined=reason,
    )


def devices_for(node_engine: Engine, use: Use, node: NodeFacts) -> Devices:
    """Return how to request the GPUs: by CDI if the engine looks for it and the node has a specification.

    Else by a device request, which NVIDIA's hook answers; in the toolkit's modes cdi and csv by the runtime. Raises
    LaunchFailure if the engine supports none of these, and if only some of the GPUs are requested by CDI and the
    specification lacks one of them.
    """
    if not use.indices:
        return Devices("none")
    described = any(spec.kind == KIND for spec in node.cdi_specs or ())
    if node_engine.podman:
        _need_podman_cdi(node_engine, described=described, known=node.cdi_specs is not None)
    by_cdi = node_engine.knows_cdi and (described or not node_engine.has_nvidia_runtime)
    mode = node.containers.toolkit_mode if node.containers else None
    how = "cdi" if by_cdi else "nvidia" if mode in ("cdi", "csv") and node_engine.has_nvidia_runtime else "runtime"
    if use.all:
        return Devices(how)
    by_name = by_cdi or (how == "nvidia" and mode == "cdi" and described)
    return Devices(
        how, devices.cdi_names(use, node) if by_name else tuple(device.id for device in devices.of_gpus(use, node))
    )


def _need_podman_cdi(podman: Engine, *, described: bool, known: bool) -> None:
    if not podman.knows_cdi:
        lowest = ".".join(map(str, engine.PODMAN_CDI))
        raise LaunchFailure(
            "no-gpu-support",
            f"{podman.name} serves Docker's socket and does not pass GPUs over Docker's API before Podman {lowest}: "
            "role docker, a newer Podman, or --no-container",
        )
    if known and not described:
        raise LaunchFailure(
            "no-gpu-support", f"{podman.name} passes GPUs only by CDI, and no specification has {KIND}: {REGENERATE}"
        )


def _on_host(run: _Run, transport: Transport, request: WorkloadRequest, deadline: float) -> None:
    deadline = min(deadline, time.monotonic() + request.run_limit_s)
    limit_s = _limit(deadline)
    program = _program(run, request, limit_s)
    start = program.code
    if not run.use.all:
        start = f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = {','.join(run.use.uuids)!r}\n{start}"
    began = time.monotonic()
    on_host(transport, replace(program, code=start), run.output, deadline, limit_s)
    run.defaults = Record(record=DEFAULTS, device="cpu", seconds=0.0, skipped="ran on the host itself, in no container")
    _need_all(run.output, time.monotonic() - began, limit_s)


def on_host(
    transport: Transport, program: PythonProgram, output: BoundedOutput, deadline: float, limit_s: float
) -> None:
    """Run a program with the node's own Python to its end. Raises LaunchFailure."""
    # Over SSH it passes a login shell, and csh does not support text of several lines.
    stream = transport.python(f"exec({program.code!r})", program.arguments)
    output.program = stream.sock
    try:
        container.converse(stream.sock, program.stdin, output.stdout, deadline)
    except OSError as err:
        if time.monotonic() >= deadline:
            raise LaunchFailure("time-limit", f"the payload did not end within {limit_s:.0f} s") from None
        raise LaunchFailure("broke-off", f"the payload's output ended early: {err}") from None
    finally:
        stream.sock.close()
        output.stderr(stream.complaint().encode())
        stream.close()
    output.judge(limit_s)


def _need_all(output: BoundedOutput, took_s: float, limit_s: float) -> None:
    """Raise LaunchFailure if the payload finished, but omitted parts for lack of time."""
    names = [str(record["record"]) for record in output.records if record.get("undetermined") is not None]
    if names and took_s >= limit_s - STOP_S:
        parts = f"{len(names)} part{'s' if len(names) > 1 else ''}"
        raise LaunchFailure(
            "time-limit",
            f"{limit_s - STOP_S:.0f} s were not enough for {parts} of the payload, {names[0]} the first "
            "(--workload-timeout S)",
        )


def _limit(deadline: float) -> float:
    limit_s = deadline - time.monotonic() - _END_S
    if limit_s < _LEAST_S:
        raise LaunchFailure("time-limit", "no time remained to run the payload (--workload-timeout S)")
    return limit_s


def _program(run: _Run, request: WorkloadRequest, limit_s: float) -> PythonProgram:
    settings = {
        **request.settings,
        # MiB in use when they were chosen: a GPU that shows more when the payload starts is used by another process.
        "gpus": {gpu.uuid: _in_use_mib(run.node, gpu) for gpu in _handed(run) if gpu.uuid},
        "force": request.force,
        "level": request.level,
        "storage": request.storage,
        "data": request.data,
        "model_rate": request.model_rate,
        "burn_s": request.burn_s,
        "user_site": not request.in_container,
    }
    words = ("--tests", TESTS[request.level], "--settings", json.dumps(settings), "--limit", f"{limit_s - STOP_S:.0f}")
    return sent(MAIN, limit_s, *words)


def sent(main: str, limit_s: float, *words: str) -> PythonProgram:
    """Return the payload as input of a container's Python, with the watchdog and its limit."""
    watchdog = program_text("watchdog").encode()
    payload = payload_zip(main)
    lengths = (str(len(watchdog)), str(len(payload)))
    return PythonProgram(START, (*lengths, f"{limit_s:.1f}", *words), watchdog + payload)


def _handed(run: _Run) -> list[SmiGpu]:
    return [gpu for gpu in run.node.smi_gpus if gpu.index in run.use.indices]


def _in_use_mib(node: NodeFacts, gpu: SmiGpu) -> int | None:
    """Return the MiB in use on a GPU; None if that does not indicate a process: the system keeps pages there too."""
    mode = gpu.addressing_mode
    if mode == "ATS" or (mode is None and node.architecture == "aarch64"):
        return None
    used = gpu.memory_used_mib
    return int(used) if used is not None else None


def _uuids(run: _Run) -> list[str]:
    """Return the UUIDs of a run's GPUs from the node's nvidia-smi; the payload compares them with its own."""
    return [gpu.uuid for gpu in _handed(run) if gpu.uuid]


def _records(run: _Run, kind: str, error: str | None) -> list[dict[str, Any]]:
    launcher = Record(
        record=LAUNCHERS,
        device="cuda" if run.use.indices else "cpu",
        seconds=round(time.monotonic() - run.started, 3),
        values={
            "complete": run.output.complete,
            "gpus": len(run.use.indices),
            "uuids": _uuids(run),
            "busy": list(run.use.busy),
            "kind": kind,
            "exit_code": run.output.exit_code,
            **run.values,
        },
        error=error,
        skipped=run.use.skipped if error is None else None,
    )
    common = {
        "container": run.container.model_dump(mode="json") if run.container else None,
        "simulated": run.node.simulated,
    }
    launchers = [launcher] if run.defaults is None else [run.defaults, launcher]
    records = (*run.output.records, *(record.model_dump(by_alias=True, mode="json") for record in launchers))
    return [{**record, **common} for record in records]
