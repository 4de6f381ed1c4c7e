"""``gpunode catalog``: list, show, lint."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from gpunode.catalog import load
from gpunode.catalog.catalog import MODELS
from gpunode.cli.lookup import catalog_command
from gpunode.errors import Exit, UsageError


def run(*words: str) -> int:
    result = catalog_command.main(args=list(words), standalone_mode=False)
    assert isinstance(result, int)
    return result


def lines(text: str) -> Sequence[str]:
    return text.splitlines()


def test_list_names_all_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == Exit.GOOD
    shown = lines(capsys.readouterr().out)
    assert [line.split()[0] for line in shown[1:]] == list(MODELS)


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_kind_can_be_listed_in_every_form(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = list(load().rows(kind))
    assert run("list", kind, "-v") == Exit.GOOD
    assert [line.split()[0] for line in lines(capsys.readouterr().out)[1:]] == expected
    assert run("list", kind, "--format", "json") == Exit.GOOD
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == expected
    assert run("list", kind, "--format", "yaml") == Exit.GOOD
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    assert [row["id"] for row in yaml.load(capsys.readouterr().out, Loader=loader)] == expected  # noqa: S506


def test_kinds_have_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("gpu", "drivers", "cuda", "os", "kernel-flavours", "platform"):
        assert run("list", word) == Exit.GOOD
    assert "ubuntu-24.04" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"unknown kind 'gpux'; did you mean gpus"):
        run("list", "gpux")


def test_show_prints_one_thing_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "H100 SXM") == Exit.GOOD
    shown = capsys.readouterr().out
    assert lines(shown)[0] == "H100 SXM5 80GB (gpus/h100-sxm5-80gb)"
    for part in ("10de:2330", "3350", "  pciids: pci.ids 2026.10.24", "(https://pci-ids.ucw.cz/, 2026-10-24)"):
        assert part in shown
    assert "H100 PCIe" not in shown


def test_show_names_releases_without_a_date_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "580") == Exit.GOOD
    shown = capsys.readouterr().out
    assert "580.173.02 (no date)" in shown
    assert "580.178.04 2026-08-03" in shown


def test_show_prints_a_family_as_far_as_it_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "H100", "--format", "json") == Exit.GOOD
    shown = json.loads(capsys.readouterr().out)
    assert shown["common"]["architecture"] == "hopper"
    assert shown["differs"]["form"]["h100-pcie"] == "pcie"
    assert "pciids" in shown["sources"]
    assert run("show", "H100") == Exit.GOOD
    assert lines(capsys.readouterr().out)[0] == "H100: 6 models"


@pytest.mark.parametrize(
    ("name", "section", "key"),
    [
        ("hgx-h100-8", "platforms", "hgx-h100-8"),
        ("noble", "systems", "ubuntu-24.04"),
        ("580", "branches", "580"),
        ("13.0", "toolkits", "13.0.3"),
        ("xid/79", "xids", "79"),
        ("xids/31", "xids", "31"),
        ("pytorch-2.14", "frameworks", "pytorch-2.14"),
        ("volta", "architectures", "volta"),
        ("10de:20b2", "gpus", "a100-sxm4-80gb"),
    ],
)
def test_show_finds_things_of_all_kinds(name: str, section: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", name, "--format", "yaml") == Exit.GOOD
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["section"], shown["id"]) == (section, key)
    assert shown["sources"]


def test_show_reports_what_is_unsure_and_what_else_has_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "615") == Exit.GOOD
    assert "(unsure: one guide lists proprietary packages" in capsys.readouterr().out
    assert run("show", "13") == Exit.GOOD
    assert "xids/13" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "near"), [("H100 SXN", "H100 SXM"), ("ubunut-24.04", "ubuntu-24.04"), ("xid/980", "98")]
)
def test_show_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(UsageError, match=near):
        run("show", name)


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("nope", "no entry 'nope'; see gpunode catalog list and gpunode catalog list KIND"),
        ("xid/9999", "xids has no '9999'; see gpunode catalog list xids"),
        ("zzz/1", "unknown kind 'zzz'; see gpunode catalog list"),
    ],
)
def test_where_nothing_is_near_the_listing_is_named(name: str, listed: str) -> None:
    with pytest.raises(UsageError, match=listed):
        run("show", name)


def test_verbose_may_stand_before_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-v", "list", "branches") == Exit.GOOD
    before = capsys.readouterr().out
    assert run("list", "branches", "-v") == Exit.GOOD
    assert capsys.readouterr().out == before
    assert run("list", "branches") == Exit.GOOD
    assert capsys.readouterr().out != before


def test_an_overlay_is_seen_by_list_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "site.yml"
    path.write_text("gpus: {t4: {note: ours alone}}", encoding="utf-8")
    assert run("show", "t4", "--overlay", str(path)) == Exit.GOOD
    assert "ours alone" in capsys.readouterr().out
    path.write_text("gpus: {t4: {form: card}}", encoding="utf-8")
    for words in (("list", "gpus"), ("show", "t4")):
        with pytest.raises(UsageError, match=r"site\.yml:1: gpus\.t4\.form: 'card' is not one of"):
            run(*words, "--overlay", str(path))


def test_lint_prints_each_fault_on_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lint") == Exit.GOOD
    assert capsys.readouterr().out.startswith("valid: ")
    path = tmp_path / "site.yml"
    path.write_text("gpus:\n  t4:\n    form: card\n    memory_gib: 16\n", encoding="utf-8")
    assert run("lint", str(path)) == Exit.USAGE
    shown = lines(capsys.readouterr().out)
    assert [line.split(": ")[0] for line in shown] == [f"{path}:3", f"{path}:4"]
    assert run("lint", "-v", "--overlay", str(path)) == Exit.USAGE
    assert capsys.readouterr().out.splitlines()[0].endswith("[value]")
    with pytest.raises(UsageError, match=r"nowhere\.yml: cannot be read"):
        run("lint", "/nowhere.yml")
