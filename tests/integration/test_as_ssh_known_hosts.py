"""Never weaker than ssh, whatever known_hosts contains: the real ssh client and gpunode judge generated files."""

import base64
import hashlib
import hmac
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from fleet_sshd import Server, make_key

from gpunode.fleet.host_keys import HostKeyPolicy, HostKeys
from gpunode.fleet.session import NodeFailure
from gpunode.fleet.ssh_config import resolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from effort import effort

pytest_plugins = ("fleet_fixtures",)

# Characters that one reader or another takes for a blank or for the end of a line.
BREAKS = ["\v", "\f", "\r", "\x1c", "\x1d", "\x1e", "\x85", "\xa0", "\u2028", "\u2029", "\u3000", "\x00"]
BYTES = [text.encode() for text in BREAKS] + [b"\x85", b"\xa0"]
BLANKS = [b" ", b"\t", b"  \t", *BYTES]
SETTINGS = [(strict, *alias) for strict in ("yes", "accept-new", "no") for alias in ((), ("HostKeyAlias rack-7",))]


class Grammar:
    """Lines of known_hosts for one server: its own key, another key, and every liberty of a line."""

    def __init__(self, name: str, key: str, other: str) -> None:
        self.name, self.bare = name.encode(), name.partition("]")[0].strip("[").encode()
        self.type, self.key = key.encode().split()
        self.other = other.encode().split()[1]

    def hosts(self) -> list[bytes]:
        """Fields that list the server, do not, or do so in one reading only."""
        name, salt = self.name, b"s" * 20
        digest = base64.b64encode(hmac.new(salt, name, hashlib.sha1).digest())
        hashed = b"|1|" + base64.b64encode(salt) + b"|" + digest
        return [
            name,
            name.upper(),
            b"other," + name,
            name + b",other",
            b"," + name,
            name + b",",
            b"*",
            name.replace(b"1", b"?"),
            name[:-1] + b"*",
            b"*,!" + name,
            b"!" + name + b"," + name,
            b"!other," + name,
            b"!other",
            self.bare,
            hashed,
            hashed + b"," + name,
            name + b"," + hashed,
            b"|1|" + base64.b64encode(b"t" * 20) + b"|" + digest,
            b"|1|AAAA|" + digest,
            hashed.rstrip(b"="),
            hashed + b"|",
            b"a" * 70_000 + b"," + name,
            b"*" * 1_100 + b"," + name,
            name + b"," + b"*" * 1_100,
            *(b"other" + blank + name for blank in BYTES),
            *(b"other," + blank + name for blank in BYTES),
            name.replace(b"1", "\uff11".encode()),
            b'"' + name + b'"',
            name + b"\\",
        ]

    def types(self) -> list[bytes]:
        """Names of the key's type."""
        cert = self.type + b"-cert-v01@openssh.com"
        return [self.type, self.type.upper(), b"ED25519", b"ssh-rsa", b"sk-" + self.type, cert, b"x", b"256", b""]

    def keys(self) -> list[bytes]:
        """The key, and what one base64 decoder or another takes for it."""
        key, blob = self.key, base64.b64decode(self.key)
        return [
            key,
            key + b"=",
            key + b"==",
            key + b"====",
            key[:30] + b"=" + key[30:],
            key[:30] + b"\r" + key[30:],
            key[:30] + b" " + key[30:],
            key[:30] + b"-_" + key[30:],
            key[:30] + b"*" + key[30:],
            key.replace(b"+", b"-").replace(b"/", b"_"),
            b'"' + key + b'"',
            key + b"*",
            key + b"#",
            key[:-4],
            key + b"A" * 70_000,
            base64.b64encode(blob + b"x"),
            base64.b64encode(blob[4:]),
            base64.b64encode(b"\0\0\0\x07ssh-rsa" + blob[15:]),
            *(key + blank for blank in BYTES),
        ]

    def markers(self) -> list[bytes]:
        """Nothing, the two markers, and what resembles them."""
        known = [b"@revoked", b"@cert-authority", b"@REVOKED", b"@revoke", b"@", b"@unknown", b"@revoked,@revoked"]
        return [b"", *known, b"@revoked @revoked", b"@revoked\t", b"@cert-authority @revoked", b"\\@revoked", b"#"]

    def line(self, **parts: bytes) -> bytes:
        """One line of the form of sshd(8), with other parts."""
        marker = parts.get("marker", b"")
        blank = parts.get("blank", b" ")
        fields = [parts.get("hosts", self.name), parts.get("type", self.type), parts.get("key", self.key)]
        if parts.get("other"):
            fields[2] = self.other
        return parts.get("lead", b"") + blank.join(([marker] if marker else []) + fields) + parts.get("tail", b"")

    def variants(self) -> Iterator[bytes]:
        """One liberty at a time."""
        for hosts in self.hosts():
            yield self.line(hosts=hosts)
            yield self.line(hosts=hosts, marker=b"@revoked") + b"\n" + self.line()
        for kind in self.types():
            yield self.line(type=kind)
        for key in self.keys():
            yield self.line(key=key)
            yield self.line(key=key, marker=b"@revoked") + b"\n" + self.line()
        for marker in self.markers():
            yield self.line(marker=marker)
            yield self.line(marker=marker) + b"\n" + self.line()
        for blank in BLANKS:
            yield self.line(blank=blank)
            yield self.line(blank=blank, marker=b"@revoked") + b"\n" + self.line()
            yield self.line(lead=blank)
            yield self.line(lead=blank + b"#")
            yield b"# comment" + blank + self.line()
            yield self.line(other=b"1", tail=b" comment" + blank + self.line())
            yield self.line(other=b"1") + blank + self.line()
            yield self.line(tail=b" comment" + blank + self.line(marker=b"@revoked"))
            yield self.line(tail=blank + b"comment")
        yield b"\xef\xbb\xbf" + self.line()
        yield self.line(tail=b" \xff\xfe")
        yield self.line(tail=b" " + b"x" * 70_000 + b" " + self.line(marker=b"@revoked"))
        yield b"x" * 70_000 + b" " + self.line()
        yield self.line(tail=b"\r\n" + self.line(marker=b"@revoked"))
        yield self.line(other=b"1") + b"\n" + self.line(hosts=self.bare)
        yield self.line(hosts=self.bare, other=b"1")
        yield self.line(hosts=self.bare, marker=b"@revoked")

    def mixed(self, chance: random.Random) -> bytes:
        """Several liberties at once, on several lines."""
        lines = []
        for _ in range(chance.randint(1, 3)):
            parts = {
                "hosts": chance.choice([self.name, chance.choice(self.hosts())]),
                "type": chance.choice([self.type, self.type, chance.choice(self.types())]),
                "key": chance.choice([self.key, chance.choice(self.keys())]),
                "marker": chance.choice([b"", b"@revoked", chance.choice(self.markers())]),
                "blank": chance.choice([b" ", b" ", chance.choice(BLANKS)]),
                "lead": chance.choice([b"", b"", chance.choice(BLANKS)]),
                "tail": chance.choice([b"", b" comment" + chance.choice(BLANKS) + self.line()]),
                "other": chance.choice([b"", b"", b"1"]),
            }
            lines.append(self.line(**parts))
        return chance.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\r"]).join(lines)


