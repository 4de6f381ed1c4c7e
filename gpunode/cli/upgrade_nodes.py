"""What ``gpunode upgrade`` does on nodes: looks by the probe, leases by their program, changes by the playbooks."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpunode.catalog import load
from gpunode.change import leases
from gpunode.change.run import Records, Results
from gpunode.checks import Status
from gpunode.cli.selection import NodeProgress, shown_progress
from gpunode.content import ansible_environment, ansible_program, collection_root
from gpunode.errors import UsageError
from gpunode.fleet import Target, Then, collect
from gpunode.fleet.playbook import CALLBACKS, playbook_of, run
from gpunode.history.compare import GPU_REPLACED, OTHER_MACHINE, Change, compare, renumbered
from gpunode.history.runs import SNAPSHOT, extract_snapshot
from gpunode.history.snapshot import Snapshot
from gpunode.judging.evaluator import Evaluator, JudgedNode
from gpunode.judging.request import EvaluatedNode, Json
from gpunode.names import expand, fold
from gpunode.provisioning.gpu_use import gpus_in_use
from gpunode.stack import NodePicture, picture_from_facts, undetermined
from gpunode.text import listed, one_line, printable
from gpunode.whole import write_whole

LOOK = "look"
RUNS = "container.runs"
"""The check that names why nothing was measured."""
MOST_FINDINGS = 100
"""Findings before the change that the mark on a node keeps."""
_FAILED = re.compile(r"^gpunode: failed on (?P<names>\S+): (?P<why>.*)$", re.MULTILINE)


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


@dataclass(frozen=True)
class Connections:
    """How nodes are reached."""

    targets: Mapping[str, Target]
    inventories: tuple[str, ...]
    parallel: int
    timeout_s: float
    password: str | None = None
    arguments: tuple[str, ...] = ()
    """Arguments of ansible-playbook: vaults, variables, forks."""
    measuring: Callable[[str], Callable[[NodeProgress], Then]] | None = None
    """What measures a node, by the container image; None: nothing is measured."""


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
    measuring = connections.measuring(image) if image is not None and connections.measuring is not None else None
    targets = [connections.targets[name] for name in names]
    found: dict[str, NodeLook] = {}
    with shown_progress([target.name for target in targets]) as shown:
        answers = collect(
            targets,
            parallel=connections.parallel,
            timeout_s=connections.timeout_s,
            become_password=connections.password,
            then=measuring(shown.step) if measuring is not None else None,
        )
        for node in evaluator.judge_fleet(answers):
            shown(node.report.host)
            host = node.report.host
            found[host] = _looked(host, node)
            each(found[host])
    return found


def _looked(host: str, node: JudgedNode) -> NodeLook:
    if node.extracted is None:
        return NodeLook(host, node.report.findings[0].message)
    extracted: Any = node.extracted
    bad = [one for one in node.report.findings if one.status in (Status.FAIL, Status.ERROR)]
    return NodeLook(
        host,
        snapshot=Snapshot.model_validate({**extracted[SNAPSHOT], "host": host}),
        picture=NodePicture.model_validate(extracted[LOOK]["picture"]),
        undetermined=extracted[LOOK]["undetermined"],
        busy=extracted[LOOK]["busy"],
        findings=tuple({"check": one.check, "component": one.component, "status": one.status.value} for one in bad)[
            :MOST_FINDINGS
        ],
        messages={(one.check, one.component): one.message for one in bad},
    )


def why_not_as_good(before: Snapshot, after: NodeLook, target: str | None) -> str:
    """Return why a node is not proven: not at its target, worse than before, or less is known of it than before."""
    if after.snapshot is None:
        return after.reason or "it did not answer"
    found = [
        f"driver {version or 'unknown'} is {what}, {target} was requested"
        for what, version in (("installed", after.release), ("loaded", after.loaded))
        if version != target
    ]
    # An exchanged GPU may be a good one, but nothing that was known of the one before holds for it.
    changes = [
        one
        for one in compare(before, after.snapshot).changes
        if one.effect == "worse" or one.what in (GPU_REPLACED, OTHER_MACHINE)
    ]
    found += _by_text(changes, after.messages)
    found += [
        f"{check} failed, and was not run before"
        for check, verdict in after.snapshot.verdicts.items()
        if check not in before.verdicts and verdict.status is Status.FAIL
    ]
    numbers = renumbered(before, after.snapshot)
    lost = {
        (one.metric, component)
        for one in before.figures
        if (component := numbers.get(one.component, one.component)) is not None
    } - {(one.metric, one.component) for one in after.snapshot.figures}
    found += [f"{metric} of {component} was measured before, and is not any more" for metric, component in sorted(lost)]
    unknown = sorted(set(after.snapshot.unknown) - set(before.unknown))
    found += [f"{name}: {after.snapshot.unknown[name]}" for name in unknown]
    return printable(one_line(listed(found, 4)))


def _by_text(changes: Iterable[Change], messages: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield the changes, each with its components; checks come first, with what they report."""
    components: dict[str, list[str]] = {}
    for one in sorted(changes, key=lambda one: (one.section != "check", one.component != "node")):
        message = messages.get((one.what, one.component)) if one.section == "check" else None
        components.setdefault(f"{one.what}: {message}" if message else one.text, []).append(one.component)
    for text, names in components.items():
        yield text if names == ["node"] else f"{fold(names)}: {text}"


