"""``gpunode provision``: what it hands to ansible-playbook, what it refuses before, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpunode.cli import run
from gpunode.fleet.playbook import exit_code_of
from gpunode.fleet.playbook import run as run_program
from gpunode.report.outcomes import ProvisionedNode, ProvisionOutcome, TaskOutcome

SITE = """
- name: Site
  hosts: all
  gather_facts: false
  tasks:
    - name: Print what was asked for
      ansible.builtin.debug:
        msg: "source is {{ nvidia_driver_source | default('unset') }}, check mode {{ ansible_check_mode }}"
      tags: [print]
    - name: Change something
      ansible.builtin.file:
        path: "{{ playbook_dir }}/{{ inventory_hostname }}"
        state: touch
        mode: "0644"
    - name: Fail where asked
      ansible.builtin.fail:
        msg: asked to
      when: fail_here | default(false) | bool
      tags: [fail]
"""
TASKS = """
- name: A block
  tags: nvidia_driver_install
  block:
    - name: Inside
      ansible.builtin.debug:
        msg: !unsafe "{{ x }}"
      tags: ["inner"]
"""
SPECS = """
argument_specs:
  main:
    options:
      nvidia_driver_source: {type: str, choices: [auto, nvidia, debian]}
      nvidia_driver_persistence: {type: bool}
      nvidia_driver_lock_wait_s: {type: int}
      nvidia_driver_version: {type: str}
      nvidia_driver_module_options: {type: dict}
      gpunode_roles: {type: list, elements: str, choices: [updates, nvidia_driver]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A collection with one role and a small site playbook in place of ours, and an inventory of this machine."""
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_INVENTORY"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "root"
    (root / "playbooks").mkdir(parents=True)
    (root / "playbooks" / "site.yml").write_text(SITE)
    (root / "roles" / "nvidia_driver" / "meta").mkdir(parents=True)
    (root / "roles" / "nvidia_driver" / "meta" / "argument_specs.yml").write_text(SPECS)
    (root / "roles" / "nvidia_driver" / "tasks").mkdir()
    (root / "roles" / "nvidia_driver" / "tasks" / "install.yml").write_text(TASKS)
    monkeypatch.setattr("gpunode.cli.provision.collection_root", lambda: root)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yml").write_text(
        f"all:\n  vars: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}}}\n"
        "  hosts:\n    gpu1: {}\n    gpu2: {fail_here: true}\n"
    )
    return tmp_path


Out = pytest.CaptureFixture[str]


def provision(*words: str) -> int:
    """The verb on the inventory of the test."""
    return run(["provision", "-i", "hosts.yml", *words])


def test_a_good_run_passes_options_and_output_through(folder: Path, capfd: Out) -> None:
    code = provision(
        "--limit", "gpu1", "--check", "--diff", "-v", "-e", "nvidia_driver_source=debian", "--tags", "print", "-f", "1"
    )
    out = capfd.readouterr().out
    assert "source is debian, check mode True" in out
    assert "Fail where asked" not in out
    assert code == 0


def test_with_check_alone_what_would_change_is_shown(folder: Path, capfd: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["provision", "-i", "hosts.yml", "-l", "gpu1", "--check"]
    shown = {}
    for more in ((), ("-v",)):
        assert run([*words, *more]) == 0
        shown[more] = capfd.readouterr().out
    assert "Change something" in shown[()]
    assert "Print what was asked for" not in shown[()]
    assert "Print what was asked for" in shown["-v",]
    monkeypatch.setenv("ANSIBLE_DISPLAY_OK_HOSTS", "yes")
    assert run(words) == 0
    assert "Print what was asked for" in capfd.readouterr().out


def test_tags_of_included_files_are_known(folder: Path) -> None:
    assert provision("--limit", "gpu1", "--tags", "inner,nvidia_driver_install", "--skip-tags", "always") == 0


def test_a_task_that_fails_is_exit_code_1_and_one_line(folder: Path, capfd: Out) -> None:
    hosts = folder / "hosts.yml"
    hosts.write_text(hosts.read_text().replace("gpu1: {}", "gpu1: {fail_here: true}\n    gpu3: {}"))
    assert provision() == 1
    requested, *failures, closing = capfd.readouterr().err.splitlines()
    assert requested.startswith("gpunode: stack of gpu[1-3]: no request")
    assert re.fullmatch(r"3 nodes: 1 \w+, 2 failed \(\d+ s\)", closing)
    assert failures == ["gpunode: failed on gpu[1-2]: Fail where asked: asked to"]


def test_roles_are_printed_as_they_begin_and_a_rescued_failure_is_none(folder: Path, capfd: Out) -> None:
    role = folder / "root" / "playbooks" / "roles" / "nvidia_driver" / "tasks"
    role.mkdir(parents=True)
    (role / "main.yml").write_text("- name: Print it\n  ansible.builtin.debug:\n    msg: here\n  changed_when: true\n")
    site = folder / "root" / "playbooks" / "site.yml"
    site.write_text(
        "- hosts: all\n  gather_facts: false\n  roles: [nvidia_driver]\n  tasks:\n    - block:\n"
        "        - ansible.builtin.fail: {msg: rescued}\n      rescue:\n        - ansible.builtin.debug:\n"
    )
    assert provision() == 0
    lines = capfd.readouterr().err.splitlines()[1:-1]  # after what requests the stack, before the closing sentence
    assert [line.partition(" (")[0] for line in lines] == ["gpunode: role nvidia_driver"]
    assert provision("--check", "--format", "json") == 0
    outcome = ProvisionOutcome.model_validate_json(capfd.readouterr().out)
    assert outcome.check
    assert [node.failure for node in outcome.nodes] == [None, None]
    assert [node.changed for node in outcome.nodes] == [(TaskOutcome(role="nvidia_driver", task="Print it"),)] * 2


def test_json_has_what_was_changed_and_why_nodes_failed(folder: Path, capfd: Out) -> None:
    hosts = folder / "hosts.yml"
    hosts.write_text(
        hosts.read_text() + "    gpu3: {ansible_connection: ssh, ansible_host: 127.0.0.1, ansible_port: 1}\n"
    )
    assert provision("--format", "json") == 3
    out, err = capfd.readouterr()
    outcome = ProvisionOutcome.model_validate_json(out)
    assert (outcome.exit_code, outcome.check) == (3, False)
    good, failed, lost = outcome.nodes
    changed = TaskOutcome(role=None, task="Change something")
    assert good == ProvisionedNode(host="gpu1", status="changed", changed=(changed,))
    assert (failed.host, failed.status, failed.changed) == ("gpu2", "failed", (changed,))
    assert failed.failure == TaskOutcome(role=None, task="Fail where asked", message="asked to")
    assert (lost.host, lost.status, lost.changed) == ("gpu3", "unreachable", ())
    assert "PLAY RECAP" in err


def test_json_of_a_playbook_that_does_not_start_has_no_nodes(folder: Path, capfd: Out) -> None:
    (folder / "root" / "playbooks" / "site.yml").write_text("- hosts: all\n  no_such_keyword: 1\n")
    assert provision("--format", "json") != 0
    outcome = ProvisionOutcome.model_validate_json(capfd.readouterr().out)
    assert outcome.nodes == ()
    assert outcome.exit_code != 0


def test_an_unreachable_node_is_exit_code_3(folder: Path) -> None:
    (folder / "hosts.yml").write_text(
        "all:\n  hosts:\n    gpu1: {ansible_host: 127.0.0.1, ansible_port: 1, ansible_ssh_args: -F none}\n"
    )
    site = folder / "root" / "playbooks" / "site.yml"
    site.write_text("- hosts: all\n  gather_facts: false\n  tasks:\n    - ansible.builtin.ping:\n")
    assert provision() == 3


@pytest.mark.parametrize(
    ("words", "expected_text"),
    [
        (["--limit", "gpu9"], "--limit gpu9: inventory hosts.yml has no host or group gpu9; did you mean gpu"),
        (["--tags", "pritn"], "no task has the tag pritn; did you mean print?"),
        (["--skip-tags", "print,zzzz"], "no task has the tag zzzz; known: fail, inner, nvidia_driver_install, print"),
        (["-e", "nvidia_driver_sorce=debian"], "-e: unknown variable nvidia_driver_sorce; did you mean"),
        (["-e", '{"nvidia_driver_sorce": 1}'], "did you mean nvidia_driver_source?"),
        (["-e", "@absent.yml"], "-e @absent.yml: No such file or directory"),
        (["-e", "{broken"], "not valid JSON or YAML"),
        (["-e", "[1, 2]"], "variables must be a mapping"),
        (["-e", "justaword"], "-e: write KEY=VALUE"),
        (
            ["-e", "nvidia_driver_source=debain"],
            "-e: nvidia_driver_source: debain is not one of auto, nvidia, debian; did you",
        ),
        (["-e", "nvidia_driver_persistence=perhaps"], "nvidia_driver_persistence: perhaps is not true or false"),
        (["-e", '{"nvidia_driver_lock_wait_s": "soon"}'], "nvidia_driver_lock_wait_s: soon is not a whole number"),
        (["-e", '{"nvidia_driver_version": [580]}'], "nvidia_driver_version: [580] is not text"),
        (["-e", "nvidia_driver_module_options=x"], "nvidia_driver_module_options: x is not a mapping"),
        (
            ["-e", '{"gpunode_roles": ["updates", "updtes"]}'],
            "gpunode_roles: updtes is not one of updates, nvidia_driver; did",
        ),
        (["-e", "nvidia_driver_version='580"], "-e nvidia_driver_version: a quotation mark is missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder: Path, capfd: Out, words: list[str], expected_text: str) -> None:
    assert provision(*words) == 2
    captured = capfd.readouterr()
    assert expected_text in captured.err
    assert captured.err.count("\n") == 1
    assert "PLAY" not in captured.out


def test_a_typo_in_a_file_is_reported_with_its_line(folder: Path, capfd: Out) -> None:
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").write_text("---\nnvidia_driver_sorce: debian\n")
    assert provision() == 2
    assert "group_vars/all.yml:2: unknown variable nvidia_driver_sorce" in capfd.readouterr().err
    (folder / "group_vars" / "all.yml").unlink()
    (folder / "more.yml").write_text("nvidia_driver_sorce: debian\n")
    assert provision("-e", "@more.yml") == 2
    assert "more.yml:1: unknown variable nvidia_driver_sorce" in capfd.readouterr().err


def test_a_wrong_value_in_a_file_is_reported_with_its_line(folder: Path, capfd: Out) -> None:
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").write_text("---\nnvidia_driver_source: debain\n")
    assert provision() == 2
    assert "group_vars/all.yml:2: nvidia_driver_source: debain is not one of" in capfd.readouterr().err


@pytest.mark.parametrize(
    "extra",
    ["nvidia_driver_version=580", '{"gpunode_roles": ["updates"]}', "gpunode_roles=updates,nvidia_driver",
     '{"nvidia_driver_version": 580}', "nvidia_driver_persistence=no",
     'nvidia_driver_source="{{ anywhere }}"', '{"nvidia_driver_lock_wait_s": "60"}'],
)  # fmt: skip
def test_what_ansible_would_convert_passes(folder: Path, extra: str) -> None:
    assert provision("--list-hosts", "-e", extra) == 0


def test_variables_that_no_role_reads_are_named_before_a_run(folder: Path, capfd: Out) -> None:
    (folder / "group_vars").mkdir()
    (folder / "group_vars" / "all.yml").write_text("---\nnvidia_driver_branch: '580'\nntp_servers: [a]\n")
    assert provision("--list-hosts", "-e", "nvidia_driver_flavor_of_module=open") == 0
    captured = capfd.readouterr()
    assert captured.out == "gpu1\ngpu2\n"
    assert captured.err == (
        "gpunode: no role reads nvidia_driver_branch, nvidia_driver_flavor_of_module: of other roles, or wrong names\n"
    )


def test_without_an_inventory_it_is_wrong_usage(capfd: Out) -> None:
    assert run(["provision"]) == 2
    assert "--inventory" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("rc", "code"), [(0, 0), (1, 2), (2, 1), (4, 3), (5, 2), (99, 130), (250, 3), (-2, 130), (-15, 143), (-9, 137)]
)
def test_the_exit_codes_of_ansible(rc: int, code: int) -> None:
    assert exit_code_of(rc) == code


def test_the_password_goes_to_stdin_and_not_to_the_command_line(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    program = [sys.executable, "-c", f"import sys; open({str(seen)!r}, 'w').write(sys.stdin.read())"]
    assert run_program(program, dict(os.environ), "horse") == 0
    assert seen.read_text() == "horse\n"


def test_the_sudo_password_is_asked_once_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[list[str], str | None]] = []

    def fake(argv: list[str], env: dict[str, str], password: str | None, **_: object) -> int:
        runs.append((argv, password))
        return 0

    monkeypatch.setattr("gpunode.cli.provision.run", fake)
    monkeypatch.setattr("click.prompt", lambda *_, **__: "horse")
    assert provision("-K", "-v", "-v") == 0
    ((argv, password),) = runs
    assert password == "horse"  # noqa: S105
    assert argv[-2:] == ["--become-password-file", "-"]
    assert "-vv" in argv
    assert "horse" not in argv


TRAP = "trap '' INT TERM HUP; "


@pytest.mark.parametrize(("obeys", "number"), [(True, signal.SIGINT), (True, signal.SIGTERM), (False, signal.SIGINT),
                                            (True, signal.SIGKILL), (False, signal.SIGKILL)])  # fmt: skip
def test_signals_are_passed_on_and_nothing_is_left(tmp_path: Path, obeys: bool, number: int) -> None:
    start = f"touch {tmp_path}/up; setsid sleep 301.{number}{int(obeys)} & sleep 302; sleep 303; wait"
    script = start if obeys else TRAP + start
    program = (
        "import os, sys\n"
        "from gpunode.fleet.playbook import exit_code_of, run\n"
        f"sys.exit(exit_code_of(run(['/bin/sh', '-c', {script!r}], dict(os.environ), None, wait_s=0.5)))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        end = time.monotonic() + 20
        while not (tmp_path / "up").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(number)
        killed = number == signal.SIGKILL
        assert process.wait(10) == (-number if killed else 128 + number)
        end = time.monotonic() + 20
        while killed and "sleep 302" in processes() and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        process.kill()
    listing = processes()
    assert "sleep 302" not in listing
    if not obeys:
        assert f"sleep 301.{number}0" not in listing
    _end(f"sleep 301.{number}{int(obeys)}")


def processes() -> str:
    """The command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args"], check=True, timeout=30, capture_output=True, text=True).stdout


def _end(args: str) -> None:
    """End what the test itself set free: the process with exactly these arguments."""
    listing = subprocess.run(["ps", "-eo", "pid,args"], check=True, timeout=30, capture_output=True, text=True).stdout
    for line in listing.splitlines():
        pid, _, command = line.strip().partition(" ")
        if command == args:
            os.kill(int(pid), signal.SIGKILL)
