"""The registry: what is not seen is never good, and what reports nothing is an error; comparators agree with Python."""

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypedDict

import pytest
from effort import effort

from gpunode.catalog import load
from gpunode.checks.actions import State, action, command
from gpunode.checks.compare import at_least, at_most, equals, failed, first_fault, matches, passed, warned
from gpunode.checks.registry import CheckResult, Expectation, Registry, Status, judge
from gpunode.checks.thresholds import Overrides, Threshold, in_force
from gpunode.facts.node import NodeFacts
from gpunode.facts.pci import PciDevice

GPU = PciDevice(
    slot="0000:1a:00.0", vendor_id="10de", device_id="26b9", subsystem_id=None, class_id="030200", driver=None
)


class Texts(TypedDict):
    """What every check declares."""

    means: str
    remedy: str
    actions: tuple[str, ...]
    state: Literal["none"]


TEXTS: Texts = {"means": "It means.", "remedy": "Mend it.", "actions": ("none",), "state": "none"}
BARE = NodeFacts(host="node", collected_at="2026-11-20T12:00:00Z")


def one_check(
    *, needs: tuple[str, ...] = (), needs_gpu: bool = False, results: tuple[CheckResult, ...] = ()
) -> Registry:
    registry = Registry()

    @registry.check("a.check", needs=needs, needs_gpu=needs_gpu, category="host", **TEXTS)
    def function(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
        yield from results

    return registry


def nothing(node: NodeFacts) -> Iterator[CheckResult]:
    yield from ()


def found(registry: Registry, node: NodeFacts, expect: Expectation | None = None) -> tuple[Status, str, str | None]:
    (finding,) = registry["a.check"].findings(node, expect or Expectation())
    return finding.status, finding.message, finding.remedy


PASS = (CheckResult(Status.PASS, "good"),)


def test_a_check_that_reports_nothing_is_an_error() -> None:
    assert found(one_check(), BARE)[0] is Status.ERROR


def test_a_check_that_breaks_is_an_error_and_stops_no_other() -> None:
    registry = Registry()

    @registry.check("a.check", category="host", **TEXTS)
    def function(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
        yield CheckResult(Status.PASS, "so far so good")
        raise KeyError("index")

    assert found(registry, BARE) == (Status.ERROR, "the check failed to run: KeyError: 'index'", None)


def test_a_gap_is_an_error_with_its_reason() -> None:
    node = BARE.model_copy(update={"gaps": {"kernels": "uname did not answer"}})
    assert found(one_check(needs=("kernels",), results=PASS), node) == (Status.ERROR, "uname did not answer", None)


def test_none_without_a_reason_is_an_error_too() -> None:
    assert found(one_check(needs=("kernels",), results=PASS), BARE)[0] is Status.ERROR


def test_none_that_reports_something_is_judged() -> None:
    assert found(one_check(needs=("loaded_driver",), results=PASS), BARE)[0] is Status.PASS


def test_no_gpu_comes_before_missing_data() -> None:
    registry = one_check(needs=("kernels",), needs_gpu=True, results=PASS)
    without = BARE.model_copy(update={"pci": ()})
    assert found(registry, without)[:2] == (Status.SKIP, "no NVIDIA GPU on the PCI bus")
    assert found(registry, without, Expectation(gpus=0))[:2] == (
        Status.SKIP,
        "the site file expects no GPU",
    )
    assert found(registry, BARE.model_copy(update={"pci": (GPU,)}))[0] is Status.ERROR


def test_a_bus_that_was_not_seen_is_an_error_not_a_skip() -> None:
    assert found(one_check(needs_gpu=True, results=PASS), BARE)[0] is Status.ERROR


@pytest.mark.parametrize(
    ("status", "remedy"), [("pass", None), ("skip", None), ("warn", "Mend it."), ("fail", "Mend it.")]
)
def test_only_what_needs_repair_has_a_remedy(status: str, remedy: str | None) -> None:
    assert found(one_check(results=(CheckResult(Status(status), "so"),)), BARE)[2] == remedy


def test_an_id_is_registered_once_and_needs_are_facts() -> None:
    registry = one_check()
    with pytest.raises(ValueError, match="twice"):
        registry.check("a.check", **TEXTS)
    with pytest.raises(ValueError, match="nonsense"):
        registry.check("b.check", needs=("nonsense",), **TEXTS)
    with pytest.raises(ValueError, match="category"):
        registry.check("b.check", **TEXTS)
    with pytest.raises(ValueError, match="unknown action reboot"):
        registry.check("host.b", means="", remedy="", state="none", actions=("reboot",))(nothing)
    with pytest.raises(ValueError, match="drian"):
        registry.check("host.b", means="", remedy="", state="drian", actions=("none",))(nothing)
    with pytest.raises(ValueError, match="remedies"):
        registry.check("host.b", **TEXTS, remedies="")(nothing)
    assert "host.b" not in registry


def test_only_the_named_checks_are_run() -> None:
    assert {finding.check for finding in judge(BARE, Expectation(), only=["node.reachable"])} == {"node.reachable"}


def limit(name: str = "a.check.most", default: float = 5) -> Threshold:
    return Threshold(
        name, default, "°C", "Above it: a warning.", source="this test", by={"hopper": 7, "h100-sxm5-80gb": 8}
    )


def test_two_thresholds_do_not_share_a_name() -> None:
    registry = Registry()
    shared = limit()
    registry.check("host.a", **TEXTS, thresholds=(shared,))(nothing)
    registry.check("host.b", **TEXTS, thresholds=(shared,))(nothing)
    with pytest.raises(ValueError, match=r"a\.check\.most"):
        registry.check("host.c", **TEXTS, thresholds=(limit(),))(nothing)


def test_the_policy_counts_before_the_check_and_the_model_before_all() -> None:
    h100, h200, l40s = (load().find_gpu(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "L40S"))
    most = limit()
    assert [most.value, most.of(l40s), most.of(h200), most.of(h100)] == [5, 5, 7, 8]
    with in_force(Overrides({"a.check.most": {"hopper": 1}}, "policy site.yml")):
        assert [most.value, most.of(l40s), most.of(h200), most.of(h100)] == [5, 5, 1, 1]
    with in_force(Overrides({"a.check.most": {"default": 2, "h100-sxm5-80gb": 3}}, "policy site.yml")):
        assert [most.value, most.of(l40s), most.of(h200), most.of(h100)] == [2, 2, 2, 3]
    assert most.value == 5


def test_a_finding_names_the_limits_that_the_policy_set() -> None:
    registry = Registry()
    most = limit()

    @registry.check("host.a", **TEXTS, thresholds=(most,))
    def function(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
        yield CheckResult(Status.PASS, "before")
        yield CheckResult(Status.WARN, f"above {most.value}", source="this test")

    with in_force(Overrides({"a.check.most": {"default": 2}}, "policy site.yml")):
        before, after = registry["host.a"].findings(BARE, Expectation())
    assert (before.source, after.source) == (None, "this test; policy site.yml (a.check.most 2 °C)")


@pytest.mark.parametrize(
    ("verdict", "actions", "state"),
    [
        (CheckResult(Status.FAIL, "", "gpu3"), ["reset_gpu gpu3", "restart_service gpu3"], "drain"),
        (CheckResult(Status.WARN, "", "gpu3"), ["reset_gpu gpu3", "restart_service gpu3"], "observe"),
        (CheckResult(Status.FAIL, "", actions=("none",), state=State.OBSERVE), ["none node"], "observe"),
        (CheckResult(Status.ERROR, "", "gpu3"), [], "none"),
        (CheckResult(Status.PASS, "", "gpu3"), [], "none"),
    ],
)
def test_what_could_not_be_determined_calls_for_no_action(verdict: CheckResult, actions: list[str], state: str) -> None:
    registry = Registry()

    @registry.check("gpu.a", means="", remedy="", state="drain", actions=("reset_gpu", "restart_service:a.service"))
    def function(node: NodeFacts, expect: Expectation) -> Iterator[CheckResult]:
        yield verdict

    (finding,) = registry["gpu.a"].findings(BARE, Expectation())
    assert [f"{step.action} {step.component}" for step in finding.actions] == actions
    assert finding.recommended_state == state


@pytest.mark.parametrize(
    "text",
    ["reboot", "reset_gpu:0", "restart_service", "restart_service:a b.service", "run_role:Role", "run_role:a:b:c"],
)
def test_an_action_outside_the_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition(":")[0]):
        action(text)


def test_the_format_of_a_target_is_named() -> None:
    with pytest.raises(ValueError, match=r"^action run_role:A: expected run_role:ROLE\[:TAG\]$"):
        action("run_role:A")


@pytest.mark.parametrize(
    ("texts", "tag"),
    [
        (("restart_service:a.service", "run_role:nvidia_driver", "run_role:cuda"), "nvidia_driver"),
        (("reset_gpu", "run_role:nvidia_driver:persistenced"), "persistenced"),
        (("restart_service:a.service", "restart_os"), None),
        ((), None),
    ],
)
def test_the_command_of_a_remedy_runs_its_first_role(texts: tuple[str, ...], tag: str | None) -> None:
    expected = f"gpunode provision -i INVENTORY -l HOST -t {tag}" if tag else None
    assert command(action(text) for text in texts) == expected


DRAWN = random.Random(3)  # noqa: S311
PAIRS = [(DRAWN.choice((0, -1, 5, 0.5, 1e9)), DRAWN.choice((0, -1, 5, 0.5, 1e9))) for _ in range(effort(40, 4000))]


@pytest.mark.parametrize(
    ("comparator", "good"),
    [(at_most, operator.le), (at_least, operator.ge), (equals, operator.eq)],
    ids=["at_most", "at_least", "equals"],
)
def test_a_comparator_compares(comparator: Callable[..., CheckResult], good: Callable[[Any, Any], bool]) -> None:
    for value, limit in PAIRS:
        result = comparator(value, limit, "good", "bad", fault=Status.WARN, unit="errors")
        expected = ("good", Status.PASS) if good(value, limit) else ("bad", Status.WARN)
        assert (result.message, result.status) == expected, (value, limit)
        assert (result.measured, result.expected, result.unit) == (value, limit, "errors")


def test_matches_searches_the_text() -> None:
    assert matches("580.95.05", r"^580\.", "branch 580").status is Status.PASS
    assert matches("570.1", r"^580\.", "branch 580", "another branch").message == "another branch"


def test_a_fault_is_fail_with_the_same_message_and_numbers_unless_others_are_given() -> None:
    result = at_least(3, 5, "3 of 5 GiB", expected="5 GiB", component="memlock")
    assert result == CheckResult(Status.FAIL, "3 of 5 GiB", "memlock", expected="5 GiB", measured=3)
    # An empty message is a mistake of the check; it does not turn into the good one.
    assert at_least(3, 5, "enough", "").message == ""


def test_the_first_fault_counts_else_the_last_pass() -> None:
    fine, warning, fault = passed("fine"), warned("warning"), failed("fault")
    assert first_fault(fine, warning, fault) is warning
    assert first_fault(passed("first"), fine) is fine
