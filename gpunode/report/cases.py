"""The results of a node as test cases, one for each check, and the formats of tests: JUnit and CTRF."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from xml.etree import ElementTree as Xml

from gpunode.checks import Category, Finding, Status
from gpunode.judging.report import AFFECTED, WORST_FIRST, NodeReport, Report, category_of, counting, worst
from gpunode.names import fold
from gpunode.report.fleet import FindingGroup, of_node, page_of
from gpunode.report.summary import seconds
from gpunode.text import moment, printable

FAILED = (Status.FAIL, Status.ERROR)


@dataclass(frozen=True)
class Case:
    """One check on one node. All texts are printable."""

    host: str
    check: str
    category: Category
    status: Status
    """The worst of its findings that count; ``skip`` if none counts."""
    message: str
    """The findings with this status, on one line."""
    details: str
    """All findings that did not pass, with remedy and origin of the limit; empty if all passed."""


def cases(node: NodeReport) -> Iterator[Case]:
    """Yield the checks of a node in the order of their ids."""
    findings = sorted(node.findings, key=lambda finding: finding.check)
    for check, group in groupby(findings, key=lambda finding: finding.check):
        yield _case(node.host, check, list(group))


def _case(host: str, check: str, findings: list[Finding]) -> Case:
    counted = counting(findings)
    status = worst(finding.status for finding in counted) if counted else Status.SKIP
    groups = sorted(of_node(findings), key=lambda group: WORST_FIRST.index(group.status))
    shown = [group for group in groups if group.observed is None and group.status is status] or groups[:1]
    message = "; ".join(f"{_where(group)}{group.message}" for group in shown)
    if not counted:
        message = f"observed only ({groups[0].observed}): {message}"
    details = [line for group in groups if group.status in (*AFFECTED, Status.NOTE) for line in _lines(group)]
    if details:
        details.append(f"about this check: {page_of(check)}")
    return Case(
        host=printable(host),
        check=printable(check),
        category=category_of(check),
        status=status,
        message=printable(message),
        details="\n".join(map(printable, details)),
    )


def _where(group: FindingGroup) -> str:
    return "" if set(group.components) == {"node"} else f"{fold(group.components)}: "


def _lines(group: FindingGroup) -> Iterator[str]:
    yield f"{group.status.value}: {_where(group)}{group.message}"
    if group.observed:
        yield f"  observed only, does not affect the result: {group.observed}"
    if group.source:
        yield f"  expected by: {group.source}"
    if group.remedy:
        yield f"  to do: {group.remedy}"


def no_node() -> Case:
    """Return the case of a report without nodes, which must not look like success."""
    return Case("gpunode", "node.reachable", "host", Status.ERROR, "no node was judged", "")


JUNIT_RESULTS = {Status.FAIL: "failure", Status.ERROR: "error", Status.SKIP: "skipped"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(document: Report) -> str:
    """Return the report as JUnit XML: a suite for each node, a case for each check.

    A check that failed is a failure, one that could not be determined an error, one that does not apply is skipped.
    JUnit has no warnings: such a case passes, and its output contains the finding. Only ASCII: other characters are
    references, so that any encoding of a stream is valid.
    """
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
        result = JUNIT_RESULTS.get(case.status)
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


CTRF_RESULTS = {Status.FAIL: "failed", Status.ERROR: "failed", Status.SKIP: "skipped"}
SPEC_VERSION = "1.0.0"
"""Of https://github.com/ctrf-io/ctrf, commit 84ddec558 of 2026-07-26."""


def as_ctrf(document: Report) -> str:
    """Return the report in the Common Test Report Format (https://ctrf.io): a test for each check on each node.

    A check that could not be determined is a failed test. The format has no warnings: such a test passed. ``rawStatus``
    is gpunode's own status. Only ASCII: other characters are JSON escapes.
    """
    all_cases = [case for node in document.nodes for case in cases(node)] or [no_node()]
    tests = [_test(case) for case in all_cases]
    numbers = Counter(test["status"] for test in tests)
    begin = moment(document.started_at)
    start = int(begin.timestamp() * 1000) if begin else 0
    whole: dict[str, Any] = {
        "reportFormat": "CTRF",
        "specVersion": SPEC_VERSION,
        "generatedBy": "gpunode",
        "results": {
            "tool": {"name": "gpunode", "version": document.gpunode_version},
            "summary": {
                "tests": len(tests),
                **{name: numbers[name] for name in ("passed", "failed", "skipped", "pending", "other")},
                "suites": max(len(document.nodes), 1),
                "start": start,
                "stop": start + int(seconds(document) * 1000),
            },
            "tests": tests,
            "environment": {
                "extra": {
                    "level": document.level,
                    "status": document.status.value,
                    "simulated": sum(node.simulated is True for node in document.nodes),
                }
            },
        },
    }
    return f"{json.dumps(whole, indent=1)}\n"


def _test(case: Case) -> dict[str, Any]:
    """Return a test. Checks share the commands that provide their data: none has a duration of its own."""
    test: dict[str, Any] = {
        "name": case.check,
        "status": CTRF_RESULTS.get(case.status, "passed"),
        "rawStatus": case.status.value,
        "duration": 0,
        "suite": [case.host],
        "labels": {"category": case.category},
    }
    if case.details or case.status is Status.SKIP:
        test["message"] = case.message
    if case.details:
        test["trace"] = case.details
    return test
