"""What a check is, what it finds, and the one place that knows all of them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from inspect import signature
from math import inf
from typing import ClassVar, Literal, NotRequired, TypedDict, TypeVar, Unpack, cast, get_args

from pydantic import Field, PrivateAttr, field_validator

from gpunode.checks.actions import Action, State, action
from gpunode.checks.contained import Escaped, contained
from gpunode.checks.policy import NO_POLICY, Policy
from gpunode.checks.thresholds import Threshold, in_force, overridden
from gpunode.expectations import METRICS, is_metric
from gpunode.facts import NodeFacts
from gpunode.facts.node import MAY_BE_NONE
from gpunode.frozen import Frozen

Value = bool | int | float | str | None
Level = Literal["quick", "standard", "deep"]
LEVELS: tuple[Level, ...] = ("quick", "standard", "deep")
Category = Literal["gpu", "memory", "nvlink", "fabric", "pcie", "network", "host", "driver", "container"]
NOT_RUN = "not run:"
"""How the message of a check begins for which there was no time."""
CATEGORIES: tuple[Category, ...] = get_args(Category)
OF_PREFIX: dict[str, Category] = {
    "container": "container",
    "driver": "driver",
    "fabric": "fabric",
    "framework": "container",
    "gpu": "gpu",
    "host": "host",
    "library": "driver",
    "link": "pcie",
    "node": "host",
    "nvlink": "nvlink",
    "nvswitch": "fabric",
    "performance": "gpu",
    "rdma": "network",
}
"""The category of a check by the first part of its id, where the check declares none."""
Scope = Literal["node", "gpu", "link", "fleet"]
NEEDS_ROOT = frozenset(
    {
        *("kernel_log", "link_log", "earlier_boots"),  # dmesg and the journal
        "packet_filter",  # netlink
        *("ssh_daemon", "private_keys", "empty_passwords"),  # host keys, homes, /etc/shadow
        *("docker", "nvmes", "gpu_processes", "pci_acs"),  # a socket, disks, other users' files, configuration space
        *("bmc_access", "bmc_fans", "bmc_power_supplies", "bmc_events"),
    }
)
"""Facts that the probe reads as root alone, or not in full without it."""


class Status(StrEnum):
    """Of a finding, a node, a report. ``skip``: does not apply here. ``error``: could not be determined."""

    PASS = "pass"  # noqa: S105
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"
    ERROR = "error"


class FigureReport(Frozen):
    """What a measured figure was compared with; the finding has the figure, the expected value and its origin."""

    metric: str
    """``host_to_device``, ``gemm_bf16``, ``all_reduce_busbw``: the key of the site file's ``figures``."""
    limit: float | None = None
    """The physical limit, in the finding's unit; None: not known for this machine."""
    limit_of: str | None = None
    """What has that limit: ``PCIe 5.0 x16 without packet headers``."""
    ratio: float | None = None
    """Measured by limit."""
    message_bytes: int | None = None
    """Of one copy or message; None: the figure has no size."""


class Finding(Frozen):
    """One verdict about one component (``node``, ``gpu3``, ``nvlink 3/5``, ``kernel 6.1.0-42-amd64`` …)."""

    check: str
    status: Status
    component: str
    message: str
    expected: Value = None
    measured: Value = None
    unit: str | None = None
    source: str | None = None
    figure: FigureReport | None = None
    """Of a measurement."""
    remedy: str | None = None
    actions: tuple[Action, ...] = ()
    """What to do, in this order, as data."""
    recommended_state: State = State.NONE
    """Of the node, by this finding alone."""
    observed: str | None = None
    """Why it counts for nothing: the policy's reason. None: it counts."""


@dataclass(frozen=True)
class Baseline:
    """The figures of an earlier report on the same node."""

    origin: str
    """Its file and time."""
    figures: Mapping[tuple[str, str, int | None], float]
    """By metric, component and size of the messages: another size has another figure."""


