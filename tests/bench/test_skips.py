"""docs/checks.md holds the reasons for a skip that the checks have now."""

import re

from skips import PAGE, page, reasons

from gpunode.checks import registry

VAGUE = re.compile(r"not needed|not seen|could not be determined|says more|says why|perhaps", re.I)


def test_the_table_of_skips_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run .venv/bin/python tests/bench/skips.py"


def test_a_skip_names_what_was_observed_or_who_reports_the_cause() -> None:
    messages = {message for of_check in reasons().values() for message in of_check}
    assert [message for message in messages if VAGUE.search(message)] == []
    rooms = {check.id.split(".")[0] for check in registry}
    named = {word for message in messages for word in re.findall(r"[a-z]+\.[a-z-]+", message)}
    assert {word for word in named if word.split(".")[0] in rooms} <= {check.id for check in registry}
