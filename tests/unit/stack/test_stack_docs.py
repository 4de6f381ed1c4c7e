"""docs/stack.md says what the rules are."""

from pathlib import Path

from gpunode.stack.table import DECLARED, rules

PAGE = Path(__file__).parents[3] / "docs" / "stack.md"


def test_the_page_has_every_rule_as_it_is_declared() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| R")]
    assert rows == [f"| {rule} | {means} | {facts} |" for rule, means, facts in DECLARED]
    assert [rule.id for rule in rules] == [rule for rule, _, _ in DECLARED]
