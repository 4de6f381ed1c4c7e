"""Collecting over a real sshd: what a node can do wrong, each with its one line, and nothing that hangs."""

import gc
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_sshd import Server, free_port, make_key

from gpunode.errors import UsageError
from gpunode.fleet import Collected, Target, collect
from gpunode.fleet.ssh_config import SshSettings

Start = Callable[..., Server]
pytest_plugins = ("fleet_fixtures",)
pytestmark = pytest.mark.usefixtures("small_probe")


def one(target: Target, timeout_s: float = 20.0) -> Collected:
    """The only result for one target."""
    (collected,) = collect([target], timeout_s=timeout_s)
    assert (collected.answer is None) != (collected.reason is None)
    if collected.reason is not None:
        assert "\n" not in collected.reason
    return collected


def test_a_bundle_comes_from_a_node(start_sshd: Start) -> None:
    collected = one(start_sshd().target("gpu1"))
    assert collected.reason is None
    assert collected.answer is not None
    assert (collected.host, collected.answer.bundle().host) == ("gpu1", "gpu1")
    assert replace(collected.answer, host=None).bundle().host == socket.gethostname()


def test_the_real_probe_comes_through(start_sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    collected = one(start_sshd().target(), timeout_s=60)
    assert collected.reason is None
    assert collected.answer is not None
    assert collected.answer.bundle().commands


def test_noise_of_the_login_shell_before_the_probe_is_ignored(start_sshd: Start) -> None:
    server = start_sshd('ForceCommand echo "{welcome}"; echo warning >&2; eval "$SSH_ORIGINAL_COMMAND"')
    assert one(server.target()).reason is None


def test_an_unknown_host_key_is_refused_and_never_stored(start_sshd: Start) -> None:
    server = start_sshd()
    known = server.folder / "known_hosts"
    known.write_text("")
    reason = one(server.target()).reason
    assert reason is not None
    assert reason.startswith("unknown host key: ssh-ed25519 SHA256:")
    assert f"ssh -p {server.port}" in reason
    assert known.read_text() == ""


def test_a_changed_host_key_is_refused_also_without_strict_checking(start_sshd: Start) -> None:
    server, other = start_sshd(), start_sshd()
    known = server.folder / "known_hosts"
    known.write_text(f"# a comment\n[127.0.0.1]:{server.port} {other.host_key}\n")
    for strict in ("yes", "ask", "accept-new", "no"):
        reason = one(server.target(strict_host_key_checking=strict)).reason
        assert reason is not None
        assert reason.startswith("the host key has changed: ssh-ed25519 SHA256:")
        assert f"{known} line 2" in reason
        assert f"ssh-keygen -f {known} -R '[127.0.0.1]:{server.port}'" in reason


def test_a_revoked_host_key_is_refused_also_without_strict_checking(start_sshd: Start) -> None:
    server = start_sshd()
    with (server.folder / "known_hosts").open("a") as file:
        file.write(f"@revoked * {server.host_key}\n")
    reason = one(server.target(strict_host_key_checking="no")).reason
    assert reason is not None
    assert "is revoked" in reason


def test_a_host_known_only_by_an_authority_is_reported(start_sshd: Start) -> None:
    server = start_sshd()
    (server.folder / "known_hosts").write_text(f"@cert-authority * {server.host_key}\n")
    reason = one(server.target()).reason
    assert reason is not None
    assert "certificate authority" in reason


@pytest.mark.parametrize("strict", ["no", "accept-new"])
def test_an_unknown_key_is_accepted_with_a_warning_if_the_settings_allow_it(
    start_sshd: Start, strict: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_sshd()
    (server.folder / "known_hosts").write_text("")
    assert one(server.target(strict_host_key_checking=strict)).reason is None
    assert f"StrictHostKeyChecking={strict}" in caplog.text
    assert (server.folder / "known_hosts").read_text() == ""


def test_hashed_names_and_aliases_are_found(start_sshd: Start) -> None:
    server = start_sshd()
    known = server.folder / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, timeout=30, capture_output=True)
    assert known.read_text().startswith("|1|")
    assert one(server.target()).reason is None
    known.write_text(f"rack-7 {server.host_key}\n")
    assert one(server.target(host_key_alias="rack-7")).reason is None


def test_the_type_of_key_that_is_known_is_asked_for(start_sshd: Start) -> None:
    server = start_sshd()
    rsa = server.folder / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(rsa)], check=True, timeout=60)
    both = start_sshd(f"HostKey {rsa}")
    key = " ".join(Path(f"{rsa}.pub").read_text().split()[:2])
    (both.folder / "known_hosts").write_text(f"[127.0.0.1]:{both.port} {key}\n")
    assert one(both.target()).reason is None


