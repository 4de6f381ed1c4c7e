"""The playbooks alone lead a node along the same edges as ``gpunode upgrade``: gpunode.change.journal."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpunode.change.journal import ACTS, PATH
from gpunode.provisioning.preflight import PreflightSettings

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
ACT_OF = {"drain.yml": "drain", "reboot_now.yml": "reboot", "validate.yml": "validate", "undrain.yml": "return"}
"""The act that a file of tasks does. Files that it includes are of that act."""


def acts(tasks: list[dict[str, Any]]) -> Iterator[str]:
    """The acts of tasks, those of the files that they include too, in the order in which they run."""
    for task in tasks:
        yield from acts(task.get("block", []))
        if "ansible.builtin.import_role" in task:
            yield "change"
        included = task.get("ansible.builtin.include_tasks") or task.get("ansible.builtin.import_tasks")
        file = included["file"] if isinstance(included, dict) else included or ""
        name = Path(re.sub(r"\{\{ '(\w+)' if .* \}\}", r"\1", file)).name
        if name in ACT_OF:
            yield ACT_OF[name]
        elif (PLAYBOOKS / "tasks" / name).is_file():
            yield from acts(yaml.safe_load((PLAYBOOKS / "tasks" / name).read_text(encoding="utf-8")))


def play(name: str) -> dict[str, Any]:
    """The play that changes nodes."""
    last_play = yaml.safe_load((PLAYBOOKS / name).read_text(encoding="utf-8"))[-1]
    assert isinstance(last_play, dict)
    return last_play


def acts_of(name: str) -> list[str]:
    changes = play(name)
    done = [*acts(changes.get("pre_tasks", [])), *acts(changes["tasks"])]
    assert "return" in done
    return done


@pytest.mark.parametrize("name", ["site.yml", "reboot.yml"])
def test_a_node_is_drained_before_and_proven_before_it_returns(name: str) -> None:
    done = acts_of(name)
    assert set(done) <= set(PATH)
    assert set(PATH) - set(done) == ({"prepare"} if name == "site.yml" else {"prepare", "change"})
    # A reboot that nobody changed anything for begins with a drain of its own.
    in_order = [act for at, act in enumerate(done) if act not in done[:at]]
    assert in_order == [act for act in PATH if act in done]
    for at, act in enumerate(done):
        if act == "reboot":
            assert done[at - 1] == "drain"
        if act == "return":
            assert done[at - 1] == "validate"


def test_the_drain_has_the_undo_and_the_limit_of_its_edge() -> None:
    tasks = yaml.safe_load((PLAYBOOKS / "tasks" / "drain.yml").read_text(encoding="utf-8"))
    waits = tasks[-1]
    wait = waits["block"][0]
    assert "result.drain_wait_s //" in wait["retries"]
    assert PreflightSettings().gpunode_drain_wait_s == ACTS["drain"].limit_s
    assert ACTS["drain"].undo == "cancel"
    assert list(acts(waits["rescue"])) == ["return"]
    assert "ansible.builtin.fail" in waits["rescue"][-1]


@pytest.mark.parametrize("name", ["site.yml", "reboot.yml"])
def test_no_task_outlasts_its_edge(name: str) -> None:
    assert play(name)["timeout"] == ACTS["change"].limit_s


def test_nothing_else_ends_a_drain() -> None:
    files = [path for path in PLAYBOOKS.rglob("*.yml") if "undrain.yml" in path.read_text(encoding="utf-8")]
    assert {path.name for path in files} == {"drain.yml", "return.yml"}


def test_a_node_that_is_prepared_or_refused_keeps_its_sources() -> None:
    """The kept packages are offered for as long as the preparation looks, whatever its end."""
    (block,) = play("prepare.yml")["tasks"]
    assert block["block"][0]["ansible.builtin.import_tasks"] == "tasks/kept_offered.yml"
    (withdrawn,) = block["always"]
    assert withdrawn["gpunode.node.kept_packages"]["state"] == "withdrawn"
    assert withdrawn["when"] == "gpunode_kept | default(false)"


def test_the_kept_packages_are_offered_before_a_node_can_be_refused() -> None:
    """The role preflight refuses a release that no source has."""
    first, changes = yaml.safe_load((PLAYBOOKS / "site.yml").read_text(encoding="utf-8"))
    assert [role["role"] for role in first["roles"]] == ["gpunode.node.preflight"]
    offers = [
        task for task in first["pre_tasks"] if task.get("ansible.builtin.import_tasks") == "tasks/kept_offered.yml"
    ]
    assert len(offers) == 1
    withdrawals = [task for task in changes["tasks"] if "gpunode.node.kept_packages" in task]
    assert [task["gpunode.node.kept_packages"]["state"] for task in withdrawals] == ["withdrawn"]
