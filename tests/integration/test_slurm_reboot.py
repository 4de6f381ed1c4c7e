"""A reboot that ``gpunode upgrade`` requests of Slurm: slurmctld and slurmd 22.05, and the role's RebootProgram.

The program is the role's own with a record in place of ``systemctl reboot``; a boot is slurmd killed and started with
``-b``, which makes it report a boot.
"""

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

import pytest
from test_slurm import CONFIG, ROOT, Slurm, daemons, ended, free_ports, pytestmark, started  # noqa: F401 (the marks)

from gpunode.change.adapters import SlurmScheduler
from gpunode.change.scheduler import Availability, SchedulerError
from gpunode.fleet.process import Completed

PROGRAM = ROOT / "roles" / "slurm_node" / "files" / "gpunode-reboot"
DRAIN_ID = "gpunode-upgrade-0123456789ab"
TICKET = "RMA ticket 4711"
NOT_HERE = ("Prolog=", "HealthCheck", "ReturnToService=")


class Cluster(Slurm):
    """A node that reboots, and the adapter."""

    slurmd: subprocess.Popen[bytes]

    def scontrol(self, argv: Sequence[str], _: str | None) -> Completed:
        done = self.call(*argv)
        return Completed(done.returncode, done.stdout, done.stderr)

    def configure(self, program: str, returns: int, resume_s: int) -> None:
        file = self.folder / "slurm.conf"
        lines = [line for line in file.read_text().splitlines() if not line.startswith(("Reboot", "Return", "Resume"))]
        lines += [f"ReturnToService={returns}", f"ResumeTimeout={resume_s}"]
        lines += [f"RebootProgram={program}"] if program else []
        file.write_text("".join(f"{line}\n" for line in lines))

    def boot(self, *words: str) -> None:
        """Start slurmd again; with ``-b`` as after a boot."""
        ended(self.slurmd)
        # slurmctld does not notice a boot in the second of slurmd's last answer.
        time.sleep(2 if words else 0)
        object.__setattr__(
            self,
            "slurmd",
            started(self.folder, "slurmd", "-D", *words, "-f", f"{self.folder}/slurm.conf", "-N", self.host),
        )

    @property
    def reboots(self) -> list[str]:
        file = self.folder / "reboots"
        return file.read_text().splitlines() if file.exists() else []

    def permit(self, token: str) -> None:
        """Write what the run writes on the node before it asks."""
        (self.folder / "run" / "reboot").write_text(token)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    for name in ("state", "spool", "run"):
        (folder / name).mkdir()
    slurm = Cluster(folder, host)
    lines = CONFIG.format(host=host, ports=free_ports(3), folder=folder).splitlines()
    (folder / "slurm.conf").write_text("".join(f"{line}\n" for line in lines if not line.startswith(NOT_HERE)))
    slurm.configure(f"{folder}/reboot", 1, 300)
    text = PROGRAM.read_text()
    for old, new in (
        ("exec systemctl reboot", f"echo $(id -u) >> {folder}/reboots"),
        ("/var/lib/gpunode/change.json", f"{folder}/change.json"),
        ("/usr/local/bin/gpunode", "/bin/true"),
        ("/run/gpunode", f"{folder}/run"),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "reboot").write_text(text)
    (folder / "reboot").chmod(0o755)
    (folder / "change.json").write_text(json.dumps({"since": "", "token": DRAIN_ID, "owner": "root@admin", "beat": 1}))
    with daemons(slurm) as slurmd:
        object.__setattr__(slurm, "slurmd", slurmd)
        try:
            yield slurm
        finally:
            ended(slurm.slurmd)


@pytest.fixture
def slurm(cluster: Cluster) -> Iterator[SlurmScheduler]:
    """The adapter, with a drained node."""
    adapter = SlurmScheduler(cluster.scontrol)
    assert cluster.until("IDLE") == ("IDLE", "")
    end = time.monotonic() + 60
    while time.monotonic() < end and "NOT_RESPONDING" in cluster.call("scontrol", "show", "node", cluster.host).stdout:
        time.sleep(0.2)
    (cluster.folder / "reboots").unlink(missing_ok=True)
    cluster.permit(DRAIN_ID)
    adapter.drain(cluster.host, DRAIN_ID)
    yield adapter
    cluster.call("scontrol", "update", f"nodename={cluster.host}", "state=resume")


