"""Nodes before their change, as a run keeps them, and why a node is not proven to be as good as then."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from gpunode.change.run import Results
from gpunode.checks import Status
from gpunode.errors import UsageError
from gpunode.history.compare import GPU_REPLACED, OTHER_MACHINE, Change, compare, renumbered
from gpunode.history.snapshot import Snapshot
from gpunode.names import fold
from gpunode.text import listed, one_line, printable
from gpunode.upgrade.looks import NodeLook
from gpunode.whole import write_whole

RUNS = "container.runs"
"""The check that names why nothing was measured."""


@dataclass(frozen=True)
class NodeBefore:
    """A node before its change."""

    snapshot: Snapshot
    findings: Sequence[dict[str, str]]
    measured: Snapshot | None = None
    """The snapshot with figures; None: it was not measured."""
    image: str = ""
    """What it was measured in; empty: not recorded."""


def before_file(folder: Path, name: str) -> Path:
    """Return the file of a run that has a node's snapshot before the change."""
    return folder / f"before-{quote(name, safe='@+,=')}.json"


def write_before(folder: Path, looks: Mapping[str, NodeLook]) -> None:
    """Keep the snapshots before the change."""
    for name, look in looks.items():
        if look.snapshot is not None:
            body = {"snapshot": look.snapshot.model_dump(mode="json"), "findings": look.findings}
            write_whole(before_file(folder, name), json.dumps(body), private=True)


def copy_before(origin: Path, folder: Path, name: str) -> None:
    """Keep the snapshot of an earlier run, if it has one."""
    if (before := before_file(origin, name)).exists():
        write_whole(before_file(folder, name), before.read_text(encoding="utf-8"), private=True)


def write_measured(folder: Path, look: NodeLook, image: str) -> Results:
    """Add what was measured of a node to its snapshot before the change; return the reason if there is nothing."""
    if look.snapshot is None or not look.snapshot.figures:
        of_container = next((text for (check, _), text in look.messages.items() if check == RUNS), "")
        why = look.reason or of_container or f"see gpunode validate {look.host}"
        return {look.host: f"nothing was measured before the change: {why}"}
    path = before_file(folder, look.host)
    measured = look.snapshot.model_dump(mode="json", include={"figures", "verdicts"}) | {"image": image}
    write_whole(path, json.dumps({**json.loads(path.read_bytes()), "measured": measured}), private=True)
    return {look.host: ""}


def read_before(folder: Path, name: str) -> NodeBefore:
    """Return a node as it was before the change. Raises UsageError."""
    path = before_file(folder, name)
    try:
        document = json.loads(path.read_bytes())
        snapshot = Snapshot.model_validate(document["snapshot"])
        more = dict(document.get("measured", {}))
        image = str(more.pop("image", ""))
        measured = Snapshot.model_validate({**document["snapshot"], **more}) if more else None
        return NodeBefore(snapshot, document["findings"], measured, image)
    except (OSError, ValueError, KeyError, TypeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "damaged"
        raise UsageError(f"{path}: {reason}: without it {name} cannot be proven to be as good as before") from None


def why_not_as_good(before: Snapshot, after: NodeLook, target: str | None) -> str:
    """Return why a node is not proven: not at its target, worse than before, or less is known of it than before."""
    if after.snapshot is None:
        return after.reason or "it did not answer"
    reasons = [
        f"driver {version or 'unknown'} is {state}, {target} was requested"
        for state, version in (("installed", after.release), ("loaded", after.loaded))
        if version != target
    ]
    reasons += _by_text(_changes_for_the_worse(before, after.snapshot), after.messages)
    reasons += _less_known(before, after.snapshot)
    return printable(one_line(listed(reasons, 4)))


def _changes_for_the_worse(before: Snapshot, after: Snapshot) -> Iterator[Change]:
    for change in compare(before, after).changes:
        # An exchanged GPU may be a good one, but nothing that was known of the one before holds for it.
        if change.effect == "worse" or change.what in (GPU_REPLACED, OTHER_MACHINE):
            yield change


def _less_known(before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Yield what was not known to fail, was measured, or was known before."""
    for check, verdict in after.verdicts.items():
        if check not in before.verdicts and verdict.status is Status.FAIL:
            yield f"{check} failed, and was not run before"
    numbers = renumbered(before, after)
    lost = {
        (figure.metric, component)
        for figure in before.figures
        if (component := numbers.get(figure.component, figure.component)) is not None
    } - {(figure.metric, figure.component) for figure in after.figures}
    for metric, component in sorted(lost):
        yield f"{metric} of {component} was measured before, and is not any more"
    for name in sorted(set(after.unknown) - set(before.unknown)):
        yield f"{name}: {after.unknown[name]}"


def _by_text(changes: Iterable[Change], messages: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield the changes, each with its components; checks come first, with what they report."""
    components: dict[str, list[str]] = {}
    for change in sorted(changes, key=lambda change: (change.section != "check", change.component != "node")):
        message = messages.get((change.what, change.component)) if change.section == "check" else None
        text = f"{change.what}: {message}" if message else change.text
        components.setdefault(text, []).append(change.component)
    for text, names in components.items():
        yield text if names == ["node"] else f"{fold(names)}: {text}"
