"""Answers of modules with keys that nobody asked for: every name that a task, a plugin or Ansible reads.

A python3 on the "node", behind a real sshd, runs each module and adds keys to its answer: at the top and as facts.
Their values are the path of a file on the controller that is a list of tasks and a program: each makes a marker.
"""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ansible
import pytest
import yaml
from effort import EVERYTHING, effort
from fleet_sshd import Server

from gpunode.content import ansible_program, collection_root

Start = Callable[..., Server]
pytest_plugins = ("fleet_fixtures",)
ROOT = collection_root()
ANSIBLE = Path(ansible.__file__).parent
NAME = re.compile(r"[A-Za-z_]\w*")
CONTROL = "\x1b]0;title\x07\x1b[2J\x1b[8m\x9b\r\u202e"
OVER = ("ansible_stats", "deprecations", "diff", "invocation", "results", "stdout_lines", "warnings", "attempts")
"""Keys that Ansible's engine reads with a type in mind."""
CONDITIONS = ("when", "that", "until", "changed_when", "failed_when", "register")
PRESENT = ("kernel_tuning", "ml_environment", "updates")
"""Roles that change something on any machine: their tasks call Ansible's modules and ours."""
ENDS_THE_TASK = {"failed", "unreachable", "skipped", "msg", "rc", "exception", "results", "finished", "started",
                 "failed_when_result", "warnings", "deprecations"}  # fmt: skip
"""Keys that end the node's run where they appear: the other keys would never be read."""

# One file: a list of tasks for Ansible, and a program for everything that starts one.
POLYGLOT = """#!/bin/sh
- name: Run a task of the node
  ansible.builtin.debug:
    msg: "{{{{ lookup('pipe', 'touch {marker}') }}}}"
  vars:
    a_program: |
      true
      touch {marker}
"""

INTERPRETER = """#!{python} -I
import json, re, subprocess, sys
text = sys.stdin.buffer.read() if len(sys.argv) == 1 else open(sys.argv[1], "rb").read()
# Whatever the play does: this machine is not changed.
text = text.replace(b'"_ansible_check_mode": false', b'"_ansible_check_mode": true')
with open({log!r}, "a") as log:
    log.write(str(re.findall(rb"module_fqn='([\\w.]+)'", text)) + "\\n")
done = subprocess.run([{python!r}, "-"], input=text, capture_output=True, timeout=120)
try:
    answer = json.loads(done.stdout)
except ValueError:
    sys.stdout.buffer.write(done.stdout)
else:
    added = json.load(open({added!r}))
    if answer.get("failed") and b"module_fqn='ansible.modules" in text:
        # Whatever this machine lacks, for example systemd, the node reports success.
        answer = {{"changed": True, "rc": 0, "stdout": "", "status": {{}}}}
    print(json.dumps({{**added["top"], **answer, "ansible_facts": added["facts"], **added["over"]}}))
    print({control!r})
sys.stderr.buffer.write(done.stderr)
sys.exit(done.returncode)
"""


def constants(*files: Path) -> set[str]:
    """The texts in these Python files that could be a name."""
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if NAME.fullmatch(text)}


def options() -> dict[str, dict[str, Any]]:
    """Each variable of the roles, with its specification."""
    by_name: dict[str, dict[str, Any]] = {}
    for file in ROOT.glob("roles/*/meta/argument_specs.yml"):
        by_name |= yaml.safe_load(file.read_text())["argument_specs"]["main"]["options"]
    return by_name


def expressions(value: Any, key: str = "") -> Iterator[str]:
    """Every template and condition in a document."""
    if isinstance(value, str) and ("{{" in value or key in CONDITIONS):
        yield value
    for inner, item in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from expressions(item, inner if isinstance(inner, str) else key)


def own_names() -> set[str]:
    """What tasks and action plugins of the collection read, and what they register."""
    files = [*ROOT.glob("roles/*/*/*.yml"), *ROOT.glob("playbooks/**/*.yml")]
    templates = "\n".join(text for file in files for text in expressions(yaml.safe_load(file.read_text())))
    return set(re.findall(r"(?<![.'\"\w])[A-Za-z_]\w*", templates)) | constants(
        *ROOT.glob("plugins/action/*.py"), *ROOT.glob("plugins/plugin_utils/*.py")
    )


