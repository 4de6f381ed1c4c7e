"""The tables of published rules and gpunode's checks, for the documentation's site.

Checks, values of limits and severities of Xids come from the code.
"""

from pathlib import Path
from typing import Any

import yaml

from gpunode.catalog import load
from gpunode.checks import registry

RULES = Path(__file__).with_suffix(".yml")


def rules() -> list[dict[str, Any]]:
    """Return the parts of the page."""
    rows: list[dict[str, Any]] = yaml.load(RULES.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return rows


def tables() -> str:
    """Return a section for each project."""
    return "".join(_part(part) for part in rules())


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
