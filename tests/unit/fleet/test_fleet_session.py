"""The conversation with a node: sudo's prompt, noise, limits, over a local process; packets of Paramiko's transport."""

import os
import shlex
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from gpunode.fleet.connection import _limit_packets
from gpunode.fleet.session import LocalSession, NodeFailure, Program, converse, probe_arguments, program

# Behaves like sudo as far as the conversation goes: -n never asks, -S -p PROMPT asks on stderr and reads one line each.
FAKE_SUDO = """#!/bin/sh
prompt= ; ask=yes
while [ $# -gt 0 ]; do case "$1" in
  -H|-S) shift;; -n) ask=no; shift;; -p) prompt=$2; shift 2;; -u) shift 2;; *) break;; esac; done
mode=$(cat "$(dirname "$0")/mode")
case "$mode" in
  nopasswd) exec "$@";;
  forbidden) echo "alice is not in the sudoers file." >&2; exit 1;;
  rs-forbidden) echo "sudo-rs: I'm sorry alice. I'm afraid I can't do that" >&2; exit 1;;
  tty) echo "sudo: sorry, you must have a tty to run sudo" >&2; exit 1;;
  rs) prompt="[sudo: $prompt] Password: ";;
esac
if [ $ask = no ]; then
  [ "$mode" = rs ] && echo "sudo: interactive authentication is required" >&2 || echo "sudo: a password is required" >&2
  exit 1
fi
echo "We trust you have received the usual lecture." >&2
for i in 1 2 3; do
  printf %s "$prompt" >&2; IFS= read -r answer || exit 1
  [ "$answer" = "right horse" ] && exec "$@"
  echo "Sorry, try again." >&2
done
echo "sudo: 3 incorrect password attempts" >&2; exit 1
"""
Talk = Callable[..., bytes]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Talk]:
    """``talk(script, mode=…, password=…)``: run a script as the probe is run, with the fake sudo where mode is set."""
    (tmp_path / "sudo").write_text(FAKE_SUDO)
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sessions: list[LocalSession] = []

    def run(
        script: str = "print('out')",
        *,
        mode: str | None = None,
        password: str | None = None,
        probe: Program | None = None,
        limit_s: float = 20.0,
        python: str | None = sys.executable,
    ) -> bytes:
        (tmp_path / "mode").write_text(mode or "")
        probe = probe or program(python, sudo=mode is not None, ask=password is not None, limit_s=limit_s)
        session = LocalSession(shlex.split(probe.command))
        sessions.append(session)
        return converse(session, probe, script.encode(), password, time.monotonic() + limit_s)

    yield run
    for session in sessions:
        session.close()


SHOW_STDIN = "import sys; print('stdin:', sys.stdin.read())"


def test_the_output_comes_back(talk: Talk) -> None:
    assert talk("print('x' * 300000)") == b"x" * 300000 + b"\n"


def test_a_long_script_is_sent_whole(talk: Talk) -> None:
    assert talk("# " + "x" * 500_000 + "\nprint('end')") == b"end\n"


def test_sudo_without_password(talk: Talk) -> None:
    assert talk(mode="nopasswd") == b"out\n"


def test_a_password_is_not_fed_to_anybody_when_sudo_does_not_ask(talk: Talk) -> None:
    assert talk(SHOW_STDIN, mode="nopasswd", password="right horse") == b"stdin: \n"  # noqa: S106


@pytest.mark.parametrize("mode", ["asks", "rs"])
def test_the_password_is_given_at_the_prompt(talk: Talk, mode: str) -> None:
    assert talk(SHOW_STDIN, mode=mode, password="right horse") == b"stdin: \n"  # noqa: S106


@pytest.mark.parametrize("mode", ["asks", "rs"])
def test_a_wrong_password_is_given_once_and_reported(talk: Talk, mode: str) -> None:
    with pytest.raises(NodeFailure, match=r"^sudo does not accept the password$"):
        talk(mode=mode, password="wrong horse")  # noqa: S106


@pytest.mark.parametrize("mode", ["asks", "rs"])
def test_sudo_that_asks_when_nobody_gave_a_password(talk: Talk, mode: str) -> None:
    with pytest.raises(NodeFailure, match="sudo requires a password: use -K"):
        talk(mode=mode)


def test_sudo_that_refuses_the_user(talk: Talk) -> None:
    with pytest.raises(NodeFailure, match="does not let this user become root: alice is not in the sudoers file"):
        talk(mode="forbidden")
    with pytest.raises(NodeFailure, match="does not let this user become root"):
        talk(mode="rs-forbidden")


