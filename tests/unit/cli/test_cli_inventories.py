"""Inventories that Ansible cannot read: the file and what is wrong with it, whichever verb reads it."""

from pathlib import Path

import pytest

from gpunode.cli import run

BYTES = b"\xbb\xff \xfe\x00\n" * 99
VERBS = (["validate"], ["plan"], ["provision"])


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
    return answer.err


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_list(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("- gpu-1\n- gpu-2\n")
    reason = "expected groups with their hosts (all: hosts: ...), found a list"
    assert output([*verb, "-i", str(path)], capsys) == f"gpunode: inventory {path}: {reason}\n"


@pytest.mark.parametrize("name", ["hosts", "hosts.yml"])
def test_bytes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(BYTES)
    assert output(["validate", "-i", str(path)], capsys) == f"gpunode: inventory {path}: not UTF-8 text\n"


def test_a_file_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("- gpu-1\n")
    assert f"inventory {path}: expected groups" in output(["validate", "-i", str(tmp_path)], capsys)


def test_ansible_s_own_message_where_it_is_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text("all: [\n")
    assert f"{path}:2:1" in output(["validate", "-i", str(path)], capsys)


@pytest.mark.parametrize("verb", [["plan"], ["provision"]], ids=" ".join)
def test_a_variable_that_no_role_has(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "all:\n  hosts: {gpu-1: {ansible_host: 127.0.0.1, ansible_port: 1}}\n  vars: {ssh_hardning_state: present}\n"
    )
    err = output([*verb, "-i", str(path)], capsys)
    assert f"{path}:3" in err
    assert "ssh_hardening_state" in err
