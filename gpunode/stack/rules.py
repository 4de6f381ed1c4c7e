"""The registry of rules, and what a rule may say.

A rule has an id, says what it means and which facts it rests on, and does one or more of three things: it speaks about
the question as such, it judges a candidate (refuses it, or warns), and it decides parts of the stack. Each of these is
a function under a decorator; one of a rule's decorators says what the rule means. Every rule can be left out by its id.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NotRequired, TypedDict, Unpack

from gpunode.catalog import Gpu
from gpunode.stack.bounds import gaps, in_words
from gpunode.stack.candidates import Candidate
from gpunode.stack.model import PackageChoice, Reason
from gpunode.stack.question import GpuTerm, Question


@dataclass(frozen=True)
class CandidateCase:
    """One candidate before the question; what every rule is asked about."""

    question: Question
    candidate: Candidate

    @cached_property
    def source_name(self) -> str:
        """The source in words: ``NVIDIA's repository for Ubuntu 24.04``."""
        system = self.candidate.system.name
        if self.candidate.source == "nvidia":
            return f"NVIDIA's repository for {system}"
        return f"the archive of {system}"

    @cached_property
    def models(self) -> tuple[Gpu, ...]:
        """Every model that the node's GPUs may be."""
        return tuple(gpu for term in self.question.gpus for gpu in term.models)

    def lacks(self, component: str) -> bool:
        """The source does not have a component for this system."""
        offer = self.candidate.offer
        return offer is None or component in offer.absent


@dataclass(frozen=True)
class Objection:
    """What a rule says against a candidate."""

    text: str
    refuses: bool
    """False: a warning."""


def refuse(text: str, *, sure: bool = True) -> Objection:
    """A refusal; of facts that are less than sure only a warning is left."""
    return Objection(text, sure) if sure else Objection(f"{text} (not sure)", False)


def warn(text: str) -> Objection:
    """A warning."""
    return Objection(text, False)


@dataclass(frozen=True)
class Choice:
    """What a rule decides about one field of the stack: a value, or None, and why."""

    field: str
    value: object
    text: str
    """The reason."""
    packages: tuple[PackageChoice, ...] = ()
    """What it adds to the packages of the stack."""

    def reason(self, rule: str) -> Reason:
        """The reason as the stack shows it."""
        return Reason(rule=rule, text=self.text)


Ask = Callable[[Question], Iterator[Objection]]
Judge = Callable[[CandidateCase], Iterator[Objection]]
Decide = Callable[[CandidateCase], Iterator[Choice]]


@dataclass
class Rule:
    """One rule."""

    id: str
    means: str = ""
    facts: str = ""
    needs: tuple[str, ...] = ()
    ask: Ask | None = None
    """What it says to the question itself, whatever the candidate."""
    judge: Judge | None = None
    decide: Decide | None = None
    fields: tuple[str, ...] = ()
    """Fields of the stack that it decides."""


class RuleDeclaration(TypedDict):
    """What a rule declares with one of its functions."""

    means: NotRequired[str]
    facts: NotRequired[str]
    """Where the facts are: sections of the catalog."""
    needs: NotRequired[tuple[str, ...]]
    """The bounds that it needs, ``branches.native_cuda`` (see ``bounds``): where the catalog does not have one, or is
    not sure of it, acceptance is a warning.

    R09 follows from R06 and R07; R11 and R12 warn of a board that is not sure themselves, R13 of an end of life that
    is not known; R16 looks at the node alone. The others without needs decide parts and accept nothing."""


class Rules:
    """All rules, in the order of their ids."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def __getitem__(self, rule_id: str) -> Rule:
        return self._rules[rule_id]

    def asks(self, rule_id: str, **declared: Unpack[RuleDeclaration]) -> Callable[[Ask], Ask]:
        """Register the function by which a rule refuses or warns before any candidate is looked at."""
        rule = self._declared(rule_id, declared)

        def register(function: Ask) -> Ask:
            rule.ask = function
            return function

        return register

    def judges(self, rule_id: str, **declared: Unpack[RuleDeclaration]) -> Callable[[Judge], Judge]:
        """Register the function by which a rule refuses or warns."""
        rule = self._declared(rule_id, declared)

        def register(function: Judge) -> Judge:
            rule.judge = function
            return function

        return register

    def decides(self, rule_id: str, *fields: str, **declared: Unpack[RuleDeclaration]) -> Callable[[Decide], Decide]:
        """Register the function by which a rule decides fields of the stack."""
        rule = self._declared(rule_id, declared)

        def register(function: Decide) -> Decide:
            rule.decide, rule.fields = function, fields
            return function

        return register

    def _declared(self, rule_id: str, declared: RuleDeclaration) -> Rule:
        """Return a rule, with what one of its decorators declares. Raise ValueError where a second one does."""
        if rule_id not in self._rules:
            self._rules[rule_id] = Rule(rule_id)
            self._rules = dict(sorted(self._rules.items()))
        rule = self._rules[rule_id]
        if declared:
            if rule.means:
                raise ValueError(f"rule {rule_id} is declared twice")
            rule.means, rule.facts, rule.needs = declared["means"], declared["facts"], declared.get("needs", ())
        return rule

    def verdicts(self, case: CandidateCase, off: Collection[str] = ()) -> Iterator[tuple[str, Objection]]:
        """Everything that the rules say against a candidate, lazily."""
        for rule in self._rules.values():
            if rule.id in off:
                continue
            if rule.ask is not None:
                for verdict in rule.ask(case.question):
                    yield rule.id, verdict
            if rule.judge is not None:
                for verdict in rule.judge(case):
                    yield rule.id, verdict
            for need in rule.needs:
                found = gaps(need, case.question, case.candidate)
                yield from ((rule.id, warn(text)) for text in in_words(found))

    def objections(self, question: Question, off: Collection[str] = ()) -> Iterator[tuple[str, Objection]]:
        """What the rules say before any candidate is looked at, lazily."""
        for rule in self._rules.values():
            if rule.ask is not None and rule.id not in off:
                for verdict in rule.ask(question):
                    yield rule.id, verdict

    def hopeless(self, question: Question, off: Collection[str] = ()) -> bool:
        """A rule refuses every candidate of the question."""
        return any(verdict.refuses for _, verdict in self.objections(question, off))

    def refused(self, case: CandidateCase, off: Collection[str] = ()) -> bool:
        """A rule refuses this candidate of a question that is not hopeless."""
        judged = (rule.judge(case) for rule in self if rule.judge is not None and rule.id not in off)
        return any(verdict.refuses for verdicts in judged for verdict in verdicts)


rules = Rules()
"""All rules; the modules of this room that have their functions fill it."""


def over_gpus(question: Question, against: Callable[[GpuTerm, Gpu], Objection | None]) -> Iterator[Objection]:
    """Ask about every GPU of the node. Where a name covers several models, only all of them together refuse."""
    for term in question.gpus:
        said = [(gpu, against(term, gpu)) for gpu in term.models]
        heard = [(gpu, verdict) for gpu, verdict in said if verdict is not None]
        if not heard:
            continue
        if all(verdict is not None and verdict.refuses for _, verdict in said):
            yield heard[0][1]
        elif len(heard) == len(said):
            yield warn(heard[0][1].text)
        else:
            names = ", ".join(gpu.name for gpu, _ in heard)
            yield warn(f"if {term.label} is {names}: {heard[0][1].text}")
