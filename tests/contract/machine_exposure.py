"""What of a simulated node can be reached, as recorded (tests/fixtures): rules, sockets, addresses, the SSH daemon."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine_shapes import Document, Machine, answer

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures/exposure.json").read_text(encoding="utf-8")
)
PENDING = "/var/lib/gpunode/updates/pending.json"
NO_TABLE = "Error: No such file or directory\nlist table inet gpunode\n                ^^^^^^^\n"


def exposure_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield "/etc/group", RECORDED["/etc/group"]
    yield PENDING, None if has_no_policy(machine) else RECORDED[PENDING]


def has_no_policy(machine: Machine) -> bool:
    """A guest relies on its cloud's rules: the roles firewall and updates are not in use there."""
    return machine.virtualization != "none"


def exposure_commands(machine: Machine) -> dict[str, Document]:
    commands = {
        key: answer(RECORDED[key]["stdout"], RECORDED[key]["rc"], argv=tuple(RECORDED[key]["argv"]))
        for key in ("nft-ruleset", "nft-own", "sockets", "addresses")
    }
    if machine.roce:
        lines = [
            f"{at + 9}: {name}    inet 10.9.{at}.7/24 scope global {name}\n"
            for at, name in enumerate(machine.interfaces)
        ]
        commands["addresses"]["stdout"] += "".join(lines)
    if has_no_policy(machine):
        head = json.loads(RECORDED["nft-ruleset"]["stdout"])["nftables"][0]
        commands["nft-ruleset"]["stdout"] = json.dumps({"nftables": [head]}) + "\n"
        commands["nft-own"] |= {"stdout": "", "stderr": NO_TABLE, "rc": 1}
    return commands


SSH_DAEMON: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures/ssh/daemon.json").read_text(encoding="utf-8")
)


def ssh_commands() -> dict[str, Document]:
    return {key: answer(reply["stdout"], reply["rc"], argv=tuple(reply["argv"])) for key, reply in SSH_DAEMON.items()}
