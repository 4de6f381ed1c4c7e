"""Checks, their findings, and the registry of all checks."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from inspect import signature
from math import inf
from typing import Any, ClassVar, Literal, Self, TypeVar, cast, get_args

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from gpunode.checks.actions import PROVISION, Action, State, Step, action, command
from gpunode.checks.own_process import Escaped, contained
from gpunode.checks.thresholds import NO_POLICY, Policy, Threshold, in_force, overridden
from gpunode.expectations import METRICS, is_metric
from gpunode.facts import NodeFacts
from gpunode.facts.node import MAY_BE_NONE, NEEDS_ROOT
from gpunode.frozen import Frozen, invalid_field

Value = bool | int | float | str | None
Level = Literal["quick", "standard", "deep"]
LEVELS: tuple[Level, ...] = ("quick", "standard", "deep")
Category = Literal["gpu", "memory", "nvlink", "fabric", "pcie", "network", "host", "driver", "container"]
NOT_RUN = "not run:"
"""Prefix of the message of a check that was not run because the time was used up."""
CATEGORIES: tuple[Category, ...] = get_args(Category)
OF_PREFIX: dict[str, Category] = {
    "container": "container",
    "dcgm": "driver",
    "driver": "driver",
    "fabric": "fabric",
    "framework": "container",
    "gpu": "gpu",
    "host": "host",
    "library": "driver",
    "link": "pcie",
    "node": "host",
    "nodes": "fabric",
    "nvlink": "nvlink",
    "nvswitch": "fabric",
    "performance": "gpu",
    "rdma": "network",
    "slurm": "host",
}
"""Default category of a check by the first part of its id."""
Scope = Literal["node", "gpu", "link", "fleet"]


class Status(StrEnum):
    """Status of a finding, a node, a report.

    ``note``: worth knowing, nothing to repair; never the status of a node or a report. ``skip``: does not apply.
    ``error``: could not be determined.
    """

    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    ERROR = "error"
    NOTE = "note"


class FigureReport(Frozen):
    """The comparison of a measured figure; the finding has the figure, the expected value and its origin."""

    metric: str
    """``host_to_device``, ``gemm_bf16``, ``all_reduce_busbw``: the key of the site file's ``figures``."""
    limit: float | None = None
    """The physical limit, in the finding's unit; None: unknown for this machine."""
    limit_of: str | None = None
    """The component with that limit: ``PCIe 5.0 x16 without packet headers``."""
    ratio: float | None = None
    """Measured by limit."""
    baseline: float | None = None
    """The same figure in the report of ``--baseline``, in the finding's unit; None: there is none."""
    message_bytes: int | None = None
    """Size of one copy or message; None: the figure has no size."""


class Finding(Frozen):
    """One result for one component (``node``, ``gpu3``, ``nvlink 3/5``, ``kernel 6.1.0-42-amd64`` …)."""

    check: str
    status: Status
    component: str
    message: str
    expected: Value = None
    measured: Value = None
    unit: str | None = None
    source: str | None = None
    figure: FigureReport | None = None
    """Set for measurements."""
    remedy: str | None = None
    actions: tuple[Action, ...] = ()
    """Steps of the remedy, in this order, as data."""
    recommended_state: State = State.NONE
    """Recommended state of the node, by this finding alone."""
    observed: str | None = None
    """Why it does not count: the policy's reason. None: it counts."""


@dataclass(frozen=True)
class Baseline:
    """The figures of an earlier report on the same node."""

    origin: str
    """Its file and time."""
    figures: Mapping[tuple[str, str, int | None], float]
    """By metric, component and message size: another size has another figure."""


@dataclass(frozen=True)
class EarlierGpus:
    """The GPUs on the bus of the node's previous run."""

    origin: str
    """The run and its time: ``run 17 of 2026-11-20T08:00:00Z``."""
    number: int
    model: str | None = None
    """Catalog id of their model; None: several, or unknown."""


