"""The verbs by name, and how their modules are loaded."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VERBS = {
    "plan": "Resolve a matched stack and explain it",
    "provision": "Run the site playbook on an inventory",
    "validate": "Judge nodes: this machine, hosts of an inventory, or saved bundles",
    "collect": "Write bundles and judge nothing",
    "checks": "List the checks: what each needs, means, and how to mend what it finds",
    "env": "The tuned environment and docker run arguments of a node, each value with its reason",
    "parse": "Turn one raw tool output into JSON",
    "catalog": "The facts: GPUs, drivers, packages and their sources",
    "lab": "Simulated GPU nodes in containers, to try and to test without a GPU",
    "schema": "Print the JSON Schema of a format",
}


@contextmanager
def loading() -> Iterator[None]:
    """Keep the garbage collector from what is loaded meanwhile: nothing of it is garbage, and it is large."""
    enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > known:
            gc.freeze()
        if enabled:
            gc.enable()
