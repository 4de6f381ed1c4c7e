"""A result that is not a record: the checks that need it report that, all others judge as ever."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_checks_workload import CONTAINER, DRIVER, T4

from gpunode import checks
from gpunode.checks import Expectation, Finding, Status, judge
from gpunode.facts import facts_from_bundle
from gpunode.facts.models.measured import MEASURED
from gpunode.facts.workload import JUDGED, RUN
from gpunode.probe.bundle import Bundle


def result(name: str, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"schema": "gpunode.record/1", "device": "cuda", "seconds": 1.0, "container": CONTAINER}
    return {**common, "record": name, "values": values, **more}


def tensor(gpu: int) -> dict[str, Any]:
    return result("frameworks.tensor", {"max_error": 0.0, "allocated_bytes": 1024}, component=f"cuda:{gpu}")


RESULTS = [
    result("defaults.limits", {"shm_bytes": 2**33, "memlock_bytes": -1, "stack_bytes": 2**26}, device="cpu"),
    result("frameworks.amp", {"dtype": "bfloat16", "losses": [2.0, 1.0]}),
    tensor(0),
    tensor(1),
    result("container", {"complete": True, "gpus": 2}),
]


def judged(results: list[dict[str, Any]]) -> dict[str, list[Finding]]:
    bundle = Bundle(host="n", collected_at="now", commands={}, files={}, results=results)
    known = {"pci": (T4,), "loaded_driver": DRIVER, "architecture": "x86_64", "gaps": {}}
    node = facts_from_bundle(bundle).model_copy(update=known)
    by_check: dict[str, list[Finding]] = {}
    for finding in judge(node, Expectation(), level="deep"):
        if finding.check.startswith(("container.", "framework.", "performance.")):
            by_check.setdefault(finding.check, []).append(finding)
    return by_check


@pytest.mark.parametrize(
    ("number", "checks"),
    [
        (0, {"container.shm", "container.memlock", "container.stack"}),
        (1, {"framework.amp"}),
        (3, {"framework.tensor"}),
        (4, {"container.runs"}),
    ],
)
@pytest.mark.parametrize("change", [{"seconds": None}, {"device": "tpu"}, {"schema": "gpunode.record/2"}, {"new": 1}])
def test_the_checks_of_the_broken_record_alone_are_errors(
    number: int, checks: set[str], change: dict[str, Any]
) -> None:
    well = judged(RESULTS)
    broken = judged([record | change if index == number else record for index, record in enumerate(RESULTS)])
    assert {check for check in well if broken[check] != well[check]} == checks
    for check in checks:
        assert Status.PASS in {finding.status for finding in well[check]}
        (error,) = [finding for finding in broken[check] if finding.status is Status.ERROR]
        assert f"result {number} is not a record of a workload {RESULTS[number]['record']}: " in error.message
        assert next(iter(change)) in error.message


def test_of_several_gpus_the_one_with_a_broken_record_is_named() -> None:
    findings = judged([*RESULTS[:3], tensor(1) | {"seconds": "long"}, RESULTS[4]])["framework.tensor"]
    assert {(finding.component, finding.status) for finding in findings} == {
        ("cuda:0", Status.PASS),
        ("cuda:1", Status.ERROR),
    }


@pytest.mark.parametrize(
    ("result", "reported"),
    [
        ({"values": {}}, "result 5 is not a record of a workload: record: Field required"),
        ({"record": "rubbish"}, "result 5 is not a record of a workload rubbish: device: Field required"),
        (
            {"record": "versions.tensorflow"},
            "result 5 is not a record of a workload versions.tensorflow: device: Field",
        ),
    ],
)
def test_a_broken_result_that_no_check_needs_is_reported_by_the_run(result: dict[str, Any], reported: str) -> None:
    well, broken = judged(RESULTS), judged([*RESULTS, result])
    assert {check for check in well if broken[check] != well[check]} == {"container.runs"}
    (finding,) = broken["container.runs"]
    assert finding.status is Status.ERROR
    assert reported in finding.message


@pytest.mark.parametrize("name", sorted(JUDGED - {"container"}))
def test_a_record_that_is_reported_as_judged_is(name: str) -> None:
    findings = judged([*RESULTS, {"record": name}])
    assert [
        check
        for check, of_check in findings.items()
        if check != "container.runs"
        and any(f"is not a record of a workload {name}: " in finding.message for finding in of_check)
    ]


def test_every_record_that_a_check_names_is_known_to_be_judged() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(checks.__file__).parent.glob("*.py"))
    named = set(re.findall(r'"((?:versions|frameworks|gpus|defaults)\.[a-z0-9-]+)"', sources))
    # Looked at only to decide whether PyTorch's absence is meant.
    assert named - {"versions.tensorflow"} == JUDGED - {RUN} - MEASURED