def test_sudo_that_requires_a_terminal(talk: Talk) -> None:
    with pytest.raises(NodeFailure, match="requiretty"):
        talk(mode="tty")


def test_a_node_without_sudo(talk: Talk) -> None:
    probe = program(None, sudo=True, ask=False, limit_s=9)
    shell = Program(shlex.join(["/bin/sh", "-c", f"PATH=/nonexistent; {probe.command}"]), probe.token, sudo=True)
    with pytest.raises(NodeFailure, match="sudo is not installed on the node"):
        talk(probe=shell)


def test_the_probe_is_given_more_time_than_usual() -> None:
    assert [probe_arguments(limit_s)[2:] for limit_s in (20.0, 120.0, 299.9)] == [(), (), ("294",)]


def test_the_password_is_in_no_command_line() -> None:
    probe = program(None, sudo=True, ask=True, limit_s=9)
    assert "-S" in probe.command
    assert probe.token in probe.command
    assert probe.token != program(None, sudo=True, ask=True, limit_s=9).token


def test_python_is_looked_for_and_missed(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(python=None) == b"out\n"
    with pytest.raises(
        NodeFailure, match="/nonexistent/python3 does not exist on the node: correct ansible_python_interpreter"
    ):
        talk(python="/nonexistent/python3")
    monkeypatch.setattr("gpunode.fleet.session.PYTHONS", ("/nonexistent/a", "/nonexistent/b"))
    with pytest.raises(NodeFailure, match=r"^no Python 3 on the node: install it"):
        talk(python=None)


@pytest.mark.parametrize("name", ["/opt/my python", "/opt/$(id)", '/opt/"x', "/opt/`id`", "/opt/\\x", "/opt/'x"])
def test_odd_paths_of_an_interpreter_are_one_word(talk: Talk, tmp_path: Path, name: str) -> None:
    path = tmp_path / name.removeprefix("/opt/")
    path.write_text("#!/bin/sh\ncat >/dev/null; echo it ran\n")
    path.chmod(0o755)
    assert talk(python=str(path)) == b"it ran\n"


def test_the_end_of_the_connection_before_the_start(talk: Talk) -> None:
    with pytest.raises(NodeFailure, match="could not start, exit code 3: no luck"):
        talk(probe=Program("/bin/sh -c 'echo no luck >&2; exit 3'", "gpunode-x", sudo=False))


def test_a_probe_that_fails_gives_its_last_line(talk: Talk) -> None:
    with pytest.raises(NodeFailure, match=r"exit code 1: ValueError: odd$"):
        talk("raise ValueError('odd')")


def test_the_nodes_own_limit_ends_a_probe_that_hangs(talk: Talk) -> None:
    probe = program(sys.executable, sudo=False, ask=False, limit_s=1)
    with pytest.raises(NodeFailure, match="was stopped on the node"):
        talk("import time; time.sleep(600)", probe=probe, limit_s=30)


def test_a_node_that_reports_nothing_ends_at_the_deadline(talk: Talk) -> None:
    started = time.monotonic()
    with pytest.raises(NodeFailure, match="no answer within the time limit"):
        talk(probe=Program("sleep 600", "gpunode-x", sudo=False), limit_s=0.5)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_is_cut_off(talk: Talk, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.session.MAX_STDOUT", 1 << 20)
    with pytest.raises(NodeFailure, match="more than 1 MiB"):
        talk(f"import sys\nwhile True: sys.{stream}.write('x' * 10000)")


def test_no_process_is_left_by_an_abort() -> None:
    session = LocalSession(["/bin/sh", "-c", "sleep 600 & sleep 600"])
    time.sleep(0.2)
    group = session._process.pid
    session.close()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the group lives on")


@pytest.mark.parametrize("size", [(1 << 18) + 2052, (1 << 24) + 4, (1 << 31) + 4, (1 << 32) - 4])
def test_a_packet_larger_than_sshs_is_refused_before_it_is_read(size: int) -> None:
    local_end, remote_end = socket.socketpair()
    with local_end, remote_end:
        remote_end.sendall(b"SSH-2.0-node\r\n" + struct.pack(">I", size) + b"\x04\x14\x00\x00" + bytes(1 << 16))
        transport = paramiko.Transport(local_end)
        _limit_packets(transport)
        try:
            with pytest.raises(paramiko.SSHException, match="bytes announced"):
                transport.start_client(timeout=20)
        finally:
            transport.close()
