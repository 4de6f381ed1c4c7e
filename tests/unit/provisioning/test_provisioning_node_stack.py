"""The filters of the resolver: the same answers as gpunode plan, from documents as Ansible hands them over."""

from typing import Any

import pytest
from driver_samples import BUNDLE, DAY, facts_of

from gpunode.errors import UsageError
from gpunode.provisioning import node_stack as resolver
from gpunode.stack import Stack, lock_document

GPU = {"slot": "0000:01:00.0", "vendor_id": "10de", "device_id": "20b5", "class_id": "030200"}


@pytest.fixture
def facts() -> dict[str, Any]:
    """A Debian 12 node with Debian's driver, and one A100 put on its bus."""
    document: dict[str, Any] = facts_of(BUNDLE)
    return {**document, "pci": [{**GPU, "subsystem_id": "10de:1533", "driver": None}]}


def test_a_node_that_fits_keeps_what_it_has(facts: dict[str, Any]) -> None:
    answer = resolver.stack(facts, {"driver": "keep", "cuda": "12.2"}, today=DAY)
    assert answer["conflict"] is None
    assert answer["stack"]["source"] == "debian"
    assert answer["stack"]["driver"]["branch"] == 535


def test_a_conflict_is_answered_not_raised(facts: dict[str, Any]) -> None:
    answer = resolver.stack(facts, {"source": "debian", "cuda": "13.0"}, today=DAY)
    assert answer["stack"] is None
    assert {term["name"] for term in answer["conflict"]["terms"]} >= {"cuda"}


def test_a_lock_keeps_its_release(facts: dict[str, Any]) -> None:
    kept = resolver.stack(facts, {"driver": "keep", "cuda": "12.2"}, today=DAY)["stack"]
    document = lock_document(Stack.model_validate(kept))
    assert list(document) == ["gpunode_stack"]
    again = resolver.stack(facts, {}, document["gpunode_stack"], today=DAY)
    assert again["stack"]["driver"]["version"] == kept["driver"]["version"]
    assert [drift["state"] for drift in again["drift"]] == ["newer-available"]  # of the archive: 535.309.01


def test_a_bus_that_was_not_seen_is_undetermined(facts: dict[str, Any]) -> None:
    blind = {**facts, "pci": None, "gaps": {**facts["gaps"], "pci": "/sys/bus/pci: permission denied"}}
    answer = resolver.stack(blind, today=DAY)
    assert "permission denied" in answer["undetermined"]


@pytest.mark.parametrize(
    ("requests", "lock", "words"),
    [
        ({"driver": "9999"}, None, "9999"),
        ({"drivr": "580"}, None, "drivr"),
        ({}, {"schema": "gpunode.stack/1"}, "not a valid stack"),
    ],
)
def test_what_is_wrong_is_named(facts: dict[str, Any], requests: Any, lock: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolver.stack(facts, requests, lock, today=DAY)
