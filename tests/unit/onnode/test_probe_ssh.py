"""Private keys and accounts as the probe looks at them: kinds and modes, and nothing of what they hold."""

import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_files import SECRET, within, world
from probe_node import collect, link, put, tool

from gpunode.onnode.probe import Probe, key_kind, private_key

FIXTURE = Path(__file__).parents[2] / "fixtures" / "ssh" / "debian-12.json"
PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----\nSECRETSECRET\n-----END OPENSSH PRIVATE KEY-----\n"
PUBLIC = next(
    f"{key['type']} {key['blob']} somebody\n"
    for account in json.loads(FIXTURE.read_text(encoding="utf-8"))["accounts"]
    for key in account["keys"]
)
ACCOUNTS = "root:x:0:0::/root:/bin/bash\nada:x:1000:100::/home/ada:/bin/bash\ndaemon:x:1:1::/:/usr/sbin/nologin\n"
SHADOW = "root:*:1::::::\nada::1::::::\ndaemon::1::::::\n"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the keys of others")


def look(root: Path, key: str) -> tuple[list[str], str]:
    answer = collect(root, root / "bin").commands[key]
    return answer.stdout.splitlines(), answer.stderr


def test_keys_are_reported_by_kind_and_mode_alone(tmp_path: Path) -> None:
    put(tmp_path, "/etc/ssh/ssh_host_ed25519_key", PRIVATE)
    put(tmp_path, "/etc/ssh/ssh_host_ed25519_key.pub", PUBLIC)
    put(tmp_path, "/home/ada/.ssh/id_rsa", PRIVATE)
    put(tmp_path, "/home/ada/.ssh/known_hosts", "x\n")
    (tmp_path / "home/ada/.ssh/id_rsa").chmod(0o644)
    rows, problems = look(tmp_path, "private-keys")
    assert problems == ""
    host, user = (row.split("\t") for row in rows)
    assert (host[0], host[3:5]) == ("/etc/ssh/ssh_host_ed25519_key", ["ssh-ed25519", "256"])
    assert (user[0], user[1], user[3]) == ("/home/ada/.ssh/id_rsa", "0644", "")
    assert "SECRET" not in json.dumps(rows)


def test_a_user_with_many_files_hides_no_key_of_another(tmp_path: Path) -> None:
    for user, names in {"ada": map(str, range(1500)), "eve": ["id_rsa"]}.items():
        folder = tmp_path / f"home/{user}/.ssh"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("-----BEGIN PRIVATE KEY-----\n")
    rows, problems = look(tmp_path, "private-keys")
    assert [row for row in rows if row.startswith("/home/eve/.ssh/id_rsa\t")]
    assert problems == ""


def test_a_link_in_the_place_of_a_public_key_gives_nothing_away(tmp_path: Path) -> None:
    put(tmp_path, "/home/ada/.ssh/id_rsa", PRIVATE)
    put(tmp_path, "/etc/shadow", "root:$6$hash:1::::::\n")
    link(tmp_path, "/home/ada/.ssh/id_rsa.pub", str(tmp_path / "etc/shadow"))
    link(tmp_path, "/home/ada/.ssh/id_other", str(tmp_path / "etc/shadow"))
    assert "hash" not in json.dumps(look(tmp_path, "private-keys"))


@pytest.mark.parametrize("name", ["id_x", "id_x.pub"])
def test_nothing_but_files_of_the_user_is_opened(name: str) -> None:
    """What opens, opened by a link or not, is a file: the opening of a pipe may block, that of a device start it."""
    with world() as tree:

        def looked() -> tuple[str | None, list[str]]:
            opened: list[str] = []

            def note(event: str, arguments: tuple[Any, ...]) -> None:
                if event == "open" and isinstance(arguments[0], str) and not arguments[2] & os.O_PATH:
                    opened.append(os.path.realpath(arguments[0]))

            sys.addaudithook(note)
            return private_key(Probe(root=str(tree.root)), "/home/.ssh/id_x"), opened

        outcomes = {}
        for way, path in tree.ways(tree.home, ".ssh", name):
            if name == "id_x.pub" and path.parent.is_dir() and not path.parent.is_symlink():
                (path.parent / "id_x").write_text(PRIVATE)
            outcomes[way] = within(15, looked)
            assert outcomes[way] != "hangs", way
            assert str(tree.precious) not in outcomes[way], way
            assert "/dev" not in outcomes[way], way
            assert SECRET not in outcomes[way], way
    assert "/home/.ssh/id_x" in outcomes[f"nothing at {name}"] or name == "id_x", "others are opened"


def test_accounts_without_a_password_that_have_a_shell(tmp_path: Path) -> None:
    put(tmp_path, "/etc/passwd", ACCOUNTS)
    put(tmp_path, "/etc/shadow", SHADOW)
    assert look(tmp_path, "empty-passwords") == (["ada"], "")
    (tmp_path / "etc/shadow").unlink()
    assert look(tmp_path, "empty-passwords")[1]


def test_of_the_daemons_settings_those_that_are_judged_are_kept(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "sshd", "printf '%s\\n' 'passwordauthentication no' 'authorizedkeysfile x' 'ciphers a,b'")
    assert look(tmp_path, "sshd-settings")[0] == ["passwordauthentication no", "ciphers a,b"]


def test_a_daemon_without_its_folder_is_asked_where_it_has_one(tmp_path: Path) -> None:
    """Behind ssh.socket: the text is that of sshd 9.2, which ends with 255."""
    missing = "echo 'Missing privilege separation directory: /run/sshd' >&2; exit 255"
    tool(tmp_path / "bin", "sshd", f'[ "$(ls /run)" = sshd ] || {{ {missing}; }}; echo "passwordauthentication no"')
    for name in ("ls", "mkdir", "mount", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    assert look(tmp_path, "sshd-settings") == ([], "Missing privilege separation directory: /run/sshd")
    (tmp_path / "bin" / "unshare").symlink_to(shutil.which("unshare") or "")
    assert look(tmp_path, "sshd-settings") == (["passwordauthentication no"], "")


@pytest.mark.parametrize("text", ["", "root:$6$x y", "ssh-rsa", "ssh-rsa %%%"])
def test_what_is_no_public_key_has_no_kind(text: str) -> None:
    with pytest.raises((ValueError, struct.error)):
        key_kind(text)
