"""What verbs that write no report did, as JSON: ``--format json`` of collect, provision and lab status."""

from collections import Counter
from typing import Literal, get_args

from pydantic import Field

from gpunode.frozen import Frozen, FrozenByName
from gpunode.text import counted, printable_json


class OutcomeDocument(FrozenByName):
    """A document about a run of one verb."""

    def text(self) -> str:
        """Return the document as it is printed."""
        return printable_json(self.model_dump_json(by_alias=True, indent=1))


class CollectedNode(Frozen):
    """What became of a node's bundle."""

    host: str
    status: Literal["collected", "unreachable", "unsaved"]
    reason: str | None = None
    """Why there is no file."""
    seconds: float | None = None


class CollectOutcome(OutcomeDocument):
    """The document ``gpunode.collect/1``."""

    schema_name: Literal["gpunode.collect/1"] = Field("gpunode.collect/1", alias="schema")
    folder: str
    """With a file HOST.json for each node that is collected."""
    exit_code: int
    nodes: tuple[CollectedNode, ...]


class TaskOutcome(Frozen):
    """A task that changed a node, or failed on it."""

    role: str | None
    task: str
    message: str | None = None
    """Of a failure."""


ProvisionedStatus = Literal["unchanged", "changed", "failed", "unreachable"]
"""What a playbook did to a node."""


class ProvisionedNode(Frozen):
    """What a playbook did to a node."""

    host: str
    status: ProvisionedStatus
    changed: tuple[TaskOutcome, ...] = ()
    """With --check: what would change."""
    failure: TaskOutcome | None = None
    """The one that ended the node's run."""


class ProvisionOutcome(OutcomeDocument):
    """The document ``gpunode.provision/1``."""

    schema_name: Literal["gpunode.provision/1"] = Field("gpunode.provision/1", alias="schema")
    check: bool
    """Nothing was changed."""
    exit_code: int
    seconds: float
    nodes: tuple[ProvisionedNode, ...]
    """Empty if Ansible ended before its first task."""


def closing(done: ProvisionOutcome, again: str, next_verb: str) -> str:
    """Return the closing sentence: how many nodes became what, in how long, and the next command."""
    numbers = Counter(node.status for node in done.nodes)
    words = {"changed": "would change" if done.check else "changed"}
    counts = [f"{numbers[name]} {words.get(name, name)}" for name in get_args(ProvisionedStatus) if numbers[name]]
    following = again if done.check else next_verb
    then = "" if done.exit_code else f"; next: {following}"
    return f"{counted(len(done.nodes), 'node')}: {', '.join(counts)} ({done.seconds:.0f} s){then}"


class MessageExplanation(Frozen):
    """What a text means."""

    title: str
    means: str
    remedy: str
    checks: tuple[str, ...]
    sources: tuple[str, ...]
    fact: str | None = None
    """The fact of a node that the text is about."""


class ExplainedNode(Frozen):
    """What a node has to do with a text."""

    host: str
    reached: bool
    lines: tuple[str, ...]
    """Findings of the checks of the explanations, and facts."""


class ExplainOutcome(OutcomeDocument):
    """The document ``gpunode.explain/1``."""

    schema_name: Literal["gpunode.explain/1"] = Field("gpunode.explain/1", alias="schema")
    exit_code: int
    explanations: tuple[MessageExplanation, ...]
    """Empty if the text is unknown."""
    nodes: tuple[ExplainedNode, ...] = ()


class LabPart(Frozen):
    """A container of a lab."""

    name: str
    state: str
    """Of its container: running, exited …"""
    os: str | None
    hardware: str | None
    address: str
    faults: tuple[str, ...]


class LabOutcome(OutcomeDocument):
    """The document ``gpunode.lab/1``."""

    schema_name: Literal["gpunode.lab/1"] = Field("gpunode.lab/1", alias="schema")
    lab: str
    inventory: str
    exit_code: int
    nodes: tuple[LabPart, ...]
    vendor: LabPart | None
    """The copy of NVIDIA's repositories; None: this lab has none."""


class ErrorDocument(FrozenByName):
    """Why there is no result: wrong usage, or an answer that could not be determined."""

    schema_name: Literal["gpunode.error/1"] = Field("gpunode.error/1", alias="schema")
    message: str
    """The line on stderr: what is wrong, where, what to do."""
    exit_code: Literal[2, 3]
    """2: wrong usage or configuration; 3: could not be determined."""
