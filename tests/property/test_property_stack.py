"""Every stack keeps every rule, by a judge of its own; every conflict is minimal; every rule is needed.

GPUNODE_GRID_ONE_IN=N judges one question in N (default 900, with GPUNODE_TEST_ALL=1 300) and explains fewer
conflicts; 1 is the whole grid of more than a million questions, for an hour or two. The judge finds the errors that
were fixed: an overlay reverts each fix. Its bounds are those of recorded indexes and READMEs, the resolver's those of
the catalog.
"""

import json
import os
from collections import Counter
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checker import RULES, Facts, violations
from effort import EVERYTHING, effort
from grid import EARLIER, TODAY, Asked, Grid, asked

from gpunode.catalog import Catalog, load
from gpunode.catalog.read import read
from gpunode.stack import Conflict, Stack, resolve
from gpunode.stack.assemble import assemble
from gpunode.stack.question import Question, restrict, terms
from gpunode.stack.resolve import first_case
from gpunode.stack.rules import rules

ONE_IN = int(os.environ.get("GPUNODE_GRID_ONE_IN", "300" if EVERYTHING else "900"))
REQUESTED = ("R25-driver-range", "R26-kernel-policy")
"""Rules about what was requested and no fact of the vendor: tests/unit/stack/test_stack_requested.py."""
CONFLICTS = effort(12, 60)
"""Conflicts of which minimality is tried."""
OF_A_KIND = effort(2, 4)
"""How many of them with the same terms."""
OFFERS_ONE_IN = effort(40, 20) * ONE_IN
"""Explaining a conflict costs as much as a hundred stacks."""


@pytest.fixture(scope="module")
def grid() -> Grid:
    return Grid(load(), Facts())


def judged(stack: Stack, question: Asked, grid: Grid) -> list[tuple[str, str]]:
    return violations(json.loads(stack.to_json()), question.case, grid.facts)


def test_every_gpu_of_the_facts_is_in_the_catalog(grid: Grid) -> None:
    assert len(grid.gpus) == len(grid.facts.gpus) > 40


def test_every_rule_of_the_facts_is_a_rule_of_ours_and_of_the_checker(grid: Grid) -> None:
    named = {row["id"].split("-")[0] for row in grid.facts.raw["resolver_rules"]}
    known = {rule.id.split("-")[0] for rule in rules}
    assert named <= known == (set(RULES) - {"wish"}) | {name.split("-")[0] for name in REQUESTED}


def test_every_stack_keeps_every_rule(grid: Grid) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for question in grid.thinned(ONE_IN):
        case = first_case(Question(question.request, question.node, grid.catalog, question.case.today))
        counts["stack" if case else "conflict"] += 1
        if case is not None:
            wrong += [(rule, text, question.case) for rule, text in judged(assemble(case), question, grid)]
    print(f"{counts.total()} questions: {counts['stack']} stacks, {counts['conflict']} conflicts")
    assert wrong == []
    assert counts["stack"] > 100
    assert counts["conflict"] > 100


def test_every_conflict_is_minimal(grid: Grid) -> None:
    """Its terms cannot hold together; without any one of them they can."""
    tried: Counter[frozenset[str]] = Counter()
    for question in grid.thinned(5 * ONE_IN):
        today = question.case.today
        answer = resolve(question.request, question.node, grid.catalog, today)
        if isinstance(answer, Stack) or tried[frozenset(term.name for term in answer.terms)] >= OF_A_KIND:
            continue
        tried[frozenset(term.name for term in answer.terms)] += 1
        _must_be_minimal(answer, question, grid, today)
        if tried.total() >= CONFLICTS:
            break
    print(f"{tried.total()} conflicts of {len(tried)} kinds")
    assert tried.total() >= min(CONFLICTS, 20)
    assert len(tried) >= 6


def _must_be_minimal(conflict: Conflict, question: Asked, grid: Grid, today: date) -> None:
    def holds(kept: object) -> bool:
        request, node = restrict(question.request, question.node, kept)  # type: ignore[arg-type]
        # A requested source that is not kept may be any.
        free = question.request.source is not None and request.source is None
        every = (
            [request.model_copy(update={"source": name}) for name in (None, "ubuntu", "debian")] if free else [request]
        )
        return any(first_case(Question(candidate, node, grid.catalog, today)) is not None for candidate in every)

    assert set(conflict.terms) <= set(terms(question.request, question.node)), question.case
    assert not holds(conflict.terms), (conflict.message, question.case)
    for dropped in conflict.terms:
        rest = [term for term in conflict.terms if term != dropped]
        assert holds(rest), (f"still no stack without {dropped}", conflict.message, question.case)
    assert conflict.clashes, question.case


