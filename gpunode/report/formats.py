"""The formats of a report: one row each, with the module that writes it."""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module

from gpunode.judging.report import Report
from gpunode.text import printable_json

MODULES = {
    "console": "gpunode.report.console",
    "junit": "gpunode.report.junit",
    "html": "gpunode.report.html",
    "ctrf": "gpunode.report.ctrf",
    "markdown": "gpunode.report.markdown",
    "github": "gpunode.report.github",
    "prometheus": "gpunode.report.prometheus",
}
"""Format -> module with ``as_text(document)``, those of ``SHORT`` with ``verbose``; loaded when it is asked for, since
libraries are slow to load."""
NAMES = (*MODULES, "json")
SHORT = frozenset({"console", "markdown", "github"})
"""Formats that leave out what passed unless the report is to be verbose; the others have everything."""
NOT_FOR_TERMINALS = frozenset({"html"})


def parts(name: str, document: Report, *, verbose: bool) -> Iterator[str]:
    """Yield the report in a format of ``NAMES``; JSON of thousands of nodes is never whole in memory."""
    if name == "json":
        yield from (printable_json(part) for part in document.json_parts())
    else:
        options = {"verbose": verbose} if name in SHORT else {}
        yield import_module(MODULES[name]).as_text(document, **options)


def show(name: str, document: Report, *, verbose: bool) -> None:
    """Write the report to stdout, with the terminal's colours and width where the format has any."""
    if name == "console":
        import_module(MODULES[name]).write(document, sys.stdout, verbose=verbose)
        return
    for part in parts(name, document, verbose=verbose):
        sys.stdout.write(_encodable(name, part))


def _encodable(name: str, text: str) -> str:
    """Return text that the encoding of stdout can represent: other characters are the format's escapes."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        if name == "json":
            return re.sub(r"[^\x00-\x7f]", lambda match: json.dumps(match[0])[1:-1], text)
        if name == "html":  # a page states its encoding: one that is not UTF-8 must be ASCII
            return text.encode("ascii", "xmlcharrefreplace").decode("ascii")
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text
