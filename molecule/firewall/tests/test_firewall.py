"""Tests of a node with the firewall, run on the node itself."""

import json

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_the_unit_runs_and_is_enabled(host: Host) -> None:
    with host.sudo():
        assert host.service("gpunode-firewall").is_running
        assert host.service("gpunode-firewall").is_enabled
        assert not host.service("nftables").is_enabled


def test_what_is_not_named_is_dropped_in_both_families(host: Host) -> None:
    objects = json.loads(output(host, "nft -j list table inet gpunode"))["nftables"]
    chains = [row["chain"] for row in objects if "chain" in row]
    assert [(chain["hook"], chain["policy"]) for chain in chains if "hook" in chain] == [
        ("input", "drop"),
        ("forward", "accept"),
    ]


def test_the_rules_are_those_of_the_file(host: Host) -> None:
    listing = output(host, "nft -s -t list table inet gpunode | sha256sum").split()[0]
    assert listing in output(host, "cat /run/gpunode/firewall.loaded").split()


def test_no_revert_is_left_armed(host: Host) -> None:
    assert output(host, "systemctl list-timers --all --no-legend 'gpunode-guard*'") == ""
    assert "gpunode_watch" not in output(host, "nft list tables")


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
