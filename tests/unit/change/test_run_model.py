"""The run of a change over a simulated fleet: kills, unreachable nodes, foreign drains, jobs, bad drivers, lost GPUs.

Whatever happens, in whatever order: no node that was touched returns without proof, no drain of others is ended, and
what is drained has an owner that the journal on the disk names.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from effort import effort
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from slurm_double import FATES, Slurmctld, SlurmNode

from gpunode.change.adapters import SlurmScheduler
from gpunode.change.journal import FINAL, ChangeState, Journal, NodeRecord, RunRecord
from gpunode.change.run import ChangeRun, Records, Results, RunLimits
from gpunode.change.scheduler import SchedulerError
from gpunode.fleet.process import Completed

NAMES = ("n1", "n2", "n3", "n4")
OLD, NEW = "580", "595"


class Killed(BaseException):
    """The controller was killed."""


@dataclass
class Machine(SlurmNode):
    """One node as it is; ``drain``: its reason in Slurm, empty if it gets work."""

    installed: str = OLD
    loaded: str = OLD
    reachable: bool = True
    jobs: int = 0
    faulty: bool = False
    lease: str = ""
    mark: str = ""
    touched: bool = False
    proved: bool = False

    def booted(self) -> None:
        super().booted()
        self.loaded, self.jobs, self.reachable = self.installed, 0, True

    def step(self, fate: str, **named: Any) -> None:
        before, drain = self.reboot, self.drain
        super().step(fate, idle=not self.jobs, **named)
        if self.reboot == "ISSUED" != before:
            self.proved = self.reachable = False
        assert self.drain or not drain or self.proved or not self.touched, "Slurm returned it without proof"


@dataclass
class World:
    """The fleet, its scheduler, and the disk of the controller."""

    machines: dict[str, Machine] = field(default_factory=lambda: {name: Machine() for name in NAMES})
    bad: bool = False
    """The target's driver does not work."""
    repository: bool = True
    scheduler: bool = True
    slurm: Any = None
    disk: RunRecord | None = None
    ticks: int = 0
    kill_at: int | None = None
    coming: dict[int, Callable[[], None]] = field(default_factory=dict)
    """Events in the middle of a run, by the tick at which they happen."""
    clock: float = 0.0

    def tick(self) -> None:
        """Before and after each effect."""
        self.ticks += 1
        for machine in self.machines.values():
            machine.step(self.slurm.fate, returns=self.slurm.returns)
        happens = self.coming.pop(self.ticks, None)
        if happens is not None:
            happens()
        if self.kill_at is not None and self.ticks >= self.kill_at:
            raise Killed

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.tick()


class DiskJournal(Journal):
    """A journal on the disk of the world."""

    def __init__(self, world: World) -> None:
        assert world.disk is not None
        super().__init__(Path("/nowhere"), world.disk)
        self.world = world

    def write(self) -> None:
        self.world.tick()
        self.world.disk = self.record
        self.world.tick()


