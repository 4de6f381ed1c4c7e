"""The meaning of one rule, and its result for one question."""

from collections.abc import Collection, Mapping
from datetime import date

from pydantic import Field

from gpunode.catalog import Catalog
from gpunode.errors import UsageError
from gpunode.stack.candidates import Candidate, candidates
from gpunode.stack.model import NodePicture, Request, Stack, StackModel
from gpunode.stack.question import Question, must_be_known
from gpunode.stack.resolve import resolve
from gpunode.stack.rules import CandidateCase, Objection, rules

MOST_SAYINGS = 20


class Saying(StackModel):
    """One sentence of a rule, and the drivers that it applies to."""

    refuses: bool
    text: str
    drivers: tuple[str, ...]
    """``580.178.04 open``; empty: it applies to the question itself."""


class Explanation(StackModel):
    """One rule applied to one question."""

    rule: str
    means: str
    facts: str
    """Sources of its facts: sections of the catalog."""
    says: tuple[Saying, ...] = ()
    decided: Mapping[str, str] = Field(default_factory=dict)
    """Field of the chosen stack → the rule's reason for it."""
    chosen: str | None = None
    """The driver of the stack; None: no stack matches, or no question was asked."""


def rule_id(text: str, known: Collection[str] | None = None) -> str:
    """Return the id that ``R10`` or ``r10-gpu-min-driver`` stands for; raise UsageError if there is none."""
    ids = list(known if known is not None else (rule.id for rule in rules))
    name = text.strip().lower()
    matching = [rule for rule in ids if name in (rule.lower(), rule.lower().split("-", maxsplit=1)[0])]
    if len(matching) != 1:
        raise UsageError(f"--explain {text}: no such rule; known: {', '.join(ids)}")
    return matching[0]


def meaning(text: str) -> Explanation:
    """Return the meaning of a rule, without a question."""
    rule = rules[rule_id(text)]
    return Explanation(rule=rule.id, means=rule.means, facts=rule.facts)


def explain_rule(text: str, request: Request, node: NodePicture, catalog: Catalog, today: date) -> Explanation:
    """Return a rule's result for every driver that could be installed, and its decisions in the stack."""
    rule = rules[rule_id(text)]
    question = Question(request, node, catalog, today)
    must_be_known(question)
    sentences: dict[tuple[bool, str], list[str]] = {}
    for verdict in rule.ask(question) if rule.ask is not None else ():
        sentences.setdefault((verdict.refuses, verdict.text), [])
    for candidate in candidates(question) if rule.judge is not None else ():
        for verdict in _judged(rule.judge, CandidateCase(question, candidate)):
            sentences.setdefault((verdict.refuses, verdict.text), []).append(_called(candidate))
    answer = resolve(request, node, catalog, today)
    stack = answer if isinstance(answer, Stack) else None
    reasons = stack.reasons if stack is not None else {}
    return Explanation(
        rule=rule.id,
        means=rule.means,
        facts=rule.facts,
        says=tuple(
            Saying(refuses=refuses, text=words, drivers=tuple(dict.fromkeys(drivers)))
            for (refuses, words), drivers in list(sentences.items())[:MOST_SAYINGS]
        ),
        decided={field: reason.text for field, reason in reasons.items() if reason.rule == rule.id},
        chosen=f"{stack.driver.version or stack.driver.constraint} {stack.module.flavour}" if stack else None,
    )


def _judged(judge: object, case: CandidateCase) -> list[Objection]:
    return list(judge(case)) if callable(judge) else []


def _called(candidate: Candidate) -> str:
    compat = f" with {candidate.compat.package}" if candidate.compat else ""
    return f"{candidate.version} {candidate.flavour}{compat}"
