"""The SSH daemon of a simulated node, as recorded on a hardened lab node (tests/fixtures/ssh/daemon.json)."""

import json
from pathlib import Path
from typing import Any

from machine_shapes import Document, answer

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "fixtures/ssh/daemon.json").read_text(encoding="utf-8")
)


def ssh_commands() -> dict[str, Document]:
    return {key: answer(reply["stdout"], reply["rc"], argv=tuple(reply["argv"])) for key, reply in RECORDED.items()}
