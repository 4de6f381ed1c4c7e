"""What holds for every format of a report, and the documents of other programs that three of them are."""

import io
import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hostile_reports
import jsonschema
import junitparser
import pytest
import yaml
from effort import effort
from lxml import etree
from markdown_it import MarkdownIt

from gpunode.checks import Finding, GpuIdentity, Hardware, Identity, RunningStack, Status
from gpunode.checks.actions import Action
from gpunode.judging.report import NodeReport, Report, judged, unreachable
from gpunode.report import formats
from gpunode.report.github import escaped
from gpunode.report.summary import Origin, of_run
from gpunode.text import printable

EVIDENCE = Path(__file__).parents[2] / "evidence"
XSD = etree.XMLSchema(etree.parse(EVIDENCE / "junit.xsd"))
CTRF = jsonschema.Draft7Validator(yaml.safe_load((EVIDENCE / "ctrf.yml").read_text(encoding="utf-8")))
UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SLOW_S = 20.0
"""Far above what any format needs for 10,000 findings, for a machine that is busy."""


def text_of(name: str, document: Report, *, verbose: bool = False) -> str:
    return "".join(formats.parts(name, document, verbose=verbose))


def read_junit(text: str) -> None:
    XSD.assertValid(etree.fromstring(text.encode()))


def read_ctrf(text: str) -> None:
    CTRF.validate(json.loads(text))


def read_html(text: str) -> None:
    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not any(name.startswith("on") for name, _ in attrs), (tag, attrs)

    Tags().feed(text)
    assert f"alert('{hostile_reports.CANARY}')</script>" not in text


MARKDOWN = MarkdownIt("gfm-like", {"html": True, "linkify": False})
MARKUP = {"html_inline", "html_block", "link_open", "em_open", "strong_open", "s_open", "image", "softbreak", "hr"}


def read_markdown(text: str) -> None:
    """Raise if a text of a node is read as markup: only our own emphasis is."""
    for token in MARKDOWN.parse(text):
        for child in token.children or ():
            bold = child.type == "strong_open"
            assert bold or child.type not in MARKUP, f"{child.type} in {token.content!r}"
        assert token.type not in MARKUP, token
        assert token.type != "fence" or token.content.startswith("gpunode provision "), token.content


def read_github(text: str) -> None:
    lines = text.splitlines()
    assert lines
    assert all(re.match(r"::(error|warning|notice) title=[^:,]*::", line) for line in lines)
    levels = [line.split()[0] for line in lines]
    assert max(levels.count(level) for level in set(levels)) <= 10


READERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "junit": read_junit,
    "ctrf": read_ctrf,
    "html": read_html,
    "markdown": read_markdown,
    "github": read_github,
}
"""Formats that a program reads. Each raises for a document that is not valid."""


@pytest.mark.parametrize("name", formats.NAMES)
def test_hostile_texts_break_no_format(name: str) -> None:
    for seed in range(effort(40, 4000)):
        document = hostile_reports.hostile(seed)
        for verbose in (False, True):
            text = text_of(name, document, verbose=verbose)
            bad = UNPRINTABLE.search(text)
            assert bad is None, f"seed {seed}: {text[max(0, bad.start() - 40) : bad.end() + 40]!r}"
            assert text.endswith("\n"), seed
            text.encode()
            READERS.get(name, len)(text)


@pytest.mark.parametrize("name", formats.NAMES)
def test_ten_thousand_findings(name: str) -> None:
    document = hostile_reports.many_findings(100, 100)
    began = time.monotonic()
    text = text_of(name, document)
    assert time.monotonic() - began < SLOW_S
    READERS.get(name, len)(text)


@pytest.mark.parametrize("name", formats.NAMES)
def test_no_node_and_unreachable_nodes_are_no_success(name: str) -> None:
    for nodes in ((), (unreachable("gpu-1", "no route to host", 3.0), unreachable("gpu-2", "no route to host", 3.0))):
        text = text_of(name, hostile_reports.whole(*nodes))
        READERS.get(name, len)(text)
        assert text.strip()
        for node in nodes:
            assert node.host in text or name not in ("json", "junit", "ctrf")


def node(*findings: Finding, host: str = "gpu-1.example.com") -> NodeReport:
    identity = Identity(
        simulated=True,
        stack=RunningStack(driver="595.91.07"),
        gpus=(GpuIdentity(index=0, name="NVIDIA L40S", uuid="GPU-0"),),
        hardware=Hardware(gpus=1, gpu_model="l40s"),
    )
    return judged(host, identity, findings, 2.5)


def finding(check: str, status: str, component: str = "node", **more: Any) -> Finding:
    values: dict[str, Any] = {"message": f"it is {status}", **more}
    return Finding(check=check, status=Status(status), component=component, **values)


NODE = node(
    finding("driver.held", "warn", remedy="Hold them."),
    finding("gpu.xid", "error", message="no kernel log"),
    finding("host.time", "skip", message="no clock"),
    finding("link.pcie-width", "fail", "gpu2", message="x8", remedy="Reseat it.", source="the slot"),
    finding("link.pcie-width", "fail", "gpu3", message="x8", remedy="Reseat it.", source="the slot"),
    finding("link.pcie-width", "pass", "gpu1"),
    finding("node.reachable", "fail", observed="known until 2027"),
    finding("gpu.count", "pass"),
)


