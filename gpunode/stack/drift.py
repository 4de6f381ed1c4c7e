"""The lock, and how far a node has drifted: what was decided once, what is installed, what would be decided today."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, Literal

from pydantic import ValidationError

from gpunode.catalog import Catalog
from gpunode.errors import UsageError
from gpunode.stack.inert import refuse_templates
from gpunode.stack.model import Installed, NodePicture, Origin, Request, Stack, StackModel
from gpunode.stack.question import number
from gpunode.stack.resolve import resolve

LOCK_NAME = "gpunode_stack"
"""The variable that a lock sets, and the stem of its file."""

State = Literal["in-step", "not-installed", "differs-from-lock", "newer-available"]


class Drift(StackModel):
    """What was locked, what is installed, what would be chosen today."""

    hosts: tuple[str, ...]
    locked: str | None
    """``580.173.02 open from nvidia``; None: no lock."""
    installed: str | None
    newest: str | None
    """What the same wishes would choose today on an empty node."""
    state: State
    past_eol: bool
    """The branch that is installed, or else locked, is past its end of life."""
    text: str


@dataclass(frozen=True)
class Wanted:
    """What is asked of nodes with one picture."""

    request: Request
    picture: NodePicture
    catalog: Catalog
    today: date

    @property
    def installed(self) -> Installed | None:
        """The driver on the nodes; None where there is none."""
        return self.picture.installed if self.picture.installed and self.picture.installed.present else None

    @cached_property
    def bare(self) -> NodePicture:
        """The same nodes with nothing on them."""
        return self.picture.model_copy(update={"installed": None, "loaded_version": None})

    def newest(self, lock: Stack | None) -> Stack | None:
        """What would be chosen today: in the locked branch where none is wished; None where nothing would."""
        known: tuple[Origin, ...] = ("nvidia", "ubuntu", "debian")
        own = next((origin for origin in known if self.installed and self.installed.origins == (origin,)), None)
        driver = None if self.request.driver == "keep" else self.request.driver
        if lock is not None:
            driver, own = driver or str(lock.driver.branch), lock.source
        wishes = self.request.model_copy(update={"driver": driver, "source": self.request.source or own})
        answer = resolve(wishes, self.bare, self.catalog, self.today)
        return answer if isinstance(answer, Stack) else None


def drifts(wanted: Wanted, locks: Mapping[str, Stack | None]) -> tuple[Drift, ...]:
    """How hosts with one picture stand to their locks; nothing of those without a lock and without a driver."""
    by_lock: dict[str, tuple[Stack | None, list[str]]] = {}
    for host, lock in locks.items():
        if lock is not None or wanted.installed is not None:
            by_lock.setdefault(lock.to_json() if lock else "", (lock, []))[1].append(host)
    return tuple(_drift(tuple(sorted(hosts)), lock, wanted) for lock, hosts in by_lock.values())


def joined(found: Collection[Drift]) -> tuple[Drift, ...]:
    """Equal drifts as one, with the hosts of all."""
    by_text: dict[str, Drift] = {}
    for drift in found:
        key = drift.model_dump_json(exclude={"hosts"})
        hosts = (*by_text[key].hosts, *drift.hosts) if key in by_text else drift.hosts
        by_text[key] = drift.model_copy(update={"hosts": tuple(sorted(hosts))})
    return tuple(by_text.values())


def _drift(hosts: tuple[str, ...], lock: Stack | None, wanted: Wanted) -> Drift:
    installed, newest = wanted.installed, wanted.newest(lock)
    state, text = _state(lock, installed, newest)
    have = installed.version if installed else None
    branch = have.split(".")[0] if have else str(lock.driver.branch) if lock else ""
    row = wanted.catalog.branches.get(branch)
    ended = row is not None and row.eol is not None and row.eol < wanted.today
    if ended and row is not None:
        text += f"; branch {branch} is past its end of life: {row.eol}"
    return Drift(
        hosts=hosts,
        locked=_words(lock),
        installed=_installed_words(installed),
        newest=_words(newest),
        state=state,
        past_eol=ended,
        text=text,
    )


def _state(lock: Stack | None, installed: Installed | None, newest: Stack | None) -> tuple[State, str]:
    if installed is None:
        return "not-installed", f"{_words(lock)} is locked and no driver is installed"
    have = _installed_words(installed)
    if lock is not None and not _satisfies(installed, lock):
        return "differs-from-lock", f"{have} is installed and {_words(lock)} is locked"
    if _newer(newest, installed.version):
        return "newer-available", f"{have} is installed; the request allows {_words(newest)} today"
    return "in-step", f"{have} is installed, as locked" if lock else f"{have} is installed"


def _newer(newest: Stack | None, have: str | None) -> bool:
    if newest is None or newest.driver.version is None or have is None:
        return False
    return number(newest.driver.version) > number(have)


def _satisfies(installed: Installed, lock: Stack) -> bool:
    wanted, have = lock.driver.constraint, installed.version or ""
    same = have == wanted or (wanted.endswith(".*") and have.startswith(wanted[:-1]))
    return same and installed.origins == (lock.source,) and installed.flavour in (None, lock.module.flavour)


def _words(stack: Stack | None) -> str | None:
    if stack is None:
        return None
    return f"{stack.driver.version or stack.driver.constraint} {stack.module.flavour} from {stack.source}"


def _installed_words(installed: Installed | None) -> str | None:
    if installed is None:
        return None
    version = installed.version or "a mixture of versions"
    flavour = f" {installed.flavour}" if installed.flavour else ""
    return f"{version}{flavour} from {' and '.join(installed.origins)}"


def with_lock(request: Request, lock: Stack | None) -> Request:
    """Return the request with the locked driver, source and flavour, where it names no driver itself."""
    if lock is None or request.driver is not None:
        return request
    return request.model_copy(
        update={
            "driver": lock.driver.version or str(lock.driver.branch),
            "source": request.source or lock.source,
            "kernel_module": request.kernel_module or lock.module.flavour,
        }
    )


def lock_document(stack: Stack) -> dict[str, Any]:
    """The variables of a lock file: the stack under ``gpunode_stack``, as plain values.

    Raises UsageError where Ansible, which templates variable files, would find more in one than text.
    """
    document: dict[str, Any] = stack.model_dump(mode="json", by_alias=True)
    refuse_templates(document, LOCK_NAME)
    return {LOCK_NAME: document}


def read_lock(document: Mapping[str, Any] | None, where: str) -> Stack | None:
    """A lock as it comes from variables; UsageError where it is none."""
    if document is None:
        return None
    try:
        return Stack.model_validate(document)
    except ValidationError as err:
        first = err.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or LOCK_NAME
        raise UsageError(
            f"{where}: {LOCK_NAME} is not a valid stack: {place}: {first['msg']}; "
            "remove this lock, then run gpunode plan --write"
        ) from None
