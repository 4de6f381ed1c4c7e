"""The bounds that rules need before they may accept a candidate, and which of them the catalog does not have.

A rule refuses by a bound that is there. Where it is absent or unsure the rule has nothing to refuse by, and what it
lets pass was not checked: the stack then carries a warning that names fact and rule.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpunode.catalog import Gpu
from gpunode.stack.candidates import Candidate
from gpunode.stack.question import Question


class Gap(NamedTuple):
    """A bound that is needed and is not there, or not sure."""

    fact: str
    """``branches.418.native_cuda``."""
    doubt: str | None
    """Why it is unsure; None: the catalog does not have it."""


def in_words(found: Iterable[Gap]) -> Iterator[str]:
    """Yield one sentence for all bounds that are not there, and one for each that is not sure."""
    every = list(found)
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
    "toolkits": lambda question, _: [row for _, row in question.cuda_wishes if not row.driver_only],
    "cuda_majors": lambda question, _: [
        question.catalog.cuda_majors[str(row.major)] for _, row in question.cuda_wishes
    ],
    "platforms": lambda question, _: [question.platform] if question.platform else [],
    "forward_compat": lambda _, candidate: [candidate.compat] if candidate.compat else [],
}
"""The rows of a section that a question is about."""

WHEN: Mapping[str, Callable[[Question, Candidate], bool]] = {
    "branches.native_cuda": lambda question, _: bool(question.gpus),
    "branches.kernel_floor": lambda question, _: question.kernel_release is not None,
    "branches.modules": lambda _, candidate: candidate.flavour == "proprietary" and not candidate.installed,
    "toolkits.floor": lambda question, _: any(row.floor for _, row in question.cuda_wishes),
    "systems.first_branch": lambda _, candidate: not candidate.installed,
    "systems.first_toolkit": lambda question, candidate: question.toolkit is not None and candidate.source == "nvidia",
}
"""Questions to which a bound matters; to all where nothing is said."""


def gaps(need: str, question: Question, candidate: Candidate) -> Iterator[Gap]:
    """Yield what is missing of a bound: ``section.field``, with ``?`` behind it where None means "no bound"."""
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
            yield from _of_list(row, candidate.branch.number)
        elif getattr(row, field) is None and not need.endswith("?"):
            yield Gap(fact, row.unsure.get(field))
        elif getattr(row, field) is not None and not row.sure(field):
            yield Gap(fact, row.unsure.get(field) or row.note or f"the row is {row.confidence}")


def _of_offer(field: str, candidate: Candidate) -> Iterator[Gap]:
    """What the source has: the oldest that was seen there, or a list of what it holds."""
    offer, system = candidate.offer, candidate.system
    held = offer is None or (field == "first_branch" and (offer.branches or candidate.branch.number in offer.versions))
    if offer is not None and not held and getattr(offer, field) is None:
        where = f"origins.{candidate.source}"
        yield Gap(f"systems.{system.id}.{where}.{field}", system.unsure.get(where))


def _of_list(gpu: Gpu, branch: int) -> Iterator[Gap]:
    """Which release of the branch first drives the GPU: by its list of ids, a documented minimum, or its age."""
    if gpu.first_branch is not None and branch >= gpu.first_branch:
        return
    if gpu.min_driver is None and gpu.first_listed_on(branch) == "unknown":
        yield Gap(f"gpus.{gpu.id}.first_listed", gpu.unsure.get("first_listed"))
