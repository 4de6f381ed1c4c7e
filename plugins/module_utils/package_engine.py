"""One transaction of a node's package manager, simulated or carried out: one question and one answer for apt and dnf.

The question has the options of the module ``package_transaction``, as its page describes them; ``simulate``: only
report the changes. The answer::

    {"install": {name: version}, "remove": [names], "hold": [names or lock lines], "unhold": [the same],
     "finished": [packages that an interrupted run left half-configured],
     "warnings": [messages about failed sources that no package needed],
     "target": release of the bound packages, "exact": [for apt: entries that install exactly this],
     "sources": {for apt: name: source package}, "stream": new stream, empty after a reset, null without a change}

If the bound packages have no common release: ``{"lacking": {name: [releases]}, "common": [releases that all have],
"constraint": …}``. An ``error`` is the reason in one line why nothing was done, or with ``"done": false`` why the
transaction itself failed, with the compiler's errors as ``log``.
"""

from __future__ import annotations

from typing import Any

from ansible.module_utils.common.respawn import has_respawned, probe_interpreters_for_module, respawn_module
from ansible_collections.gpunode.node.plugins.module_utils import apt_transaction, dnf_transaction, gpu_use

LIST = {"type": "list", "elements": "str", "default": []}
LISTS = (
    *("install", "remove", "remove_new", "restore", "never", "hold", "unhold", "bound", "closure", "optional", "lift"),
    *("expendable", "drop_locks", "ignore_locks"),
)
Fields = dict[str, Any]
OPTIONS: dict[str, Fields] = {
    "manager": {"type": "str", "choices": ["apt", "dnf"], "default": "apt"},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    **dict.fromkeys(LISTS, LIST),
    "constraint": {"type": "str", "default": "*"},
    "fresh": {"type": "bool", "default": False},
    "alternatives": {"type": "dict", "default": {}},
    "line": {"type": "dict", "default": {"names": [], "except": []}},
    "memory": {"type": "str"},
    "files": {"type": "dict", "default": {}},
    "stream": {"type": "str"},
    "reset": {"type": "str"},
    "repositories": {"type": "list", "elements": "dict", "default": []},
    "lock_mark": {"type": "str", "default": dnf_transaction.SHARED_MARK},
    "idle_gpus": {"type": "bool", "default": False},
    "download_only": {"type": "bool", "default": False},
    "planned": {"type": "dict", "default": {}},
    "lock_wait_s": {"type": "int", "default": 300},
    "limit_s": {"type": "int", "default": 3600},
}
"""Specification of the options of a transaction."""
PYTHONS = ("/usr/libexec/platform-python", "/usr/bin/python3")


def gpu_users() -> list[str]:
    """Return the processes that compute on a GPU now."""
    return [gpu_use.title(process) for process in gpu_use.computing(gpu_use.holders())]


def answered(options: Fields, *, simulate: bool) -> Fields:
    """Return the answer to a question; options that it lacks have their defaults.

    For dnf the module is restarted under the Python that has dnf's bindings, if this one lacks them.
    """
    question = {name: option.get("default") for name, option in OPTIONS.items()} | options | {"simulate": simulate}
    if question["idle_gpus"]:
        question["gpu_users"] = gpu_users
    if question["manager"] == "dnf" and dnf_transaction.dnf is None:
        interpreter = None if has_respawned() else probe_interpreters_for_module(PYTHONS, "dnf")
        if interpreter is None:
            return {"error": f"no-dnf: dnf 4 cannot be used: none of {', '.join(PYTHONS)} has its bindings"}
        respawn_module(interpreter)
    manager: Any = dnf_transaction if question["manager"] == "dnf" else apt_transaction
    answer: Fields = manager.answered(question)
    return answer
