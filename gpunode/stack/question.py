"""The question: request and node, resolved in the catalog, and the terms of a possible conflict."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from packaging.version import Version as Number

from gpunode.catalog import Branch, Catalog, Framework, Gpu, Platform, System, Toolkit
from gpunode.catalog.driver_rules import kernel_number
from gpunode.catalog.hardware import Arch
from gpunode.catalog.software import Origin
from gpunode.errors import UsageError
from gpunode.stack.model import Installed, NodePicture, Request, Term

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

WORDS = ("lts", "production", "newest", "keep")
"""Driver requests that name no branch."""
LATEST = "-latest"
"""Suffix of a driver request for the branch's newest release; without it an installed release stays."""
FRAMEWORKS = {"torch": "pytorch", "pytorch": "pytorch", "tensorflow": "tensorflow", "tf": "tensorflow"}
"""Common names of a framework, and the catalog's name for it."""


@lru_cache(maxsize=4096)
def number(version: str) -> Number:
    """Return a version as a comparable number."""
    return Number(version)


def is_range(driver: str) -> bool:
    """Return True for a driver request that compares: ``>=580,<595``."""
    return any(sign in driver for sign in "<>=!")


def specifiers(text: str) -> "SpecifierSet":
    """Return the range of a driver request; raise UsageError if it is not valid."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # noqa: PLC0415 (slow to load, seldom needed)

    try:
        versions = SpecifierSet(text)
    except InvalidSpecifier:
        versions = SpecifierSet()
    if not versions or any(part.operator not in (">=", ">", "<=", "<", "!=", "==") for part in versions):
        raise UsageError(f"driver {text!r} is not a range; examples: >=580,<595 and ==580.*,!=580.95.05")
    return versions


def framework_named(text: str, catalog: Catalog) -> Framework:
    """Return the row of ``torch==2.9``, ``pytorch==2.9.1`` or ``tensorflow==2.20``; raise UsageError with the known
    ones."""
    match = re.fullmatch(r"(?P<name>[A-Za-z]+)\s*==\s*(?P<series>\d{1,3}\.\d{1,3})(\.\d{1,3})?", text.strip())
    name = FRAMEWORKS.get(match["name"].lower()) if match else None
    if match is None or name is None:
        raise UsageError(f"framework {text!r}: expected a name and a release (examples: torch==2.9, tensorflow==2.20)")
    rows = [row for row in catalog.frameworks.values() if row.name == name]
    framework = next((row for row in rows if row.version == match["series"]), None)
    if framework is None:
        known = ", ".join(row.version for row in rows)
        raise UsageError(f"framework {text!r}: the catalog has no {name} {match['series']}; known: {known}")
    return framework


@dataclass(frozen=True)
class GpuTerm:
    """GPUs of one kind: the models that a name may stand for."""

    label: str
    models: tuple[Gpu, ...]
    count: int | None

    def named(self, gpu: Gpu) -> str:
        """Return the GPU for a message: ``V100 (Volta, compute capability 7.0)``."""
        return f"{self.label} ({gpu.architecture.capitalize()}, compute capability {gpu.compute_capability})"


@dataclass(frozen=True)
class Board:
    """Requirements of the board beside the driver."""

    services: tuple[str, ...] = ()
    kernel_modules: tuple[str, ...] = ()
    unknown: str | None = None
    """Why it could not be determined whether the board has NVSwitches; None if it could."""
    unsure: str | None = None
    """Why the result is not sure."""
    why: str = "no GPU of this node is connected to an NVSwitch"


@dataclass(frozen=True)
class Question:
    """A request for a node in terms of the catalog. Raises UsageError for names that the catalog does not have."""

    request: Request
    node: NodePicture
    catalog: Catalog
    today: date

    @cached_property
    def system(self) -> System | None:
        """Return the operating system; None: any."""
        return self.catalog.os(self.node.os) if self.node.os else None

    @cached_property
    def platform(self) -> Platform | None:
        """Return the platform if one is named."""
        return self.catalog.platform(self.node.platform) if self.node.platform else None

    @cached_property
    def gpus(self) -> tuple[GpuTerm, ...]:
        """Return the node's GPUs: those of the platform and those that are named."""
        terms = [
            GpuTerm(group.label, tuple(self.catalog.gpu(model) for model in group.models), group.count)
            for group in self.node.gpus
        ]
        if self.platform is not None:
            rows = ((self.catalog.gpu(gpu), count) for gpu, count in self.platform.gpus.items())
            terms += [GpuTerm(gpu.name, (gpu,), count) for gpu, count in rows]
        return tuple(terms)

    @cached_property
    def cuda(self) -> Toolkit | None:
        """Return the CUDA that containers must be able to run."""
        return self.catalog.toolkit(self.request.cuda) if self.request.cuda else None

    @cached_property
    def toolkit(self) -> Toolkit | None:
        """Return the toolkit requested on the host."""
        return self.catalog.toolkit(self.request.toolkit) if self.request.toolkit else None

    @cached_property
    def requested_cuda(self) -> tuple[tuple[str, Toolkit], ...]:
        """Return the requested CUDA of containers and of the host's toolkit, each with its name for messages."""
        named = (("containers", self.cuda), ("the host's toolkit", self.toolkit))
        return tuple((user, row) for user, row in named if row is not None)

    def floor(self, row: Toolkit) -> str:
        """Return the oldest driver that runs a toolkit, by minor-version compatibility."""
        return row.floor or self.catalog.cuda_majors[str(row.major)].floor

    @cached_property
    def driver_branch(self) -> Branch | None:
        """Return the branch that the driver request names; None for a word, a range or no request."""
        name = (self.request.driver or "").removesuffix(LATEST)
        if self.moves and not name.isdigit():
            raise UsageError(f"driver {self.request.driver!r}: {LATEST} follows a branch, as in 580{LATEST}")
        return self.catalog.branch_of(name) if name and name not in WORDS and not is_range(name) else None

    @property
    def moves(self) -> bool:
        """Return True if the newest release of the named branch is requested, whatever is installed."""
        return (self.request.driver or "").endswith(LATEST)

    @cached_property
    def driver_version(self) -> str | None:
        """Return the exact release that the driver request names."""
        name = self.request.driver
        return name if name and name not in WORDS and "." in name and not is_range(name) and not self.moves else None

    @cached_property
    def driver_range(self) -> "SpecifierSet | None":
        """Return the range of releases of the driver request; None if it has none."""
        text = self.request.driver
        return specifiers(text) if text and is_range(text) else None

    def in_range(self, version: str) -> bool:
        """Return True if a release satisfies the range; always True without a range."""
        return self.driver_range is None or self.driver_range.contains(number(version), prereleases=True)

    def newest_in_range(self, branch: Branch) -> str:
        """Return the newest known release of a branch inside the range; its newest of all if none is inside."""
        inside = [point for point in branch.points if self.in_range(point)]
        return max(inside, key=number) if inside else branch.latest

    @cached_property
    def framework(self) -> Framework | None:
        """Return the framework release with wheels that must run."""
        return framework_named(self.request.framework, self.catalog) if self.request.framework else None

    @property
    def installed(self) -> Installed | None:
        """Return the installed driver, if there is one."""
        return self.node.installed if self.node.installed and self.node.installed.present else None

    @cached_property
    def source(self) -> Origin:
        """Return the driver's source: the requested one, else the installed one, else NVIDIA's repository."""
        if self.request.source is not None:
            return self.request.source
        origins = self.installed.origins if self.installed else ()
        known: tuple[Origin, ...] = ("nvidia", "ubuntu", "debian")
        return next((origin for origin in known if origins == (origin,)), "nvidia")

    @property
    def source_rule(self) -> str:
        """Return the rule for the reason of the source."""
        if self.request.source is not None:
            return "wish"
        return "installed" if self.installed and self.installed.origins == (self.source,) else "preference"

    @cached_property
    def kernel_release(self) -> Number | None:
        """Return the leading numbers of the kernel's release."""
        return kernel_number(self.node.kernel)

    @cached_property
    def board(self) -> Board:
        """Return the services that the board needs: by the platform's row, the PCI bus, or the number of GPUs."""
        if self.platform is not None:
            row = self.platform
            words = f"{row.name}: {_listed(row.services) or 'nothing in addition to the driver'}"
            unsure = None if row.sure("services") else f"the catalog is not sure of the services of {row.name}"
            return Board(row.services, row.kernel_modules, unsure=unsure, why=words)
        boards = [self._board_of(term) for term in self.gpus]
        if not boards:
            return Board(why="no GPU named")
        telling = [board for board in boards if board.services or board.unknown] or boards[:1]
        return Board(
            tuple(dict.fromkeys(service for board in boards for service in board.services)),
            tuple(dict.fromkeys(module for board in boards for module in board.kernel_modules)),
            unknown=next((board.unknown for board in boards if board.unknown), None),
            unsure=next((board.unsure for board in boards if board.unsure), None),
            why=telling[0].why,
        )

    def _board_of(self, term: GpuTerm) -> Board:
        fabrics = {gpu.fabric for gpu in term.models}
        if fabrics == {"none"}:
            return Board(why=f"{term.label} has no NVSwitch on any board")
        if fabrics == {"rack"}:
            return Board(("imex",), why=f"{term.label}: its NVSwitches are in the rack, so IMEX and no fabric manager")
        if term.count == 1:
            return Board(why=f"a single {term.label} is not connected to an NVSwitch that this node manages")
        shows = all(gpu.nvlink is None or gpu.nvlink.gen < 5 for gpu in term.models)
        if self.node.nvswitch and shows:
            return Board(("fabric-manager",), why="NVSwitches are on the PCI bus")
        if self.node.nvswitch is False and shows:
            return Board(why=f"{term.label} without an NVSwitch on the PCI bus")
        return self._board_by_count(term)

    def _board_by_count(self, term: GpuTerm) -> Board:
        depends = f"{term.label}: NVSwitches and the fabric manager depend on the board; set --count or --platform"
        if term.count is None:
            return Board(unknown=depends, why=depends)
        behind = [gpu for gpu in term.models if gpu.fabric != "none"]
        rows = [row for gpu in behind for row in self.catalog.platforms_with({gpu.id: term.count})]
        rows = [row for row in rows if row.kind != "cloud"]
        if not rows and len(behind) == len(term.models) and (larger := self._more_than_one_board(term)) is not None:
            return larger
        if not rows or len({row.services for row in rows}) > 1 or (rows[0].services and len(behind) < len(term.models)):
            known = f"{term.label} x {term.count}: no board with that number in the catalog; set --platform"
            return Board(unknown=known, why=known)
        row = rows[0]
        unsure = None if row.sure("services") else f"the catalog is not sure of the services of {row.name}"
        words = (
            f"{term.count} x {term.label} is {row.name}: {_listed(row.services) or 'nothing in addition to the driver'}"
        )
        return Board(row.services, row.kernel_modules, unsure=unsure, why=words)

    def _more_than_one_board(self, term: GpuTerm) -> Board | None:
        """Return two boards for more GPUs than any board without NVSwitches has, such as 16 A100; else None."""
        held = {gpu.id for gpu in term.models}
        boards = [row for row in self.catalog.platforms.values() if row.kind != "cloud" and set(row.gpus) <= held]
        direct = [row.gpu_count for row in boards if not row.services]
        switched = [row for row in boards if row.services and row.gpu_count < (term.count or 0)]
        if not switched or max(direct, default=0) >= (term.count or 0):
            return None
        board = max(switched, key=lambda row: row.gpu_count)
        why = f"{term.count} x {term.label}: treated as more than one {board.name}"
        unsure = f"no board with {term.count} x {term.label} in the catalog; set --platform"
        return Board(board.services, board.kernel_modules, unsure=unsure, why=why)


