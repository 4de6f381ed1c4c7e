"""The sudo password goes to the sudo that gpunode starts and to nobody else: nodes that ask, over a real sshd."""

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_sshd import Server

from gpunode.errors import UsageError
from gpunode.fleet import Collected, Target, collect
from gpunode.fleet.node import Node

Start = Callable[..., Server]
pytest_plugins = ("fleet_fixtures",)
PASSWORD = 'right "horse" \\ battery'  # noqa: S105
ECHO = """
import json, sys
word = {word!r}
print(json.dumps({{"schema": "gpunode.bundle/1", "host": word, "collected_at": "2026-11-20T00:00:00Z",
    "commands": {{word: {{"argv": [word], "rc": 0, "stdout": "a" + word + "b", "stderr": word, "seconds": 0.1}}}},
    "files": {{"/" + word: word, "/other": None}}, "results": [{{"record": [word, {{word: word}}]}}]}}))
"""


class Hostile:
    """A node with a login shell that asks for a password in many ways, and records all input."""

    def __init__(self, start: Start, folder: Path, *, sudo: str = "", shell: str = "") -> None:
        self.got = folder / "got"
        self.bin = folder / "bin"
        self.bin.mkdir()
        if sudo:
            self._program(self.bin / "sudo", sudo)
        self._program(folder / "shell", shell or 'eval "$SSH_ORIGINAL_COMMAND"')
        self.server = start(f"ForceCommand PATH={self.bin}:$PATH {folder}/shell", "PasswordAuthentication yes")

    def _program(self, path: Path, text: str) -> None:
        path.write_text("#!/bin/sh\n" + textwrap.dedent(text).replace("GOT", str(self.got)))
        path.chmod(0o755)

    @property
    def received(self) -> str:
        """What it was sent."""
        return self.got.read_text() if self.got.exists() else ""


def one(target: Target, password: str | None = PASSWORD) -> Collected:
    """The only result for one target."""
    (collected,) = collect([target], timeout_s=20, become_password=password)
    return collected


# Prompts as of sudo, of ssh, and with every word of the command line, in which gpunode's own prompt would be.
ASKS = """\
for word in "[sudo] password for root: " "Password: " $SSH_ORIGINAL_COMMAND; do
  printf '%s' "$word" | tr -d "'" >&2
done
printf '\n%s:' "$(echo "$SSH_ORIGINAL_COMMAND" | grep -o 'gpunode-[0-9a-f]*' | head -n 1)" >&2
(timeout 2 cat > GOT) <&0
eval "$SSH_ORIGINAL_COMMAND"
"""


@pytest.mark.parametrize("become", [True, False, None])
def test_a_root_login_gets_no_password_whatever_it_asks(
    start_sshd: Start, tmp_path: Path, small_probe: None, monkeypatch: pytest.MonkeyPatch, become: bool | None
) -> None:
    monkeypatch.setattr(Node, "is_root", True)
    node = Hostile(start_sshd, tmp_path, shell=ASKS)
    one(replace(node.server.target(), become=become))
    assert "horse" not in node.received


def test_a_node_that_is_not_to_become_root_gets_no_password(
    start_sshd: Start, tmp_path: Path, small_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Node, "is_root", False)
    node = Hostile(start_sshd, tmp_path, shell=ASKS)
    one(replace(node.server.target(), become=False, become_password=PASSWORD))
    assert "horse" not in node.received


def test_prompts_of_others_get_no_password_where_sudo_is_to_run(
    start_sshd: Start, tmp_path: Path, small_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A banner that looks like sudo's: it does not know what this start's sudo asks with."""
    monkeypatch.setattr(Node, "is_root", False)
    asks = 'printf "[sudo] password for alice: gpunode-0123456789abcdef:" >&2\n(timeout 2 cat > GOT) <&0\nexit 1\n'
    node = Hostile(start_sshd, tmp_path, shell=asks)
    reason = one(replace(node.server.target(), become=True)).reason
    assert "horse" not in node.received
    assert "could not start" in str(reason)


SUDO = """\
while [ $# -gt 0 ]; do
  case "$1" in -p) prompt=$2; shift 2;; -u) shift 2;; -n) exit 1;; -*) shift;; *) break;; esac
