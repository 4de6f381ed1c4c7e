"""The bench: conditions as data (conditions.yml), each with all that validate must find, and generated pairs of two.

``GPUNODE_BENCH=all`` runs every pair; without it a fixed choice of them, a smaller one without GPUNODE_TEST_ALL=1.
The summary shows with ``pytest -s``.
"""

import json
import os
import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_machines import MACHINES, document
from bundles import PLACEHOLDER, copied, facts_of
from effort import effort

from gpunode.checks import Expectation, Finding, Status, identify, judge
from gpunode.facts import facts_from_bundle
from gpunode.judging.report import NodeReport, report, worst
from gpunode.judging.report import judged as report_of
from gpunode.probe.bundle import Bundle
from gpunode.report import console
from gpunode.report.fleet import compared

CONDITIONS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "conditions.yml").read_text(encoding="utf-8")
)
CASES = [(name, machine) for name, condition in CONDITIONS.items() for machine in condition["machines"]]
LEAST = 150
Document = dict[str, Any]
BAD = (Status.WARN, Status.FAIL, Status.ERROR)
SMI = "nvidia-smi-xml"
PRODUCT = "simulated sys_vendor simulated product_name"
PAIRS = effort(60, 150)


def pairs() -> list[tuple[str, str, str]]:
    """Two conditions of one machine that do not hide each other and are not found by the same check."""
    rows = [
        (machine, first, other)
        for machine in MACHINES
        for first, other in combinations([name for name, where in CASES if where == machine], 2)
        if not any({"hides", "beside"} & CONDITIONS[name].keys() for name in (first, other))
        and not checks(first) & checks(other)
        and not exit_statuses(first) & exit_statuses(other)
    ]
    if os.environ.get("GPUNODE_BENCH") == "all":
        return rows
    return random.Random(0).sample(rows, min(PAIRS, len(rows)))  # noqa: S311


def checks(name: str) -> set[str]:
    return {finding.split()[0] for finding in CONDITIONS[name]["finds"]}


def exit_statuses(name: str) -> set[str]:
    """The commands for which a condition sets the exit status: a command has one."""
    return {edit["command"] for edit in CONDITIONS[name]["edits"] if "rc" in edit}


def judged(bundle: Document) -> list[Finding]:
    return judge(facts_of(json.dumps(bundle)), Expectation(), level="quick")


def reported(host: str, bundle: Document, only: set[str] | None = None) -> NodeReport:
    """A node of a run, as its report has it."""
    facts = facts_of(json.dumps(bundle))
    return report_of(host, identify(facts), judge(facts, Expectation(), only=only, level="quick"), 1.0)


@cache
def healthy(machine: str) -> list[Finding]:
    """The findings of a machine in good health. Not to be changed."""
    return judged(document(machine))


def of(findings: list[Finding]) -> set[str]:
    """Findings that are not good, as conditions.yml names them."""
    return {
        f"{finding.check} {finding.status.value}" + ("" if finding.component == "node" else f" {finding.component}")
        for finding in findings
        if finding.status in BAD
    }


def by_check(findings: list[Finding]) -> Mapping[str, Status]:
    by_id: dict[str, list[Status]] = {}
    for finding in findings:
        by_id.setdefault(finding.check, []).append(finding.status)
    return {check: worst(statuses) for check, statuses in by_id.items()}


def with_slots(text: str, machine: str) -> str:
    for number, slot in enumerate(MACHINES[machine].slots):
        text = text.replace(f"{{slot{number}}}", slot).replace(f"{{SLOT{number}}}", slot.upper())
    for number, nic in enumerate(MACHINES[machine].hardware["nics"]):
        text = text.replace(f"{{nic{number}}}", nic["pci_bus_id"])
    return text


def edited(bundle: Document, machine: str, name: str, edits: str = "edits") -> Document:
    bundle = copied(bundle)
    for edit in CONDITIONS[name][edits]:
        before = copied(bundle)
        apply(bundle, machine, edit)
        assert bundle != before, f"{name} on {machine}: the edit {edit} changes nothing"
    return bundle


