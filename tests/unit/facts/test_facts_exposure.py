"""What of a node can be reached: rules of nftables, listening sockets, addresses, accounts, sshd; waiting updates."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from facts_host import SSH
from facts_samples import answer, facts_with, gpu_node_bundle

from gpunode.facts import facts_from_bundle
from gpunode.facts.exposure import PacketFilter
from gpunode.facts.node import NodeFacts

HEAD = {"metainfo": {"version": "1.0.6", "json_schema_version": 1}}
PENDING = "/var/lib/gpunode/updates/pending.json"


def chain(family: str, policy: str = "accept", name: str = "in") -> list[dict[str, Any]]:
    where = {"family": family, "table": "own", "name": name}
    return [
        {"table": {"family": family, "name": "own", "handle": 1}},
        {"chain": {**where, "type": "filter", "hook": "input", "prio": 0, "policy": policy}},
    ]


def rule(family: str, *expressions: dict[str, Any]) -> dict[str, Any]:
    return {"rule": {"family": family, "table": "own", "chain": "in", "handle": 2, "expr": list(expressions)}}


def seen(*objects: dict[str, Any], role_table: str | None = None) -> PacketFilter | None:
    listing = answer(role_table) if role_table is not None else answer("", 1, "Error: No such file or directory\n")
    facts = facts_with({"nft-ruleset": answer(json.dumps({"nftables": [HEAD, *objects]})), "nft-own": listing})
    assert "packet_filter" not in facts.gaps, facts.gaps
    return facts.packet_filter


def test_the_sample_node() -> None:
    facts: NodeFacts = facts_from_bundle(gpu_node_bundle())
    assert facts.packet_filter == PacketFilter(
        tables=("ip filter", "inet other"), refusing=("ip filter",), ipv4_refused=True, ipv6_refused=False, own=None
    )
    assert [
        f"{listener.protocol} {listener.address} {listener.port} {listener.process}"
        for listener in facts.listeners or ()
    ] == [
        "tcp * 9400 dcgm-exporter",
        "tcp 0.0.0.0 22 sshd",
        "tcp 0.0.0.0 2049 None",
        "tcp :: 22 sshd",
        "udp 127.0.0.53 53 systemd-resolve",
    ]
    assert [(address.interface, address.address) for address in facts.addresses or ()] == [
        ("lo", "127.0.0.1"),
        ("eth0", "10.0.0.7"),
        ("eth0", "fe80::5054:ff:fe12:3456"),
    ]
    assert facts.root_groups == {"sudo": ("ada",), "docker": ("ada", "bob")}
    assert facts.pending_updates is None


@pytest.mark.parametrize(
    ("objects", "ipv4", "ipv6"),
    [
        ([], False, False),
        (chain("inet"), False, False),
        (chain("inet", "drop"), True, True),
        (chain("ip", "drop"), True, False),
        (chain("ip6", "drop"), False, True),
        ([*chain("inet"), rule("inet", {"counter": {"packets": 0, "bytes": 0}}, {"drop": None})], True, True),
        ([*chain("inet"), rule("inet", {"log": None}, {"reject": {"type": "icmpx"}})], True, True),
        ([*chain("inet"), rule("inet", {"match": {}}, {"drop": None})], False, False),
        ([*chain("inet"), rule("inet", {"drop": None}), rule("inet", {"accept": None})], False, False),
    ],
)
def test_what_no_rule_accepts(objects: list[dict[str, Any]], ipv4: bool, ipv6: bool) -> None:
    packet_filter = seen(*objects)
    assert packet_filter is not None
    assert (packet_filter.ipv4_refused, packet_filter.ipv6_refused) == (ipv4, ipv6)


def test_firewalld_rejects_with_its_last_rule() -> None:
    """Recorded from firewalld 1.3.3: its tables, and the chain of input with its rules."""
    text = (Path(__file__).parents[2] / "fixtures/firewalld-ruleset.json").read_text(encoding="utf-8")
    packet_filter = facts_with({"nft-ruleset": answer(text), "nft-own": answer("", 1)}).packet_filter
    assert packet_filter is not None
    assert packet_filter.refusing == ("inet firewalld",)
    assert (packet_filter.ipv4_refused, packet_filter.ipv6_refused) == (True, True)


def test_the_roles_own_table_by_its_digest() -> None:
    packet_filter = seen(role_table="table inet gpunode {\n}\n")
    assert packet_filter is not None
    assert packet_filter.own == hashlib.sha256(b"table inet gpunode {\n}\n").hexdigest()


def test_without_nft_there_is_nothing_to_list() -> None:
    missing = answer("", 127, "nft: No such file or directory\n")
    facts = facts_with({"nft-ruleset": missing, "nft-own": missing})
    assert facts.packet_filter is None
    assert "packet_filter" not in facts.gaps


@pytest.mark.parametrize(
    ("field", "command", "text"),
    [
        ("packet_filter", "nft-ruleset", "garbage\n"),
        ("packet_filter", "nft-ruleset", '{"nftables": []}\n'),
        ("packet_filter", "nft-ruleset", '{"nftables": [[]]}\n'),
        ("listeners", "sockets", "tcp LISTEN\n"),
        ("listeners", "sockets", "tcp LISTEN 0 1 0.0.0.0:99999 0.0.0.0:*\n"),
        ("addresses", "addresses", "garbage\n"),
        ("addresses", "addresses", ""),
        ("addresses", "addresses", "1: lo    inet 1.2.3.4.5/8 scope host\n"),
    ],
)
def test_what_is_not_understood_is_a_gap(field: str, command: str, text: str) -> None:
    facts = facts_with({command: answer(text)})
    assert field in facts.gaps
    assert getattr(facts, field) is None


def test_listing_rules_without_root_is_a_gap() -> None:
    refused = answer("", 1, "Operation not permitted (you must be root)\n")
    assert "Operation not permitted" in facts_with({"nft-ruleset": refused}).gaps["packet_filter"]


def test_the_record_of_pending_updates() -> None:
    row = {"package": "docker.io", "installed": "1", "version": "2", "since": "2026-01-02T03:04:05+00:00"}
    facts = facts_with(files={PENDING: json.dumps({"pending": [{**row, "more": 1}]})})
    assert [update.model_dump() for update in facts.pending_updates or ()] == [row]
    for text in ("{", '{"pending": [{}]}', '{"pending": [1]}', "[]"):
        assert "pending_updates" in facts_with(files={PENDING: text}).gaps


def test_a_recorded_daemon() -> None:
    facts = facts_with({key: answer(command["stdout"]) for key, command in SSH.items()})
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
