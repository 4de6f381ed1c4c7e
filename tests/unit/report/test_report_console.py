"""The report for people."""

import io
import re
from collections import Counter

import pytest

from gpunode.checks import Finding, Identity, RunningStack, Status, registry
from gpunode.judging.report import NodeReport, judged, report, unreachable
from gpunode.report import console
from gpunode.report.folding import CAUSES_FIRST, of_nodes

ESCAPE = "\x1b"


def node(host: str, *findings: Finding, simulated: bool = False) -> NodeReport:
    stack = RunningStack(
        os="Debian GNU/Linux 12 (bookworm)", kernel="6.1.0-56-cloud-amd64", driver_packages="535.261.03"
    )
    return judged(host, Identity(simulated=simulated, stack=stack, gpus=()), findings, 1.0)


def finding(check: str, status: Status, message: str = "so it is", remedy: str | None = None) -> Finding:
    return Finding(check=check, status=status, component="node", message=message, remedy=remedy)


def text(*nodes: NodeReport, verbose: bool = False) -> str:
    document = report(nodes, level="quick", version="0", started_at="", finished_at="")
    return console.as_text(document, verbose=verbose)


GOOD = finding("a.good", Status.PASS)
BAD = finding("a.bad", Status.FAIL, "it is broken " + "and so on " * 20, "Mend it.")


def test_a_healthy_node_is_one_line() -> None:
    assert text(node("well", GOOD, finding("a.skipped", Status.SKIP))) == "PASS  well  1 passed, 1 skipped\n"


def test_the_worst_finding_and_the_worst_node_come_first() -> None:
    lines = text(
        node("a-well", GOOD),
        node("b-warned", finding("a.warned", Status.WARN)),
        node("c-broken", finding("a.warned", Status.WARN), finding("an.error", Status.ERROR), BAD, GOOD),
        unreachable("d-far", "no route to host", 1.0),
    ).splitlines()
    findings = [line.split()[1].rstrip(":") for line in lines if re.match(r"(fail|error|warn) ", line)]
    assert findings == ["a.bad", "node.reachable", "an.error", "a.warned"]
    heads = [line.split()[1] for line in lines if re.match(r"[A-Z]+ +[a-d]-", line)]
    assert heads == ["c-broken", "d-far", "b-warned", "a-well"]
    assert max(lines.index(line) for line in lines if line.startswith("warn ")) < lines.index(
        next(line for line in lines if line.startswith("FAIL "))
    )
    assert "to do: Mend it." in "".join(lines)
    assert "4 nodes: 1 fail, 1 error, 1 warn, 1 pass" in lines[-1]


def test_an_identical_finding_is_told_once_with_the_nodes_that_have_it() -> None:
    found = text(*(node(f"gpu-{number:02d}", BAD, GOOD) for number in (1, 2, 3, 7)), node("gpu-04", GOOD))
    assert found.count("it is broken") == 1
    assert found.count("Mend it.") == 1
    assert "      on: gpu-[01-03,07] (4 nodes)" in found.splitlines()
    assert [line for line in found.splitlines() if line.startswith("PASS")] == ["PASS  gpu-04  1 passed"]
    assert len([line for line in found.splitlines() if line.startswith("FAIL")]) == 4


def test_what_only_some_nodes_have_stands_for_itself() -> None:
    other = finding("a.bad", Status.FAIL, "it is broken otherwise")
    found = text(node("gpu-1", BAD), node("gpu-2", BAD, other))
    assert "on: gpu-[1-2] (2 nodes)" in found
    assert found.index("on: gpu-[1-2]") < found.index("it is broken otherwise") < found.index("on: gpu-2\n")


def test_one_finding_of_many_components_is_one_line() -> None:
    hot = [
        Finding(check="gpu.hot", status=Status.FAIL, component=f"gpu{number}", message="too hot") for number in range(8)
    ]
    odd = Finding(check="gpu.hot", status=Status.FAIL, component="gpu at 0000:1a:00.0", message="colder")
    found = text(node("broken", *hot, odd))
    assert "  fail  gpu.hot [gpu[0-7]]: too hot" in found.splitlines()
    assert "  fail  gpu.hot [gpu at 0000:1a:00.0]: colder" in found.splitlines()


