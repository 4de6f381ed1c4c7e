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
MODULES = {
    "init": "init",
    "plan": "plan",
    "provision": "provision",
    "upgrade": "upgrade",
    "rollback": "upgrade",
    "validate": "validate",
    "collect": "collect",
    "compare": "history",
    "history": "history",
    "top": "top",
    "monitoring": "checks",
    "env": "env",
    "advise": "env",
    "profile": "jobs",
    "stage": "jobs",
    "checks": "checks",
    "explain": "explain",
    "catalog": "lookup",
    "parse": "lookup",
    "schema": "reference",
    "lab": "lab",
    "config": "reference",
    "evidence": "history",
    "zipapp": "zipapp",
    "completion": "reference",
    "man": "reference",
}
"""Verb -> module in ``gpunode.cli`` with ``VERB_command``. A module has several verbs where they load much the same."""


def command_of(verb: str) -> Any:
    """Return the command of a verb; its module is loaded."""
    with loading():
        return getattr(import_module(f"gpunode.cli.{MODULES[verb]}"), f"{verb}_command")


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
