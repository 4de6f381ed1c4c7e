"""The registry of rules, the results of a rule, and the bounds that it needs.

A rule has an id, a meaning and the sources of its facts, and does one or more of three things: it checks the question
itself, it checks a candidate (refuses it, or warns), and it decides fields of the stack. Each of these is a function
with a decorator; one of a rule's decorators has the meaning. Every rule can be skipped by its id.

A rule refuses by a bound that exists. If the bound is absent or unsure, the candidate passes without a check: the stack
then has a warning that names fact and rule.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NotRequired, TypedDict, Unpack

from packaging.version import Version as Number

from gpunode.catalog import Gpu, driver_rules
from gpunode.stack.candidates import Candidate
from gpunode.stack.model import PackageChoice, Reason
from gpunode.stack.question import GpuTerm, Question


@dataclass(frozen=True)
class CandidateCase:
    """One candidate for the question; the input of every rule."""

    question: Question
    candidate: Candidate

    @cached_property
    def source_name(self) -> str:
        """Return the source for messages: ``NVIDIA's repository for Ubuntu 24.04``."""
        system = self.candidate.system.name
        if self.candidate.source == "nvidia":
            return f"NVIDIA's repository for {system}"
        return f"the archive of {system}"

    @cached_property
    def models(self) -> tuple[Gpu, ...]:
        """Return every model that the node's GPUs may be."""
        return tuple(gpu for term in self.question.gpus for gpu in term.models)

    def lacks(self, component: str) -> bool:
        """Return True if the source does not have a component for this system."""
        offer = self.candidate.offer
        return offer is None or component in offer.absent


@dataclass(frozen=True)
class Objection:
    """The objection of a rule to a candidate."""

    text: str
    refuses: bool
    """False: a warning."""


def refuse(text: str, *, sure: bool = True) -> Objection:
    """Return a refusal; a warning if the facts are not sure."""
    return Objection(text, sure) if sure else Objection(f"{text} (not sure)", False)


def warn(text: str) -> Objection:
    """Return a warning."""
    return Objection(text, False)


@dataclass(frozen=True)
class Choice:
    """A rule's decision about one field of the stack: a value, or None, and the reason."""

    field: str
    value: object
    text: str
    """The reason."""
    packages: tuple[PackageChoice, ...] = ()
    """Packages that it adds to the stack."""

    def reason(self, rule: str) -> Reason:
        """Return the reason for the stack."""
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
    """Function that checks the question itself, for all candidates."""
    judge: Judge | None = None
    decide: Decide | None = None
    fields: tuple[str, ...] = ()
    """Fields of the stack that it decides."""


class RuleDeclaration(TypedDict):
    """The declaration of a rule with one of its functions."""

    means: NotRequired[str]
    facts: NotRequired[str]
    """Sources of its facts: sections of the catalog."""
    needs: NotRequired[tuple[str, ...]]
    """The bounds that it needs, ``branches.native_cuda``: if the catalog does not have one, or is not
    sure of it, acceptance is a warning.

    R09 follows from R06 and R07; R11 and R12 themselves warn of an unsure board, R13 of an unknown end of life; R16
    checks only the node. The others without needs decide parts and accept nothing.
    """


