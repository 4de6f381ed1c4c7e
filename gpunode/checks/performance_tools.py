"""Checks on the output of external programs (nvbandwidth, nccl-tests, dcgmi diag), and on storage."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from gpunode.checks.compare import failed, passed, undetermined, warned
from gpunode.checks.measurements import OF_FIGURES, MeasuredNode, judged, measurement_check, worst_of
from gpunode.checks.registry import CheckResult, Status, Undetermined
from gpunode.expectations import Figure, tools
from gpunode.facts.errors import ParseError
from gpunode.facts.models.measured import FioValues, LoaderValues, ToolValues
from gpunode.facts.models.outputs import DcgmDiag
from gpunode.facts.models.smi import DocumentT, Failure
from gpunode.facts.parsers import dcgm_diag, nccl_tests, nvbandwidth
from gpunode.text import counted, listed

LINKS = "See the link checks of performance.host-copy and performance.peer-copy; nvidia-smi topo -m shows the path."


def answer_of(values: ToolValues, parse: Callable[[str], DocumentT | Failure]) -> DocumentT:
    """Return a program's parsed output; raise Undetermined if it cannot be parsed."""
    name = PurePosixPath(values.program).name
    ended = _ended(values)
    try:
        answer = parse(values.stdout)
    except ParseError as err:
        message = next((line.strip() for line in values.stderr.splitlines() if line.strip()), "")
        cut = "; only the beginning was kept" if values.cut else ""
        reason = f"{ended}: {message[:200] or err}" if ended else str(err)
        raise Undetermined(f"{name}: {reason}{cut}") from None
    if isinstance(answer, Failure):
        raise Undetermined(f"{name}: {answer.error.message}")
    return answer


def _ended(values: ToolValues) -> str | None:
    """Return how a program that did not succeed ended; None for one that did."""
    if values.exit_code < 0:
        return f"was ended by signal {-values.exit_code}"
    return f"ended with status {values.exit_code}" if values.exit_code else None


def _whole_run(values: ToolValues, verdicts: Iterable[CheckResult]) -> Iterator[CheckResult]:
    """Yield the results, and one more if they pass although the program failed."""
    good = True
    for verdict in verdicts:
        good = good and verdict.status in (Status.PASS, Status.SKIP)
        yield verdict
    ended = _ended(values)
    if good and ended is not None:
        text = f"{PurePosixPath(values.program).name} {ended}: what it printed may not be all"
        yield undetermined(text, expected=0, measured=values.exit_code)


def _name(figure: Figure) -> str:
    """Return the component of a figure: ``gpu0``, ``gpu0-gpu1``."""
    if figure.metric.endswith("_busbw"):
        return "node"
    first = f"gpu{figure.where.gpu}"
    return first if figure.where.peer is None else f"{first}-gpu{figure.where.peer}"


def _verdicts(readings: Iterator[Figure | tools.ToolTrouble], run: MeasuredNode) -> Iterator[CheckResult]:
    figures: list[CheckResult] = []
    for reading in readings:
        if isinstance(reading, tools.ToolTrouble):
            yield CheckResult(Status.FAIL if reading.grade == "bad" else Status.ERROR, reading.message)
        else:
            name = _name(reading)
            label = "" if reading.metric.endswith("_busbw") else f"{name} {reading.metric.replace('_', ' ')}"
            figures.append(judged(reading, run.shape, run.expect, name, label=label))
    by_metric: dict[str, list[CheckResult]] = {}
    for verdict in figures:
        by_metric.setdefault(verdict.figure.metric if verdict.figure else "", []).append(verdict)
    for verdicts in by_metric.values():
        yield from worst_of(verdicts)


@measurement_check(
    "performance.nvbandwidth",
    ("tools.nvbandwidth",),
    ToolValues,
    level="deep",
    means="nvbandwidth's copies between host and GPUs and between GPUs reach the bandwidth of their links, and "
    "none of its tests fails. GPU numbers are those of CUDA.",
    remedy=LINKS,
    state="observe",
    actions=("fix_configuration", "open_support_case"),
    thresholds=OF_FIGURES,
    category="pcie",
    scope="link",
)
def by_nvbandwidth(values: ToolValues, run: MeasuredNode) -> Iterator[CheckResult]:
    verdicts = list(_verdicts(tools.of_nvbandwidth(answer_of(values, nvbandwidth.parse)), run))
    yield from _whole_run(values, verdicts)
    if not verdicts:
        raise Undetermined("nvbandwidth printed no figure between host and GPU or between GPUs")


@measurement_check(
    "performance.nccl-tests",
    ("tools.nccl-tests",),
    ToolValues,
    level="deep",
    means="nccl-tests finish with correct values, on several GPUs, and reach the bus bandwidth that the links "
    "of these GPUs allow.",
    remedy="See performance.collectives; 'wrong' values are a fault of a GPU or link: see performance.bad-links.",
    state="drain",
    actions=("fix_configuration", "run_role:nvidia_fabric", "reset_gpu", "open_support_case"),
    thresholds=OF_FIGURES,
    category="nvlink",
)
def by_nccl_tests(values: ToolValues, run: MeasuredNode) -> Iterator[CheckResult]:
    answer = answer_of(values, nccl_tests.parse)
    if values.cut:
        raise Undetermined("the output is too long for the record: only its beginning was kept")
    program = PurePosixPath(values.program).name.removesuffix("_mpi").removesuffix("_perf")
    yield from _whole_run(values, _verdicts(tools.of_nccl_tests(answer, program), run))