done
printf %s "$prompt" >&2; IFS= read -r answer; printf '%s\\n' "$answer" >> GOT
"""


@pytest.mark.parametrize("ascii_only", [True, False])
def test_what_the_node_echoes_of_the_password_is_redacted(
    start_sshd: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ascii_only: bool
) -> None:
    """In every part of the bundle, whatever JSON made of it; by a sudo that is not the system's."""
    monkeypatch.setattr(Node, "is_root", False)
    word = PASSWORD if ascii_only else PASSWORD + "ü"
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: ECHO.format(word=word))
    node = Hostile(start_sshd, tmp_path, sudo=SUDO + 'exec "$@"\n')
    collected = one(replace(node.server.target(), become=True), word)
    assert node.received == word + "\n"
    assert collected.answer is not None, collected.reason
    text = replace(collected.answer, host=None).bundle().to_json()
    assert "horse" not in text
    assert text.count("[password]") == 10


def test_a_message_that_holds_the_password_is_redacted(
    start_sshd: Start, tmp_path: Path, small_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Node, "is_root", False)
    node = Hostile(start_sshd, tmp_path, sudo=SUDO + 'echo "sudo: no such user: $answer" >&2; exit 1\n')
    reason = str(one(replace(node.server.target(), become=True)).reason)
    assert "[password]" in reason
    assert "horse" not in reason


def test_an_answer_that_is_not_a_bundle_is_redacted(
    start_sshd: Start, tmp_path: Path, small_probe: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Node, "is_root", False)
    token = '"$(echo "$*" | grep -o "gpunode-[0-9a-f]*" | head -n 1)"'  # noqa: S105
    echo = f'printf "%s ready\\n%s is not JSON" {token} "$answer"\n'
    node = Hostile(start_sshd, tmp_path, sudo=SUDO + echo)
    collected = one(replace(node.server.target(), become=True))
    assert collected.answer is not None, collected.reason
    with pytest.raises(UsageError, match=r"not a gpunode\.bundle/1 bundle") as err:
        collected.answer.bundle()
    assert "horse" not in str(err.value)


@pytest.mark.parametrize("strict", ["no", "accept-new"])
def test_a_node_with_an_unchecked_host_key_gets_no_password(
    start_sshd: Start, tmp_path: Path, small_probe: None, monkeypatch: pytest.MonkeyPatch, strict: str
) -> None:
    monkeypatch.setattr(Node, "is_root", False)
    node = Hostile(start_sshd, tmp_path, sudo='echo "$*" >> GOT; echo "sudo: a password is required" >&2; exit 1\n')
    (node.server.folder / "known_hosts").write_text("")
    target = replace(node.server.target(strict_host_key_checking=strict), become=True)
    reason = str(one(target).reason)
    assert "none is sent to a node with an unverified host key" in reason
    assert "-n" in node.received.split()
    assert "-S" not in node.received.split()


def test_nor_a_password_to_log_in(start_sshd: Start, tmp_path: Path, small_probe: None) -> None:
    server = start_sshd("PasswordAuthentication yes")
    (server.folder / "known_hosts").write_text("")
    target = server.target(strict_host_key_checking="no", identity_files=())
    reason = str(one(replace(target, password=PASSWORD)).reason)
    assert "host key was not verified" in reason
    assert "tried the password" not in reason


def test_a_report_marks_it(start_sshd: Start, small_probe: None) -> None:
    server = start_sshd()
    config = server.folder / "config"
    config.write_text(
        f"Host node\n  HostName 127.0.0.1\n  Port {server.port}\n  IdentityFile {server.folder}/identity\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {server.folder}/none\n  StrictHostKeyChecking no\n"
    )
    inventory = server.folder / "hosts.yml"
    inventory.write_text(
        f"all: {{hosts: {{node: {{ansible_ssh_common_args: '-F {config}', ansible_become: false}}}}}}\n"
    )
    argv = [sys.executable, "-I", "-m", "gpunode", "validate", "--level", "quick", "-i", str(inventory)]
    assert shutil.which("ssh")
    done = subprocess.run([*argv, "--format", "json"], check=False, capture_output=True, text=True, timeout=120)
    assert '"check": "node.reachable",\n     "status": "warn"' in done.stdout, done.stdout[:600] + done.stderr
    assert "host key not verified" in done.stdout
