"""Root imports nothing from a folder that somebody else can write: over a real sshd, with Ansible, on this machine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fleet_sshd import Server

from gpunode.fleet import collect, local_target

Start = Callable[..., Server]
pytest_plugins = ("fleet_fixtures",)
ROOT = Path(__file__).parents[2]
MODULES = ("json", "os", "re", "subprocess", "socket", "base64", "time", "contextlib", "datetime", "platform", "shlex")
"""What the scripts of gpunode import, each lent by the folder."""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with modules that leave a mark where they are imported."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r} + '\\n')\nraise SystemExit(9)\n"
        )
    return folder


def sprung(trap: Path) -> str:
    """What was imported from the trap."""
    mark = trap.parent / "sprung"
    return mark.read_text() if mark.exists() else ""


def test_the_trap_works(trap: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json"], cwd=trap, check=False, timeout=30)
    assert sprung(trap) == "json\n"


def test_the_probe_imports_nothing_from_the_login_users_folder(start_sshd: Start, trap: Path) -> None:
    server = start_sshd(f'ForceCommand cd {trap}; export PYTHONPATH={trap}; eval "$SSH_ORIGINAL_COMMAND"')
    (collected,) = collect([server.target()], timeout_s=60)
    assert (sprung(trap), collected.reason) == ("", None)


def test_the_probe_of_this_machine_imports_nothing_from_the_working_folder(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trap)
    monkeypatch.setenv("PYTHONPATH", str(trap))
    (collected,) = collect([replace(local_target(), name="here")], timeout_s=60)
    assert (sprung(trap), collected.reason) == ("", None)


def test_the_roles_look_imports_nothing_from_the_login_users_folder(start_sshd: Start, trap: Path) -> None:
    """The module that looks, over real SSH: its working folder is the login user's."""
    server = start_sshd(f'ForceCommand cd {trap}; eval "$SSH_ORIGINAL_COMMAND"', "Subsystem sftp internal-sftp")
    look = {"gpunode.node.node_state": {"return_state": True}, "register": "known"}
    keep = {"ansible.builtin.copy": {"content": "{{ known.node.host }}", "dest": f"{trap.parent}/out"}}
    play = [{"hosts": "all", "gather_facts": False, "tasks": [look, keep]}]
    (trap.parent / "play.yml").write_text(json.dumps(play))
    options = f"-o UserKnownHostsFile={server.folder}/known_hosts -o IdentitiesOnly=yes -o IdentityAgent=none"
    inventory = trap.parent / "hosts.yml"
    node = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_user": server.settings.user,
        "ansible_ssh_private_key_file": f"{server.folder}/identity",
        "ansible_ssh_common_args": options,
        "ansible_remote_tmp": f"{trap.parent}/tmp",
        "ansible_python_interpreter": shutil.which("python3", path="/usr/bin:/bin"),
    }
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"node": node}}}))
    argv = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        str(inventory),
        str(trap.parent / "play.yml"),
    ]
    # Not ours: with pipelining, ansible-core 2.19 starts its modules so that they import datetime from there.
    env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_PIPELINING": "False"}
    done = subprocess.run(argv, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=120)
    assert (sprung(trap), done.returncode) == ("", 0), done.stdout[-2000:] + done.stderr[-2000:]
    assert (trap.parent / "out").read_text()


def test_a_proxys_password_is_on_no_command_line_and_in_no_output(start_sshd: Start, tmp_path: Path) -> None:
    """The module that needs it, with become, by a sudo that writes down what it is given."""
    secret, log, tools = "planted-in-a-proxy", tmp_path / "log", tmp_path / "bin"
    tools.mkdir()
    record = f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\nps axeww >> {log} 2>&1\n'
    (tools / "sudo").write_text(record + 'while [ "$1" != /bin/sh ]; do shift; done; exec "$@"\n')
    (tools / "sudo").chmod(0o755)
    server = start_sshd(
        f'ForceCommand PATH={tools}:$PATH; eval "$SSH_ORIGINAL_COMMAND"', "Subsystem sftp internal-sftp"
    )
    proxy = f"http://user:{secret}@127.0.0.1:9"
    question = {"url": "http://127.0.0.1:9/a.pub", "proxy": proxy}
    ask = {"gpunode.node.node_query": {"kind": "signing_key", "question": question}, "become": True}
    play = {"hosts": "all", "gather_facts": False, "tasks": [{**ask, "no_log": True}]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    options = f"-o UserKnownHostsFile={server.folder}/known_hosts -o IdentitiesOnly=yes -o IdentityAgent=none"
    node = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_user": server.settings.user,
        "ansible_ssh_private_key_file": f"{server.folder}/identity",
        "ansible_ssh_common_args": options,
        "ansible_become_user": "daemon",
        "ansible_python_interpreter": shutil.which("python3", path="/usr/bin:/bin"),
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"node": node}}}))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    argv = [program, "-vvv", "--diff", "-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml")]
    env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = subprocess.run(argv, cwd=ROOT, env=env, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    assert "BECOME-SUCCESS" in log.read_text()
    assert secret not in log.read_text()
    assert secret not in done.stdout + done.stderr