def test_a_wrong_key_names_the_user_and_what_was_tried(start_sshd: Start, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    reason = one(start_sshd().target(identity_files=(str(tmp_path / "other"),))).reason
    assert reason is not None
    assert reason.startswith("login refused for user ")
    assert str(tmp_path / "other") in reason


def test_a_missing_key_is_reported(start_sshd: Start, tmp_path: Path) -> None:
    reason = one(start_sshd().target(identity_files=(str(tmp_path / "absent"),))).reason
    assert reason is not None
    assert "no key or password to try" in reason


def test_a_key_with_a_passphrase_is_used_with_it_and_named_without(start_sshd: Start) -> None:
    server = start_sshd()
    key = server.folder / "identity"
    words = "a passphrase of the test"
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", words, "-f", str(key)]
    subprocess.run(change, check=True, timeout=30, capture_output=True)
    reason = one(server.target()).reason
    assert reason is not None
    assert f"{key} needs a passphrase: add it to ssh-agent" in reason
    assert one(replace(server.target(), key_passphrase=words)).reason is None


def test_the_agents_key_is_used(start_sshd: Start, tmp_path: Path) -> None:
    server = start_sshd()
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(tmp_path / "agent")], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            if (tmp_path / "agent").exists():
                break
            time.sleep(0.02)
        env = {"SSH_AUTH_SOCK": str(tmp_path / "agent"), "PATH": "/usr/bin:/bin"}
        add = ["ssh-add", "-q", str(server.folder / "identity")]
        subprocess.run(add, check=True, timeout=30, env=env, capture_output=True)
        (server.folder / "identity").unlink()
        node = server.target(identity_files=(), identity_agent=str(tmp_path / "agent"))
        assert "no key or password" in str(one(node).reason)
        assert node.ssh is not None
        assert one(replace(node, ssh=replace(node.ssh, identities_only=False))).reason is None
    finally:
        agent.terminate()
        agent.wait(10)


def test_a_node_without_python_is_reported(start_sshd: Start) -> None:
    target = replace(start_sshd().target(), python="/nonexistent/python3")
    assert one(target).reason == "/nonexistent/python3 does not exist on the node: correct ansible_python_interpreter"


def test_an_answer_that_is_not_a_bundle_is_reported(start_sshd: Start) -> None:
    server = start_sshd()
    fake = server.folder / "python"
    fake.write_text("#!/bin/sh\ncat >/dev/null\necho hello\n")
    fake.chmod(0o755)
    answer = one(replace(server.target(), python=str(fake))).answer
    assert answer is not None
    with pytest.raises(UsageError, match=r"the node's answer: not a gpunode\.bundle/1 bundle"):
        answer.bundle()


def test_a_failing_probe_gives_its_last_line(start_sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: "raise SystemExit('too old for this')")
    assert one(start_sshd().target()).reason == "the probe ended with exit code 1: too old for this"


def test_a_command_that_hangs_ends_at_the_limit(start_sshd: Start) -> None:
    collected = one(start_sshd("ForceCommand sleep 40").target(), timeout_s=1.5)
    assert str(collected.reason).startswith("no answer within 1.5 s, login succeeded, the probe did not start; ")
    assert 1.4 < (collected.seconds or 0) < 4


def test_a_probe_that_hangs_is_stopped_on_the_node_itself(start_sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = "gpunode-test-hanging-probe"
    script = f"import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 300; true # {mark}'])\n"
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: script)
    collected = one(start_sshd().target(), timeout_s=2.0)
    assert "within" in str(collected.reason)
    end = time.monotonic() + 10
    while time.monotonic() < end and mark in _processes():
        time.sleep(0.1)
    assert mark not in _processes()


