"""The page of published rules and gpunode's checks: ``python tests/contract/published_rules.py`` writes it.

Checks, values of limits and severities of Xids come from the code.
"""

from pathlib import Path
from typing import Any

import yaml

from gpunode.catalog import load
from gpunode.checks import registry

PAGE = Path(__file__).parents[2] / "docs/published-rules.md"
RULES = Path(__file__).with_suffix(".yml")
HEAD = """\
# Published rules and gpunode's checks

Rules of other projects about the health of GPU nodes, with the corresponding check of gpunode and the reason for each
difference. A limit is shown with its default; a policy can set another ([policy.md](policy.md)).

`.venv/bin/python tests/contract/published_rules.py` writes this page from `tests/contract/published_rules.yml`; limits
and severities come from the code, and a test fails if the page is out of date.
"""


def rules() -> list[dict[str, Any]]:
    """Return the parts of the page."""
    found: list[dict[str, Any]] = yaml.load(RULES.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return found


def page() -> str:
    """Return the current page."""
    return HEAD + "".join(_part(part) for part in rules())


def _part(part: dict[str, Any]) -> str:
    columns = "| rule | check of gpunode | difference |\n|---|---|---|\n"
    head = f"\n## {part['title']}\n\nSource: {part['source']}.\n\n{columns}"
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
