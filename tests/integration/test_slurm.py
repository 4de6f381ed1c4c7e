"""Slurm's own slurmd calls the role's gpunode-prolog: a job runs, a fault drains the node, the node returns.

slurmctld, slurmd and munged of the distribution run as root in a folder of the test; the node's answers are a bundle
of a simulated node, once healthy and once with a fault, in the place of the probe's.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "contract"))

from bundles import apply, hgx, stdout
from programs import beside_python

from gpunode.change.adapters import SlurmScheduler
from gpunode.change.scheduler import Availability, SchedulerError
from gpunode.fleet.process import Completed

PROGRAMS = ("slurmctld", "slurmd", "munged", "scontrol", "srun")
MISSING = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurmd slurmctld munge"),
    pytest.mark.timeout(600),
    pytest.mark.waiting,
]

ROOT = Path(__file__).parents[2]
PROLOG = ROOT / "roles" / "slurm_node" / "files" / "gpunode-prolog"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
MessageTimeout=60
ReturnToService=1
Prolog={folder}/prolog
HealthCheckProgram={folder}/health
HealthCheckInterval=5
HealthCheckNodeState=ANY
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
NodeName={host}x[1-7] NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=10 State=UP
PartitionName=paper Nodes={host}x[1-7] MaxTime=10 State=UP
"""
# gpunode itself; the probe alone is another: it prints the bundle that the test put there.
PROGRAM = """#!{python} -I
import pathlib
from gpunode.cli import main, on_node
on_node.SCRIPT = pathlib.Path({script!r})
main()
"""


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@dataclass(frozen=True)
class Slurm:
    """A cluster of one node."""

    folder: Path
    host: str

    def call(self, *argv: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}
        return subprocess.run(
            argv, env=environment, check=False, timeout=timeout_s, capture_output=True, text=True, cwd="/"
        )

    def state(self) -> tuple[str, str]:
        """The node's state and reason."""
        output = self.call("scontrol", "show", "node", self.host).stdout
        reason = re.search(r"^ *Reason=(.*?)(?: \[[^\]]*\])?$", output, re.MULTILINE)
        # After a resume slurmctld first asks slurmd whether it is there.
        state = (re.findall(r"State=(\S+)", output) or ["none"])[0].replace("+NOT_RESPONDING", "")
        return state, reason[1] if reason else ""

    def until(self, expected: str, seconds: float = 90) -> tuple[str, str]:
        """Wait for exactly this state; what it is at the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.state()[0] != expected:
            time.sleep(0.5)
        return self.state()

    def until_reason(self, start: str, seconds: float = 90) -> str:
        """Wait for a reason that begins so; what it is at the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.state()[1].startswith(start):
            time.sleep(0.5)
        return self.state()[1]

    def checks_health(self, enabled: bool) -> None:
        """Let slurmd's health checks do their work, or nothing."""
        mark = self.folder / "no-health"
        if enabled:
            mark.unlink()
            return
        mark.touch()
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a check that runs has ended

    def node_is(self, bundle: str) -> None:
        """From now on the probe prints this bundle."""
        (self.folder / "now.part").write_bytes((self.folder / bundle).read_bytes())
        (self.folder / "now.part").replace(self.folder / "now.json")

    def line(self) -> str:
        words = ("validate", "--on-node", "--budget", "60s", "--format", "slurm")
        return self.call(str(self.folder / "gpunode"), *words).stdout.strip()


