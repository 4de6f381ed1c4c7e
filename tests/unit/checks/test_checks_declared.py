"""Checks as data: elements with a value, their number in one finding, and the messages."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpunode.checks.declared import DeclaredCheck, UnknownFact, register, steps
from gpunode.checks.registry import Expectation, Finding, Registry
from gpunode.checks.thresholds import Overrides, in_force
from gpunode.facts.disks import FileSystem
from gpunode.facts.models.smi import Smi
from gpunode.facts.network import IbDevice, IbPort
from gpunode.facts.node import NodeFacts
from gpunode.facts.running import Unit

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
    all_findings = list(findings(node("failed", "active"), count=False, comparison="none_of", value=("9.service",)))
    assert [finding.message for finding in all_findings] == ["9.service: {items}"]
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


SPACE = {
    "fact": "file_systems[].free_mib",
    "percent_of": "size_mib",
    "first": ({"fact": "type", "comparison": "none_of", "value": ("btrfs",), "message": "is {measured}"},),
    "count": False,
    "comparison": "at_least",
    "value": 10,
    "component": "{mount}",
    "good": "{measured} % of {size_mib} MiB are free",
    "message": "{measured} % are free, {expected} are required",
    "status": "warn",
    "nothing": "no local file system",
    "unknown": "df does not report it",
    "unit": "%",
}


@pytest.mark.parametrize(
    ("mount", "status", "message", "measured"),
    [
        ({"size_mib": 3000, "free_mib": 300}, "pass", "10 % of 3000 MiB are free", 10),
        ({"size_mib": 3000, "free_mib": 284}, "warn", "9 % are free, 10 are required", 9),
        ({"size_mib": 3000, "free_mib": 284, "type": "btrfs"}, "fail", "is btrfs", "btrfs"),
        ({"size_mib": 0, "free_mib": 0}, "error", "df does not report it", None),
    ],
)
def test_a_percentage_of_the_element_and_a_condition_before_it(
    mount: dict[str, Any], status: str, message: str, measured: Any
) -> None:
    file_system = FileSystem.model_validate({"mount": "/data", "type": "xfs", "inodes_free_percent": None, **mount})
    (finding,) = findings(node().model_copy(update={"file_systems": (file_system,)}), **SPACE)
    assert (finding.status, finding.message, finding.measured) == (status, message, measured)
    assert finding.component == "/data"


@pytest.mark.parametrize(
    "sizes",
    [{"size_mib": float("nan")}, {"free_mib": float("inf")}, {"free_mib": 10**400, "size_mib": 3.0}, {"size_mib": "x"}],
)
def test_a_share_of_what_is_not_finite_is_unknown(sizes: dict[str, Any]) -> None:
    file_system = FileSystem(mount="/data", type="xfs", size_mib=9, free_mib=9, inodes_free_percent=None)
    mounts = (file_system.model_copy(update=sizes),)
    (finding,) = findings(node().model_copy(update={"file_systems": mounts}), **SPACE)
    assert (finding.status, finding.message) == ("error", "df does not report it")


def test_each_finding_that_compares_with_the_limit_of_a_policy_names_it() -> None:
    mount = {"type": "xfs", "size_mib": 100, "free_mib": 20, "inodes_free_percent": None}
    disks = [
        FileSystem.model_validate({"mount": f"/{name}", **mount, "type": name}) for name in ("xfs", "ext4", "btrfs")
    ]
    with in_force(Overrides({"site.units.value": {"default": 30}}, "policy site.yml")):
        all_findings = list(findings(node().model_copy(update={"file_systems": tuple(disks)}), **SPACE))
    policy = "policy site.yml (site.units.value 30 %)"
    assert [(finding.status, finding.source) for finding in all_findings] == [
        ("warn", policy),
        ("warn", policy),
        ("fail", None),
    ]


def test_an_unknown_field_leaves_the_result_open_before_any_condition() -> None:
    mount = FileSystem(mount="/data", type="btrfs", size_mib=9, free_mib=9, inodes_free_percent=None)
    changes = SPACE | {"fact": "file_systems[].inodes_free_percent", "percent_of": None}
    (finding,) = findings(node().model_copy(update={"file_systems": (mount,)}), **changes)
    assert (finding.status, finding.message) == ("error", "df does not report it")


def test_without_an_element_or_the_fact_the_check_is_skipped_for_its_reason() -> None:
    (finding,) = findings(node().model_copy(update={"file_systems": ()}), **SPACE)
    assert (finding.status, finding.message) == ("skip", "no local file system")
    absent = {"fact": "pending_updates[].package", "nothing": "role updates is not used"}
    (finding,) = findings(node(), **absent)
    assert (finding.status, finding.message) == ("skip", "role updates is not used")
    (finding,) = findings(node(), **absent | {"nothing": None})
    assert (finding.status, finding.message) == ("error", "pending_updates[].package is unknown")


def test_the_expected_value_that_is_shown_may_be_another() -> None:
    (finding,) = findings(node("failed"), value=2, expected=0)
    assert (finding.status, finding.expected, finding.measured) == ("pass", 0, 1)


def test_a_message_has_the_fields_of_all_objects_on_the_path() -> None:
    port = IbPort(port=2, state="DOWN", physical_state=None, rate_gbit_per_s=None, rate=None, link_layer=None, lid=None)
    named = {"name": "mlx5_0", "firmware": None, "board_id": None, "type": None, "slot": None, "numa_node": None}
    adapter = IbDevice.model_validate({**named, "ports": (port,)})
    changes = {"fact": "infiniband[].ports[].state", "count": False, "comparison": "equals", "value": "ACTIVE"}
    facts = node().model_copy(update={"infiniband": (adapter,)})
    (finding,) = findings(facts, **changes, component="{name}/{port}", message="{component} is {measured}")
    assert finding.message == "mlx5_0/2 is DOWN"


def test_the_number_of_an_unknown_list_is_unknown() -> None:
    facts = node().model_copy(update={"smi": Smi(error_kind="other", error_message="no answer", exit_status=1)})
    (finding,) = findings(facts, fact="smi.document.gpus[].index")
    assert finding.status == "error"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": True}, "count: not together with first and percent_of"),
        ({"percent_of": "siz_mib"}, "siz_mib"),
        ({"percent_of": "size.mib"}, "should match pattern"),
        ({"first": [{"fact": "typ", "comparison": "equals", "value": "xfs", "message": ""}]}, "typ"),
        ({"first": [{"fact": "type", "comparison": "one_of", "value": "xfs", "message": ""}]}, "one_of needs a list"),
    ],
)
def test_conditions_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(findings(node(), **SPACE | changes))
