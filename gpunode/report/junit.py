"""The report as JUnit XML: a suite for each node, a case for each check.

A check that failed is a failure, one that could not be determined an error, one that does not apply is skipped. JUnit
has no warnings: such a case passes, and its output contains the finding.
"""

import re
from collections import Counter
from collections.abc import Iterable
from xml.etree import ElementTree as Xml

from gpunode.checks import Status
from gpunode.judging.report import NodeReport, Report
from gpunode.report.cases import Case, cases, no_node, seconds
from gpunode.text import printable

RESULTS = {Status.FAIL: "failure", Status.ERROR: "error", Status.SKIP: "skipped"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_text(document: Report) -> str:
    """Return the document. Only ASCII: other characters are references, so that any encoding of a stream is valid."""
    # A collection has a duration, a saved bundle has none.
    saved = any(node.seconds is None and node.hardware is not None for node in document.nodes)
    name = "gpunode validate --replay" if saved else f"gpunode validate --level {document.level}"
    root = Xml.Element("testsuites", name=name, time=f"{seconds(document):.3f}")
    total: Counter[str] = Counter()
    for node in document.nodes:
        total += _suite(root, node.host, cases(node), document.started_at, node)
    if not document.nodes:
        total += _suite(root, "gpunode", [no_node()], document.started_at)
    for number in ("tests", "failures", "errors"):
        root.set(number, str(total[number]))
    Xml.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{Xml.tostring(root, encoding="us-ascii").decode()}\n'


def _suite(
    root: Xml.Element, host: str, tests: Iterable[Case], started_at: str, node: NodeReport | None = None
) -> Counter[str]:
    suite = Xml.SubElement(root, "testsuite", name=_text(printable(host)), hostname=_text(printable(host)))
    numbers: Counter[str] = Counter(tests=0, failures=0, errors=0, skipped=0)
    if node is not None:
        properties = Xml.SubElement(suite, "properties")
        for name, value in _properties(node).items():
            Xml.SubElement(properties, "property", name=name, value=_text(printable(value)))
    for case in tests:
        element = Xml.SubElement(
            suite, "testcase", classname=_text(f"{case.host}.{case.category}"), name=_text(case.check)
        )
        result = RESULTS.get(case.status)
        numbers["tests"] += 1
        if result is not None:
            numbers[result if result == "skipped" else f"{result}s"] += 1
            Xml.SubElement(element, result, type=case.status.value, message=_text(case.message)).text = _text(
                case.details
            )
        elif case.details:
            Xml.SubElement(element, "system-out").text = _text(case.details)
    for name, number in numbers.items():
        suite.set(name, str(number))
    suite.set("time", f"{0.0 if node is None else node.seconds or 0.0:.3f}")
    if started_at:
        suite.set("timestamp", _text(started_at))
    return numbers


def _properties(node: NodeReport) -> dict[str, str]:
    values = {
        "status": node.status.value,
        "recommended_state": node.recommended_state.value,
        "simulated": {None: "unknown", True: "true", False: "false"}[node.simulated],
        "gpus": str(len(node.gpus)),
        **node.stack.model_dump(),
    }
    return {name: value for name, value in values.items() if value is not None}


def _text(text: str) -> str:
    """Return lines without control characters, and without others that XML does not allow."""
    lines = "\n".join(map(printable, text.split("\n")))
    return _NOT_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", lines)
