"""``gpunode plan`` from the command line: what is refused, saved bundles, ranges, --explain, --diff, --format."""

import json
from pathlib import Path

import pytest
import yaml

from gpunode.catalog import load
from gpunode.cli import run

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
HYPOTHETICAL = ["--gpu", "H100 SXM", "--os", "ubuntu-24.04"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*HYPOTHETICAL, "--parallel", "3"], "a hypothetical node cannot be reached: --parallel"),
        ([*HYPOTHETICAL, "-K", "--timeout", "120"], "a hypothetical node cannot be reached: --timeout, -K"),
        (["--replay", str(BUNDLE), "--parallel", "32"], "--replay contacts no node: --parallel"),
    ],
)
def test_options_for_nodes_need_nodes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *arguments]) == 2
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
    assert words in answer.err


def test_a_machine_without_a_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--replay", str(BUNDLE)]) == 0
    out = capsys.readouterr().out
    assert "no GPU named" not in out
    assert "no known NVIDIA GPU on debian-12" in out
    assert "warning: no NVIDIA GPU is on the PCI bus" in out
    assert "note: apt and dnf were not queried" in out


def test_a_hypothetical_node_without_a_gpu_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--os", "ubuntu-24.04", "--driver", "580"]) == 0
    out = capsys.readouterr().out
    assert "no GPU named on ubuntu-24.04" in out
    assert "were not asked" not in out


def test_bundles_are_counted_as_validate_counts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(BUNDLE.read_bytes())
    run(["plan", "--replay", str(BUNDLE), str(BUNDLE), str(other), "--format", "json"])
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    host = json.loads(BUNDLE.read_text(encoding="utf-8"))["host"]
    assert group["hosts"] == [host, f"{host} ({other})"]


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


H100_NODE = ["plan", "--platform", "hgx-h100-8", "--os", "ubuntu-24.04"]


def values(text: str) -> object:
    return yaml.safe_load(text)


def test_the_operator_leaves_driver_and_toolkit_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    row = load().kubernetes["gpu-operator"]
    assert run([*H100_NODE, "--driver", str(row.default_driver), "--format", "gpu-operator"]) == 0
    answer = capsys.readouterr()
    assert values(answer.out) == {"driver": {"enabled": False}, "toolkit": {"enabled": False}, "cdi": {"enabled": True}}
    assert f"--version v{row.version}" in answer.out
    assert "the component matrix lists" not in answer.out
    assert answer.err == ""


def test_another_release_of_a_listed_branch_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    listed = next(str(driver) for driver in load().kubernetes["gpu-operator"].drivers if str(driver).startswith("580."))
    assert run([*H100_NODE, "--driver", "580.95.05", "--format", "gpu-operator"]) == 0
    assert f"the component matrix lists {listed} of this branch" in capsys.readouterr().out


def test_a_branch_that_the_operator_does_not_list_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*H100_NODE, "--driver", "570", "--format", "gpu-operator"]) == 1
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
    assert "--format device-plugin" in answer.err


def test_the_device_plugin_alone_uses_cdi(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*H100_NODE, "--driver", "570", "--format", "device-plugin"]) == 0
    helm = values(capsys.readouterr().out)
    assert isinstance(helm, dict)
    assert helm["deviceListStrategy"] == "cdi-cri"
    assert helm["cdi"] == {"nvidiaHookPath": "/usr/bin/nvidia-cdi-hook"}


def test_without_a_stack_no_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--gpu", "V100", "--os", "ubuntu-22.04", "--cuda", "13.0", "--format", "gpu-operator"]
    assert run(arguments) == 1
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "no stack matches: " in answer.err


@pytest.mark.parametrize("more", [["--explain", "R04"], ["--diff", "a", "b"]])
def test_explanations_and_differences_are_no_values_file(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    node = H100_NODE if more[0] == "--explain" else ["plan"]
    assert run([*node, *more, "--format", "device-plugin"]) == 2
    answer = capsys.readouterr()
    assert (answer.out, len(answer.err.splitlines())) == ("", 1)