@pytest.mark.parametrize("where", ["", " >&2"])
def test_a_flood_ends_at_the_limit_of_size(start_sshd: Start, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.session.MAX_STDOUT", 1 << 20)
    collected = one(start_sshd(f"ForceCommand yes{where}").target(), timeout_s=30)
    assert (collected.seconds or 99) < 20
    assert "more than" in str(collected.reason) or "prints too much" in str(collected.reason)


def test_a_flood_after_the_start_ends_too(start_sshd: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpunode.fleet.session.MAX_STDOUT", 1 << 20)
    monkeypatch.setattr("gpunode.fleet.asking.program_text", lambda _: "while True: print('x' * 4000)")
    collected = one(start_sshd().target(), timeout_s=30)
    assert collected.reason == "the node sent more than 1 MiB"


def test_a_refused_port_is_reported() -> None:
    port = free_port()
    target = Target("gone", "ssh", ssh=_settings(port))
    assert one(target).reason == f"unreachable: 127.0.0.1:{port}: Connection refused"


def test_a_name_that_cannot_be_resolved_is_reported() -> None:
    target = Target("gone", "ssh", ssh=replace(_settings(22), hostname="gpu1.invalid"))
    assert one(target).reason == "unreachable: the name gpu1.invalid cannot be resolved"


def test_a_silent_port_ends_at_the_connect_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        settings = replace(_settings(port), connect_timeout_s=1.0)
        collected = one(Target("silent", "ssh", ssh=settings), timeout_s=20)
    assert (collected.seconds or 99) < 5
    assert "sends no SSH greeting" in str(collected.reason)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (b"", "unreachable: 127.0.0.1:{port} accepts the connection and closes it without an SSH greeting"),
        (
            b"220 mail ESMTP\r\n" * 200,
            'the SSH connection to 127.0.0.1:{port} failed: Indecipherable protocol version "220',
        ),
    ],
    ids=["closes", "mail"],
)
def test_a_port_without_ssh_is_reported_at_once(output: bytes, reason: str) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]

        def serve() -> None:
            sock, _ = listening.accept()
            with sock, suppress(OSError):
                sock.sendall(output)
                sock.shutdown(socket.SHUT_WR)
                sock.recv(4096)

        threading.Thread(target=serve, daemon=True).start()
        collected = one(Target("node", "ssh", ssh=_settings(port)), timeout_s=20)
    assert (collected.seconds or 99) < 5
    assert str(collected.reason).startswith(reason.format(port=port))


