"""What sshd runs with, private keys, and accounts without a password, as the probe reports them."""

import json
from pathlib import Path
from typing import Any

import pytest
from facts_samples import answer, facts_with

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "ssh" / "daemon.json").read_text(encoding="utf-8")
)


def test_a_recorded_daemon() -> None:
    facts = facts_with({key: answer(command["stdout"]) for key, command in RECORDED.items()})
    assert facts.ssh_daemon is not None
    assert facts.ssh_daemon.settings["passwordauthentication"] == "no"
    assert facts.ssh_daemon.settings["authenticationmethods"] == "publickey"
    assert [(key.type, key.bits, key.mode) for key in facts.private_keys or ()] == [
        ("ssh-ed25519", 256, "0600"),
        ("ssh-rsa", 4096, "0600"),
    ]
    assert facts.empty_passwords == ()


def test_a_node_without_a_daemon() -> None:
    facts = facts_with({"sshd-settings": answer("", 127, "not found")})
    assert (facts.ssh_daemon, "ssh_daemon" in facts.gaps) == (None, False)


@pytest.mark.parametrize("text", ["", "garbage!\n", "port 22\n", "x" * 5000 + " yes\n"])
def test_what_is_no_answer_is_a_gap(text: str) -> None:
    assert "ssh_daemon" in facts_with({"sshd-settings": answer(text)}).gaps


@pytest.mark.parametrize(
    "row",
    [
        "/etc/ssh/x\t0600\troot\tssh-rsa\t4096",
        "/etc/ssh/x\t9600\troot\tssh-rsa\t4096\t0",
        "/etc/ssh/x\t0600\troot\tssh-rsa\tmany\t0",
    ],
)
def test_a_malformed_row_is_a_gap(row: str) -> None:
    assert "private_keys" in facts_with({"private-keys": answer(f"{row}\n")}).gaps


def test_without_root_nothing_is_known() -> None:
    facts = facts_with({name: answer("", 1, "seen by root alone") for name in ("private-keys", "empty-passwords")})
    assert {"private_keys", "empty_passwords"} <= facts.gaps.keys()