def test_junit_names_what_ran() -> None:
    saved = NODE.model_copy(update={"seconds": None})
    lost = unreachable("gpu-2", "no route to host", None)
    for nodes, expected_text in (((NODE, lost), "--level"), ((lost,), "--level"), ((saved,), "--replay")):
        name = etree.fromstring(text_of("junit", hostile_reports.whole(*nodes)).encode()).get("name")
        assert name.startswith(f"gpunode validate {expected_text}"), name


def test_junit_is_read_by_another_program() -> None:
    text = text_of("junit", hostile_reports.whole(NODE, node(finding("gpu.count", "pass"), host="gpu-2")))
    read = junitparser.JUnitXml.fromstring(text.encode())
    suites = {suite.name: suite for suite in read}
    assert (read.tests, read.failures, read.errors) == (7, 1, 1)
    assert (suites["gpu-1.example.com"].skipped, suites["gpu-1.example.com"].time) == (2, 2.5)
    assert (suites["gpu-1.example.com"].timestamp, suites["gpu-2"].tests) == ("2026-11-23T20:00:00Z", 1)
    cases = {case.name: case for case in suites["gpu-1.example.com"]}
    results = {name: [type(outcome).__name__ for outcome in case.result] for name, case in cases.items()}
    assert results == {
        "driver.held": [],
        "gpu.count": [],
        "gpu.xid": ["Error"],
        "host.time": ["Skipped"],
        "link.pcie-width": ["Failure"],
        "node.reachable": ["Skipped"],
    }
    assert cases["link.pcie-width"].classname == "gpu-1.example.com.pcie"
    assert cases["link.pcie-width"].result[0].message == "gpu[2-3]: x8"
    assert cases["link.pcie-width"].result[0].text.splitlines() == [
        "fail: gpu[2-3]: x8",
        "  expected by: the slot",
        "  to do: Reseat it.",
        "about this check: gpunode checks link.pcie-width",
    ]
    assert "warn: it is warn" in cases["driver.held"].system_out
    assert "driver.held" in cases


def test_ctrf_counts_its_tests() -> None:
    results = json.loads(text_of("ctrf", hostile_reports.whole(NODE)))["results"]
    statuses = {test["name"]: (test["status"], test["rawStatus"]) for test in results["tests"]}
    assert statuses["gpu.xid"] == ("failed", "error")
    assert statuses["driver.held"] == ("passed", "warn")
    summary = results["summary"]
    assert (summary["passed"], summary["failed"], summary["skipped"], summary["tests"]) == (2, 2, 2, 6)
    assert summary["stop"] - summary["start"] == 6000


def shown_by(text: str) -> str:
    """Return the text that a reader of Markdown sees."""
    tokens = [child for token in MARKDOWN.parse(text) for child in token.children or ()]
    return "".join(token.content for token in tokens).replace("\u200b", "")


@pytest.mark.parametrize("text", hostile_reports.TEXTS)
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    assert shown_by(escaped(text)) == printable(text).strip()


def test_markdown_of_a_ticket() -> None:
    with of_run(Origin(("hosts.yml",))):
        held = finding("driver.held", "fail", message="2 of 11", remedy="Hold them.")
        step = Action(action="run_role", target="nvidia_driver:nvidia_driver_install")
        document = hostile_reports.whole(node(held.model_copy(update={"actions": (step,)}), host="gpu-1"), NODE)
        lines = text_of("markdown", document).splitlines()
    assert lines[0] == "## GPU nodes: 2 of 2 nodes failed"
    assert "| gpu-1,gpu-1.example.com | 1x L40S | 595.91.07 | **FAIL**, SIMULATED |" in lines
    assert "| FAIL | `link.pcie-width` | gpu-1.example.com gpu\\[2-3\\] | x8; expected by: the slot |" in lines
    assert "  gpunode provision -i hosts.yml -l gpu-1 -t nvidia_driver_install" in lines


def test_annotations_beyond_those_that_github_shows_are_counted() -> None:
    findings = [finding(f"a.check-{number:02d}", "fail", message=f"message {chr(97 + number)}") for number in range(14)]
    lines = text_of("github", hostile_reports.whole(node(*findings))).splitlines()
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == 10
    assert errors[0] == ("::error title=a.check-00::message a%0Aabout this check: gpunode checks a.check-00")
    assert errors[-1].startswith("::error title=5 more findings::a.check-09, a.check-10")
    assert lines[0].startswith("::notice title=gpunode validate::1 node failed")


@pytest.mark.parametrize("name", formats.NAMES)
def test_a_report_is_valid_on_a_stream_without_its_characters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr("sys.stdout", stdout)
    formats.show(name, hostile_reports.hostile(7, 5), verbose=True)
    stdout.flush()
    READERS.get(name, len)(raw.getvalue().decode("ascii"))
