"""Results for measured figures: gpunode's limits, the rules of site and baseline, and the messages."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpunode.catalog import load
from gpunode.checks.registry import CheckResult, Expectation, FigureReport, Status
from gpunode.checks.thresholds import Threshold
from gpunode.expectations import Assessment, Figure, MarkRules, Shape, assess, unit_of

GROSS = Threshold(
    "performance.gross",
    0.4,
    "of the physical limit",
    "A lower figure is a failure on every model, even without a published reference.",
    source="our choice: the lowest share that is published of a healthy machine is 0.62 (gpu-fryer, GB200)",
    most=1,
)
DROP_WARNS = Threshold(
    "performance.drop.warns",
    0.05,
    "of the baseline",
    "A figure that is lower than the baseline's by more warns.",
    source="our choice, between 3.5 % (Azure ai-infrastructure-on-azure, a warning) and 5 to 10 % (CSCS)",
    most=1,
)
DROP_FAILS = Threshold(
    "performance.drop.fails",
    0.10,
    "of the baseline",
    "A figure that is lower than the baseline's by more is a failure.",
    source="our choice, between 7 % (Azure ai-infrastructure-on-azure, a failure) and 10 % (CSCS)",
    most=1,
)
OF_FIGURES = (GROSS, DROP_WARNS, DROP_FAILS)
"""The thresholds of every check of figures."""
STATUS = {"good": Status.PASS, "low": Status.WARN, "bad": Status.FAIL, "unknown": Status.SKIP}
NO_MARK = "nothing to compare with: the catalog has no mark for it on this machine, and the site file has none"
SITE = "site file (figures)"


def rules_of(expect: Expectation, figure: Figure, component: str) -> MarkRules:
    """Return the rules that apply to a figure of a component in addition to the catalog."""
    baseline = expect.baseline
    key = (figure.metric, component, _whole(figure.message_bytes))
    return MarkRules(
        site=expect.figures or {},
        site_origin=SITE,
        baseline=None if baseline is None else baseline.figures.get(key),
        baseline_origin="" if baseline is None else f"baseline {baseline.origin}",
        drop_warns=DROP_WARNS.value,
        drop_fails=DROP_FAILS.value,
        gross=GROSS.value,
        gross_origin=f"{GROSS.name}: {GROSS.value:g} {GROSS.unit}",
    )


def judged(figure: Figure, shape: Shape, expect: Expectation, component: str, label: str = "") -> CheckResult:
    """Return the result for a figure. ``label`` precedes it in the message; default: the metric's name."""
    assessment = assess(figure, shape, load(), rules_of(expect, figure, component))
    return verdict_of(assessment, label).at(component)


def verdict_of(assessment: Assessment, label: str = "") -> CheckResult:
    """Return an assessment as a result."""
    name = label or words(assessment.figure.metric)
    message = f"{name}: {assessment}"
    return CheckResult(
        STATUS[assessment.grade],
        message if assessment.mark is not None else f"{message}; {NO_MARK}",
        expected=None if assessment.mark is None else round(assessment.mark.value, 3),
        measured=round(assessment.figure.value, 3),
        unit=unit_of(assessment.figure.metric),
        source=assessment.origin,
        figure=FigureReport(
            metric=assessment.figure.metric,
            limit=None if assessment.limit is None else round(assessment.limit.value, 3),
            limit_of=None if assessment.limit is None else assessment.limit.what,
            ratio=None if assessment.ratio is None else round(assessment.ratio, 4),
            baseline=None if assessment.baseline is None else round(assessment.baseline, 3),
            message_bytes=_whole(assessment.figure.message_bytes),
        ),
    )


def _whole(size: float | None) -> int | None:
    return None if size is None else int(size)


def words(metric: str) -> str:
    """Return a metric's name for messages: ``host to device``, ``all_reduce bus bandwidth``, ``bf16 products``."""
    if metric.endswith("_busbw"):
        return f"{metric.removesuffix('_busbw')} bus bandwidth"
    if metric.startswith("gemm_"):
        return f"{metric.removeprefix('gemm_')} products"
    return metric.replace("_", " ")


def worst_of(verdicts: Iterable[CheckResult], **changes: Any) -> list[CheckResult]:
    """Return the results that neither pass nor lack a mark; if there are none, the result of the lowest figure.

    For figures of many pairs: one line for sixty healthy ones.
    """
    all_verdicts = list(verdicts)
    bad = [verdict for verdict in all_verdicts if verdict.status not in (Status.PASS, Status.SKIP)]
    if bad or not all_verdicts:
        return bad
    least = min(all_verdicts, key=lambda verdict: (verdict.status is Status.SKIP, _number(verdict.measured)))
    return [replace(least, **changes)]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
