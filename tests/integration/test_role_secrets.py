"""Secrets of roles in what Ansible hands to callbacks (AWX, ARA, junit): results, invocations, diffs, arguments."""

import grp
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml
from fleet_sshd import Server

from gpunode.content import ansible_environment, ansible_program, collection_root

pytest_plugins = ("fleet_fixtures",)
SECRET = "planted+in/a%20proxy"  # noqa: S105
RECORDER = """
from ansible.plugins.callback import CallbackBase

class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "recorder"

    def v2_on_any(self, *args, **kwargs):
        with open({log!r}, "a") as log:
            for one in (*args, *kwargs.values()):
                task = getattr(one, "_task", getattr(one, "task", None))
                for part in (one, getattr(one, "_result", None), getattr(one, "_task_fields", None),
                             getattr(task, "args", None), getattr(one, "args", None)):
                    log.write(repr(part) + "\\n")
"""


def test_no_callback_sees_a_proxys_password(start_sshd: Callable[..., Server], tmp_path: Path) -> None:
    """Over SSH: its connection prints what a module returns at -vvv, as it is."""
    server = start_sshd("Subsystem sftp internal-sftp")
    (tmp_path / "callback_plugins").mkdir()
    (tmp_path / "callback_plugins" / "recorder.py").write_text(RECORDER.format(log=str(tmp_path / "log")))
    proxy = f"http://user:{SECRET}@127.0.0.1:9"
    owner = {"owner": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}
    planned = "{{ (plan.manifest.files | selectattr('path', 'search', 'apt.conf.d') | first).content }}"
    copy, old = (
        {"path": f"{tmp_path}/{name}", "content": planned, "mode": "0600", **owner} for name in ("proxy", "old")
    )
    # Secrets without a URL, of the site: in a file of root alone, and in one that the role gpu_tools wrote.
    (tmp_path / "login.json").write_text(f'{{"auth": "{SECRET}"}}')
    (tmp_path / "login.json").chmod(0o600)
    gone = {"path": f"{tmp_path}/login.json", "content": None}
    tasks = [
        {"gpunode.node.role_plan": {"role": "nvidia_repository", "refuse": False}, "register": "plan"},
        {"gpunode.node.managed_files": {"files": "{{ plan.manifest.files }}"}},
        {"gpunode.node.managed_files": {"files": [copy, old]}, "check_mode": False},
        {"gpunode.node.node_state": {"contents": [copy["path"]]}},
        # A password that the new text lacks, and the removal of a file with one.
        {"gpunode.node.managed_files": {"files": [{**copy, "content": "none\n"}, gone]}},
        {"gpunode.node.managed_files": {"files": [{**old, "content": None}, gone]}, "check_mode": False},
    ]
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    (tmp_path / "key.asc").write_bytes(bytes([0x99, 0, 4, 4, 1, 2, 3]))
    node = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_user": server.settings.user,
        "ansible_ssh_private_key_file": f"{server.folder}/identity",
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={server.folder}/known_hosts -o IdentitiesOnly=yes",
        "ansible_remote_tmp": f"{tmp_path}/tmp",
        "ansible_python_interpreter": sys.executable,
        "preflight_require_gpu": False,
        "nvidia_repository_proxy": proxy,
        "nvidia_driver_state": "absent",
        "nvidia_repository_state": "present",
        "nvidia_repository_url": "http://127.0.0.1:9/mirror",
        "nvidia_repository_key": str(tmp_path / "key.asc"),
    }
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"node1": node}}}))
    argv = [ansible_program("ansible-playbook"), "-vvv", "--check", "--diff", "-i", f"{tmp_path}/hosts.yml"]
    done = subprocess.run(
        [*argv, str(tmp_path / "play.yml")], env=ansible_environment(), cwd=collection_root(), check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    recorded = (tmp_path / "log").read_text()
    assert "gpunode-sealed:" in recorded
    assert SECRET not in recorded
    assert SECRET not in done.stdout + done.stderr
    assert "module_args" in done.stdout
    # The raw answers are printed, and the diffs of the files.
    assert f'"changed_paths": ["{tmp_path}/old", "{tmp_path}/login.json"]' in done.stdout
    assert f"--- before: {tmp_path}/login.json\n" in done.stdout
    assert [(tmp_path / name).exists() for name in ("proxy", "old", "login.json")] == [True, False, False]
    # The node gets the text itself.
    assert proxy in (tmp_path / "proxy").read_text()