class Allowed(Frozen):
    """A value that nodes may have in place of the expected one, until a day."""

    key: Literal["gpus", "model", "driver", "kernel", "packages", "mig", "nics", "nic_rate_gbit_per_s", "nic_firmware"]
    value: bool | int | float | str | list[str] | dict[str, str]
    reason: str = Field(pattern=r"\S")
    until: date
    """The last day."""

    @property
    def words(self) -> str:
        """Return the value for a message."""
        if isinstance(self.value, dict):
            return ", ".join(f"{name} {version}" for name, version in self.value.items())
        return ", ".join(self.value) if isinstance(self.value, list) else str(self.value)


class Expectation(Frozen):
    """The expected state of a site's nodes (``--expect FILE``). None: not specified."""

    gpus: int | None = Field(None, ge=0)
    """GPUs on the bus; 0: the node is expected to have none."""
    model: str | None = None
    """Model of all GPUs, as a user types it: ``H100 SXM``, ``l40s``, ``NVIDIA H200``, ``10de:2330``."""
    driver: str | None = Field(None, pattern=r"^\d{3,4}(\.\d+){0,2}$")
    """The loaded driver, as precisely as required: ``580`` or ``580.95.05``."""
    kernel: str | None = Field(None, pattern=r"^\d[\w.+~-]*$")
    """The running kernel, as precisely as required: ``6.8`` or ``6.8.0-60-generic``."""
    packages: dict[str, str] | None = Field(None, min_length=1)
    """Versions of installed packages by name, as the package manager prints them: ``libnccl2: 2.27.3-1+cuda12.9``."""
    mig: bool | None = None
    """MIG mode of all GPUs."""
    nics: int | None = Field(None, ge=0)
    """InfiniBand and RoCE ports that must be active."""
    nic_rate_gbit_per_s: float | None = Field(None, gt=0)
    """The minimum rate of each of them."""
    nic_firmware: list[str] | None = Field(None, min_length=1)
    """Firmware versions that their adapters may have."""
    figures: dict[str, float] | None = Field(None, min_length=1)
    """Minimum values of measurements by metric (``host_to_device: 50``); they replace the catalog's."""
    allowed: list[Allowed] | None = Field(None, min_length=1)
    """Deviations with a reason and an end: a node with such a value does not fail."""
    _baseline: Baseline | None = PrivateAttr(None)
    _earlier_gpus: EarlierGpus | None = PrivateAttr(None)

    @field_validator("figures")
    @classmethod
    def _known(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, least in (value or {}).items():
            if not is_metric(name):
                raise ValueError(f"{name} is not a metric; known: {', '.join(METRICS)}")
            if not 0 < least < inf:
                raise ValueError(f"{name}: {least} is not a figure above 0")
        return value

    @model_validator(mode="after")
    def _allowed_must_fit(self) -> Self:
        for deviation in self.allowed or ():
            if getattr(self, deviation.key) is None:
                raise ValueError(f"allowed: {deviation.key}: the file has no {deviation.key} to deviate from")
            try:
                type(self).model_validate({deviation.key: deviation.value}, strict=True)
            except ValidationError as err:
                field, reason = invalid_field(err)
                raise ValueError(f"allowed: {field}: {reason}, found {deviation.words}") from None
        return self

    @property
    def baseline(self) -> Baseline | None:
        """Return the node's own earlier figures; None: there are none to compare with."""
        return self._baseline

    def with_baseline(self, baseline: Baseline | None) -> "Expectation":
        """Return a copy with a node's earlier figures."""
        expectation = self.model_copy()
        expectation._baseline = baseline
        return expectation

    @property
    def earlier_gpus(self) -> EarlierGpus | None:
        """Return the GPUs of the node's previous run; None: there is none to compare with."""
        return self._earlier_gpus

    def with_earlier_gpus(self, earlier: EarlierGpus | None) -> "Expectation":
        """Return a copy with the GPUs of the node's previous run, which gpu.present compares with."""
        expectation = self.model_copy()
        expectation._earlier_gpus = earlier
        return expectation


@dataclass(frozen=True)
class CheckResult:
    """The result of a check's function: a Finding without the fields that the registry adds."""

    status: Status
    message: str
    component: str = "node"
    expected: Value = None
    measured: Value = None
    unit: str | None = None
    source: str | None = None
    figure: FigureReport | None = None
    remedy: str | None = None
    """Set if it differs from the check's own; likewise ``actions`` and ``state``."""
    actions: tuple[str, ...] | None = None
    state: State | None = None

    def at(self, component: str) -> "CheckResult":
        """Return the same result of another component."""
        return replace(self, component=component)


class NotJudged(Exception):  # noqa: N818 - it becomes a finding
    """Raised by a check that cannot continue: one finding replaces the results that it has not yielded yet."""

    status: ClassVar[Status]

    def __init__(self, reason: str, component: str = "node") -> None:
        super().__init__(reason)
        self.verdict = CheckResult(self.status, reason, component)


class Skip(NotJudged):
    """The check does not apply."""

    status = Status.SKIP


class Undetermined(NotJudged):
    """The check has no result: data is missing or cannot be read."""

    status = Status.ERROR


class Broken(NotJudged):
    """The subject of the check failed with an error of its own."""

    status = Status.FAIL


Judge = Callable[[NodeFacts, Expectation], Iterable[CheckResult]]
JudgeT = TypeVar("JudgeT", bound=Judge | Callable[[NodeFacts], Iterable[CheckResult]])
"""A check's function; the site's expectation is an optional parameter."""


def _with_expectation(function: Judge | Callable[[NodeFacts], Iterable[CheckResult]]) -> Judge:
    """Return the function with the parameters node and expectation."""
    if len(signature(function).parameters) != 1:
        return cast(Judge, function)
    of_node = cast(Callable[[NodeFacts], Iterable[CheckResult]], function)
    return lambda node, _expect: of_node(node)


def why_unknown(node: NodeFacts, field: str) -> str | None:
    """Return why a fact cannot be checked, as one line; None if it can."""
    reason = node.gap(field)
    if reason is None and getattr(node, field) is None and field not in MAY_BE_NONE:
        return f"{field}: not in the collected data"
    return reason


def unanswered(node: NodeFacts, field: str) -> str | None:
    """Return why a fact is unknown if its tool hung, crashed or was left out; None for other gaps."""
    if node.gap(field) is None:
        return None
    failures = (run.failure for run in node.tool_runs or () if run.answers == field)
    failure = next((failure for failure in failures if failure is not None), None)
    return None if failure is None else f"{failure.partition(' (')[0]} (driver.tools-answer reports the cause)"


def no_gpu(node: NodeFacts, expect: Expectation) -> str | None:
    """Return why a check of GPUs does not apply to a node with a known PCI bus; None if it does."""
    if node.gpus_on_bus:
        return None
    if expect.gpus == 0:
        return "the site file expects no GPU"
    return "no NVIDIA GPU on the PCI bus"


class CheckDeclaration(Frozen):
    """What a check declares beside its function: keywords of the decorators, keys of own checks in YAML, and what
    ``gpunode checks`` lists."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str
    level: Level = "quick"
    needs: tuple[str, ...] = ()
    """Fields of NodeFacts; an unknown one makes the finding ``error`` before the function is called."""
    partial: bool = False
    """True if a failure that the function finds without an unknown need is reported: one fact is enough to fail."""
    needs_gpu: bool = False
    """``skip`` if the PCI bus has no NVIDIA GPU, before any other need is checked."""
    means: str
    remedy: str
    category: Category
    """Of the decorators, by default: by the id."""
    scope: Scope = "node"
    """The subject of one finding."""
    state: State
    """Recommended state of the node on a failure."""
    actions: tuple[Step, ...]
    """Steps of the remedy, in order: see ``gpunode.checks.actions``."""
    bare_metal: bool = False
    """True if the check is not possible, or its remedy not available, in a virtual machine."""
    architectures: tuple[str, ...] = ()
    """GPU architectures and processor architectures to which it applies; empty: all."""


class Check(CheckDeclaration):
    """One registered check."""

    judge: Judge
    thresholds: tuple[Threshold, ...] = ()
    """All numbers that the check compares with."""
    origin: str | None = None
    """The package or file of a site's own check; None: a check of gpunode."""

    @property
    def active(self) -> bool:
        """Return True if the check runs something on a GPU; False if it reads existing state."""
        return self.level != "quick"

    @property
    def needs_root(self) -> bool:
        """Return True if a fact that it needs can only be read as root."""
        return not NEEDS_ROOT.isdisjoint(self.needs)

    def findings(self, node: NodeFacts, expect: Expectation) -> list[Finding]:
        """Return the findings of one node. Never empty: a check without a result, or with an exception, is an
        ``error``."""
        obstacle = self._obstacle(node, expect)
        if obstacle is not None and not self.partial:
            return [obstacle]

        def found_here() -> list[Finding]:
            return [self.finding(verdict) for verdict in self._verdicts(node, expect)]

        try:
            findings = found_here() if self.origin is None else contained(found_here, Finding)
        except Escaped as err:
            return [self._without_remedy(Status.ERROR, f"the check of {self.origin} failed to run: {err}")]
        except Exception as err:
            # An exception on one node must not affect the results of others.
            return [self._without_remedy(Status.ERROR, f"the check failed to run: {type(err).__name__}: {err}")]
        if obstacle is not None:
            return [finding for finding in findings if finding.status is Status.FAIL] or [obstacle]
        return findings or [self._without_remedy(Status.ERROR, "the check found nothing to check")]

    def _verdicts(self, node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
        try:
            yield from self.judge(node, expect)
        except NotJudged as reason:
            yield reason.verdict

    def finding(self, verdict: CheckResult) -> Finding:
        """Return a result as a finding, with the check's remedy, actions and state unless the result has its own."""
        needs_remedy = verdict.status in (Status.WARN, Status.FAIL, Status.ERROR, Status.NOTE)
        by_policy = overridden()
        source = f"{verdict.source}; {by_policy}" if verdict.source and by_policy else by_policy or verdict.source
        actions = self._actions(verdict)
        return Finding(
            check=self.id,
            status=verdict.status,
            component=verdict.component,
            message=verdict.message,
            expected=verdict.expected,
            measured=verdict.measured,
            unit=verdict.unit,
            source=source,
            figure=verdict.figure,
            remedy=_with_command(verdict.remedy or self.remedy, actions) if needs_remedy else None,
            actions=actions,
            recommended_state=self._state(verdict),
        )

    def _actions(self, verdict: CheckResult) -> tuple[Action, ...]:
        """Return the actions; none for results that could not be determined, unless the result names one."""
        actions = self.actions if verdict.status in (Status.WARN, Status.FAIL) else ()
        steps = actions if verdict.actions is None else map(action, verdict.actions)
        return tuple(step.model_copy(update={"component": verdict.component}) for step in steps)

    def _state(self, verdict: CheckResult) -> State:
        """Return the declared state for a failure, at most observe for a warning; the result may name another."""
        if verdict.state is not None:
            return verdict.state
        if verdict.status is Status.FAIL:
            return self.state
        if verdict.status is Status.WARN:
            return State.NONE if self.state is State.NONE else State.OBSERVE
        return State.NONE

    def _obstacle(self, node: NodeFacts, expect: Expectation) -> Finding | None:
        """Return the finding in place of the function's if the function cannot be called."""
        if self.needs_gpu:
            unknown = why_unknown(node, "pci")
            if unknown is not None:
                return self._without_remedy(Status.ERROR, unknown)
            reason = no_gpu(node, expect)
            if reason is not None:
                return self._without_remedy(Status.SKIP, reason)
        field = next((field for field in self.needs if why_unknown(node, field)), None)
        if field is None:
            return None
        failed = unanswered(node, field)
        if failed is not None:
            return self._without_remedy(Status.SKIP, failed)
        return self._without_remedy(Status.ERROR, why_unknown(node, field) or field)

    def _without_remedy(self, status: Status, message: str) -> Finding:
        """Return a finding for a problem that the check's remedy does not solve."""
        return Finding(check=self.id, status=status, component="node", message=message)


def _with_command(remedy: str, actions: Iterable[Action]) -> str:
    """Return a remedy with the command that applies its role, unless it has one."""
    run = command(actions)
    return remedy if run is None or PROVISION in remedy else f"{remedy} Run: {run}"


class Registry:
    """All checks, in the order of their ids."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._thresholds: dict[str, Threshold] = {}
        self._origin: str | None = None
        self.of_policies: set[str] = set()
        """Ids of own checks that files of policies declare; each runs on nodes with its policy."""
        self.packages: set[tuple[str, str]] = set()
        """Loaded entry points, by name and value."""

    @contextmanager
    def loading(self, origin: str) -> Iterator[list[str]]:
        """Register checks within the block as a site's own, of ``origin``; yields the list that receives their ids.

        If the block raises, none of them is kept.
        """
        before, thresholds = dict(self._checks), dict(self._thresholds)
        ids: list[str] = []
        self._origin = origin
        try:
            yield ids
        except BaseException:
            self._checks, self._thresholds = before, thresholds
            raise
        finally:
            self._origin = None
            ids += [check_id for check_id in self._checks if check_id not in before]

    def __iter__(self) -> Iterator[Check]:
        return iter(sorted(self._checks.values(), key=lambda check: check.id))

    def __getitem__(self, check_id: str) -> Check:
        return self._checks[check_id]

    def __contains__(self, check_id: object) -> bool:
        return check_id in self._checks

    def check(self, check_id: str, **declared: Any) -> Callable[[JudgeT], JudgeT]:
        """Return a decorator that registers a function of the node, and optionally the site's expectation, as a check.

        Its keywords are the fields of ``Check``. Packages of a site use it too: see ``loading``. Raises ValueError for
        an id or a threshold's name that is already used, an unknown fact, and fields that ``Check`` refuses.
        """
        if check_id in self._checks:
            raise ValueError(f"check {check_id} is registered twice")
        unknown = [field for field in declared.get("needs", ()) if field not in NodeFacts.model_fields]
        if unknown:
            raise ValueError(f"check {check_id} needs unknown facts: {', '.join(unknown)}")
        declared.setdefault("category", OF_PREFIX.get(check_id.partition(".")[0]))
        if declared["category"] not in CATEGORIES:
            raise ValueError(f"check {check_id} needs a category: one of {', '.join(CATEGORIES)}")

        def register(function: JudgeT) -> JudgeT:
            check = Check(id=check_id, judge=_with_expectation(function), origin=self._origin, **declared)
            for threshold in check.thresholds:
                if self._thresholds.setdefault(threshold.name, threshold) is not threshold:
                    raise ValueError(f"check {check_id}: another threshold is called {threshold.name}")
            self._checks[check_id] = check
            return function

        return register

    @property
    def thresholds(self) -> dict[str, Threshold]:
        """Return every threshold by its name, in the order of the names."""
        return dict(sorted(self._thresholds.items()))


registry = Registry()


def judge(  # noqa: PLR0913
    node: NodeFacts,
    expect: Expectation,
    level: Level = "quick",
    only: Iterable[str] | None = None,
    *,
    policy: Policy = NO_POLICY,
    until: float | None = None,
) -> list[Finding]:
    """Return all findings of one node: checks up to ``level``, or those named in ``only``, with the policy's limits.

    Of the own checks that policies declare, only those of this policy are run. ``until``: the time of
    ``time.monotonic`` after which no further check is run; the others are ``skip``, with NOT_RUN.
    """
    selected = None if only is None else set(only)
    depth = LEVELS.index(level)
    with in_force(policy.overrides()):
        return [
            finding
            for check in registry
            if LEVELS.index(check.level) <= depth
            and (selected is None or check.id in selected)
            and (check.id not in registry.of_policies or check.id in policy.own_checks)
            for finding in (
                [not_run(check.id, "the time was used up")]
                if until is not None and time.monotonic() > until
                else _by_policy(check, node, expect, policy)
            )
        ]


def not_run(check_id: str, reason: str) -> Finding:
    """Return the finding of a check that was not run because the time was used up."""
    return Finding(check=check_id, status=Status.SKIP, component="node", message=f"{NOT_RUN} {reason}")


def _by_policy(check: Check, node: NodeFacts, expect: Expectation, policy: Policy) -> list[Finding]:
    rule = policy.rules.get(check.id)
    if rule is None:
        return check.findings(node, expect)
    if rule.mode == "mute":
        message = f"muted by {policy.source}: {rule}"
        return [Finding(check=check.id, status=Status.SKIP, component="node", message=message, source=policy.source)]
    return [finding.model_copy(update={"observed": str(rule)}) for finding in check.findings(node, expect)]