def test_errors_for_want_of_the_same_data_are_one_line() -> None:
    lost = [finding(f"gpu.check-{letter}", Status.ERROR, "no answer") for letter in "abcde"]
    with_remedy = finding("gpu.check-f", Status.ERROR, "no answer", "Mend it.")
    found = text(node("broken", *lost, with_remedy))
    assert "  error gpu.check-a, gpu.check-b, gpu.check-c and 3 more: no answer" in found.splitlines()
    assert found.count("to do: Mend it.") == 1
    assert "gpu.check-d, gpu.check-e" in text(node("broken", *lost), verbose=True)


def test_causes_come_before_what_they_explain() -> None:
    checks = ("fabric.manager", "gpu.answers", "driver.tools-answer", "gpu.clocks", "driver.closure")
    found = text(node("broken", *(finding(check, Status.FAIL, check) for check in checks)))
    order = [line.split()[1].rstrip(":") for line in found.splitlines() if line.startswith("  fail")]
    assert order == ["driver.tools-answer", "gpu.answers", "fabric.manager", "driver.closure", "gpu.clocks"]


def test_every_cause_is_a_check() -> None:
    assert [check for check in CAUSES_FIRST if check not in registry] == []


def test_folding_loses_no_finding() -> None:
    nodes = [
        node(
            f"n{number}",
            *(
                Finding(check=f"c.{check}", status=status, component=f"gpu{gpu}", message=f"{check % 2}")
                for check in range(4)
                for gpu in range(number + 1)
                for status in (Status.FAIL, Status.ERROR)
            ),
        )
        for number in range(4)
    ]
    folded = of_nodes(nodes, frozenset({Status.FAIL, Status.ERROR}))
    unfolded = Counter(
        (host, check, component, one.group.status, one.group.message)
        for one in folded
        for host in one.hosts
        for check in one.group.checks
        for component in one.group.components
    )
    given = Counter(
        (each.host, found.check, found.component, found.status, found.message)
        for each in nodes
        for found in each.findings
    )
    assert unfolded == given


def test_in_a_file_lines_stay_whole_and_plain() -> None:
    found = text(node("broken", BAD))
    assert ESCAPE not in found
    assert BAD.message in found


def test_verbose_shows_what_passed() -> None:
    assert "a.good" in text(node("well", GOOD), verbose=True)
    assert "a.good" not in text(node("well", GOOD))


def test_simulated_is_said_plainly() -> None:
    found = text(node("lab", GOOD, simulated=True), node("real", GOOD))
    assert re.search(r"(?m)^PASS  lab  SIMULATED", found)
    assert "1 of 2 nodes are simulated: the result does not apply to a real GPU." in found
    assert "imulated" not in text(node("real", GOOD))


def test_what_a_node_says_does_not_steer_the_terminal() -> None:
    evil = finding("a.bad", Status.FAIL, f"{ESCAPE}[2J[red]gone[/red]\u202e\rnew")
    found = text(node(f"ev{ESCAPE}il", evil))
    assert ESCAPE not in found
    assert "\r" not in found
    assert "\\x1b[2J[red]gone[/red]" in found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, *more: NodeReport, **environment: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    document = report([node("broken", BAD), *more], level="quick", version="0", started_at="", finished_at="")
    console.write(document, stream)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [24, 40, 80])
def test_a_narrow_terminal_folds_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    found = on_terminal(monkeypatch, columns, NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found)
    assert max(len(line) for line in plain.splitlines()) <= columns
    assert BAD.message.replace(" ", "") in re.sub(r"\s", "", plain)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_fleet_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    others = [node(f"gpu-{number:03d}", *([BAD] if number % 2 else [GOOD])) for number in range(60)]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(monkeypatch, columns, *others, NO_COLOR="1"))
    assert max(len(line) for line in plain.splitlines()) <= columns
    squeezed = re.sub(r"\s", "", plain)
    assert squeezed.count(BAD.message.replace(" ", "")) == 1
    assert "on:broken,gpu-[001,003,005" in squeezed or "on:gpu-[001,003,005" in squeezed
    assert all(f"gpu-{number:03d}" in plain for number in range(0, 60, 2))


def test_colours_on_a_terminal_and_none_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(on_terminal(monkeypatch, 80))
    assert not colour.search(on_terminal(monkeypatch, 80, NO_COLOR="1"))
