"""The lock, and the drift of a node: the locked stack, the installed driver, and the stack of today's catalog."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any, Literal

from pydantic import ValidationError

from gpunode.catalog import Catalog
from gpunode.catalog.software import Origin
from gpunode.errors import UsageError
from gpunode.frozen import invalid_field
from gpunode.stack.model import Installed, NodePicture, Request, Stack, StackModel
from gpunode.stack.question import number
from gpunode.stack.resolve import resolve

LOCK_NAME = "gpunode_stack"
"""The variable that a lock sets, and the stem of its file."""
State = Literal["in-step", "not-installed", "differs-from-lock", "newer-available"]
FREE_TEXT = "text"
"""Reasons and warnings quote facts of the node; only people read them."""
NODE_WORDS = frozenset({"kernel", "remove", "driver.version"})
"""Fields with text from a node; the others come from the catalog or the command line."""
_NODE_WORD = re.compile(r"[\w.+~:^-]{0,255}", re.ASCII)
_CATALOG_WORD = re.compile(r"[\w.+~:^*/, ()\[\]-]{0,255}", re.ASCII)
_SHOWN = 60


class Drift(StackModel):
    """The locked driver, the installed one, and the one that would be chosen today."""

    hosts: tuple[str, ...]
    locked: str | None
    """``580.173.02 open from nvidia``; None: no lock."""
    installed: str | None
    newest: str | None
    """The driver that the same request would select today on a node without a driver."""
    state: State
    past_eol: bool
    """True if the installed branch, or else the locked one, is past its end of life."""
    text: str


@dataclass(frozen=True)
class DriftQuery:
    """The request for nodes with one picture."""

    request: Request
    picture: NodePicture
    catalog: Catalog
    today: date

    @property
    def installed(self) -> Installed | None:
        """Return the driver on the nodes; None if there is none."""
        return self.picture.installed if self.picture.installed and self.picture.installed.present else None

    @cached_property
    def bare(self) -> NodePicture:
        """Return the same nodes without a driver."""
        return self.picture.model_copy(update={"installed": None, "loaded_version": None})

    def newest(self, lock: Stack | None) -> Stack | None:
        """Return today's stack, in the locked branch if none is requested; None if no stack matches."""
        known: tuple[Origin, ...] = ("nvidia", "ubuntu", "debian")
        source = next((origin for origin in known if self.installed and self.installed.origins == (origin,)), None)
        driver = None if self.request.driver == "keep" else self.request.driver
        if lock is not None:
            driver, source = driver or str(lock.driver.branch), lock.source
        request = self.request.model_copy(update={"driver": driver, "source": self.request.source or source})
        answer = resolve(request, self.bare, self.catalog, self.today)
        return answer if isinstance(answer, Stack) else None


def drifts(query: DriftQuery, locks: Mapping[str, Stack | None]) -> tuple[Drift, ...]:
    """Return the drift of hosts with one picture from their locks, without hosts that have neither lock nor driver."""
    by_lock: dict[str, tuple[Stack | None, list[str]]] = {}
    for host, lock in locks.items():
        if lock is not None or query.installed is not None:
            by_lock.setdefault(lock.to_json() if lock else "", (lock, []))[1].append(host)
    return tuple(_drift(tuple(sorted(hosts)), lock, query) for lock, hosts in by_lock.values())


def joined(drifts: Collection[Drift]) -> tuple[Drift, ...]:
    """Return equal drifts as one, with the hosts of all."""
    by_text: dict[str, Drift] = {}
    for drift in drifts:
        key = drift.model_dump_json(exclude={"hosts"})
        hosts = (*by_text[key].hosts, *drift.hosts) if key in by_text else drift.hosts
        by_text[key] = drift.model_copy(update={"hosts": tuple(sorted(hosts))})
    return tuple(by_text.values())


def _drift(hosts: tuple[str, ...], lock: Stack | None, query: DriftQuery) -> Drift:
    installed, newest = query.installed, query.newest(lock)
    state, text = _state(lock, installed, newest)
    have = installed.version if installed else None
    branch = have.split(".")[0] if have else str(lock.driver.branch) if lock else ""
    row = query.catalog.branches.get(branch)
    ended = row is not None and row.eol is not None and row.eol < query.today
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
    locked, have = lock.driver.constraint, installed.version or ""
    same = have == locked or (locked.endswith(".*") and have.startswith(locked[:-1]))
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
    """Return the request with the locked driver, source and flavour, if it names no driver itself."""
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
    """Return the variables of a lock file: the stack under ``gpunode_stack``, as plain values.

    Raise UsageError for text that Ansible, which templates variable files, would evaluate.
    """
    document: dict[str, Any] = stack.model_dump(mode="json", by_alias=True)
    refuse_templates(document, LOCK_NAME)
    return {LOCK_NAME: document}


def read_lock(document: Mapping[str, Any] | None, where: str) -> Stack | None:
    """Return a lock from variables; raise UsageError if it is not valid."""
    if document is None:
        return None
    try:
        return Stack.model_validate(document)
    except ValidationError as err:
        field, why = invalid_field(err, LOCK_NAME)
        raise UsageError(
            f"{where}: {LOCK_NAME} is not a valid stack: {field}: {why}; "
            "remove this lock, then run gpunode plan --write"
        ) from None


def refuse_templates(document: dict[str, Any], name: str) -> None:
    """Raise UsageError for the first string of a stack with characters that are not allowed, and for a brace anywhere.

    Ansible evaluates templates in variable files, and a stack contains answers of nodes. The parsers refuse these too;
    this check does not rely on them.
    """
    for path, text in _strings(document):
        field = ".".join(part for part in path if not part.isdigit())
        if path[-1] == FREE_TEXT:
            harmless = "{" not in text and "}" not in text
        else:
            harmless = (_NODE_WORD if field in NODE_WORDS else _CATALOG_WORD).fullmatch(text) is not None
        if not harmless:
            shown = "".join(char if char.isprintable() else "?" for char in text[:_SHOWN])
            raise UsageError(
                f"{name}: {'.'.join(path)} is '{shown}', which is not allowed in a lock, because Ansible would "
                "evaluate it as a template; check the node that reports it"
            )


def _strings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (*path, "key"), key
            yield from _strings(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _strings(item, (*path, str(number)))