class Expectation(Frozen):
    """What a site says of its nodes (``--expect FILE``). None: nothing was said."""

    gpus: int | None = Field(None, ge=0)
    """GPUs on the bus; 0 says that the node is meant to have none."""
    model: str | None = None
    """What all GPUs are, as a person writes it: ``H100 SXM``, ``l40s``, ``NVIDIA H200``, ``10de:2330``."""
    driver: str | None = Field(None, pattern=r"^\d{3,4}(\.\d+){0,2}$")
    """The loaded driver, as exactly as is wanted: ``580`` or ``580.95.05``."""
    mig: bool | None = None
    """MIG mode of all GPUs."""
    nics: int | None = Field(None, ge=0)
    """InfiniBand and RoCE ports that are active."""
    nic_rate_gbit_per_s: float | None = Field(None, gt=0)
    """The least rate of each of them."""
    nic_firmware: list[str] | None = Field(None, min_length=1)
    """Firmware versions that their adapters may have."""
    figures: dict[str, float] | None = Field(None, min_length=1)
    """Least values of measurements by metric (``host_to_device: 50``): they replace the catalog's."""
    _baseline: Baseline | None = PrivateAttr(None)

    @field_validator("figures")
    @classmethod
    def _known(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for name, least in (value or {}).items():
            if not is_metric(name):
                raise ValueError(f"{name} is not a metric; known: {', '.join(METRICS)}")
            if not 0 < least < inf:
                raise ValueError(f"{name}: {least} is not a figure above 0")
        return value

    @property
    def baseline(self) -> Baseline | None:
        """The node's own earlier figures; None: there are none to compare with."""
        return self._baseline

    def with_baseline(self, baseline: Baseline | None) -> "Expectation":
        """Return the same with a node's earlier figures."""
        found = self.model_copy()
        found._baseline = baseline
        return found


@dataclass(frozen=True)
class CheckResult:
    """What a check's function yields: a Finding without the parts that the registry knows."""

    status: Status
    message: str
    component: str = "node"
    expected: Value = None
    measured: Value = None
    unit: str | None = None
    source: str | None = None
    figure: FigureReport | None = None
    remedy: str | None = None
    """Only where it differs from the check's own; so are ``actions`` and ``state``."""
    actions: tuple[str, ...] | None = None
    state: State | None = None


class NotJudged(Exception):  # noqa: N818 - it becomes a finding
    """Raised by a check that cannot go on: one finding takes the place of the verdicts that it has not yielded yet."""

    status: ClassVar[Status]

    def __init__(self, reason: str, component: str = "node") -> None:
        super().__init__(reason)
        self.verdict = CheckResult(self.status, reason, component)


class Skip(NotJudged):
    """The check does not apply here."""

    status = Status.SKIP


class Undetermined(NotJudged):
    """The check has no answer: data is missing or cannot be read."""

    status = Status.ERROR


class Broken(NotJudged):
    """What was to be judged broke with an error of its own."""

    status = Status.FAIL


Judge = Callable[[NodeFacts, Expectation], Iterable[CheckResult]]
JudgeT = TypeVar("JudgeT", bound=Judge | Callable[[NodeFacts], Iterable[CheckResult]])
"""A check's function takes the site's expectation where it uses it."""


def _with_expectation(function: Judge | Callable[[NodeFacts], Iterable[CheckResult]]) -> Judge:
    """Return the function as one that takes node and expectation."""
    if len(signature(function).parameters) != 1:
        return cast(Judge, function)
    of_node = cast(Callable[[NodeFacts], Iterable[CheckResult]], function)
    return lambda node, _expect: of_node(node)


def why_unseen(node: NodeFacts, field: str) -> str | None:
    """Why a fact cannot be judged, as one line; None where it can."""
    reason = node.gap(field)
    if reason is None and getattr(node, field) is None and field not in MAY_BE_NONE:
        return f"{field}: not in the collected data"
    return reason


def unanswered(node: NodeFacts, field: str) -> str | None:
    """Return why a fact is unknown where the tool that has it hung, crashed or was left out; None for other gaps."""
    if node.gap(field) is None:
        return None
    failures = (run.failure for run in node.tool_runs or () if run.answers == field)
    failure = next((failure for failure in failures if failure is not None), None)
    return None if failure is None else f"{failure.partition(' (')[0]} (driver.tools-answer reports the cause)"


def no_gpu(node: NodeFacts, expect: Expectation) -> str | None:
    """Why what needs a GPU does not apply to a node whose PCI bus was seen; None where it does."""
    if node.gpus_on_bus:
        return None
    if expect.gpus == 0:
        return "the site file expects no GPU"
    return "no NVIDIA GPU on the PCI bus"


class CheckDeclaration(TypedDict):
    """What a check declares beside its id, its level and the facts that it needs: keywords of the decorators."""

    means: str
    remedy: str
    actions: tuple[str, ...]
    """What the remedy does, in its order: see ``gpunode.checks.actions``."""
    state: Literal["none", "observe", "drain"]
    """What the node should get on a failure."""
    thresholds: NotRequired[tuple[Threshold, ...]]
    """Every number that the check compares with."""
    category: NotRequired[Category]
    """By the id, where it is left out."""
    scope: NotRequired[Scope]
    """What one finding is about."""
    bare_metal: NotRequired[bool]
    """True where a virtual machine cannot see it, or could not mend it."""
    architectures: NotRequired[tuple[str, ...]]
    """GPU architectures and processor architectures that it applies to; empty: all."""


@dataclass(frozen=True)
class Check:
    """One registered check."""

    id: str
    level: Level
    needs: tuple[str, ...]
    """Fields of NodeFacts; one that was not seen makes the finding ``error`` before the function is asked."""
    means: str
    remedy: str
    judge: Judge
    needs_gpu: bool = False
    """``skip`` where the PCI bus has no NVIDIA GPU, before any other need is looked at."""
    actions: tuple[str, ...] = ()
    state: State = State.NONE
    thresholds: tuple[Threshold, ...] = ()
    category: Category = "host"
    scope: Scope = "node"
    bare_metal: bool = False
    architectures: tuple[str, ...] = ()
    origin: str | None = None
    """The package or file of a site's own check; None: it is gpunode's."""

    @property
    def active(self) -> bool:
        """True where something runs on a GPU for it; False where existing state is read."""
        return self.level != "quick"

    @property
    def needs_root(self) -> bool:
        """True where a fact that it needs is read as root alone."""
        return not NEEDS_ROOT.isdisjoint(self.needs)

    def findings(self, node: NodeFacts, expect: Expectation) -> list[Finding]:
        """Judge one node. Never nothing: a check that says nothing, or breaks, is an ``error``."""
        obstacle = self._obstacle(node, expect)
        if obstacle is not None:
            return [obstacle]

        def found_here() -> list[Finding]:
            return [self._finding(verdict) for verdict in self._verdicts(node, expect)]

        try:
            found = found_here() if self.origin is None else contained(found_here, Finding)
        except Escaped as err:
            return [self._without_remedy(Status.ERROR, f"the check of {self.origin} failed to run: {err}")]
        except Exception as err:
            # One node's surprise must not take the verdicts on all others with it.
            return [self._without_remedy(Status.ERROR, f"the check failed to run: {type(err).__name__}: {err}")]
        return found or [self._without_remedy(Status.ERROR, "the check found nothing to check")]

    def _verdicts(self, node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
        try:
            yield from self.judge(node, expect)
        except NotJudged as reason:
            yield reason.verdict

    def _finding(self, verdict: CheckResult) -> Finding:
        wants_remedy = verdict.status in (Status.WARN, Status.FAIL, Status.ERROR)
        by_policy = overridden()
        source = f"{verdict.source}; {by_policy}" if verdict.source and by_policy else by_policy or verdict.source
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
            remedy=(verdict.remedy or self.remedy) if wants_remedy else None,
            actions=self._actions(verdict),
            recommended_state=self._state(verdict),
        )

    def _actions(self, verdict: CheckResult) -> tuple[Action, ...]:
        """What could not be determined calls for no action, unless the verdict names one."""
        own = self.actions if verdict.status in (Status.WARN, Status.FAIL) else ()
        return tuple(action(text, verdict.component) for text in (own if verdict.actions is None else verdict.actions))

    def _state(self, verdict: CheckResult) -> State:
        """A failure gets the declared state, a warning is worth observing at most; the verdict may name another."""
        if verdict.state is not None:
            return verdict.state
        if verdict.status is Status.FAIL:
            return self.state
        if verdict.status is Status.WARN:
            return State.NONE if self.state is State.NONE else State.OBSERVE
        return State.NONE

    def _obstacle(self, node: NodeFacts, expect: Expectation) -> Finding | None:
        """The finding that stands in for the function's where it cannot be asked."""
        if self.needs_gpu:
            unseen = why_unseen(node, "pci")
            if unseen is not None:
                return self._without_remedy(Status.ERROR, unseen)
            reason = no_gpu(node, expect)
            if reason is not None:
                return self._without_remedy(Status.SKIP, reason)
        field = next((field for field in self.needs if why_unseen(node, field)), None)
        if field is None:
            return None
        failed = unanswered(node, field)
        if failed is not None:
            return self._without_remedy(Status.SKIP, failed)
        return self._without_remedy(Status.ERROR, why_unseen(node, field) or field)

    def _without_remedy(self, status: Status, message: str) -> Finding:
        """What is wrong lies not in what the check's remedy mends."""
        return Finding(check=self.id, status=status, component="node", message=message)


class Registry:
    """All checks, in the order of their ids."""

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._thresholds: dict[str, Threshold] = {}
        self._origin: str | None = None
        self.of_policies: set[str] = set()
        """Ids of own checks that the files of policies declare: each runs where its policy holds."""
        self.packages: set[tuple[str, str]] = set()
        """Entry points that were loaded, by name and value."""

    @contextmanager
    def loading(self, origin: str) -> Iterator[list[str]]:
        """Checks that are registered within the block are a site's own, of ``origin``; yields their ids as they come.

        Where the block raises, none of them stays.
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

    def check(
        self,
        check_id: str,
        *,
        level: Level = "quick",
        needs: tuple[str, ...] = (),
        needs_gpu: bool = False,
        **declared: Unpack[CheckDeclaration],
    ) -> Callable[[JudgeT], JudgeT]:
        """Register a function as a check: it takes the node, and the site's expectation where it uses it.

        A site's own packages use it too: see ``loading``. Raises ValueError for an id or a threshold's name that is
        taken, for an unknown fact, action or category.
        """
        if check_id in self._checks:
            raise ValueError(f"check {check_id} is registered twice")
        unknown = [field for field in needs if field not in NodeFacts.model_fields]
        if unknown:
            raise ValueError(f"check {check_id} needs unknown facts: {', '.join(unknown)}")
        category = declared.get("category") or OF_PREFIX.get(check_id.partition(".")[0])
        if category is None or category not in CATEGORIES:
            raise ValueError(f"check {check_id} needs a category: one of {', '.join(CATEGORIES)}")
        for text in declared["actions"]:
            action(text)
        for threshold in declared.get("thresholds", ()):
            if self._thresholds.setdefault(threshold.name, threshold) is not threshold:
                raise ValueError(f"check {check_id}: another threshold is called {threshold.name}")

        def register(function: JudgeT) -> JudgeT:
            self._checks[check_id] = Check(
                id=check_id,
                level=level,
                needs=needs,
                means=declared["means"],
                remedy=declared["remedy"],
                judge=_with_expectation(function),
                needs_gpu=needs_gpu,
                actions=declared["actions"],
                state=State(declared["state"]),
                thresholds=declared.get("thresholds", ()),
                category=category,
                scope=declared.get("scope", "node"),
                bare_metal=declared.get("bare_metal", False),
                architectures=declared.get("architectures", ()),
                origin=self._origin,
            )
            return function

        return register

    @property
    def thresholds(self) -> dict[str, Threshold]:
        """Every threshold by its name, in the order of the names."""
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
    """All findings of one node: checks up to ``level``, or those named in ``only``, as strict as the policy is.

    Of the own checks that policies declare, those of this one are run. ``until``: the time of ``time.monotonic`` from
    which on no further check is run; the others are ``skip``, with NOT_RUN.
    """
    wanted = None if only is None else set(only)
    depth = LEVELS.index(level)
    with in_force(policy.overrides()):
        return [
            finding
            for check in registry
            if LEVELS.index(check.level) <= depth
            and (wanted is None or check.id in wanted)
            and (check.id not in registry.of_policies or check.id in policy.own_checks)
            for finding in (
                [not_run(check.id, "the time was used up")]
                if until is not None and time.monotonic() > until
                else _by_policy(check, node, expect, policy)
            )
        ]


def not_run(check_id: str, reason: str) -> Finding:
    """Return the finding of a check for which there was no time."""
    return Finding(check=check_id, status=Status.SKIP, component="node", message=f"{NOT_RUN} {reason}")


def _by_policy(check: Check, node: NodeFacts, expect: Expectation, policy: Policy) -> list[Finding]:
    rule = policy.rules.get(check.id)
    if rule is None:
        return check.findings(node, expect)
    if rule.mode == "mute":
        message = f"muted by {policy.source}: {rule}"
        return [Finding(check=check.id, status=Status.SKIP, component="node", message=message, source=policy.source)]
    return [finding.model_copy(update={"observed": str(rule)}) for finding in check.findings(node, expect)]
