"""Every check has input that it passes, mutants that it alone fails, and data without which it is an error.

A mutant is an edit of raw text in a bundle. The whole map of verdicts is compared before and after: the named check
turns, others may turn to ``skip`` where the mutant declares it, and nothing else moves.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TextIO

import mutants_driver
import mutants_exposure
import mutants_fabric
import mutants_gpu
import mutants_host
import mutants_links
import mutants_measured
import mutants_services
import mutants_workload
import pytest
from bundles import (
    PLACEHOLDER,
    Base,
    Edit,
    Mutant,
    apply,
    by_check,
    driver_node,
    facts_of,
    findings,
    grace,
    guest,
    hgx,
    hgx_4,
    hgx_b200,
    hgx_measured,
    pcie_4,
    pcie_measured,
    stdout,
    t4,
    verdicts,
    with_two_gpus,
)
from effort import effort
from machines import Document

from gpunode.checks import Expectation, Status, registry
from gpunode.checks.registry import Check
from gpunode.facts import NodeFacts
from gpunode.judging.report import WORST_FIRST, unreachable

PASS, WARN, FAIL, SKIP, ERROR = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.ERROR
TABLES = (
    mutants_driver,
    mutants_fabric,
    mutants_gpu,
    mutants_links,
    mutants_host,
    mutants_services,
    mutants_workload,
    mutants_exposure,
    mutants_measured,
)
MUTANTS = [mutant for table in TABLES for mutant in table.MUTANTS]
MISSING = {check: cases for table in TABLES for check, cases in table.MISSING.items()}
HEALTHY: dict[Base, int] = {
    hgx: 65,
    hgx_b200: 60,
    hgx_4: 58,
    pcie_4: 55,
    with_two_gpus: 55,
    t4: 50,
    guest: 42,
    grace: 50,
    hgx_measured: 82,
    pcie_measured: 72,
}
"""Healthy nodes, and how many checks pass on each at least."""

# A host that could not be reached has no bundle, and so nothing to edit: the report has the error of the check.
OF_THE_REPORT = {"node.reachable"}


def moved(before: Mapping[str, Status], after: Mapping[str, Status]) -> dict[str, Status]:
    return {check: status for check, status in after.items() if status is not before[check]}


@pytest.mark.parametrize("base", HEALTHY, ids=lambda base: base.__name__)
def test_a_healthy_node_has_no_fault(base: Base) -> None:
    reported = findings(base())
    assert [finding for finding in reported if finding.status in (FAIL, ERROR)] == []
    assert Counter(verdicts(base()).values())[PASS] >= HEALTHY[base]
    assert all(finding.message for finding in reported)


def test_no_text_of_a_check_has_a_name_in_braces() -> None:
    assert [check.id for check in registry if PLACEHOLDER.search(f"{check.means} {check.remedy}")] == []


def test_every_check_passes_on_a_healthy_node() -> None:
    passed = {check for base in HEALTHY for check, status in verdicts(base()).items() if status is PASS}
    assert passed == {check.id for check in registry}


def test_the_node_without_a_gpu_is_judged_as_far_as_it_can_be() -> None:
    statuses = verdicts(driver_node())
    assert {
        check: statuses[check]
        for check in (
            "node.reachable",
            "gpu.present",
            "driver.module-built",
            "driver.module-loaded",
            "driver.closure",
            "driver.held",
            "driver.origin",
            "driver.nouveau",
            "gpu.count",
            "node.units-failed",
        )
    } == {
        "node.reachable": PASS,
        "gpu.present": ERROR,
        "driver.module-built": PASS,
        "driver.module-loaded": SKIP,
        "driver.closure": PASS,
        "driver.held": PASS,
        "driver.origin": PASS,
        "driver.nouveau": PASS,
        "gpu.count": SKIP,
        "node.units-failed": PASS,
    }
    # What needs a GPU has none to look at; the probe that recorded the bundle did not look at the rest.
    assert set(statuses.values()) == {PASS, SKIP, ERROR}


def test_a_node_meant_to_have_no_gpu_is_skip_for_all_that_needs_one() -> None:
    before, after = verdicts(driver_node()), verdicts(driver_node(), Expectation(gpus=0))
    assert moved(before, after) == {"gpu.present": SKIP}
    assert {after[check.id] for check in registry if check.needs_gpu} == {SKIP}


@cache
def healthy(base: Base) -> Document:
    """Return a healthy node's bundle. Not to be changed."""
    return base()


