"""``gpunode upgrade`` of HGX H100 nodes across a branch, with the distribution's Slurm and jobs that hold GPUs.

The tests of this file share the nodes and run in their order. ``GPUNODE_TEST_UPGRADE_NODES`` sets their number (4):
each takes about 300 MB of memory.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_fleet import FIRST, SECOND, Fleet, Upgraded, set_up

from gpunode.catalog import load
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(5400)]
CONCERNS = (
    "gpunode/change/",
    "gpunode/upgrade/",
    "gpunode/cli/upgrade",
    "gpunode/fleet/playbook",
    "gpunode/onnode/lease",
    "playbooks/",
    "plugins/",
)

COUNT = int(os.environ.get("GPUNODE_TEST_UPGRADE_NODES", "4"))
THIRD = "610.57.04"
TICKET = "RMA ticket 4711"
IMAGE = load().workload_images["pytorch-26.05"].reference
"""The newest image of the catalog that 595 and 610 support."""
# What a mirror, an image or a container with an old program does: after each transaction of packages the program of
# the fabric manager is the earlier release again.
OLD_MANAGER = f"""
cat > /usr/local/sbin/old-manager <<'END'
#!/bin/sh
sed -i 's/GPUNODE_LAB_PACKAGE_VERSION=[0-9.]*/GPUNODE_LAB_PACKAGE_VERSION={SECOND}/' /usr/bin/nv-fabricmanager
END
chmod 755 /usr/local/sbin/old-manager
echo 'DPkg::Post-Invoke {{"/usr/local/sbin/old-manager";}};' > /etc/apt/apt.conf.d/99old-manager
"""
# A GPU of the same model in the slot of another one, as after an RMA: the node's next boot finds it.
OTHER_GPU = """
cat > /usr/local/sbin/other-gpu <<'END'
#!/bin/sh
sed -i 's/"{old}"/"{new}"/; s/{uuid}/GPU-47110000-0000-4000-8000-000000004711/' /etc/gpunode/lab-hardware.json
END
chmod 755 /usr/local/sbin/other-gpu
echo 'DPkg::Post-Invoke {{"/usr/local/sbin/other-gpu";}};' > /etc/apt/apt.conf.d/99other-gpu
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab(f"test-upgrade-{os.getpid()}")
    folder: Path = tmp_path_factory.mktemp("upgrade")
    try:
        yield set_up(lab, folder, COUNT)
    finally:
        lab.down()


def in_service(fleet: Fleet, *names: str) -> None:
    """Each node gets jobs, and nothing of a run is left on it."""
    for name in names:
        state, reason = fleet.until(name, r"^(IDLE|ALLOCATED|COMPLETING|MIXED)[^+]*$")
        assert "DRAIN" not in state, (name, state, reason)
        assert "DOWN" not in state, (name, state, reason)
    assert {fleet.leftovers()[name] for name in names} == {""}


def no_job_was_killed(fleet: Fleet) -> int:
    """How many jobs ran; each reached its last line."""
    states = fleet.ended()
    begun, ended = fleet.begun_and_ended()
    assert states
    assert set(states.values()) == {"COMPLETED"}, states
    assert begun == ended
    return len(begun)


def test_an_upgrade_across_a_branch_by_canary_and_waves(fleet: Fleet) -> None:
    boots = fleet.boots()
    fleet.submit(300)
    for name in fleet.names:
        assert "ALLOCATED" in fleet.until(name, "ALLOCATED")[0]
    run = fleet.upgrade("--to", "595", "--waves", "3")
    print(run.shown)
    assert run.rc == 0, run.shown
    assert run.states == dict.fromkeys(fleet.names, "returned")
    assert set(fleet.loaded().values()) == {SECOND}
    assert all(fleet.boots()[name] != boots[name] for name in fleet.names)
    in_service(fleet, *fleet.names)
    for name in fleet.names:
        steps = [step for step, _ in run.times(name)]
        assert steps == [
            *("prepare", "prepared", "drain", "drained", "change", "changed"),
            *("reboot", "rebooted", "validate", "validated", "return", "returned"),
        ]
        assert f"{name}: returned, {FIRST} -> {SECOND}" in run.output
    assert "min out of service" in run.output
    assert no_job_was_killed(fleet) > len(fleet.names)
    # The log of the preparation has the downloads and the modules that were built; no node was drained before it ended.
    logs = [path.read_text() for path in sorted(fleet.runs()[-1].parent.glob("*-prepare.log"))]
    assert len(logs) == 2
    assert all("nvidia-fabricmanager" in log and f"nvidia-open/{SECOND} for" in log for log in logs)
    kept = fleet.on_all(f"ls /var/lib/gpunode/kept/{FIRST}")
    assert all("nvidia-fabricmanager_" in names and "kept.json" in names for names in kept.values())
    assert {node["wave"] for node in run.nodes.values()} == {0, 1}


