"""``gpunode plan --explain RULE`` as text for people."""

from collections.abc import Iterator

from gpunode.stack.explain import Explanation
from gpunode.text import listed

MOST_DRIVERS = 6


def as_text(found: Explanation) -> str:
    """Return the rule, its statements on the question, and its decisions."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Explanation) -> Iterator[str]:
    yield found.rule
    yield f"  means  {found.means}"
    yield f"  facts  {found.facts}"
    for saying in found.says:
        yield f"  {'refuses' if saying.refuses else 'warns'}: {saying.text}"
        if saying.drivers:
            yield f"    about {listed(saying.drivers, MOST_DRIVERS)}"
    for field, text in found.decided.items():
        yield f"  decides {field}: {text}"
    if not found.says and not found.decided:
        yield "  does not apply to this request"
    yield f"  chosen: {found.chosen}" if found.chosen else "  no stack matches"
