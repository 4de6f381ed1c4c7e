"""YAML files and inventories of users: what cannot be read, or stands for gigabytes, ends in one line."""

import random
import sys
import time
from pathlib import Path

import pytest
import yaml

from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.fleet import inventory, process
from gpunode.yaml_file import Expanded, load_bounded, read_mapping

sys.path.append(str(Path(__file__).parents[2]))

from effort import effort

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which a verb refuses a file."""
    assert run(arguments) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
    return answer.err


def bomb(chance: random.Random) -> str:
    """A document in which anchors multiply: lists, mappings, merges of both kinds, long texts, and mixtures."""
    levels, fan = chance.choice([(9, 9), (30, 2), (60, 3), (6, 40), (400, 2)])
    kinds = chance.choice([["list"], ["map"], ["merge"], ["merges"], ["list", "map", "merge", "merges"]])
    lines = [f"a0: &a0 {chance.choice(['{k: v, l: w}', '{k: ' + 'v' * 2000 + '}'])}"]
    for level in range(1, levels + 1):
        below = f"*a{level - 1}"
        match chance.choice(kinds):
            case "list":
                value = f"[{', '.join([below] * fan)}]"
            case "map":
                value = "{" + ", ".join(f"k{number}: {below}" for number in range(fan)) + "}"
            case "merge":
                value = "{" + ", ".join(f"k{number}: {{<<: {below}}}" for number in range(fan)) + "}"
            case _:
                value = "{<<: [" + ", ".join([below] * fan) + f"], m{level}: 1}}"
        lines.append(f"a{level}: &a{level} {value}")
    return "\n".join(lines) + "\n"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(effort(12, 300)))
def test_a_bomb_is_refused_before_it_is_built(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "site.yml"
    text = bomb(random.Random(seed))  # noqa: S311
    path.write_text(text)
    assert len(text) < 200_000
    before = time.process_time()
    with pytest.raises(
        UsageError, match=r"--policy .*site\.yml: aliases expand the value in line \d+ to more than 4 MiB"
    ):
        read_mapping("--policy", path, "checks")
    assert time.process_time() - before < 10
    for loader in (yaml.SafeLoader, yaml.CSafeLoader):
        with pytest.raises(Expanded):
            load_bounded(text, loader)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "words",
    [
        ["validate", "--replay", str(BUNDLE), "--policy", "BOMB"],
        ["validate", "--replay", str(BUNDLE), "--expect", "BOMB"],
        ["validate", "--replay", str(BUNDLE), "--policy", "own.yml"],
        ["checks", "test", "BOMB"],
        ["plan", "--diff", "BOMB", "BOMB"],
        ["provision", "-i", "localhost,", "-e", "@BOMB"],
    ],
)
def test_every_file_of_a_user_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("BOMB").write_text(bomb(random.Random(1)))  # noqa: S311
    Path("own.yml").write_text("own_checks: [BOMB]\n")
    assert "BOMB" in output([word.replace("@BOMB", f"@{tmp_path}/BOMB") for word in words], capsys)


def test_also_an_inventory_that_ansible_could_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(bomb(random.Random(1)))  # noqa: S311
    failed = process.Completed(1, "", f"[WARNING]: Completely failed to parse inventory source {path}")
    monkeypatch.setattr(process, "run", lambda *_, **__: failed)
    with pytest.raises(UsageError, match="aliases expand"):
        inventory.read([str(path)])


def test_ordinary_aliases_stay(tmp_path: Path) -> None:
    path = tmp_path / "site.yml"
    path.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n? [1]\n: 2\n")
    with pytest.raises(UsageError, match="not YAML in line 4: found unhashable key"):
        read_mapping("--policy", path, "checks")
    path.write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n")
    content, pairs = read_mapping("--policy", path, "checks")
    assert content == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}
    assert [key.value for key, _ in pairs] == ["a", "b", "c"]
    path.write_text("a: &a [1, {b: *a}]\n")
    with pytest.raises(UsageError, match="the value in line 1 contains an alias of itself"):
        read_mapping("--policy", path, "checks")


BYTES = b"\xbb\xff \xfe\x00\n" * 99
READERS = (["validate"], ["plan"], ["provision"])


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
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
