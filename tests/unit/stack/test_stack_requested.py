"""What can be requested beside source, driver and CUDA: ranges, frameworks, kernel policy; and rules explained."""

from datetime import date

import pytest

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.stack import Conflict, GpuGroup, NodePicture, Request, Stack, resolve
from gpunode.stack.resolve import explain_rule, meaning, rule_id

CATALOG = load()
DAY = date(2026, 11, 22)


def node(gpu: str, system: str = "ubuntu-24.04", **more: object) -> NodePicture:
    models = tuple(row.id for row in CATALOG.find_gpu(gpu).gpus)
    picture = NodePicture(os=system, arch="x86_64", gpus=(GpuGroup(label=gpu, models=models),))
    return picture.model_copy(update=more)


def answer(gpu: str, system: str = "ubuntu-24.04", **request: str) -> Stack | Conflict:
    return resolve(Request.model_validate(request), node(gpu, system), CATALOG, DAY)


def stack(gpu: str, system: str = "ubuntu-24.04", **request: str) -> Stack:
    outcome = answer(gpu, system, **request)
    assert isinstance(outcome, Stack), outcome
    return outcome


def clashes(gpu: str, **request: str) -> set[str]:
    outcome = answer(gpu, **request)
    assert isinstance(outcome, Conflict), outcome
    return {clash.rule for clash in outcome.clashes}


@pytest.mark.parametrize(
    ("requested", "version"),
    [
        (">=575.50,<575.60", "575.57.08"),
        (">=580,<580.100", "580.95.05"),
        ("==570.*", "570.211.01"),
        (">=580,!=580.178.04,<590", "580.173.10"),
    ],
)
def test_of_a_range_the_newest_release_inside_is_chosen(requested: str, version: str) -> None:
    chosen = stack("L40S", driver=requested)
    assert chosen.driver.version == version
    assert all(
        package.version is None or not package.with_driver or version in package.version for package in chosen.packages
    )


def test_a_range_without_a_good_release_is_a_conflict_that_names_it() -> None:
    outcome = answer("V100", driver=">=590")
    assert isinstance(outcome, Conflict)
    assert {term.name for term in outcome.terms} == {"gpu", "driver"}
    assert {clash.rule for clash in outcome.clashes} & {"R25-driver-range", "R03-arch-last-branch"}


@pytest.mark.parametrize("requested", [">=", ">=x", "~=580", "<>580", "=580"])
def test_what_is_no_range_is_refused(requested: str) -> None:
    with pytest.raises(UsageError, match="is not a range"):
        answer("T4", driver=requested)


def test_a_framework_release_chooses_its_own_build() -> None:
    chosen = stack("L40S", framework="pytorch==2.13")
    assert chosen.frameworks is not None
    assert (chosen.frameworks.pytorch, chosen.frameworks.pytorch_cuda) == ("2.13", "13.0")


def test_a_framework_that_no_driver_of_the_request_runs_is_refused() -> None:
    """Every wheel of PyTorch 2.13 needs CUDA 12.6 or newer: 470 is below the floor of CUDA 12."""
    outcome = resolve(Request(driver="470", framework="pytorch==2.13"), node("T4", "ubuntu-22.04"), CATALOG, DAY)
    assert isinstance(outcome, Conflict)
    assert {term.name for term in outcome.terms} == {"driver", "framework"}
    assert {clash.rule for clash in outcome.clashes} == {"R20-framework"}


def test_a_framework_that_is_only_planned_is_refused_and_one_without_known_builds_warns() -> None:
    assert clashes("L40S", framework="pytorch==2.16") == {"R20-framework"}
    unknown = next((row for row in CATALOG.frameworks.values() if row.released and not row.builds), None)
    if unknown is not None:
        chosen = stack("L40S", framework=f"{unknown.name}=={unknown.version}")
        assert any(warning.rule == "R20-framework" for warning in chosen.warnings)


@pytest.mark.parametrize("text", ["jax==1.0", "torch", "torch>=2.9", "torch==99.1", "torch==2.9; rm"])
def test_an_unknown_framework_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="framework"):
        answer("T4", framework=text)


def test_a_kernel_policy_reports_what_moves_where_modules_are_signed_and_nothing_where_they_are_built() -> None:
    reported = {
        (source, policy): [
            warning.text
            for warning in stack("T4", source=source, kernel_policy=policy).warnings
            if "R26" in warning.rule
        ]
        for source in ("ubuntu", "nvidia")
        for policy in ("hold", "follow")
    }
    assert "security updates" in reported["ubuntu", "hold"][0]
    assert "rebooted" in reported["ubuntu", "follow"][0]
    assert all("changes nothing" in reported["nvidia", policy][0] for policy in ("hold", "follow"))
    assert not [warning for warning in stack("T4", source="ubuntu").warnings if "R26" in warning.rule]


def test_a_rule_is_explained_by_what_it_states_and_decides() -> None:
    old = explain_rule("r04", Request(cuda="13.0"), node("V100", "ubuntu-22.04"), CATALOG, DAY)
    assert (old.rule, old.chosen) == ("R04-arch-cuda", None)
    assert [(saying.refuses, saying.drivers) for saying in old.says] == [(True, ())]
    floor = explain_rule("R03", Request(), node("V100"), CATALOG, DAY)
    assert all(saying.refuses and saying.drivers for saying in floor.says)
    assert floor.chosen is not None
    assert floor.chosen.startswith("580.")
    assert "eol" in explain_rule("R13-branch-eol", Request(), node("T4"), CATALOG, DAY).decided
    assert meaning("R22").means
    with pytest.raises(UsageError, match="R01-minor-floor"):
        rule_id("R99")