@dataclass
class AnsibleNodes:
    """The interface of ``gpunode.change.run.Nodes``."""

    connections: Connections
    evaluator: Evaluator
    folder: Path
    """Of the run: logs, snapshots before the change."""
    owner: str
    way_back: bool
    """A node without a way back to its release is refused while it is prepared."""
    kept: str = ""
    """The run with the snapshots that nodes go back to; empty: they go forward, and this run keeps snapshots."""
    image: str = ""
    """What nodes are measured in that were not measured before."""
    scheduler: str = "none"
    """What is asked for a reboot before Ansible does it."""
    not_measured: set[str] = field(default_factory=set)
    """Nodes that were compared without figures, although figures were requested."""

    def _ask(self, nodes: Records, op: str) -> Results:
        questions: dict[str, dict[str, Any]] = {}
        for name, node in nodes.items():
            question = {"op": op, "token": node.token, "owner": self.owner, "lasts_s": leases.LASTS_S}
            questions[name] = question | ({"findings": read_before(self.folder, name).findings} if op == "mark" else {})
        return leases.ask(
            [self.connections.targets[name] for name in nodes],
            questions,
            parallel=self.connections.parallel,
            timeout_s=self.connections.timeout_s,
            become_password=self.connections.password,
        )

    def lease(self, nodes: Records) -> Results:
        """Take or renew leases."""
        return self._ask(nodes, "take")

    def mark(self, nodes: Records) -> Results:
        """Mark nodes as drained."""
        return self._ask(nodes, "mark")

    def free(self, nodes: Records) -> Results:
        """Remove marks and leases."""
        return self._ask(nodes, "free")

    def prepare(self, nodes: Records) -> Results:
        """Download the packages of the target."""
        return self._play("prepare.yml", nodes, {"gpunode_way_back": self.way_back and not self.kept})

    def busy(self, nodes: Records) -> Results:
        """Return what computes on GPUs."""
        looks = look_at(self.connections, self.evaluator, nodes)
        return {name: looks[name].reason or looks[name].busy for name in nodes}

    def measure(self, nodes: Records) -> Results:
        """Measure nodes that have their release still, and keep the figures of each as soon as it has some."""
        found: Results = {}
        if self.connections.measuring is None:
            return found

        def keep(look: NodeLook) -> None:
            if look.snapshot is None or look.release == look.loaded == nodes[look.host].before:
                found.update(write_measured(self.folder, look, self.image))
            # Else an earlier run changed it, and what it was before cannot be measured any more.

        names = [name for name in nodes if read_before(self.folder, name).measured is None]
        if names:
            look_at(self.connections, self.evaluator, names, image=self.image, each=keep)
        return found

    def change(self, nodes: Records) -> Results:
        """Run the site playbook without a reboot."""
        return self._play("site.yml", nodes, {"gpunode_reboot": "never"})

    def reboot(self, nodes: Records) -> Results:
        """Run the site playbook again: it reboots where that is due, and does what waited for it."""
        return self._play("site.yml", nodes, {"gpunode_reboot": "when_needed", "__gpunode_scheduler": self.scheduler})

    def validate(self, nodes: Records) -> Results:
        """Compare nodes with their snapshots before, and their figures in the image of before, if there are some."""
        befores = {name: read_before(self.folder, name) for name in nodes}
        found = self._compared(nodes, {name: before.snapshot for name, before in befores.items()})
        if self.connections.measuring is None:
            return found
        measured: dict[str, dict[str, Snapshot]] = {}
        for name in (name for name, reason in found.items() if not reason):
            before = befores[name]
            if before.measured is None:
                self.not_measured.add(name)
            else:
                measured.setdefault(before.image or self.image, {})[name] = before.measured
        for image, figures in sorted(measured.items()):
            found |= self._compared({name: nodes[name] for name in figures}, figures, image=image)
        return found

    def _compared(self, nodes: Records, befores: Mapping[str, Snapshot], *, image: str | None = None) -> Results:
        looks = look_at(self.connections, self.evaluator, nodes, image=image)
        return {name: why_not_as_good(befores[name], looks[name], node.aim) for name, node in nodes.items()}

    def _play(self, playbook: str, nodes: Records, more: Mapping[str, Any]) -> Results:
        """Run a playbook on nodes; return why it failed on each."""
        log = self.folder / f"{len(list(self.folder.glob('*.log'))) + 1:03}-{playbook.removesuffix('.yml')}.log"
        retry = self.folder / "retry"
        with suppress(FileNotFoundError):
            (retry / playbook.replace(".yml", ".retry")).unlink()
        env = ansible_environment()
        env |= {"ANSIBLE_RETRY_FILES_ENABLED": "1", "ANSIBLE_RETRY_FILES_SAVE_PATH": str(retry), "ANSIBLE_NOCOLOR": "1"}
        env["ANSIBLE_CALLBACKS_ENABLED"] = CALLBACKS
        argv = [
            *(ansible_program("ansible-playbook"), str(playbook_of(collection_root(), playbook))),
            *(word for source in self.connections.inventories for word in ("--inventory", source)),
            *self.connections.arguments,
            *("--limit", ",".join(nodes), "--extra-vars", json.dumps(variables_of(nodes, more, kept=bool(self.kept)))),
            *(("--become-password-file", "-") if self.connections.password is not None else ()),
        ]
        with log.open("wb") as stream:
            os.fchmod(stream.fileno(), 0o600)
            code = run(argv, env, self.connections.password, log=stream)
        if code < 0:
            raise KeyboardInterrupt
        text = log.read_text(encoding="utf-8", errors="replace")
        try:
            failed = set((retry / playbook.replace(".yml", ".retry")).read_text(encoding="utf-8").split())
        except OSError:
            failed = set() if code == 0 else set(nodes)
        why = reasons_in(text)
        return {name: f"{why.get(name, f'{playbook} failed')} ({log})" if name in failed else "" for name in nodes}


