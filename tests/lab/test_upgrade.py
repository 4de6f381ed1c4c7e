"""``gpunode upgrade`` on lab nodes with Slurm of the distribution: canary, waves, a job, a foreign drain, a bad canary.

The tests of this file share three nodes and run in their order: building the driver takes minutes.
"""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playbook_runs import Site
from programs import beside_python, run_program

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(3000)]

FIRST, SECOND = "580.95.05", "580.178.04"
ROLES = '{"gpunode_roles": ["nvidia_repository", "nvidia_driver"]}'
CONFIG = """
ClusterName=lab
SlurmctldHost={controller}
AuthType=auth/munge
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=1
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=60 State=UP
"""


@dataclass(frozen=True)
class Fleet:
    """The nodes, and gpunode with a scontrol that asks their controller."""

    lab: Lab
    folder: Path

    @property
    def nodes(self) -> list[LabNode]:
        return list(self.lab.nodes())

    def sh(self, node: LabNode, script: str) -> str:
        done = node.run(["bash", "-euc", script], timeout_s=600)
        assert done.returncode == 0, f"{node.name}: {script}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def upgrade(self, *words: str) -> "subprocess.CompletedProcess[str]":
        argv = [beside_python("gpunode"), "upgrade", "-i", self.lab.inventory_path, "--scheduler", "slurm", "-e", ROLES]
        environment = {
            **os.environ,
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        return run_program([*argv, *words], env=environment, limit_s=1500)

    def slurm(self, node: LabNode) -> tuple[str, str]:
        """State and reason of a node."""
        lines = self.sh(self.nodes[0], f"scontrol show node {node.name}").splitlines()
        found = {key: value for line in lines for key, _, value in [line.strip().partition("=")]}
        return found["State"].split()[0], found.get("Reason", "").partition(" [")[0]

    def driver(self, node: LabNode) -> str:
        return self.sh(node, "cat /sys/module/nvidia/version").strip()

    def journal(self) -> dict[str, dict[str, object]]:
        """The nodes of the latest run."""
        file = max((self.folder / "state" / "gpunode" / "upgrades").glob("*/journal.json"))
        found: dict[str, dict[str, object]] = json.loads(file.read_text())["nodes"]
        return found


def install_slurm(fleet: Fleet) -> None:
    nodes = fleet.nodes
    names = ",".join(node.name for node in nodes)
    addresses = {node.name: fleet.sh(node, "hostname -I").split()[0] for node in nodes}
    lines = "\n".join(f"NodeName={name} NodeAddr={address} CPUs=1 State=UNKNOWN" for name, address in addresses.items())
    text = CONFIG.format(controller=f"{nodes[0].name}({addresses[nodes[0].name]})", nodes=lines, names=names)
    for node in nodes:
        fleet.sh(node, "apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "
                 "munge slurmctld slurmd slurm-client >/dev/null")  # fmt: skip
        fleet.sh(node, "printf '%s' only-for-this-lab-{1..9} > /etc/munge/munge.key; chmod 400 /etc/munge/munge.key; "
                 "chown munge: /etc/munge/munge.key")  # fmt: skip
        fleet.sh(node, f"cat > /etc/slurm/slurm.conf <<'E'\n{text}\nE\nmkdir -p /var/spool/slurmctld /var/spool/slurmd")
    fleet.sh(nodes[0], "systemctl restart munge slurmctld")
    for node in nodes:
        fleet.sh(node, "systemctl restart munge slurmd; systemctl enable munge slurmd 2>/dev/null")
    fleet.sh(nodes[0], "systemctl enable slurmctld 2>/dev/null")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab(f"test-upgrade-{os.getpid()}")
    folder = tmp_path_factory.mktemp("upgrade")
    try:
        lab.up(3, "debian-12", "t4-1")
        site = Site(lab, "-e", ROLES)
        run = site.play("-e", f"nvidia_driver_version={FIRST}")
        assert run.rc == 0, run.output[-4000:]
        fleet = Fleet(lab, folder)
        install_slurm(fleet)
        (folder / "bin").mkdir()
        config = lab.inventory_path.parent / "ssh_config"
        program = folder / "bin" / "scontrol"
        quoted = "$(printf '%q ' \"$@\")"
        program.write_text(f'#!/bin/bash\nexec ssh -n -F {config} {fleet.nodes[0].name} "sudo scontrol {quoted}"\n')
        program.chmod(0o755)
        yield fleet
    finally:
        lab.down()


def test_the_plan_changes_nothing(fleet: Fleet) -> None:
    done = fleet.upgrade("--to", SECOND, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"driver {FIRST} -> {SECOND}" in done.stdout
    assert all(fleet.driver(node) == FIRST for node in fleet.nodes)


def test_canary_and_wave_return_and_a_foreign_drain_stays(fleet: Fleet) -> None:
    one, two, three = fleet.nodes
    fleet.sh(one, f"scontrol update nodename={three.name} state=drain reason='RMA ticket 4711'")
    fleet.sh(one, f"cd /tmp && sbatch -w {two.name} --output=/tmp/job.out --wrap 'sleep 60; echo the job ended'")
    before = fleet.sh(three, "dpkg-query -W")
    done = fleet.upgrade("--to", SECOND, "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout + done.stderr)
    assert [fleet.driver(node) for node in (one, two, three)] == [SECOND, SECOND, FIRST]
    assert fleet.slurm(three) == ("IDLE+DRAIN", "RMA ticket 4711")
    assert f"{three.name}: drained by others: RMA ticket 4711" in done.stdout
    assert fleet.sh(three, "dpkg-query -W") == before
    assert fleet.sh(two, "cat /tmp/job.out").strip() == "the job ended"
    assert [fleet.slurm(node) for node in (one, two)] == [("IDLE", ""), ("IDLE", "")]
    for node in (one, two):
        assert fleet.sh(node, "ls /var/lib/gpunode").count(".json") == 0
    again = fleet.upgrade("--to", SECOND)
    assert again.returncode == 0
    assert f"already at {SECOND}" in again.stdout


def test_a_canary_that_is_worse_is_held_and_the_others_are_untouched(fleet: Fleet) -> None:
    one, two, three = fleet.nodes
    fleet.sh(one, f"scontrol update nodename={three.name} state=resume")
    before = [fleet.sh(node, "dpkg-query -W") for node in (two, three)]

    def break_canary() -> None:
        end = time.monotonic() + 1200
        while time.monotonic() < end:
            try:
                if fleet.journal()[one.name]["state"] == "drained":
                    one.fault("pcie-narrow", "gpu0", width=4)
                    return
            except (ValueError, OSError, KeyError):
                pass
            time.sleep(0.5)

    breaking = threading.Thread(target=break_canary)
    breaking.start()
    done = fleet.upgrade("--to", "580.95.05", "--limit", f"{one.name},{two.name}", "-v")
    breaking.join()
    print(done.stdout + done.stderr)
    assert done.returncode == 1, done.stdout + done.stderr
    assert fleet.journal()[one.name]["state"] == "held"
    assert "DRAIN" in fleet.slurm(one)[0]
    assert fleet.slurm(one)[1].startswith("gpunode-upgrade-")
    assert [fleet.sh(node, "dpkg-query -W") for node in (two, three)] == before
    # Nobody else changes or returns it meanwhile.
    site = Site(fleet.lab, "-e", ROLES)
    refused = site.play("--limit", one.name)
    assert refused.rc != 0
    assert "gpunode upgrade of" in refused.output
    one.heal("pcie-narrow", "gpu0")
    again = fleet.upgrade("--to", "580.95.05", "--limit", f"{one.name},{two.name}", "-v", "--max-failed", "0")
    print(again.stdout + again.stderr)
    assert fleet.journal()[one.name]["state"] == "rolled-back"
    assert fleet.driver(one) == SECOND
    assert fleet.slurm(one) == ("IDLE", "")
