"""Every reason for a skip that the bench brings about names what was observed, or who reports the cause."""

import re
import sys
from functools import cache
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "contract"), str(Path(__file__).parents[1])]

import mutants_driver
import mutants_fabric
import mutants_gpu
import mutants_host
import mutants_links
import mutants_workload
from bench_machines import document
from bundles import apply, driver_node, findings, guest, hgx, pcie_4, t4, without_gpu
from test_bench import CASES, edited

from gpunode.checks import Finding, Status, registry

TABLES = (mutants_driver, mutants_fabric, mutants_gpu, mutants_host, mutants_links, mutants_workload)
VAGUE = re.compile(r"not needed|not seen|could not be determined|says more|says why|perhaps", re.I)
BASES = (driver_node, guest, hgx, pcie_4, t4, without_gpu)


@cache
def reasons() -> dict[str, frozenset[str]]:
    """Check to the messages of its skips: of all conditions, and of the contract's mutants that skip a check."""
    by_check: dict[str, set[str]] = {check.id: set() for check in registry}

    def add(judged: list[Finding]) -> None:
        for finding in judged:
            if finding.status is Status.SKIP:
                by_check[finding.check].add(finding.message)

    for name, machine in CASES:
        add(findings(edited(document(machine), machine, name)))
    for base in BASES:
        add(findings(base()))
    for table in TABLES:
        for mutant in table.MUTANTS:
            if mutant.skips or mutant.becomes is Status.SKIP:
                add(findings(apply(mutant.base(), mutant.edits), mutant.expect))
    return {check: frozenset(messages) for check, messages in by_check.items()}


def test_a_skip_names_what_was_observed_or_who_reports_the_cause() -> None:
    messages = {message for of_check in reasons().values() for message in of_check}
    assert [message for message in messages if VAGUE.search(message)] == []
    rooms = {check.id.split(".")[0] for check in registry}
    named = {word for message in messages for word in re.findall(r"[a-z]+\.[a-z-]+", message)}
    assert {word for word in named if word.split(".")[0] in rooms} <= {check.id for check in registry}
