"""What is written by hand in a second place: tables and claims of pages, and what the simulator knows."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mutants_gpu
import mutants_links
import pytest
from bundles import Mutant, apply, copied, hgx
from docs_tables import MARK, with_tables
from published_rules import rules, tables

from gpunode.catalog import load
from gpunode.checks import registry
from gpunode.cli import run
from gpunode.cli.verbs import VERBS
from gpunode.facts.parsers.kinds import KINDS
from gpunode.lab.hardware import names
from gpunode.lab.simulator import faults

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def first_column(page: str, heading: str) -> set[str]:
    """Return the quoted words in the first cells of the first table below a heading."""
    _, separator, rest = with_tables((DOCS / page).read_text(encoding="utf-8")).partition(f"\n{heading}\n")
    assert separator, f"docs/{page} has no heading {heading}"
    table = re.search(r"(?m)^\| ?---.*\n((?:\|.*\n)+)", rest)
    cells = re.findall(r"(?m)^\| ([^|]*`[^|]*) \|", table[1] if table else "")
    return {quoted.split()[0] for cell in cells for quoted in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("page", "heading", "existing"),
    [
        ("parse.md", "## Kinds", set(KINDS)),
        ("lab.md", "## Simulated hardware", set(names())),
        ("lab.md", "### Faults", set(faults.KINDS)),
    ],
    ids=["kinds of parse", "simulated hardware", "simulated faults"],
)
def test_a_table_lists_what_there_is(page: str, heading: str, existing: set[str]) -> None:
    assert first_column(page, heading) == existing, f"docs/{page}: the table below {heading} is out of date"


def test_the_front_page_has_the_number_of_checks() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(\d+) checks", readme) == [str(len(list(registry)))], "README.md: correct the number of checks"


def mutant(mutants: list[Mutant], check: str, name: str) -> dict[str, object]:
    """A simulated node with the fault that a check must find."""
    fault = next(fault for fault in mutants if (fault.check, fault.name) == (check, name))
    return apply(fault.base(), fault.edits)


def test_the_front_page_shows_what_the_program_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {
        "gpu-01": copied(hgx()),
        "gpu-02": mutant(mutants_links.MUTANTS, "link.pcie-width", "half the lanes"),
        "gpu-03": mutant(mutants_gpu.MUTANTS, "gpu.remapped-rows", "remapping failed"),
    }
    for name, document in nodes.items():
        text = json.dumps(document | {"host": name, "simulated": True})
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, shown = readme.partition("$ gpunode validate --replay bundles/\n")
    assert run(["validate", "--replay", str(tmp_path)]) == 1
    # A slow machine adds the time that the run took.
    printed = re.sub(r"\(\d+\.\d s\)", "", capsys.readouterr().out)
    assert re.sub(" +", " ", printed) == re.sub(" +", " ", shown.partition("```")[0])


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]*`", lambda match: match[0].replace("](", ""), text)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as hosts of repositories name them."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(page))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


def broken_links(page: Path) -> Iterator[str]:
    """The links of a page to files or headings that do not exist."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            yield target


PAGES = [*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("roles/*/README.md"), *ROOT.glob("images/*/README.md")]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](#a-b-c) [y](none.md) ![z](z.png) [w](page.md#d)\n`[code](no)`\n", encoding="utf-8")
    assert list(broken_links(page)) == ["none.md", "z.png", "page.md#d"]


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+)", prose(page))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_is_linked_from_another_one() -> None:
    pages = {path.resolve() for path in (ROOT / "README.md", *DOCS.glob("*.md"))}
    targets = {target for page in pages for target in linked(page) - {page}}
    assert {page.name for page in pages - targets} == {"README.md"}


@pytest.mark.parametrize(
    "page", sorted(page.name for page in DOCS.glob("*.md") if MARK.search(page.read_text("utf-8")))
)
def test_a_reader_of_the_file_learns_what_prints_the_table(page: str) -> None:
    """Tables are generated for the site: the section names a command, or the file that the table is made from."""
    before = MARK.split((DOCS / page).read_text(encoding="utf-8"))[:-1:2]
    for section in (text.rpartition("\n## ")[2] for text in before):
        quoted = re.findall(r"`([^`\n]+)`|(?m:^(gpunode .*))", section)
        named = [text for pair in quoted for text in pair if text.startswith("gpunode ") or (ROOT / text).is_file()]
        assert named or "sbom.cdx.json" in section or "# HELP" in section, section


@pytest.mark.parametrize("verb", VERBS)
def test_a_page_shows_every_verb(verb: str) -> None:
    pages = [*DOCS.glob("*.md"), ROOT / "README.md"]
    shown = [page.name for page in pages if f"gpunode {verb}" in page.read_text(encoding="utf-8")]
    assert shown, f"no page of docs/ shows `gpunode {verb}`"


@pytest.mark.parametrize("fault", faults.KINDS)
def test_a_test_sets_every_fault(fault: str) -> None:
    tests = [*(ROOT / "tests/unit/lab").glob("*.py"), *(ROOT / "tests/lab").glob("*.py")]
    assert any(f'"{fault}"' in path.read_text(encoding="utf-8") for path in tests), (
        f"no test in tests/unit/lab sets the fault {fault}"
    )


