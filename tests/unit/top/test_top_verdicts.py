"""Verdicts over windows of samples: a load for each, a seeded sweep of loads, and what is never concluded."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from effort import effort

from gpunode.top.samples import GpuSample, GpuWindow, PcieSample, VerdictKind, gpu_verdict, verdicts

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
