"""``gpunode upgrade`` as a whole, with simulated nodes in place of probe, leases and playbooks."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from upgrade_world import NEW, OLD, World, latest, simulate, states, upgraded

from gpunode.catalog import load
from gpunode.cli import run
from gpunode.onnode import lease as node_program
from gpunode.upgrade.looks import NodeLook

Out = pytest.CaptureFixture[str]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return simulate(tmp_path, monkeypatch)


def test_canary_then_waves_and_the_second_run_changes_nothing(world: World, capsys: Out) -> None:
    assert upgraded("--waves", "40%", "-v") == 0
    shown = capsys.readouterr()
    assert f"gpu-[1-5]: driver {OLD} -> {NEW}" in shown.out
    assert "gpu-1: returned" in shown.out
    assert [line for line in world.events if line.startswith(("prepare", "drain", "site"))] == [
        "prepare.yml  gpu-1",
        "drain gpu-1",
        "site.yml never gpu-1",
        "site.yml when_needed gpu-1",
        "prepare.yml  gpu-2 gpu-3",
        "drain gpu-2",
        "drain gpu-3",
        "site.yml never gpu-2 gpu-3",
        "site.yml when_needed gpu-2 gpu-3",
        "prepare.yml  gpu-4 gpu-5",
        "drain gpu-4",
        "drain gpu-5",
        "site.yml never gpu-4 gpu-5",
        "site.yml when_needed gpu-4 gpu-5",
    ]
    assert not list(world.folder.glob("drained-*")) + list(world.folder.glob("*/*.json"))
    before = world.events
    assert upgraded() == 0
    assert f"gpu-[1-5]: already at {NEW}" in capsys.readouterr().out
    assert world.events == before


def test_a_dry_run_changes_nothing(world: World, capsys: Out) -> None:
    assert upgraded("--dry-run") == 0
    assert "wave 1      gpu-1 (canary)" in capsys.readouterr().out
    assert world.events == []


def test_a_canary_that_returns_with_7_gpus_stops_the_others(world: World, tmp_path: Path, capsys: Out) -> None:
    def lose(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml":
            world.nodes[names[0]]["gpus"] = 7

    world.during = lose
    assert upgraded() == 1
    shown = capsys.readouterr()
    assert "nothing was changed on gpu-2, gpu-3, gpu-4, gpu-5" in shown.err
    assert states(tmp_path) == {"gpu-1": "held", **{f"gpu-{n}": "planned" for n in range(2, 6)}}
    assert "gpu-1: held" in shown.out
    # It was rolled back, and is still worse: it stays drained, marked and owned.
    assert world.nodes["gpu-1"]["loaded"] == OLD
    assert (world.folder / "drained-gpu-1").exists()
    assert {path.name for path in (world.folder / "gpu-1").glob("*.json")} == {"change.json", "drained.json"}
    # Repaired: the same command proves it.
    world.during = lambda playbook, names: None  # noqa: ARG005
    world.nodes["gpu-1"]["gpus"] = 8
    assert upgraded() == 1
    assert states(tmp_path)["gpu-1"] == "rolled-back"
    assert not (world.folder / "drained-gpu-1").exists()
    # With the cause repaired the same command begins again.
    assert upgraded("--waves", "100%") == 0
    assert {node["loaded"] for node in world.nodes.values()} == {NEW}


def test_a_new_command_takes_over_what_an_earlier_one_holds(world: World, tmp_path: Path) -> None:
    world.logs = ["", "gpunode: failed on gpu-1: nvidia_driver: Change the driver's packages: no space left\n"]
    assert upgraded("--no-rollback", "--limit", "gpu-1,gpu-2") == 1
    assert states(tmp_path)["gpu-1"] == "held"
    assert "no space left" in latest(tmp_path).record.nodes["gpu-1"].reason
    assert upgraded() == 0
    assert {node["loaded"] for node in world.nodes.values()} == {NEW}
    assert not list(world.folder.glob("drained-*"))


def test_a_held_node_with_less_hardware_returns_once_that_is_accepted(
    world: World, tmp_path: Path, capsys: Out
) -> None:
    assert upgraded("--accept", "gpu-1") == 2
    assert "--accept gpu-1: not held by this run; it holds no node" in capsys.readouterr().err
    world.nodes["gpu-1"]["bandwidth"] = 395.0

    def lose_one(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml":
            world.nodes[names[0]].update(gpus=7)

    world.during = lose_one
    assert upgraded("--no-rollback") == 1
    assert states(tmp_path)["gpu-1"] == "held"
    assert upgraded("--no-rollback") == 1
    assert upgraded("--no-rollback", "--accept", "gpu-2") == 2
    assert "it holds gpu-1" in capsys.readouterr().err
    world.during = lambda playbook, names: None  # noqa: ARG005
    world.gpus = 7
    assert upgraded("--no-rollback", "--accept", "gpu-1") == 0
    assert set(states(tmp_path).values()) == {"returned"}
    assert world.nodes["gpu-1"]["gpus"] == 7


def test_ctrl_c_and_the_same_command_goes_on(world: World, tmp_path: Path, capsys: Out) -> None:
    def interrupt(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml" and names == ["gpu-2"]:
            raise KeyboardInterrupt

    world.during = interrupt
    assert upgraded("--waves", "20%") == 130
    assert "the same command continues" in capsys.readouterr().err
    assert states(tmp_path)["gpu-1"] == "returned"
    assert states(tmp_path)["gpu-2"] == "drained"
    world.during = lambda playbook, names: None  # noqa: ARG005
    assert upgraded("--waves", "20%") == 0
    assert "continuing run" in capsys.readouterr().out
    assert {node["loaded"] for node in world.nodes.values()} == {NEW}


def test_nodes_that_are_not_at_disposal_are_left_out_by_name(world: World, capsys: Out) -> None:
    (world.folder / "drained-gpu-2").write_text("RMA ticket 4711\n")
    world.lost = {"gpu-3"}
    assert upgraded("--waves", "100%") == 3
    out = capsys.readouterr().out
    assert "gpu-2: drained by others: RMA ticket 4711" in out
    assert "gpu-3: unreachable: no route to host" in out
    assert (world.folder / "drained-gpu-2").read_text() == "RMA ticket 4711\n"
    assert world.nodes["gpu-2"]["loaded"] == OLD
    assert world.nodes["gpu-5"]["loaded"] == NEW


def test_a_drain_of_others_in_the_middle_stays_and_holds_the_node(world: World, tmp_path: Path, capsys: Out) -> None:
    def drain(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml":
            (world.folder / f"drained-{names[0]}").write_text("RMA ticket 4711")

    world.during = drain
    assert upgraded() == 1
    assert states(tmp_path)["gpu-1"] == "held"
    assert "drained by others: RMA ticket 4711" in capsys.readouterr().out
    assert (world.folder / "drained-gpu-1").read_text() == "RMA ticket 4711"


def test_a_node_that_does_not_come_back_is_not_returned(world: World, tmp_path: Path) -> None:
    def lose(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml" and world.events[-1].startswith("site.yml when_needed"):
            world.lost = set(names)
            world.logs = [f"gpunode: failed on {names[0]}: Reboot: Timed out waiting for last boot time check\n"]

    world.during = lose
    assert upgraded() == 1
    assert states(tmp_path)["gpu-1"] == "not-returned"
    world.during, world.lost = lambda playbook, names: None, set()  # noqa: ARG005
    assert upgraded() == 0
    assert set(states(tmp_path).values()) == {"returned"}


def test_another_controller_is_refused_and_named(world: World, capsys: Out) -> None:
    lease = {"op": "take", "token": "x", "owner": "root@admin2 (process 7)", "lasts_s": 9999, "findings": []}
    node_program.answer(lease, world.folder / "gpu-1")
    assert upgraded() == 1
    assert "held by root@admin2 (process 7) since" in capsys.readouterr().out
    assert [line for line in world.events if not line.startswith("state")] == []


def test_two_at_once_on_one_controller(world: World, capsys: Out) -> None:
    second: list[int] = []

    def again(playbook: str, names: Sequence[str]) -> None:
        if not second:
            second.append(upgraded())

    world.during = again
    assert upgraded() == 0
    assert second == [2]
    assert re.search(r"another gpunode upgrade is in progress: .*@.* \(process \d+\) since", capsys.readouterr().err)


def test_a_pause_is_between_waves(world: World, tmp_path: Path, capsys: Out) -> None:
    def pause(playbook: str, names: Sequence[str]) -> None:
        if playbook == "prepare.yml":
            assert upgraded("--pause") == 0

    world.during = pause
    # Not all nodes returned: those of the waves that did not begin are planned.
    assert upgraded() == 1
    assert "stopped: paused before wave 2" in capsys.readouterr().err
    assert list(states(tmp_path).values()) == ["returned", *["planned"] * 4]
    assert upgraded("--dry-run") == 0
    world.during = lambda playbook, names: None  # noqa: ARG005
    assert upgraded() == 0
    assert set(states(tmp_path).values()) == {"returned"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--waves", "0%"], "0% is not a number or a share"),
        (["--waves", "10%,,"], "is not a number or a share"),
        (["--to", "9"], "unknown driver '9'"),
        (["--pause"], "no unfinished run of this command"),
        (["-e", "gpunode_lba=1"], "unknown variable gpunode_lba"),
    ],
)
@pytest.mark.usefixtures("world")
def test_wrong_usage_is_one_line(words: list[str], message: str, capsys: Out) -> None:
    assert upgraded(*words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_node_is_measured_after_its_change_in_the_image_of_before(world: World, tmp_path: Path, capsys: Out) -> None:
    chosen = load().workload_images["pytorch-25.10"].reference

    def interrupt(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml" and "gpu-2" in names:
            raise KeyboardInterrupt

    world.during = interrupt
    assert upgraded("--measure", "--waves", "2") == 130
    assert f"measured    before and after the change, in {chosen}" in capsys.readouterr().out
    world.during = lambda playbook, names: None  # noqa: ARG005
    # Another image holds for the nodes that were not measured yet.
    assert upgraded("--measure", "--image", "site/torch:1", "--waves", "2") == 0
    assert set(states(tmp_path).values()) == {"returned"}
    of_node = {name: {image for host, image in zip(world.measured, world.images, strict=True) if host == name}
               for name in world.nodes}  # fmt: skip
    assert of_node == {
        **{name: {chosen} for name in ("gpu-1", "gpu-2", "gpu-3")},
        **{name: {"site/torch:1"} for name in ("gpu-4", "gpu-5")},
    }


def test_what_was_measured_is_kept_when_the_run_is_killed(world: World, tmp_path: Path) -> None:
    look = world.one

    def killed(name: str, *, measured: bool = False) -> NodeLook:
        if measured and name == "gpu-2":
            raise KeyboardInterrupt
        return look(name, measured=measured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "one", killed)
        assert upgraded("--measure", "--canary", "3") == 130
    assert world.measured == ["gpu-1"]
    assert upgraded("--measure", "--canary", "3") == 0
    # gpu-1 was not measured a second time before its change.
    assert world.measured[:5] == ["gpu-1", "gpu-2", "gpu-3", "gpu-1", "gpu-2"]
    assert set(states(tmp_path).values()) == {"returned"}


def test_nodes_that_could_not_be_measured_before_are_named(world: World, tmp_path: Path, capsys: Out) -> None:
    """Their change had begun without --measure."""

    def interrupt(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml":
            world.nodes[names[0]]["installed"] = NEW
            raise KeyboardInterrupt

    world.during = interrupt
    assert upgraded() == 130
    world.during = lambda playbook, names: None  # noqa: ARG005
    assert upgraded("--measure") == 0
    assert "compared without figures, because their change had begun: gpu-1\n" in capsys.readouterr().out
    assert set(states(tmp_path).values()) == {"returned"}


def rolled_back(*words: str) -> int:
    return run(["rollback", "-i", "hosts.yml", "--scheduler", "command:drain", "--validate-wait=0", *words])


def test_a_rollback_gives_each_node_its_release_before_the_run(world: World, tmp_path: Path, capsys: Out) -> None:
    assert rolled_back() == 2
    assert "there is nothing to take back" in capsys.readouterr().err
    world.nodes["gpu-2"] |= {"installed": "570.211.01", "loaded": "570.211.01"}
    world.nodes["gpu-5"] |= {"installed": NEW, "loaded": NEW}
    assert upgraded("--waves", "100%") == 0
    first = latest(tmp_path).record.run
    assert run(["rollback", "--list"]) == 0
    assert f"gpu-[1,3-4] back to {OLD}; gpu-2 back to 570.211.01" in capsys.readouterr().out
    assert rolled_back("--waves", "100%", "--dry-run") == 0
    assert rolled_back("--waves", "100%") == 0
    assert f"gpu-5: no part of --run {first}" in capsys.readouterr().out
    assert {name: node["loaded"] for name, node in world.nodes.items()} == {
        "gpu-1": OLD, "gpu-2": "570.211.01", "gpu-3": OLD, "gpu-4": OLD, "gpu-5": NEW,
    }  # fmt: skip
    assert states(tmp_path) == dict.fromkeys(("gpu-1", "gpu-2", "gpu-3", "gpu-4"), "returned")
    assert (world.unproven, world.foreign_ended) == ([], [])
    # The nodes are compared with their state before the upgrade, and the same command changes nothing more.
    before = world.events
    assert rolled_back() == 0
    assert world.events == before
    assert rolled_back("--run", "20260101T000000Z-ffff") == 2


def test_a_rollback_leaves_out_a_failure_domain_of_which_a_node_had_no_driver(world: World, capsys: Out) -> None:
    world.domains = dict.fromkeys(("gpu-2", "gpu-5"), "rack-1")
    world.nodes["gpu-5"] |= {"installed": None, "loaded": None}
    assert upgraded("--waves", "100%") == 0
    assert rolled_back("--waves", "100%") == 3
    assert {name: node["loaded"] for name, node in world.nodes.items()} == {
        **dict.fromkeys(("gpu-1", "gpu-3", "gpu-4"), OLD), **dict.fromkeys(("gpu-2", "gpu-5"), NEW),
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "gpu-2: rack-1: gpu-5 is left out" in out
    assert "gpu-5: it had no driver before --run" in out


def test_a_rollback_takes_over_what_an_upgrade_holds_and_continues(world: World, tmp_path: Path, capsys: Out) -> None:
    world.logs = ["", "gpunode: failed on gpu-1: nvidia_driver: Change the driver's packages: no space left\n"]
    assert upgraded("--no-rollback") == 1

    def interrupt(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml":
            raise KeyboardInterrupt

    world.during = interrupt
    assert rolled_back() == 130
    world.during = lambda playbook, names: None  # noqa: ARG005
    assert rolled_back() == 0
    assert "continuing run" in capsys.readouterr().out
    assert states(tmp_path) == {"gpu-1": "returned"}
    assert {node["loaded"] for node in world.nodes.values()} == {OLD}
    assert not list(world.folder.glob("drained-*"))


def test_an_abort_finishes_the_run_before_its_next_wave(world: World, tmp_path: Path, capsys: Out) -> None:
    def abort(playbook: str, names: Sequence[str]) -> None:
        if playbook == "prepare.yml":
            assert upgraded("--abort") == 0

    world.during = abort
    assert upgraded() == 1
    assert "stops before its next wave and ends there" in capsys.readouterr().out
    assert list(states(tmp_path).values()) == ["returned", *["planned"] * 4]
    assert latest(tmp_path).record.finished_at is not None
    assert upgraded("--abort") == 2

    # A run that was paused is finished at once.
    def pause(_playbook: str, _names: Sequence[str]) -> None:
        upgraded("--pause")

    world.during = pause
    upgraded()
    assert upgraded("--abort") == 0
    assert "is finished" in capsys.readouterr().out
    assert latest(tmp_path).record.finished_at is not None


def test_the_live_view_shows_the_nodes_by_state(world: World, capsys: Out) -> None:
    shown: list[str] = []

    def look(playbook: str, names: Sequence[str]) -> None:
        if playbook == "site.yml" and names == ["gpu-1"] and not shown:
            capsys.readouterr()
            assert upgraded("--watch") == 0
            shown.append(capsys.readouterr().out)

    world.during = look
    assert upgraded("--waves", "100%") == 0
    assert re.search(r"(?m)^  planned +4  gpu-\[2-5\]$", shown[0])
    assert re.search(r"(?m)^  drained +1  gpu-1 \(change, for 0 min\)$", shown[0])
    assert upgraded("--watch") == 2


def test_a_failure_domain_is_in_one_wave_and_counts_as_one_node(world: World, tmp_path: Path, capsys: Out) -> None:
    world.domains = {"gpu-2": "rack-1", "gpu-5": "rack-1"}
    assert upgraded("--waves", "1") == 0
    out = capsys.readouterr().out
    assert "wave 2      gpu-[2,5] (together: rack-1)" in out
    assert {name: node.wave for name, node in latest(tmp_path).record.nodes.items()} == {
        "gpu-1": 0, "gpu-2": 1, "gpu-5": 1, "gpu-3": 2, "gpu-4": 3,
    }  # fmt: skip


def test_a_failure_domain_with_a_node_that_is_left_out_is_left_out(world: World, capsys: Out) -> None:
    world.domains = dict.fromkeys(("gpu-2", "gpu-5"), "rack-1")
    world.lost = {"gpu-5"}
    assert upgraded("--waves", "100%") == 3
    assert "gpu-2: rack-1: gpu-5 is left out" in capsys.readouterr().out
    assert world.nodes["gpu-2"]["loaded"] == OLD


def test_the_plan_has_the_minutes_of_earlier_runs(world: World, capsys: Out) -> None:
    assert upgraded("--waves", "100%") == 0
    assert "no earlier run has measured it" in capsys.readouterr().out
    rolled_back("--dry-run")
    assert "about 0 minutes (median of 5 returns in earlier runs, longest 0)" in capsys.readouterr().out