def names_of_ansible() -> set[str]:
    """The variables of Ansible's plugins and settings, and the keys of results that its engine reads."""
    documented = [*ANSIBLE.glob("plugins/*/*.py"), *ANSIBLE.glob("config/*.yml")]
    listed = {name for file in documented for name in re.findall(r"name: *(ansible_\w+)", file.read_text())}
    engine = ("executor/task_executor.py", "plugins/strategy/__init__.py", "plugins/action/__init__.py",
              "playbook/included_file.py", "vars/clean.py", "plugins/callback/default.py", "constants.py")  # fmt: skip
    return listed | constants(*(ANSIBLE / file for file in engine))


def value_of(name: str, specification: dict[str, Any], path: str) -> Any:
    """A value that is accepted for a variable, and names the file wherever one can be named."""
    if "choices" in specification:
        return "absent" if "absent" in specification["choices"] else specification.get("default")
    kind = specification.get("type", "str")
    if kind in ("str", "path", "raw"):
        return True if name.startswith("__") and not specification else path
    return [path] if kind == "list" else specification.get("default")


def added(path: str, seed: int) -> dict[str, Any]:
    """The keys of one run: 0 has the names of the collection, 1 Ansible's; others take some of all, of any type."""
    chance, known = random.Random(seed), options()  # noqa: S311
    if seed < 2:
        names = sorted((own_names(), names_of_ansible())[seed] - set(known))
    else:
        names = [name for name in sorted(own_names() | names_of_ansible() | set(known)) if chance.random() < 0.2]
    values = {name: value_of(name, known.get(name, {}), path) for name in names}
    over: dict[str, Any] = {"warnings": [CONTROL], "deprecations": [{"msg": CONTROL, "version": "9"}]}
    over |= {"diff": {"before": CONTROL, "after": ""}}
    if seed > 1:
        deep: list[Any] = []
        for _ in range(300):
            deep = [deep]
        kinds: list[Any] = [path, [path], {path: path}, True, 7, None, deep, {"before": 7, "after": deep}]
        values |= {name: chance.choice(kinds) for name in values if name not in known}
        over = {name: chance.choice(kinds) for name in OVER if chance.random() < 0.5}
    top = {name: value for name, value in values.items() if name not in ENDS_THE_TASK}
    return {"top": top, "facts": values, "over": over}


def states(present: Sequence[str]) -> dict[str, str]:
    """Variables with which these roles alone change something."""
    variables = {name: "absent" for name, option in options().items() if "absent" in option.get("choices", ())}
    return variables | {f"{role}_state": "present" for role in present}


def hosts(
    server: Server, folder: Path, pythons: Sequence[str] = ("python3",), present: Sequence[str] = PRESENT
) -> Path:
    """An inventory of a node for each Python: node1, node2. Nothing is installed there, and little is to be."""
    variables = states(present)
    options_of_ssh = f"-o UserKnownHostsFile={server.folder}/known_hosts -o IdentitiesOnly=yes -o IdentityAgent=none"
    node = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_user": server.settings.user,
        "ansible_ssh_private_key_file": f"{server.folder}/identity",
        "ansible_ssh_common_args": options_of_ssh,
        "ansible_remote_tmp": f"{folder}/tmp",
        "ansible_become": False,
        "preflight_require_gpu": False,
        "preflight_lock_wait_s": 1,
        "preflight_refuse_unknown_variables": False,
    }
    nodes = {
        f"node{number}": {**node, "ansible_python_interpreter": str(folder / name)}
        for number, name in enumerate(pythons, 1)
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"gpu_nodes": {"hosts": nodes, "vars": variables}}))
    return folder / "hosts.yml"


