"""``resolve``: the first candidate that no rule refuses, or the smallest conflict; and the result of one rule.

Deterministic, without side effects. A conflict is the smallest set of terms without a stack, the rules that refuse it,
and the nearest stacks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import combinations

from pydantic import Field

import gpunode.stack.consequences
import gpunode.stack.judges
import gpunode.stack.libraries  # noqa: F401 (these three fill in the rules)
from gpunode.catalog import Catalog, System
from gpunode.errors import UsageError
from gpunode.stack.assemble import assemble
from gpunode.stack.candidates import Candidate, candidates
from gpunode.stack.model import Clash, Conflict, NearbyStack, NodePicture, Request, Stack, StackModel, Term
from gpunode.stack.question import Question, must_be_known, number, restrict, terms
from gpunode.stack.rules import CandidateCase, rules

MOST_OFFERS = 4
SOURCES = ("ubuntu", "debian")
"""The sources in addition to the default one."""
MACHINE = ("gpu", "platform", "os", "arch", "kernel", "installed")
"""Terms that describe the machine; all others are requests."""
MOST_SAYINGS = 20


def resolve(
    request: Request, node: NodePicture, catalog: Catalog, today: date, *, off: Collection[str] = ()
) -> Stack | Conflict:
    """Return the stack for a node, or the conflict.

    ``off`` skips rules by id. Raise UsageError if request or node name something that the catalog does not have.
    """
    question = Question(request, node, catalog, today)
    must_be_known(question)
    case = first_case(question, off)
    if case is not None:
        return assemble(case, off)
    return explain(question, off)


@dataclass(frozen=True)
class Relaxation:
    """One change that relaxes the request or replaces one of its values."""

    kind: str
    text: str
    """A template with ``{stack}`` fields if the replacement is only known from the result."""
    request: Request
    node: NodePicture


def first_case(question: Question, off: Collection[str] = ()) -> CandidateCase | None:
    """Return the best candidate that no rule refuses."""
    if rules.hopeless(question, off):
        return None
    for candidate in candidates(question):
        case = CandidateCase(question, candidate)
        if not rules.refused(case, off):
            return case
    return None


def explain(question: Question, off: Collection[str] = ()) -> Conflict:
    """Return the conflict of a question without an accepted candidate."""
    smallest = _smallest(question, off)
    return Conflict(
        terms=smallest,
        clashes=tuple(_clashes(_only(question, smallest), question, off)),
        offers=tuple(_offers(question, smallest, off)),
    )


def _only(question: Question, kept: Collection[Term]) -> Question:
    request, node = restrict(question.request, question.node, kept)
    return replace(question, request=request, node=node)


def _holds(question: Question, kept: Collection[Term], off: Collection[str]) -> bool:
    """Return True if terms have a stack; a requested source that is not kept may be any, not only the default one."""
    only = _only(question, kept)
    others = SOURCES if question.request.source and only.request.source is None else ()
    every = (only, *(replace(only, request=only.request.model_copy(update={"source": other})) for other in others))
    return any(first_case(variant, off) is not None for variant in every)


def _smallest(question: Question, off: Collection[str]) -> tuple[Term, ...]:
    """Return the smallest set of terms that has no stack; every smaller subset has one."""
    minimal = list(terms(question.request, question.node))
    for term in _droppable_first(minimal):
        rest = [other for other in minimal if other != term]
        if not _holds(question, rest, off):
            minimal = rest
    everything = terms(question.request, question.node)
    for size in range(1, len(minimal)):
        for some in combinations(everything, size):
            if not _holds(question, some, off):
                return some
    return tuple(minimal)


def _droppable_first(droppable: Iterable[Term]) -> list[Term]:
    """Return the terms in the order in which they are dropped: the least helpful for a user first."""
    order = ("kernel", "arch", "past-eol", "os", "installed", "source", "toolkit", "kernel-module", "driver", "cuda")
    return sorted(droppable, key=lambda term: order.index(term.name) if term.name in order else len(order))


def _clashes(question: Question, home: Question, off: Collection[str]) -> Iterator[Clash]:
    """Yield the objections to the nearest candidates, which the fewest rules refuse.

    Candidates on the requested system (``home``) are preferred if they are near enough, and candidates without a
    cuda-compat package.
    """
    before = {rule: verdict.text for rule, verdict in rules.objections(question, off) if verdict.refuses}
    if before:
        yield from (Clash(rule=rule, text=text) for rule, text in before.items())
        return
    at_home = _refused(replace(question, node=question.node.model_copy(update={"os": home.node.os})), off)
    refused = at_home if at_home and min(at_home)[0][0] == 1 else _refused(question, off)
    if not refused:
        yield Clash(rule="wish", text=_no_candidate(question))
        return
    nearest = min(refused)[0]
    texts = {rule: text for key, clashes in reversed(refused) if key == nearest for rule, text in reversed(clashes)}
    yield from (Clash(rule=rule, text=text) for rule, text in reversed(texts.items()))


Refused = tuple[tuple[int, bool, bool], tuple[tuple[str, str], ...]]
"""Distance of a candidate from being accepted (branches that the source is known to have are nearer), and the rules'
objections to it."""


def _refused(question: Question, off: Collection[str]) -> list[Refused]:
    refused = []
    for candidate in candidates(question):
        verdicts = rules.verdicts(CandidateCase(question, candidate), off)
        clashes = tuple((rule, verdict.text) for rule, verdict in verdicts if verdict.refuses)
        offered = candidate.offer is not None and candidate.branch.number in candidate.offer.versions
        refused.append(((len({rule for rule, _ in clashes}), not offered, candidate.compat is not None), clashes))
    return refused


def _no_candidate(question: Question) -> str:
    installed = question.installed
    if installed is None:
        return "no installed driver package is known"
    if installed.version is None:
        return "the installed driver packages have several versions"
    return f"the installed driver is {installed.version} from {' and '.join(installed.origins)}"


def _offers(question: Question, smallest: Collection[Term], off: Collection[str]) -> Iterator[NearbyStack]:
    """Yield the nearest stacks. A change that keeps the smallest conflict cannot help and is not tried."""
    offers: dict[str, NearbyStack] = {}
    for change in _changes(question):
        if change.kind in offers or len(offers) == MOST_OFFERS or not _touches(change, smallest):
            continue
        offer = _offer(question, change, off)
        if offer is not None and all(offer.stack != other.stack for other in offers.values()):
            offers[change.kind] = offer
    yield from offers.values() or _relaxed_offers(question, off)


def _touches(change: Relaxation, smallest: Collection[Term]) -> bool:
    """Return True if the change concerns a term of the conflict, or the source, which is part of every question."""
    kind = change.kind.removeprefix("--")
    return kind == "source" or any(kind in (term.name, f"without {term.value}") for term in smallest)


def _relaxed_offers(question: Question, off: Collection[str]) -> Iterator[NearbyStack]:
    """Yield stacks for the machine with as many requests as possible, from either end, if no single change helps."""
    everything = terms(question.request, question.node)
    machine = [term for term in everything if term.name in MACHINE]
    requests = [term for term in everything if term.name not in MACHINE]
    tried: set[tuple[Term, ...]] = set()
    for order in (machine + requests, machine + requests[::-1]):
        kept: list[Term] = []
        for term in order:
            if _holds(question, [*kept, term], off):
                kept.append(term)
        dropped = tuple(term for term in everything if term not in kept)
        case = first_case(_only(question, kept), off)
        observed = any(term.given == "node" for term in dropped)
        if case is not None and dropped not in tried and not observed:
            tried.add(dropped)
            stack = assemble(case, off)
            yield NearbyStack(change=tuple(f"without {term}" for term in dropped), summary=summary(stack), stack=stack)


def _offer(question: Question, change: Relaxation, off: Collection[str]) -> NearbyStack | None:
    case = first_case(replace(question, request=change.request, node=change.node), off)
    if case is None:
        return None
    stack = assemble(case, off)
    text = change.text.format(branch=stack.driver.branch, module=stack.module.flavour)
    return NearbyStack(change=(text,), summary=summary(stack), stack=stack)


def summary(stack: Stack) -> str:
    """Return a stack in one line: ``580 proprietary with CUDA 12.9 from nvidia on ubuntu-22.04``."""
    cuda = stack.cuda.wished or stack.cuda.native
    with_cuda = f" with CUDA {cuda}" if cuda else ""
    return f"{stack.driver.branch} {stack.module.flavour}{with_cuda} from {stack.source} on {stack.os}"


def _changes(question: Question) -> Iterator[Relaxation]:
    """Yield single changes, the smallest first. Facts of a machine are not changed."""
    yield from _other_requests(question)
    if not question.node.observed:
        yield from _other_nodes(question)


def _other_requests(question: Question) -> Iterator[Relaxation]:
    request = question.request

    def relaxed(kind: str, text: str, **update: str | None) -> Relaxation:
        return Relaxation(kind, text, request.model_copy(update=update), question.node)

    if request.cuda:
        for series in _other_series(question, request.cuda):
            yield relaxed("--cuda", f"--cuda {series} instead of {request.cuda}", cuda=series)
    if request.toolkit:
        for series in _other_series(question, request.toolkit):
            yield relaxed("--toolkit", f"--toolkit {series} instead of {request.toolkit}", toolkit=series)
        yield relaxed("--toolkit", "--toolkit none", toolkit=None)
    if request.kernel_module:
        yield relaxed("--kernel-module", "--kernel-module {module}", kernel_module=None)
    if request.driver:
        yield relaxed("--driver", f"--driver {{branch}} instead of {request.driver}", driver=None)
    if request.framework:
        yield relaxed("--framework", f"without --framework {request.framework}", framework=None)
    if request.past_eol == "refuse":
        yield relaxed("--past-eol", "a branch past its end of life", past_eol="warn")
    for source in _sources(question):
        yield relaxed("--source", f"--source {source}", source=source)


def _other_nodes(question: Question) -> Iterator[Relaxation]:
    node = question.node

    def other(kind: str, text: str, **update: object) -> Relaxation:
        return Relaxation(kind, text, question.request, node.model_copy(update=update))

    for system in _systems(question):
        yield other("--os", f"--os {system}", os=system)
    if node.arch:
        arch = "aarch64" if node.arch == "x86_64" else "x86_64"
        yield other("--arch", f"--arch {arch}", arch=arch)
    if len(node.gpus) > 1:
        for group in node.gpus:
            rest = tuple(remaining for remaining in node.gpus if remaining != group)
            yield other(f"without {group.label}", f"without {group.label}", gpus=rest)
    if node.kernel:
        yield other("--kernel", "a newer kernel", kernel=None)


def _other_series(question: Question, requested: str) -> list[str]:
    """Return CUDA series below the requested one, the nearest first, then those above it, the nearest first."""
    every = sorted({row.series for row in question.catalog.toolkits.values()}, key=number)
    current = number(question.catalog.toolkit(requested).series)
    below = [series for series in every if number(series) < current]
    return below[::-1] + [series for series in every if number(series) > current]


def _sources(question: Question) -> list[str]:
    """Return the other sources of the system; on a mixed node also its own, as an explicit request."""
    if question.system is None:
        return []
    known = list(question.system.origins)
    return [source for source in known if source != question.request.source and not _is_default(question, source)]


def _is_default(question: Question, source: str) -> bool:
    """Return True if a request of this source would change nothing."""
    return question.request.source is None and source == question.source and question.installed is None


def _systems(question: Question) -> list[str]:
    """Return the other systems, those of the same distribution first."""
    if question.system is None:
        return []
    current, rows = question.system, list(question.catalog.systems.values())
    at = [row.id for row in rows].index(current.id)

    def distance(row: System) -> tuple[bool, bool, int]:
        return row.os != current.os, not row.supported, abs([other.id for other in rows].index(row.id) - at)

    return [row.id for row in sorted(rows, key=distance) if row.id != current.id]


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
    if rule.judge is not None:
        for candidate in candidates(question):
            for verdict in rule.judge(CandidateCase(question, candidate)):
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


def _called(candidate: Candidate) -> str:
    compat = f" with {candidate.compat.package}" if candidate.compat else ""
    return f"{candidate.version} {candidate.flavour}{compat}"
