"""The report in the Common Test Report Format (https://ctrf.io): a test for each check on each node.

A check that could not be determined is a failed test. The format has no warnings: such a test passed. ``rawStatus``
is gpunode's own status.
"""

import json
from collections import Counter
from typing import Any

from gpunode.checks import Status
from gpunode.judging.report import Report
from gpunode.report.cases import Case, cases, no_node, seconds, started

RESULTS = {Status.FAIL: "failed", Status.ERROR: "failed", Status.SKIP: "skipped"}
SPEC_VERSION = "1.0.0"
"""Of https://github.com/ctrf-io/ctrf, commit 84ddec558 of 2026-07-26."""


def as_text(document: Report) -> str:
    """Return the document. Only ASCII: other characters are JSON escapes."""
    all_cases = [case for node in document.nodes for case in cases(node)] or [no_node()]
    tests = [_test(case) for case in all_cases]
    numbers = Counter(test["status"] for test in tests)
    begin = started(document)
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
        "status": RESULTS.get(case.status, "passed"),
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
