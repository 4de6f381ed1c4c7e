"""Never weaker than ssh: each case is put to the real ssh client and to gpunode, over one real sshd on the loopback."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fleet_sshd import Server, make_key

from gpunode.fleet import Collected, Target, collect
from gpunode.fleet.ssh_config import resolve

Start = Callable[..., Server]
pytest_plugins = ("fleet_fixtures",)
pytestmark = pytest.mark.usefixtures("small_probe")


def rsa_key(path: Path, bits: int = 2048) -> None:
    """An RSA key pair without passphrase."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-b", str(bits), "-N", "", "-f", str(path)], check=True, timeout=60
    )


def public(path: Path) -> str:
    """Type and key of a key pair, as known_hosts has them."""
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


class Both:
    """The same configuration file for ssh and for gpunode."""

    def __init__(self, server: Server, *lines: str) -> None:
        self.server = server
        self.config = server.folder / "ssh_config"
        text = (
            *lines,
            "HostName 127.0.0.1",
            f"Port {server.port}",
            f"IdentityFile {server.folder}/identity",
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f"UserKnownHostsFile {server.folder}/known_hosts",
            "GlobalKnownHostsFile /dev/null",
            "UpdateHostKeys no",
        )
        self.config.write_text("Host node\n" + "\n".join(f"  {line}" for line in text) + "\n")

    def known(self, *lines: str) -> None:
        """What known_hosts holds; ``HOST`` stands for the server's name there, ``KEY`` for its key."""
        name = f"[127.0.0.1]:{self.server.port}"
        text = "\n".join(lines).replace("HOST", name).replace("KEY", self.server.host_key)
        (self.server.folder / "known_hosts").write_text(text + "\n")

    def ssh(self) -> bool:
        """Whether ssh lets its user in; it writes into a copy of known_hosts."""
        known = self.server.folder / "known_hosts"
        before = known.read_bytes()
        argv = ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", "node", "true"]
        env = {**os.environ, "HOME": str(self.server.folder)}
        done = subprocess.run(argv, check=False, capture_output=True, timeout=30, env=env, stdin=subprocess.DEVNULL)
        known.write_bytes(before)
        return done.returncode == 0

    def gpunode(self) -> Collected:
        """What gpunode gets."""
        settings = resolve("node", [("the test", ["-F", str(self.config)])])
        (collected,) = collect([Target("node", "ssh", ssh=settings, become=False)], timeout_s=20)
        return collected


def compare(both: Both, *, ssh: bool, gpunode: str | None) -> Collected:
    """Both answers; ``gpunode`` is a pattern of its refusal, None for a node that is let in."""
    collected = both.gpunode()
    assert both.ssh() is ssh
    if gpunode is None:
        assert collected.reason is None
    else:
        assert re.search(gpunode, str(collected.reason)), collected.reason
    # The one promise: where ssh refuses, gpunode refuses.
    assert ssh or collected.answer is None
    return collected


@pytest.fixture
def both(start_sshd: Start) -> Both:
    """A server with an ed25519 key, known by it."""
    return Both(start_sshd())


def test_a_known_key(both: Both) -> None:
    both.known("HOST KEY")
    compare(both, ssh=True, gpunode=None)


def test_an_unknown_key(both: Both) -> None:
    both.known("")
    compare(both, ssh=False, gpunode="unknown host key")


def test_a_changed_key(both: Both, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    both.known(f"HOST {public(tmp_path / 'other')}")
    compare(both, ssh=False, gpunode="has changed")


def test_a_key_of_another_type_alone_is_a_changed_one(both: Both, tmp_path: Path) -> None:
    rsa_key(tmp_path / "other")
    both.known(f"HOST {public(tmp_path / 'other')}")
    compare(both, ssh=False, gpunode="has changed")


def test_two_listed_keys_of_one_type_are_both_good(both: Both, tmp_path: Path) -> None:
    """As after a rotation, or for several machines behind one name."""
    make_key(tmp_path / "other")
    for lines in (
        (f"HOST {public(tmp_path / 'other')}", "HOST KEY"),
        ("HOST KEY", f"HOST {public(tmp_path / 'other')}"),
    ):
        both.known(*lines)
        compare(both, ssh=True, gpunode=None)


def test_a_rotated_key_beside_the_old_one_of_another_type(start_sshd: Start, tmp_path: Path) -> None:
    rsa_key(tmp_path / "old")
    both = Both(start_sshd(f"HostKey {tmp_path}/old"))
    both.known(f"HOST {public(tmp_path / 'old')}")
    compare(both, ssh=True, gpunode=None)


@pytest.mark.parametrize("strict", ["ask", "accept-new", "no"])
@pytest.mark.parametrize(
    "lines",
    [
        ("@revoked HOST KEY", "HOST KEY"),
        ("HOST KEY", "@revoked HOST KEY"),
        ("HOST KEY", "@revoked * KEY"),
        ("@revoked [127.0.0.*]:* KEY", "HOST KEY"),
        ("@revoked HOST KEY",),
    ],
)
def test_a_revoked_key_is_refused_whichever_line_has_it(start_sshd: Start, strict: str, lines: tuple[str, ...]) -> None:
    both = Both(start_sshd(), f"StrictHostKeyChecking {strict}")
    both.known(*lines)
    # Where it does not check at all, ssh warns and goes on without a password.
    compare(both, ssh=strict == "no", gpunode="is revoked")


def test_a_key_revoked_under_the_bare_name_or_its_address_is_refused_too(both: Both) -> None:
    """Stricter than ssh, which looks at no name without the port where one with it has the key."""
    both.known("HOST KEY", "@revoked 127.0.0.1 KEY")
    compare(both, ssh=True, gpunode="is revoked")


def test_a_key_revoked_under_a_hashed_name(both: Both) -> None:
    both.known("HOST KEY")
    known = both.server.folder / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, timeout=30, capture_output=True)
    hashed = known.read_text().strip()
    known.write_text(f"{hashed}\n@revoked {hashed}\n")
    compare(both, ssh=False, gpunode="is revoked")