class Rules:
    """All rules, in the order of their ids."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules.values())

    def __getitem__(self, rule_id: str) -> Rule:
        return self._rules[rule_id]

    def asks(self, rule_id: str, **declared: Unpack[RuleDeclaration]) -> Callable[[Ask], Ask]:
        """Return a decorator for the function by which a rule refuses or warns before any candidate."""
        rule = self._declared(rule_id, declared)

        def register(function: Ask) -> Ask:
            rule.ask = function
            return function

        return register

    def judges(self, rule_id: str, **declared: Unpack[RuleDeclaration]) -> Callable[[Judge], Judge]:
        """Return a decorator for the function by which a rule refuses a candidate or warns about it."""
        rule = self._declared(rule_id, declared)

        def register(function: Judge) -> Judge:
            rule.judge = function
            return function

        return register

    def decides(self, rule_id: str, *fields: str, **declared: Unpack[RuleDeclaration]) -> Callable[[Decide], Decide]:
        """Return a decorator for the function by which a rule decides fields of the stack."""
        rule = self._declared(rule_id, declared)

        def register(function: Decide) -> Decide:
            rule.decide, rule.fields = function, fields
            return function

        return register

    def _declared(self, rule_id: str, declared: RuleDeclaration) -> Rule:
        """Return a rule, with the declaration of one of its decorators; raise ValueError for a second declaration."""
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
        """Yield all objections of the rules to a candidate, lazily."""
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
                missing = gaps(need, case.question, case.candidate)
                yield from ((rule.id, warn(text)) for text in in_words(missing))

    def objections(self, question: Question, off: Collection[str] = ()) -> Iterator[tuple[str, Objection]]:
        """Yield the objections of the rules to the question itself, lazily."""
        for rule in self._rules.values():
            if rule.ask is not None and rule.id not in off:
                for verdict in rule.ask(question):
                    yield rule.id, verdict

    def hopeless(self, question: Question, off: Collection[str] = ()) -> bool:
        """Return True if a rule refuses every candidate of the question."""
        return any(verdict.refuses for _, verdict in self.objections(question, off))

    def refused(self, case: CandidateCase, off: Collection[str] = ()) -> bool:
        """Return True if a rule refuses this candidate of a question that is not hopeless."""
        judged = (rule.judge(case) for rule in self if rule.judge is not None and rule.id not in off)
        return any(verdict.refuses for verdicts in judged for verdict in verdicts)


rules = Rules()
"""All rules; filled by the modules of this room that contain them."""


def over_gpus(question: Question, against: Callable[[GpuTerm, Gpu], Objection | None]) -> Iterator[Objection]:
    """Yield an objection per GPU of the node. If a name covers several models, only all of them together refuse."""
    for term in question.gpus:
        verdicts = [(gpu, against(term, gpu)) for gpu in term.models]
        objections = [(gpu, verdict) for gpu, verdict in verdicts if verdict is not None]
        if not objections:
            continue
        if all(verdict is not None and verdict.refuses for _, verdict in verdicts):
            yield objections[0][1]
        elif len(objections) == len(verdicts):
            yield warn(objections[0][1].text)
        else:
            names = ", ".join(gpu.name for gpu, _ in objections)
            yield warn(f"if {term.label} is {names}: {objections[0][1].text}")


class Gap(NamedTuple):
    """A bound that is needed, and is missing or unsure."""

    fact: str
    """``branches.418.native_cuda``."""
    doubt: str | None
    """Why it is unsure; None: the catalog does not have it."""


def in_words(missing: Iterable[Gap]) -> Iterator[str]:
    """Yield one sentence for all missing bounds, and one for each unsure bound."""
    every = list(missing)
    absent = [gap.fact for gap in every if gap.doubt is None]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        yield f"accepted without {absent[0]}{more}: the catalog does not have it, state it in a file for --overlay"
    yield from (f"rests on {gap.fact}, which is not sure: {gap.doubt}" for gap in every if gap.doubt is not None)


def _models(question: Question) -> list[Gpu]:
    return [gpu for term in question.gpus for gpu in term.models]


ROWS: Mapping[str, Callable[[Question, Candidate], Iterable[Any]]] = {
    "branches": lambda _, candidate: [candidate.branch],
    "gpus": lambda question, _: _models(question),
    "architectures": lambda question, _: [
        question.catalog.architectures[gpu.architecture] for gpu in _models(question)
    ],
    "toolkits": lambda question, _: [row for _, row in question.requested_cuda if not row.driver_only],
    "cuda_majors": lambda question, _: [
        question.catalog.cuda_majors[str(row.major)] for _, row in question.requested_cuda
    ],
    "platforms": lambda question, _: [question.platform] if question.platform else [],
    "forward_compat": lambda _, candidate: [candidate.compat] if candidate.compat else [],
}
"""The rows of a section that concern a question."""

WHEN: Mapping[str, Callable[[Question, Candidate], bool]] = {
    "branches.native_cuda": lambda question, _: bool(question.gpus),
    "branches.kernel_floor": lambda question, _: question.kernel_release is not None,
    "branches.modules": lambda _, candidate: candidate.flavour == "proprietary" and not candidate.installed,
    "toolkits.floor": lambda question, _: any(row.floor for _, row in question.requested_cuda),
    "systems.first_branch": lambda _, candidate: not candidate.installed,
    "systems.first_toolkit": lambda question, candidate: question.toolkit is not None and candidate.source == "nvidia",
}
"""Questions for which a bound matters; default: all."""


def gaps(need: str, question: Question, candidate: Candidate) -> Iterator[Gap]:
    """Yield the gaps of a bound: ``section.field``, followed by ``?`` if None means "no bound"."""
    section, field = need.rstrip("?").split(".")
    when = WHEN.get(f"{section}.{field}")
    if when is not None and not when(question, candidate):
        return
    if section == "systems":
        yield from _of_offer(field, candidate)
        return
    for row in ROWS[section](question, candidate):
        fact = f"{section}.{row.id}.{field}"
        if field == "first_listed":
            yield from _of_list(row, candidate.branch.number, candidate.number)
        elif getattr(row, field) is None and not need.endswith("?"):
            yield Gap(fact, row.unsure.get(field))
        elif getattr(row, field) is not None and not row.sure(field):
            yield Gap(fact, row.unsure.get(field) or row.note or f"the row is {row.confidence}")


def _of_offer(field: str, candidate: Candidate) -> Iterator[Gap]:
    """Yield gaps in the content of the source: the oldest branch that was found there, or the list of its branches."""
    offer, system = candidate.offer, candidate.system
    held = offer is None or (field == "first_branch" and (offer.branches or candidate.branch.number in offer.versions))
    if offer is not None and not held and getattr(offer, field) is None:
        where = f"origins.{candidate.source}"
        yield Gap(f"systems.{system.id}.{where}.{field}", system.unsure.get(where))


def _of_list(gpu: Gpu, branch: int, driver: Number) -> Iterator[Gap]:
    """Yield gaps in the first release of the branch for the GPU: its list of ids, a documented minimum, or its age."""
    if gpu.min_driver is not None or (gpu.first_branch is not None and branch >= gpu.first_branch):
        return
    last = driver_rules.unread(gpu, branch, driver)
    if last is not None:
        doubt = f"no list of branch {branch} up to {last} has the GPU, and later ones were not read"
        yield Gap(f"gpus.{gpu.id}.first_listed", doubt)
    elif gpu.first_listed_on(branch) == "unknown":
        yield Gap(f"gpus.{gpu.id}.first_listed", gpu.unsure.get("first_listed"))