def test_a_second_run_changes_nothing(fleet: Fleet) -> None:
    before = fleet.snapshots()
    run = fleet.upgrade("--to", "595")
    assert run.rc == 0, run.shown
    assert f"already at {SECOND}" in run.output
    assert fleet.snapshots() == before


def refused_in_preparation(fleet: Fleet, run: Upgraded) -> None:
    canary, *others = fleet.names
    assert run.rc == 1, run.shown
    assert run.states == dict.fromkeys(fleet.names, "planned")
    assert [step for step, _ in run.times(canary)] == ["prepare", "planned"]
    assert "nvidia-fabricmanager" in run.nodes[canary]["reason"], run.shown
    assert all(not run.times(name) for name in others)


def test_a_fabric_manager_that_lags_in_the_repository_is_found_while_the_canary_works(fleet: Fleet) -> None:
    before = fleet.snapshots()
    fleet.lab.vendor().fault("fabric-manager-lags")
    try:
        run = fleet.upgrade("--to", "610", "--waves", "1,2")
    finally:
        fleet.lab.vendor().heal()
    refused_in_preparation(fleet, run)
    # Nothing was drained, and the other nodes are as they were, byte by byte.
    after = fleet.snapshots()
    assert {name: after[name] for name in fleet.names[1:]} == {name: before[name] for name in fleet.names[1:]}
    assert set(fleet.loaded().values()) == {SECOND}
    in_service(fleet, *fleet.names)


def test_a_fabric_manager_of_the_old_release_fails_the_canary_which_rolls_back(fleet: Fleet) -> None:
    canary, *others = fleet.names
    fleet.sh(canary, OLD_MANAGER)
    before, boots = fleet.snapshots(), fleet.boots()
    fleet.submit(200)
    with fleet.drained_by_an_administrator(others[-1], TICKET):
        run = fleet.upgrade("--to", "610", "--waves", "1,2", "--validate-wait", "60")
        assert fleet.service(others[-1])[1] == TICKET
    print(run.shown)
    assert run.rc == 1, run.shown
    assert run.states == {canary: "rolled-back", **dict.fromkeys(others[:-1], "planned")}
    assert run.journal["left_out"] == {others[-1]: f"drained by others: {TICKET}"}
    assert f"left out    {others[-1]}: drained by others: {TICKET}" in run.output
    assert "fabric manager" in run.output.rpartition("run ")[0]
    assert [step for step, _ in run.times(canary)].count("change") == 2
    after = fleet.snapshots()
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    assert {fleet.boots()[name] for name in others} == {boots[name] for name in others}
    assert set(fleet.loaded().values()) == {SECOND}
    in_service(fleet, *fleet.names)
    assert no_job_was_killed(fleet) > 0
    fleet.sh(canary, "rm /etc/apt/apt.conf.d/99old-manager /usr/local/sbin/old-manager")


def test_a_drain_of_an_administrator_during_the_change_stays(fleet: Fleet) -> None:
    """The run leaves the node as the administrator drained it, and goes on once that drain is ended."""
    name = fleet.names[0]
    process = fleet.start("--to", "610", limit=name)
    fleet.wait_for(name, "change", process)
    fleet.scontrol("update", f"nodename={name}", "state=drain", f"reason='{TICKET}'")
    run = fleet.finished(process)
    print(run.shown)
    assert run.rc == 1, run.shown
    assert run.states == {name: "held"}
    assert TICKET in run.nodes[name]["reason"]
    assert fleet.service(name)[1] == TICKET
    fleet.scontrol("update", f"nodename={name}", "state=resume")
    again = fleet.upgrade("--to", "610", limit=name)
    print(again.shown)
    assert again.rc == 0, again.shown
    assert again.states == {name: "returned"}
    in_service(fleet, name)


