"""The registry: what is not seen is never good, and what says nothing is an error."""

from collections.abc import Iterator

import pytest

from gpunode.checks.registry import Expectation, Registry, Status, Verdict, judge
from gpunode.facts.node import NodeFacts, PciDevice

GPU = PciDevice(
    slot="0000:1a:00.0", vendor_id="10de", device_id="26b9", subsystem_id=None, class_id="030200", driver=None
)
BARE = NodeFacts(host="node", collected_at="2026-11-20T12:00:00Z")


def one_check(*, needs: tuple[str, ...] = (), needs_gpu: bool = False, says: tuple[Verdict, ...] = ()) -> Registry:
    registry = Registry()

    @registry.check("a.check", needs=needs, needs_gpu=needs_gpu, means="It means.", remedy="Mend it.")
    def function(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
        yield from says

    return registry


def found(registry: Registry, node: NodeFacts, expect: Expectation | None = None) -> tuple[Status, str, str | None]:
    (finding,) = registry["a.check"].findings(node, expect or Expectation())
    return finding.status, finding.message, finding.remedy


PASS = (Verdict(Status.PASS, "good"),)


def test_a_check_that_says_nothing_is_an_error() -> None:
    assert found(one_check(), BARE)[0] is Status.ERROR


def test_a_check_that_breaks_is_an_error_and_stops_no_other() -> None:
    registry = Registry()

    @registry.check("a.check", means="It means.", remedy="Mend it.")
    def function(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
        yield Verdict(Status.PASS, "so far so good")
        raise KeyError("index")

    assert found(registry, BARE) == (Status.ERROR, "the check itself broke: KeyError: 'index'", None)


def test_a_gap_is_an_error_with_its_reason() -> None:
    node = BARE.model_copy(update={"gaps": {"kernels": "uname did not answer"}})
    assert found(one_check(needs=("kernels",), says=PASS), node) == (Status.ERROR, "uname did not answer", None)


def test_none_without_a_reason_is_an_error_too() -> None:
    assert found(one_check(needs=("kernels",), says=PASS), BARE)[0] is Status.ERROR


def test_none_that_says_something_is_judged() -> None:
    assert found(one_check(needs=("loaded_driver",), says=PASS), BARE)[0] is Status.PASS


def test_no_gpu_comes_before_missing_data() -> None:
    registry = one_check(needs=("kernels",), needs_gpu=True, says=PASS)
    without = BARE.model_copy(update={"pci": ()})
    assert found(registry, without)[:2] == (Status.SKIP, "no NVIDIA GPU on the PCI bus")
    assert found(registry, without, Expectation(gpus=0))[:2] == (
        Status.SKIP,
        "the node is meant to have no GPU (site file)",
    )
    assert found(registry, BARE.model_copy(update={"pci": (GPU,)}))[0] is Status.ERROR


def test_a_bus_that_was_not_seen_is_an_error_not_a_skip() -> None:
    assert found(one_check(needs_gpu=True, says=PASS), BARE)[0] is Status.ERROR


@pytest.mark.parametrize(
    ("status", "remedy"), [("pass", None), ("skip", None), ("warn", "Mend it."), ("fail", "Mend it.")]
)
def test_only_what_wants_mending_has_a_remedy(status: str, remedy: str | None) -> None:
    assert found(one_check(says=(Verdict(Status(status), "so"),)), BARE)[2] == remedy


def test_an_id_is_registered_once_and_needs_are_facts() -> None:
    registry = one_check()
    with pytest.raises(ValueError, match="twice"):
        registry.check("a.check", means="", remedy="")
    with pytest.raises(ValueError, match="nonsense"):
        registry.check("b.check", needs=("nonsense",), means="", remedy="")


def test_only_the_named_checks_are_run() -> None:
    assert {finding.check for finding in judge(BARE, Expectation(), only=["node.reachable"])} == {"node.reachable"}
