"""The command line: one module per verb, loaded when it is called."""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gpunode.cli.streams import guard

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


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 good, 1 failed, 2 wrong usage, 3 could not be determined."""
    guard()
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        with loading():
            # Most of the time until a verb begins goes into this; Ctrl-C may come here too.
            from gpunode.cli.root import answer  # noqa: PLC0415

        return answer(argv)
    except KeyboardInterrupt:
        sys.stderr.write("gpunode: interrupted\n")
        return 130


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
