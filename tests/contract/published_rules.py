"""The page of rules that others publish, beside ours: ``python tests/contract/published_rules.py`` writes it.

What is ours comes from the code: the checks' texts, the limits' values, the severities of Xids.
"""

from pathlib import Path
from typing import Any

import yaml

from gpunode.catalog import load
from gpunode.checks import registry

PAGE = Path(__file__).parents[2] / "docs/published-rules.md"
RULES = Path(__file__).with_suffix(".yml")
HEAD = """\
# Published rules, and ours

What others publish about the health of GPU nodes, as far as it concerns what gpunode sees, beside the check that
judges the same, with the reason for each difference. A limit is shown with its default; a policy can set another
([policy.md](policy.md)).

The page is written by `.venv/bin/python tests/contract/published_rules.py` from `tests/contract/published_rules.yml`;
limits and severities come from the code, and a test fails while it is out of date.
"""


def rules() -> list[dict[str, Any]]:
    """The parts of the page."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return found


def page() -> str:
    """The page as it is now."""
    return HEAD + "".join(_part(part) for part in rules())


def _part(part: dict[str, Any]) -> str:
    head = f"\n## {part['title']}\n\nSource: {part['source']}.\n\n| theirs | ours | why |\n|---|---|---|\n"
    return head + "".join(f"| {row['rule']} | {_ours(row)} | {row['why'].strip()} |\n" for row in part["rules"])


def _ours(row: dict[str, Any]) -> str:
    words = [", ".join(f"`{check}`" for check in row["ours"]) or "none"]
    words += [f"`{name}` {_limit(name)}" for name in row.get("limits", ())]
    words += [f"Xid {number}: {_severity(number)}" for number in row.get("xids", ())]
    return "<br>".join(words)


def _limit(name: str) -> str:
    limit = registry.thresholds[name]
    by = ", ".join(f"{key} {value:g}" for key, value in limit.by.items())
    return f"{limit.default:g} {limit.unit}{f' ({by})' if by else ''}"


def _severity(number: int) -> str:
    row = load().xid(number)
    assert row is not None, number
    return f"{row.severity}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