class Fleet:
    """What is done on nodes."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _each(self, nodes: Records, work: Callable[[Machine, NodeRecord], str]) -> Results:
        results = {}
        for name, node in nodes.items():
            self.world.tick()
            machine = self.world.machines[name]
            results[name] = work(machine, node) if machine.reachable else "unreachable"
            self.world.tick()
        return results

    def lease(self, nodes: Records) -> Results:
        def take(machine: Machine, node: NodeRecord) -> str:
            if machine.lease not in ("", node.token) or machine.mark not in ("", node.token):
                return "held by others"
            machine.lease = node.token
            return ""

        return self._each(nodes, take)

    def mark(self, nodes: Records) -> Results:
        def mark(machine: Machine, node: NodeRecord) -> str:
            if machine.lease != node.token:
                return "the lease is gone"
            machine.mark = node.token
            return ""

        return self._each(nodes, mark)

    def free(self, nodes: Records) -> Results:
        def free(machine: Machine, node: NodeRecord) -> str:
            assert not machine.drain.startswith(node.token), "the owner of a drain was removed"
            machine.lease = machine.mark = ""
            return ""

        return self._each(nodes, free)

    def prepare(self, nodes: Records) -> Results:
        return self._each(nodes, lambda _, __: "" if self.world.repository else "the repository does not answer")

    def busy(self, nodes: Records) -> Results:
        return {
            name: reason or (f"{self.world.machines[name].jobs} jobs" if self.world.machines[name].jobs else "")
            for name, reason in self._each(nodes, lambda _, __: "").items()
        }

    def measure(self, nodes: Records) -> Results:
        return self._each(nodes, lambda _, __: "")

    def change(self, nodes: Records) -> Results:
        def change(machine: Machine, node: NodeRecord) -> str:
            machine.touched, machine.proved = True, False
            self.world.tick()
            # A transaction looks again at who uses the GPUs, and leaves them alone.
            if machine.jobs:
                return "busy"
            expected = node.before if node.back else node.target
            assert expected is not None
            machine.installed = expected
            return ""

        return self._each(nodes, change)

    def reboot(self, nodes: Records) -> Results:
        """As site.yml with the action scheduled_reboot."""

        def reboot(machine: Machine, node: NodeRecord) -> str:
            if machine.jobs:
                return "busy"
            if machine.loaded == machine.installed:
                return ""
            machine.proved = False
            name = next(name for name, candidate in self.world.machines.items() if candidate is machine)
            slurm, boots = SlurmScheduler(self.world.slurm.scontrol), machine.boots
            try:
                left = slurm.reboot(name, node.token)
            except SchedulerError as err:
                return str(err)
            if left:
                machine.booted()
                self.world.tick()
                return ""
            for _ in range(20):
                self.world.sleep(60)
                if machine.boots != boots:
                    return ""
                with suppress(SchedulerError):
                    if machine.reachable and not slurm.rebooting(name, node.token):
                        return "withdrawn"
            with suppress(SchedulerError):
                slurm.cancel_reboot(name, node.token)
            return "the boot id did not change"

        return self._each(nodes, reboot)

    def validate(self, nodes: Records) -> Results:
        def validate(machine: Machine, node: NodeRecord) -> str:
            good = machine.installed == machine.loaded == (node.before if node.back else node.target)
            good = good and not machine.faulty and not (self.world.bad and machine.loaded == NEW)
            machine.proved = good
            return "" if good else "worse than before"

        return self._each(nodes, validate)


class Sim(Slurmctld):
    """Slurm, which nobody deceives: it knows what was proven."""

    def __init__(self, world: World) -> None:
        super().__init__(world.machines)
        self.world = world

    def busy(self, name: str) -> bool:
        return self.world.machines[name].jobs > 0

    def resumed(self, name: str) -> None:
        machine = self.world.machines[name]
        assert machine.proved or not machine.touched, f"{name} returns without proof"
        machine.touched = False

    def scontrol(self, argv: Sequence[str], stdin: str | None = None) -> Completed:
        self.world.tick()
        if not self.world.scheduler:
            return Completed(1, "", "slurm_load_node error: Unable to contact slurm controller")
        answer = super().scontrol(argv, stdin)
        self.world.tick()
        return answer


class FleetThroughChange(RuleBasedStateMachine):
    """Runs of one command, each perhaps killed, with what else happens before, between and in the middle of them."""

    sequences = runs = killed = 0

    @initialize(
        waves=st.lists(st.integers(0, 2), min_size=len(NAMES), max_size=len(NAMES)),
        rack=st.sampled_from([0, 2, 3]),
        program=st.sampled_from(["/sbin/reboot", "(null)"]),
        returns=st.sampled_from(["1", "2"]),
        bare=st.sampled_from(["", "", "", *NAMES]),
    )
    def begin(self, waves: list[int], rack: int, program: str, returns: str, bare: str = "") -> None:
        """``rack``: that many of the first nodes are one failure domain. ``bare``: a node without a driver before."""
        type(self).sequences += 1
        self.world = World()
        self.world.slurm = Sim(self.world)
        self.world.slurm.program, self.world.slurm.returns = program, returns
        waves = [waves[0] if at < rack else wave for at, wave in enumerate(waves)]
        nodes = {
            name: NodeRecord(
                token=f"gpunode-upgrade-{name}",
                wave=wave,
                domain="rack-1" if at < rack else "",
                before=None if name == bare else OLD,
                target=NEW,
            )
            for at, (name, wave) in enumerate(zip(NAMES, waves, strict=True))
        }
        self.world.disk = RunRecord(run="1", command=(), owner="me", started_at="", nodes=nodes)

    def run(self, budget: int, rollback: bool) -> str | None:
        world = self.world
        change = ChangeRun(
            DiskJournal(world), Fleet(world), SlurmScheduler(world.slurm.scontrol),
            RunLimits(300, 60, 30, most_failed=budget, rollback=rollback),
            clock=lambda: world.clock, sleep=world.sleep,
        )  # fmt: skip
        type(self).runs += 1
        try:
            return change.run()
        except Killed:
            type(self).killed += 1
            return None
        finally:
            world.kill_at = None
            world.coming = {}

    def event(self, kind: str, machine: Machine) -> None:
        """Something that others do, or that happens."""
        foreign = bool(machine.drain) and not machine.drain.startswith("gpunode-")
        if kind == "admin drains":
            machine.drain = "RMA ticket 4711"
        elif kind == "admin resumes":
            # Whoever ends a drain answers for it.
            machine.drain, machine.touched = "", False
        elif kind == "admin ends own" and foreign:
            machine.drain = ""
            machine.touched = False
        elif kind == "admin cancels" and machine.reboot == "REQUESTED":
            machine.reboot = ""
        elif kind == "job starts" and not machine.drain:
            machine.jobs += 1
        elif kind == "jobs end":
            machine.jobs = 0
        elif kind == "job in spite":
            machine.jobs += 1
        elif kind == "lost":
            machine.reachable = False
        elif kind == "found":
            machine.reachable = True
        elif kind == "fault":
            machine.faulty = True
        elif kind == "repair":
            machine.faulty = False

    KINDS = (
        "admin drains", "admin resumes", "admin ends own", "admin cancels", "job starts", "jobs end", "job in spite",
        "lost", "found", "fault", "repair",
    )  # fmt: skip

    @rule(kind=st.sampled_from(KINDS), name=st.sampled_from(NAMES))
    def happens(self, kind: str, name: str) -> None:
        self.event(kind, self.world.machines[name])

    @rule(which=st.sampled_from(["bad", "repository", "scheduler"]))
    def turns(self, which: str) -> None:
        setattr(self.world, which, not getattr(self.world, which))

    @rule(fate=st.sampled_from(FATES))
    def slurm_reboots(self, fate: str) -> None:
        self.world.slurm.fate = fate

    @rule(
        kill=st.none() | st.integers(1, 250),
        budget=st.integers(0, 4),
        rollback=st.booleans(),
        events=st.lists(st.tuples(st.integers(1, 200), st.sampled_from(KINDS), st.sampled_from(NAMES)), max_size=4),
    )
    def same_command(self, kill: int | None, budget: int, rollback: bool, events: list[tuple[int, str, str]]) -> None:
        world = self.world
        foreign = {name: machine.drain for name, machine in world.machines.items() if machine.drain.startswith("RMA")}
        by_people = {name for _, kind, name in events if kind.startswith("admin")}
        world.coming = {
            world.ticks + at: lambda kind=kind, name=name: self.event(kind, world.machines[name])  # type: ignore[misc]
            for at, kind, name in events
        }
        world.kill_at = None if kill is None else world.ticks + kill
        before = {name: (machine.installed, machine.loaded) for name, machine in world.machines.items()}
        assert world.disk is not None
        waves = {name: node.wave for name, node in world.disk.nodes.items()}
        states = {name: node.state for name, node in world.disk.nodes.items()}
        stopped = self.run(budget, rollback)
        for name, reason in foreign.items():
            assert world.machines[name].drain.startswith(reason) or name in by_people, "a foreign drain was ended"
        racks = [name for name in NAMES if world.disk.nodes[name].domain]
        if any(world.disk.nodes[name].state is ChangeState.RETURNED for name in racks):
            assert all(world.machines[name].installed == NEW for name in racks), "a failure domain has two releases"
        if stopped and budget == 0:
            first_bad = min(waves[name] for name in NAMES if world.disk.nodes[name].state is not ChangeState.RETURNED)
            later = [name for name in NAMES if waves[name] > first_bad and states[name] is ChangeState.PLANNED]
            assert all((world.machines[n].installed, world.machines[n].loaded) == before[n] for n in later)

    @invariant()
    def what_is_drained_has_an_owner(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.disk is not None
        for name, machine in self.world.machines.items():
            node = self.world.disk.nodes[name]
            if machine.drain.startswith("gpunode-"):
                assert node.open, f"{name} is drained and nobody owns it"
                assert machine.lease == machine.mark == node.token
            if machine.lease or machine.mark:
                assert node.open or node.state is ChangeState.PREPARED

    def teardown(self) -> None:
        """When all is well again, the same command ends with every node in service, none with a lease."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.bad, world.repository, world.scheduler, world.slurm.fate = False, True, True, "boots"
        for machine in world.machines.values():
            machine.reachable, machine.jobs, machine.faulty = True, 0, False
            if machine.drain.startswith("RMA"):
                machine.drain, machine.touched = "", False
        for _ in range(2):
            self.run(len(NAMES), rollback=True)
        assert world.disk is not None
        back = {node.domain for node in world.disk.nodes.values() if node.state is ChangeState.ROLLED_BACK} - {""}
        # A node that was not begun stays as it is beside one of its failure domain that went back.
        left: dict[str, Any] = {
            name: node
            for name, node in world.disk.nodes.items()
            if node.state not in FINAL and not (node.state is ChangeState.PLANNED and node.domain in back)
        }
        assert not left
        racks = {world.machines[name].loaded for name, node in world.disk.nodes.items() if node.domain}
        assert len(racks) <= 1, "a failure domain is left with two releases"
        assert not [n for n, machine in world.machines.items() if machine.drain or machine.lease or machine.mark]
        for name, node in world.disk.nodes.items():
            expected = NEW if node.state is ChangeState.RETURNED else OLD
            assert world.machines[name].loaded == expected


