"""The demo with commands that do what gpunode's do to a lab's folder: one that is interrupted or fails is repeated."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import demo
import pytest
import yaml
from programs import run_program

from gpunode.checks import registry

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEMO = """
import sys, time
sys.path.insert(0, {scripts!r})
import demo_steps
from pathlib import Path
root = Path({root!r})
demo_steps.ROOT, demo_steps.BIN, demo_steps.GPUNODE = root, root, str(root / "gpunode")
demo_steps.LOGS, demo_steps.FREE_GIB = root / "logs", 0
pause = time.sleep
time.sleep = lambda seconds: pause(seconds / 10)
import demo
demo_steps.run(demo.main, "demo-" + root.name)
"""
# Each command is recorded; the one that is named in the file `stop` waits for Ctrl-C or fails, and what it made stays.
COMMAND = """#!/bin/sh
cd {root} || exit 70
lab=$GPUNODE_LAB_HOME/demo
echo "$*" | sed "s|^|${{0##*/}} |" >> calls
reached() {{
  [ "$1" = "$(cat stop)" ] || return 0
  [ "$(cat how)" = fails ] && {{ echo "the reason"; exit 3; }}
  trap 'exit 130' INT
  sleep 60 & echo $! > waits
  wait
}}
case "${{0##*/}} $1 $2" in
  "docker-engine "*) reached docker-engine ;;
  "bootstrap lab"*) reached bootstrap ;;
  "bootstrap "*) until [ -e $lab ]; do sleep 0.02; done; reached rest ;;
  "gpunode lab up") mkdir -p $lab; reached up ;;
  "gpunode lab inventory") echo $lab/inventory.yml ;;
  "gpunode init "*) mkdir logs/site || exit 2; reached init ;;
  "gpunode lab down") rm -rf $lab ;;
  "gpunode lab fault") case "$*" in *--heal*) rm -f $lab/fault ;; *) touch $lab/fault; reached fault ;; esac ;;
  "gpunode provision "*) reached provision ;;
  "gpunode validate "*)
    if [ -e $lab/fault ]; then report=broken; else report=healthy; fi
    reached $report
    for word; do case "$word" in *.json|*.txt) cp $report.json "$word" ;; esac; done
    [ $report = healthy ] ;;
esac
"""
STEPS = ("docker-engine", "bootstrap", "rest", "up", "init", "provision", "healthy", "fault", "broken")
NODES = ("hgx-h100-8-1", "t4-1-1", "l40s-4-1")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the commands."""
    monkeypatch.setenv("GPUNODE_LAB_HOME", str(tmp_path / "labs"))
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/docker-engine", "scripts/bootstrap", "gpunode"):
        (tmp_path / name).write_text(COMMAND.format(root=tmp_path), encoding="ascii")
        (tmp_path / name).chmod(0o755)
    for report, wrong in (("healthy", set()), ("broken", {"l40s-4-1"})):
        nodes = [
            {
                "host": host,
                "findings": [
                    {"check": check, "status": "fail" if check == demo.FOUND_BY and host in wrong else "pass"}
                    for check in sorted(demo.PASS[host])
                ],
            }
            for host in NODES
        ]
        (tmp_path / f"{report}.json").write_text(json.dumps({"nodes": nodes}) + "\n", encoding="ascii")
    return tmp_path


def program(root: Path, stop: str = "", how: str = "") -> list[str]:
    (root / "stop").write_text(stop, encoding="ascii")
    (root / "how").write_text(how, encoding="ascii")
    (root / "calls").write_text("", encoding="ascii")
    text = DEMO.format(scripts=str(SCRIPTS), root=str(root))
    return ["env", "--default-signal=INT", sys.executable, "-c", text]


def removed(root: Path) -> bool:
    return "gpunode lab down --name demo\n" in (root / "calls").read_text(encoding="ascii")