REFERENCE = {"guides.md", "failures.md", "workload-hardware.md", "driver-matrix.md"}
"""Tables with a row for each topic, failure, machine or system; tests hold their rows."""
MOST_WORDS = 20_565
"""Of all other pages together. Raise it only with a reason: what a user looks up is generated (make docs, --help)."""


def test_the_pages_stay_short() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md")}
    assert set(words) > REFERENCE
    total = sum(number for name, number in words.items() if name not in REFERENCE)
    assert total <= MOST_WORDS, f"docs/*.md: {total - MOST_WORDS} words too many: shorten the page that you changed"


GUIDES = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
TOPICS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in GUIDES.splitlines()
    if re.match(r"\| \d+ \|", line)
]
STATES = ("proven", "built", "documented", "missing", "not sensible")
FILES = ("docs/", "tests/", "contrib/", "inventory/")


def answers(text: str) -> list[str]:
    """Return the verbs, checks, roles and files of a cell that exist."""
    checks, roles = {check.id for check in registry}, {path.name for path in (ROOT / "roles").iterdir()}
    existing = []
    for quoted in re.findall(r"`([^`]+)`", text):
        verb = re.match(r"gpunode ([a-z]+)", quoted)
        known = (verb and verb[1] in VERBS) or quoted in checks or quoted in roles
        existing += [quoted] if known or (quoted.startswith(FILES) and (ROOT / quoted).is_file()) else []
    return existing


def test_every_topic_has_its_row() -> None:
    assert [len(row) for row in TOPICS] == [4] * len(TOPICS)
    assert [int(row[0]) for row in TOPICS] == list(range(1, 141))
    assert len({row[1] for row in TOPICS}) == len(TOPICS)


def test_every_answer_exists() -> None:
    assert {row[3] for row in TOPICS} <= set(STATES)
    assert [row[:3] for row in TOPICS if row[3] in STATES[:3] and not answers(row[2])] == []
    dotted = {word for row in TOPICS for word in re.findall(r"`([a-z]+\.[a-z-]+)`", row[2])}
    assert dotted - {check.id for check in registry} - {"ddp.sharded"} == set()
    assert [row[:2] for row in TOPICS if len(row[2]) < 8] == []


def test_the_page_counts_its_states() -> None:
    counted = Counter(row[3] for row in TOPICS)
    head = GUIDES.partition("\n- **")[0].replace("\n", " ")
    stated = {name: int(number) for number, name in re.findall(rf"(\d+) ({'|'.join(STATES)})", head)}
    assert stated == {name: counted[name] for name in STATES}
    assert (counted["documented"], counted["missing"]) == (0, 0)


def test_a_row_without_its_answer_is_found() -> None:
    assert answers(
        "`gpunode top`, `gpu.stuck`, role `storage`, `docs/top.md`, `docs/none.md`, `gpunode fly`, `gpu.fly`"
    ) == [
        "gpunode top",
        "gpu.stuck",
        "storage",
        "docs/top.md",
    ]


PUBLISHED = [row for part in rules() for row in part["rules"]]


def test_each_rule_has_a_line() -> None:
    assert len(re.findall(r"(?m)^\| (?!rule|---)", tables())) == len(PUBLISHED)


def test_every_row_names_what_there_is_and_a_reason() -> None:
    known = {check.id for check in registry}
    for row in PUBLISHED:
        assert set(row) <= {"rule", "ours", "limits", "xids", "why"}, row["rule"]
        assert set(row["ours"]) <= known, row["rule"]
        assert row["why"].strip().endswith("."), row["rule"]
        assert all(load().xid(number) for number in row.get("xids", ())), row["rule"]


def test_a_limit_belongs_to_a_check_of_its_row() -> None:
    for row in PUBLISHED:
        thresholds = {limit.name for check in row["ours"] for limit in registry[check].thresholds}
        assert set(row.get("limits", ())) <= thresholds, row["rule"]


def test_what_health_validation_publishes_as_numbers_is_ours_too() -> None:
    """Their figures, as the reference has them: a change of ours has to be explained on the page."""
    limits = registry.thresholds
    power = [limits[f"gpu.power-draw.{name}-watts"].by["gb200"] for name in ("least", "most")]
    flaps = [limits["rdma.flaps.long"].default, limits["rdma.flaps.long-outages"].default]
    links = [load().gpus[model].nvlink for model in ("h100-sxm5-80gb", "gb200", "gb300")]
    speeds = [link.line_gb_per_s for link in links if link is not None]
    nodes = [load().platform(f"{name}-nvl72-tray-4").numa_nodes for name in ("gb200", "gb300")]
    assert (power, flaps, speeds, nodes) == ([65, 1500], [30, 1], [26.562, 53.125, 53.125], [34, 34])


SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_each_promise_names_tests_that_exist() -> None:
    table = SECURITY.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(rows) >= 11
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)`", row)
        assert named, row
        assert [name for name in named if not (ROOT / name).is_file()] == [], row


def test_all_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:tests|gpunode|roles)/[\w/.]+)`", SECURITY))
    assert [name for name in named if not (ROOT / name).exists()] == []