@pytest.mark.parametrize("bytes_let_through", [0, 30, 1200, 2000])
def test_a_connection_that_freezes_midway_ends_at_the_limit(start_sshd: Start, bytes_let_through: int) -> None:
    server = start_sshd()
    with _freezing_proxy(server.port, bytes_let_through) as port:
        (server.folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {server.host_key}\n")
        collected = one(server.target(port=port), timeout_s=2.0)
    assert collected.reason is not None
    assert (collected.seconds or 99) < 6


def test_a_lost_connection_is_reported(start_sshd: Start) -> None:
    server = start_sshd("ForceCommand kill -9 $PPID; sleep 5")
    assert "connection was lost" in str(one(server.target()).reason)


def test_a_jump_host_is_passed_with_the_same_rules(start_sshd: Start) -> None:
    jump, node = start_sshd(), start_sshd()
    assert one(node.target(jumps=(jump.settings,))).reason is None
    log = (jump.folder / "log").read_text()
    assert "Accepted publickey" in log
    (jump.folder / "known_hosts").write_text("")
    reason = one(node.target(jumps=(jump.settings,))).reason
    assert reason is not None
    assert reason.startswith("jump host 127.0.0.1: unknown host key")


def test_a_node_behind_a_jump_host_that_is_down_is_named(start_sshd: Start) -> None:
    jump = start_sshd()
    target = Target("gone", "ssh", ssh=replace(_settings(free_port()), jumps=(jump.settings,)))
    assert str(one(target).reason).startswith("unreachable: jump host 127.0.0.1 cannot connect to 127.0.0.1:")


def test_many_nodes_share_one_login_on_the_jump_host(start_sshd: Start) -> None:
    jump, node = start_sshd(), start_sshd()
    targets = [node.target(f"n{number}", jumps=(jump.settings,)) for number in range(8)]
    assert [collected.reason for collected in collect(targets, timeout_s=60)] == [None] * 8
    assert (jump.folder / "log").read_text().count("Accepted publickey") == 1


def test_a_chain_of_jump_hosts_is_passed_in_order(start_sshd: Start) -> None:
    first, second, node = start_sshd(), start_sshd(), start_sshd()
    assert one(node.target(jumps=(first.settings, second.settings))).reason is None
    for hop in (first, second):
        assert "Accepted publickey" in (hop.folder / "log").read_text()


def test_a_proxy_command_carries_the_connection(start_sshd: Start) -> None:
    server = start_sshd()
    if shutil.which("python3") is None:
        pytest.skip("no python3 for the proxy command")
    relay = server.folder / "relay.py"
    relay.write_text(
        "import socket, sys, threading, os\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n    while d := os.read(0, 65536): s.sendall(d)\n    s.shutdown(1)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while d := s.recv(65536): os.write(1, d)\n"
    )
    assert one(server.target(proxy_command=f"python3 {relay} 127.0.0.1 {server.port}")).reason is None
    reason = one(server.target(proxy_command="exit 3")).reason
    assert reason is not None
    assert "failed" in reason or "closes it without" in reason


def test_only_the_algorithms_that_the_user_allows_are_offered(start_sshd: Start) -> None:
    server = start_sshd("Ciphers aes256-ctr")
    assert one(server.target(algorithms=(("ciphers", ("aes256-ctr",)),))).reason is None
    assert one(server.target(algorithms=(("ciphers", ("aes128-ctr",)),))).reason is not None
    assert "known here" in str(one(server.target(algorithms=(("ciphers", ("rot13",)),))).reason)


def test_thirty_nodes_come_together_and_bad_ones_stop_nobody(start_sshd: Start) -> None:
    server, hanging = start_sshd(), start_sshd("ForceCommand sleep 40")
    targets = [server.target(f"good{number}") for number in range(27)]
    targets.insert(0, hanging.target("hangs"))
    targets.insert(1, Target("refused", "ssh", ssh=_settings(free_port())))
    targets.insert(2, replace(server.target("pythonless"), python="/nonexistent"))
    started = time.monotonic()
    results = {collected.host: collected for collected in collect(targets, timeout_s=8.0, parallel=10)}
    assert time.monotonic() - started < 40
    assert len(results) == 30
    assert {name for name, collected in results.items() if collected.answer is None} == {
        "hangs",
        "refused",
        "pythonless",
    }


def test_no_descriptor_or_thread_is_left_by_a_node(start_sshd: Start) -> None:
    server, jump = start_sshd(), start_sshd()
    targets = [
        server.target("good"),
        server.target("behind", jumps=(jump.settings,)),
        server.target("unknown", known_hosts_files=()),
        server.target("refused", identity_files=()),
        server.target("proxied", proxy_command="sleep 300", connect_timeout_s=0.5),
        replace(server.target("pythonless"), python="/nonexistent"),
    ]
    gc.collect()
    gc.disable()
    try:
        before = _held()
        list(collect(targets, timeout_s=20))
        end = time.monotonic() + 5
        while time.monotonic() < end and _held() != before:
            time.sleep(0.05)
        assert _held() == before
    finally:
        gc.enable()


def _held() -> tuple[list[str], int]:
    """What the process's descriptors lead to, by kind, and how many threads it has."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()).partition(":")[0])
    return sorted(links), threading.active_count()


def _settings(port: int) -> SshSettings:
    return SshSettings(alias="127.0.0.1", hostname="127.0.0.1", port=port, user="nobody", identity_agent="none")


def _processes() -> str:
    return subprocess.run(["ps", "-eo", "args"], check=True, timeout=30, capture_output=True, text=True).stdout


@contextmanager
def _freezing_proxy(port: int, limit: int) -> Iterator[int]:
    """A relay to ``port`` that stops passing on the server's bytes after ``limit`` of them, and keeps all open."""
    open_sockets: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket, most: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(4096 if most is None else max(1, min(4096, most - passed))):
                if most is not None and passed >= most:
                    return
                sink.sendall(data)
                passed += len(data)

    def serve() -> None:
        with suppress(OSError):
            client, _ = listener.accept()
            server = socket.create_connection(("127.0.0.1", port))
            open_sockets.extend((client, server))
            threading.Thread(target=pump, args=(client, server, None), daemon=True).start()
            pump(server, client, limit)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        for sock in open_sockets:
            sock.close()
