"""The checker finds the errors that were fixed: each fix is reverted by an overlay, and the stack is judged.

The checker's bounds are those of recorded indexes and READMEs, the resolver's those of the catalog.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from checker import Facts, violations
from grid import TODAY, Grid, asked

from gpunode.catalog import Catalog, load
from gpunode.catalog.read import read
from gpunode.stack import Conflict, Stack, resolve

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
