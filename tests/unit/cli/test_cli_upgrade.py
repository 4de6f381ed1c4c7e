"""``gpunode upgrade`` as a whole, with simulated nodes in place of probe, leases and playbooks."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from upgrade_world import NEW, OLD, World, latest, simulate, states, upgraded

from gpunode.catalog import load
from gpunode.change.journal import NodeRecord, new_token
from gpunode.checks import Finding, RunningStack, Status
from gpunode.cli import run, upgrade_run
from gpunode.cli.upgrade_nodes import (
    LOOK,
    Connections,
    NodeLook,
    look_at,
    variables_of,
    why_not_as_good,
    write_measured,
)
from gpunode.errors import UsageError
from gpunode.history.runs import SNAPSHOT
from gpunode.history.snapshot import FigureValue, GpuRecord, Snapshot, Verdict
from gpunode.judging.evaluator import JudgedNode
from gpunode.judging.report import NodeReport
from gpunode.onnode import lease as node_program

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
    # With the cause repaired the same command begins anew.
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


UPGRADE = """
import os, signal, subprocess, sys
from pathlib import Path
from gpunode.cli import upgrade_run
from gpunode.fleet import playbook
class Killed(subprocess.Popen):
    def __init__(self, *words, **more):
        super().__init__(*words, **more)
        os.kill(os.getpid(), signal.SIGKILL)
if len(sys.argv) > 2:
    subprocess.Popen = Killed
with upgrade_run.one_at_a_time(Path(sys.argv[1])):
    program = f"cd {sys.argv[1]} && echo $$ > new && mv new begun && exec sleep 60"
    playbook.run(["/bin/sh", "-c", program], dict(os.environ), None)
