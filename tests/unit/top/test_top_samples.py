"""Lines of a node's stream, real and hostile; verdicts over windows of samples, and what is never concluded."""

import json
import random
import string
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
from effort import effort

from gpunode.top import samples
from gpunode.top.samples import (
    GPU_FIELDS,
    GpuSample,
    GpuWindow,
    PcieSample,
    ProcessOwner,
    SampledGpu,
    VerdictKind,
    gpu_verdict,
    verdicts,
)

H100 = (
    "0, GPU-00000000-0000-0000-0000-000000000000, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, 100, 11, 70210, 81559, "
    "631.95, 700.00, 59, 1740, 1980, 0x0000000000000044, 5, 16, 0, 2"
)
"""The values of an H100 with driver 590 under load, in the order of the fields; slot and reasons are ours."""


def test_a_gpu() -> None:
    reading = samples.gpu_line(H100, 5.0)
    assert reading is not None
    identity, sample = reading
    assert identity == SampledGpu(0, "GPU-00000000-0000-0000-0000-000000000000", "0000:1b:00", "NVIDIA H100 80GB HBM3")
    assert (sample.at, sample.utilization_percent, sample.power_w, sample.power_limit_w) == (5.0, 100, 631.95, 700)
    assert (sample.memory_used_mib, sample.memory_total_mib, sample.temperature_c) == (70210, 81559, 59)
    assert (sample.sm_clock_mhz, sample.max_sm_clock_mhz) == (1740, 1980)
    assert sample.slowdowns == frozenset({"power-limit", "heat"})
    assert (sample.pcie_gen, sample.pcie_width, sample.corrected, sample.uncorrected) == (5, 16, 0, 2)
    assert not sample.lost


def test_the_fields_are_those_of_the_line() -> None:
    assert [len(fields.split(",")) for fields in GPU_FIELDS] == [len(H100.split(","))] * 2
    assert "clocks_throttle_reasons.active" in GPU_FIELDS[1]
    assert "clocks_event_reasons" not in GPU_FIELDS[1]


@pytest.mark.parametrize(
    "word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "", "nan", "inf", "1e9", "-3", "\u0663", "9" * 400]
)
def test_what_is_no_number_is_not_reported(word: str) -> None:
    identity, *rest = H100.split(", ", 4)[0], *H100.split(", ")[1:4]
    reading = samples.gpu_line(", ".join([identity, *rest, *[word] * 14]), 0.0)
    assert reading is not None
    assert reading[1] == samples.GpuSample(0.0)


def test_a_lost_gpu() -> None:
    reading = samples.gpu_line("3, GPU-x, 00000000:1B:00.0, NVIDIA H100" + ", [GPU is lost]" * 14, 0.0)
    assert reading is not None
    assert reading[1].lost


