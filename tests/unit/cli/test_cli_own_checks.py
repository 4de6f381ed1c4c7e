"""A site's own checks, as YAML and as a package: judged, tried by the contract, contained where they misbehave."""

import json
import re
import sys
import time
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import pcie_4

from gpunode.checks import declared, registry
from gpunode.checks.declared import steps
from gpunode.checks.own_process import LIMIT_S
from gpunode.cli import run
from gpunode.facts.node import FACTS
from gpunode.judging import own_checks

SCRATCH = """
checks:
  - id: site.memory
    category: host
    fact: memory.total_mib
    comparison: at_least
    value: 1024
    message: "{measured} MiB of memory, {expected} are required"
    means: The node has the memory that jobs of this site ask for.
    remedy: Add memory, or take the node out of the partition.
    state: drain
    actions: [replace_hardware]
    unit: MiB
  - id: site.root-type
    category: host
    fact: file_systems[].type
    comparison: none_of
    value: [btrfs, zfs]
    component: "{mount}"
    message: "{component} is {measured}"
    status: warn
    means: No local file system is of a type that this site does not support.
    remedy: Install the node again.
    state: observe
    actions: [fix_configuration]
tests:
  - check: site.memory
    fixture: node.json
    mutants:
      - {set: {memory.total_mib: 512}, becomes: fail}
  - check: site.root-type
    fixture: node.json
    mutants:
      - {set: {"file_systems[0].type": zfs}, becomes: warn}
"""
PACKAGE = """
from gpunode.checks import CheckResult, Status, Threshold, registry

LEAST = Threshold("site.cores.least", 2, "cores", "Fewer are a failure.", source="our contract")
TEXTS = {"means": "It means.", "remedy": "Mend it.", "state": "drain", "actions": ("replace_hardware",)}


@registry.check("site.cores", category="host", needs=("cpu",), thresholds=(LEAST,), **TEXTS)
def cores(node, expect):
    print("noise")
    status = Status.PASS if node.cpu.cpus >= LEAST.value else Status.FAIL
    yield CheckResult(status, f"{node.cpu.cpus} cores", expected=LEAST.value, measured=node.cpu.cpus)


@registry.check("site.raises", category="host", **TEXTS)
def raises(node, expect):
    raise RuntimeError("so it is")
    yield


@registry.check("site.loops", category="host", **TEXTS)
def loops(node, expect):
    while True:
        pass
    yield


@registry.check("site.leaves", category="host", **TEXTS)
def leaves(node, expect):
    import os
    os._exit(0)
    yield


@registry.check("site.greedy", category="host", **TEXTS)
def greedy(node, expect):
    yield CheckResult(Status.PASS, "x" * (1 << 32))
"""


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore the registry, which has own checks for the whole process."""
    kept = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(registry).items()}
    files = dict(own_checks._files)
    yield
    vars(registry).update(kept)
    own_checks._files.clear()
    own_checks._files.update(files)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "node.json").write_text(json.dumps(pcie_4()))
    (tmp_path / "checks.yml").write_text(SCRATCH)
    (tmp_path / "site.yml").write_text("own_checks: [checks.yml]\n")
    return tmp_path


def packages(monkeypatch: pytest.MonkeyPatch, folder: Path, **modules: str) -> None:
    """Install modules as packages that name themselves under the entry point."""
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
    points = [EntryPoint(name, name, declared.GROUP) for name in modules]
    monkeypatch.setattr(declared, "entry_points", lambda **_: points)


def judged(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, list[Any]]]:
    capsys.readouterr()
    code = run(["validate", "--replay", *map(str, words), "--level", "quick", "--format", "json"])
    out = capsys.readouterr()
    (node,) = json.loads(out.out)["nodes"]
    by_check: dict[str, list[Any]] = {}
    for finding in node["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return code, by_check


def test_checks_written_as_data_are_judged_and_limits_of_theirs_can_be_set(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, by_check = judged(capsys, folder / "node.json", "--policy", folder / "site.yml")
    assert [finding["status"] for finding in by_check["site.memory"]] == ["pass"]
    assert {finding["component"] for finding in by_check["site.root-type"]} > {"/"}
    (folder / "site.yml").write_text("own_checks: [checks.yml]\nthresholds: {site.memory.value: 99999999}\n")
    code, by_check = judged(capsys, folder / "node.json", "--policy", folder / "site.yml")
    (finding,) = by_check["site.memory"]
    assert (code, finding["status"], finding["recommended_state"]) == (1, "fail", "drain")
    assert finding["actions"] == [{"action": "replace_hardware", "target": None, "component": "node"}]
    assert "99999999 are required" in finding["message"]
    assert "policy site.yml" in finding["source"]


def test_other_nodes_are_not_judged_by_the_own_checks_of_a_policy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged(capsys, folder / "node.json", "--policy", folder / "site.yml")
    _, by_check = judged(capsys, folder / "node.json")
    assert not [check for check in by_check if check.startswith("site.")]


def test_the_contract_holds_for_both_forms(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(monkeypatch, folder, site_package=PACKAGE)
    test = "  - {check: site.cores, fixture: node.json, mutants: [{set: {cpu.cpus: 1}, becomes: fail}]}\n"
    (folder / "checks.yml").write_text(SCRATCH + test)
    assert run(["checks", "test", "-v", str(folder / "checks.yml")]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "9 cases, 0 failed"
    for words in ("site.memory: reports an error without memory", "site.cores: finds cpu.cpus=1", "site.cores: passes"):
        assert f"ok    {words}" in out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("value: 1024", "value: 99999999", "site.memory: passes node.json: it is fail: "),
        ("total_mib: 512", "total_mib: 2048", "site.memory: finds memory.total_mib=2048: it is pass, fail expected"),
        ("becomes: warn", "becomes: fail", "it is warn, fail expected"),
        (
            "  - check: site.root-type\n",
            "  - check: site.memory\n",
            "site.root-type: is tested: the file contains no test",
        ),
        ("memory.total_mib: 512", "memory.total_mib: 512, 'file_systems[].type': zfs", "other site checks change too"),
        ("memory.total_mib: 512", "memory.totl_mib: 512", "did you mean total_mib"),
        ("memory.total_mib: 512", "memory.total_mib: many", "cannot be changed in this way"),
    ],
)
def test_the_contract_finds_what_does_not_hold(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    path = folder / "checks.yml"
    assert old in SCRATCH
    path.write_text(SCRATCH.replace(old, new, 1))
    assert run(["checks", "test", str(path)]) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory.total_mib\n", "memory.totl_mib\n", "did you mean total_mib"),
        ("memory.total_mib\n", "memry.total_mib\n", "did you mean memory"),
        ("memory.total_mib\n", "memory.total_mib.x\n", "int has no fields"),
        ("file_systems[].type", "file_systems.type", "write file_systems[]"),
        ("memory.total_mib\n", "memory[].total_mib\n", "memory is not a list"),
        ("value: 1024", "value: lots", "needs a number"),
        ("value: [btrfs, zfs]", "value: btrfs", "needs a list"),
        ("comparison: at_least", "comparison: atleast", "comparison"),
        ("comparison: at_least\n    value: 1024", "comparison: matches\n    value: '('", "not a regular expression"),
        ("[replace_hardware]", "[reboot]", "unknown action reboot"),
        ("id: site.memory", "id: gpu.count", "gpu.count is registered twice"),
        ("id: site.memory", "id: Site", "id"),
        ("state: drain", "state: remove", "state"),
        ("    unit: MiB", "    unti: MiB", "unti"),
        ("tests:", "test:", "did you mean tests"),
        ("check: site.memory", "check: gpu.count", "unknown own check gpu.count"),
        ("fixture: node.json", "fixture: nowhere.json", "nowhere.json"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    path = folder / "checks.yml"
    assert old in SCRATCH
    path.write_text(SCRATCH.replace(old, new, 1))
    assert run(["checks", "test", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert words in err
    assert "site.root-type" not in registry or "tests" in err or "fixture" in old


def test_an_own_check_that_misbehaves_is_an_error_and_costs_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = judged(capsys, folder / "node.json")
    packages(monkeypatch, folder, site_package=PACKAGE, broken="print('noise')\nraise ValueError('no licence')\n")
    started = time.monotonic()
    code, by_check = judged(capsys, folder / "node.json")
    assert time.monotonic() - started < LIMIT_S + 20
    assert code == 3
    assert {
        check: findings for check, findings in by_check.items() if not check.startswith(("site.", "own."))
    } == before
    errors = {check: by_check[check][0]["message"] for check in by_check if by_check[check][0]["status"] == "error"}
    assert sorted(errors) == ["own.broken", "site.greedy", "site.leaves", "site.loops", "site.raises"]
    assert "ValueError: no licence" in errors["own.broken"]
    assert "RuntimeError: so it is" in errors["site.raises"]
    assert f"more than {LIMIT_S} s" in errors["site.loops"]
    assert "without an answer" in errors["site.leaves"]
    assert "MemoryError" in errors["site.greedy"]
    assert by_check["site.cores"][0]["status"] == "pass"


def test_a_package_that_does_not_come_to_its_end_or_has_no_check_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declared, "LOAD_S", 0.2)
    packages(monkeypatch, folder, slow="while True: pass\n", empty="x = 1\n", leaves="raise SystemExit(0)\n")
    _, by_check = judged(capsys, folder / "node.json")
    assert "took more than" in by_check["own.slow"][0]["message"]
    assert "empty registers no check" in by_check["own.empty"][0]["message"]
    assert "SystemExit" in by_check["own.leaves"][0]["message"]


def test_own_checks_are_listed_with_where_they_come_from(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packages(monkeypatch, folder, site_package=PACKAGE)
    assert run(["checks", "--format", "json", "--policy", str(folder / "site.yml")]) == 0
    origins = {check["id"]: check["origin"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert (origins["site.cores"], origins["site.memory"]) == ("package site_package", "file checks.yml")
    assert origins["gpu.count"] is None


def test_every_listed_fact_is_a_path_of_own_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checks", "facts"]) == 0
    listed = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert {re.split(r"[.\[]", path)[0] for path in listed} == set(FACTS)
    assert len(listed) == len(set(listed))
    for path in listed:
        assert steps(path)[0].name in FACTS


def test_one_fact_is_listed_with_its_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checks", "facts", "memory", "remote_mounts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"memory.total_mib  whole number", "remote_mounts[].options[]  text"} <= set(lines)
    assert run(["checks", "facts", "memroy"]) == 2
    assert "did you mean memory?" in capsys.readouterr().err