def variables_of(nodes: Records, more: Mapping[str, Any], *, kept: bool = False) -> dict[str, Any]:
    """Return the variables with the highest precedence: each node has its own release and token.

    ``kept``: all nodes go back to a release of which they keep the packages.
    """
    return {
        "gpunode_hosts": "all",
        "__gpunode_targets": {name: node.aim for name, node in nodes.items()},
        "__gpunode_tokens": {name: node.token for name, node in nodes.items()},
        "nvidia_driver_version": "{{ __gpunode_targets[inventory_hostname] }}",
        "__gpunode_backward": [name for name, node in nodes.items() if node.back or kept],
        "gpunode_kept": "{{ inventory_hostname in __gpunode_backward }}",
        "gpunode_change": "{{ __gpunode_tokens[inventory_hostname] }}",
        # The run drains and returns the nodes, in its waves.
        "gpunode_drain_tasks": None,
        "gpunode_undrain_tasks": None,
        "__gpunode_drained": True,
        "gpunode_serial": "100%",
        **more,
    }


def reasons_in(log: str) -> dict[str, str]:
    """Return why nodes failed, from the lines of the callback ``roles``."""
    found: dict[str, str] = {}
    for line in _FAILED.finditer(log):
        with suppress(UsageError):
            found.update(dict.fromkeys(expand(line["names"]), line["why"]))
    return found


def before_file(folder: Path, name: str) -> Path:
    """Return the file of a run that has a node's snapshot before the change."""
    return folder / f"before-{quote(name, safe='@+,=')}.json"


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


def write_before(folder: Path, looks: Mapping[str, NodeLook], write: Callable[[Path, str], None]) -> None:
    """Keep the snapshots before the change."""
    for name, look in looks.items():
        if look.snapshot is not None:
            body = {"snapshot": look.snapshot.model_dump(mode="json"), "findings": look.findings}
            write(before_file(folder, name), json.dumps(body))


@dataclass(frozen=True)
class NodeBefore:
    """A node before its change."""

    snapshot: Snapshot
    findings: Sequence[dict[str, str]]
    measured: Snapshot | None = None
    """The snapshot with figures; None: it was not measured."""
    image: str = ""
    """What it was measured in; empty: not recorded."""


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


__all__ = ["EXTRACTS", "AnsibleNodes", "Connections", "NodeLook", "look_at", "read_before", "write_before"]
