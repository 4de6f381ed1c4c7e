"""What only the comparison of a run's nodes shows: GPUs that most of a kind have, one driver in an NVLink domain."""

from typing import Any

import pytest

from gpunode.checks import Finding, Hardware, Identity, RunningStack, State, Status
from gpunode.judging.report import NodeReport, judged, unreachable
from gpunode.report.fleet import compared

BASE = Hardware(product="Supermicro SYS-421GE", virtual=False, gpus=4, gpu_model="l40s")
DOMAIN = "6f0c2f4e-0000-4000-8000-000000000001/32766"


def node(host: str, hardware: Hardware, *, driver: str = "580.95.05", **present: Any) -> NodeReport:
    values = {"status": Status.PASS, "message": "present", "measured": hardware.gpus} | present
    findings = [
        Finding.model_validate({"check": "gpu.present", "component": "node", **values}),
        Finding(check="fabric.state", status=Status.PASS, component="gpu0", message="joined"),
        Finding(check="gpu.count", status=Status.PASS, component="node", message="all"),
    ]
    stack = RunningStack(driver=driver)
    return judged(host, Identity(simulated=True, stack=stack, gpus=(), hardware=hardware), findings, 1.0)


def with_gpus(number: int, **other: Any) -> Hardware:
    return BASE.model_copy(update={"gpus": number, **other})


def status(nodes: list[NodeReport], host: str, check: str = "gpu.present") -> list[str]:
    (report,) = (each for each in compared(nodes) if each.host == host)
    return [
        finding.status.value for finding in report.findings if finding.check == check and finding.component == "node"
    ]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (with_gpus(3), "fail"),
        (with_gpus(2), "note"),
        (with_gpus(4), "pass"),
        (with_gpus(8), "pass"),
        (with_gpus(3, virtual=True), "pass"),
        (with_gpus(3, virtual=None), "pass"),
        (with_gpus(3, product="another"), "pass"),
        (with_gpus(3, gpu_model="a40"), "pass"),
        (with_gpus(3, gpu_model=None), "pass"),
    ],
)
def test_fewer_gpus_than_most_nodes_of_the_kind(last: Hardware, expected: str) -> None:
    nodes = [node(f"n{number}", BASE) for number in range(3)] + [node("last", last)]
    assert status(nodes, "last") == [expected]
    assert [each.status.value for each in compared(nodes)] == ["pass"] * 3 + [expected.replace("note", "pass")]


def test_the_finding_names_its_source_and_a_state() -> None:
    (*_, report) = compared([*(node(f"n{number}", BASE) for number in range(3)), node("last", with_gpus(3))])
    (finding,) = [finding for finding in report.findings if finding.check == "gpu.present"]
    assert (finding.expected, finding.measured) == (4, 3)
    assert "3 of 4 nodes" in (finding.source or "")
    assert (finding.recommended_state, report.recommended_state) == (State.DRAIN, State.DRAIN)
    assert finding.remedy
    assert finding.actions


@pytest.mark.parametrize("numbers", [[4, 3], [4, 4, 3, 3], [4], [3, 3, 4]])
def test_without_a_majority_nobody_is_right(numbers: list[int]) -> None:
    nodes = [node(f"n{index}", with_gpus(number)) for index, number in enumerate(numbers)]
    assert {each.status for each in compared(nodes)} == {Status.PASS}


@pytest.mark.parametrize(
    "present", [{"source": "site file"}, {"status": Status.FAIL}, {"status": Status.SKIP}, {"observed": "known"}]
)
def test_a_better_source_stays(present: dict[str, Any]) -> None:
    nodes = [node(f"n{number}", BASE) for number in range(5)]
    last = node("last", with_gpus(3), **present)
    assert compared([*nodes, last])[-1] == last


@pytest.mark.parametrize(
    ("drivers", "expected"),
    [
        (["580.95.05"] * 3, [[], [], []]),
        (["580.95.05", "580.95.05", "570.195.03"], [[], [], ["warn"]]),
        (["580.95.05", "570.195.03"], [["warn"], ["warn"]]),
    ],
)
def test_drivers_of_one_nvlink_domain(drivers: list[str], expected: list[list[str]]) -> None:
    tray = with_gpus(4, nvlink_domain=DOMAIN)
    nodes = [node(f"n{number}", tray, driver=driver) for number, driver in enumerate(drivers)]
    nodes += [node("elsewhere", with_gpus(4), driver="535.1.1"), unreachable("far", "no route", 1.0)]
    assert [status(nodes, f"n{number}", "fabric.state") for number in range(len(drivers))] == expected
    assert status(nodes, "elsewhere", "fabric.state") == []
    assert [each.host for each in compared(nodes)] == [each.host for each in nodes]
