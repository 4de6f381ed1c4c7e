"""The stack of a node from the roles' variables."""

from datetime import date
from typing import Any

import pytest
from driver_samples import BUNDLE, DAY, facts_of, resolved_of

from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.node_stack import resolved
from gpunode.stack import lock_document

GPU = {"slot": "0000:01:00.0", "vendor_id": "10de", "device_id": "20b5", "class_id": "030200"}


@pytest.fixture
def facts() -> dict[str, Any]:
    """A Debian 12 node with Debian's driver, and one A100 put on its bus."""
    document: dict[str, Any] = facts_of(BUNDLE)
    return {**document, "pci": [{**GPU, "subsystem_id": "10de:1533", "driver": None}]}


def test_a_node_that_fits_keeps_what_it_has(facts: dict[str, Any]) -> None:
    stack = resolved_of(facts, cuda="12.2").stack
    assert stack is not None
    assert (stack.source, stack.driver.branch) == ("debian", 535)


def test_a_conflict_is_answered_not_raised(facts: dict[str, Any]) -> None:
    answer = resolved_of(facts, source="debian", cuda="13.0")
    assert answer.stack is None
    assert answer.group.conflict is not None
    assert {term.name for term in answer.group.conflict.terms} >= {"driver"}


def test_a_lock_keeps_its_release(facts: dict[str, Any]) -> None:
    kept = resolved_of(facts, cuda="12.2").stack
    assert kept is not None
    document = lock_document(kept)
    assert list(document) == ["gpunode_stack"]
    again = resolved(NodeFacts.model_validate(facts), {}, document["gpunode_stack"], date.fromisoformat(DAY))
    assert again.stack is not None
    assert again.stack.driver.version == kept.driver.version
    assert [drift.state for drift in again.group.drift] == ["newer-available"]  # of the archive: 535.309.01


def test_a_bus_that_was_not_seen_is_undetermined(facts: dict[str, Any]) -> None:
    blind = {**facts, "pci": None, "gaps": {**facts["gaps"], "pci": "/sys/bus/pci: permission denied"}}
    (line,) = resolved_of(blind).problems
    assert line.startswith("undetermined: ")
    assert "permission denied" in line


@pytest.mark.parametrize(
    ("requests", "lock", "words"),
    [({"version": "9999"}, None, "9999"), ({}, {"schema": "gpunode.stack/1"}, "not a valid stack")],
)
def test_what_is_wrong_is_named(facts: dict[str, Any], requests: Any, lock: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolved(NodeFacts.model_validate(facts), requests, lock, date.fromisoformat(DAY))
