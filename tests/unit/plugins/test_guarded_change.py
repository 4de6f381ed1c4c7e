"""The steps of the module guarded_change, in a folder of the test in the place of a node."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import commands, guard
from ansible_collections.gpunode.node.plugins.module_utils.guard import Guard
from ansible_collections.gpunode.node.plugins.module_utils.managed import FileRefusedError
from ansible_collections.gpunode.node.plugins.modules import guarded_change
from test_guard import PROGRAM, Systemd
from test_managed_files import file


class Node:
    """One file of a node, and the module's calls on it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x.conf"
        self.path.write_text("before\n")
        self.systemd = Systemd()
        (folder / "units").mkdir()
        self.guard = partial(
            Guard, home=folder / "guard", units=folder / "units", runner=self.systemd, notices=folder / "run"
        )
        self.warnings: list[str] = []

    def change(self, check_mode: bool = False, **options: Any) -> dict[str, Any]:
        params = {
            "name": "x",
            "files": [file(self.path, "after\n")],
            "folders": [],
            "keep": [],
            "units": [],
            "validate": [],
            "show": [],
            "activate": [["reload"]],
            "restore": None,
            "lock": [],
            "pending": False,
            "limit_s": 60,
            "token": "t",
            "program": PROGRAM,
            **options,
        }
        module: Any = SimpleNamespace(params=params, check_mode=check_mode, _diff=True, warn=self.warnings.append)
        result: dict[str, Any] = guarded_change.GuardedChange(module).apply()
        return result


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    monkeypatch.setattr(guarded_change, "Guard", made.guard)
    monkeypatch.setattr(guarded_change.shutil, "which", lambda name: f"/usr/bin/{name}")
    # Commands that validate the files succeed unless a test sets otherwise.
    monkeypatch.setattr(commands, "run_with_files", lambda _, commands: [(0, "", "")] * len(commands))
    return made


def test_a_change_is_made_and_waits(node: Node) -> None:
    result = node.change()
    assert (result["changed"], result["waits"], node.path.read_text()) == (True, True, "after\n")
    assert node.guard("x").armed
    assert node.systemd.asked[-1] == "reload"


def test_check_mode_arms_and_changes_nothing(node: Node) -> None:
    result = node.change(check_mode=True)
    assert (result["changed"], node.path.read_text()) == (True, "before\n")
    assert not node.guard("x").armed
    assert "reload" not in node.systemd.asked


def test_what_is_settled_is_not_armed(node: Node) -> None:
    node.path.write_text("after\n")
    assert node.change()["changed"] is False
    assert node.change(pending=True)["changed"] is True


def test_what_is_not_valid_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        commands, "run_with_files", lambda _, commands: [(1, "", "line 1: no such setting")] * len(commands)
    )
    with pytest.raises(FileRefusedError, match=r"no such setting: nothing was changed"):
        node.change(validate=[["judge"]])
    assert node.path.read_text() == "before\n"
    assert not node.guard("x").armed


@pytest.mark.parametrize("refused", ["systemd-run", "daemon-reload"])
def test_a_node_that_cannot_revert_is_left_alone(node: Node, refused: str) -> None:
    node.systemd.refuse = (refused,)
    with pytest.raises(FileRefusedError, match="nothing was changed"):
        node.change()
    assert node.path.read_text() == "before\n"


def test_a_command_that_fails_restores_at_once(node: Node) -> None:
    node.systemd.refuse = ("reload-now",)
    with pytest.raises(FileRefusedError, match="reverted at once"):
        node.change(activate=[["reload-now"]], restore=[["reload"]])
    assert node.path.read_text() == "before\n"
    assert not node.guard("x").armed


def test_a_change_that_was_not_confirmed_is_reverted_by_the_next_run(node: Node) -> None:
    node.change()
    node.change(files=[file(node.path, "later\n")])
    assert "was not confirmed" in node.warnings[0]
    node.guard("x").restore("by the timer on the node")
    assert node.path.read_text() == "before\n"


def test_a_timer_that_was_faster_ends_the_commands(node: Node) -> None:
    def slow(argv: list[str]) -> tuple[int, str]:
        if argv == ["first"]:
            node.guard("x").restore("by the timer on the node")
        return node.systemd(argv)

    guarded_change.Guard = partial(node.guard, runner=slow)
    node.change(activate=[["first"], ["second"]], restore=[])
    assert "second" not in node.systemd.asked
    assert node.path.read_text() == "before\n"


def test_without_a_limit_nothing_is_armed(node: Node) -> None:
    assert node.change(limit_s=0)["waits"] is False
    assert not node.guard("x").armed
    assert node.path.read_text() == "after\n"


def test_passwords_are_locked_in_the_guarded_step_and_unlocked_by_its_revert(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.path.with_name("shadow")
    path.write_text("root:*:1::::::\nada:$y$hash:1::::::\n")
    for module in (guard, guarded_change):
        monkeypatch.setattr(module, "SHADOW", str(path))
    shown = node.change(check_mode=True, files=[], lock=["root", "ada"])
    assert (shown["changed_paths"], path.read_text().count("ada:$y$hash:")) == ([str(path)], 1)
    assert "hash" not in str(shown)
    assert node.change(files=[], lock=["root", "ada"])["waits"]
    assert path.read_text() == "root:*:1::::::\nada:*$y$hash:1::::::\n"
    node.guard("x").restore("by the timer on the node")
    assert path.read_text() == "root:*:1::::::\nada:$y$hash:1::::::\n"
    assert node.change(files=[], lock=["root"])["changed"] is False


def test_a_run_after_a_revert_that_failed_changes_nothing(node: Node) -> None:
    """The old state that is still to be restored would be replaced by what is there now."""
    node.change()
    node.systemd.refuse = ("reload",)
    node.guard("x").restore("by the timer on the node")
    record = node.guard("x").read("record.json")
    with pytest.raises(FileRefusedError, match=r"could not be reverted: .*nothing was changed"):
        node.change(files=[file(node.path, "later\n")])
    assert (node.path.read_text(), node.guard("x").read("record.json")) == ("before\n", record)
    node.systemd.refuse = ()
    assert node.change(files=[file(node.path, "later\n")])["waits"]
