"""``gpunode plan``: ranges, frameworks, --explain, --diff and a stale catalog from the command line."""

import json
from pathlib import Path

import pytest

from gpunode.catalog import load
from gpunode.cli import run

T4 = ["--gpu", "T4", "--os", "ubuntu-24.04", "--today", "2026-11-22"]
Out = pytest.CaptureFixture[str]


def saved(path: Path, *more: str, form: str = "json", capsys: Out) -> Path:
    assert run(["plan", *T4, *more, "--format", form]) == 0
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--driver", ">=900"], "no known release matches"),
        (["--driver", ">=x"], "examples: >=580,<595"),
        (["--framework", "jax==1"], "torch==2.9"),
        (["--framework", "torch==99.9"], "known: 2.16"),
        (["--explain", "R99"], "known: R01-minor-floor"),
        (["--kernel-policy", "stay"], "hold"),
        (["--diff", "a", "b"], "cannot be combined with --gpu"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], word: str, capsys: Out) -> None:
    assert run(["plan", *T4, *arguments]) == 2
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
    assert word in answer.err


def test_explain_answers_for_a_hypothetical_node_alone(capsys: Out) -> None:
    assert run(["plan", *T4, "--explain", "R10"]) == 0
    assert capsys.readouterr().out.startswith("R10-gpu-min-driver\n")
    assert run(["plan", *T4, "--explain", "R13", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rule"] == "R13-branch-eol"
    assert run(["plan", "--replay", "x", "--explain", "R10"]) == 2
    assert "hypothetical" in capsys.readouterr().err


def test_secure_boot_of_a_hypothetical_node_is_answered(capsys: Out) -> None:
    assert run(["plan", *T4, "--secure-boot"]) == 0
    assert "secure boot is on" in capsys.readouterr().out
    assert run(["plan", *T4, "--no-secure-boot"]) == 0
    assert "secure boot" not in capsys.readouterr().out


def test_diff_names_what_differs_and_only_that(tmp_path: Path, capsys: Out) -> None:
    first = saved(tmp_path / "a.json", capsys=capsys)
    second = saved(tmp_path / "b.yaml", "--driver", "570", form="yaml", capsys=capsys)
    assert run(["plan", "--diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert run(["plan", "--diff", str(first), str(second), "--format", "json"]) == 1
    changes = {row["field"]: (row["before"], row["after"]) for row in json.loads(capsys.readouterr().out)}
    branch = json.loads(first.read_text(encoding="utf-8"))["groups"][0]["stack"]["driver"]["branch"]
    assert changes["driver.branch"] == (branch, 570)
    assert not any(field.startswith("reasons.") for field in changes)
    assert "os" not in changes
    assert run(["plan", "--diff", str(first), str(second), "-v"]) == 1
    assert "reasons.driver" in capsys.readouterr().out


def test_diff_of_a_lock_and_of_another_file(tmp_path: Path, capsys: Out) -> None:
    plan = saved(tmp_path / "a.json", capsys=capsys)
    lock = tmp_path / "gpunode_stack.yml"
    lock.write_text(
        json.dumps({"gpunode_stack": json.loads(plan.read_text(encoding="utf-8"))["groups"][0]["stack"]}),
        encoding="utf-8",
    )
    assert run(["plan", "--diff", str(plan), str(lock)]) == 0
    capsys.readouterr()
    for text in ("", "[]", "{not", "{}", '{"schema": "gpunode.plan/1"}', "a: &a [*a]", "\x00"):
        bad = tmp_path / "bad"
        bad.write_text(text, encoding="utf-8")
        assert run(["plan", "--diff", str(plan), str(bad)]) == 2, text
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert run(["plan", "--diff", str(plan), str(tmp_path / "none")]) == 2


def test_an_old_catalog_adds_a_note_and_a_fresh_index_does_not(tmp_path: Path, capsys: Out) -> None:
    newest = max(row.date for row in load().branches.values())
    old = [*T4[:-1], "2027-06-01"]
    assert run(["plan", *T4]) == 0
    assert "note:" not in capsys.readouterr().out
    assert run(["plan", *old]) == 0
    assert f"note: the catalog is of {newest}" in capsys.readouterr().out
    overlay = tmp_path / "site.yml"
    overlay.write_text("sources: {index-ours: {title: a mirror, date: 2027-05-20}}\n", encoding="utf-8")
    assert run(["plan", *old, "--overlay", str(overlay), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []
