"""The gate for answers of all modules in the playbooks of this folder: no variables, bounded, printed as text.

Ansible loads this file with each playbook of the folder, whatever ``ansible.cfg`` says. Facts, which any module's
answer can contain, take precedence over the inventory: a node could name the files and programs of the controller.
Tasks read them as ``ansible_facts``.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.action import ActionBase
from ansible.plugins.callback import CallbackBase
from ansible.utils.display import Display
from ansible_collections.gpunode.node.plugins.plugin_utils.answers import CONTROL, diff

DOCUMENTATION = """
name: node_answers
type: aggregate
short_description: Pass what nodes answer in gpunode's playbooks through a gate
description:
  - Sets C(INJECT_FACTS_AS_VARS) to false for the plays of this folder, and back for other plays.
  - Drops the keys of answers that Ansible's engine acts on, and those of a wrong type, which would end the whole run.
  - Limits the memory of each task's process, so that a node's endless answer fails its own task.
  - Replaces control characters, other than colors of Ansible, in all that is printed.
author: gpunode
"""
OWN = Path(__file__).resolve().parents[1]
MEMORY_BYTES = 1 << 30
"""What a task's process may use beyond what it starts with."""

ACTED_ON = ("ansible_stats", "add_host", "add_group", "include", "include_args", "failed_when_result", "attempts")
"""Keys that belong to Ansible's actions; some end the whole run if their value has another type."""
TYPED: dict[str, type] = {
    **dict.fromkeys(("changed", "failed", "skipped", "unreachable"), bool),
    **dict.fromkeys(("ansible_facts", "invocation"), dict),
    **dict.fromkeys(("warnings", "deprecations", "results"), list),
}
DEEPEST = 24
LONGEST_ANSWER = 4 << 20
"""Characters that a module of Ansible prints: Ansible prints failed ones again, in its main process."""
COLOR = r"\x1b\[(?:0|[01];3\d|(?:0;)?[34]8;5;\d{1,3})m"
PRINTED = re.compile(f"({COLOR})|{CONTROL.pattern}")


def _depth_within(value: Any, most: int) -> bool:
    """Return whether a value is nested at most this deep; Ansible prints and copies results by recursion."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most > 0 and all(_depth_within(item, most - 1) for item in items)


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """The callback plugin: switches at the start of each play and prints nothing."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "node_answers"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before = constants.INJECT_FACTS_AS_VARS
        self.own = False
        self.bounded = False
        self.executed = ActionBase._low_level_execute_command
        ActionBase._low_level_execute_command = self.limited()
        self.parsed = ActionBase._parse_returned_data
        ActionBase._parse_returned_data = self.gate()
        self.printed = Display().display
        Display().display = self.print

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Inject no facts into a play of this folder."""
        self.own = OWN in Path(play.get_path().rpartition(":")[0]).resolve().parents
        constants.INJECT_FACTS_AS_VARS = False if self.own else self.before

    def gate(self) -> Any:
        """Return the method that reads what a module printed, in place of Ansible's."""

        def parse(action: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            most = getattr(action, "LONGEST_ANSWER", LONGEST_ANSWER)
            if self.own and any(len(str(args[0].get(name, ""))) > most for name in ("stdout", "stderr")):
                return {"failed": True, "msg": f"the node answered more than {most >> 20} MiB"}
            answer: dict[str, Any] = self.parsed(action, *args, **kwargs)
            if not self.own:
                return answer
            wrong = {name for name, kind in TYPED.items() if name in answer and not isinstance(answer[name], kind)}
            wrong |= {name for name, value in answer.items() if not _depth_within(value, DEEPEST)}
            results = answer.get("results")
            if isinstance(results, list) and not all(isinstance(item, str) for item in results):
                wrong.add("results")
            if "diff" in answer:
                answer["diff"] = diff(answer["diff"])
            return {name: value for name, value in answer.items() if name not in wrong.union(ACTED_ON)}

        parse.of_gpunode = True  # type: ignore[attr-defined]
        return parse

    def print(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Print a message of Ansible without the control characters of a node, which its warnings and diffs contain."""
        text = PRINTED.sub(lambda match: match[1] or "\N{REPLACEMENT CHARACTER}", str(msg)) if self.own else msg
        self.printed(text, *args, **kwargs)

    def limited(self) -> Any:
        """Return the method that runs commands on nodes, in place of Ansible's, with a limit of memory for its process.

        Not for this machine as a node: its programs would inherit the limit.
        """

        def execute(action: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if self.own and not self.bounded and action._connection.transport != "local":
                limit_memory()
                self.bounded = True
            answer: dict[str, Any] = self.executed(action, *args, **kwargs)
            return answer

        return execute


def limit_memory() -> None:
    """Limit the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