def test_a_key_revoked_under_the_alias(start_sshd: Start) -> None:
    both = Both(start_sshd(), "HostKeyAlias rack-7")
    both.known("rack-7 KEY")
    compare(both, ssh=True, gpunode=None)
    both.known("rack-7 KEY", "@revoked rack-7 KEY")
    compare(both, ssh=False, gpunode="is revoked")


def test_a_revoked_key_beside_a_good_one(both: Both, tmp_path: Path) -> None:
    make_key(tmp_path / "old")
    both.known("HOST KEY", f"@revoked HOST {public(tmp_path / 'old')}")
    compare(both, ssh=True, gpunode=None)


def test_a_host_behind_an_authority(start_sshd: Start, tmp_path: Path) -> None:
    make_key(tmp_path / "ca")
    both = Both(start_sshd())
    both.known(f"@cert-authority HOST {public(tmp_path / 'ca')}")
    compare(both, ssh=False, gpunode="certificate authority")
    both = Both(both.server, "StrictHostKeyChecking no")
    assert both.gpunode().answer is None


@pytest.mark.parametrize(("demanded", "good"), [(2048, True), (3072, False)])
def test_short_rsa_host_keys(start_sshd: Start, tmp_path: Path, demanded: int, good: bool) -> None:
    rsa_key(tmp_path / "rsa")
    server = start_sshd(f"HostKey {tmp_path}/rsa", "HostKeyAlgorithms rsa-sha2-512,rsa-sha2-256")
    both = Both(server, f"RequiredRSASize {demanded}")
    both.known(f"HOST {public(tmp_path / 'rsa')}")
    compare(both, ssh=good, gpunode=None if good else "RequiredRSASize")


@pytest.mark.parametrize(("demanded", "good"), [(2048, True), (3072, False)])
def test_short_rsa_keys_of_the_user(start_sshd: Start, demanded: int, good: bool) -> None:
    server = start_sshd()
    for name in ("identity", "identity.pub"):
        (server.folder / name).unlink()
    rsa_key(server.folder / "identity")
    shutil.copy(server.folder / "identity.pub", server.folder / "authorized_keys")
    both = Both(server, f"RequiredRSASize {demanded}")
    both.known("HOST KEY")
    compare(both, ssh=good, gpunode=None if good else "RequiredRSASize")


@pytest.mark.parametrize(
    "server",
    [
        "Ciphers 3des-cbc",
        "Ciphers aes256-cbc",
        "MACs hmac-md5",
        "MACs hmac-sha1-96",
        "KexAlgorithms diffie-hellman-group14-sha1",
        "KexAlgorithms diffie-hellman-group1-sha1",
    ],
)
def test_what_ssh_does_not_speak_by_default(start_sshd: Start, server: str) -> None:
    lines = [server]
    if server.startswith("MACs"):
        lines.append("Ciphers aes256-ctr")
    both = Both(start_sshd(*lines))
    both.known("HOST KEY")
    compare(both, ssh=False, gpunode="failed")


@pytest.mark.parametrize("algorithms", ["Ciphers -aes*", "MACs hmac-sha2-512-etm@openssh.com"])
def test_what_the_users_settings_leave_out(start_sshd: Start, algorithms: str) -> None:
    both = Both(start_sshd("Ciphers aes128-ctr", "MACs hmac-sha2-256"), algorithms)
    both.known("HOST KEY")
    compare(both, ssh=False, gpunode="failed|known here")


def test_a_weak_cipher_that_the_user_asks_for(start_sshd: Start) -> None:
    both = Both(start_sshd("Ciphers aes256-cbc"), "Ciphers aes256-cbc")
    both.known("HOST KEY")
    compare(both, ssh=True, gpunode=None)


def test_a_sha1_signature_of_the_host(start_sshd: Start, tmp_path: Path) -> None:
    rsa_key(tmp_path / "rsa")
    both = Both(start_sshd(f"HostKey {tmp_path}/rsa", "HostKeyAlgorithms ssh-rsa"))
    both.known(f"HOST {public(tmp_path / 'rsa')}")
    compare(both, ssh=False, gpunode="failed")


def test_an_address_that_is_listed_with_another_key(start_sshd: Start, tmp_path: Path) -> None:
    """ssh leaves CheckHostIP out on the loopback, so it lets its user in here."""
    make_key(tmp_path / "other")
    server = start_sshd()
    both = Both(server, "CheckHostIP yes", "StrictHostKeyChecking yes")
    both.config.write_text(
        both.config.read_text().replace("HostName 127.0.0.1", "HostName localhost\n  AddressFamily inet")
    )
    both.known(f"[localhost]:{server.port} KEY", "HOST KEY")
    compare(both, ssh=True, gpunode=None)
    both.known(f"[localhost]:{server.port} KEY", f"HOST {public(tmp_path / 'other')}")
    compare(both, ssh=True, gpunode="CheckHostIP")


@pytest.mark.parametrize("strict", ["accept-new", "no"])
def test_a_node_that_is_accepted_unchecked_is_marked(start_sshd: Start, strict: str) -> None:
    both = Both(start_sshd(), f"StrictHostKeyChecking {strict}")
    both.known("")
    collected = compare(both, ssh=True, gpunode=None)
    assert "ssh-ed25519 SHA256:" in str(collected.unchecked)
    assert strict in str(collected.unchecked)
    both.known("HOST KEY")
    assert compare(both, ssh=True, gpunode=None).unchecked is None