def command(how: str, inventory: Path) -> tuple[list[str], dict[str, str], Path]:
    """Command, environment and working folder of a run of the site playbook."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    env["ANSIBLE_NOCOLOR"] = "1"
    if how.startswith("gpunode"):
        return [sys.executable, "-m", "gpunode", "provision", "-i", str(inventory)], env, inventory.parent
    # As a user who has the collection but neither our ansible.cfg nor our command, and asks for injected facts.
    env |= {"ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections"), "ANSIBLE_INJECT_FACT_VARS": "True"}
    playbook = str(ROOT / "playbooks" / "site.yml")
    return [ansible_program("ansible-playbook"), "-i", str(inventory), playbook], env, inventory.parent


def test_the_names_are_those_of_the_tree() -> None:
    names = own_names() | names_of_ansible() | set(options())
    expected = {"gpunode_undrain_tasks", "storage_hooks", "__gpunode_drained", "gpunode_stack", "nvidia_repository_key"}
    expected |= {"ansible_sftp_executable", "ansible_remote_tmp", "add_host", "ansible_stats", "include_args"}
    assert expected <= names


WAYS = ("gpunode --check", "ansible-playbook", "gpunode", "ansible-playbook --check")


@pytest.mark.parametrize(
    ("how", "seed"),
    [(how, seed) for seed in range(effort(2, 7)) for how in (WAYS if EVERYTHING else WAYS[seed : seed + 1])],
)
def test_added_keys_of_answers_run_nothing_on_the_controller(
    start_sshd: Start, tmp_path: Path, how: str, seed: int
) -> None:
    marker, polyglot, log = tmp_path / "MARKER", tmp_path / "theirs.yml", tmp_path / "modules"
    polyglot.write_text(POLYGLOT.format(marker=marker))
    polyglot.chmod(0o755)
    (tmp_path / "added.json").write_text(json.dumps(added(str(polyglot), seed)))
    interpreter = INTERPRETER.format(
        python=sys.executable, log=str(log), added=str(tmp_path / "added.json"), control=CONTROL
    )
    (tmp_path / "python3").write_text(interpreter)
    (tmp_path / "python3").chmod(0o755)
    # A node that reboots would be this machine.
    guard = 'case "$SSH_ORIGINAL_COMMAND" in *shutdown*|*reboot*) exit 9;; esac; eval "$SSH_ORIGINAL_COMMAND"'
    server = start_sshd(f"ForceCommand {guard}", "Subsystem sftp internal-sftp")
    argv, env, folder = command(how, hosts(server, tmp_path))
    argv += ["--diff", *(["--check"] if how.endswith("--check") else [])]
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert not marker.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert "node_state" in log.read_text()
    assert [char for char in CONTROL if not char.isprintable() and char in done.stdout + done.stderr] == []
    # Otherwise a node that was refused early would prove nothing.
    assert "Reboot if pending" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_file_is_run_by_a_shell_and_by_ansible(tmp_path: Path) -> None:
    marker, polyglot = tmp_path / "MARKER", tmp_path / "theirs.yml"
    polyglot.write_text(POLYGLOT.format(marker=marker))
    polyglot.chmod(0o755)
    subprocess.run([str(polyglot)], check=False, timeout=30, capture_output=True)
    assert marker.exists()
    marker.unlink()
    play = [{"hosts": "localhost", "gather_facts": False, "tasks": [{"include_tasks": str(polyglot)}]}]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(play))
    argv = [ansible_program("ansible-playbook"), "-i", "localhost,", "-c", "local", str(tmp_path / "play.yml")]
    subprocess.run(argv, check=False, timeout=120, capture_output=True)
    assert marker.exists()


# One node stops no other

BOMB = """#!{python} -I
import json, subprocess, sys
text = open(sys.argv[1], "rb").read() if len(sys.argv) > 1 else sys.stdin.buffer.read()
done = subprocess.run([{python!r}, "-"], input=text, capture_output=True, timeout=120)
answer = json.loads(done.stdout)
if b"module_fqn='ansible.modules" in text:
    answer = {{"failed": True, "msg": "x", "stdout": "line\\n" * (1 << 20)}}
parts = [{{"before": "a\\n" * 199, "after": "a\\nb\\n" * 99}}] * 30_000
print(json.dumps({{**answer, "changed": True, "diff": parts}}))
"""
"""Each part takes a fifth of a second to compare: all of them, more than an hour of Ansible's main process."""