def test_a_rollback_installs_the_packages_that_the_node_kept(fleet: Fleet) -> None:
    """The run before changed one node; the repository has lost the release that the node goes back to."""
    name, *others = fleet.names
    assert fleet.loaded() == {name: THIRD, **dict.fromkeys(others, SECOND)}
    before = fleet.snapshots()
    with fleet.repository_without(SECOND):
        offered = fleet.sh(name, "apt-get update -q >/dev/null; apt-cache madison nvidia-fabricmanager nvidia-open")
        assert THIRD in offered
        assert SECOND not in offered
        run = fleet.upgrade(verb="rollback")
    print(run.shown)
    assert run.rc == 0, run.shown
    assert run.states == {name: "returned"}
    assert f"{name}: returned, {THIRD} -> {SECOND}" in run.output
    assert set(fleet.loaded().values()) == {SECOND}
    assert "gpunode-kept" not in fleet.sh(name, "ls /etc/apt/sources.list.d")
    after = fleet.snapshots()
    assert {other: after[other] for other in others} == {other: before[other] for other in others}
    in_service(fleet, *fleet.names)


def test_the_nodes_of_a_failure_domain_go_back_together(fleet: Fleet) -> None:
    """One of two nodes of a rack has the old fabric manager: both get their release again, the third is untouched."""
    _, good, bad, other = fleet.names
    fleet.sh(bad, OLD_MANAGER)
    before = fleet.snapshots()[other]
    with fleet.one_domain("rack-1", good, bad):
        run = fleet.upgrade("--to", "610", "--validate-wait", "60", limit=f"{good},{bad},{other}")
    print(run.shown)
    fleet.sh(bad, "rm /etc/apt/apt.conf.d/99old-manager /usr/local/sbin/old-manager")
    assert run.rc == 1, run.shown
    assert "(canary) (together: rack-1)" in run.output
    assert run.states == {good: "rolled-back", bad: "rolled-back", other: "planned"}
    assert [[step for step, _ in run.times(name)].count("change") for name in (good, bad, other)] == [2, 2, 0]
    assert set(fleet.loaded().values()) == {SECOND}
    assert fleet.snapshots()[other] == before
    in_service(fleet, *fleet.names)


def test_a_node_that_cannot_be_measured_stays_as_it_is(fleet: Fleet) -> None:
    """These nodes have no engine for containers."""
    name = fleet.names[-1]
    before = fleet.snapshots()[name]
    run = fleet.upgrade("--to", "610", "--measure", limit=name)
    print(run.shown)
    assert run.rc == 1, run.shown
    assert f"measured    before and after the change, in {IMAGE}" in run.output
    assert run.states == {name: "planned"}
    assert [step for step, _ in run.times(name)] == ["prepare", "prepared", "drain", "drained", "planned"]
    assert "nothing was measured before the change: no Docker engine on the node" in run.nodes[name]["reason"]
    assert fleet.snapshots()[name] == before
    in_service(fleet, name)


def test_a_node_with_an_exchanged_gpu_is_held_until_that_is_accepted(fleet: Fleet) -> None:
    name = fleet.names[-1]
    gpu = json.loads(fleet.sh(name, "cat /etc/gpunode/lab-hardware.json"))["gpus"][3]
    fleet.sh(name, OTHER_GPU.format(old=gpu["serial"], new="1652921004711", uuid=gpu["uuid"]))
    run = fleet.upgrade("--to", "610", "--no-rollback", "--validate-wait", "60", limit=name)
    print(run.shown)
    fleet.sh(name, "rm /etc/apt/apt.conf.d/99other-gpu /usr/local/sbin/other-gpu")
    assert run.rc == 1, run.shown
    assert run.states == {name: "held"}
    assert f"gpu3: GPU replaced: NVIDIA H100 80GB HBM3, serial {gpu['serial']}, " in run.output
    assert "serial 1652921004711, " in run.output
    state, reason = fleet.service(name)
    assert "DRAIN" in state
    assert reason == run.nodes[name]["token"]
    again = fleet.upgrade("--to", "610", "--no-rollback", "--accept", name, limit=name)
    print(again.shown)
    assert again.rc == 0, again.shown
    assert again.states == {name: "returned"}
    assert fleet.loaded()[name] == THIRD
    in_service(fleet, name)
