"""The run of a change: waves of nodes along the edges of ``journal``, each act recorded before it begins.

What is done on nodes and who hands out work are behind two interfaces; the run itself has no other effect. It may be
killed at any moment: the next one with the same journal continues. Each act may be repeated.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from gpunode.change.journal import ACTS, FINAL, IN_CHANGE, ChangeState, Journal, NodeRecord
from gpunode.change.scheduler import Availability, Scheduler, SchedulerError
from gpunode.text import listed

Records = Mapping[str, NodeRecord]
Results = dict[str, str]
"""Node to the reason why an act failed there; empty if it did not."""


class Nodes(Protocol):
    """What is done on nodes. Each method may be repeated, and returns a result for each node."""

    def lease(self, nodes: Records) -> Results:
        """Take or renew the lease of each node."""

    def mark(self, nodes: Records) -> Results:
        """Record on each node that it is about to be drained; refused without the lease."""

    def free(self, nodes: Records) -> Results:
        """Remove the mark and the lease."""

    def prepare(self, nodes: Records) -> Results:
        """Download to each node what the change needs; the node works meanwhile."""

    def busy(self, nodes: Records) -> Results:
        """Return what computes on the GPUs; unknown is busy."""

    def measure(self, nodes: Records) -> Results:
        """Measure nodes before their change; return why it was not possible, nothing for nodes that need none."""

    def change(self, nodes: Records) -> Results:
        """Install the release that each node is to get (``NodeRecord.aim``)."""

    def reboot(self, nodes: Records) -> Results:
        """Reboot nodes with a pending reboot, and finish what waits for it."""

    def validate(self, nodes: Records) -> Results:
        """Return why a node is not proven to be as good as before, at its target."""


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run."""

    drain_s: float = ACTS["drain"].limit_s
    validate_s: float = ACTS["validate"].limit_s
    poll_s: float = 30.0
    power_s: float = 1200.0
    """How long to wait for a node after a power cycle."""
    most_failed: int = 0
    """Nodes, or failure domains, that may fail before no further wave begins."""
    rollback: bool = True
    """A node that failed gets its earlier release."""


