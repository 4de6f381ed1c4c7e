"""The verdict on this machine within a budget, for ``validate --on-node``; loaded while the probe runs."""

import os
from dataclasses import replace
from pathlib import Path

from gpunode import __version__
from gpunode.catalog import load, origins
from gpunode.checks import Finding, Status, identify, registry
from gpunode.checks.declared import load_packages
from gpunode.checks.registry import not_run
from gpunode.errors import UsageError
from gpunode.facts import facts_from_bundle
from gpunode.judging.report import NodeReport, Report, judged, report, unreachable
from gpunode.judging.request import JudgingRequest, findings_of, selected_checks
from gpunode.probe import Answer
from gpunode.text import now

CUT = ("left of the time for the whole probe", "the time for the whole probe is used up", "not finished within")
"""In the reason for data that the budget cut off."""


class LocalJudging:
    """The criteria for this machine. Raises UsageError for invalid files and names."""

    def __init__(
        self, expect: Path | None, policy: Path | None, selected: tuple[str, ...], skipped: tuple[str, ...]
    ) -> None:
        self._started = now()
        load()
        origins.table()
        load_packages(registry)
        request = JudgingRequest()
        if expect is not None:
            from gpunode.judging.expectation import read_expectation  # noqa: PLC0415 (a prolog mostly has none)

            request = replace(request, expectation=read_expectation(expect))
        if policy is not None:
            from gpunode.judging.policy import read_policy, today  # noqa: PLC0415

            request = replace(request, policy=read_policy(policy, today()))
        self.request = replace(request, checks=selected_checks(selected, skipped))

    def report(self, answer: bytes, *, until: float, seconds: float) -> Report:
        """Return the report on the probe's answer; checks that have not begun by ``until`` are not run."""
        node = self._node(answer, until, seconds)
        return report([node], level="quick", version=__version__, started_at=self._started, finished_at=now())

    def _node(self, answer: bytes, until: float, seconds: float) -> NodeReport:
        name = os.uname().nodename
        if not answer:
            # It has limits of its own: either the machine is overloaded, or something hangs in the kernel.
            return unreachable(name, f"the probe did not end within the budget ({seconds:.1f} s)", seconds)
        try:
            bundle = Answer(answer, where="the probe's answer").bundle()
        except UsageError as err:
            return unreachable(name, str(err), seconds)
        facts = facts_from_bundle(bundle)
        unbudgeted = findings_of(bundle, facts, self.request, level="quick", policy=self.request.policy, until=until)
        smi_cut = any(run.answers == "smi" and run.ended in ("slow", "not-run") for run in facts.tool_runs or ())
        findings = [within_budget(finding, smi_cut=smi_cut) for finding in unbudgeted]
        return judged(bundle.host, identify(facts), findings, seconds, self.request.policy)


def within_budget(finding: Finding, *, smi_cut: bool) -> Finding:
    """Return the finding unchanged, or as not run if its data are missing only because of the budget.

    ``smi_cut``: nvidia-smi itself did not answer in time. Whether it hangs or is slow is unknown: the finding on it
    stays undetermined, so that the node does not count as healthy.
    """
    if finding.status is not Status.ERROR or not any(text in finding.message for text in CUT):
        return finding
    if smi_cut and finding.check == "driver.tools-answer":
        return finding
    return not_run(finding.check, finding.message)
