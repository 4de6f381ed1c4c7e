"""``gpunode validate --on-node``: what a scheduler's prolog calls; within its budget, whatever the node does."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "contract"))

from bundles import hgx
from jsonschema import Draft202012Validator

from gpunode.checks import Finding, Identity, RunningStack, State, Status, registry
from gpunode.cli import on_node, run
from gpunode.cli.reference import schema_of
from gpunode.facts import facts_from_bundle
from gpunode.judging.local import LocalJudging, within_budget
from gpunode.judging.report import NodeReport, judged
from gpunode.onnode.probe import Probe
from gpunode.probe.bundle import Bundle
from gpunode.report.formats import slurm_line

SMI_CUT = "nvidia-smi -q -x: no answer within 1.2 s, which was left of the time for the whole probe"


@pytest.fixture(autouse=True)
def _just_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests is older than any budget."""
    monkeypatch.setattr(on_node, "since_start", lambda: 0.1)


def node(*findings: Finding) -> NodeReport:
    return judged("n", Identity(simulated=False, stack=RunningStack(), gpus=()), findings, 1.0)


def about(check: str, status: str, message: str = "so", component: str = "node", state: str = "none") -> Finding:
    return Finding(
        check=check, status=Status(status), component=component, message=message, recommended_state=State(state)
    )


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        ((about("a.b", "pass"), about("a.c", "skip")), "none: 1 passed, 1 skipped"),
        ((about("a.b", "pass"), about("a.c", "skip", "not run: x")), "none: 1 passed, 1 skipped, 1 not run"),
        ((about("a.c", "skip", "not run: x"),), "unknown: 0 passed, 1 skipped, 1 not run"),
        ((about("host.time", "warn", "2 s off", state="observe"),), "observe: host.time: 2 s off"),
        ((about("host.environment", "warn", "LD_PRELOAD"),), "none: host.environment: LD_PRELOAD"),
        (
            (
                about("driver.held", "fail", "3 not held", state="observe"),
                about("gpu.xid", "fail", 'Xid 79 "so"\nand', "gpu3", "drain"),
                about("host.time", "error", "not known"),
            ),
            "drain: gpu.xid gpu3: Xid 79 'so' and (and 2 more)",
        ),
        (
            (about("host.time", "warn", "2 s off", state="observe"), about("gpu.xid", "error", "no log")),
            "unknown: gpu.xid: no log",
        ),
    ],
)
def test_slurm_gets_one_line(findings: tuple[Finding, ...], line: str) -> None:
    assert slurm_line(node(*findings)) == line


def test_a_long_reason_is_cut_and_still_counts_the_others() -> None:
    line = slurm_line(node(about("gpu.xid", "fail", "x" * 900, state="drain"), about("gpu.mig", "fail", state="drain")))
    assert len(line) < 220
    assert line.endswith("(and 1 more)")


def test_what_the_budget_cut_off_was_not_run_but_nvidia_smi_itself_is_not_known() -> None:
    cut = within_budget(about("nvlink.state", "error", SMI_CUT), smi_cut=False)
    assert (cut.status, cut.message.startswith("not run: ")) == (Status.SKIP, True)
    assert within_budget(about("driver.tools-answer", "error", SMI_CUT), smi_cut=False).status is Status.SKIP
    assert within_budget(about("driver.tools-answer", "error", SMI_CUT), smi_cut=True).status is Status.ERROR
    assert within_budget(about("host.time", "error", "timedatectl failed"), smi_cut=True).status is Status.ERROR
    assert within_budget(about("host.time", "fail", SMI_CUT), smi_cut=True).status is Status.FAIL


def verdict(bundle: dict[str, Any], seconds: float = 60) -> Any:
    judging = LocalJudging(None, None, (), ())
    return judging.report(json.dumps(bundle).encode(), until=time.monotonic() + seconds, seconds=1.0).nodes[0]


def test_a_saved_node_is_judged_as_it_is_elsewhere() -> None:
    report = verdict(hgx())
    facts = facts_from_bundle(Bundle.model_validate(hgx()))
    assert report.status is Status.PASS
    quick = {check.id for check in registry if check.level == "quick"}
    assert {finding.check for finding in report.findings} == quick
    assert facts.smi is not None


def test_checks_for_which_no_time_is_left_are_named() -> None:
    report = verdict(hgx(), seconds=-1)
    assert {finding.message for finding in report.findings} == {"not run: the time was used up"}
    assert slurm_line(report).startswith("unknown: 0 passed")


def fake_node(folder: Path, smi: str) -> Probe:
    """A root with a loaded driver, and a nvidia-smi that is this shell script."""
    version = folder / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n")
    tools = folder / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
    (tools / "nvidia-smi").chmod(0o755)
    return Probe(root=str(folder), path=f"{tools}:/usr/bin:/bin", budget_s=1.5)


