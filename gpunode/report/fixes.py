"""The next step for a finding: its remedy, and the command that applies it, ready to be pasted."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from gpunode.checks.actions import PROVISION, action
from gpunode.checks.gpus import slots_in
from gpunode.text import listed, printable

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
"""Names of hosts that Ansible reads as such, and a shell as one word."""
_RUN = re.compile(rf"\s*Run: {re.escape(PROVISION)} -t \S+$")
_AFTER = {"restart_os": "reboot", "reload_driver": "reload the driver", "reset_gpu": "reset the GPU"}


@dataclass(frozen=True)
class Origin:
    """The inventory of a run."""

    inventories: tuple[str, ...] = ()
    """Values of ``-i``; empty: the nodes are not of an inventory."""


_NONE = Origin()
_ORIGIN: ContextVar[Origin] = ContextVar("origin_of_the_run", default=_NONE)


@contextmanager
def of_run(origin: Origin) -> Iterator[None]:
    """Let reports that are written in the context name the inventory in their commands."""
    token = _ORIGIN.set(origin)
    try:
        yield
    finally:
        _ORIGIN.reset(token)


@dataclass(frozen=True)
class Fix:
    """What to do about a finding, as lines without control characters."""

    text: str = ""
    """The remedy; empty if the command is the whole remedy."""
    command: str = ""
    """To be pasted; empty if no role repairs the fault."""
    then: str = ""
    """Steps that follow."""


def fix_of(remedy: str | None, actions: Sequence[str], hosts: Sequence[str], messages: Iterable[str] = ()) -> Fix:
    """Return the remedy for hosts. ``actions`` are those of the finding, as ``VERB:TARGET``.

    SLOT in a remedy becomes the PCI address in the findings' messages, if they have one alone.
    """
    if not remedy:
        return Fix()
    steps = [action(text) for text in actions]
    role = next((index for index, step in enumerate(steps) if step.action == "run_role"), None)
    text = printable(_RUN.sub("", remedy)).replace(PROVISION, _provision(hosts))
    addresses = {address for message in messages for address in slots_in(message)}
    if len(addresses) == 1:
        text = re.sub(r"\bSLOT\b", addresses.pop(), text)
    if role is None:
        return Fix(text=text)
    target = steps[role].target or ""
    command = f"{_provision(hosts)} -t {target.partition(':')[2] or target}"
    if command in text:
        return Fix(text=text)
    after = [_AFTER.get(step.action, f"restart {step.target}") for step in steps[role + 1 :] if _follows(step.action)]
    return Fix(text="" if role == 0 else text, command=command, then=listed(after))


def _follows(verb: str) -> bool:
    return verb in _AFTER or verb == "restart_service"


def _provision(hosts: Sequence[str]) -> str:
    """Return the command for hosts; INVENTORY and HOST stay where they are unknown, or not plain names."""
    inventories = " ".join(f"-i {shlex.quote(printable(path))}" for path in _ORIGIN.get().inventories)
    plain = hosts and all(_NAME.fullmatch(host) for host in hosts)
    return f"gpunode provision {inventories or '-i INVENTORY'} -l {','.join(hosts) if plain else 'HOST'}"
