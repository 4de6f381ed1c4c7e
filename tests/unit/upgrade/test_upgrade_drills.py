"""Drills of ``gpunode upgrade``: what is killed or broken, and where each node is at the end.

Each drill is a run of the verb over simulated nodes, with one thing going wrong. After each of them the same holds: no
node is lost (each is in service, or somebody owns it), none returned that is worse than before, no foreign drain was
ended. The table of all drills is printed at the end (``pytest -s``). What needs real packages, Slurm and reboots is
drilled in the lab: tests/lab/test_upgrade.py.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from node_samples import context, node
from slurm_double import Slurmctld, SlurmNode
from upgrade_world import NEW, OLD, TICKET, World, latest, simulate, states, upgraded

from gpunode.change import journal as journals
from gpunode.change.adapters import CommandScheduler, SlurmScheduler
from gpunode.change.journal import Journal
from gpunode.change.scheduler import SchedulerError, ServiceState, run_program
from gpunode.fleet.process import Completed
from gpunode.onnode import lease as node_program
from gpunode.provisioning import service
from gpunode.provisioning.state import BOOT_ID
from gpunode.upgrade import command

Out = pytest.CaptureFixture[str]
HEADS = ("drill", "broken", "nodes at the end", "validated")


@dataclass
class Drill:
    """One drill, as the table shows it."""

    world: World
    folder: Path
    name: str = ""
    broken: str = ""
    extra: list[str] = field(default_factory=list)

    @property
    def ends(self) -> dict[str, str]:
        return states(self.folder)


ROWS: list[tuple[str, str, str, str]] = []
TOTALS: Counter[str] = Counter()
"""Of the drills that end with the fixture's look at all nodes, those that fail too."""


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    ROWS.clear()
    TOTALS.clear()
    yield
    widths = [max(len(row[at]) for row in [HEADS, *ROWS]) for at in range(len(HEADS))]
    print()
    for row in [HEADS, *ROWS]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    totals = ", ".join(
        f"{TOTALS[label]} {label}" for label in ("nodes lost", "unproven returns", "foreign drains ended")
    )
    print(f"{len(ROWS)} drills: {totals}")


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Drill]:
    """A drill; what holds after each of them is tested at its end."""
    count = getattr(request, "param", 5)
    current = Drill(simulate(tmp_path, monkeypatch, count), tmp_path)
    yield current
    world = current.world
    lost = [name for name in world.nodes if not cared_for(current, name)]
    TOTALS["nodes lost"] += len(lost)
    TOTALS["unproven returns"] += len(world.unproven)
    TOTALS["foreign drains ended"] += len(world.foreign_ended)
    assert world.unproven == []
    assert world.foreign_ended == []
    assert lost == []
    counts = Counter(current.ends.values())
    ends = ", ".join([*(f"{number} {state}" for state, number in counts.items()), *current.extra])
    proved = counts["returned"] + counts["rolled-back"]
    ROWS.append((current.name, current.broken, ends, f"{proved} of {proved}" if proved else "none returned"))


def cared_for(drill: Drill, name: str) -> bool:
    """Whether a node is in service without a trace of a run, or drained with an owner that the journal names."""
    drained = drill.world.folder / f"drained-{name}"
    marks = sorted(path.name for path in (drill.world.folder / name).glob("*.json"))
    record = latest(drill.folder).record.nodes.get(name)
    if not drained.exists():
        return not marks or (record is not None and record.open) or name in drill.world.lost
    foreign = not drained.read_text().startswith("gpunode-upgrade-")
    return foreign or (record is not None and record.open and record.token == drained.read_text())


def once(drill: Drill, playbook: str, act: Callable[[Sequence[str]], None], *, name: str = "gpu-1") -> None:
    """Let something happen once, before a playbook runs on a node."""
    left = [act]

    def during(running: str, names: Sequence[str]) -> None:
        if running == playbook and name in names and left:
            left.pop()(names)

    drill.world.during = during


def nothing(playbook: str, names: Sequence[str]) -> None:
    """Nothing goes wrong any more."""


class KilledError(BaseException):
    """The controller was killed by SIGKILL: no handler of it ran."""