def apply(bundle: Document, machine: str, edit: dict[str, Any]) -> None:
    if "gpu" in edit:
        command = bundle["commands"][SMI]
        command["stdout"] = with_tags(command["stdout"], edit["gpu"], edit["tags"])
    elif "gone" in edit:
        without_gpu(bundle, machine, edit["gone"])
    elif "file" in edit:
        path, text = with_slots(edit["file"], machine), edit.get("text")
        if "replace" in edit:
            text = re.sub(edit["replace"], edit["with"], bundle["files"][path], count=1)
        bundle["files"][path] = None if text is None else with_slots(text, machine)
    else:
        fresh = {"argv": [edit["command"]], "rc": 0, "stdout": "", "stderr": "", "seconds": 0.1}
        fresh |= {"timed_out": False, "truncated": False}
        change(bundle["commands"].setdefault(edit["command"], fresh), machine, edit)


def change(command: dict[str, Any], machine: str, edit: dict[str, Any]) -> None:
    command["rc"] = edit.get("rc", command["rc"])
    for stream in ("stdout", "stderr"):
        if stream in edit:
            command[stream] = with_slots(edit[stream], machine)
    command["stdout"] += with_slots(edit.get("append", ""), machine)
    if "replace" in edit:
        command["stdout"] = re.sub(edit["replace"], edit["with"], command["stdout"], count=1)
    if edit.get("hangs") or edit.get("slow"):
        limit = "6.0 s, which was left of the time for the whole probe" if edit.get("slow") else "30 s"
        command |= {"rc": 124, "timed_out": True, "stdout": "", "stderr": f"killed: no answer within {limit}"}


def with_tags(xml: str, number: int, tags: Mapping[str, str]) -> str:
    parts = re.split(r"(?=\t<gpu id=)", xml)
    gpu = parts[number + 1]
    for path, value in tags.items():
        parent, _, tag = path.rpartition("/")
        inside = f"(?s)(?<=<{parent}>)(.*?)" if parent else "()"
        gpu, times = re.subn(rf"{inside}<{tag}>[^<]*</{tag}>", rf"\1<{tag}>{value}</{tag}>", gpu)
        assert times, f"GPU {number} has no <{tag}>"
    parts[number + 1] = gpu
    return "".join(parts)


def without_gpu(bundle: Document, machine: str, number: int) -> None:
    """The GPU fell off the bus before the driver was loaded: no tool and no file has it."""
    slot, count = MACHINES[machine].slots[number], len(MACHINES[machine].slots)
    files, commands = bundle["files"], bundle["commands"]
    for folder in ("/sys/bus/pci/devices/", "/proc/driver/nvidia/gpus/"):
        files[folder] = files[folder].replace(f"{slot}\n", "")
    parts = re.split(r"(?=\t<gpu id=)", commands[SMI]["stdout"])
    end = "" if number + 1 < len(parts) - 1 else "</nvidia_smi_log>\n"
    left = "".join((*parts[: number + 1], *parts[number + 2 :])) + end
    left = left.replace(f"<attached_gpus>{count}<", f"<attached_gpus>{count - 1}<")
    commands[SMI]["stdout"] = left
    for key in ("nvidia-smi-nvlink", "nvidia-smi-nvlink-errors"):
        blocks = re.split(r"(?m)(?=^GPU \d+:)", commands[key]["stdout"])
        del blocks[number + 1]
        commands[key]["stdout"] = "".join(
            re.sub(r"^GPU \d+:", f"GPU {index}:", block) for index, block in enumerate(blocks[1:])
        )
    for key in ("nvidia-smi-topo", "nvidia-smi-p2p"):
        commands[key]["stdout"] = smaller(commands[key]["stdout"], count)


