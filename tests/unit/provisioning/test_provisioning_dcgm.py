"""DCGM: which parts, in which version, and what they take the place of."""

from typing import Any

import pytest
from test_provisioning_cuda import bare, resolved

from gpunode.errors import UsageError
from gpunode.provisioning.dcgm import DcgmPackages, dcgm_packages
from gpunode.stack import Stack

STEM = "datacenter-gpu-manager-4"
H100, V100 = "2330", "1db4"
FOUR = [f"{STEM}-core", f"{STEM}-cuda13", f"{STEM}-proprietary", f"{STEM}-proprietary-cuda13"]


@pytest.fixture
def stack() -> Stack:
    return resolved(bare(H100), source="nvidia", driver="580.95.05")


def planned(stack: Stack | None, installed: dict[str, str] | None = None, **settings: Any) -> DcgmPackages:
    return dcgm_packages(stack, installed or {}, **settings)


def at(version: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, version)


def test_the_parts_for_the_drivers_cuda_in_one_version(stack: Stack) -> None:
    plan = planned(stack)
    assert plan.names == tuple(FOUR)
    assert plan.pattern == "1:4.*"
    assert plan.install == tuple(f"{name}={plan.pattern}" for name in FOUR)
    assert plan.purge == ()


def test_two_majors_where_a_gpu_needs_the_older_one() -> None:
    stack = resolved(bare(V100), source="nvidia", driver="580.95.05")
    names = planned(stack).names
    assert {f"{STEM}-cuda13", f"{STEM}-cuda12", f"{STEM}-proprietary-cuda12"} <= set(names)


@pytest.mark.parametrize(
    ("version", "pattern"), [("keep", "1:4.5.1-*"), ("4.5.2", "1:4.5.2-*"), ("newest", "1:4.6.1-*")]
)
def test_the_installed_version_is_kept(stack: Stack, version: str, pattern: str) -> None:
    plan = planned(stack, at("1:4.5.1-1", *FOUR), version=version)
    assert plan.pattern == pattern


def test_a_malformed_version_is_named(stack: Stack) -> None:
    with pytest.raises(UsageError, match="dcgm_version: lates is not a version"):
        planned(stack, version="lates")


def test_dcgm_3_is_removed_and_the_exporter_of_4_stays(stack: Stack) -> None:
    old = at("1:3.3.9", "datacenter-gpu-manager", "datacenter-gpu-manager-config")
    exporter = {"datacenter-gpu-manager-exporter": "4.6.0-4.8.3-1"}
    assert planned(stack, {**old, **exporter}).purge == tuple(sorted(old))
    assert planned(stack, at("3.3.9-1", "datacenter-gpu-manager")).purge == ("datacenter-gpu-manager",)
    third = at("3.3.9-3.6.1-1", "datacenter-gpu-manager-exporter")
    assert planned(stack, third).purge == tuple(third)
    assert "datacenter-gpu-manager-exporter" not in planned(stack, exporter).names


def test_parts_for_another_cuda_go_and_other_parts_move_along(stack: Stack) -> None:
    installed = at(
        "1:4.5.1-1", f"{STEM}-core", f"{STEM}-cuda12", f"{STEM}-proprietary-cuda12", f"{STEM}-multinode-cuda12"
    )
    installed |= at("1:4.5.1-1", f"{STEM}-dev", f"{STEM}-multinode")
    plan = planned(stack, installed)
    assert plan.purge == tuple(sorted([f"{STEM}-cuda12", f"{STEM}-multinode-cuda12", f"{STEM}-proprietary-cuda12"]))
    assert plan.names == (*FOUR, f"{STEM}-dev", f"{STEM}-multinode")
    assert planned(stack, {**installed, **at("1:4.5.1-1", f"{STEM}-cuda-all")}).purge == ()


def test_the_closed_parts_are_a_choice(stack: Stack) -> None:
    plan = planned(stack, at("1:4.6.0-1", *FOUR), proprietary=False)
    assert plan.names == tuple(FOUR[:2])
    assert plan.purge == tuple(FOUR[2:])


def test_a_driver_of_the_distribution_has_dcgm_from_nvidia_where_that_is_asked_for() -> None:
    stack = resolved(bare(H100), source="debian")
    assert planned(stack).names == ()
    assert "dcgm_source: nvidia" in (planned(stack).why_not or "")
    plan = planned(stack, source="nvidia")
    assert plan.names[:2] == (f"{STEM}-core", f"{STEM}-cuda12")
    assert plan.pattern.startswith("1:4.")


def test_without_a_plan_there_is_no_dcgm() -> None:
    assert planned(None, source="nvidia").why_not == "no stack is planned"
