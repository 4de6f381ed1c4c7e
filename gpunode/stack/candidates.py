"""Candidates: every combination that the rules should check, the preferred ones first."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from packaging.version import Version as Number

from gpunode.catalog import Branch, ForwardCompat, OriginOffer, System
from gpunode.catalog.hardware import Arch, Flavour
from gpunode.catalog.origins import upstream_version
from gpunode.catalog.software import Origin
from gpunode.errors import UsageError
from gpunode.stack.question import Question, number

ARCHES: tuple[Arch, ...] = ("x86_64", "aarch64")
FLAVOURS: tuple[Flavour, ...] = ("open", "proprietary")
FIRST_SYSTEM = "ubuntu-24.04"
"""Preferred if no operating system is requested."""


@dataclass(frozen=True)
class Candidate:
    """One driver on one system, before any rule is applied."""

    system: System
    arch: Arch
    source: Origin
    branch: Branch
    version: str
    """The release; the newest known one of the branch if only the repository can decide it."""
    decided_by: Literal["wish", "catalog", "repository", "installed"]
    flavour: Flavour
    compat: ForwardCompat | None = None
    """The cuda-compat package that the requested CUDA would need on this driver."""

    @property
    def offer(self) -> OriginOffer | None:
        """Return the packages of the source for the system; None: there are none."""
        return self.system.origins.get(self.source)

    @cached_property
    def number(self) -> Number:
        """Return the release as a comparable number."""
        return number(self.version)

    @property
    def installed(self) -> bool:
        """Return True if the node already has this driver."""
        return self.decided_by == "installed"


def candidates(question: Question) -> Iterator[Candidate]:
    """Yield all candidates that satisfy the request's source, driver and module; best first."""
    for system in _systems(question):
        for arch in _arches(question):
            possible = list(_on(question, system, arch))
            yield from sorted(possible, key=lambda candidate: _rank(question, candidate))


def _arches(question: Question) -> tuple[Arch, ...]:
    """Return the CPU architecture of the node; if it is unknown the first one that all its GPUs are in."""
    if question.node.arch:
        return (question.node.arch,)
    platform = question.platform
    hosts = [gpu.hosts for term in question.gpus for gpu in term.models] + ([platform.hosts] if platform else [])
    common = tuple(arch for arch in ARCHES if all(arch in every for every in hosts))
    return common[:1] or ARCHES


def _systems(question: Question) -> list[System]:
    if question.system is not None:
        return [question.system]
    rows = [row for row in question.catalog.systems.values() if question.source in row.origins]
    return sorted(rows, key=lambda row: (row.id != FIRST_SYSTEM, not row.supported))


def _on(question: Question, system: System, arch: Arch) -> Iterator[Candidate]:
    installed = _installed_candidates(question, system, arch)
    yield from installed
    if question.request.driver == "keep":
        return
    have = {(candidate.source, candidate.version, candidate.flavour) for candidate in installed}
    for branch in _branches(question, system):
        for flavour in _flavours(question):
            version, decided_by = _release(question, system, branch, flavour)
            if (question.source, version, flavour) not in have:
                yield from _with_compat(
                    question,
                    Candidate(system, arch, question.source, branch, version, decided_by, flavour),
                )


def _flavours(question: Question) -> tuple[Flavour, ...]:
    requested = question.request.kernel_module
    return FLAVOURS if requested is None else (requested,)


def _branches(question: Question, system: System) -> list[Branch]:
    named = named_branch(question, system)
    if named is not None:
        return [named]
    offer = system.origins.get(question.source)
    rows = [row for row in question.catalog.branches.values() if _word_allows(question.request.driver, row)]
    return [row for row in rows if offer is None or row.number not in offer.transitional]


def named_branch(question: Question, system: System) -> Branch | None:
    """Return the branch that the request names; for a transitional one the branch that its packages install."""
    branch, offer = question.driver_branch, system.origins.get(question.source)
    if branch is None or offer is None or question.driver_version is not None:
        return branch
    leads_to = offer.transitional.get(branch.number)
    return branch if leads_to is None else question.catalog.branches[str(leads_to)]