def test_offers_are_stacks_that_keep_the_rules(grid: Grid) -> None:
    """An offer is a stack for the node with one thing changed; the rules about hardware hold for it too."""
    offered = 0
    for question in grid.thinned(OFFERS_ONE_IN):
        answer = resolve(question.request, question.node, grid.catalog, question.case.today)
        if isinstance(answer, Stack):
            continue
        for offer in answer.offers:
            offered += 1
            kept_gpus = {group.label for group in question.node.gpus if any(group.label in g for g in offer.stack.gpus)}
            if len(kept_gpus) < len(question.node.gpus) or (question.node.platform and not offer.stack.platform):
                continue
            about_gpus = ("R03", "R06", "R07", "R08", "R09", "R12", "R14", "R17", "R22")
            wrong = [(rule, text) for rule, text in judged(offer.stack, question, grid) if rule in about_gpus]
            assert wrong == [], (offer.change, question.case)
    print(f"{offered} offers")
    assert offered > 20


WITNESSES: dict[str, dict[str, object]] = {
    "R01-minor-floor": {"gpus": ["A100-SXM4-80GB"], "driver": "570", "cuda": "13.0"},
    "R02-native": {"gpus": ["A100-SXM4-80GB"], "driver": "580", "cuda": "13.2"},
    "R03-arch-last-branch": {"gpus": ["V100-PCIE-16GB"], "driver": "595"},
    "R04-arch-cuda": {"gpus": ["V100-PCIE-16GB"], "cuda": "13.0"},
    "R05-arch-first-cuda": {"gpus": ["L40S"], "cuda": "11.4"},
    "R06-open-required": {"gpus": ["B200"], "driver": "580", "kernel_module": "proprietary"},
    "R07-proprietary-required": {"gpus": ["V100-PCIE-16GB"], "driver": "580", "kernel_module": "open"},
    "R08-no-proprietary": {"gpus": ["A100-SXM4-80GB"], "os": "rhel-8", "driver": "510", "kernel_module": "open"},
    "R09-mixed-flavour": {"gpus": ["V100-PCIE-16GB", "B200"]},
    "R10-gpu-min-driver": {"gpus": ["RTX PRO 6000 Blackwell Server Edition"], "driver": "570"},
    "R11-fm-exact": {"gpus": ["H100 SXM5 80GB"], "count": 8},
    "R12-nvlink5": {"gpus": ["B200"], "count": 8},
    "R13-branch-eol": {"gpus": ["A100-SXM4-80GB"], "driver": "570"},
    "R14-compat-matrix": {
        "gpus": ["GeForce RTX 4090"],
        "os": "rhel-9",
        "driver": "535",
        "cuda": "13.0",
        "today": EARLIER,
    },
    "R15-distro-repo": {"gpus": ["A100-SXM4-80GB"], "driver": "580", "os": "ubuntu-26.04"},
    "R16-repo-mix": {
        "gpus": ["A100-SXM4-80GB"],
        "installed": [
            ("nvidia-dkms-580-open", "580.95.05-1", "nvidia"),
            ("libnvidia-compute-580", "580.126.09-0ubuntu0.24.04.1", "ubuntu"),
        ],
    },
    "R17-dcgm": {"gpus": ["A100-SXM4-80GB"]},
    "R18-ctk": {"gpus": ["A100-SXM4-80GB"]},
    "R19-gdr": {"gpus": ["A100-SXM4-80GB"], "kernel": "6.8.0-60-generic"},
    "R20-framework": {"gpus": ["A100-SXM4-80GB"]},
    "R21-no-service": {"gpus": ["A100-SXM4-80GB"], "count": 8, "os": "debian-12", "source": "debian"},
    "R22-host-arch": {"gpus": ["GH200 96GB HBM3"], "arch": "x86_64"},
    "R23-kernel-floor": {"gpus": ["B200"], "kernel": "4.4.0-210-generic"},
    "R24-toolkit-source": {"gpus": ["A100-SXM4-80GB"], "os": "debian-12", "source": "debian", "toolkit": "12.2"},
    "R25-driver-range": {"gpus": ["A100-SXM4-80GB"], "driver": ">=580,<590"},
    "R26-kernel-policy": {"gpus": ["A100-SXM4-80GB"], "kernel_policy": "hold"},
}
"""One question for each rule that only this rule answers rightly."""


def test_every_rule_has_a_witness() -> None:
    assert list(WITNESSES) == [rule.id for rule in rules]


@pytest.mark.parametrize("rule_id", list(WITNESSES))
def test_without_the_rule_the_checker_finds_a_violation(rule_id: str, grid: Grid) -> None:
    question = asked(grid, {"today": TODAY, "os": "ubuntu-24.04", **WITNESSES[rule_id]})
    today = question.case.today
    answer = resolve(question.request, question.node, grid.catalog, today)
    if isinstance(answer, Stack):
        assert judged(answer, question, grid) == []
    without = resolve(question.request, question.node, grid.catalog, today, off={rule_id})
    assert isinstance(without, Stack), "the question has no stack even without the rule: another rule refuses it too"
    assert judged(without, question, grid) != []