def _listed(words: Collection[str]) -> str:
    return ", ".join(words)


def terms(request: Request, node: NodePicture) -> tuple[Term, ...]:
    """Return all requested values and facts that could be part of a conflict."""
    installed = node.installed if node.installed and node.installed.present else None
    on_node = installed and f"{installed.version or 'driver packages'} from {' and '.join(installed.origins)}"
    facts: list[tuple[str, str | None]] = [("gpu", group.label) for group in node.gpus]
    facts += [("platform", node.platform), ("os", node.os), ("arch", node.arch), ("kernel", node.kernel)]
    requested = [
        ("source", request.source),
        ("driver", request.driver),
        ("cuda", request.cuda),
        ("toolkit", request.toolkit),
        ("kernel-module", request.kernel_module),
        ("framework", request.framework),
        ("past-eol", None if request.past_eol == "warn" else request.past_eol),
    ]
    basis: Literal["wish", "node"] = "node" if node.observed else "wish"
    node_terms = [Term(name=name, value=value, given=basis) for name, value in facts if value]
    node_terms += [Term(name="installed", value=on_node, given="node")] if on_node else []
    return (*node_terms, *(Term(name=name, value=value, given="wish") for name, value in requested if value))


def restrict(request: Request, node: NodePicture, keep: Collection[Term]) -> tuple[Request, NodePicture]:
    """Return the question with only these terms; dropped ones may have any value."""
    held = {(term.name, term.value) for term in keep}
    names = {term.name for term in keep}

    def if_kept(name: str, value: str | None) -> str | None:
        return value if name in names else None

    gpus = tuple(group for group in node.gpus if ("gpu", group.label) in held)
    installed = "installed" in names
    arch: Arch | None = node.arch if "arch" in names else None
    picture = node.model_copy(
        update={
            "gpus": gpus,
            "platform": if_kept("platform", node.platform),
            "os": if_kept("os", node.os),
            "arch": arch,
            "kernel": if_kept("kernel", node.kernel),
            "nvswitch": node.nvswitch if gpus else None,
            "installed": node.installed if installed else None,
            "loaded_version": node.loaded_version if installed else None,
        }
    )
    restricted = request.model_copy(
        update={
            "source": if_kept("source", request.source),
            "driver": if_kept("driver", request.driver),
            "cuda": if_kept("cuda", request.cuda),
            "toolkit": if_kept("toolkit", request.toolkit),
            "kernel_module": if_kept("kernel-module", request.kernel_module),
            "framework": if_kept("framework", request.framework),
            "past_eol": request.past_eol if "past-eol" in names else "warn",
        }
    )
    return restricted, picture


def must_be_known(question: Question) -> None:
    """Look up every name, so that an unknown one raises UsageError before anything is decided."""
    if question.node.platform and question.node.gpus:
        raise UsageError("a platform defines its GPUs: remove the others")
    labels = [group.label for group in question.node.gpus]
    if len(set(labels)) != len(labels):
        raise UsageError(f"duplicate GPU:  {', '.join(labels)}")
    for look_up in ("system", "platform", "gpus", "cuda", "toolkit", "driver_branch", "driver_range", "framework"):
        getattr(question, look_up)