FleetThroughChange.TestCase.settings = settings(
    max_examples=effort(25, 1500), stateful_step_count=12, deadline=None, print_blob=True
)


class TestFleetThroughChange(FleetThroughChange.TestCase):  # type: ignore[misc,valid-type]
    @classmethod
    def tearDownClass(cls) -> None:
        """Print how much was tried (``pytest -s``)."""
        tried = FleetThroughChange
        print(f"\n{tried.sequences} sequences of events, {tried.runs} runs in them, {tried.killed} of these killed")


def test_a_member_that_is_found_again_does_not_change_without_its_failure_domain() -> None:
    """It was lost when the others stopped, so it is still drained; a sequence of events that the model found."""
    fleet = FleetThroughChange()
    fleet.begin(waves=[0, 0, 0, 0], rack=3, program="/sbin/reboot", returns="1")
    events = [(18, "job in spite", "n4"), (116, "admin drains", "n1"), (121, "lost", "n2")]
    fleet.same_command(kill=None, budget=0, rollback=False, events=events)
    assert fleet.world.disk is not None
    assert fleet.world.disk.nodes["n2"].state is ChangeState.DRAINED
    fleet.same_command(kill=None, budget=0, rollback=False, events=[(51, "found", "n2")])
    assert [machine.installed for machine in fleet.world.machines.values()] == [OLD] * 4
    fleet.teardown()


def test_a_failure_domain_with_a_member_that_cannot_go_back_is_held_and_goes_on_together() -> None:
    fleet = FleetThroughChange()
    fleet.begin(waves=[0, 0, 0, 0], rack=3, program="/sbin/reboot", returns="1", bare="n2")
    fleet.turns("bad")
    for state in (ChangeState.HELD, ChangeState.RETURNED):
        fleet.same_command(kill=None, budget=0, rollback=True, events=[])
        assert fleet.world.disk is not None
        assert {fleet.world.disk.nodes[name].state for name in NAMES[:3]} == {state}
        assert {fleet.world.machines[name].installed for name in NAMES[:3]} == {NEW}
        fleet.turns("bad")
    fleet.teardown()
