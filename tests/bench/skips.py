"""Every reason for a skip that the bench brings about, and the table of them in docs/checks.md.

``python tests/bench/skips.py`` writes the table; a test compares.
"""

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
from bench_machines import MACHINES, document
from bundles import apply, driver_node, findings, guest, hgx, pcie_4, t4, without_gpu
from test_bench import CASES, edited

from gpunode.checks import Finding, Status, registry

PAGE = Path(__file__).parents[2] / "docs/checks.md"
START = "<!-- table of skips: written by tests/bench/skips.py -->\n"
HEAD = "| check | observed | cause reported by |\n|---|---|---|\n"
POINTER = re.compile(r"\(([a-z]+\.[a-z-]+)(?: reports the cause)?\)$")
MODELS = sorted(
    {machine.gpus[0]["name"].removeprefix("NVIDIA ") for machine in MACHINES.values()}, key=len, reverse=True
)
MODEL = re.compile("|".join([r"(?<= of )[A-Z][^,;]+(?=, a model)", "GH200 [0-9A-Z ]+", *map(re.escape, MODELS)]))
CHANGING = ((MODEL, "MODEL"), (re.compile(r", last at \S+(?=:)"), ""), (re.compile(r"\b\d+(?:\.\d+)*\b"), "N"))
NO_GPU = "no NVIDIA GPU on the PCI bus"
TABLES = (mutants_driver, mutants_fabric, mutants_gpu, mutants_host, mutants_links, mutants_workload)
BASES = (driver_node, guest, hgx, pcie_4, t4, without_gpu)


@cache
def reasons() -> dict[str, frozenset[str]]:
    """Check to the messages of its skips: of all conditions, and of the contract's mutants that skip a check."""
    found: dict[str, set[str]] = {check.id: set() for check in registry}

    def add(judged: list[Finding]) -> None:
        for finding in judged:
            if finding.status is Status.SKIP:
                found[finding.check].add(finding.message)

    for name, machine in CASES:
        add(findings(edited(document(machine), machine, name)))
    for base in BASES:
        add(findings(base()))
    for table in TABLES:
        for mutant in table.MUTANTS:
            if mutant.skips or mutant.becomes is Status.SKIP:
                add(findings(apply(mutant.base(), mutant.edits), mutant.expect))
    return {check: frozenset(messages) for check, messages in found.items()}


def page() -> str:
    """The page with the table as it is now."""
    head, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    return head + start + HEAD + "".join(_row(check, messages) for check, messages in sorted(reasons().items()))


def _row(check: str, messages: frozenset[str]) -> str:
    observed, pointers = set(), set()
    for message in {part for whole in messages for part in whole.split("; ")} - {NO_GPU}:
        match = POINTER.search(message)
        if match:
            pointers.add(match[1])
            continue
        text = message
        for pattern, word in CHANGING:
            text = pattern.sub(word, text)
        observed.add(text.replace("|", "\\|"))
    shown = "<br>".join(sorted(observed)) or ("" if pointers else "no other skip on the bench")
    return f"| `{check}` | {shown} | {', '.join(f'`{pointer}`' for pointer in sorted(pointers))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