@cache
def before(base: Base, expect: str = "{}") -> Mapping[str, Status]:
    """Return the verdicts on a healthy node, by an expectation as JSON."""
    return verdicts(healthy(base), Expectation.model_validate_json(expect))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.check}: {mutant.name}")
def test_mutant_turns_its_check_and_nothing_else_and_is_reported_with_a_remedy(mutant: Mutant) -> None:
    intact = before(mutant.base, mutant.expect.model_dump_json(exclude_defaults=True))
    reported = findings(apply(healthy(mutant.base), mutant.edits), mutant.expect)
    assert intact[mutant.check] is PASS
    assert moved(intact, by_check(reported)) == {
        mutant.check: mutant.becomes,
        **dict.fromkeys(mutant.skips, SKIP),
        **dict.fromkeys(mutant.unknown, ERROR),
    }
    of_check = [finding for finding in reported if finding.check == mutant.check and finding.status is mutant.becomes]
    assert len({finding.component for finding in of_check}) == len(of_check)
    assert len(of_check) == 1 or mutant.everywhere
    assert all(finding.remedy and finding.message for finding in of_check)
    assert [finding for finding in of_check if PLACEHOLDER.search(f"{finding.message} {finding.remedy}")] == []


@pytest.mark.parametrize(
    ("check", "base", "edits"), [(check, *case) for check, cases in MISSING.items() for case in cases]
)
def test_missing_data_is_an_error_with_its_reason(check: str, base: Base, edits: list[Edit]) -> None:
    assert before(base)[check] is PASS
    of_check = [finding for finding in findings(apply(healthy(base), edits)) if finding.check == check]
    assert ERROR in {finding.status for finding in of_check}
    assert FAIL not in {finding.status for finding in of_check}
    assert all(finding.message for finding in of_check)


PARTIAL = [check for check in registry if check.partial]


@pytest.mark.parametrize("check", PARTIAL, ids=lambda check: check.id)
def test_one_fact_is_enough_to_fail_and_none_to_pass(check: Check) -> None:
    """Take each need of a check away: a healthy node's becomes unknown, a failure stays while another fact shows it."""
    for base in HEALTHY:
        node = facts_of(json.dumps(healthy(base)))
        if before(base)[check.id] is PASS:
            assert {worst_without(check, node, need) for need in check.needs} <= {ERROR, SKIP}, base.__name__
    for mutant in (mutant for mutant in MUTANTS if mutant.check == check.id and mutant.becomes is FAIL):
        node = facts_of(json.dumps(apply(healthy(mutant.base), mutant.edits)))
        statuses = [worst_without(check, node, need) for need in check.needs]
        assert set(statuses) <= {FAIL, ERROR, SKIP}
        assert statuses.count(FAIL) * 2 >= len(statuses), mutant.name


def worst_without(check: Check, node: NodeFacts, need: str) -> Status:
    """Return a check's verdict on a node of which one fact is unknown."""
    without = node.model_copy(update={need: None, "gaps": {**node.gaps, need: "dkms status did not answer in time"}})
    return min((finding.status for finding in check.findings(without, Expectation())), key=WORST_FIRST.index)


def sampled(every: Iterable[Any], first: int = 0) -> list[Any]:
    """Return every third, or with GPUNODE_TEST_ALL=1 each, from the one of that number on."""
    step = effort(3, 1)
    return list(every)[first % step :: step]


