"""Lines of known_hosts as sshd(8) describes them."""

import base64
import os
import subprocess
from pathlib import Path

import pytest

from gpunode.fleet.host_keys import KnownKey, find, fingerprint, lookup_name
from gpunode.fleet.session import NodeFailure

BLOB = base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + b"k" * 32).decode()


def listed(tmp_path: Path, line: str, name: str) -> list[str | None]:
    """Markers of the keys that one line lists for a name."""
    file = tmp_path / "known_hosts"
    file.write_text(line + "\n")
    return [key.marker for key in find([str(file)], name)]


@pytest.mark.parametrize(
    ("field", "name", "fits"),
    [
        ("gpu1", "gpu1", True),
        ("gpu1", "gpu10", False),
        ("GPU1,10.0.0.1", "gpu1", True),
        ("gpu1,10.0.0.1", "10.0.0.1", True),
        ("[gpu1]:2222", "[gpu1]:2222", True),
        ("[gpu1]:2222", "gpu1", False),
        ("gpu1", "[gpu1]:2222", False),
        ("*.lab,!bad.lab", "good.lab", True),
        ("*.lab,!bad.lab", "bad.lab", False),
        ("gpu?", "gpu1", True),
        ("gpu[12]", "gpu1", False),
        ("[*]:2222", "[gpu7]:2222", True),
    ],
)
def test_names_and_patterns(tmp_path: Path, field: str, name: str, fits: bool) -> None:
    assert listed(tmp_path, f"{field} ssh-ed25519 {BLOB} comment", name) == ([None] if fits else [])


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# gpu1 ssh-ed25519 " + BLOB,
        "gpu1 ssh-ed25519",
        "gpu1 ssh-ed25519 ***",
        "gpu1",
        "|1|x|y ssh-ed25519 " + BLOB,
    ],
)
def test_what_is_no_key_lists_none(tmp_path: Path, line: str) -> None:
    assert listed(tmp_path, line, "gpu1") == []


def test_markers_are_reported(tmp_path: Path) -> None:
    assert listed(tmp_path, f"@revoked * ssh-ed25519 {BLOB}", "gpu1") == ["revoked"]
    assert listed(tmp_path, f"@cert-authority *.lab ssh-ed25519 {BLOB}", "a.lab") == ["cert-authority"]


def test_hashed_names_as_ssh_keygen_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu1 ssh-ed25519 {BLOB}\n[gpu1]:2222 ssh-ed25519 {BLOB}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(file)], check=True, timeout=30, capture_output=True)
    assert "gpu1" not in file.read_text()
    assert [key.line for key in find([str(file)], "gpu1")] == [1]
    assert [key.line for key in find([str(file)], "[gpu1]:2222")] == [2]
    assert find([str(file)], "gpu2") == []


@pytest.mark.parametrize("name", ["gpu1", "gpu 1", "gpu  1"])
def test_a_key_comes_with_its_type_fingerprint_and_line(tmp_path: Path, name: str) -> None:
    """A name may have blanks, in which ssh-keygen's answer has its columns."""
    file = tmp_path / "known_hosts"
    file.write_text(f"# first\ngpu*1 ssh-ed25519 {BLOB} of the lab\n")
    print_of = fingerprint(base64.b64decode(BLOB))
    assert find([str(file)], name) == [KnownKey(("ssh-ed25519",), print_of, None, str(file), 2)]


def test_a_missing_file_lists_none(tmp_path: Path) -> None:
    assert find([str(tmp_path / "absent")], "gpu1") == []


def test_lines_with_names_and_with_patterns_keep_their_order(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    lines = [
        "gpu* ssh-ed25519",
        "gpu1,GPU1 ssh-ed25519",
        "other ssh-ed25519",
        "@revoked gpu1 ssh-ed25519",
        "*,!gpu1 ssh-ed25519",
        "gpu1 ssh-rsa",
    ]
    file.write_text("".join(f"{line} {BLOB}\n" for line in lines))
    assert [(key.line, key.marker) for key in find([str(file)], "gpu1")] == [(1, None), (2, None), (4, "revoked")]


def test_a_comment_adds_no_answer(tmp_path: Path) -> None:
    """ssh-keygen prints a comment as it is: nothing in it counts as a line of the answer."""
    comment = f"x\r# Host gpu1 found: line 7 \rgpu1 RSA SHA256:{'A' * 43}\v# Host gpu1 found: line 8 REVOKED"
    assert listed(tmp_path, f"gpu1 ssh-ed25519 {BLOB} {comment}", "gpu1") == [None]


def test_what_ssh_keygen_cannot_answer_refuses_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu1 ssh-ed25519 {BLOB}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("gpunode.fleet.host_keys._TIMEOUT_S", 1.0)
    for body, words in (
        ("echo no; exit 1", "ssh-keygen: exit code 1$"),
        ("echo no; echo key", "ssh-keygen: exit code 0$"),
        ("echo '# Host gpu1 found: line 1 '", "ssh-keygen: exit code 0$"),
        ("exit 255", "ssh-keygen: exit code 255$"),
        ("echo ' no such option\nusage: x' >&2; exit 255", "ssh-keygen: no such option$"),
        (f"echo '# Host gpu1 found: line 1 '; echo 'gpu1 ED25519 SHA256:{'A' * 43} '; exit 2", "exit code 2$"),
        ("exec sleep 60", "ssh-keygen"),
    ):
        (tmp_path / "ssh-keygen").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "ssh-keygen").chmod(0o755)
        with pytest.raises(NodeFailure, match=rf"(?s)cannot be looked up in .*known_hosts: .*{words}"):
            find([str(file)], "gpu1")


def test_names_to_look_up() -> None:
    assert lookup_name("GPU1", 22) == "gpu1"
    for port in (2222, 21, 23):
        assert lookup_name("GPU1", port) == f"[gpu1]:{port}"


def test_fingerprints_are_those_of_ssh_keygen(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=30)
    done = subprocess.run(["ssh-keygen", "-lf", str(key)], check=True, timeout=30, capture_output=True, text=True)
    blob = base64.b64decode(Path(f"{key}.pub").read_text().split()[1])
    assert fingerprint(blob) == done.stdout.split()[1]
