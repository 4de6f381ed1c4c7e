"""The report for people."""

import io
import re
from collections import Counter

import pytest

from gpunode.checks import Finding, Identity, RunningStack, State, Status, registry
from gpunode.checks.actions import PROVISION, action
from gpunode.judging.report import NodeReport, judged, report, unreachable
from gpunode.report import console
from gpunode.report.fleet import CAUSES_FIRST, of_nodes
from gpunode.report.summary import Origin, of_run

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


def fleet(*, deviating: int, of: int) -> list[NodeReport]:
    """Nodes of which some have one of five faults, each with figures of its own."""
    faults = ("link.pcie-width", "gpu.ecc-uncorrected", "driver.held", "gpu.temperature", "rdma.ports")
    nodes = []
    for number in range(of):
        findings = [GOOD]
        if number % (of // deviating) == 0:
            check = faults[number // (of // deviating) % len(faults)]
            status = Status.WARN if check == "driver.held" else Status.FAIL
            message = f"{number} of 16 at 0000:{number:02x}:00.0"
            findings.append(finding(check, status, message, f"Look at slot {number}."))
        nodes.append(node(f"gpu-{number:03d}", *findings))
    return nodes


def heads(output: str) -> list[str]:
    """Return the lines of findings."""
    return re.findall(r"(?m)^(?:FAIL|ERROR|WARN|note|pass|skip|fail) .*", output)


def test_a_healthy_node_is_two_lines() -> None:
    assert text(node("well", GOOD, finding("a.skipped", Status.SKIP))) == (
        "1 node     well  0 GPUs  535.261.03, not loaded  ok\n1 node ok (1.0 s); checks: 1 passed, 1 skipped\n"
    )


def test_the_worst_finding_is_first_and_the_verdict_last() -> None:
    lines = text(
        node("a-well", GOOD),
        node("b-warned", finding("a.warned", Status.WARN)),
        node("c-broken", finding("a.warned", Status.WARN), finding("an.error", Status.ERROR), BAD, GOOD),
        unreachable("d-far", "no route to host", 1.0),
    ).splitlines()
    assert [line.split()[1] for line in heads("\n".join(lines))] == ["a.bad", "node.reachable", "an.error", "a.warned"]
    assert [line.split()[-1] for line in lines[:4]] == ["ok", "WARN", "ERROR", "FAIL"]
    assert "      fix  Mend it." in lines
    assert lines[-2] == "1 of 4 nodes failed, 1 could not be determined, 1 with warnings (1.0 s)"
    assert lines[-1] == "about a check: gpunode checks a.bad"


def test_equal_nodes_and_equal_findings_are_one_line() -> None:
    output = text(*(node(f"gpu-{number:02d}", BAD, GOOD) for number in (1, 2, 3, 7)), node("gpu-04", GOOD))
    assert output.count("it is broken") == output.count("Mend it.") == 1
    assert "FAIL  a.bad  gpu-[01-03,07]" in output.splitlines()
    assert [re.findall(r"gpu-\S+", line)[0] for line in output.splitlines()[:2]] == ["gpu-04", "gpu-[01-03,07]"]


def test_findings_that_differ_in_figures_alone_have_one_remedy() -> None:
    def hot(host: str, degrees: int) -> NodeReport:
        return node(host, finding("gpu.hot", Status.FAIL, f"{degrees} C at 0000:{degrees}:00.0", "Cool it."))

    few = text(hot("gpu-1", 91), hot("gpu-2", 92))
    assert heads(few) == ["FAIL  gpu.hot  gpu-1  91 C at 0000:91:00.0", "FAIL  gpu.hot  gpu-2  92 C at 0000:92:00.0"]
    assert few.count("fix") == 1
    many = text(*(hot(f"gpu-{number}", 90 + number) for number in range(1, 8)))
    assert heads(many) == ["FAIL  gpu.hot  gpu-[1-7]  91 C at 0000:91:00.0 (and 6 like it: -v)"]
    whole = text(*(hot(f"gpu-{number}", 90 + number) for number in range(1, 8)), verbose=True)
    assert len(heads(whole)) == 7
    other = text(hot("gpu-1", 91), node("gpu-2", finding("gpu.hot", Status.FAIL, "cold", "Cool it.")))
    assert other.count("fix") == 2


def test_a_remedy_names_the_address_if_there_is_one_alone() -> None:
    def rendered(*slots: str) -> str:
        remedy = "Reseat the card; lspci -vv -s SLOT shows the link."
        messages = [finding("link.pcie-width", Status.FAIL, f"x8 at {slot}", remedy) for slot in slots]
        return text(*(node(f"gpu-{number}", message) for number, message in enumerate(messages)))

    assert "lspci -vv -s 0000:b8:00.0 shows" in rendered("0000:b8:00.0", "0000:b8:00.0")
    assert "lspci -vv -s SLOT shows" in rendered("0000:b8:00.0", "0000:19:00.0")


def test_two_hundred_nodes_with_ten_that_deviate_are_twenty_lines() -> None:
    output = text(*fleet(deviating=10, of=200))
    print(output)
    assert len(output.splitlines()) <= 20
    assert "190 nodes" in output
    for number in range(0, 200, 20):
        assert f"{number:03d}" in output


def test_one_finding_of_many_components_is_one_line() -> None:
    hot = [
        Finding(check="gpu.hot", status=Status.FAIL, component=f"gpu{number}", message="too hot") for number in range(8)
    ]
    odd = Finding(check="gpu.hot", status=Status.FAIL, component="gpu at 0000:1a:00.0", message="colder")
    output = text(node("broken", *hot, odd))
    assert heads(output) == ["FAIL  gpu.hot  gpu[0-7]  too hot", "FAIL  gpu.hot  gpu at 0000:1a:00.0  colder"]


def test_errors_for_lack_of_the_same_data_are_one_line() -> None:
    lost = [finding(f"gpu.check-{letter}", Status.ERROR, "no answer") for letter in "abcde"]
    with_remedy = finding("gpu.check-f", Status.ERROR, "no answer", "Mend it.")
    output = text(node("broken", *lost, with_remedy))
    assert heads(output) == ["ERROR gpu.check-a, gpu.check-b, gpu.check-c and 3 more  no answer"]
    assert output.count("fix  Mend it.") == 1
    assert "gpu.check-d, gpu.check-e" in text(node("broken", *lost), verbose=True)


def test_causes_come_before_what_they_explain() -> None:
    checks = ("fabric.manager", "gpu.answers", "driver.tools-answer", "gpu.clocks", "driver.closure")
    output = text(node("broken", *(finding(check, Status.FAIL, check) for check in checks)))
    order = [line.split()[1] for line in heads(output)]
    assert order == ["driver.tools-answer", "gpu.answers", "fabric.manager", "driver.closure", "gpu.clocks"]


def test_notes_are_one_line() -> None:
    notes = [finding(f"a.note-{number}", Status.NOTE) for number in range(6)]
    output = text(node("gpu-1", GOOD, *notes), node("gpu-2", GOOD, notes[3]))
    assert heads(output) == [
        "note  a.note-3 on 2 nodes, a.note-0 on 1 node, a.note-1 on 1 node, a.note-2 on 1 node and 2 more (details: -v)"
    ]
    assert len(heads(text(node("gpu-1", GOOD, *notes), verbose=True))) == 7


def with_actions(*actions: str, remedy: str = "Hold them.") -> Finding:
    steps = tuple(action(text) for text in actions)
    run = f" Run: {PROVISION} -t nvidia_driver_install"
    return finding("driver.held", Status.FAIL, remedy=remedy + run).model_copy(update={"actions": steps})


INSTALL = "run_role:nvidia_driver:nvidia_driver_install"


@pytest.mark.parametrize(
    ("hosts", "inventories", "command"),
    [
        (("gpu-1", "gpu-2"), ("my hosts.yml",), "-i 'my hosts.yml' -l gpu-1,gpu-2"),
        (("gpu-1",), ("a.yml", "b.yml"), "-i a.yml -i b.yml -l gpu-1"),
        (("gpu-1",), (), "-i INVENTORY -l gpu-1"),
        (("-rf; reboot", "$(id)"), ("a.yml",), "-i a.yml -l HOST"),
    ],
)
def test_the_command_of_a_role_can_be_pasted(
    hosts: tuple[str, ...], inventories: tuple[str, ...], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [node(host, with_actions(INSTALL, "restart_os")) for host in hosts]
    whole = f"      fix  gpunode provision {command} -t nvidia_driver_install"
    with of_run(Origin(inventories)):
        lines = text(*nodes).splitlines()
        assert whole in lines
        assert "      then reboot" in lines
        assert "Hold them." not in "\n".join(lines)
        assert whole in re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(monkeypatch, 40, *nodes)).splitlines()


def test_what_a_person_does_first_comes_before_the_command() -> None:
    lines = text(node("gpu-1", with_actions("fix_configuration", INSTALL, remedy="Remove the others."))).splitlines()
    index = lines.index("      fix  Remove the others.")
    assert lines[index + 1] == "           gpunode provision -i INVENTORY -l gpu-1 -t nvidia_driver_install"


def test_who_has_to_be_drained_is_named() -> None:
    bad = BAD.model_copy(update={"recommended_state": State.DRAIN})
    lines = text(node("gpu-1", bad), node("gpu-2", bad), node("gpu-3", GOOD)).splitlines()
    assert lines[-2].endswith("drain gpu-[1-2]")
    assert len(lines[-2]) == 80
    assert not any("drain" in line for line in text(node("gpu-1", BAD)).splitlines()[:1])


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
        (host, check, component, finding.group.status, finding.group.message)
        for finding in folded
        for host in finding.hosts
        for check in finding.group.checks
        for component in finding.group.components
    )
    expected = Counter(
        (each.host, finding.check, finding.component, finding.status, finding.message)
        for each in nodes
        for finding in each.findings
    )
    assert unfolded == expected


def test_in_a_file_texts_stay_whole_and_plain() -> None:
    output = text(node("broken", BAD))
    assert ESCAPE not in output
    assert f"      {BAD.message}" in output.splitlines()
    assert max(len(line) for line in output.splitlines() if BAD.message not in line) <= 80


def test_verbose_shows_what_passed_and_the_page_of_a_check() -> None:
    assert "a.good" in text(node("well", GOOD), verbose=True)
    assert "a.good" not in text(node("well", GOOD))
    assert "      page gpunode checks a.bad" in text(node("broken", BAD), verbose=True).splitlines()


def test_simulated_is_shown_once() -> None:
    assert text(node("lab", GOOD, simulated=True)).startswith("1 node · SIMULATED ")
    output = text(node("lab", GOOD, simulated=True), node("real", GOOD))
    assert output.count("SIMULATED") == 1
    assert re.search(r"(?m)^  lab .* SIMULATED$|nodes +lab .* SIMULATED$", output)
    assert "SIMULATED" not in text(node("real", GOOD))


def test_signs_have_plain_equals() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    document = report([node("lab", GOOD, simulated=True)], level="quick", version="0", started_at="", finished_at="")
    console.write(document, stream)
    stream.flush()
    assert raw.getvalue().startswith(b"1 node - SIMULATED ")


def test_what_a_node_reports_does_not_steer_the_terminal() -> None:
    evil = finding("a.bad", Status.FAIL, f"{ESCAPE}[2J[red]gone[/red]\u202e\rnew")
    output = text(node(f"ev{ESCAPE}il", evil))
    assert ESCAPE not in output
    assert "\r" not in output
    assert "\\x1b[2J[red]gone[/red]" in output


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
    output = on_terminal(monkeypatch, columns, NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    folded = [line for line in plain.splitlines() if not line.startswith("about a check: ")]
    assert max(map(len, folded)) <= columns
    assert BAD.message.replace(" ", "") in re.sub(r"\s", "", plain)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_fleet_on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    others = [node(f"gpu-{number:03d}", *([BAD] if number % 2 else [GOOD])) for number in range(60)]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(monkeypatch, columns, *others, NO_COLOR="1"))
    assert max(len(line) for line in plain.splitlines()) <= columns
    squeezed = re.sub(r"\s", "", plain)
    assert squeezed.count(BAD.message.replace(" ", "")) == 1
    assert squeezed.count("broken,gpu-[001,003,005,007") == 2
    assert squeezed.count("gpu-[000,002,004,006") == 1


def test_colours_on_a_terminal_and_none_with_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    assert colour.search(on_terminal(monkeypatch, 80))
    assert not colour.search(on_terminal(monkeypatch, 80, NO_COLOR="1"))


SITE = "https://docs.example.org/gpunode/"
LINK = "\x1b]8;"


def test_the_id_of_a_check_is_a_link_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODE_DOCS_URL", SITE)
    shown = on_terminal(monkeypatch, 80)
    (page,) = set(re.findall(r"\x1b\]8;[^;]*;([^\x1b]+)\x1b", shown))
    assert page == f"{SITE}checks/{BAD.check}.html"
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        with monkeypatch.context() as patch:
            assert LINK not in on_terminal(patch, 80, **environment)
    assert LINK not in text(node("broken", BAD))


@pytest.mark.parametrize("base", ["", "docs", "javascript://x", "https://a b", "https://a\x1b]8;;\x07", "https://a\nb"])
def test_an_address_that_is_none_makes_no_link(monkeypatch: pytest.MonkeyPatch, base: str) -> None:
    assert LINK not in on_terminal(monkeypatch, 80, GPUNODE_DOCS_URL=base)