@pytest.mark.parametrize("base", [driver_node, t4])
@pytest.mark.parametrize("part", ["commands", "files"])
def test_nothing_gets_better_by_missing_data(base: Base, part: str) -> None:
    """Take each answer out of the bundle in turn: what did not pass before does not pass after."""
    for key in sampled(healthy(base)[part]):
        after = verdicts(apply(healthy(base), [Edit((part, key), None, None if part == "files" else GARBLED)]))
        assert not [check for check, status in moved(before(base), after).items() if status is PASS], key


WORDS = ("N/A", "[Unknown Error]", "GPU is lost", "-1", "\N{SNOWMAN}")
GARBLED = {
    "argv": ["tool"],
    "rc": 124,
    "stdout": "",
    "stderr": "killed",
    "seconds": 30.0,
    "timed_out": True,
    "truncated": False,
}


@pytest.mark.parametrize("base", [with_two_gpus, t4])
@pytest.mark.parametrize("word", WORDS)
def test_no_word_of_nvidia_smi_breaks_a_check_or_mends_one(base: Base, word: str) -> None:
    """Put the word into every value of GPU 0 in turn."""
    xml = healthy(base)["commands"]["nvidia-smi-xml"]["stdout"]
    values = re.findall(r"<(\w+)>([^<\n]+)</\1>", xml.partition("<gpu id")[2].partition("</gpu>")[0])
    for tag, value in sampled(dict.fromkeys(values), WORDS.index(word)):
        edit = stdout("nvidia-smi-xml", f"<{tag}>{value}</{tag}>", f"<{tag}>{word}</{tag}>")
        reported = findings(apply(healthy(base), [edit]))
        assert not [finding for finding in reported if "failed to run" in finding.message], tag
        assert not [check for check, status in moved(before(base), by_check(reported)).items() if status is PASS], tag
    assert len(values) > 50


GARBAGE = ("", "garbage\n", "\x00\xff" * 50, "1\t2\t3\n", "-1\n", "999999999999999999999\n")


@pytest.mark.parametrize("base", [hgx, t4])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_garbage_breaks_a_check(base: Base, garbage: str) -> None:
    """Everything that a tool printed, and then everything that a file held, is garbage, each in turn."""
    document = healthy(base)
    places = [("commands", key, "stdout") for key in document["commands"]] + [
        ("files", key) for key in document["files"]
    ]
    step = max(1, len(places) // effort(20, 60))
    for keys in places[GARBAGE.index(garbage) % step :: step]:
        reported = findings(apply(document, [Edit(keys, None, garbage)]))
        assert not [finding for finding in reported if "failed to run" in finding.message], keys
        assert {finding.check for finding in reported} == {check.id for check in registry}


def test_a_host_out_of_reach_has_no_verdict_but_that() -> None:
    (finding,) = unreachable("far", "no route to host", 1.0).findings
    assert (finding.check, finding.status) == ("node.reachable", ERROR)


def table() -> dict[str, tuple[int, int, int]]:
    """Check id to its number of passing fixtures, mutants and missing-data cases."""
    passing = [verdicts(base()) for base in (driver_node, *HEALTHY)]
    return {
        check.id: (
            sum(statuses[check.id] is PASS for statuses in passing),
            sum(mutant.check == check.id for mutant in MUTANTS) + (check.id in OF_THE_REPORT),
            len(MISSING.get(check.id, ())) + (check.id in OF_THE_REPORT),
        )
        for check in registry
    }


def print_table(rows: Mapping[str, tuple[int, int, int]], stream: TextIO | None = None) -> None:
    print(f"\n{'check':32}{'passes':>8}{'mutants':>9}{'missing':>9}", file=stream)
    for check, numbers in rows.items():
        print(f"{check:32}{numbers[0]:8}{numbers[1]:9}{numbers[2]:9}", file=stream)


def test_every_check_has_all_three(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table()
    with capsys.disabled():
        print_table(rows)
    assert {check: numbers for check, numbers in rows.items() if 0 in numbers} == {}
