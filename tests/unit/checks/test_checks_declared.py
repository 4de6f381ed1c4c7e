"""Checks as data: elements with a value, their number in one finding, and the messages."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpunode.checks.declared import DeclaredCheck, UnknownFact, register, steps
from gpunode.checks.registry import Expectation, Finding, Registry
from gpunode.checks.thresholds import Overrides, in_force
from gpunode.facts.node import NodeFacts
from gpunode.facts.units import Unit

ROW = {
    "id": "site.units",
    "category": "host",
    "fact": "units[active=failed].name",
    "count": True,
    "comparison": "at_most",
    "value": 1,
    "good": "{measured:failed unit}",
    "message": "{measured:failed unit}: {items}",
    "means": "At most one unit is failed.",
    "remedy": "systemctl status UNIT",
    "state": "observe",
    "actions": ("fix_configuration",),
}


def node(*states: str) -> NodeFacts:
    units = [Unit(name=f"{9 - at}.service", load="loaded", active=state, sub="") for at, state in enumerate(states)]
    return NodeFacts(host="node", collected_at="2026-11-20T12:00:00Z", units=tuple(units))


def findings(facts: NodeFacts, **changes: Any) -> Iterator[Finding]:
    registry = Registry()
    register(registry, DeclaredCheck.model_validate(ROW | changes))
    yield from registry["site.units"].findings(facts, Expectation())


@pytest.mark.parametrize(
    ("states", "status", "message"),
    [
        ((), "pass", "0 failed units"),
        (("active", "failed", "active"), "pass", "1 failed unit"),
        (("failed", "active", "failed"), "fail", "2 failed units: 7.service, 9.service"),
    ],
)
def test_the_number_of_elements_with_a_value_is_one_finding(states: tuple[str, ...], status: str, message: str) -> None:
    (finding,) = findings(node(*states))
    assert (finding.status, finding.message, finding.measured) == (status, message, states.count("failed"))


def test_an_unknown_list_is_an_error_and_a_policy_sets_the_number() -> None:
    (finding,) = findings(node("failed").model_copy(update={"units": None}))
    assert finding.status == "error"
    with in_force(Overrides({"site.units.value": {"default": 0}}, "policy site.yml")):
        (finding,) = findings(node("failed"))
    assert (finding.status, finding.expected) == ("fail", 0)


def test_without_a_number_each_element_with_the_value_has_a_finding() -> None:
    found = list(findings(node("failed", "active"), count=False, comparison="none_of", value=("9.service",)))
    assert [finding.message for finding in found] == ["9.service: {items}"]
    (finding,) = findings(node("active"), count=False, comparison="none_of", value=("9.service",))
    assert finding.status == "skip"


@pytest.mark.parametrize("path", ["units[actve=failed].name", "units[active=].name", "memory[total_mib=1]"])
def test_a_path_that_selects_nothing_that_exists_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"actve|expected names|memory is not a list"):
        steps(path)
    assert issubclass(UnknownFact, ValueError)


def test_a_number_of_no_list_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory\.total_mib has no list"):
        list(findings(node(), fact="memory.total_mib"))
    with pytest.raises(ValueError, match="count needs a number"):
        list(findings(node(), comparison="equals", value="none"))


@pytest.mark.parametrize(
    ("states", "status", "message"),
    [
        (("active", "failed", "active"), "pass", "units[].active is failed"),
        (("active", "active"), "fail", "none of active, active is failed"),
        ((), "fail", "none of nothing is failed"),
    ],
)
def test_one_element_suffices(states: tuple[str, ...], status: str, message: str) -> None:
    changes = {"count": False, "any": True, "fact": "units[].active", "comparison": "equals", "value": "failed"}
    texts = {"good": None, "message": "none of {items} is {expected}"}
    (finding,) = findings(node(*states), **changes, **texts)
    assert (finding.status, finding.message) == (status, message)
    (finding,) = findings(node().model_copy(update={"units": None}), **changes, **texts)
    assert finding.status == "error"


def test_an_element_that_cannot_be_compared_leaves_the_result_open_unless_another_one_holds() -> None:
    changes = {"count": False, "any": True, "fact": "units[].name", "comparison": "at_least", "value": 1}
    (finding,) = findings(node("active"), **changes)
    assert finding.status == "error"
    with pytest.raises(ValueError, match="any: not together with count"):
        list(findings(node(), any=True))
    with pytest.raises(ValueError, match=r"any: memory\.total_mib has no list"):
        list(findings(node(), count=False, any=True, fact="memory.total_mib"))