def waited(cluster: Cluster, number: int) -> list[str]:
    """The calls of RebootProgram, once there are so many."""
    end = time.monotonic() + 60
    while time.monotonic() < end and len(cluster.reboots) < number:
        time.sleep(0.2)
    return cluster.reboots


def test_a_node_that_slurm_reboots_is_out_of_service_until_its_own_return(
    cluster: Cluster, slurm: SlurmScheduler
) -> None:
    """An administrator silenced the drains of checks."""
    host = cluster.host
    (cluster.folder / "run" / "maintenance").touch()
    for turn in (1, 2):  # a way back reboots it again
        assert not slurm.rebooting(host, DRAIN_ID)
        for _ in range(2):  # the same command goes on after a kill
            assert slurm.reboot(host, DRAIN_ID) == ""
        assert waited(cluster, turn) == ["0"] * turn
        assert cluster.until("DOWN+DRAIN+REBOOT_ISSUED") == ("DOWN+DRAIN+REBOOT_ISSUED", f"{DRAIN_ID} : reboot issued")
        assert slurm.state(host, DRAIN_ID).service is Availability.OURS
        assert "REBOOT_ISSUED" in slurm.busy(host, DRAIN_ID)
        cluster.boot("-b")
        assert cluster.until("DOWN") == ("DOWN", f"{DRAIN_ID} : reboot issued : reboot complete")
        assert slurm.rebooting(host, DRAIN_ID)
        assert slurm.busy(host, DRAIN_ID) == ""
        cluster.boot()
        time.sleep(3)
        assert slurm.state(host, DRAIN_ID).service is Availability.OURS
        for _ in range(2):
            slurm.drain(host, DRAIN_ID)
        assert cluster.until("DOWN+DRAIN") == ("DOWN+DRAIN", DRAIN_ID)
    assert cluster.reboots == ["0", "0"]
    (cluster.folder / "run" / "maintenance").unlink()
    slurm.resume(host, DRAIN_ID)
    assert cluster.until("IDLE") == ("IDLE", "")


def test_a_reason_of_others_that_appears_during_the_reboot_stays(cluster: Cluster, slurm: SlurmScheduler) -> None:
    assert slurm.reboot(cluster.host, DRAIN_ID) == ""
    assert cluster.until("DOWN+DRAIN+REBOOT_ISSUED")[0] == "DOWN+DRAIN+REBOOT_ISSUED"
    cluster.call("scontrol", "update", f"nodename={cluster.host}", f"reason={TICKET}")
    cluster.boot("-b")
    assert cluster.until("DOWN") == ("DOWN", f"{TICKET} : reboot complete")
    assert slurm.state(cluster.host, DRAIN_ID).service is Availability.FOREIGN
    for act in (slurm.drain, slurm.reboot):
        with pytest.raises(SchedulerError, match=TICKET):
            act(cluster.host, DRAIN_ID)
    slurm.resume(cluster.host, DRAIN_ID)
    assert cluster.state() == ("DOWN", f"{TICKET} : reboot complete")


@pytest.mark.parametrize("by_the_run", [False, True])
def test_a_cancelled_reboot_leaves_the_drain(cluster: Cluster, slurm: SlurmScheduler, by_the_run: bool) -> None:
    """By an administrator, or by the run at its deadline.

    A job keeps the request waiting; the run asks for a reboot of idle nodes alone.
    """
    slurm.resume(cluster.host, DRAIN_ID)
    assert cluster.until("IDLE")[0] == "IDLE"
    cluster.call("sbatch", f"--output={cluster.folder}/out", "--wrap", "sleep 300")
    assert cluster.until("ALLOCATED")[0] == "ALLOCATED"
    assert slurm.reboot(cluster.host, DRAIN_ID) == ""
    assert cluster.state() == ("ALLOCATED+DRAIN+REBOOT_REQUESTED", DRAIN_ID)
    assert slurm.rebooting(cluster.host, DRAIN_ID)
    assert slurm.cancel_reboot(cluster.host, "of another run")
    assert slurm.rebooting(cluster.host, DRAIN_ID)
    if by_the_run:
        assert slurm.cancel_reboot(cluster.host, DRAIN_ID) == ""
    else:
        assert cluster.call("scontrol", "cancel_reboot", cluster.host).returncode == 0
    assert not slurm.rebooting(cluster.host, DRAIN_ID)
    assert cluster.state() == ("ALLOCATED+DRAIN", DRAIN_ID)
    cluster.call("scancel", "--user=root")
    assert cluster.until("IDLE+DRAIN") == ("IDLE+DRAIN", DRAIN_ID)
    assert cluster.reboots == []