def with_fault() -> dict[str, object]:
    """Eight H100, one with uncorrectable errors in its memory."""
    document = hgx()
    xml = document["commands"]["nvidia-smi-xml"]["stdout"]
    old = xml[xml.index("<volatile>") : xml.index("</volatile>")]
    new = old.replace("<dram_uncorrectable>0<", "<dram_uncorrectable>2<")
    assert old != new
    return apply(document, [stdout("nvidia-smi-xml", old, new)])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder, host = tmp_path_factory.mktemp("slurm"), socket.gethostname().partition(".")[0]
    # munged refuses a socket below a folder that others could write to, or cannot enter.
    for name in ("state", "spool", "run"):
        (folder / name).mkdir()
    config = CONFIG.format(host=host, ports=free_ports(3), folder=folder)
    (folder / "slurm.conf").write_text(config, encoding="ascii")
    (folder / "healthy.json").write_text(json.dumps(hgx()), encoding="utf-8")
    (folder / "faulty.json").write_text(json.dumps(with_fault()), encoding="utf-8")
    script = folder / "script.py"
    script.write_text(f"print(open({str(folder / 'now.json')!r}).read())\n", encoding="utf-8")
    program = folder / "gpunode"
    program.write_text(PROGRAM.format(python=sys.executable, script=str(script)), encoding="utf-8")
    settings = f"GPUNODE={program} GPUNODE_BUDGET=60s GPUNODE_RUN={folder}/run SLURM_CONF={folder}/slurm.conf"
    health = f"exec flock {folder}/lock sh -c '[ -e {folder}/no-health ] || exec {folder}/prolog'"
    for name, command in (("prolog", f"exec env {settings} {PROLOG}"), ("health", health)):
        (folder / name).write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    program.chmod(0o755)
    cluster = Slurm(folder, host)
    cluster.node_is("healthy.json")
    with daemons(cluster):
        yield cluster


def started(folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    """Start a daemon; its output is beside its configuration."""
    with (folder / f"{argv[0]}.out").open("ab") as out:
        return subprocess.Popen(
            argv, env={"PATH": PATH}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a daemon."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def daemons(cluster: Slurm) -> Iterator[subprocess.Popen[bytes]]:
    """Run munged, slurmctld and slurmd; yield slurmd once the node is idle."""
    folder, host = cluster.folder, cluster.host
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in ("pid-file", "log-file", "seed-file")]
    conf = str(folder / "slurm.conf")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for argv in (
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files],
            ["slurmctld", "-D", "-f", conf],
            ["slurmd", "-D", "-f", conf, "-N", host],
        ):
            running.append(started(folder, *argv))
            time.sleep(1)
        state = cluster.until("IDLE")
        logs = "".join(path.read_text(errors="replace")[-800:] for path in folder.glob("*.out"))
        assert state[0] == "IDLE", f"{state}: {logs}"
        yield running[-1]
    finally:
        for process in reversed(running):
            ended(process)


def test_a_job_runs_on_a_node_that_is_well(slurm: Slurm) -> None:
    assert slurm.line().startswith("none: ")
    done = slurm.call("srun", "-N1", "hostname")
    assert (done.returncode, done.stdout.strip()) == (0, socket.gethostname()), done.stderr


PROBE_ALONE = f"{sys.executable} -I - < {{folder}}/script.py > {{folder}}/bundles/$(hostname).json"


@pytest.mark.parametrize(
    "command",
    [
        ("srun", "-N1", "{folder}/gpunode", "collect", "--on-node", "--save", "{folder}/bundles"),
        ("srun", "-N1", "sh", "-c", PROBE_ALONE),
        (
            "sbatch",
            "--wait",
            "--output={folder}/job.out",
            "--wrap",
            "{folder}/gpunode collect --on-node --save {folder}/bundles",
        ),
    ],
    ids=["srun collect", "srun probe", "sbatch collect"],
)
def test_a_job_of_slurm_collects_a_bundle_that_is_judged_elsewhere(slurm: Slurm, command: tuple[str, ...]) -> None:
    folder = slurm.folder / "bundles"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    done = slurm.call(*(word.format(folder=slurm.folder) for word in command), timeout_s=240)
    assert done.returncode == 0, done.stderr
    (bundle,) = folder.iterdir()
    assert json.loads(bundle.read_bytes())["commands"]["nvidia-smi-xml"]["stdout"]
    report = subprocess.run(
        [beside_python("gpunode"), "validate", "--replay", str(folder), "--no-history", "--format", "json"],
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )
    (node,) = json.loads(report.stdout)["nodes"]
    assert {finding["status"] for finding in node["findings"] if finding["check"] == "gpu.count"} == {"pass"}


