"""The pages of the documentation's site, as the generator gets them: complete, linked, and without stray markup."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import docs_site
import pytest
import yaml
from docs_tables import MARK, TABLES
from hypothesis import given
from hypothesis import strategies as st
from test_pages import broken_links, prose

from gpunode.checks import registry
from gpunode.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    docs_site.write_pages(folder)
    return folder


def test_links_within_the_site_lead_to_pages_and_headings(pages: Path) -> None:
    """Headings as hosts of repositories name them; ``make docs`` looks at those of the site."""
    all_pages = sorted(pages.rglob("*.md"))
    assert len(all_pages) > 220
    checked = [page for page in all_pages if page.name != "CHANGELOG.md"]
    assert {str(page): list(broken_links(page)) for page in checked if list(broken_links(page))} == {}


def test_every_check_role_and_verb_has_its_page(pages: Path) -> None:
    roles = {path.parent.name for path in ROOT.glob("roles/*/README.md")}
    for folder, names in (("checks", {check.id for check in registry}), ("roles", roles), ("verbs", set(VERBS))):
        assert {path.stem for path in (pages / folder).glob("*.md")} >= names
    listed = (pages / "checks.md").read_text(encoding="utf-8")
    assert [check.id for check in registry if f"(checks/{check.id}.md)" not in listed] == []


def test_every_table_is_in_a_page_of_the_site(pages: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md")]
    assert sorted(name for text in texts for name in MARK.findall(text)) == sorted(TABLES)
    assert [page.name for page in pages.rglob("*.md") if MARK.search(page.read_text(encoding="utf-8"))] == []
    for page, table in (("facts", "| `os` |"), ("stack", "| R01-minor-floor |"), ("expectations", "| hgx-h100-8 |")):
        assert table in (pages / f"{page}.md").read_text(encoding="utf-8")


def test_a_role_page_lists_every_variable(pages: Path) -> None:
    for specs in ROOT.glob("roles/*/meta/argument_specs.yml"):
        text = (pages / "roles" / f"{specs.parents[1].name}.md").read_text(encoding="utf-8")
        for part in yaml.safe_load(specs.read_text(encoding="utf-8"))["argument_specs"].values():
            assert [name for name in part.get("options", {}) if f"| <code>{name}</code> |" not in text] == []


def test_a_check_page_has_what_the_verb_prints(pages: Path) -> None:
    text = (pages / "checks" / "link.pcie-width.md").read_text(encoding="utf-8")
    for line in docs_site.printed("checks", "link.pcie-width").splitlines()[1:]:
        assert line.strip() in text.replace("\\", ""), line


def test_the_navigation_has_every_page_once(pages: Path) -> None:
    def leaves(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [leaf for part in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(part)]

    listed = leaves(docs_site.navigation(pages))
    of_checks = {f"checks/{check.id}.md" for check in registry}
    assert sorted(listed) == sorted({str(path.relative_to(pages)) for path in pages.rglob("*.md")} - of_checks)


def test_every_page_of_the_navigation_exists() -> None:
    existing = {path.stem for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"))}
    assert {page for named in docs_site.NAVIGATION.values() for page in named} <= existing


def test_lists_are_lists_for_the_generator() -> None:
    page = (
        "Text:\n- one\n  more\n- two\n\n  ```\n  - code\n  ```\n\nText\n1. a\n   - b\n\nEnd\n- x\n```\n- y\n  z\n```\n"
    )
    assert docs_site.spaced(page) == (
        "Text:\n\n- one\n    more\n- two\n\n    ```\n    - code\n    ```\n\nText\n\n1. a\n    - b\n\n"
        "End\n\n- x\n```\n- y\n  z\n```\n"
    )


def test_no_page_has_a_list_that_the_generator_reads_as_text(pages: Path) -> None:
    for page in pages.rglob("*.md"):
        lines = prose(page).splitlines()
        for before, line in pairwise(lines):
            begins = re.match(r"[-*] ", line) and before.strip() and not before.startswith(" ")
            assert not begins or docs_site.ITEM.match(before), f"{page.name}: {before!r} {line!r}"


@given(st.text(alphabet="ab`*_|<>[](){}\\&#!-\n ", max_size=20))
def test_text_of_the_program_has_no_meaning_as_markup(text: str) -> None:
    escaped = docs_site.plain(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_|<>\[\]{}#!]", escaped)
    assert re.sub(r"\\(.)", r"\1", escaped).replace("&amp;", "&") == text


@given(st.text(alphabet="ab`|<>&\\", max_size=12))
def test_a_cell_with_a_bar_in_code_stays_one_cell(text: str) -> None:
    line = docs_site.cells(f"| `{text.replace('`', '').replace('|', chr(92) + '|')}` | b |")
    if "|" in text:
        assert line.count("|") == 3
