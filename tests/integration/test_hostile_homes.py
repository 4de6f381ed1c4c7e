"""Users with a home on the node, over a real sshd and with Ansible: obstacles at their keys stop and mislead nobody."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from fleet_sshd import Server
from hostile_files import SECRET, world

pytest_plugins = ("fleet_fixtures",)
ROOT = Path(__file__).parents[2]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlMQ4QIoLa0nhzL10xJLycLZUvclZ1U9Ui9YZwHN8u3 ada"
WAYS = {"linked": "link", "piped": "pipe", "hard": "hard link", "latin": "not text", "good": "nothing"}
"""Users, and what each has in the place of authorized_keys."""
NAMESPACE = 'mount --bind {0}/passwd /etc/passwd && mount --bind {0}/shadow /etc/shadow && eval "$SSH_ORIGINAL_COMMAND"'


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True, timeout=10).returncode != 0,
    reason="needs mount namespaces, for users that exist in the test alone",
)
def test_users_neither_stop_the_role_nor_lead_it_away(start_sshd: Callable[..., Server]) -> None:
    with world() as tree:
        users = {name: (4001 + number, tree.root / name) for number, name in enumerate(WAYS)}
        for name, (uid, home) in users.items():
            keys = home / ".ssh" / "authorized_keys"
            keys.parent.mkdir(parents=True)
            tree.put(keys, WAYS[name], last=True)
            if name == "good":
                keys.write_text("ssh-ed25519 AAAA own-words\n")
            for path in (home, home / ".ssh", *([keys] if name != "hard" else [])):
                os.lchown(path, uid, 1)
        lines = "".join(f"{name}:x:{uid}:1::{home}:/bin/sh\n" for name, (uid, home) in users.items())
        (tree.precious / "passwd").write_text(Path("/etc/passwd").read_text() + lines)
        (tree.precious / "shadow").write_text(
            f"root:*:1::::::\n{''.join(f'{name}:!:1::::::{chr(10)}' for name in users)}"
        )
        before = tree.snapshot()
        command = f"unshare --mount sh -c '{NAMESPACE.format(tree.precious)}'"
        server = start_sshd(f"ForceCommand {command}", "Subsystem sftp internal-sftp")
        done = subprocess.run(
            playbook(tree.root, server, users), cwd=ROOT, check=False, capture_output=True, text=True, timeout=300,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode == 0, output[-3000:]
        assert SECRET not in output
        assert "own-words" not in output
        assert tree.snapshot() == before
        for name, words in {
            "linked": "is a symbolic link",
            "piped": "is a named pipe",
            "hard": "Permission denied",
            "latin": "is not UTF-8 text (byte 0)",
        }.items():
            keys = users[name][1] / ".ssh" / "authorized_keys"
            assert f"accounts_admins: {name}: {keys}" in output, output[-6000:]
            assert words in output, words
        assert (users["good"][1] / ".ssh" / "authorized_keys").read_text() == f"{KEY}\n"
        assert (users["good"][1] / ".ssh" / "authorized_keys").stat().st_uid == users["good"][0]
        assert not (users["piped"][1] / ".ssh" / "authorized_keys").is_file()


def playbook(folder: Path, server: Server, users: dict[str, tuple[int, Path]]) -> list[str]:
    """The command that plans the role, and then writes each user's keys as its tasks do."""
    plan = {"gpunode.node.role_plan": {"role": "accounts", "refuse": False}, "register": "plan"}
    show = {"ansible.builtin.debug": {"var": "plan.manifest.refusals"}}
    write = {
        "gpunode.node.managed_files": {
            "files": [
                {
                    "path": "{{ item.home }}/.ssh/authorized_keys",
                    "content": f"{KEY}\n",
                    "mode": "0600",
                    "owner": "{{ item.name }}",
                    "group": "daemon",
                }
            ]
        },
        "loop": [{"name": name, "home": str(home)} for name, (_, home) in users.items()],
        "ignore_errors": True,
    }
    play = {"hosts": "all", "gather_facts": False, "tasks": [plan, show, write]}
    (folder / "play.yml").write_text(json.dumps([play]))
    options = f"-o UserKnownHostsFile={server.folder}/known_hosts -o IdentitiesOnly=yes -o IdentityAgent=none"
    node = {
        "ansible_host": "127.0.0.1",
        "ansible_port": server.port,
        "ansible_user": server.settings.user,
        "ansible_ssh_private_key_file": f"{server.folder}/identity",
        "ansible_ssh_common_args": options,
        "ansible_python_interpreter": shutil.which("python3", path="/usr/bin:/bin"),
        "accounts_state": "present",
        "accounts_admins": [{"name": name, "keys": [KEY]} for name in users],
        "accounts_sudo": "none",
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"node": node}}}))
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    return [program, "--diff", "-v", "-i", str(folder / "hosts.yml"), str(folder / "play.yml")]
