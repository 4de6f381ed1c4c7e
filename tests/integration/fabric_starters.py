"""Slurm's and Open MPI's own programs over the nodes of ``fabric_nodes``."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

from fabric_nodes import CONTROLLER, FabricNodes

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("slurmctld", "slurmd", "munged", "scontrol", "srun")
SLURM = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
"""Programs that are missing."""
CONFIG = """\
ClusterName=fabric
SlurmctldHost={host}({controller})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
MessageTimeout=60
ReturnToService=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 State=UP
"""


@contextlib.contextmanager
def slurm(nodes: FabricNodes, names: Sequence[str]) -> Iterator[dict[str, str]]:
    """A cluster of some nodes; yield the environment of its commands."""
    folder = nodes.folder / "slurm"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("state", *(f"spool-{name}" for name in names)):
        (folder / name).mkdir(parents=True)
    rows = "\n".join(f"NodeName={name} NodeAddr={nodes.address(name)} CPUs=2 State=UNKNOWN" for name in names)
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=host, controller=CONTROLLER, folder=folder, nodes=rows), encoding="ascii")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in ("pid-file", "log-file", "seed-file")]
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *files]
    enter = ["nsenter", "-t", str(nodes.switch.pid), "-n"]
    programs = [("munged", munged), ("slurmctld", [*enter, "slurmctld", "-D", "-f", str(config)])]
    for name in names:
        inside = ["nsenter", "-t", str(nodes.nodes[name].pid), "-n", "-u", "-m", "-p"]
        programs.append((f"slurmd-{name}", [*inside, "slurmd", "-D", "-f", str(config), "-N", name]))
    environment = {"PATH": PATH, "SLURM_CONF": str(config)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, argv in programs:
            with (folder / f"{name}.out").open("wb") as out:
                started.append(
                    subprocess.Popen(
                        argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
                    )
                )
            time.sleep(1)
        end = time.monotonic() + 90
        while time.monotonic() < end:
            shown = subprocess.run(
                [*enter, "scontrol", "show", "nodes"], env=environment, capture_output=True, text=True, check=False
            )
            if shown.stdout.count("State=IDLE ") == len(names):
                break
            time.sleep(0.5)
        else:
            logs = "".join(f"{path.name}: {path.read_text(errors='replace')[-800:]}\n" for path in folder.glob("*.out"))
            raise AssertionError(f"{shown.stdout[-800:]}\n{logs}")
        yield {"SLURM_CONF": str(config)}
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def mpi_environment(nodes: FabricNodes) -> dict[str, str]:
    """How mpirun reaches the nodes, and that it runs as root."""
    ssh = (
        f"ssh -F none -i {nodes.folder}/identity -o IdentitiesOnly=yes -o UserKnownHostsFile={nodes.folder}/known_hosts"
    )
    return {
        "OMPI_MCA_plm_rsh_agent": ssh,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_oob_tcp_if_include": "10.77.0.0/24",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
