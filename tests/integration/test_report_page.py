"""The HTML report in a browser: it loads, filters, is accessible in light and dark, and asks nothing of anyone."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from browser import PROGRAM, Browser, browser

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from bundles import Document, hgx, hgx_measured, pcie_4

from gpunode.cli import run

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="missing: chromium")
VIOLATIONS = """axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations.map(
  (one) => [one.id, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 200) + " " + node.failureSummary)]))"""
TYPED = """(async (text, statuses) => {
  const form = document.getElementById("filter");
  form.q.value = text;
  form.querySelectorAll("input[name=s]").forEach((box) => { box.checked = statuses.includes(box.value); });
  form.dispatchEvent(new Event("input", {bubbles: true}));
  await new Promise((then) => setTimeout(then, 250));
  const left = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility());
  return [left("details.node").map((one) => one.dataset.h), left(".heat tbody tr").length,
    left(".findings tbody tr").length, document.getElementById("shown").textContent];
})"""
ALL = ["fail", "error", "warn", "pass"]


def fleet() -> dict[str, Document]:
    """Return three nodes in good health, one with a narrow link, a slow pair on another, and one that is hostile."""
    narrow, slow = pcie_4(), hgx_measured()
    narrow["files"]["/sys/bus/pci/devices/0000:b8:00.0/current_link_width"] = "8"
    for record in slow["results"]:
        if record["record"] == "copy.peer":
            record["values"]["pairs"][1]["bandwidth_gb_per_s"] = 21.4
    hostile = "<img src=x onerror=alert(1)>\u202e{{ 7 * 7 }}"
    documents = {"hgx-1": hgx(), "l40s-1": pcie_4(), "l40s-2": narrow, "hgx-2": slow, hostile: pcie_4()}
    return {name: document | {"host": name} for name, document in documents.items()}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    bundles = folder / "bundles"
    bundles.mkdir()
    for number, document in enumerate(fleet().values()):
        (bundles / f"{number}.json").write_text(json.dumps(document), encoding="utf-8")
    earlier, path = folder / "earlier.json", folder / "report.html"
    run(["validate", "--replay", str(bundles / "0.json"), "--format", "json", "--output", str(earlier)])
    options = ["--since", str(earlier), "--format", "html", "--output", str(path)]
    assert run(["validate", "--replay", str(bundles), *options]) == 1
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as instance:
        yield instance


def test_the_page_loads_and_filters_without_a_message(chromium: Browser, page: Path) -> None:
    chromium.shape(1280, 900)
    chromium.open(page)
    assert chromium.run("document.querySelectorAll('svg.drawing').length") == 4
    assert chromium.run("document.querySelector('details.node[open] svg.drawing').getBoundingClientRect().height") > 200
    assert "only in the second run" in chromium.run("document.querySelector('[aria-labelledby=h-since]').innerText")
    hosts, rows, findings, shown = chromium.run(f"{TYPED}('', {ALL})")
    assert (len(hosts), rows, shown) == (5, 5, "5 of 5 nodes")
    assert findings >= 2
    assert chromium.run(f"{TYPED}('l40s-2', {ALL})")[:3] == [["l40s-2"], 1, 1]
    assert chromium.run(f"{TYPED}('pcie-width', {ALL})")[0] == ["l40s-2"]
    assert set(chromium.run(f"{TYPED}('', ['fail'])")[0]) == {"l40s-2", "hgx-2"}
    assert chromium.run(f"{TYPED}('no such node', {ALL})") == [[], 0, 0, "0 of 5 nodes"]
    hostile = chromium.run(f"{TYPED}('onerror', {ALL})")[0]
    assert "<img src=x onerror=alert(1)>\\x202e{{ 7 * 7 }}" in hostile
    assert chromium.problems == []


def test_a_cell_leads_to_its_check(chromium: Browser, page: Path) -> None:
    chromium.open(page)
    chromium.run("document.querySelector('#columns a').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    target = chromium.run("location.hash")
    assert chromium.run(f"document.querySelector({json.dumps(target)}).open") is True
    assert chromium.problems == []


def test_the_page_is_whole_without_scripts(page: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as other:
        other.without_scripts()
        other.open(page)
        assert other.run("document.getElementById('filter').checkVisibility()") is False
        assert other.run("document.querySelectorAll('.findings tbody tr').length") >= 2
        assert other.run("document.querySelector('details.node[open] svg.drawing').checkVisibility()") is True
        assert "both ends support x16" in other.run("document.querySelector('.findings').innerText")
        assert other.problems == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_nothing_on_the_page_keeps_anyone_out(chromium: Browser, page: Path, width: int, *, dark: bool) -> None:
    script, line = needs.axe_script()
    if script is None:
        pytest.skip(f"axe-core cannot be downloaded: {line}")
    chromium.shape(width, 900, dark=dark)
    chromium.open(page)
    # Of what is not in the window yet (content-visibility) axe-core sees no layout.
    chromium.run(
        "document.head.append(Object.assign(document.createElement('style'), "
        "{textContent: '* { content-visibility: visible !important; }'}));"
        "document.querySelectorAll('details').forEach((one) => { one.open = true; }); true"
    )
    chromium.run(script.read_text(encoding="utf-8") + "; true")
    assert chromium.run("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    assert chromium.run(VIOLATIONS) == []
    assert chromium.run("document.documentElement.scrollWidth") <= width
    assert chromium.run("document.querySelectorAll('svg.drawing').length") == 5
    chromium.shape(1280, 900)


def test_axe_finds_what_is_wrong(chromium: Browser, page: Path) -> None:
    script, line = needs.axe_script()
    if script is None:
        pytest.skip(f"axe-core cannot be downloaded: {line}")
    chromium.open(page)
    chromium.run(script.read_text(encoding="utf-8") + "; true")
    chromium.run("document.querySelector('label[for=q]').remove(); document.body.style.color = '#ddd'; true")
    assert "color-contrast" in {rule for rule, _ in chromium.run(VIOLATIONS)}
