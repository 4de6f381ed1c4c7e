"""The verbs by topic and by name, and how their modules are loaded."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

TOPICS: dict[str, dict[str, str]] = {
    "Provision and change nodes": {
        "init": "Write a folder with an inventory, from an example and a first look at the hosts",
        "plan": "Resolve a matched stack and explain it",
        "provision": "Run the site playbook on an inventory",
        "upgrade": "Upgrade the driver of many nodes by canary and waves, and return what is as good as before",
        "rollback": "Reinstall the driver that nodes had before an upgrade, by canary and waves",
    },
    "Validate and watch nodes": {
        "validate": "Validate nodes: this machine, hosts of an inventory, or saved bundles",
        "collect": "Collect bundles without validating them",
        "compare": "Compare two runs: what changed on which node, and whether it is worse",
        "history": "Show, export and remove the runs that were saved, and trends of nodes",
        "top": "Show what the GPUs of many nodes do, and what slows them down",
        "monitoring": "Print alerting rules, a dashboard and a scrape configuration for Prometheus and Grafana",
    },
    "Run jobs": {
        "env": "Print tuned environment variables and docker run arguments for a node, with reasons",
        "advise": "Print what pays for training on a node, with its own numbers and sources",
        "profile": "Run a command under a profiler and print where its time goes",
        "stage": "Copy a data set to a local disk: verified, resumed, within a limit of space",
    },
    "Look something up": {
        "checks": "List the checks with their requirements, meaning and remedy",
        "explain": "Explain an error text of CUDA, NCCL, PyTorch, TensorFlow, Docker, or an Xid",
        "catalog": "Show the catalog: GPUs, drivers, packages and their sources",
        "parse": "Convert the raw output of one tool to JSON",
        "schema": "Print the JSON Schema of a format",
    },
    "Try and set up gpunode": {
        "lab": "Run simulated GPU nodes in containers, for trials and tests without a GPU",
        "config": "Show the values of options and where they came from",
        "evidence": "Make an archive of saved bundles without names, addresses and serial numbers",
        "zipapp": "Build gpunode as one file, to be copied to nodes",
        "completion": "Print the completion script of bash, zsh or fish",
        "man": "Show a man page, or write all of them",
    },
}
"""Topic -> verbs with what they do, in the order of the help."""
VERBS = {name: text for verbs in TOPICS.values() for name, text in verbs.items()}
SHARED = {
    "advise": ("env", "advise_command"),
    "compare": ("history", "compare_command"),
    "completion": ("shell", "completion_command"),
    "man": ("shell", "command"),
    "rollback": ("upgrade", "rollback_command"),
}
"""Verbs in a module of another name; the others are ``command`` of ``gpunode.cli.VERB``."""


def command_of(verb: str) -> Any:
    """Return the command of a verb; its module is loaded."""
    module, name = SHARED.get(verb, (verb, "command"))
    with loading():
        return getattr(import_module(f"gpunode.cli.{module}"), name)


@contextmanager
def loading() -> Iterator[None]:
    """Exclude what is loaded in the context from garbage collection: nothing of it is garbage, and it is large."""
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()
