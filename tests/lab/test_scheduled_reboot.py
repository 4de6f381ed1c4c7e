"""The action scheduled_reboot with real Slurm and nodes that boot: by RebootProgram, refused by it, and without it.

A container's slurmd reports the boot of this machine, so that it runs with ``-b`` here: each start of it is a boot.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from slurm_fleet import Fleet, install_slurm

from gpunode.change.adapters import SlurmScheduler
from gpunode.change.scheduler import Availability
from gpunode.content import ansible_environment, ansible_program
from gpunode.fleet.process import Completed
from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1200)]
CONCERNS = (
    "plugins/action/scheduled_reboot",
    "gpunode/change/scheduler",
    "gpunode/change/adapters",
    "roles/slurm_node/files/",
)

PROGRAM = Path(__file__).parents[2] / "roles" / "slurm_node" / "files" / "gpunode-reboot"
DRAIN_ID = "gpunode-upgrade-0123456789ab"
BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    lab = Lab(f"test-scheduled-reboot-{os.getpid()}")
    try:
        lab.up(2, "debian-12")
        slurm_fleet = Fleet(lab, tmp_path_factory.mktemp("fleet"), [[node.name for node in lab.nodes()][-1]])
        install_slurm(slurm_fleet, RebootProgram="/usr/local/sbin/gpunode-reboot", ResumeTimeout="300")
        lease = json.dumps({"since": "", "token": DRAIN_ID, "owner": "root@admin", "beat": 1})
        slurm_fleet.on_all(
            f"cat > /usr/local/sbin/gpunode-reboot <<'END'\n{PROGRAM.read_text()}END\n"
            "chmod 755 /usr/local/sbin/gpunode-reboot; echo GPUNODE=/bin/true > /etc/default/gpunode-prolog\n"
            f"mkdir -p /var/lib/gpunode; echo '{lease}' > /var/lib/gpunode/change.json\n"
            # A boot in the second of slurmd's last answer would not be noticed.
            "echo 'SLURMD_OPTIONS=-b' > /etc/default/slurmd; systemctl stop slurmd; sleep 2; systemctl start slurmd"
        )
        (name,) = slurm_fleet.names
        assert slurm_fleet.until(name, "DOWN")[1] == "Node unexpectedly rebooted"
        slurm_fleet.scontrol("update", f"nodename={name}", "state=resume")
        yield slurm_fleet
    finally:
        lab.down()


@pytest.fixture
def slurm(fleet: Fleet) -> Iterator[SlurmScheduler]:
    """The adapter, with a drained node."""

    def scontrol(argv: Sequence[str], _: str | None) -> Completed:
        done = subprocess.run(argv, env=fleet.environment, check=False, timeout=60, capture_output=True, text=True)
        return Completed(done.returncode, done.stdout, done.stderr)

    (name,) = fleet.names
    adapter = SlurmScheduler(lambda argv, stdin: scontrol([str(fleet.folder / "bin" / argv[0]), *argv[1:]], stdin))
    assert fleet.until(name, "^IDLE$")[0] == "IDLE"
    adapter.drain(name, DRAIN_ID)
    yield adapter
    adapter.drain(name, DRAIN_ID)
    adapter.resume(name, DRAIN_ID)
    assert fleet.until(name, "^IDLE$")[0] == "IDLE"


def rebooted(fleet: Fleet, reboot_timeout: int) -> tuple[int, str, bool]:
    """Run the action; its exit code and output, and whether the node has another boot id."""
    before = fleet.on_all(BOOT_ID)
    arguments = {"scheduler": "slurm", "token": DRAIN_ID, "reboot_timeout": reboot_timeout}
    task = {"name": "Reboot", "gpunode.node.scheduled_reboot": arguments, "become": True}
    play = fleet.folder / "play.yml"
    play.write_text(json.dumps([{"hosts": fleet.names, "gather_facts": False, "tasks": [task]}]))
    done = subprocess.run(
        [ansible_program("ansible-playbook"), "-i", str(fleet.lab.inventory_path), str(play)],
        env={**ansible_environment(), **fleet.environment},
        check=False,
        timeout=400,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr, fleet.on_all(BOOT_ID) != before


def test_slurm_reboots_the_node_and_keeps_it_out_of_service(fleet: Fleet, slurm: SlurmScheduler) -> None:
    (name,) = fleet.names
    code, output, booted = rebooted(fleet, 300)
    assert (code, booted) == (0, True), output
    assert "over the connection" not in output
    assert fleet.until(name, "^DOWN$") == ("DOWN", f"{DRAIN_ID} : reboot issued : reboot complete")
    assert slurm.state(name, DRAIN_ID).service is Availability.OURS
    assert fleet.on_all("ls /run/gpunode/reboot 2>/dev/null || true")[name] == ""


def test_a_reboot_that_the_nodes_program_refuses_has_a_deadline(fleet: Fleet, slurm: SlurmScheduler) -> None:
    """The lease is of another run."""
    (name,) = fleet.names
    fleet.on_all("sed -i s/0123456789ab/ba9876543210/ /var/lib/gpunode/change.json")
    code, output, booted = rebooted(fleet, 20)
    assert (code, booted) == (2, False), output
    assert "requested of the scheduler" in output
    assert "REBOOT_ISSUED" in slurm.busy(name, DRAIN_ID)
    fleet.on_all("rm /var/lib/gpunode/change.json; systemctl restart slurmd")
    assert fleet.until(name, "^DOWN$")[0] == "DOWN"


def test_without_reboot_program_the_node_is_rebooted_over_ssh(fleet: Fleet, slurm: SlurmScheduler) -> None:
    (name,) = fleet.names
    fleet.sh(fleet.controller, "sed -i /^RebootProgram/d /etc/slurm/slurm.conf; scontrol reconfigure")
    code, output, booted = rebooted(fleet, 300)
    assert (code, booted) == (0, True), output
    assert f"{name}: rebooted over the connection: Slurm has no RebootProgram" in output
    assert slurm.state(name, DRAIN_ID).service is Availability.OURS
