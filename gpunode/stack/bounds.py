"""Bounds that rules need before they may accept a candidate, and those that the catalog does not have.

A rule refuses by a bound that exists. If the bound is absent or unsure, the candidate passes without a check: the stack
then has a warning that names fact and rule.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from packaging.version import Version as Number

from gpunode.catalog import Gpu, driver_rules
from gpunode.stack.candidates import Candidate
from gpunode.stack.question import Question


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
