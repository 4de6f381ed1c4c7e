"""What nodes are judged by: the criteria of one run, the deviations that a site allows, saved outputs of --log."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from gpunode.checks import LEVELS, Allowed, Baseline, EarlierGpus, Expectation, Finding, Level, Status, judge, registry
from gpunode.checks.gpu import SITE
from gpunode.checks.thresholds import NO_POLICY, Policy
from gpunode.errors import UsageError
from gpunode.expectations import is_metric, tools
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.errors import ParseError
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


def with_allowed(
    findings: Sequence[Finding],
    expectation: Expectation,
    judge: Callable[[Expectation, frozenset[str]], Iterable[Finding]],
    on: date,
) -> list[Finding]:
    """Return the findings of a day; ``judge`` returns those of some checks by another expectation.

    A deviation is used where fewer findings fail with its value. An expired one changes the origin only.
    """
    results = list(findings)
    for allowed in expectation.allowed or ():
        failed = _failed(results)
        checks = frozenset(finding.check for finding in failed)
        if not checks:
            break
        other = expectation.model_copy(update={allowed.key: allowed.value})
        judged = list(judge(other, checks))
        better = frozenset(
            check
            for check in checks
            if len([finding for finding in _failed(judged) if finding.check == check])
            < len([finding for finding in failed if finding.check == check])
        )
        if not better:
            continue
        if allowed.until < on:
            source = f"{SITE}: {allowed.key} {allowed.words} was allowed until {allowed.until} ({allowed.reason})"
            results = [
                finding.model_copy(update={"source": source})
                if finding in failed and finding.check in better
                else finding
                for finding in results
            ]
            continue
        expectation = other
        components = {(finding.check, finding.component) for finding in failed}
        news = [
            _explained(finding, allowed) if (finding.check, finding.component) in components else finding
            for finding in judged
            if finding.check in better
        ]
        results = sorted(
            [*(finding for finding in results if finding.check not in better), *news], key=lambda finding: finding.check
        )
    return results


def _failed(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status is Status.FAIL and finding.source == SITE]


def _explained(finding: Finding, allowed: Allowed) -> Finding:
    """Return a finding that passes by an allowed value, as a note with the reason."""
    if finding.status is not Status.PASS:
        return finding
    message = f"{finding.message}; {allowed.key} {allowed.words} is allowed until {allowed.until}: {allowed.reason}"
    return finding.model_copy(update={"status": Status.NOTE, "message": message, "source": SITE})


PROGRAMS = {"nvbandwidth": "nvbandwidth", "nccl-tests": "nccl-tests", "dcgm-diag": "dcgmi"}
MOST_BYTES = 48 * 1024
"""The part of an output that a record keeps (``ToolValues``)."""


def read_logs(logs: Sequence[str], *, replay: bool) -> list[dict[str, Any]]:
    """Return one record for each ``--log KIND=FILE``, as the payload would have written it.

    Raises UsageError with one line for one that cannot be judged.
    """
    if logs and not replay:
        raise UsageError("--log needs --replay BUNDLE: the bundle of the node that produced the output")
    return [_record(*_split(log)) for log in logs]


def must_be_judged(logs: Iterable[Mapping[str, Any]], selected: Iterable[str]) -> None:
    """Raise UsageError if --select or --skip excludes the check that judges a log."""
    left_out = sorted({LOG_CHECKS[log["record"]] for log in logs} - set(selected))
    if left_out:
        raise UsageError(f"--log: {left_out[0]} evaluates it, but --select or --skip excludes that check")


def _split(log: str) -> tuple[str, Path]:
    kind, sign, file = log.partition("=")
    if not sign or not file:
        raise UsageError(f"--log {log}: expected KIND=FILE, as nccl-tests=all_reduce.log")
    if kind not in PROGRAMS:
        raise UsageError(f"--log {log}: {unknown('kind', kind, PROGRAMS)}")
    return kind, Path(file)


def _record(kind: str, file: Path) -> dict[str, Any]:
    from gpunode.facts.parsers.kinds import decoded, parsed  # noqa: PLC0415 (parsers of many tools)

    try:
        text = decoded(file.read_bytes())
    except OSError as err:
        raise UsageError(f"--log {file}: cannot be read: {err.strerror}") from None
    if len(text) > MOST_BYTES:
        raise UsageError(
            f"--log {file}: {len(text)} characters, at most {MOST_BYTES} are read: remove NCCL's debug log"
        )
    try:
        answer = parsed(kind, text)
    except ParseError as err:
        raise UsageError(f"--log {file}: not valid as {kind}: {err}") from None
    program = PROGRAMS[kind]
    if kind == "nccl-tests":
        program = _program(file, [run["collective"] for run in answer["runs"]])
    return {
        "record": f"tools.{kind}",
        "schema": "gpunode.record/1",
        "device": "cuda",
        "component": "node",
        "seconds": 0.0,
        "values": {"program": program, "arguments": [], "exit_code": 0, "stdout": text},
    }


def _program(file: Path, collectives: Sequence[str | None]) -> str:
    """Return the program of a log; if the log does not name it, the file does: ``all_reduce_perf.log``."""
    by_file = file.name.partition(".")[0].removesuffix("_perf")
    named = next((name for name in collectives if name is not None), by_file)
    if not is_metric(tools.metric_of(named)):
        raise UsageError(
            f"--log {file}: the log does not name its collective: include it in the file name (example: "
            "all_reduce_perf.log)"
        )
    return f"{named}_perf"
