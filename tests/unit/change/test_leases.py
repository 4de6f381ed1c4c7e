"""The node's part of a change: one writer, and marks that only their owner removes."""

import json
from pathlib import Path

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.onnode.lease import LEASE, MARK, answer

HOUR = 3600
LASTS = 8 * HOUR


def ask(folder: Path, op: str, token: str, at: float) -> str:
    question = {"op": op, "token": token, "owner": f"me with {token}", "lasts_s": LASTS, "findings": []}
    return answer(question, folder, at)["refused"]


def test_a_second_controller_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    assert ask(tmp_path, "take", "one", 0) == ""
    assert ask(tmp_path, "take", "two", HOUR) == "held by me with one since 1970-01-01T00:00:00Z"
    assert ask(tmp_path, "mark", "two", HOUR).startswith("held by me with one")
    assert ask(tmp_path, "free", "two", HOUR) == ""
    assert '"token": "one"' in (tmp_path / LEASE).read_text()
    assert ask(tmp_path, "free", "one", HOUR) == ""
    assert ask(tmp_path, "take", "two", HOUR) == ""


def test_an_expired_lease_passes_to_another_unless_the_node_is_drained(tmp_path: Path) -> None:
    ask(tmp_path, "take", "one", 0)
    assert ask(tmp_path, "take", "two", LASTS + 1) == ""
    # The old controller wakes.
    assert ask(tmp_path, "mark", "one", LASTS + 2).startswith("held by me with two")
    assert ask(tmp_path, "mark", "two", LASTS + 2) == ""
    refused = ask(tmp_path, "take", "three", 3 * LASTS)
    assert "held by me with two" in refused
    assert "without a sign of life for 960 minutes" in refused


@pytest.mark.parametrize("at", [-10 * LASTS, 0.0])
def test_a_clock_that_was_set_back_ends_no_lease(tmp_path: Path, at: float) -> None:
    ask(tmp_path, "take", "one", LASTS)
    assert ask(tmp_path, "take", "two", at).startswith("held by me with one")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"owner": 4}'])
@pytest.mark.parametrize("name", [LEASE, MARK])
def test_a_damaged_file_is_nobodys_to_take(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text)
    assert ask(tmp_path, "take", "one", 100 * LASTS) != ""
    assert (tmp_path / name).read_text() == text


def test_the_mark_of_a_playbook_is_not_touched(tmp_path: Path) -> None:
    mark = json.dumps({"since": "2026-11-23", "findings": []})
    (tmp_path / MARK).write_text(mark)
    assert ask(tmp_path, "take", "one", 0).startswith("drained by a playbook")
    ask(tmp_path, "free", "one", 0)
    assert (tmp_path / MARK).read_text() == mark


@settings(max_examples=effort(25, 3000), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "mark", "free"]), st.sampled_from("ab"), st.integers(0, 3 * LASTS)),
        max_size=12,
    )
)
def test_two_controllers_are_never_both_served(
    tmp_path_factory: pytest.TempPathFactory, asked: list[tuple[str, str, int]]
) -> None:
    """A marked node is its owner's until that owner frees it, whatever the clocks show."""
    folder = tmp_path_factory.mktemp("node")
    marked = ""
    for op, token, at in asked:
        refused = ask(folder, op, token, at)
        if op != "free":
            assert refused or marked in ("", token)
        if op == "mark" and not refused:
            marked = token
        elif op == "free" and token == marked:
            marked = ""
        assert (folder / MARK).exists() == bool(marked)