OF_DIAG = {"pass": Status.PASS, "fail": Status.FAIL, "warn": Status.WARN, "skip": Status.SKIP, "error": Status.ERROR}


@measurement_check(
    "performance.diagnostics",
    ("tools.dcgm-diag",),
    ToolValues,
    level="deep",
    means="dcgmi diag (DCGM 2, 3 or 4) finds no fault on any GPU.",
    remedy="The message is DCGM's own. Its 'Deployment' tests are about settings and processes; the others are about "
    "the GPU: reset it, then open a support case with the output of dcgmi diag -r 3.",
    state="drain",
    actions=("fix_configuration", "run_role:dcgm", *("reset_gpu", "open_support_case", "replace_hardware")),
    scope="gpu",
)
def diagnostics(values: ToolValues) -> Iterator[CheckResult]:
    yield from _whole_run(values, of_diag(answer_of(values, dcgm_diag.parse)))


def of_diag(answer: DcgmDiag) -> Iterator[CheckResult]:
    """Yield the failures of ``dcgmi diag``, one result for each GPU and test; else one result that all passed."""
    version = f"DCGM {answer.dcgm_version}" if answer.dcgm_version else "dcgmi diag"
    failures: list[CheckResult] = []
    for test in answer.tests:
        by_gpu = [gpu for gpu in test.gpus if gpu.status in ("fail", "warn", "error")]
        for gpu in by_gpu:
            failures.append(_of_diag(test.name, gpu.status, gpu.messages or test.messages, f"gpu{gpu.gpu}"))
        if not by_gpu and test.status in ("fail", "warn", "error"):
            failures.append(_of_diag(test.name, test.status, test.messages, "node"))
    yield from failures
    if failures:
        return
    status = OF_DIAG[answer.overall]
    ran = [test.name for test in answer.tests if test.status == "pass"]
    text = f"{version}: {counted(len(ran), 'test')} passed" if ran else f"{version}: no test was run"
    yield CheckResult(status, text, expected="pass", measured=answer.overall)


def _of_diag(name: str | None, status: str, messages: Sequence[str], component: str) -> CheckResult:
    details = f": {listed(messages, most=2)}" if messages else ""
    text = f"{name or 'dcgmi diag'} {status}{details}"
    return CheckResult(OF_DIAG[status], text, component, expected="pass", measured=status)


@measurement_check(
    "performance.storage",
    ("storage.fio",),
    FioValues,
    level="deep",
    on_gpu=False,
    means="Reading and writing in the given directory without the page cache works, and reaches the figures of "
    "the site file (storage_read, storage_write, storage_randread, storage_randwrite) or of the baseline.",
    remedy="host.nvme and host.disk-space; a network file system: its mount options and its link's rate.",
    state="observe",
    actions=("fix_configuration",),
    thresholds=OF_FIGURES,
    category="host",
)
def storage(values: FioValues, run: MeasuredNode) -> Iterator[CheckResult]:
    if not values.jobs:
        raise Undetermined(f"{values.directory}: fio recorded no job")
    if not values.direct:
        text = f"{values.directory}: direct I/O is not possible there, the figures are those of the page cache"
        yield warned(text)
        return
    for job in values.jobs:
        label = f"{values.directory} {job.pattern}"
        if job.bandwidth_gb_per_s == 0:
            yield failed(f"{label}: nothing was transferred", measured=0.0, unit="GB/s")
        else:
            name = f"storage {values.directory}"
            verdict = judged(
                Figure(f"storage_{job.pattern}", job.bandwidth_gb_per_s), run.shape, run.expect, name, label
            )
            if values.fio_version is None and verdict.status is Status.FAIL:
                # Our own reader and writer reaches less than fio on fast disks.
                text = f"{verdict.message}; measured without fio, which the image lacks"
                verdict = replace(verdict, status=Status.WARN, message=text)
            yield verdict if verdict.status is not Status.SKIP else _measured(verdict, f"{job.iops:.0f} IOPS")


def _measured(verdict: CheckResult, rest: str) -> CheckResult:
    """Return the result for storage that works and has no expected figures."""
    text = f"{verdict.message.partition(';')[0]}, {rest}; the site file has no minimum"
    return passed(
        text, component=verdict.component, measured=verdict.measured, unit=verdict.unit, figure=verdict.figure
    )


@measurement_check(
    "performance.dataloader",
    ("storage.dataloader",),
    LoaderValues,
    level="deep",
    on_gpu=False,
    means="A DataLoader reads samples from the directory; the sufficient number of workers is reported.",
    remedy="More workers than the processor has cores help nothing: host.cpus-online, docker run --cpus.",
    state="observe",
    actions=("fix_configuration",),
    category="host",
)
def dataloader(values: LoaderValues) -> Iterator[CheckResult]:
    best = max(values.rows, key=lambda row: row.samples_per_second, default=None)
    if best is None:
        raise Undetermined("no number of workers was tried")
    text = (
        f"{best.samples_per_second:.0f} samples/s ({best.gb_per_s:.3g} GB/s) with {best.workers} workers; "
        f"num_workers={values.advised_workers} is enough"
    )
    status = Status.PASS
    if values.advised_workers > values.cpus:
        status, text = Status.WARN, f"{text}, and the container has {counted(values.cpus, 'processor')}"
    yield CheckResult(status, text, measured=round(best.samples_per_second, 1), unit="samples/s")
