"""SECURITY.md: each promise names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_each_promise_names_tests_that_exist() -> None:
    table = TEXT.partition("## Promises")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(rows) >= 11
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)`", row)
        assert named, row
        assert [name for name in named if not (ROOT / name).is_file()] == [], row


def test_all_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:tests|gpunode|roles)/[\w/.]+)`", TEXT))
    assert [name for name in named if not (ROOT / name).exists()] == []