def test_what_slurm_does_not_take_is_left_to_ansible(cluster: Cluster, slurm: SlurmScheduler) -> None:
    def denied(argv: Sequence[str], stdin: str | None) -> Completed:
        user = ["setpriv", "--reuid=65534", "--clear-groups"] if argv[1] == "reboot" else []
        return cluster.scontrol([*user, *argv], stdin)

    # Nobody's scontrol reads the configuration and reaches munged.
    for folder in (cluster.folder, *cluster.folder.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    assert "Permission denied" in SlurmScheduler(denied).reboot(cluster.host, DRAIN_ID)
    assert cluster.state() == ("IDLE+DRAIN", DRAIN_ID)
    for program, returns, why in (("", 1, "no RebootProgram"), (f"{cluster.folder}/reboot", 2, "ReturnToService=2")):
        cluster.configure(program, returns, 300)
        assert cluster.call("scontrol", "reconfigure").returncode == 0
        assert why in slurm.reboot(cluster.host, DRAIN_ID)
        assert not slurm.rebooting(cluster.host, DRAIN_ID)
    assert cluster.reboots == []


def test_with_return_to_service_2_a_second_registration_would_end_the_drain(
    cluster: Cluster, slurm: SlurmScheduler
) -> None:
    """Why the adapter leaves such a cluster's reboots to Ansible."""
    cluster.configure(f"{cluster.folder}/reboot", 2, 300)
    assert cluster.call("scontrol", "reconfigure").returncode == 0
    assert cluster.call("scontrol", "reboot", "ASAP", "nextstate=DOWN", cluster.host).returncode == 0
    assert cluster.until("DOWN+DRAIN+REBOOT_ISSUED")[0] == "DOWN+DRAIN+REBOOT_ISSUED"
    cluster.boot("-b")
    assert cluster.until("DOWN")[0] == "DOWN"
    cluster.boot()
    assert cluster.until("IDLE") == ("IDLE", "")
    assert slurm.state(cluster.host, DRAIN_ID).service is Availability.IN_SERVICE


def test_a_node_that_boots_after_resume_timeout_stays_out_of_service(cluster: Cluster, slurm: SlurmScheduler) -> None:
    cluster.configure(f"{cluster.folder}/reboot", 1, 5)
    assert cluster.call("scontrol", "reconfigure").returncode == 0
    cluster.permit("of another run")
    assert slurm.reboot(cluster.host, DRAIN_ID) == ""
    assert cluster.until("DOWN", 120) == ("DOWN", f"{DRAIN_ID} : reboot issued : reboot timed out")
    # The role's program refused: the node's lease has another token.
    assert cluster.reboots == []
    assert slurm.cancel_reboot(cluster.host, DRAIN_ID) == "Slurm: DOWN"
    assert slurm.rebooting(cluster.host, DRAIN_ID)
    assert slurm.state(cluster.host, DRAIN_ID).service is Availability.OURS
    cluster.boot("-b")
    time.sleep(5)
    assert slurm.state(cluster.host, DRAIN_ID).service is Availability.OURS
    slurm.drain(cluster.host, DRAIN_ID)
    cluster.boot()
    time.sleep(3)
    assert cluster.until("DOWN+DRAIN") == ("DOWN+DRAIN", DRAIN_ID)
    slurm.resume(cluster.host, DRAIN_ID)
    assert cluster.until("IDLE") == ("IDLE", "")
