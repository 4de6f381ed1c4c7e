"""Options from files and variables: order, origin, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpunode.cli import run

SITE = """
inventory = "hosts.yml"
timeout = 300
[validate]
level = "quick"
skip = ["host.time", "host.limits"]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an inventory of this machine, in which gpunode runs, and a home without settings."""
    for name in [name for name in os.environ if name.startswith(("GPUNODE_", "ANSIBLE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("GPUNODE_HISTORY", "off")
    folder = tmp_path / "site"
    (folder / "below").mkdir(parents=True)
    (folder / "hosts.yml").write_text("all: {hosts: {localhost: {ansible_connection: local}}}\n")
    monkeypatch.chdir(folder / "below")
    return folder


def shown(capsys: pytest.CaptureFixture[str], verb: str, *words: str) -> dict[str, tuple[Any, str]]:
    """The options of a verb that are set: value and origin."""
    assert run(["config", "show", verb, "--format", "json", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    return {each["option"]: (each["value"], each["origin"]) for each in document["options"]}


def test_without_settings_everything_is_default(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "validate") == {}


def test_each_value_has_its_origin(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site / "gpunode.toml"
    file.write_text(SITE)
    monkeypatch.setenv("GPUNODE_TIMEOUT", "5")
    monkeypatch.setenv("GPUNODE_VALIDATE_PARALLEL", "3")
    assert shown(capsys, "validate") == {
        "inventory": ([str(site / "hosts.yml")], str(file)),
        "timeout": (5.0, "GPUNODE_TIMEOUT"),
        "parallel": (3, "GPUNODE_VALIDATE_PARALLEL"),
        "level": ("quick", str(file)),
        "skip": (["host.time", "host.limits"], str(file)),
    }
    assert "inventory" not in shown(capsys, "init")


def test_the_site_takes_precedence_over_the_user(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user_file = tmp_path / "config" / "gpunode" / "gpunode.toml"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("timeout = 7\nparallel = 9\n")
    (site / "pyproject.toml").write_text("[tool.gpunode]\ntimeout = 8\n")
    options = shown(capsys, "collect")
    assert options == {"timeout": (8.0, str(site / "pyproject.toml")), "parallel": (9, str(user_file))}


def test_a_file_beside_the_inventory_is_used_from_elsewhere(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "gpunode.toml").write_text("timeout = 8\n")
    monkeypatch.chdir(tmp_path)
    assert shown(capsys, "validate") == {}
    assert shown(capsys, "validate", "-i", "site/hosts.yml")["timeout"] == (8.0, str(site / "gpunode.toml"))


def test_the_inventory_of_ansible_is_used(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "below" / "ansible.cfg").write_text("[defaults]\ninventory = ../hosts.yml\n")
    ((value,), origin) = shown(capsys, "provision")["inventory"]
    assert Path(value).resolve() == site / "hosts.yml"
    assert origin == "ansible.cfg"
    monkeypatch.setenv("ANSIBLE_INVENTORY", "nowhere.yml")
    assert "inventory" not in shown(capsys, "provision")


def judged(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    code = run(["validate", "--no-history", "--format", "json", *words])
    answer = capsys.readouterr()
    return code, json.loads(answer.out), answer.err


def test_validate_obeys_the_file_and_names_its_inventory(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = site / "gpunode.toml"
    file.write_text(SITE)
    _, report, err = judged([], capsys)
    assert report["level"] == "quick"
    checks = {finding["check"] for node in report["nodes"] for finding in node["findings"]}
    assert "node.reachable" in checks
    assert not checks & {"host.time", "host.limits"}
    assert f"gpunode: -i {site / 'hosts.yml'} ({file})" in err
    assert "-i" not in judged(["-q"], capsys)[2]


def test_formats_of_a_file_are_written(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "gpunode.toml").write_text('[validate]\nformat = ["json", "console"]\noutput = ["report.json"]\n')
    assert run(["validate", "-q", "--no-history", "--level", "quick", "localhost"]) in (0, 1, 3)
    assert "localhost" in capsys.readouterr().out
    assert json.loads((site / "report.json").read_text())["nodes"]


@pytest.mark.parametrize(
    ("settings", "variable", "words", "document"),
    [
        ('[validate]\nformat = "json"\n', "", [], True),
        ('[validate]\nformat = ["json"]\n', "", [], True),
        ("", "json", [], True),
        ('[validate]\nformat = "json"\n', "console", [], False),
        ("", "json", ["--format", "console"], False),
        ('[validate]\nformat = "json"\noutput = "report.json"\n', "", [], False),
        ("", "", [], False),
    ],
)
def test_an_error_is_a_document_where_settings_choose_json(
    *,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: str,
    variable: str,
    words: list[str],
    document: bool,
) -> None:
    (site / "gpunode.toml").write_text(settings)
    if variable:
        monkeypatch.setenv("GPUNODE_VALIDATE_FORMAT", variable)
    assert run(["validate", "--no-such-option", *words]) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert (json.loads(out)["message"] + "\n" == err) if document else out == ""


def test_nodes_of_the_command_line_displace_a_configured_inventory(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "gpunode.toml").write_text('inventory = "missing.yml"\nlimit = "nobody"\n')
    assert run(["validate", "--no-history", "--level", "quick", "localhost"]) in (0, 1, 3)
    assert run(["plan", "--gpu", "T4", "--os", "debian-12"]) == 0
    assert run(["validate", "--fabric", "--records", "/nowhere"]) == 2
    assert "missing.yml" not in capsys.readouterr().err
    assert run(["validate", "--no-history"]) == 2
    assert "missing.yml" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["provision", "--list-hosts", "--diff"], ["env", "--gpus", "0"]])
def test_an_option_that_names_no_nodes_displaces_no_inventory(
    site: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (site / "gpunode.toml").write_text('inventory = "missing.yml"\n')
    assert run(words) == 2
    assert "missing.yml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        ("timeot = 3", ["validate"], "unknown option timeot: did you mean timeout?"),
        ("[validat]\nlevel = 'quick'", ["plan"], "unknown verb [validat]: did you mean validate?"),
        ("[validate]\nlevl = 'quick'", ["validate"], "[validate] unknown option levl: did you mean level?"),
        ("[validate]\nlevel = 'quik'", ["validate", "localhost"], "(set by "),
        ("[validate]\nstrict = 1", ["validate"], "validate.strict: expected true or false, found 1"),
        ("timeout = [1, 2]", ["validate"], "timeout: expected one value, found a list"),
        ("timeout = ", ["validate"], "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_line(
    site: Path, text: str, words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = site / "gpunode.toml"
    file.write_text(text + "\n")
    assert run(words) == 2
    err = capsys.readouterr().err
    assert problem in err
    assert str(file) in err
    assert err.count("\n") == 1


def test_a_file_that_others_may_write_is_not_read(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = site / "gpunode.toml"
    file.write_text("timeout = 8\n")
    file.chmod(0o666)
    assert run(["config", "show", "validate", "--format", "json"]) == 0
    answer = capsys.readouterr()
    assert json.loads(answer.out)["options"] == []
    assert f"{file} is not read: another user may write {file}" in answer.err


def test_a_prolog_reads_no_settings(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "gpunode.toml").write_text("[validate]\nselect = ['nothing.known']\nnonsense = 1\n")
    monkeypatch.setenv("GPUNODE_VALIDATE_SELECT", "nothing.known")
    assert run(["validate", "--on-node", "--budget", "30s", "--format", "json"]) in (0, 1, 3)
    assert "nonsense" not in capsys.readouterr().err