"""


@pytest.mark.parametrize("moment", [[], ["as soon as it runs"]])
def test_after_kill_9_nothing_starts_beside_a_playbook_that_still_runs(tmp_path: Path, moment: list[str]) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", UPGRADE, folder, *moment], start_new_session=True) as controller:
        if not moment:
            _until((folder / "begun").exists)
            controller.kill()

    def runs() -> bool:
        begun = folder / "begun"
        return begun.exists() and Path("/proc", begun.read_text().strip(), "exe").exists()

    def may_start() -> bool:
        try:
            with upgrade_run.one_at_a_time(folder):
                assert not runs()
        except UsageError:
            return False
        return True

    _until(may_start)
    time.sleep(1)  # for one that was about to begin
    assert not runs()


def _until(what: Callable[[], bool], limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_pause_is_between_waves(world: World, tmp_path: Path) -> None:
    def pause(playbook: str, names: Sequence[str]) -> None:
        if playbook == "prepare.yml":
            assert upgraded("--pause") == 0

    world.during = pause
    upgraded()
    assert list(states(tmp_path).values()) == ["returned", *["planned"] * 4]
    world.during = lambda playbook, names: None  # noqa: ARG005
    assert upgraded() == 0
    assert set(states(tmp_path).values()) == {"returned"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--waves", "0%"], "0% is not a number or a share"),
        (["--waves", "10%,,"], "is not a number or a share"),
        (["--to", "9"], "unknown driver '9'"),
        (["--pause"], "no unfinished run of this command"),
        (["-e", "gpunode_lba=1"], "unknown variable gpunode_lba"),
    ],
)
@pytest.mark.usefixtures("world")
def test_wrong_usage_is_one_line(words: list[str], says: str, capsys: Out) -> None:
    assert upgraded(*words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("nodes", "canary", "waves", "expected"),
    [
        (20, 1, "10%,25%", [1, 2, 5, 5, 5, 2]),
        (3, 1, "10%,25%", [1, 1, 1]),
        (4, 9, "10%", [4]),
        (5, 2, "3", [2, 3]),
        (0, 1, "10%", []),
    ],
)
def test_sizes_of_waves(nodes: int, canary: int, waves: str, expected: list[int]) -> None:
    found = upgrade_run.wave_numbers(nodes, canary, upgrade_run.waves_of(waves))
    assert [found.count(wave) for wave in sorted(set(found))] == expected


def test_what_is_no_proof(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = world.one("gpu-1").snapshot
    assert before is not None
    world.nodes["gpu-1"] |= {"installed": NEW, "loaded": NEW}
    good = world.one("gpu-1")
    assert good.snapshot is not None
    assert why_not_as_good(before, good, NEW) == ""
    for wrong in (
        {"gpus": good.snapshot.gpus[:7]},
        {"unknown": {"smi": "nvidia-smi did not answer"}},
        {"verdicts": {"driver.library-matches-module": Verdict(status=Status.FAIL)}},
        {"stack": RunningStack(driver=OLD, driver_packages=NEW)},
        {"stack": RunningStack(driver=None, driver_packages=NEW)},
        {"gpus": tuple(gpu.model_copy(update={"uuid": f"GPU-{gpu.index}"}) for gpu in good.snapshot.gpus)},
    ):
        look = NodeLook("gpu-1", snapshot=good.snapshot.model_copy(update=wrong))
        assert why_not_as_good(before, look, NEW), wrong
    assert why_not_as_good(before, NodeLook("gpu-1", "unreachable"), NEW) == "unreachable"


def measured_gpus(indices: Sequence[int], **serials: str) -> Snapshot:
    """A node with a figure of each GPU but the last; the GPUs have these indices."""
    gpus = tuple(
        GpuRecord(
            index=index, name="H100", uuid=f"GPU-{serials.get(f'gpu{n}', n)}", serial=serials.get(f"gpu{n}", f"13{n}"),
            slot=f"0000:{n}b:00.0",
        )
        for n, index in enumerate(indices)
    )  # fmt: skip
    figures = tuple(
        FigureValue(metric="gemm", component=f"gpu{gpu.index}", value=700.0 + gpu.index) for gpu in gpus[:-1]
    )
    stack = RunningStack(driver=NEW, driver_packages=NEW)
    return Snapshot(host="gpu-1", level="standard", simulated=True, stack=stack, gpus=gpus, facts={}, figures=figures)


def test_a_gpu_with_another_index_is_the_same_gpu() -> None:
    """The last one was not measured before either, whatever its index is."""
    before, after = measured_gpus((0, 1, 2, 3)), measured_gpus((0, 3, 1, 2))
    assert why_not_as_good(before, NodeLook("gpu-1", snapshot=after), NEW) == ""
    fewer = after.model_copy(update={"figures": after.figures[:-1]})
    said = why_not_as_good(before, NodeLook("gpu-1", snapshot=fewer), NEW)
    assert said == "gemm of gpu1 was measured before, and is not any more"


def test_failed_checks_come_first_and_what_gpus_share_is_one_reason() -> None:
    good = Verdict(status=Status.PASS)
    before = measured_gpus((0, 1, 2, 3)).model_copy(update={"verdicts": {"fabric.state": good, "fabric.manager": good}})
    failed = {f"gpu{index}": Status.FAIL for index in range(4)}
    verdicts = {
        "fabric.state": Verdict(status=Status.FAIL, affected=failed),
        "fabric.manager": Verdict(status=Status.FAIL, affected={"node": Status.FAIL}),
    }
    after = before.model_copy(update={"verdicts": verdicts, "gpus": before.gpus[:3], "figures": before.figures[:2]})
    messages = {("fabric.manager", "node"): "nvidia-fabricmanager.service is failed"}
    assert why_not_as_good(before, NodeLook("gpu-1", snapshot=after, messages=messages), NEW) == (
        "fabric.manager: nvidia-fabricmanager.service is failed, gpu[0-3]: fabric.state: pass -> fail, "
        "gpu3: GPU: H100, serial 133, GPU-3, 0000:3b:00.0 removed, "
        "gemm of gpu2 was measured before, and is not any more"
    )


def test_an_exchanged_gpu_is_named_with_both_serial_numbers() -> None:
    before, after = measured_gpus((0, 1, 2, 3)), measured_gpus((0, 1, 2, 3), gpu2="4711")
    said = why_not_as_good(before, NodeLook("gpu-1", snapshot=after), NEW)
    assert said == (
        "gpu2: GPU replaced: H100, serial 132, GPU-2, 0000:2b:00.0 -> H100, serial 4711, GPU-4711, 0000:2b:00.0"
    )


@pytest.mark.parametrize(
    ("releases", "image"),
    [
        ({"580.95.05", "595.91.07"}, "pytorch-25.10"),
        ({"595.91.07"}, "pytorch-26.05"),
        ({"570.195.03", "595.91.07"}, "pytorch-2.7-cu128"),
    ],
)
def test_an_image_that_every_release_supports(releases: set[str], image: str) -> None:
    found = upgrade_run.image_for_releases(releases, {"x86_64"}, {"h100-sxm5-80gb"})
    assert found == load().workload_images[image].reference


def test_no_image_for_every_release_is_one_line() -> None:
    with pytest.raises(UsageError) as caught:
        upgrade_run.image_for_releases({"470.256.02", "580.95.05"}, {"x86_64"}, {"t4"})
    assert "CUDA 11.4" in str(caught.value)
    assert "470.256.02, 580.95.05" in str(caught.value)
    assert "--image" in str(caught.value)
    assert "\n" not in str(caught.value)


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
    of_node = {name: {image for one, image in zip(world.measured, world.images, strict=True) if one == name}
               for name in world.nodes}  # fmt: skip
    assert of_node == {
        **{name: {chosen} for name in ("gpu-1", "gpu-2", "gpu-3")},
        **{name: {"site/torch:1"} for name in ("gpu-4", "gpu-5")},
    }


def test_what_was_measured_is_kept_when_the_run_is_killed(world: World, tmp_path: Path) -> None:
    one = world.one

    def killed(name: str, *, measured: bool = False) -> NodeLook:
        if measured and name == "gpu-2":
            raise KeyboardInterrupt
        return one(name, measured=measured)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "one", killed)
        assert upgraded("--measure", "--canary", "3") == 130
    assert world.measured == ["gpu-1"]
    assert upgraded("--measure", "--canary", "3") == 0
    # gpu-1 was not measured a second time before its change.
    assert world.measured[:5] == ["gpu-1", "gpu-2", "gpu-3", "gpu-1", "gpu-2"]
    assert set(states(tmp_path).values()) == {"returned"}


def test_the_reason_why_nothing_was_measured_is_that_of_the_container(tmp_path: Path) -> None:
    finding = Finding(check="container.runs", status=Status.ERROR, component="node", message="no Docker engine")
    report = NodeReport(
        host="gpu-1", status=Status.ERROR, seconds=1, simulated=True, stack=RunningStack(), gpus=(), findings=(finding,)
    )
    look: dict[str, Any] = {"picture": {}, "undetermined": None, "busy": ""}
    node = JudgedNode(report, "standard", {SNAPSHOT: measured_gpus((0,)).model_dump(mode="json"), LOOK: look})

    class Judge:
        def judge_fleet(self, answers: object) -> list[JudgedNode]:  # noqa: ARG002
            return [node]

    seen: list[NodeLook] = []
    judge: Any = Judge()
    found = look_at(Connections({}, (), 1, 1), judge, (), each=seen.append)["gpu-1"]
    assert seen == [found]
    assert write_measured(tmp_path, found, "image") == {
        "gpu-1": "nothing was measured before the change: no Docker engine"
    }


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


def test_the_variables_override_those_of_the_site() -> None:
    record = NodeRecord(token=new_token(), before=OLD, target=NEW, back=True)
    values = variables_of({"gpu-1": record}, {})
    assert values["__gpunode_targets"] == {"gpu-1": OLD}
    assert values["gpunode_drain_tasks"] is None
    # Only a node that goes back gets what it kept.
    assert values["__gpunode_backward"] == ["gpu-1"]
    forward = record.model_copy(update={"back": False})
    assert variables_of({"gpu-1": forward}, {})["__gpunode_backward"] == []
    assert variables_of({"gpu-1": forward}, {}, kept=True)["__gpunode_backward"] == ["gpu-1"]


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
    assert {name: one["loaded"] for name, one in world.nodes.items()} == {
        "gpu-1": OLD, "gpu-2": "570.211.01", "gpu-3": OLD, "gpu-4": OLD, "gpu-5": NEW,
    }  # fmt: skip
    assert states(tmp_path) == dict.fromkeys(("gpu-1", "gpu-2", "gpu-3", "gpu-4"), "returned")
    assert (world.unproven, world.foreign_ended) == ([], [])
    # The nodes are compared with their state before the upgrade, and the same command changes nothing more.
    before = world.events
    assert rolled_back() == 0
    assert world.events == before
    assert rolled_back("--run", "20260101T000000Z-ffff") == 2


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
    assert {one["loaded"] for one in world.nodes.values()} == {OLD}
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