def test_a_fault_drains_the_node_with_its_reason_and_the_next_job_does_not_run(slurm: Slurm) -> None:
    slurm.node_is("faulty.json")
    line = slurm.line()
    assert line.startswith("drain: gpu.ecc-uncorrected gpu0: 2 uncorrectable errors")
    done = slurm.call("srun", "-N1", "--immediate=40", "hostname")
    assert done.returncode != 0
    assert done.stdout == ""
    assert slurm.until_reason("gpunode: ") == f"gpunode: {line.removeprefix('drain: ')}"
    assert slurm.state()[0] == "IDLE+DRAIN"


def test_the_prolog_alone_asks_the_controller_nothing_and_the_health_check_gives_the_reason(slurm: Slurm) -> None:
    """slurmd drains a node on which a prolog fails, with a reason of its own."""
    slurm.checks_health(False)
    slurm.node_is("healthy.json")
    slurm.call(str(slurm.folder / "prolog"))
    assert slurm.until("IDLE") == ("IDLE", "")
    slurm.node_is("faulty.json")
    done = slurm.call("srun", "-N1", "--immediate=40", "hostname")
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert slurm.until("IDLE+DRAIN") == ("IDLE+DRAIN", "Prolog error")
    slurm.checks_health(True)
    assert slurm.until_reason("gpunode: gpu.ecc-uncorrected gpu0").startswith(
        "gpunode: gpu.ecc-uncorrected gpu0: 2 unc"
    )


def test_the_node_returns_once_it_is_well(slurm: Slurm) -> None:
    slurm.node_is("healthy.json")
    assert slurm.until("IDLE") == ("IDLE", "")
    assert slurm.call("srun", "-N1", "hostname").stdout.strip() == socket.gethostname()


@pytest.mark.parametrize("reason", ["disk swap", "Prolog error", "RMA ticket 4711 gpunode: gpu3"])
def test_a_drain_of_somebody_else_is_neither_ended_nor_renamed(slurm: Slurm, reason: str) -> None:
    slurm.call("scontrol", "update", f"nodename={slurm.host}", "state=drain", f"reason={reason}")
    for bundle in ("faulty.json", "healthy.json"):
        slurm.node_is(bundle)
        slurm.call(str(slurm.folder / "prolog"))
        assert slurm.state() == ("IDLE+DRAIN", reason)
    slurm.call("scontrol", "update", f"nodename={slurm.host}", "state=resume")


def test_during_maintenance_nothing_is_drained_and_nothing_resumed(slurm: Slurm) -> None:
    mark = slurm.folder / "run" / "maintenance"
    mark.touch()
    slurm.node_is("faulty.json")
    done = slurm.call(str(slurm.folder / "prolog"))
    assert (done.returncode, slurm.state()) == (1, ("IDLE", ""))
    slurm.call("scontrol", "update", f"nodename={slurm.host}", "state=drain", "reason=gpunode: before")
    slurm.node_is("healthy.json")
    slurm.call(str(slurm.folder / "prolog"))
    assert slurm.state() == ("IDLE+DRAIN", "gpunode: before")
    mark.unlink()
    assert slurm.until("IDLE") == ("IDLE", "")


def test_health_checks_drain_no_more_than_their_share_of_the_cluster(slurm: Slurm) -> None:
    """The other seven nodes of the cluster exist on paper; two of them are drained by gpunode already."""
    others = [f"{slurm.host}x{number}" for number in (1, 2)]
    for name in others:
        slurm.call("scontrol", "update", f"nodename={name}", "state=drain", "reason=gpunode: gpu.count")
    slurm.node_is("faulty.json")
    done = slurm.call(str(slurm.folder / "prolog"))
    assert "not drained: health checks drained 25 % of the nodes already" in done.stderr
    assert slurm.state() == ("IDLE", "")
    slurm.call("scontrol", "update", f"nodename={others[0]}", "state=resume")
    assert slurm.until("IDLE+DRAIN")[1].startswith("gpunode: gpu.ecc")
    slurm.call("scontrol", "update", f"nodename={others[1]}", "state=resume")
    slurm.node_is("healthy.json")
    assert slurm.until("IDLE") == ("IDLE", "")


