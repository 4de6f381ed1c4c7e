"""What root writes does not go where another user leads it, and no output lets a node steer the terminal."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunode import fleet
from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.judging.saved import folder_for_bundles, write_bundle
from gpunode.text import all_printable, printable, printable_json

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import without_gpu

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
HOSTILE = "gpu\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\n\r<b>{{1}}$(id)"
CONTROL = [chr(n) for n in (*range(9), 11, 12, *range(14, 32), *range(0x7F, 0xA0), 0x202E)]


@ROOT
@pytest.mark.parametrize("option", ["--save", "--output"])
def test_root_writes_into_no_folder_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    os.chown(foreign, 1234, 1234)
    bundle = tmp_path / "b.json"
    bundle.write_text(json.dumps(without_gpu()))
    words = ["validate", "--replay", str(bundle), "--format", "json", "--output", str(foreign / "r.json")]
    assert run(words if option == "--output" else ["collect", "h", "--save", str(foreign / "new")]) == 2
    assert f"{foreign} belongs to another user (1234, uid 1234)" in capsys.readouterr().err
    assert list(foreign.iterdir()) == []
    monkeypatch.setenv("SUDO_UID", "1234")
    assert folder_for_bundles(foreign) == foreign, "who called sudo is not another user"


@ROOT
def test_root_follows_no_link_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    assert folder_for_bundles(link) == link
    os.lchown(link, 1234, 1234)
    with pytest.raises(UsageError, match="is a symbolic link that user 1234 or others can change"):
        folder_for_bundles(link)


def test_a_bundle_goes_through_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "h.json").symlink_to(precious)
    with pytest.raises(UsageError, match="is a symbolic link; expected a regular file"):
        write_bundle(tmp_path, "h", b"{}")
    assert precious.read_text() == "mine"


def test_a_forbidden_file_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.exists

    def forbidden(self: Path) -> bool:
        if str(self) == "/nobody/x.json":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "exists", forbidden)
    assert run(["validate", "--replay", "/nobody/x.json"]) == 2
    assert capsys.readouterr().err == "gpunode: /nobody/x.json: Permission denied\n"


@pytest.mark.parametrize("verb", ["validate", "collect", "plan", "env"])
def test_wrong_usage_names_the_help_of_the_verb(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run([verb, "--limit"]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"(gpunode {verb} --help)")


def test_printable() -> None:
    assert not any(char in printable(HOSTILE) for char in [*CONTROL, "\n", "\r"])
    assert json.loads(printable_json(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE
    assert not any(char in str(all_printable({HOSTILE: [HOSTILE]})) for char in CONTROL)


def hostile() -> dict[str, Any]:
    """A node with terminal control sequences in its name and every text."""
    document: dict[str, Any] = without_gpu()
    document["host"] = HOSTILE
    document["files"]["/etc/os-release"] = f'ID={HOSTILE}\nPRETTY_NAME="{HOSTILE}"\n'
    document["commands"][HOSTILE] = {**document["commands"]["uname"], "stderr": HOSTILE}
    return document


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "--replay", "B", "-v"],
        ["validate", "--replay", "B", "--format", "json"],
        ["plan", "--replay", "B"],
        ["plan", "--replay", "B", "--format", "json"],
        ["plan", "--replay", "B", "--format", "yaml"],
        ["env", "--replay", "B", "-v"],
        ["env", "--replay", "B", "--format", "json"],
        ["validate", "--replay", "BROKEN"],
        ["plan", "--replay", "BROKEN"],
        ["validate", HOSTILE + "[", "--save", "S"],
        [HOSTILE],
        ["plan", "--gpu", HOSTILE],
        ["checks", HOSTILE],
    ],
)
def test_nothing_steers_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str]) -> None:
    good, broken = tmp_path / "good.json", tmp_path / "broken.json"
    good.write_text(json.dumps(hostile()))
    broken.write_text(json.dumps({**hostile(), "files": {HOSTILE: 1}}))
    places = {"B": str(good), "BROKEN": str(broken), "S": str(tmp_path / "s")}
    run([places.get(word, word) for word in words])
    captured = capfd.readouterr()
    assert captured.out + captured.err
    assert [char for char in CONTROL if char in captured.out + captured.err] == []


def test_collect_s_messages_steer_no_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        fleet.Collected("a", fleet.Answer(json.dumps(hostile()).encode(), host="a"), None, 0.1),
        fleet.Collected("b", None, HOSTILE, 0.1),
    ]
    monkeypatch.setattr(fleet, "collect", lambda *_, **__: iter(answers))
    assert run(["collect", "a", "b", "--save", str(tmp_path), "-v"]) == 3
    captured = capfd.readouterr()
    assert [char for char in CONTROL if char in captured.out + captured.err] == []
