"""How a verb ends that meets an error of its own, a directory that is gone, or a name that no file can have."""

import json
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from gpunode.cli import on_node, run, settings
from gpunode.cli.verbs import VERBS
from gpunode.cli.zipapp import START
from gpunode.whole import exists

HOSTS = ",".join(f"gpu-{number:03}" for number in range(1, 101)) + ","


class UnexpectedError(Exception):
    """An error that no verb knows."""


def fails(*_: object) -> None:
    raise UnexpectedError("a line\nand \x1b[2Janother")


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path / "history"))
    monkeypatch.delenv("ANSIBLE_INVENTORY", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["checks"],
        ["validate", "--replay", "x", "--format", "json"],
        ["validate", "--on-node"],
        ["validate", "--on-node", "--format", "json"],
    ],
)
def test_an_unexpected_error_is_no_failed_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(settings, "_site_file", fails)
    monkeypatch.setattr(on_node, "ProbeRun", fails)
    out, err = tmp_path / "out", tmp_path / "err"
    assert forked.run(words, stdout=out, stderr=err) == 3
    assert "Traceback" in err.read_text()
    assert "UnexpectedError" in err.read_text().splitlines()[-1]
    if "json" in words:
        assert json.loads(out.read_text())["exit_code"] == 3
    else:
        assert out.read_text() == ""


def test_a_zipapp_that_cannot_start_is_no_failed_check() -> None:
    done = subprocess.run([sys.executable, START], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (3, True)


@pytest.mark.parametrize("words", [[verb] for verb in VERBS] + [["validate", "--level", "quick"], ["env", "-i", "x"]])
def test_a_current_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_path_of_an_unknown_user_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANSIBLE_INVENTORY", "~nosuch/hosts")
    assert run(["env"]) == 2
    assert "ANSIBLE_INVENTORY: ~nosuch/hosts" in capsys.readouterr().err
    monkeypatch.delenv("ANSIBLE_INVENTORY")
    files = {"ansible.cfg": "[defaults]\ninventory = ~nosuch/hosts", "gpunode.toml": "expect = '~nosuch/x'"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert run(["validate"]) == 2
        assert f"{name}: ~nosuch" in capsys.readouterr().err
        (tmp_path / name).unlink()
    assert run(["provision", "-i", "x,", "--list-hosts", "-e", "@~nosuch/x"]) == 2
    assert "@~nosuch/x" in capsys.readouterr().err


def test_a_user_without_home_has_no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", fails_as_pathlib)
    assert run(["config", "show", "env"]) == 0


def fails_as_pathlib() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["config", "show", "env", "-i", HOSTS], 0),
        (["provision", "-i", HOSTS, "--list-hosts"], 0),
        (["compare", HOSTS, "x"], 3),
        (["validate", "--replay", HOSTS], 2),
        (["validate", "--replay", HOSTS, "--format", "json", "--output", HOSTS], 2),
        (["plan", "--replay", HOSTS], 2),
        (["collect", "--save", HOSTS], 2),
        (["init", HOSTS], 2),
    ],
)
def test_a_list_of_hosts_is_no_file(capsys: pytest.CaptureFixture[str], words: list[str], code: int) -> None:
    assert run(words) == code
    assert "Traceback" not in capsys.readouterr().err


def test_only_an_impossible_name_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (exists(tmp_path), exists(tmp_path / "x"), exists(tmp_path / HOSTS)) == (True, False, False)
    monkeypatch.setattr(Path, "stat", refuses)
    with pytest.raises(PermissionError):
        exists(tmp_path)


def refuses(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")