def test_the_probe_keeps_its_budget_where_a_tool_is_slow(tmp_path: Path) -> None:
    probe = fake_node(tmp_path, "exec sleep 30")
    started = time.monotonic()
    bundle = probe.collect()
    assert time.monotonic() - started < 4
    commands = bundle["commands"]
    assert "left of the time for the whole probe" in commands["nvidia-smi-xml"]["stderr"]
    assert commands["nvidia-smi-topo"]["stderr"].startswith("not run:")
    smi = hgx()["commands"] | {key: commands[key] for key in commands if key.startswith("nvidia-smi")}
    report = verdict(hgx() | {"commands": smi})
    statuses = {finding.check: finding.status for finding in report.findings}
    assert statuses["driver.tools-answer"] is Status.ERROR
    assert {status for check, status in statuses.items() if check.startswith("nvlink.")} == {Status.SKIP}
    # Without nvidia-smi's answer no job should find out what is wrong.
    assert slurm_line(report).startswith("drain: driver.tools-answer: ")


def test_it_judges_this_machine_in_the_published_format(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["validate", "--on-node", "--budget", "60s", "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(schema_of("report"))).validate(document)
    (node,) = document["nodes"]
    assert node["host"] == os.uname().nodename
    assert code == {"pass": 0, "warn": 0, "fail": 1}.get(document["status"], 3)
    assert not [finding for finding in node["findings"] if finding["message"].startswith("not run")]


def test_the_report_goes_to_a_file_as_a_whole_or_not_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpunode.prom"
    words = ["validate", "--on-node", "--budget", "60s", "--format", "prometheus", "--select", "node.reachable"]
    assert run([*words, "--output", str(file)]) == 0
    assert capsys.readouterr() == ("", "")
    assert f'gpunode_node_status{{host="{os.uname().nodename}"}} 0\n' in file.read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["gpunode.prom"]
    assert run([*words, "--output", str(tmp_path / "none" / "gpunode.prom")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith("/none/gpunode.prom: cannot be written: No such file or directory\n")


def test_it_starts_the_probe_where_python_does_not_know_its_own_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prolog is started without PATH."""
    monkeypatch.setattr(sys, "executable", "")
    run(["validate", "--on-node", "--budget", "60s", "--format", "json", "--select", "node.reachable"])
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert [finding["status"] for finding in node["findings"]] == ["pass"]


def test_a_probe_that_hangs_costs_the_budget_and_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    mark = tmp_path / "pid"
    script.write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    monkeypatch.setattr(on_node, "SCRIPT", script)
    started = time.monotonic()
    code = run(["validate", "--on-node", "--budget", "2s", "--format", "slurm"])
    assert time.monotonic() - started < 2 + 4
    out = capsys.readouterr().out
    assert code == 3
    assert out.startswith("unknown: node.reachable: the probe did not end within the budget")
    assert out.count("\n") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["--budget", "soon"], '"soon" is not a duration (examples: 5, 5s, 2m)'),
        (["--budget", "0.1"], "0.1 is not in the range"),
        (["--format", "xml"], "xml"),
        (["--select", "gpu.cuont"], "did you mean gpu.count"),
        (["--policy", "/nowhere.yml"], "No such file"),
        (["--level", "deep"], "--level"),
        (["some-host"], "some-host"),
    ],
)
def test_wrong_usage_is_refused_with_one_line(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", "--on-node", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1, err
    assert output in err


def test_the_age_of_a_process_is_its_own() -> None:
    code = "import time; time.sleep(0.5); from gpunode.cli.on_node import since_start; print(since_start())"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - started + 0.1


def test_no_file_of_the_catalog_is_read_once_the_probe_has_ended() -> None:
    """They are read while it looks: afterwards every moment is one that the job waits."""
    code = (
        "import gpunode.judging.local as verdict, sys, time\n"
        "judging = verdict.LocalJudging(None, None, (), ())\n"
        "read = []\n"
        "sys.addaudithook(lambda event, what: read.append(str(what[0])) if event == 'open' else None)\n"
        "judging.report(sys.stdin.buffer.read(), until=time.monotonic() + 60, seconds=1.0)\n"
        "print([path for path in read if 'gpunode' in path])\n"
    )
    bundle = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, check=True, timeout=60, capture_output=True, input=bundle.read_bytes())
    assert done.stdout == b"[]\n"


def test_nothing_that_a_prolog_does_not_need_is_loaded() -> None:
    """Before the probe starts nothing heavy; for the verdict no SSH, no Docker, no Ansible, no rich."""
    code = (
        "import sys, gpunode.cli.root, gpunode.cli.on_node\n"
        "first = {'pydantic', 'yaml', 'rich', 'gpunode.checks'} & set(sys.modules)\n"
        "import gpunode.judging.local as verdict, gpunode.report.formats\n"
        "verdict.LocalJudging(None, None, (), ())\n"
        "then = {'fabric', 'docker', 'ansible', 'ClusterShell', 'rich', 'paramiko', 'jinja2'} & set(sys.modules)\n"
        "print(sorted(first), sorted(then))\n"
    )
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout == "[] []\n"
