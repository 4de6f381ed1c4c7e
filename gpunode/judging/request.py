"""What nodes are judged by: the criteria of one run, without the options that name them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunode.checks import LEVELS, Baseline, EarlierGpus, Expectation, Finding, Level, judge, registry
from gpunode.checks.thresholds import NO_POLICY, Policy
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.judging.allowed import with_allowed
from gpunode.judging.policy import today
from gpunode.judging.report import NodeReport
from gpunode.probe import Bundle
from gpunode.text import matches_any, unknown

LOG_CHECKS = {
    "tools.nvbandwidth": "performance.nvbandwidth",
    "tools.nccl-tests": "performance.nccl-tests",
    "tools.dcgm-diag": "performance.diagnostics",
}
"""The check that judges a saved output, by its record."""
PATTERN = re.compile(r"[*?\[]")
Json = bool | int | float | str | list[Any] | dict[str, Any] | None


@dataclass(frozen=True)
class EvaluatedNode:
    """One node with all that is known of it; it exists only in the child that judges it."""

    facts: NodeFacts
    report: NodeReport
    level: Level


@dataclass(frozen=True)
class JudgingRequest:
    """The criteria for the nodes of one run."""

    expectation: Expectation = field(default_factory=Expectation)
    level: Level | None = None
    """None: each at the level at which it was collected."""
    checks: frozenset[str] | None = None
    """Ids of the selected checks; None: all."""
    policy: Policy = NO_POLICY
    policies: Mapping[str, Policy] = field(default_factory=dict)
    """Policies of single hosts, by their names in the inventory, in place of ``policy``."""
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    """Earlier figures, by the host's own name."""
    earlier_gpus: Mapping[str, EarlierGpus] = field(default_factory=dict)
    """The GPUs of a node's previous run, by its name."""
    logs: Sequence[Mapping[str, Any]] = ()
    """Saved outputs of measurements as records: they are judged as if the node's workload had written them."""
    extracts: Mapping[str, Callable[[EvaluatedNode], Json]] = field(default_factory=dict)
    """Functions of a node with its facts, called in the child; ``JudgedNode.extracted`` has their results by name."""
    documents: bool = False
    """True: each result has the bundle as it is saved."""

    @property
    def log_checks(self) -> set[str]:
        """Return the checks that judge the logs."""
        return {LOG_CHECKS[log["record"]] for log in self.logs}

    def policy_of(self, host: str) -> Policy:
        """Return the policy of a host."""
        return self.policies.get(host, self.policy)


def findings_of(  # noqa: PLR0913
    bundle: Bundle,
    facts: NodeFacts,
    request: JudgingRequest,
    *,
    level: Level,
    policy: Policy,
    until: float | None = None,
) -> list[Finding]:
    """Return the findings on one node; ``until`` as in ``judge``."""
    expectation = request.expectation.with_baseline(request.baselines.get(bundle.host))
    expectation = expectation.with_earlier_gpus(request.earlier_gpus.get(bundle.host))
    findings = with_allowed(
        judge(facts, expectation, level, request.checks, policy=policy, until=until),
        expectation,
        lambda other, checks: judge(facts, other, level, checks, policy=policy, until=until),
        today(),
    )
    if not request.logs:
        return findings
    # Only at the level of their own checks: other measurements were not to be collected.
    ids = request.log_checks if request.checks is None else request.log_checks & request.checks
    read = facts_from_bundle(bundle.model_copy(update={"results": [*bundle.results, *request.logs]}))
    others = [finding for finding in findings if finding.check not in ids]
    return others + judge(read, expectation, "deep", ids, policy=policy, until=until)


def level_of(bundle: Bundle) -> Level:
    """Return the level at which a bundle was collected: in the launcher's record, since the release with two levels."""
    if not bundle.results:
        return "quick"
    levels = (result["values"].get("level") for result in bundle.results if isinstance(result.get("values"), dict))
    return "deep" if "deep" in levels else "standard"


def selected_checks(selected: Iterable[str], skipped: Iterable[str]) -> frozenset[str]:
    """Return the ids after ``--select`` and ``--skip``, which have ids and patterns (``host.*``).

    Raise UsageError for an unknown id, a pattern that matches none, and if none is left.
    """
    if not all(_ids([value]) for value in selected):
        # An empty variable of a script must not select all of them.
        raise UsageError("--select: no check given; see gpunode checks")
    known = [check.id for check in registry]
    kept = _matching("--select", _ids(selected), known) if any(selected) else frozenset(known)
    chosen = kept - _matching("--skip", _ids(skipped), known)
    if not chosen:
        raise UsageError("--skip excludes all selected checks")
    return chosen


def _matching(option: str, names: Iterable[str], known: list[str]) -> frozenset[str]:
    """Return the known ids that the names are, or that they match as shell patterns."""
    ids: set[str] = set()
    for name in names:
        if not PATTERN.search(name):
            if name not in registry:
                raise UsageError(f"{option}: {unknown('check', name, known)}")
            ids.add(name)
        elif matching := {id_ for id_ in known if matches_any(id_, [name])}:
            ids |= matching
        else:
            raise UsageError(f"{option}: no check matches {name}; see gpunode checks")
    return frozenset(ids)


def _ids(values: Iterable[str]) -> list[str]:
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def level_must_have_one(level: Level, checks: Iterable[str]) -> None:
    """Raise UsageError if all selected checks belong to a deeper level: nothing would be judged."""
    least = min((registry[name].level for name in checks), key=LEVELS.index)
    if LEVELS.index(least) > LEVELS.index(level):
        raise UsageError(f"--level {level}: no selected check runs at this level; use --level {least}")


def reads_records(checks: Iterable[str]) -> bool:
    """Return True if one of the checks needs a workload's records."""
    return any(registry[name].level != "quick" for name in checks)