def smaller(matrix: str, count: int) -> str:
    """The matrix of a node with one GPU less: all pairs are alike."""
    lines = [line for line in matrix.split("\n") if not re.match(rf"\s*GPU{count - 1}\t", line)]
    lines[0] = lines[0].replace(f"\tGPU{count - 1}", "", 1)
    return "\n".join(
        re.sub(rf"((?:\t[^\t]*){{{count - 1}}})\t[^\t]*", r"\1", line, count=1)
        if line.lstrip().startswith("GPU") and index
        else line
        for index, line in enumerate(lines)
    )


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    yield
    print(f"\nbench: {len(CASES)} conditions ({len(CONDITIONS)} kinds, {len(MACHINES)} machines), {len(pairs())} pairs")


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_in_good_health_has_no_fault(machine: str) -> None:
    assert [finding for finding in healthy(machine) if finding.status in (Status.FAIL, Status.ERROR)] == []


@pytest.mark.parametrize(("name", "machine"), CASES)
def test_a_condition_is_found_and_nothing_else(name: str, machine: str) -> None:
    before = healthy(machine)
    after = judged(edited(document(machine), machine, name))
    if "beside" in CONDITIONS[name]:
        others = [reported(f"n{number}", edited(document(machine), machine, name, "beside")) for number in range(3)]
        after = list(compared([reported("n3", edited(document(machine), machine, name)), *others])[0].findings)
    expected = {with_slots(finding, machine) for finding in CONDITIONS[name]["finds"]}
    assert of(after) - of(before) == expected
    good = [check for check, status in by_check(after).items() if status is Status.PASS]
    was = by_check(before)
    assert [check for check in good if was[check] is not Status.PASS] == []
    assert all(finding.remedy for finding in after if finding.status is Status.FAIL)
    assert [finding for finding in after if PLACEHOLDER.search(f"{finding.message} {finding.remedy}")] == []


@pytest.mark.parametrize(("machine", "first", "other"), pairs())
def test_of_two_faults_both_are_named(machine: str, first: str, other: str) -> None:
    both = edited(edited(document(machine), machine, first), machine, other)
    expected = {with_slots(finding, machine) for name in (first, other) for finding in CONDITIONS[name]["finds"]}
    assert expected <= of(judged(both))


def test_the_bench_covers_enough() -> None:
    assert len(CASES) >= LEAST
    assert {machine for _, machine in CASES} == set(MACHINES)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("dead-driver", "driver.tools-answer"),
        ("lost-gpu-alone", "gpu.answers"),
        ("hang", "driver.tools-answer"),
        ("library-mismatch", "driver.library-matches-module"),
        ("inforom-message", "gpu.messages"),
    ],
)
def test_the_console_is_short_and_begins_with_the_cause(name: str, cause: str) -> None:
    bundle = Bundle.from_json(json.dumps(edited(document("l40s"), "l40s", name)), "the bench's")
    node = facts_from_bundle(bundle)
    node_report = report_of("n1", identify(node), judge(node, Expectation(), level="quick"), 1.0)
    whole = report([node_report], level="quick", version="0", started_at="", finished_at="")
    text = console.as_text(whole).splitlines()
    findings = [line.split()[1] for line in text if line.startswith(("FAIL", "ERROR", "WARN"))]
    print("\n".join(text))
    assert len(text) <= 6
    assert findings == [cause]
    assert any(line.strip().startswith("fix ") for line in text)


def test_of_four_nodes_alike_the_one_with_a_card_less_fails() -> None:
    """Three of four cards alone only warn: the number is odd. Beside whole nodes of the kind they are too few."""

    less = reported("n4", edited(document("l40s"), "l40s", "three-of-four-cards"), {"gpu.present"})
    alike = compared([*(reported(f"n{number}", document("l40s"), {"gpu.present"}) for number in range(1, 4)), less])
    assert less.hardware is not None
    assert (less.hardware.product, less.hardware.gpu_model, less.hardware.nvlink_domain) == (PRODUCT, "l40s", None)
    assert [less.status.value, *(node.status.value for node in alike)] == ["warn", "pass", "pass", "pass", "fail"]