@pytest.mark.parametrize(
    ("group", "container", "job"),
    [
        (f"/system.slice/docker-{'a1' * 32}.scope", "a1a1a1a1a1a1", None),
        (f"/docker/{'b2' * 32}", "b2b2b2b2b2b2", None),
        (f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{'c3' * 32}.scope", "c3c3c3c3c3c3", None),
        (f"/kubepods/besteffort/pod7/{'d4' * 32}", "d4d4d4d4d4d4", None),
        ("/lxc.payload.train-1/user.slice", "train-1", None),
        ("/slurm/uid_1000/job_4711/step_0/task_0", None, "4711"),
        ("/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0", None, "42"),
        (f"/system.slice/slurmstepd.scope/job_42/step_0/docker-{'e5' * 32}.scope", "e5e5e5e5e5e5", "42"),
        ("/user.slice/user-1000.slice/session-3.scope", None, None),
    ],
)
def test_container_and_job_of_a_process(group: str, container: str | None, job: str | None) -> None:
    line = json.dumps({"pid": 7, "uid": 1000, "user": "ada", "name": "python3", "cgroup": group})
    assert samples.owner_line(line) == (7, ProcessOwner("ada", "python3", container, job))


def test_rates_processes_and_xids() -> None:
    assert samples.pcie_line("    0  21846   6849", 1.0) == (0, samples.PcieSample(1.0, 21.846, 6.849))
    for header in ("# gpu  rxpci  txpci", "# Idx   MB/s   MB/s", "    0      -      -", "0 1"):
        assert samples.pcie_line(header, 1.0) is None
    assert samples.app_line("GPU-x, 4711, 512") == ("GPU-x", 4711, 512)
    assert samples.app_line("GPU-x, 4711, [N/A]") == ("GPU-x", 4711, None)
    assert samples.app_line("No running processes found") is None
    line = (
        "<3>[  123.456789] NVRM: Xid (PCI:0000:1B:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    assert samples.xid_line(line) == ("0000:1b:00", 79)
    assert samples.xid_line(line.replace("] NVRM", "] python: NVRM")) is None


PARSERS = (
    lambda text: samples.gpu_line(text, 0.0),
    lambda text: samples.pcie_line(text, 0.0),
    samples.app_line,
    samples.xid_line,
    samples.owner_line,
    lambda text: samples.numbers_line(text, 3),
)
ALPHABET = string.printable + "\x1b\x9b\u202e\u0663\xe9\ud800\U0001f600"


def words_of(value: object) -> Iterator[str]:
    """Every text within a result."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from words_of(part)
    elif is_dataclass(value):
        yield from words_of(tuple(getattr(value, field.name) for field in fields(value)))


def test_damaged_lines_raise_nothing_and_print_safely() -> None:
    draw = random.Random(36)  # noqa: S311 (reproducible, not secret)
    whole = [
        H100,
        "GPU-x, 4711, 512",
        " 0 1 2",
        "<3>[ 1.5] NVRM: Xid (PCI:0000:1B:00): 79, x",
        json.dumps({"pid": 1, "user": "\x1b[2J", "name": "\u202ex", "cgroup": "/"}),
        "1,2,3",
        "[" * 1900,
    ]
    understood = 0
    for _ in range(effort(1500, 40000)):
        text = list(draw.choice(whole))
        for _ in range(draw.randint(0, 6)):
            index = draw.randrange(len(text) + 1)
            text[index : index + draw.randint(0, 3)] = draw.choices(ALPHABET, k=draw.randint(0, 5))
        for parse in PARSERS:
            reading = parse("".join(text))
            understood += reading is not None
            assert all(word.isprintable() and len(word) <= 64 for word in words_of(reading))
    assert understood > 200


WINDOW_S = 30.0
WORKING = GpuSample(
    0.0,
    97,
    40,
    60000,
    81559,
    640.0,
    700.0,
    62,
    1830,
    1980,
    frozenset(),
    pcie_gen=5,
    pcie_width=16,
    corrected=0,
    uncorrected=0,
)
JOB = frozenset({"slurm 41"})


def window(
    sample: GpuSample = WORKING, *, index: int = 0, seconds: float = 30, pcie: float = 0, **changes: object
) -> GpuWindow:
    """A GPU that reports the same for a time; ``pcie``: GB/s that it receives."""
    times = [float(second) for second in range(int(seconds) + 1)]
    samples = [replace(sample, at=at, **changes) for at in times]  # type: ignore[arg-type]
    rates = [PcieSample(at, pcie, 0.1) for at in times[::5]]
    return GpuWindow(index, samples, rates, JOB)


LOADS = {
    VerdictKind.GOOD: window(),
    VerdictKind.STARVING: window(utilization_percent=45),
    VerdictKind.THROTTLED: window(slowdowns=frozenset({"heat", "hardware-slowdown"})),
    VerdictKind.PCIE_BOUND: window(utilization_percent=45, pcie=48),
    VerdictKind.IDLE: window(utilization_percent=0, power_w=110.0),
    VerdictKind.STUCK: window(utilization_percent=100, memory_utilization_percent=0, power_w=128.0),
    VerdictKind.LOST: window(lost=True, utilization_percent=None, memory_used_mib=None),
    VerdictKind.FREE: replace(window(utilization_percent=0, memory_used_mib=4), owners=frozenset()),
    VerdictKind.UNKNOWN: window(utilization_percent=None),
}


@pytest.mark.parametrize("kind", LOADS, ids=lambda kind: kind.title)
def test_each_load_has_its_verdict(kind: VerdictKind) -> None:
    assert gpu_verdict(LOADS[kind], WINDOW_S).kind is kind


@pytest.mark.parametrize(("power_w", "kind"), [(133.0, VerdictKind.PCIE_BOUND), (500.0, VerdictKind.GOOD)])
def test_a_copy_from_the_host_is_utilization_at_low_power(power_w: float, kind: VerdictKind) -> None:
    """An H200 with 580.159.04 that only copies: 99 to 100 %, 133 of 700 W, 59 GB/s by Gen 5 x16."""
    copies = window(utilization_percent=100, memory_utilization_percent=0, power_w=power_w, pcie=59)
    assert gpu_verdict(copies, WINDOW_S).kind is kind


def test_every_verdict_has_a_load() -> None:
    assert set(VerdictKind) - set(LOADS) == {VerdictKind.HEAVIER}


@pytest.mark.parametrize("kind", [kind for kind in LOADS if kind.is_bad and kind is not VerdictKind.LOST])
def test_a_bad_verdict_is_no_verdict_before_half_the_window(kind: VerdictKind) -> None:
    short = replace(LOADS[kind], samples=LOADS[kind].samples[:10])
    assert gpu_verdict(short, WINDOW_S).kind is VerdictKind.UNKNOWN
    assert gpu_verdict(replace(LOADS[kind], samples=()), WINDOW_S).kind is VerdictKind.UNKNOWN


@pytest.mark.parametrize(
    ("held", "second", "kind"),
    [
        (20000, {}, VerdictKind.HEAVIER),
        (5000, {}, VerdictKind.HEAVIER),
        (900, {}, VerdictKind.GOOD),
        (4000, {}, VerdictKind.GOOD),  # under 5 % of 80 GiB
        (20000, {"owners": frozenset({"user other"})}, VerdictKind.GOOD),
    ],
)
def test_the_first_gpu_of_a_job_is_compared_with_its_siblings(
    held: int, second: dict[str, frozenset[str]], kind: VerdictKind
) -> None:
    first = window(memory_used_mib=40000 + held, index=2)
    others = [replace(window(memory_used_mib=40000, index=index), **second) for index in (3, 4)]  # type: ignore[arg-type]
    alone = replace(window(index=0), owners=frozenset({"user first"}))
    assert [verdict.kind for verdict in verdicts([alone, first, *others], WINDOW_S)] == [
        VerdictKind.GOOD,
        kind,
        VerdictKind.GOOD,
        VerdictKind.GOOD,
    ]


def test_a_later_gpu_that_is_heavier_is_not_the_first() -> None:
    windows = [window(index=0), window(index=1, memory_used_mib=80000)]
    assert {verdict.kind for verdict in verdicts(windows, WINDOW_S)} == {VerdictKind.GOOD}


def generated(number: int) -> Iterator[tuple[random.Random, GpuWindow]]:
    """Windows of noisy loads, with values missing at random."""
    for seed in range(number):
        draw = random.Random(seed)  # noqa: S311 (reproducible, not secret)
        level, noise, power = draw.uniform(0, 100), draw.choice([0, 3, 30]), draw.uniform(0.05, 1.1)
        slow, missing = draw.choice([0, 0, 0.1, 0.5]), draw.choice([0, 0, 0.2, 1])
        samples = []
        for second in range(draw.randint(0, 60)):
            load = min(100.0, max(0.0, draw.gauss(level, noise)))
            samples.append(
                replace(
                    WORKING,
                    at=float(second),
                    utilization_percent=None if draw.random() < missing else load,
                    power_w=None if draw.random() < missing else 700 * power,
                    memory_used_mib=draw.choice([None, 4, 60000]),
                    slowdowns=frozenset({"heat"}) if draw.random() < slow else frozenset({"power-limit"}),
                    pcie_gen=draw.choice([None, 1, 5, 9]),
                    lost=draw.random() < 0.005,
                )
            )
        rates = [PcieSample(float(at), draw.uniform(0, 70), draw.uniform(0, 70)) for at in range(draw.randint(0, 9))]
        yield draw, GpuWindow(0, samples, rates, draw.choice([frozenset(), JOB]))


def test_noisy_loads_never_contradict_their_verdict() -> None:
    seen = set()
    for _, window in generated(effort(1500, 50000)):
        verdict = gpu_verdict(window, WINDOW_S)
        seen.add(verdict.kind)
        loads = [sample.utilization_percent for sample in window.samples if sample.utilization_percent is not None]
        mean = sum(loads) / len(loads) if loads else None
        if verdict.kind is VerdictKind.STARVING:
            assert mean is not None
            assert mean < 70
        elif verdict.kind is VerdictKind.PCIE_BOUND:
            assert mean is not None
            shares = [
                sample.power_w / sample.power_limit_w
                for sample in window.samples
                if sample.power_w and sample.power_limit_w
            ]
            assert mean < 80 or max(shares) <= 0.35
            assert len(window.pcie) >= 2
        elif verdict.kind is VerdictKind.STUCK:
            assert min(loads) >= 99
        elif verdict.kind in (VerdictKind.IDLE, VerdictKind.FREE):
            assert max(loads) <= 5
        elif verdict.kind is VerdictKind.GOOD:
            assert mean is not None
            assert mean >= 70
        elif verdict.kind is VerdictKind.THROTTLED:
            assert any("heat" in (sample.slowdowns or ()) for sample in window.samples)
    assert seen >= set(VerdictKind) - {VerdictKind.HEAVIER, VerdictKind.STUCK}
