"""Keep what nodes report out of the variables of the playbooks in this folder, bound it, and print it as text.

Ansible loads this file with each playbook of the folder, whatever ``ansible.cfg`` says. Facts, which any module's
answer can contain, take precedence over the inventory: a node could name the files and programs of the controller.
Tasks read them as ``ansible_facts``.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.plugins.callback import CallbackBase
from ansible.utils.display import Display

DOCUMENTATION = """
name: node_facts
type: aggregate
short_description: Keep facts out of the variables of gpunode's playbooks
description:
  - Sets C(INJECT_FACTS_AS_VARS) to false for the plays of this folder, and back for other plays.
  - Limits the memory of each task's process, so that a node's endless answer fails its own task.
  - Replaces control characters, other than colors of Ansible, in all that is printed.
author: gpunode
"""
OWN = Path(__file__).resolve().parents[1]
MEMORY_BYTES = 1 << 30
"""What a task's process may use beyond what it starts with."""

COLOR = r"\x1b\[(?:0|[01];3\d|(?:0;)?[34]8;5;\d{1,3})m"
CONTROL = re.compile(rf"({COLOR})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """The callback plugin: switches at the start of each play and prints nothing."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "node_facts"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before = constants.INJECT_FACTS_AS_VARS
        self.own = False
        os.register_at_fork(after_in_child=self.limit_memory)
        self.printed = Display().display
        Display().display = self.print

    def v2_playbook_on_play_start(self, play: Any) -> None:
        """Inject no facts into a play of this folder."""
        self.own = OWN in Path(play.get_path().rpartition(":")[0]).resolve().parents
        constants.INJECT_FACTS_AS_VARS = False if self.own else self.before

    def print(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Print a message of Ansible without the control characters of a node, which its warnings and diffs contain."""
        text = CONTROL.sub(lambda match: match[1] or "\N{REPLACEMENT CHARACTER}", str(msg)) if self.own else msg
        self.printed(text, *args, **kwargs)

    def limit_memory(self) -> None:
        """Limit the memory of a process that runs a task."""
        if self.own:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            limit = pages * resource.getpagesize() + MEMORY_BYTES
            if hard == resource.RLIM_INFINITY or limit < hard:
                resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
