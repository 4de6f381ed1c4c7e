"""``slurm.conf`` of the clusters in the lab: what all have in common, and what a test sets."""

from collections.abc import Mapping

COMMON = {
    "ClusterName": "lab",
    "AuthType": "auth/munge",
    "SlurmUser": "root",
    "StateSaveLocation": "/var/spool/slurmctld",
    "SlurmdSpoolDir": "/var/spool/slurmd",
    "SlurmctldPidFile": "/run/slurmctld.pid",
    "SlurmdPidFile": "/run/slurmd.pid",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SelectType": "select/linear",
    "MpiDefault": "none",
    "ReturnToService": "1",
}
PROGRAM = "/usr/local/sbin/gpunode-prolog"
PROLOG = {
    "Prolog": PROGRAM,
    "HealthCheckProgram": PROGRAM,
    "HealthCheckInterval": "10",
    "HealthCheckNodeState": "ANY",
}
"""Settings with which Slurm calls gpunode before a job and as its health check."""


def slurm_conf(controller: str, nodes: Mapping[str, str], **settings: str) -> str:
    """Return the file. ``nodes`` are names and what follows them in their lines; ``settings`` replace common ones."""
    rows = {**COMMON, "SlurmctldHost": controller, **settings}
    lines = [f"{name}={value}" for name, value in rows.items()]
    lines += [f"NodeName={name} {text} State=UNKNOWN" for name, text in nodes.items()]
    lines.append(f"PartitionName=main Nodes={','.join(nodes)} Default=YES MaxTime=10 State=UP")
    return "".join(f"{line}\n" for line in lines)
