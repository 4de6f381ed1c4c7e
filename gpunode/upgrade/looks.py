"""Looks at nodes by the probe: what a change has to know of each of them, before and after.

A run keeps the nodes as they were before their change; a node that is not proven to be as good as then is not returned.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from pydantic import ValidationError

from gpunode.catalog import load
from gpunode.change.run import Results
from gpunode.checks import Status
from gpunode.errors import UsageError
from gpunode.fleet import Target, collect
from gpunode.frozen import invalid_field
from gpunode.history.compare import GPU_REPLACED, OTHER_MACHINE, Change, compare, renumbered
from gpunode.history.runs import SNAPSHOT, extract_snapshot
from gpunode.history.snapshot import Snapshot
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.request import EvaluatedNode, Json
from gpunode.names import fold
from gpunode.provisioning.running_driver import gpus_in_use
from gpunode.stack import NodePicture, picture_from_facts, undetermined
from gpunode.text import listed, one_line, printable
from gpunode.whole import write_whole
from gpunode.workload.options import WorkloadOptions
from gpunode.workload.run import following

LOOK = "look"
MOST_FINDINGS = 100
"""Findings before the change that the mark on a node keeps."""
RUNS = "container.runs"
"""The check that names why nothing was measured."""


def extract_look(node: EvaluatedNode) -> Json:
    """Return what a plan needs of a node, for ``JudgingRequest.extracts``."""
    facts = node.facts
    picture = picture_from_facts(facts, load())
    users = [process.title for process in facts.gpu_processes or () if process.computes]
    unknown = "what uses the GPUs is unknown" if gpus_in_use(facts) and not users else ""
    return {
        "picture": picture.model_dump(mode="json"),
        "undetermined": undetermined(facts, picture),
        "busy": f"GPUs are in use by {listed(users, 3)}" if users else unknown,
    }


EXTRACTS = {SNAPSHOT: extract_snapshot, LOOK: extract_look}


@dataclass(frozen=True)
class NodeLook:
    """One node as it is."""

    host: str
    reason: str = ""
    """Why it did not answer; the other fields are empty then."""
    snapshot: Snapshot | None = None
    picture: NodePicture | None = None
    undetermined: str | None = None
    busy: str = ""
    findings: tuple[dict[str, str], ...] = ()
    """Checks that failed, or could not be determined."""
    messages: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """What they report, by check and component."""

    @property
    def release(self) -> str | None:
        """Return the release of the installed driver."""
        stack = self.snapshot.stack if self.snapshot is not None else None
        return (stack.driver_packages or stack.driver) if stack is not None else None

    @property
    def loaded(self) -> str | None:
        """Return the release of the module in memory."""
        return self.snapshot.stack.driver if self.snapshot is not None else None


class Progress(Protocol):
    """What shows how far a look is."""

    def __call__(self, name: str) -> None:
        """Count a node that has answered."""

    def step(self, name: str, text: str) -> None:
        """Show the current step at a node."""


class Silent:
    """Progress that nobody sees."""

    def __call__(self, name: str) -> None:
        """Show nothing."""

    def step(self, name: str, text: str) -> None:
        """Show nothing."""


@dataclass(frozen=True)
class Connections:
    """How nodes are reached."""

    targets: Mapping[str, Target]
    inventories: tuple[str, ...]
    parallel: int
    timeout_s: float
    password: str | None = None
    arguments: Sequence[str] = ()
    """Arguments of ansible-playbook: vaults, variables, forks."""
    progress: Callable[[Sequence[str]], AbstractContextManager[Progress]] = lambda _: nullcontext(Silent())
    """Returns the progress of a look at nodes with these names."""


def look_at(
    connections: Connections,
    evaluator: Evaluator,
    names: Iterable[str],
    *,
    image: str | None = None,
    each: Callable[[NodeLook], None] = lambda _: None,
) -> dict[str, NodeLook]:
    """Collect from nodes and judge them; return them in the order of their answers.

    ``image``: measure them too, in a container of it. ``each`` gets a node as soon as it has answered.
    """
    measuring = following(WorkloadOptions(image=image), evaluator.facts) if image is not None else None
    targets = [connections.targets[name] for name in names]
    looks: dict[str, NodeLook] = {}
    with connections.progress([target.name for target in targets]) as progress:
        answers = collect(
            targets,
            parallel=connections.parallel,
            timeout_s=connections.timeout_s,
            become_password=connections.password,
            then=measuring(progress.step) if measuring is not None else None,
        )
        for node in evaluator.judge_fleet(answers):
            host = node.report.host
            progress(host)
            looks[host] = _look_of(host, node)
            each(looks[host])
    return looks


def _look_of(host: str, node: JudgedNode) -> NodeLook:
    if node.extracted is None:
        return NodeLook(host, node.report.findings[0].message)
    extracted: Any = node.extracted
    try:
        snapshot = Snapshot.model_validate({**extracted[SNAPSHOT], "host": host})
        picture = NodePicture.model_validate(extracted[LOOK]["picture"])
    except ValidationError as err:
        # As JSON has no number that is infinite, none arrives from the process that read the answer.
        return NodeLook(host, "its answer has a malformed value ({}: {})".format(*invalid_field(err)))
    failed = [finding for finding in node.report.findings if finding.status in (Status.FAIL, Status.ERROR)]
    return NodeLook(
        host,
        snapshot=snapshot,
        picture=picture,
        undetermined=extracted[LOOK]["undetermined"],
        busy=extracted[LOOK]["busy"],
        findings=tuple(
            {"check": finding.check, "component": finding.component, "status": finding.status.value}
            for finding in failed[:MOST_FINDINGS]
        ),
        messages={(finding.check, finding.component): finding.message for finding in failed},
    )


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