def _word_allows(word: str | None, branch: Branch) -> bool:
    if word == "lts":
        return branch.type == "LTSB"
    if word == "production":
        return branch.type in ("LTSB", "PB")
    return True


def _release(
    question: Question, system: System, branch: Branch, flavour: Flavour
) -> tuple[str, Literal["wish", "catalog", "repository", "installed"]]:
    if question.driver_version is not None:
        return question.driver_version, "wish"
    offer = system.origins.get(question.source)
    if question.source == "nvidia":
        stays = _stays(question, branch)
        return (stays, "wish") if stays else (question.newest_in_range(branch), "catalog")
    flavours = {} if offer is None else offer.versions.get(branch.number, {})
    if flavours:
        held = flavours.get(flavour) or next(iter(flavours.values()))
        return upstream_version(held[0]), "repository"
    return question.newest_in_range(branch), "repository"


def _stays(question: Question, branch: Branch) -> str | None:
    """Return the installed release if its branch is requested by number, so that another flavour changes nothing
    else."""
    have = question.installed
    if have is None or have.version is None or have.origins != ("nvidia",):
        return None
    named = question.driver_branch is not None and not question.moves
    return have.version if named and have.version.split(".")[0] == str(branch.number) else None


def _is_behind(question: Question, branch: Branch, version: str) -> bool:
    """Return True if the newest release is requested and the installed one is not known to be the newest of the
    branch."""
    if not question.moves:
        return False
    return question.source != "nvidia" or number(version) < number(branch.latest)


def _installed_candidates(question: Question, system: System, arch: Arch) -> list[Candidate]:
    """Return the installed driver as a candidate if it satisfies the request."""
    installed = question.installed
    if installed is None or installed.version is None or installed.origins != (question.source,):
        return []
    try:
        branch = question.catalog.branch_of(installed.version)
    except UsageError:
        return []
    if named_branch(question, system) not in (None, branch) or question.driver_version not in (None, installed.version):
        return []
    if not _word_allows(question.request.driver, branch) or _is_behind(question, branch, installed.version):
        return []
    flavours = _flavours(question) if installed.flavour is None else (installed.flavour,)
    return [
        candidate
        for flavour in flavours
        if flavour in _flavours(question)
        for candidate in _with_compat(
            question,
            Candidate(system, arch, question.source, branch, installed.version, "installed", flavour),
        )
    ]


def _with_compat(question: Question, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate; if its driver is below the floor of the requested CUDA, also with the cuda-compat
    package."""
    yield candidate
    below = [row for _, row in question.requested_cuda if candidate.number < number(question.floor(row))]
    series = {row.series for row in below}
    if len(series) == 1 and (compat := question.catalog.forward_compat.get(below[0].series)) is not None:
        yield Candidate(
            candidate.system,
            candidate.arch,
            candidate.source,
            candidate.branch,
            candidate.version,
            candidate.decided_by,
            candidate.flavour,
            compat,
        )


def past_eol(candidate: Candidate, question: Question) -> bool:
    """Return True if the branch's end of life has passed."""
    return candidate.branch.eol is not None and candidate.branch.eol < question.today


def is_native(question: Question, candidate: Candidate) -> bool:
    """Return True if the driver fully supports every requested CUDA, not only by minor-version compatibility."""
    return all(
        candidate.branch.number >= row.branch or (row.driver is not None and candidate.number >= number(row.driver))
        for _, row in question.requested_cuda
    )


def _rank(question: Question, candidate: Candidate) -> tuple[object, ...]:
    """Return the sort key: the smallest is tried first. Nothing is refused here."""
    branch = candidate.branch
    unsupported = branch.eol is None or past_eol(candidate, question)
    word = question.request.driver
    keeps = candidate.installed and not (word in ("lts", "production") and past_eol(candidate, question))
    newest_first = -branch.number
    flavour = candidate.flavour != branch.default_modules
    if word == "newest":
        return (candidate.compat is not None, newest_first, not keeps, flavour)
    long_lived = branch.type in ("LTSB", "PB")
    return (
        candidate.compat is not None,
        not keeps,
        unsupported,
        not long_lived,
        not is_native(question, candidate),
        newest_first,
        flavour,
    )