def test_the_demo_holds_nodes_to_checks_that_exist() -> None:
    assert set[str]().union(*demo.PASS.values()) <= {check.id for check in registry}
    assert demo.FOUND_BY in demo.PASS[demo.BROKEN]


def test_what_the_demo_leaves_out_is_a_setting_of_the_example_and_of_a_role() -> None:
    values = [values for node in demo.NOT_IN_FORCE.values() for values in node.items()]
    example = yaml.safe_load(
        (SCRIPTS.parent / "inventory/examples/inference/group_vars/gpu_nodes.yml").read_text("utf-8")
    )
    assert {name for name, _ in values} - {"dcgm_state"} <= example.keys()
    # The role's default is present.
    assert all(example.get(name, "present") != value for name, value in values)
    left = {name: example[name] for name in example.keys() - demo.NOT_IN_FORCE[demo.HARDENED].keys()}
    assert {"ssh_hardening_state", "updates_state", "gpu_settings_rules"} <= left.keys()


@pytest.mark.parametrize("status", ["skip", "error", "fail", None])
def test_a_check_that_did_not_pass_is_named(status: str | None) -> None:
    nodes = {host: dict.fromkeys(checks, "pass") for host, checks in demo.PASS.items()}
    if status is None:
        del nodes["hgx-h100-8-1"]["fabric.state"]
    else:
        nodes["hgx-h100-8-1"]["fabric.state"] = status
    findings = {host: [{"check": key, "status": seen} for key, seen in node.items()] for host, node in nodes.items()}
    report = {"nodes": [{"host": host, "findings": rows} for host, rows in findings.items()]}
    wrong = demo.surprises(report, 0, broken=False)
    assert wrong[-1] == "hgx-h100-8-1: fabric.state did not pass"
    assert len(wrong) == (2 if status in ("error", "fail") else 1)


def test_a_finished_demo_has_seven_steps_and_is_repeated_on_its_nodes(root: Path) -> None:
    for _ in range(2):
        done = run_program(program(root), limit_s=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert [line[:5] for line in done.stdout.splitlines() if line.startswith("[")] == [
            f"[{n}/7]" for n in range(1, 8)
        ]
        assert {path.stem for path in (root / "logs/site/host_vars").iterdir()} == set(NODES)
        assert not removed(root)


@pytest.mark.parametrize("step", STEPS)
def test_a_demo_that_failed_is_repeated_without_a_manual_clean_up(root: Path, step: str) -> None:
    if step != "up":
        assert run_program(program(root), limit_s=60).returncode == 0
    done = run_program(program(root, step, "fails"), limit_s=60)
    if step in ("healthy", "broken"):
        assert done.returncode == 3
        assert "no report was written (exit 3" in done.stderr
    else:
        assert done.returncode == 3
        assert "  | the reason\n" in done.stdout
        assert "exit 3; all of its output is in logs/" in done.stderr
    assert done.stderr.count("\n") == 1
    again = run_program(program(root), limit_s=60)
    assert (again.returncode, again.stderr) == (0, "")
    # Before the lab is touched, a finished demo's nodes are as it left them.
    assert removed(root) == (step not in ("docker-engine", "bootstrap", "rest"))


@pytest.mark.parametrize("step", STEPS)
def test_after_ctrl_c_in_a_step_nothing_runs_and_the_next_demo_ends_well(root: Path, step: str) -> None:
    waits = root / "waits"
    argv = program(root, step, "waits")
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        end = time.monotonic() + 60
        while not waits.exists() or not waits.read_text(encoding="ascii"):
            assert time.monotonic() < end, process.poll()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[-1].endswith("interrupted; the next one begins with new nodes")
    assert "Traceback" not in error
    child = Path("/proc") / waits.read_text(encoding="ascii").strip() / "stat"
    while child.exists() and child.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.02)
    again = run_program(program(root), limit_s=60)
    assert (again.returncode, again.stderr) == (0, "")
    assert removed(root) == (step not in ("docker-engine", "bootstrap"))
