"""When a drained node returns to service, and what its validation is compared with."""

import json
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.filter.node import failed
from node_samples import context, node

from gpunode.provisioning import service
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.service import LEASE, MARK
from gpunode.provisioning.state import BOOT_ID

BEFORE = [{"check": "host.memory", "component": "node", "status": "fail"}]
DRAINED = json.dumps({"since": "2026-11-23T09:00:00+00:00", "findings": BEFORE})
BUSY = {"gpu_processes": [{"pid": 4, "name": "train", "type": "C", "user": "ada", "gpu": "gpu0"}]}
SETTINGS = {"gpunode_allow_busy": False, "gpunode_drain_wait_s": 60}


def decided(mark: str | None = DRAINED, facts: dict[str, Any] | None = None, **run: Any) -> Manifest:
    texts = {BOOT_ID: "boot", **({MARK: mark} if mark is not None else {})}
    return service.plan_service(node(texts=texts, facts=facts), SETTINGS, context(**run))


def result_of(manifest: Manifest) -> service.ServiceResult:
    assert isinstance(manifest.result, service.ServiceResult)
    return manifest.result


def test_a_node_without_the_mark_is_not_returned() -> None:
    manifest = decided(mark=None)
    assert (manifest.pending, result_of(manifest).drained) == (False, False)


def test_a_node_with_nothing_pending_may_return_and_is_compared_with_the_findings_before() -> None:
    manifest = decided()
    assert manifest.pending
    assert result_of(manifest).model_dump(mode="json") == {
        "drained": True,
        "busy": False,
        "drain_wait_s": 60,
        "before": BEFORE,
    }


@pytest.mark.parametrize(
    ("run", "pending"),
    [
        ({"reboot_reasons": ("the loaded module is old",)}, "the loaded module is old"),
        ({"reboot_requested": ("asked",)}, "asked"),
        ({"restarts": {"docker.service": "containers run"}}, "docker.service"),
    ],
)
def test_a_node_with_something_pending_stays_drained(run: dict[str, Any], pending: str) -> None:
    manifest = decided(**run)
    assert not manifest.pending
    assert result_of(manifest).drained
    assert pending in manifest.notes[0]


@pytest.mark.parametrize("lease", ['{"owner": "root@admin1", "token": "run-1", "since": "now"}', "", "[]", "{"])
def test_a_node_that_an_upgrade_holds_is_not_returned_by_a_playbook(lease: str) -> None:
    manifest = service.plan_service(node(texts={MARK: DRAINED, LEASE: lease}), SETTINGS, context())
    assert not manifest.pending
    assert "gpunode upgrade" in manifest.notes[0]


@pytest.mark.parametrize("mark", ["", "{", "[]", "{}", '{"since": 1, "findings": []}', "[" * 100_000])
def test_a_damaged_mark_excuses_no_finding(mark: str) -> None:
    manifest = decided(mark)
    assert manifest.pending
    assert result_of(manifest).before == ()
    assert MARK in manifest.notes[0]


@pytest.mark.parametrize(
    ("facts", "busy"), [(BUSY, True), ({"gpu_processes": None}, True), ({"gpu_processes": []}, False)]
)
def test_unknown_use_of_the_gpus_counts_as_use(facts: dict[str, Any], busy: bool) -> None:
    assert result_of(decided(facts=facts)).busy is busy


@pytest.mark.parametrize(
    ("status", "before", "expected"),
    [
        ("fail", "fail", False),
        ("error", "error", False),
        ("error", "fail", False),
        ("fail", "error", True),
        ("fail", None, True),
        ("error", None, True),
        ("pass", None, False),
        ("warn", None, False),
        ("skip", None, False),
    ],
)
def test_findings_that_were_no_better_before_hold_no_node_back(status: str, before: str | None, expected: bool) -> None:
    finding = {"check": "gpu.count", "component": "node", "status": status}
    others = [{**finding, "component": "gpu1", "status": "fail"}]
    earlier = [*others, *([{**finding, "status": before}] if before else [])]
    assert failed([finding], earlier) == ([finding] if expected else [])
