"""The formats of a report: one row each, with the module that writes it."""

import sys
from collections.abc import Iterator
from importlib import import_module

from gpunode.judging.report import Report
from gpunode.text import printable_json

MODULES = {"console": "gpunode.report.console"}
"""Format -> module with ``as_text(document, *, verbose)``; loaded when it is asked for, since libraries are slow to
load."""
NAMES = (*MODULES, "json")


def parts(name: str, document: Report, *, verbose: bool) -> Iterator[str]:
    """Yield the report in a format of ``NAMES``; JSON of thousands of nodes is never whole in memory."""
    if name == "json":
        yield from (printable_json(part) for part in document.json_parts())
    else:
        yield import_module(MODULES[name]).as_text(document, verbose=verbose)


def show(name: str, document: Report, *, verbose: bool) -> None:
    """Write the report to stdout, with the terminal's colours and width where the format has any."""
    if name == "console":
        import_module(MODULES[name]).write(document, sys.stdout, verbose=verbose)
        return
    for part in parts(name, document, verbose=verbose):
        sys.stdout.write(part)