@pytest.mark.parametrize(("unknown", "code", "drained"), [("allow", 0, False), ("drain", 1, True)])
def test_a_site_chooses_what_becomes_of_a_node_of_which_too_little_is_known(
    slurm: Slurm, unknown: str, code: int, drained: bool
) -> None:
    """The program is not there: nothing is known."""
    environment = {
        "PATH": PATH,
        "SLURM_CONF": str(slurm.folder / "slurm.conf"),
        "SLURMD_NODENAME": slurm.host,
        "GPUNODE": "/nowhere",
        "GPUNODE_UNKNOWN": unknown,
    }
    done = subprocess.run([PROLOG], env=environment, check=False, timeout=90, capture_output=True, text=True)
    assert done.returncode == code
    assert "gpunode: no answer" in done.stderr
    assert slurm.state()[0].endswith("+DRAIN") is drained
    # It is well: the next health check returns what gpunode drained.
    assert slurm.until("IDLE")[0] == "IDLE"


def test_the_adapter_of_upgrades_waits_for_a_job_and_ends_its_own_drain_only(slurm: Slurm) -> None:
    def scontrol(argv: Sequence[str], _: str | None) -> Completed:
        done = slurm.call(*argv)
        return Completed(done.returncode, done.stdout, done.stderr)

    adapter, drain_id = SlurmScheduler(scontrol), "gpunode-upgrade-0123456789ab"
    slurm.node_is("healthy.json")
    assert slurm.until("IDLE")[0] == "IDLE"
    assert adapter.state(slurm.host, drain_id).service is Availability.IN_SERVICE
    out = slurm.folder / "upgrade.out"
    job = slurm.call("sbatch", f"--output={out}", "--wrap", "sleep 8; echo ended")
    assert job.returncode == 0, job.stderr
    assert slurm.until("ALLOCATED")[0] == "ALLOCATED"
    for _ in range(2):
        adapter.drain(slurm.host, drain_id)
    assert adapter.state(slurm.host, drain_id).service is Availability.OURS
    assert "ALLOCATED" in adapter.busy(slurm.host, drain_id)
    end = time.monotonic() + 120
    while time.monotonic() < end and adapter.busy(slurm.host, drain_id):
        time.sleep(0.5)
    assert adapter.busy(slurm.host, drain_id) == ""
    assert out.read_text().strip() == "ended"
    # A health check neither ends nor renames this drain.
    for bundle in ("faulty.json", "healthy.json"):
        slurm.node_is(bundle)
        slurm.call(str(slurm.folder / "prolog"))
        assert slurm.state() == ("IDLE+DRAIN", drain_id)
    slurm.call("scontrol", "update", f"nodename={slurm.host}", "reason=RMA ticket 4711")
    assert adapter.state(slurm.host, drain_id).text == "drained by others: RMA ticket 4711"
    adapter.resume(slurm.host, drain_id)
    with pytest.raises(SchedulerError, match="RMA ticket 4711"):
        adapter.drain(slurm.host, drain_id)
    assert slurm.state() == ("IDLE+DRAIN", "RMA ticket 4711")
    slurm.call("scontrol", "update", f"nodename={slurm.host}", f"reason={drain_id}")
    adapter.resume(slurm.host, drain_id)
    assert slurm.until("IDLE") == ("IDLE", "")
    with pytest.raises(SchedulerError, match="scontrol show node nowhere"):
        adapter.state("nowhere", drain_id)