def test_the_controller_is_killed_before_and_after_each_write_of_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run is killed later than the one before, until one ends by itself; the same command then ends well."""
    write = Journal.write
    killed = 0
    while True:
        folder = tmp_path / str(killed)
        folder.mkdir()
        drill = Drill(simulate(folder, monkeypatch, 2), folder)
        left = [killed]

        def counted(journal: Journal, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KilledError
            write(journal)
            left[0] -= 1
            if left[0] == 0:
                raise KilledError

        monkeypatch.setattr(Journal, "write", counted)
        try:
            upgraded("--waves", "1")
        except KilledError:
            pass
        else:
            if killed:
                break
        monkeypatch.setattr(Journal, "write", write)
        assert upgraded("--waves", "1") == 0, killed
        assert {state["loaded"] for state in drill.world.nodes.values()} == {NEW}
        assert not list(drill.world.folder.glob("drained-*")) + list(drill.world.folder.glob("*/*.json"))
        assert drill.world.unproven == []
        killed += 1
        capsys.readouterr()
    assert killed > 20
    ROWS.append((
        "controller killed", f"before and after each of {killed // 2} writes of the journal", "2 returned each time",
        "2 of 2 each time",
    ))  # fmt: skip


@pytest.mark.parametrize("act", ["take", "mark", "free"])
def test_the_program_on_the_node_is_killed_at_each_step(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves is the state before or after its act; asked again, it does the act."""
    question: dict[str, Any] = {"op": act, "token": "one", "owner": "me", "lasts_s": 100, "findings": []}
    steps = [(Path, "replace"), (Path, "unlink"), (os, "fsync"), (os, "fdopen")]
    killed = 0
    for at in range(1, 30):
        folder = tmp_path / str(at)
        folder.mkdir()
        for earlier in ("take", "mark")[: ("take", "mark", "free").index(act)]:
            assert node_program.answer({**question, "op": earlier}, folder, 0) == {"refused": ""}
        left = [at]
        with monkeypatch.context() as patch:
            for target, name in steps:
                real = getattr(target, name)

                def step(*words: Any, real: Any = real, left: list[int] = left, **named: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        raise KilledError
                    return real(*words, **named)

                patch.setattr(target, name, step)
            try:
                node_program.answer(question, folder, 1)
            except KilledError:
                killed += 1
        other = {**question, "token": "two", "op": "take"}
        held = node_program.answer(other, folder, 2)["refused"]
        assert act == "free" or held or not (folder / node_program.MARK).exists()
        node_program.answer({**other, "op": "free"}, folder, 2)
        assert node_program.answer(question, folder, 3) == {"refused": ""}
        marked = (folder / node_program.MARK).exists()
        assert marked == (act == "mark")
        if left[0] > 0:
            break
    assert killed > 1
    ROWS.append(("node's program killed", f"{act}: at each of {killed} steps", "owner as before or after", "-"))


def test_a_connection_that_breaks_in_each_act(drill: Drill) -> None:
    drill.name, drill.broken = "node's agent killed", "Ansible loses the node in each playbook, once each"
    for before in range(3):
        # prepare.yml, site.yml without a reboot, site.yml with it; a held node is not prepared again.
        line = "gpunode: failed on gpu-1: Connection closed\n"
        drill.world.logs = [*[""] * (before if before < 2 else 1), line]
        assert upgraded("--no-rollback") == 1
        assert "Connection closed" in latest(drill.folder).record.nodes["gpu-1"].reason
    drill.world.logs = []
    assert upgraded() == 0
    assert set(drill.ends.values()) == {"returned"}


def test_power_fails_in_the_transaction_of_packages(drill: Drill) -> None:
    drill.name, drill.broken = "power loss in the transaction", "half of the packages are installed, the node is down"

    def fails(names: Sequence[str]) -> None:
        drill.world.lost = set(names)
        drill.world.logs = ["gpunode: failed on gpu-1: Change the driver's packages: unreachable\n"]

    once(drill, "site.yml", fails)
    assert upgraded() == 1
    assert drill.ends == {"gpu-1": "held", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    # With power, the same command continues with the way back that was begun.
    drill.world.lost = set()
    assert upgraded() == 1
    assert drill.ends["gpu-1"] == "rolled-back"


def test_an_administrator_drains_in_the_middle(drill: Drill) -> None:
    drill.name, drill.broken = "administrator drains in the middle", f"Reason={TICKET} in place of the run's own"

    def drain(_names: Sequence[str]) -> None:
        (drill.world.folder / "drained-gpu-1").write_text(TICKET)

    once(drill, "site.yml", drain)
    for _ in range(2):
        assert upgraded() == 1
        assert drill.ends["gpu-1"] == "held"
        assert (drill.world.folder / "drained-gpu-1").read_text() == TICKET
    # Nothing failed on it, so that it goes on to its target once that drain is ended.
    (drill.world.folder / "drained-gpu-1").unlink()
    assert upgraded() == 0
    assert set(drill.ends.values()) == {"returned"}
    assert {state["loaded"] for state in drill.world.nodes.values()} == {NEW}


def test_a_scheduler_is_silent_for_a_moment(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    drill.name, drill.broken = "scheduler silent for a moment", "one call of it fails after the change of gpu-1"
    silent: list[object] = []
    real = CommandScheduler.state

    def state(adapter: CommandScheduler, node: str, token: str) -> ServiceState:
        if silent:
            silent.clear()
            raise SchedulerError("no answer")
        return real(adapter, node, token)

    monkeypatch.setattr(CommandScheduler, "state", state)
    once(drill, "site.yml", silent.append)
    assert upgraded() == 1
    assert drill.ends["gpu-1"] == "rolled-back"


@pytest.mark.parametrize("playbook", ["prepare.yml", "site.yml"])
def test_the_schedulers_program_cannot_be_started_any_more(
    drill: Drill, playbook: str, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    drill.name, drill.broken = f"no scheduler from {playbook} on", "its program loses the bit x"
    program, broken = drill.folder / "program", list[bool]()
    program.write_text("#!/bin/sh\n")

    def site(argv: Sequence[str], stdin: str | None) -> Completed:
        return run_program([str(program), *argv], stdin) if broken else drill.world.site(argv, stdin)

    monkeypatch.setattr(command, "scheduler_of", lambda _: CommandScheduler("drain", site))
    broken.append(True)
    assert upgraded() == 2
    assert f"{program} cannot be started: Permission denied" in capsys.readouterr().err
    assert drill.world.events == []
    broken.clear()
    once(drill, playbook, lambda _: broken.append(True))
    assert upgraded("--power-cycle", str(program)) == 1
    assert drill.ends == {"gpu-1": "held", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    assert f"{program} cannot be started: Permission denied" in capsys.readouterr().out
    broken.clear()
    if playbook == "site.yml":
        # It goes back, since it failed, and begins again.
        assert upgraded() == 1
        assert drill.ends["gpu-1"] == "rolled-back"
    assert upgraded() == 0
    assert set(drill.ends.values()) == {"returned"}


def test_a_health_check_fires_in_the_middle(drill: Drill) -> None:
    """The role's ``gpunode-prolog`` obeys the mark on the node, which is there whenever the run owns the node."""
    drill.name, drill.broken = "health check in the middle", "it looks for the mark during each playbook"
    seen: list[tuple[str, bool]] = []

    def fires(playbook: str, names: Sequence[str]) -> None:
        seen.extend((playbook, (drill.world.folder / name / node_program.MARK).exists()) for name in names)

    drill.world.during = fires
    assert upgraded() == 0
    assert {playbook for playbook, marked in seen if marked} == {"site.yml"}
    assert {playbook for playbook, marked in seen if not marked} == {"prepare.yml"}


def test_a_foreign_drain_before(drill: Drill, capsys: pytest.CaptureFixture[str]) -> None:
    drill.name, drill.broken = "foreign drain before", f"gpu-2 has Reason={TICKET}"
    (drill.world.folder / "drained-gpu-2").write_text(TICKET)
    assert upgraded() == 0
    assert f"gpu-2: drained by others: {TICKET}" in capsys.readouterr().out
    assert (drill.world.folder / "drained-gpu-2").read_text() == TICKET
    assert drill.world.nodes["gpu-2"]["loaded"] == OLD
    drill.extra.append("1 left out")


def test_a_failed_canary_leaves_the_others_untouched(drill: Drill, capsys: pytest.CaptureFixture[str]) -> None:
    drill.name, drill.broken = "canary fails", "the driver does not load on the canary"
    drill.world.boots = lambda name: drill.world.nodes[name]["installed"] == OLD
    before = {name: dict(state) for name, state in drill.world.nodes.items()}
    assert upgraded() == 1
    assert (
        f"gpu-1: rolled-back, {OLD} -> {NEW}, 0 min out of service: driver {OLD} is loaded" in capsys.readouterr().out
    )
    assert drill.ends == {"gpu-1": "rolled-back", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    assert drill.world.nodes == before
    assert [line for line in drill.world.events if "gpu-1" not in line] == []


def test_a_node_is_dead_from_the_start(drill: Drill, capsys: pytest.CaptureFixture[str]) -> None:
    drill.name, drill.broken = "one node dead from the start", "gpu-3 does not answer"
    drill.world.lost = {"gpu-3"}
    assert upgraded() == 3
    assert "gpu-3: unreachable" in capsys.readouterr().out
    assert set(drill.ends.values()) == {"returned"}
    drill.extra.append("1 left out")


@pytest.mark.parametrize("drill", [6], indirect=True)
def test_half_of_the_fleet_is_unreachable(drill: Drill) -> None:
    drill.name, drill.broken = "half of the fleet unreachable", "3 of 6 nodes do not answer"
    drill.world.lost = {"gpu-1", "gpu-3", "gpu-5"}
    assert upgraded() == 3
    assert drill.ends == dict.fromkeys(("gpu-2", "gpu-4", "gpu-6"), "returned")
    drill.extra.append("3 left out")


KERNELS = [
    {"release": "6.1.0-41", "running": True, "newest": False, "image": True, "package": None, "headers": True},
    {"release": "6.1.0-42", "running": False, "newest": True, "image": True, "package": None, "headers": True},
]
GRUB = {"kernel": "6.1.0-42", "loader": "grub", "entry": "Linux", "setting": "grub.cfg", "arguments": "ro"}


def module(kernel: str, version: str = NEW) -> dict[str, Any]:
    path = f"/usr/lib/modules/{kernel}/updates/dkms/nvidia.ko"
    more = {"flavour": None, "signed": False, "vermagic": None, "size": 7}
    return {"kernel": kernel, "path": path, "version": version, **more}


INITRAMFS = {
    "kernel": "6.1.0-42",
    "path": "/boot/initrd.img-6.1.0-42",
    "newer": False,
    "modules": [{"path": module("6.1.0-42")["path"], "size": 5}],
}


@pytest.mark.parametrize(
    ("name", "broken", "facts", "reason"),
    [
        (
            "DKMS fails for the boot kernel",
            "no module for 6.1.0-42, which boots next",
            {"module_files": [module("6.1.0-41")], "next_boot": GRUB},
            "dkms autoinstall -k 6.1.0-42",
        ),
        (
            "initramfs keeps the old module",
            "initrd.img-6.1.0-42 has another nvidia.ko",
            {
                "module_files": [module("6.1.0-41"), module("6.1.0-42")],
                "next_boot": GRUB,
                "initramfs": [INITRAMFS],
                "driver_library_version": NEW,
            },
            "update-initramfs -u -k 6.1.0-42",
        ),
        (
            "boot loader's default is not the newest kernel",
            "grub starts 6.1.0-40, which has no module",
            {
                "module_files": [module("6.1.0-41"), module("6.1.0-42")],
                "next_boot": {**GRUB, "kernel": "6.1.0-40"},
                "driver_library_version": NEW,
            },
            "kernel 6.1.0-40 would start without the NVIDIA module",
        ),
    ],
)
def test_the_next_boot_has_no_working_driver(
    drill: Drill, name: str, broken: str, facts: dict[str, Any], reason: str
) -> None:
    """The decision on the reboot is the project's own: a reboot that it refuses does not take place."""
    drill.name, drill.broken = name, broken
    known = node(texts={BOOT_ID: "other\n", service.MACHINE_ID: "other\n"}, facts={"kernels": KERNELS, **facts})
    settings = {
        "gpunode_reboot": "when_needed", "gpunode_allow_busy": False, "gpunode_reboot_for_updates": False,
        "gpunode_change": "",
    }  # fmt: skip
    role_context = context(boot_id="own", machine_id="own", reboot_reasons=("a new driver is installed",))
    manifest = service.plan_reboot(known, settings, role_context)
    assert reason in manifest.notes[0]
    drill.world.boots = lambda name: manifest.pending or drill.world.nodes[name]["installed"] == OLD
    assert upgraded() == 1
    assert drill.ends == {"gpu-1": "rolled-back", **{f"gpu-{n}": "planned" for n in range(2, 6)}}


def test_the_repository_changes_between_the_canary_and_the_second_wave(drill: Drill) -> None:
    drill.name, drill.broken = "repository changes after the canary", f"{NEW} is gone when wave 2 is prepared"
    refused = f"gpunode: failed on gpu-2: nvidia_driver: the node's sources do not have {NEW}\n"
    once(drill, "prepare.yml", lambda _: drill.world.logs.append(refused), name="gpu-2")
    assert upgraded("--waves", "1") == 1
    assert drill.ends == {"gpu-1": "returned", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    assert not [line for line in drill.world.events if line.startswith("drain") and "gpu-1" not in line]


def test_two_controllers(drill: Drill, capsys: pytest.CaptureFixture[str]) -> None:
    drill.name, drill.broken = "two controllers", "another controller has the lease of gpu-1"
    lease = {"op": "take", "token": "x", "owner": "root@admin2 (process 7)", "lasts_s": 9999, "findings": []}
    node_program.answer(lease, drill.world.folder / "gpu-1")
    assert upgraded() == 1
    assert "held by root@admin2 (process 7) since" in capsys.readouterr().out
    assert set(drill.ends.values()) == {"planned"}
    assert drill.world.events == []
    (drill.world.folder / "gpu-1" / node_program.LEASE).unlink()


def test_a_drain_never_ends(drill: Drill) -> None:
    drill.name, drill.broken = "drain never ends", "a job on gpu-1 does not end"
    drill.world.nodes["gpu-1"]["jobs"] = 1
    assert upgraded("--drain-wait", "1") == 1
    assert set(drill.ends.values()) == {"planned"}
    assert [line for line in drill.world.events if line.startswith(("drain", "resume"))] == [
        "drain gpu-1",
        "resume gpu-1",
    ]
    assert {state["installed"] for state in drill.world.nodes.values()} == {OLD}


def test_a_job_starts_between_drain_and_stop(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    drill.name, drill.broken = "job starts between drain and stop", "a process computes on gpu-1 after it was idle"
    real, looks = drill.world.site, [0]

    def site(argv: Sequence[str], stdin: str | None) -> Any:
        answer = real(argv, stdin)
        if argv[1:3] == ["busy", "gpu-1"]:
            looks[0] += 1
            if looks[0] == 1:  # it was idle; now it is not
                drill.world.nodes["gpu-1"]["jobs"] = 1
        return answer

    monkeypatch.setattr("gpunode.upgrade.command.scheduler_of", lambda _: CommandScheduler("drain", site))
    assert upgraded("--drain-wait", "1") == 1
    assert "not idle: GPUs are in use" in latest(drill.folder).record.nodes["gpu-1"].reason
    assert set(drill.ends.values()) == {"planned"}
    assert {state["installed"] for state in drill.world.nodes.values()} == {OLD}
    assert not (drill.world.folder / "drained-gpu-1").exists()


def lost_at_reboot(drill: Drill) -> None:
    def lose(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml" and drill.world.events[-1].startswith("site.yml when_needed"):
            drill.world.lost = set(names)
            drill.world.logs = [f"gpunode: failed on {names[0]}: Reboot: Timed out waiting\n"]

    drill.world.during = lose


def test_a_node_does_not_come_back(drill: Drill) -> None:
    drill.name, drill.broken = "node does not come back", "gpu-1 does not answer after its reboot"
    lost_at_reboot(drill)
    assert upgraded() == 1
    assert drill.ends == {"gpu-1": "not-returned", **{f"gpu-{n}": "planned" for n in range(2, 6)}}


def test_a_node_that_does_not_come_back_is_power_cycled_where_allowed(drill: Drill, tmp_path: Path) -> None:
    drill.name, drill.broken = "the same, --power-cycle", "gpu-1 does not answer until its BMC is asked"
    lost_at_reboot(drill)
    program = tmp_path / "power"
    program.write_text(f"#!/bin/sh\necho $1 >> {tmp_path}/cycled\n")
    program.chmod(0o755)
    ask = drill.world.ask

    def answers(*words: Any, **named: Any) -> dict[str, str]:
        if (tmp_path / "cycled").exists():
            drill.world.lost, drill.world.during = set(), nothing
        return ask(*words, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpunode.change.leases.ask", answers)
        assert upgraded("--power-cycle", str(program)) == 0
    assert (tmp_path / "cycled").read_text() == "gpu-1\n"
    assert set(drill.ends.values()) == {"returned"}


def test_a_power_cycle_that_cannot_be_started_is_the_reason(drill: Drill, tmp_path: Path, capsys: Out) -> None:
    drill.name, drill.broken = "the same, no program", "the program of --power-cycle begins without #!"
    lost_at_reboot(drill)
    program = tmp_path / "power"
    program.write_text("ipmitool power cycle\n")
    program.chmod(0o755)
    assert upgraded("--power-cycle", str(program)) == 1
    assert f"power cycle: {program} cannot be started: Exec format error" in capsys.readouterr().out
    assert drill.ends == {"gpu-1": "not-returned", **{f"gpu-{n}": "planned" for n in range(2, 6)}}


@pytest.mark.parametrize(
    ("name", "broken", "harm", "words"),
    [
        ("comes back with 7 GPUs", "gpu-1 has 7 GPUs after its reboot", {"gpus": 7}, ()),
        ("comes back with another GPU", "a GPU of gpu-1 has another serial number and UUID", {"exchanged": True}, ()),
        (
            "comes back 10 % slower",
            "bus bandwidth of gpu-1 is 360 in place of 400 GB/s, with --measure",
            {"bandwidth": 360.0},
            ("--measure",),
        ),
        ("measures no more", "nothing can be measured on gpu-1 any more", {"measures": False}, ("--measure",)),
    ],
)
def test_a_node_comes_back_worse(
    drill: Drill, name: str, broken: str, harm: dict[str, Any], words: Sequence[str]
) -> None:
    drill.name, drill.broken = name, broken
    once(drill, "site.yml", lambda _: drill.world.nodes["gpu-1"].update(harm))
    assert upgraded(*words) == 1
    # The earlier release does not help: it stays drained, and is not worse than in the record.
    assert drill.ends == {"gpu-1": "held", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    assert (drill.world.folder / "drained-gpu-1").exists()


@pytest.mark.parametrize("drill", [2], indirect=True)
def test_nodes_are_measured_while_they_are_drained(drill: Drill) -> None:
    drill.name, drill.broken = "measured", "nothing: two nodes with --measure"
    drained = drill.world.folder / "drained-gpu-1"
    look = drill.world.look

    def watched(*words: Any, **named: Any) -> dict[str, Any]:
        assert not named.get("image") or drained.exists() or "gpu-1" not in words[2]
        return look(*words, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpunode.upgrade.nodes.look_at", watched)
        assert upgraded("--measure") == 0
    assert drill.world.measured == ["gpu-1", "gpu-1", "gpu-2", "gpu-2"]
    assert set(drill.ends.values()) == {"returned"}


def test_a_node_that_cannot_be_measured_before_is_not_changed(drill: Drill) -> None:
    drill.name, drill.broken = "cannot be measured", "nothing can be measured on gpu-1 before its change"
    drill.world.nodes["gpu-1"]["measures"] = False
    assert upgraded("--measure") == 1
    assert "nothing was measured before the change" in latest(drill.folder).record.nodes["gpu-1"].reason
    assert [line for line in drill.world.events if line.startswith("site.yml")] == []
    assert set(drill.ends.values()) == {"planned"}


@pytest.mark.parametrize("drill", [1], indirect=True)
def test_a_change_that_had_begun_is_not_measured_as_the_state_before(drill: Drill) -> None:
    drill.name, drill.broken = "measured too late", "Ctrl-C after the packages; continued with --measure"

    def interrupted(names: Sequence[str]) -> None:
        drill.world.nodes[names[0]].update(installed=NEW, bandwidth=100.0)
        raise KeyboardInterrupt

    once(drill, "site.yml", interrupted)
    assert upgraded() == 130
    drill.world.nodes["gpu-1"]["bandwidth"] = 400.0
    assert upgraded("--measure") == 0
    assert drill.world.measured == []
    assert set(drill.ends.values()) == {"returned"}


def test_the_disk_or_boot_is_full_while_preparing(drill: Drill) -> None:
    drill.name, drill.broken = "/boot full", "preflight refuses gpu-1 while it is prepared"
    drill.world.logs = ["gpunode: failed on gpu-1: preflight: disk-full: /boot has 12 MiB free, 128 MiB are needed\n"]
    assert upgraded() == 1
    assert set(drill.ends.values()) == {"planned"}
    assert "disk-full: /boot" in latest(drill.folder).record.nodes["gpu-1"].reason
    assert [line for line in drill.world.events if line.startswith("drain")] == []


def test_a_fabric_manager_of_the_old_version(drill: Drill) -> None:
    drill.name, drill.broken = "fabric manager of the old version", "the roles refuse it after the change of gpu-1"
    drill.world.logs = ["", "", "gpunode: failed on gpu-1: nvidia_fabric: the fabric manager is 580.95.05\n"]
    assert upgraded() == 1
    assert drill.ends == {"gpu-1": "rolled-back", **{f"gpu-{n}": "planned" for n in range(2, 6)}}


def test_the_kept_packages_are_damaged_when_a_node_goes_back(drill: Drill) -> None:
    drill.name, drill.broken = (
        "rollback cache damaged",
        "the repository lost the old release, and a kept file is damaged",
    )
    damaged = "kept-packages: no source has this release any more, and libcuda1_580.95.05-1_amd64.deb is damaged"
    drill.world.logs = [
        "",
        "gpunode: failed on gpu-1: nvidia_driver: the new module does not load\n",
        f"gpunode: failed on gpu-1: Offer kept packages: {damaged}\n",
    ]
    assert upgraded() == 1
    assert drill.ends == {"gpu-1": "held", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    assert damaged in latest(drill.folder).record.nodes["gpu-1"].reason
    # With the repository repaired the same command continues on the way back.
    assert upgraded() == 1
    assert drill.ends["gpu-1"] == "rolled-back"


@pytest.mark.parametrize("drill", [10], indirect=True)
def test_three_failures_among_ten_nodes_and_a_budget_of_one(drill: Drill) -> None:
    """The canary and the first wave are well, the second wave has two failures: nothing is changed after it."""
    drill.name, drill.broken = "10 nodes, 3 failures, budget 1", "gpu-3, gpu-5 and gpu-9 do not load the driver"
    bad = {"gpu-3", "gpu-5", "gpu-9"}
    drill.world.boots = lambda name: name not in bad or drill.world.nodes[name]["installed"] == OLD
    assert upgraded("--waves", "10%,30%", "--max-failed", "1") == 1
    assert drill.ends == {
        **dict.fromkeys(("gpu-1", "gpu-2", "gpu-4"), "returned"),
        **dict.fromkeys(("gpu-3", "gpu-5"), "rolled-back"),
        **{f"gpu-{n}": "planned" for n in range(6, 11)},
    }
    assert not [line for line in drill.world.events if "gpu-9" in line]


def test_an_old_controller_wakes_after_another_took_its_lease(drill: Drill) -> None:
    drill.name, drill.broken = "heartbeat lost, old controller wakes", "the lease of gpu-1 expired and was taken over"
    folder = drill.world.folder / "gpu-1"

    def take_over(names: Sequence[str]) -> None:
        lease = json.loads((folder / node_program.LEASE).read_text())
        (folder / node_program.LEASE).write_text(json.dumps({**lease, "beat": 0}))
        other = {"op": "take", "token": "other", "owner": "root@admin2", "lasts_s": 9999, "findings": []}
        assert node_program.answer(other, folder) == {"refused": ""}

    # While it is prepared the node is not drained: its lease may be taken over.
    once(drill, "prepare.yml", take_over)
    assert upgraded() == 1
    assert set(drill.ends.values()) == {"planned"}
    assert "held by root@admin2" in latest(drill.folder).record.nodes["gpu-1"].reason
    assert not [line for line in drill.world.events if line.startswith("drain")]
    (folder / node_program.LEASE).unlink()


@pytest.mark.parametrize("jump_s", [-10 * 86400, 10 * 86400])
def test_the_clock_jumps(drill: Drill, jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drill.name, drill.broken = "clock jumps", f"{jump_s / 86400:+.0f} days on node and controller during the change"
    real = journals.now

    def jump(names: Sequence[str]) -> None:
        later = timedelta(seconds=jump_s)
        monkeypatch.setattr(journals, "now", lambda: (datetime.now(UTC) + later).strftime("%Y-%m-%dT%H:%M:%SZ"))
        monkeypatch.setattr("gpunode.onnode.lease.time.time", lambda: datetime.now(UTC).timestamp() + jump_s)

    once(drill, "site.yml", jump)
    assert upgraded("-v") == 0
    assert set(drill.ends.values()) == {"returned"}
    assert real() != journals.now()


@pytest.mark.parametrize(
    ("fate", "broken", "ends"),
    [
        ("boots", "nothing: scontrol reboot ASAP nextstate=DOWN", "returned"),
        ("late", "gpu-1 boots after ResumeTimeout", "returned"),
        ("refused", "scontrol: Permission denied", "returned"),
        ("cancelled", "an administrator cancels the reboot of gpu-1", "rolled-back"),
        ("waits", "slurmctld does not pass the reboot of gpu-1 on", "rolled-back"),
        ("never", "RebootProgram does not reboot gpu-1", "held"),
    ],
)
def test_slurm_reboots_the_nodes(
    drill: Drill, fate: str, broken: str, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drill.name, drill.broken = "reboot through Slurm", broken
    world = drill.world
    control = Slurmctld({name: SlurmNode() for name in world.nodes})

    def scontrol(argv: Sequence[str], stdin: str | None) -> Completed:
        answer = control.scontrol(argv, stdin)
        for name, slurm_node in control.nodes.items():
            file = world.folder / f"drained-{name}"
            if "State=RESUME" in argv and file.exists() and not slurm_node.drain:
                world.site(["", "resume", name, ""], None)
            elif slurm_node.drain:
                file.write_text(slurm_node.drain.partition(" : ")[0])
        return answer

    adapter = SlurmScheduler(scontrol)
    failures: list[str] = []

    def rebooted(name: str) -> bool:
        """As the action scheduled_reboot; it fails on the first node alone."""
        control.fate = "boots" if name != "gpu-1" or "failed" in failures else fate
        boots = control.nodes[name].boots
        if adapter.reboot(name, latest(drill.folder).record.nodes[name].token):
            return True
        for _ in range(20):
            control.nodes[name].step(control.fate)
            if control.nodes[name].boots > boots:
                return True
        adapter.cancel_reboot(name, latest(drill.folder).record.nodes[name].token)
        failures.append("failed" if fate in ("cancelled", "waits") else "")
        world.logs.append(f"gpunode: failed on {name}: Reboot: the boot id did not change\n")
        return False

    world.boots = rebooted
    with monkeypatch.context() as patch:
        patch.setattr("gpunode.upgrade.command.scheduler_of", lambda _: adapter)
        assert upgraded() == (ends != "returned")
    assert drill.ends["gpu-1"] == ends
    assert set(drill.ends.values()) - {ends} <= {"planned"}
    assert ends != "held" or "the boot id did not change" in latest(drill.folder).record.nodes["gpu-1"].reason
    assert bool(control.nodes["gpu-1"].drain) is (ends == "held")


def test_a_member_of_a_failure_domain_fails(drill: Drill) -> None:
    drill.name, drill.broken = "member of a failure domain fails", "gpu-2 of rack-1 (gpu-1 to gpu-3) does not load"
    drill.world.domains = dict.fromkeys(("gpu-1", "gpu-2", "gpu-3"), "rack-1")
    drill.world.boots = lambda name: name != "gpu-2" or drill.world.nodes[name]["installed"] == OLD
    assert upgraded() == 1
    assert drill.ends == {
        **dict.fromkeys(("gpu-1", "gpu-2", "gpu-3"), "rolled-back"),
        **dict.fromkeys(("gpu-4", "gpu-5"), "planned"),
    }
    assert {state["loaded"] for state in drill.world.nodes.values()} == {OLD}


def test_a_held_member_of_a_failure_domain_stops_the_others(drill: Drill, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator drains gpu-2 once it is idle: the same command does not change gpu-1 without it."""
    drill.name, drill.broken = "member of a failure domain is held", f"gpu-2 of rack-1 has Reason={TICKET}"
    drill.world.domains = dict.fromkeys(("gpu-1", "gpu-2"), "rack-1")
    real, foreign = drill.world.site, drill.world.folder / "drained-gpu-2"

    def site(argv: Sequence[str], stdin: str | None) -> Any:
        answer = real(argv, stdin)
        if argv[1:3] == ["busy", "gpu-2"]:
            foreign.write_text(TICKET)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr("gpunode.upgrade.command.scheduler_of", lambda _: CommandScheduler("drain", site))
        assert upgraded() == 1
    for _ in range(2):
        assert drill.ends == {"gpu-2": "held", **{f"gpu-{n}": "planned" for n in (1, 3, 4, 5)}}
        assert {state["installed"] for state in drill.world.nodes.values()} == {OLD}
        assert upgraded() == 1
    assert latest(drill.folder).record.nodes["gpu-1"].reason == "rack-1: gpu-2 is held"
    foreign.unlink()
    assert upgraded() == 0
    assert set(drill.ends.values()) == {"returned"}
