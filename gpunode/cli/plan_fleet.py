"""Hosts of an inventory in ``gpunode plan``; what requests the stack of each, and in which file."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpunode.catalog import Catalog
from gpunode.cli.selection import ask_password, shown_progress
from gpunode.content import collection_root
from gpunode.fleet import Collected, collect
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.locks import refuse_inventory
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.history.store import HistoryError, state_folder
from gpunode.judging.evaluator import Evaluator
from gpunode.names import fold
from gpunode.provisioning.node_stack import REQUESTED, requested_by, with_request
from gpunode.stack import LOCK_NAME, PlanHost, Request
from gpunode.stack.picture import host_of
from gpunode.text import printable
from gpunode.variables import Variables, locations
from gpunode.whole import make_private_folder, whole_file


class FleetPlanOptions(Protocol):
    """The options of the command line that are used here."""

    @property
    def inventories(self) -> tuple[str, ...]: ...
    @property
    def limit(self) -> str | None: ...
    @property
    def parallel(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def ask_become_pass(self) -> bool: ...


@dataclass(frozen=True)
class Answers:
    """Hosts in the order of their answers, and their inventory."""

    inventory: Inventory
    hosts: Iterable[PlanHost]


def of_inventory(options: FleetPlanOptions, evaluator: Evaluator, catalog: Catalog, request: Request) -> Answers:
    """Collect from the hosts of an inventory. Raises UsageError if it cannot be read.

    The variables of a host request its stack, as in ``gpunode provision``; ``request`` (the options) takes precedence.
    """
    inventory, config = read_with_settings(options.inventories, options.limit, SETTINGS)
    refuse_inventory(collection_root(), inventory)
    selected = targets(inventory, config)
    password = ask_password() if options.ask_become_pass else None

    def answers() -> Iterator[Collected]:
        with shown_progress([target.name for target in selected]) as update:
            for answer in collect(
                selected, parallel=options.parallel, timeout_s=options.timeout_s, become_password=password
            ):
                update(answer.host)
                yield answer

    def hosts() -> Iterator[PlanHost]:
        for node in evaluator.facts_of_fleet(answers()):
            if node.facts is None:
                yield PlanHost(node.host, None, node.reason)
            else:
                variables = inventory.hosts[node.host]
                host = host_of(node.host, node.facts, catalog, variables.get(LOCK_NAME))
                yield with_request(host, variables, request)

    return Answers(inventory, hosts())


NOT_REQUESTS: tuple[Any, ...] = (None, "", "auto", "keep", [])
MOST_BYTES = 1 << 16


def origin_lines(inventory: Inventory, extra: Variables) -> Iterator[str]:
    """Yield a line for hosts with the same request: what it is, and which file or option has it.

    ``extra``: the variables of ``-e``, which take precedence.
    """
    by_request: defaultdict[str, list[str]] = defaultdict(list)
    for host, variables in inventory.hosts.items():
        by_request[_request(inventory.sources, {**variables, **extra}, extra)].append(host)
    for text, hosts in by_request.items():
        yield printable(f"stack of {fold(hosts)}: {text}")


def _request(sources: Sequence[str], variables: Variables, extra: Variables) -> str:
    requested = {REQUESTED[name]: value for name, value in requested_by(variables).items() if value not in NOT_REQUESTS}
    parts = [f"{name}={value} ({_where(name, sources, extra)})" for name, value in requested.items()]
    lock = variables.get(LOCK_NAME)
    if lock:
        driver = lock.get("driver", {}).get("version") if isinstance(lock, Mapping) else None
        version = f" of driver {driver}" if driver else ""
        parts.append(f"lock{version} ({_where(LOCK_NAME, sources, extra)})")
    return ", ".join(parts) or "no request: an installed driver is kept, another node gets the preferred one"


def _where(name: str, sources: Sequence[str], extra: Variables) -> str:
    """Return the file that sets a variable, if it is one alone."""
    if name in extra:
        return "-e"
    files = list(locations(name, sources))
    if len(files) == 1:
        return files[0]
    return "inventory" if not files else f"one of {', '.join(files[:3])}"


def keep_unwritten(sources: Sequence[str], options: Sequence[str], at: str) -> None:
    """Save the options of a plan that was not written; without options, remove what an earlier plan saved.

    If the state folder cannot be written, only the reminder is lost.
    """
    with suppress(HistoryError, OSError):
        path = _path(sources)
        if not options:
            path.unlink(missing_ok=True)
            return
        make_private_folder(path.parent)
        with whole_file(path, private=True) as stream:
            stream.write(json.dumps({"at": at, "options": list(options)}).encode())


def unwritten(sources: Sequence[str]) -> str | None:
    """Return a reminder of a plan that was not written, once."""
    with suppress(HistoryError, OSError, ValueError, KeyError, TypeError):
        path = _path(sources)
        with path.open("rb") as stream:
            kept = json.loads(stream.read(MOST_BYTES))
        path.unlink()
        options = " ".join(map(str, kept["options"]))
        inventories = " ".join(f"-i {source}" for source in sources)
        return printable(
            f"the plan of {kept['at']} with {options} was not written, and this run does not follow it: "
            f"gpunode plan {inventories} {options} --write"
        )
    return None


def _path(sources: Sequence[str]) -> Path:
    names = json.dumps([str(Path(source).absolute()) for source in sources])
    return state_folder() / "plans" / f"{hashlib.sha256(names.encode()).hexdigest()[:16]}.json"