class Judges:
    """The real ssh client and gpunode, with one configuration."""

    def __init__(self, server: Server, strict: str, *more: str) -> None:
        self.server = server
        self.known, self.config = server.folder / "known", server.folder / f"config-{strict}-{len(more)}"
        lines = [
            f"StrictHostKeyChecking {strict}",
            *more,
            "HostName 127.0.0.1",
            f"Port {server.port}",
            "PreferredAuthentications none",
            "KexAlgorithms curve25519-sha256",
            "IdentityAgent none",
            f"UserKnownHostsFile {self.known}",
            "GlobalKnownHostsFile /dev/null",
            "UpdateHostKeys no",
        ]
        self.config.write_text("Host node\n" + "\n".join(lines) + "\n")
        self.settings = resolve("node", [("the test", ["-F", str(self.config)])])
        kind, key = server.host_key.split()
        self.key = paramiko.PKey.from_type_string(kind, base64.b64decode(key))

    def ssh(self, text: bytes) -> bool:
        """Whether ssh accepts the server's key and goes on to a login, which is refused; it may add it to its file."""
        self.known.write_bytes(text)
        done = subprocess.run(
            ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", "node", "true"],
            check=False,
            capture_output=True,
            timeout=30,
            env={**os.environ, "HOME": str(self.server.folder)},
            stdin=subprocess.DEVNULL,
        )
        accepted, refused = b"Permission denied" in done.stderr, b"Host key verification failed" in done.stderr
        assert accepted is not refused, done.stderr
        return accepted

    def gpunode(self, text: bytes) -> bool:
        """Whether gpunode accepts it."""
        self.known.write_bytes(text)
        try:
            keys = HostKeys(self.settings, "127.0.0.1")
            HostKeyPolicy(self.settings, keys).missing_host_key(paramiko.SSHClient(), "node", self.key)
        except NodeFailure:
            return False
        return True


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", SETTINGS, ids=" ".join)
def test_no_file_makes_gpunode_accept_what_ssh_refuses(
    start_sshd: Callable[..., Server], tmp_path: Path, setting: tuple[str, ...]
) -> None:
    server = start_sshd()
    make_key(tmp_path / "other")
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    judges = Judges(server, *setting)
    grammar = Grammar("rack-7" if len(setting) > 1 else f"[127.0.0.1]:{server.port}", server.host_key, other)
    chance = random.Random(" ".join(setting))  # noqa: S311
    files = [*grammar.variants()]
    files = chance.sample(files, effort(10, len(files))) + [grammar.mixed(chance) for _ in range(effort(4, 100))]
    answers = [(text, judges.ssh(text + b"\n"), judges.gpunode(text + b"\n")) for text in files]
    weaker = [text[:300] for text, ssh, gpunode in answers if gpunode and not ssh]
    accepted = sum(ssh for _, ssh, _ in answers)
    both = sum(ssh and gpunode for _, ssh, gpunode in answers)
    print(f"\n{setting}: {len(files)} files, ssh accepts {accepted}, gpunode {both} of them, weaker: {len(weaker)}")
    assert 0 < both <= accepted
    assert weaker == []
