"""A stack names the bounds that are absent or unsure, by fact and rule."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from stack_samples import CATALOG, TODAY, group, parts

from gpunode.catalog import Catalog
from gpunode.catalog.lint import lint
from gpunode.catalog.read import read
from gpunode.cli.plan import exit_code
from gpunode.errors import Exit
from gpunode.stack import Conflict, NodePicture, Plan, Stack, resolve, undetermined
from gpunode.stack.plan import PlanGroup
from gpunode.stack.rules import ROWS, rules

Settings = dict[str, Any]
WITHOUT_BOUND = {"R09", "R11", "R12", "R13", "R16", "R17", "R18", "R19", "R20", "R21", "R25", "R26"}
"""Rules without a declared bound: ``rules.Declared`` has the reason."""

WITHOUT: list[tuple[str, str, Settings, str]] = [
    # overlay that takes a bound away, GPU, request, the warning's fact; the rule is the last column's first word
    ("branches: {418: {native_cuda: null}}", "K80", {"os": "rhel-8", "driver": "418"}, "R05 branches.418.native_cuda"),
    (
        "branches: {550: {kernel_floor: null}}",
        "A100 80GB PCIe",
        {"driver": "550", "kernel": "5.15.0-1-generic"},
        "R23 branches.550.kernel_floor",
    ),
    (
        "systems: {ubuntu-24.04: {origins: {nvidia: {first_branch: null}}}}",
        "L40S",
        {},
        "R15 systems.ubuntu-24.04.origins.nvidia.first_branch",
    ),
    (
        "systems: {ubuntu-24.04: {origins: {nvidia: {first_toolkit: null}}}}",
        "L40S",
        {"toolkit": "12.9"},
        "R24 systems.ubuntu-24.04.origins.nvidia.first_toolkit",
    ),
]
UNSURE: list[tuple[str, str, Settings, str]] = [
    (
        "branches: {610: {unsure: {modules: why}}}",
        "L40S",
        {"driver": "610", "kernel_module": "proprietary"},
        "R08 branches.610.modules",
    ),
    ("gpus: {l40s: {unsure: {modules: why}}}", "L40S", {}, "R06 gpus.l40s.modules"),
    ("architectures: {ada: {unsure: {first_cuda: why}}}", "L40S", {}, "R05 architectures.ada.first_cuda"),
    (
        "cuda_majors: {13: {unsure: {min_compute_capability: why}}}",
        "L40S",
        {"cuda": "13.0"},
        "R04 cuda_majors.13.min_compute_capability",
    ),
    ("cuda_majors: {13: {unsure: {floor: why}}}", "L40S", {"cuda": "13.0"}, "R01 cuda_majors.13.floor"),
    ("toolkits: {13.0.3: {unsure: {branch: why}}}", "L40S", {"cuda": "13.0"}, "R02 toolkits.13.0.3.branch"),
    (
        "gpus: {v100-pcie-16gb: {unsure: {last_branch: why}}}",
        "V100-PCIE-16GB",
        {},
        "R03 gpus.v100-pcie-16gb.last_branch",
    ),
    ("gpus: {l40s: {unsure: {hosts: why}}}", "L40S", {}, "R22 gpus.l40s.hosts"),
    (
        "forward_compat: {13.0: {unsure: {works_on: why}}}\nbranches: {570: {eol_vendor: null}}",
        "L40S",
        {"driver": "570", "cuda": "13.0"},
        "R14 forward_compat.13.0.works_on",
    ),
]


def overlaid(tmp_path: Path, text: str) -> Catalog:
    path = tmp_path / "site.yml"
    path.write_text(text, encoding="utf-8")
    return Catalog([read(path)])


def answered(gpu: str, settings: Settings, catalog: Catalog) -> Stack:
    answer = resolve(*parts(group(gpu), **settings), catalog, TODAY)
    assert isinstance(answer, Stack), answer.message
    return answer


@pytest.mark.parametrize(("overlay", "gpu", "settings", "bound"), WITHOUT)
def test_acceptance_without_a_bound_is_a_warning(
    overlay: str, gpu: str, settings: Settings, bound: str, tmp_path: Path
) -> None:
    rule, fact = bound.split()
    with_bound = [w.text for w in answered(gpu, settings, CATALOG).warnings if fact in w.text]
    assert with_bound == []
    without = [w for w in answered(gpu, settings, overlaid(tmp_path, overlay)).warnings if fact in w.text]
    assert [w.rule.split("-")[0] for w in without] == [rule]
    assert without[0].text.startswith("accepted without")
    assert "--overlay" in without[0].text


@pytest.mark.parametrize(("overlay", "gpu", "settings", "bound"), UNSURE)
def test_acceptance_on_an_unsure_bound_is_a_warning(
    overlay: str, gpu: str, settings: Settings, bound: str, tmp_path: Path
) -> None:
    rule, fact = bound.split()
    warnings = [w for w in answered(gpu, settings, overlaid(tmp_path, overlay)).warnings if fact in w.text]
    assert rule in [w.rule.split("-")[0] for w in warnings]
    assert all(w.text.startswith("rests on") for w in warnings)


def test_a_release_before_the_lists_rests_on_no_list() -> None:
    warned = answered("A100 80GB PCIe", {"os": "rhel-8", "driver": "470"}, CATALOG).warnings
    assert any(w.rule == "R10-gpu-min-driver" and "a100-pcie-80gb.first_listed" in w.text for w in warned)


def test_what_is_known_is_not_warned_of() -> None:
    for gpu in ("T4", "V100-PCIE-16GB", "L40S", "A100 80GB PCIe", "H100 PCIe"):
        assert answered(gpu, {"kernel": "6.8.0-60-generic", "cuda": "12.9"}, CATALOG).warnings == (), gpu


def test_every_rule_declares_its_bounds_or_is_known_to_have_none() -> None:
    needing = {rule.id.split("-")[0] for rule in rules if rule.needs}
    assert {rule.id.split("-")[0] for rule in rules} == needing | WITHOUT_BOUND
    sections = {need.split(".")[0] for rule in rules for need in rule.needs}
    assert sections == set(ROWS) - {"platforms"} | {"systems"}
    tried = {bound.split()[0] for *_, bound in (*WITHOUT, *UNSURE)} | {"R07", "R10"}
    assert tried == needing


def test_strict_fails_on_a_warning() -> None:
    def plan_of(stack: Stack | Conflict) -> Plan:
        groups = (PlanGroup(hosts=(), stack=stack if isinstance(stack, Stack) else None),)
        request, _ = parts()
        return Plan(today=TODAY, request=request, groups=groups)

    clean, warned = answered("L40S", {}, CATALOG), answered("L40S", {"driver": "570"}, CATALOG)
    assert (clean.warnings == (), warned.warnings == ()) == (True, False)
    assert exit_code(plan_of(clean), strict=True) == Exit.GOOD
    assert exit_code(plan_of(warned)) == Exit.GOOD
    assert exit_code(plan_of(warned), strict=True) == Exit.FAILED


def test_the_row_that_an_unknown_gpu_asks_for_makes_it_known(tmp_path: Path) -> None:
    from test_stack_plan import device, facts  # noqa: PLC0415 (its sample facts)

    node = facts(pci=(device("10de:fffe"),))
    reason = undetermined(node, NodePicture(os="ubuntu-24.04", arch="x86_64", unknown_gpus=("10de:fffe",)))
    assert reason is not None
    row = reason[reason.index("gpus: ") :]
    filled = row.replace("ARCHITECTURE", "hopper").replace("X.Y", "9.0").replace("YYYY-MM-DD", "2026-11-01")
    filled = filled.replace("RELEASE", "595.58.03").replace("NAME", "New GPU")
    assert not re.search(r"\b[A-Z]{4,}\b", filled)
    assert yaml.safe_load(filled)["gpus"]
    catalog = overlaid(tmp_path, filled)
    assert lint(catalog) == []
    assert catalog.gpu_by_pci("10de:fffe") is not None
