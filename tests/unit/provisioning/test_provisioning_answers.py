"""From a node's answer to its state: parsed and bounded, whatever the node answers."""

import hashlib
import json
from typing import Any

import pytest
from driver_samples import BUNDLE
from node_samples import APT_STATE, DNF_STATE, node

from gpunode.errors import UsageError
from gpunode.provisioning import answers
from gpunode.provisioning.state import NodeState

TEXT = BUNDLE.read_text(encoding="utf-8")


def answer(**changes: Any) -> str:
    return json.dumps({"bundle": TEXT, "apt": APT_STATE, "dnf": None, "files": {}, "contents": {}, **changes})


def test_a_whole_answer_becomes_a_state_that_is_read_back_unchanged() -> None:
    files = {"/etc/x": {"kind": "file", "sha256": "0" * 64, "mode": "0644", "owner": "root", "group": "root"}}
    text = answers.parsed(answer(files=files, contents={"/etc/x": "t\n"}, engine={"info": None}), "gpu1")
    state = NodeState.model_validate_json(text)
    assert state.model_dump_json().encode() == text
    assert state.files["/etc/x"].mode == "0644"
    assert state.dnf is None
    assert NodeState.model_validate_json(answers.parsed(answer(apt=None, dnf=DNF_STATE), "gpu1")).apt is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not valid JSON"),
        ("[]", "contains no bundle"),
        ('{"bundle": 1}', "contains no bundle"),
        (answer(bundle="bash: python3: not found"), "not a gpunode.bundle/1 bundle"),
        (answer(apt={"installed": {}}), "apt"),
        (answer(apt={**APT_STATE, "installed": {"a": 1}}), "installed"),
        (answer(apt={**APT_STATE, "architecture": "x" * 5000}), "architecture"),
        (answer(files={"/x": {"kind": "nothing"}}), "files"),
        (answer(contents={"/x": "y" * (1 << 21)}), "contents"),
        (answer(files={f"/{n}": {"kind": "absent"} for n in range(10_001)}), "files"),
        (answer(apt={"error": "apt-config did not end"}), "apt-refuses: apt could not be queried"),
    ],
)
def test_an_invalid_state_is_one_line_that_names_the_node(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        answers.parsed(text, "what gpu1 answered")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", 100)
    with pytest.raises(UsageError, match="is longer than"):
        answers.parsed(answer(), "what gpu1 answered")


def test_files_that_are_planned_are_seen_where_they_are_known() -> None:
    known = {"/etc/docker/daemon.json": {"kind": "absent"}, "/etc/a": {"kind": "file", "sha256": "x", "mode": "0600"}}
    state = node(files=known).model_copy(update={"contents": {"/etc/docker/daemon.json": None}})
    later = state.with_files({"/etc/docker/daemon.json": "{}", "/etc/a": "a", "/etc/unknown": "b"})
    assert later.contents["/etc/docker/daemon.json"] == "{}"
    assert (later.files["/etc/docker/daemon.json"].kind, later.files["/etc/docker/daemon.json"].mode) == (
        "file",
        "0644",
    )
    assert later.files["/etc/a"].mode == "0600"
    assert later.files["/etc/a"].sha256 == hashlib.sha256(b"a").hexdigest()
    assert "/etc/unknown" not in later.files
    gone = later.with_files({"/etc/docker/daemon.json": None})
    assert (gone.files["/etc/docker/daemon.json"].kind, gone.contents["/etc/docker/daemon.json"]) == ("absent", None)
    assert state.files["/etc/docker/daemon.json"].kind == "absent"
