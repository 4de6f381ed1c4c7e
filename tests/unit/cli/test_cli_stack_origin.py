"""``plan`` and ``provision`` read one request: the same stack from the same variables, and where it came from."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from gpunode.catalog import load
from gpunode.cli.provision import keep_unwritten, origin_lines, unwritten
from gpunode.facts import NodeFacts
from gpunode.facts.node import facts_from_bundle
from gpunode.fleet.inventory import Inventory, read
from gpunode.fleet.locks import locks_to_write, write_locks
from gpunode.probe.bundle import Bundle
from gpunode.provisioning.node_stack import requested_by, resolved, with_request
from gpunode.stack import LOCK_NAME, Plan, PlanHost, Request, lock_document, plan
from gpunode.stack.picture import host_of

BUNDLES = Path(__file__).parents[2] / "fixtures" / "bundles"
TODAY = date(2026, 11, 20)
VARIABLES: list[dict[str, Any]] = [
    {},
    {"nvidia_driver_version": "keep"},
    {"nvidia_driver_source": "debian"},
    {"nvidia_driver_source": "nvidia", "nvidia_driver_version": "580"},
    {"nvidia_driver_version": "lts", "nvidia_driver_flavour": "open"},
    {"cuda_version": "13.0"},
    {"cuda_toolkit": ["12.9", "13.0"], "nvidia_driver_source": "nvidia"},
    {"nvidia_driver_version": "390", "cuda_version": "13.0"},
]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state folder without an earlier plan."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def facts_of(name: str) -> NodeFacts:
    return facts_from_bundle(Bundle.from_json((BUNDLES / name).read_text(), name))


def lock_for(facts: NodeFacts) -> dict[str, Any]:
    """A lock on another release than the one without a request."""
    stack = resolved(facts, {"source": "nvidia", "version": "570"}, None, TODAY).stack
    assert stack is not None
    return dict(lock_document(stack)[LOCK_NAME])


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("bundle", sorted(path.name for path in BUNDLES.glob("*.json")))
def test_both_decide_the_same(bundle: str, variables: dict[str, Any], locked: bool) -> None:
    facts = facts_of(bundle)
    lock = lock_for(facts_of("debian-12-driver.json")) if locked else None
    provisioned = resolved(facts, requested_by(variables), lock, TODAY).group
    host = with_request(host_of(facts.host, facts, load(), lock), variables, Request())
    (planned,) = plan([host], Request(), load(), TODAY).groups
    assert planned.stack == provisioned.stack
    assert (planned.conflict is None) == (provisioned.conflict is None)
    assert planned.undetermined == provisioned.undetermined


def test_each_request_has_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "group_vars"
    folder.mkdir()
    hosts = ["a1: {nvidia_driver_version: '580'}", "a2:", "a3:", "a4: {gpunode_stack: {driver: {version: 570.1}}}"]
    (tmp_path / "hosts.yml").write_text("\n    ".join(["gpu_nodes:\n  hosts:", *hosts]) + "\n")
    (folder / "gpu_nodes.yml").write_text("---\nnvidia_driver_source: nvidia\n")
    lines = list(origin_lines(read([str(tmp_path / "hosts.yml")]), {"cuda_version": "13.0"}))
    source = f"nvidia_driver_source=nvidia ({folder / 'gpu_nodes.yml'}:2)"
    assert lines == [
        f"stack of a1: {source}, nvidia_driver_version=580 ({tmp_path / 'hosts.yml'}:3), cuda_version=13.0 (-e)",
        f"stack of a[2-3]: {source}, cuda_version=13.0 (-e)",
        f"stack of a4: {source}, cuda_version=13.0 (-e), lock of driver 570.1 ({tmp_path / 'hosts.yml'}:6)",
    ]


def test_without_a_request_that_is_named() -> None:
    (line,) = origin_lines(Inventory(("hosts.yml",), {"b1": {"nvidia_driver_version": "keep"}}, ()), {})
    assert line.startswith("stack of b1: no request")


def test_a_plan_that_was_not_written_is_named_once() -> None:
    assert unwritten(["hosts.yml"]) is None
    keep_unwritten(["hosts.yml"], ["--cuda", "13.0"], "2026-11-27 22:41 UTC")
    assert unwritten(["other.yml"]) is None
    message = unwritten(["hosts.yml"])
    assert message is not None
    assert message.endswith("gpunode plan -i hosts.yml --cuda 13.0 --write")
    assert unwritten(["hosts.yml"]) is None
    keep_unwritten(["hosts.yml"], ["--cuda", "13.0"], "2026-11-27 22:41 UTC")
    keep_unwritten(["hosts.yml"], [], "2026-11-27 22:42 UTC")
    assert unwritten(["hosts.yml"]) is None


def decided(host: str) -> Plan:
    facts = facts_of("debian-12-driver.json").model_copy(update={"host": host})
    return plan([PlanHost(host, host_of(host, facts, load()).picture)], Request(), load(), TODAY)


def test_a_plan_reports_what_it_would_write_and_does(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("gpu_nodes:\n  hosts:\n    c1:\n")
    inventory, document = read([str(file)]), decided("c1")
    lock = tmp_path / "group_vars" / "all" / f"{LOCK_NAME}.yml"
    assert locks_to_write(document, inventory, None) == [f"--write: {lock} would be written"]
    assert not lock.exists()
    assert write_locks(document, inventory, None) == [lock]
    assert locks_to_write(document, inventory, None) == [f"--write: {lock} has this lock"]
    assert next(iter(origin_lines(read([str(file)]), {}))).endswith(f"({lock}:4)")