A100 = "A100-PCIE-40GB"
REVERTED: list[tuple[str, str, dict[str, Any]]] = [
    # rule that finds it, overlay that reverts the fix, question
    ("R05", "branches: {418: {native_cuda: null}}", {"gpus": [A100], "os": "rhel-8", "driver": "418"}),
    (
        "R05",
        "architectures: {ampere: {first_cuda: {8.6: 11.0}}}",
        {"gpus": ["A40"], "os": "rhel-8", "driver": "450"},
    ),
    (
        "R10",
        "gpus: {l40s: {first_listed: {535: 535.43.02}}}",
        {"gpus": ["L40S"], "os": "rhel-9", "driver": "535.54.03"},
    ),
    (
        "R10",
        "gpus: {l4: {first_listed: {525: 525.53}}}",
        {"gpus": ["L4"], "os": "rhel-9", "driver": "525.60.13", "kernel_module": "proprietary"},
    ),
    ("R10", "gpus: {l40s: {first_listed: {525: null}}}", {"gpus": ["L40S"], "os": "rhel-9", "driver": "525"}),
    (
        "R15",
        "systems: {ubuntu-24.04: {origins: {nvidia: {first_branch: null}}}}",
        {"gpus": [A100], "os": "ubuntu-24.04", "driver": "470"},
    ),
    (
        "R15",
        "systems: {rhel-10: {origins: {nvidia: {first_branch: null}}}}",
        {"gpus": [A100], "os": "rhel-10", "driver": "525"},
    ),
    (
        "R15",
        "systems: {debian-13: {origins: {nvidia: {first_branch: null}}}}",
        {"gpus": [A100], "os": "debian-13", "driver": "535"},
    ),
    (
        "R15",
        "systems: {ubuntu-22.04: {origins: {nvidia: {first_branch: null}}}}",
        {"gpus": ["Tesla K80"], "os": "ubuntu-22.04"},
    ),
    (
        "R15",
        "systems: {ubuntu-24.04: {origins: {ubuntu: {branches: []}}}}",
        {"gpus": [A100], "os": "ubuntu-24.04", "source": "ubuntu", "driver": "560"},
    ),
    (
        "R24",
        "systems: {ubuntu-24.04: {origins: {nvidia: {first_toolkit: null}}}}",
        {"gpus": [A100], "os": "ubuntu-24.04", "toolkit": "11.8"},
    ),
    (
        "R20",
        "frameworks: {tensorflow-2.21: {arches: [x86_64, aarch64]}}",
        {"gpus": ["GH200 96GB HBM3"], "os": "ubuntu-24.04"},
    ),
    (
        "R23",
        "branches: {595: {kernel_floor: 3.10}}",
        {
            "gpus": ["L40S"],
            "os": "rhel-9",
            "driver": "595",
            "kernel": "4.14.0-1",
            "kernel_module": "proprietary",
        },
    ),
]


@cache
def judge() -> tuple[Facts, Grid]:
    """The checker's facts, and the questions over them."""
    facts = Facts()
    return facts, Grid(load(), facts)


@pytest.mark.parametrize(("rule", "overlay", "question"), REVERTED, ids=[f"{row[0]} {row[1]}" for row in REVERTED])
def test_the_checker_finds_a_reverted_fix(rule: str, overlay: str, question: dict[str, Any], tmp_path: Path) -> None:
    facts, grid = judge()
    query = asked(grid, {"today": TODAY, **question})
    fixed = resolve(query.request, query.node, load(), TODAY)
    if isinstance(fixed, Stack):
        assert violations(json.loads(fixed.to_json()), query.case, facts) == []
    else:
        assert isinstance(fixed, Conflict)
    path = tmp_path / "reverted.yml"
    path.write_text(overlay, encoding="utf-8")
    broken = resolve(query.request, query.node, Catalog([read(path)]), TODAY)
    assert isinstance(broken, Stack), broken.message
    assert rule in [violated for violated, _ in violations(json.loads(broken.to_json()), query.case, facts)]


def test_a_release_after_the_last_list_that_was_read_is_not_judged_by_it() -> None:
    facts, grid = judge()
    query = asked(grid, {"today": TODAY, "gpus": ["H200 NVL"], "os": "rhel-9", "driver": "560"})
    stack = resolve(query.request, query.node, load(), TODAY)
    assert isinstance(stack, Stack), stack.message
    assert violations(json.loads(stack.to_json()), query.case, facts) == []
