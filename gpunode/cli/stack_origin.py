"""What requests the stack of each host, in which file, and plans that were not written: for plan and provision."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpunode.fleet.inventory import Inventory
from gpunode.history.store import HistoryError, state_folder
from gpunode.names import fold
from gpunode.provisioning.node_stack import REQUESTED, requested_by
from gpunode.stack import LOCK_NAME
from gpunode.text import printable
from gpunode.variables import Variables, locations
from gpunode.whole import make_private_folder, whole_file

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
    found = list(locations(name, sources))
    if len(found) == 1:
        return found[0]
    return "inventory" if not found else f"one of {', '.join(found[:3])}"


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