class ChangeRun:
    """One run of a change, from what its journal has to its end."""

    def __init__(  # noqa: PLR0913
        self,
        journal: Journal,
        nodes: Nodes,
        scheduler: Scheduler,
        limits: RunLimits,
        *,
        stops: Callable[[], str] = lambda: "",
        power_cycle: Callable[[str], str] | None = None,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._journal, self._nodes, self._scheduler, self._limits = journal, nodes, scheduler, limits
        self._stops, self._say, self._clock, self._sleep = stops, say, clock, sleep
        self._power_cycle = power_cycle
        self._foreign: set[str] = set()
        """Nodes that others drained, at the last look at them: nothing failed on these."""

    def run(self) -> str:
        """Run the waves that are left; return why it stopped before the last one, empty if it did not."""
        records = self._journal.record.nodes
        for name, node in records.items():
            if node.state is ChangeState.VALIDATED and not node.intent:
                # Time has passed since: it is proven again.
                self._journal.place(name, ChangeState.REBOOTED, node.reason)
        waves = sorted({node.wave for node in records.values()})
        for wave in waves:
            names = [name for name, node in records.items() if node.wave == wave]
            if self._open(names) and (why := self._stops()):
                return f"{why} before wave {wave + 1}"
            self._wave(names)
            bad = self._failed(wave)
            units = {records[name].domain or name for name in bad}
            if len(units) > self._limits.most_failed and wave != waves[-1]:
                later = [name for name, node in records.items() if node.wave > wave]
                return f"{len(bad)} failed ({listed(bad)}): nothing was changed on {listed(later)}"
        return ""

    def _open(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._journal.record.nodes[name].state not in FINAL]

    def _failed(self, wave: int) -> list[str]:
        """Return the nodes of the waves so far that did not return with their target."""
        nodes = self._journal.record.nodes
        return [name for name, node in nodes.items() if node.wave <= wave and node.state is not ChangeState.RETURNED]

    def _wave(self, names: list[str]) -> None:
        self._walk(names)
        lost = [name for name in names if self._journal.record.nodes[name].state is ChangeState.NOT_RETURNED]
        if lost and self._power_cycle is not None:
            self._walk(self._powered(lost, self._power_cycle))
        bad = [name for name in names if self._to_roll_back(name)]
        if bad and self._limits.rollback:
            self._say(f"rolling back {listed(bad)}")
            # A member that is lost gets the release of its domain once it is reached.
            lost = [
                name
                for name in self._members(bad)
                if self._journal.record.nodes[name].state is ChangeState.NOT_RETURNED
            ]
            self._journal.turn_back([*bad, *lost])
            self._walk(bad)

    def _to_roll_back(self, name: str) -> bool:
        """Return whether a node failed after a change began, and can get its release before, with its domain."""
        nodes = self._journal.record.nodes
        node = nodes[name]
        if node.state is not ChangeState.HELD or node.before is None or node.back or not node.began("change"):
            return False
        if name in self._foreign:
            return False
        # A member that had no driver before cannot go back: its domain is held, and goes on together.
        return not any(
            nodes[other].state in FINAL or (nodes[other].before is None and nodes[other].began("change"))
            for other in self._members([name])
        )

    def _members(self, names: Iterable[str]) -> list[str]:
        """Return the other nodes of the failure domains of nodes."""
        nodes = self._journal.record.nodes
        some = set(names)
        domains = {nodes[name].domain for name in some} - {""}
        return [name for name, node in nodes.items() if node.domain in domains and name not in some]

    def _stop_members(self, results: Results) -> None:
        """Stop the other nodes of a failure domain in which a node failed: they change together, or not at all."""
        nodes = self._journal.record.nodes
        failed = {nodes[name].domain: name for name, reason in results.items() if reason}
        for name in self._members(name for name, reason in results.items() if reason):
            node = nodes[name]
            why = f"{node.domain}: {failed[node.domain]} failed"
            if node.state is ChangeState.PREPARED and not node.intent:
                self._let_go({name: why}, "drain")
            elif node.state in (ChangeState.PREPARED, ChangeState.DRAINED) and not node.began("change"):
                self._cancel({name: why})
            elif node.state in IN_CHANGE and not node.back and node.intent != "return":
                # One on its way back goes on, and so does one that is proven and may be in service already.
                self._journal.settle({name: why}, "change")

    def _powered(self, names: list[str], power_cycle: Callable[[str], str]) -> list[str]:
        """Power-cycle nodes that did not come back; return those that answer within the limit."""
        waiting = []
        for name in names:
            self._say(f"power cycle: {name}")
            reason = power_cycle(name)
            if reason:
                self._journal.remark({name: f"{self._journal.record.nodes[name].reason}; power cycle: {reason}"})
            else:
                waiting.append(name)
        end = self._clock() + self._limits.power_s
        returned: list[str] = []
        while waiting:
            results = self._nodes.lease(self._records(waiting))
            returned += [name for name in waiting if not results[name]]
            waiting = [name for name in waiting if results[name]]
            if self._clock() >= end:
                break
            if waiting:
                self._sleep(self._limits.poll_s)
        return returned

    def _walk(self, names: list[str]) -> None:
        """Lead nodes along the edges, each as far as it comes."""
        acts: dict[str, Callable[[list[str]], None]] = {
            "again": lambda some: self._begin_again(some, "again"),
            "reach": lambda some: self._begin_again(some, "reach"),
            "prepare": self._prepare,
            "drain": self._drain,
            "change": lambda some: self._act(some, "change", self._nodes.change),
            "reboot": lambda some: self._act(some, "reboot", self._nodes.reboot),
            "validate": lambda some: self._act(some, "validate", self._proven),
            "return": self._return,
        }
        for act, work in acts.items():
            some = [name for name in names if self._journal.record.nodes[name].state is ACTS[act].start]
            if some:
                self._say(f"{act}: {listed(some)}")
                work(some)

    def _records(self, names: Iterable[str]) -> dict[str, NodeRecord]:
        return {name: self._journal.record.nodes[name] for name in names}

    def _prepare(self, names: list[str]) -> None:
        waiting = self._waiting(names)
        if waiting:
            self._journal.remark(waiting)
            names = [name for name in names if name not in waiting]
        if not names:
            return
        self._journal.intend(names, "prepare")
        results = self._nodes.lease(self._records(names))
        leased = [name for name, reason in results.items() if not reason]
        results |= self._nodes.prepare(self._records(leased)) if leased else {}
        self._let_go({name: reason for name, reason in results.items() if reason}, "prepare")
        self._journal.settle({name: "" for name, reason in results.items() if not reason}, "prepare")
        self._stop_members(results)

    def _waiting(self, names: Iterable[str], *behind: ChangeState) -> Results:
        """Return the nodes that must not begin, because another of their failure domain cannot, with the reason.

        ``behind``: states in which another has not come as far.
        """
        nodes = self._journal.record.nodes
        reasons: Results = {}
        for name in names:
            for other in self._members([name]):
                if nodes[other].state in (ChangeState.HELD, ChangeState.NOT_RETURNED, *behind) or nodes[other].back:
                    reasons[name] = f"{nodes[name].domain}: {other} is {nodes[other].state}"
        return reasons

    def _drain(self, names: list[str]) -> None:
        """Drain nodes and wait until they are idle; one that is not in time goes back to work as it was."""
        self._journal.intend(names, "drain")
        results = self._nodes.mark(self._records(names))
        for name in [name for name, reason in results.items() if not reason]:
            results[name] = self._drained(name)
        waiting = [name for name, reason in results.items() if not reason]
        results |= self._idle(waiting)
        self._journal.settle({name: "" for name, reason in results.items() if not reason}, "drain")
        self._cancel({name: reason for name, reason in results.items() if reason})
        self._stop_members(results)

    def _drained(self, name: str) -> str:
        """Drain a node; return why it was not possible."""
        try:
            self._scheduler.drain(name, self._journal.record.nodes[name].token)
        except SchedulerError as err:
            return str(err)
        return ""

    def _cancel(self, results: Results) -> None:
        """End drains before anything was changed."""
        for name, reason in results.items():
            record = self._journal.record.nodes[name]
            try:
                self._scheduler.resume(name, record.token)
            except SchedulerError as err:
                self._journal.settle(
                    {name: f"{reason}; the drain could not be ended: {err}"}, "drain", ChangeState.HELD
                )
                continue
            self._let_go({name: reason}, "drain")

    def _let_go(self, results: Results, act: str) -> None:
        """Remove mark and lease of nodes that stay as they are, with the reason why an act failed there.

        An act that failed may have reached the node all the same.
        """
        freed = self._nodes.free(self._records(results)) if results else {}
        self._journal.settle({name: reason for name, reason in results.items() if not freed[name]}, act)
        # Where that failed, the act counts as begun: the node keeps its owner.
        self._journal.remark({name: f"{reason}; {freed[name]}" for name, reason in results.items() if freed[name]})

    def _idle(self, names: list[str]) -> Results:
        """Wait until nodes are idle, for the scheduler and on their GPUs; return what still runs at the deadline."""
        end = self._clock() + self._limits.drain_s
        waiting = list(names)
        reasons: Results = {}
        while waiting:
            reasons |= self._nodes.busy(self._records(waiting))
            for name in waiting:
                reasons[name] = reasons[name] or self._busy(name)
            waiting = [name for name in waiting if reasons[name]]
            if not waiting or self._clock() >= end:
                break
            self._sleep(self._limits.poll_s)
        return {name: f"not idle: {reasons[name]}" if reasons[name] else "" for name in names}

    def _busy(self, name: str) -> str:
        try:
            return self._scheduler.busy(name, self._journal.record.nodes[name].token)
        except SchedulerError as err:
            return str(err)

    def _kept(self, names: list[str]) -> Results:
        """Return why nodes must not be touched now: a lease of others, a drain of others, work that runs."""
        self._foreign.difference_update(names)
        results = self._nodes.lease(self._records(names))
        for name in [name for name, reason in results.items() if not reason]:
            try:
                state = self._scheduler.state(name, self._journal.record.nodes[name].token)
            except SchedulerError as err:
                results[name] = str(err)
                continue
            if state.service in (Availability.IN_SERVICE, Availability.OURS):
                # Somebody ended the drain, or the scheduler lost a part of it.
                results[name] = self._drained(name)
            else:
                results[name] = state.text
                if state.service is Availability.FOREIGN:
                    self._foreign.add(name)
        return results | self._idle([name for name, reason in results.items() if not reason])

    def _begin_again(self, names: list[str], act: str) -> None:
        # A failure domain of which a node went back goes back.
        nodes = self._journal.record.nodes
        gone = {node.domain for node in nodes.values() if node.back} - {""}
        behind = [name for name in names if nodes[name].domain in gone and nodes[name].before and not nodes[name].back]
        if behind:
            self._journal.turn_back(behind)
        self._journal.intend(names, act)
        results = self._kept(names)
        self._journal.settle(results, act)
        self._stop_members(results)

    def _act(self, names: list[str], act: str, work: Callable[[Records], Results]) -> None:
        """Do an act on drained nodes, after a look at each of them."""
        fresh = [name for name in names if act == "change" and not self._journal.record.nodes[name].began(act)]
        # One that was lost when its failure domain was stopped is still drained.
        waiting = self._waiting(fresh, ChangeState.PLANNED, ChangeState.PREPARED)
        self._cancel(waiting)
        names, fresh = ([name for name in some if name not in waiting] for some in (names, fresh))
        kept = self._kept(names)
        ready = [name for name in fresh if not kept[name]]
        measured = self._nodes.measure(self._records(ready)) if ready else {}
        failed = {name: reason for name, reason in measured.items() if reason}
        # A measurement takes minutes, in which somebody may end the drain.
        again = [name for name in measured if name not in failed]
        kept |= self._kept(again) if again else {}
        untouched = {name: kept[name] for name in fresh if kept[name].startswith("not idle")} | failed
        refused = {name: reason for name, reason in kept.items() if reason} | failed
        self._cancel(untouched)
        self._fail({name: reason for name, reason in refused.items() if name not in untouched}, act)
        self._stop_members(refused)
        records = self._journal.record.nodes
        names = [name for name in names if name not in refused and records[name].state is ACTS[act].start]
        if names:
            self._journal.intend(names, act)
            results = work(self._records(names))
            self._journal.settle({name: "" for name, reason in results.items() if not reason}, act)
            self._fail({name: reason for name, reason in results.items() if reason}, act)
            self._stop_members(results)

    def _fail(self, results: Results, act: str) -> None:
        """Record failures; a node that answers is held, also if it failed around its reboot."""
        answers = self._nodes.lease(self._records(results)) if results and act == "reboot" else {}
        held = {name: reason for name, reason in results.items() if not answers.get(name, "?")}
        self._journal.settle(held, act, ChangeState.HELD)
        self._journal.settle({name: reason for name, reason in results.items() if name not in held}, act)

    def _proven(self, nodes: Records) -> Results:
        """Compare nodes with themselves before, until they are as good or the time is over: services still start."""
        end = self._clock() + self._limits.validate_s
        reasons: Results = {}
        waiting = dict(nodes)
        while waiting:
            reasons |= self._nodes.validate(waiting)
            waiting = {name: node for name, node in waiting.items() if reasons[name]}
            if not waiting or self._clock() >= end:
                break
            self._sleep(self._limits.poll_s)
        return reasons

    def _return(self, names: list[str]) -> None:
        """End the drains with the run's token; a drain that others put in its place stays, and is theirs."""
        self._journal.intend(names, "return")
        results = self._nodes.lease(self._records(names))
        remarks: Results = {}
        for name in [name for name, reason in results.items() if not reason]:
            token = self._journal.record.nodes[name].token
            try:
                self._scheduler.resume(name, token)
                state = self._scheduler.state(name, token)
            except SchedulerError as err:
                results[name] = str(err)
                continue
            if state.service is Availability.FOREIGN:
                remarks[name] = f"proven; it stays {state.text}"
            elif state.service is not Availability.IN_SERVICE:
                results[name] = f"the drain did not end: {state.text}"
        ended = [name for name, reason in results.items() if not reason]
        freed = self._nodes.free(self._records(ended)) if ended else {}
        self._journal.remark({name: reason for name, reason in freed.items() if reason})
        self._journal.settle({name: reason for name, reason in results.items() if not freed.get(name)}, "return")
        for name, remark in remarks.items():
            if not freed.get(name, "?"):
                self._journal.place(name, self._journal.record.nodes[name].state, remark)
