"""The report for people."""

import io
import re

import pytest

from gpunode.checks import Finding, Identity, Stack, Status
from gpunode.report import NodeReport, console, judged, report, unreachable

ESCAPE = "\x1b"


def node(host: str, *findings: Finding, simulated: bool = False) -> NodeReport:
    stack = Stack(os="Debian GNU/Linux 12 (bookworm)", kernel="6.1.0-56-cloud-amd64", driver_packages="535.261.03")
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


def test_worst_node_and_worst_finding_come_first() -> None:
    lines = text(
        node("a-well", GOOD),
        node("b-warned", finding("a.warned", Status.WARN)),
        node("c-broken", finding("a.warned", Status.WARN), finding("an.error", Status.ERROR), BAD, GOOD),
        unreachable("d-far", "no route to host", 1.0),
    ).splitlines()
    heads = [line.split()[1] for line in lines if re.match(r"[A-Z]+ +[a-d]-", line)]
    assert heads == ["c-broken", "d-far", "b-warned", "a-well"]
    of_broken = [line.split()[1].rstrip(":") for line in lines[:8] if re.match(r"  [a-z]+ +an?\.", line)]
    assert of_broken[:3] == ["a.bad", "an.error", "a.warned"]
    assert "to do: Mend it." in "".join(lines)
    assert "4 nodes: 1 fail, 1 error, 1 warn, 1 pass" in lines[-1]


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
    assert "1 of 2 nodes are simulated: this says nothing about a real GPU." in found
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


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, **environment: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    document = report([node("broken", BAD)], level="quick", version="0", started_at="", finished_at="")
    console.write(document, stream)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [24, 40, 80])
def test_a_narrow_terminal_folds_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    found = on_terminal(monkeypatch, columns, NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found)
    assert max(len(line) for line in plain.splitlines()) <= columns
    assert BAD.message.replace(" ", "") in re.sub(r"\s", "", plain)


def test_colours_on_a_terminal_and_none_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(on_terminal(monkeypatch, 80))
    assert not colour.search(on_terminal(monkeypatch, 80, NO_COLOR="1"))
