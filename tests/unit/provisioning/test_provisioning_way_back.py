"""Whether a node could get its driver's release again."""

from typing import Any

import pytest
from driver_samples import BUNDLE, facts_of
from node_samples import context, node

from gpunode.provisioning import service
from gpunode.provisioning.running_driver import installed_driver


def test_the_release_must_still_be_offered_of_every_package() -> None:
    state = node(facts=facts_of(BUNDLE))
    release = installed_driver(state.facts)
    question = service.plan_way_back(state, {}, context()).questions["offers"]
    names: list[str] = question.body["names"]
    assert question.kind == "package_offers"
    assert release
    assert len(names) > 3
    offered: dict[str, Any] = {name: ["999.1-1", f"1:{release}-1"] for name in names}
    manifest = service.plan_way_back(state, {}, context(answers={"offers": {"offered": offered}}))
    assert manifest.refusals == ()
    assert manifest.result == service.WayBackResult(release=release, packages=tuple(names))
    for left in (["999.1-1"], []):
        gone = service.plan_way_back(state, {}, context(answers={"offers": {"offered": {**offered, names[1]: left}}}))
        assert names[1] in gone.refusals[0]
    for answer in ({}, {"error": "no route to host"}):
        assert service.plan_way_back(state, {}, context(answers={"offers": answer})).refusals


def test_every_package_of_the_release_comes_back_whatever_its_name() -> None:
    """NVIDIA's libcudadebugger1 must have the version of nvidia-driver-cuda, which depends on it."""
    facts = facts_of(BUNDLE)
    release = installed_driver(node(facts=facts).facts)
    library = next(package for package in facts["packages"] if package["name"] == "libcuda1")
    more = ("libcudadebugger1", "libnvcuvid1", "libxnvctrl0")
    others = [{**library, "name": name} for name in more] + [{**library, "name": "libcudart12", "version": "12.9.79-1"}]
    state = node(facts={**facts, "packages": [*facts["packages"], *others]})
    names = service.plan_way_back(state, {}, context()).questions["offers"].body["names"]
    assert release
    assert {*more, "libcuda1"} <= set(names)
    assert "libcudart12" not in names


@pytest.mark.parametrize("facts", [{"packages": []}, {"packages": None}])
def test_without_an_installed_release_there_is_no_way_back(facts: dict[str, Any]) -> None:
    assert service.plan_way_back(node(facts=facts), {}, context()).refusals
