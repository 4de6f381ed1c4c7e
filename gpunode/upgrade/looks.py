"""Looks at nodes by the probe: what a change has to know of each of them, before and after."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError

from gpunode.catalog import load
from gpunode.checks import Status
from gpunode.fleet import Target, collect
from gpunode.frozen import invalid_field
from gpunode.history.runs import SNAPSHOT, extract_snapshot
from gpunode.history.snapshot import Snapshot
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.request import EvaluatedNode, Json
from gpunode.provisioning.running_driver import gpus_in_use
from gpunode.stack import NodePicture, picture_from_facts, undetermined
from gpunode.text import listed
from gpunode.workload.options import WorkloadOptions
from gpunode.workload.run import following

LOOK = "look"
MOST_FINDINGS = 100
"""Findings before the change that the mark on a node keeps."""


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