def test_costly_answers_are_cut_and_programs_of_this_machine_have_no_limit(tmp_path: Path) -> None:
    (tmp_path / "bomb").write_text(BOMB.format(python=sys.executable))
    (tmp_path / "plain").write_text(f'#!/bin/sh\nulimit -v >> {tmp_path}/limits\nexec {sys.executable} "$@"\n')
    settings = {"ansible_connection": "local", "ansible_become": False, "preflight_require_gpu": False}
    settings |= {
        "preflight_lock_wait_s": 1,
        "ansible_remote_tmp": f"{tmp_path}/tmp",
        "preflight_refuse_unknown_variables": False,
    }
    nodes = {name: {**settings, "ansible_python_interpreter": f"{tmp_path}/{name}"} for name in ("bomb", "plain")}
    for name in nodes:
        (tmp_path / name).chmod(0o755)
    python = {"gpu_tools_tools": [], "gpu_tools_python": {"py-spy": ""}}
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"gpu_nodes": {"hosts": nodes, "vars": states(["gpu_tools"]) | python}})
    )
    argv, env, _ = command("ansible-playbook", tmp_path / "hosts.yml")
    (tmp_path / "mine.yml").write_text("- hosts: localhost\n  gather_facts: false\n  tasks: []\n")
    second = subprocess.run(
        [*argv[:-1], "mine.yml", "gpunode.node.validate"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "callback node_answers" in second.stdout, second.stdout[-3000:]
    assert not (tmp_path / "limits").exists()
    tags = ["--check", "--diff", "--tags", "preflight,gpu_tools"]
    done = subprocess.run(
        [*argv, *tags], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert set((tmp_path / "limits").read_text().split()) == {"unlimited"}, done.stdout[-3000:]
    assert "too long for a comparison" in done.stdout, done.stdout[-3000:]
    assert "answered more than 4 MiB" in done.stdout
    assert len(done.stdout) < 8 << 20


LIMIT_S = 45


def test_nodes_without_end_fail_alone_and_in_time(start_sshd: Start, tmp_path: Path) -> None:
    endless = {
        "silent": "exec sleep 1000",
        "flood": "while :; do printf '{%0100000d' 0; done",
        "slow": "while :; do echo '{}'; sleep 0.1; done",
        "errors": "exec yes >&2",
    }
    endless = dict(list(endless.items())[: effort(2, 4)])
    for name, program in endless.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "healthy").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("healthy", *endless):
        (tmp_path / name).chmod(0o755)
    # The collection with a shorter limit: the real one is a quarter of an hour.
    collection = tmp_path / "collections" / "ansible_collections" / "gpunode" / "node"
    for part in ("meta", "playbooks", "plugins", "roles"):
        shutil.copytree(ROOT / part, collection / part)
    controller = collection / "plugins" / "plugin_utils" / "controller.py"
    text = controller.read_text()
    assert text.count("CALL_LIMIT_S = 900") == 1
    controller.write_text(text.replace("CALL_LIMIT_S = 900", f"CALL_LIMIT_S = {LIMIT_S}"))
    server = start_sshd("Subsystem sftp internal-sftp")
    inventory = hosts(server, tmp_path, ("healthy", *endless), present=())
    env = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    env |= {"ANSIBLE_COLLECTIONS_PATH": str(tmp_path / "collections"), "ANSIBLE_PIPELINING": "True"}
    argv = [
        ansible_program("ansible-playbook"),
        "--check",
        "-i",
        str(inventory),
        str(collection / "playbooks/site.yml"),
    ]
    done = subprocess.run(
        argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False, start_new_session=True
    )
    shown = done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^node1 .*unreachable=0 +failed=0", done.stdout, re.MULTILINE), shown
    assert "Reboot if pending" in done.stdout, shown
    for number in range(2, len(endless) + 2):
        assert re.search(rf"^node{number} .*(unreachable=1|failed=1)", done.stdout, re.MULTILINE), shown
    listing = subprocess.run(["ps", "-eo", "args"], check=True, timeout=30, capture_output=True, text=True).stdout
    assert [
        line for line in listing.splitlines() if line.startswith("ssh ") and f"{server.folder}/identity" in line
    ] == []
