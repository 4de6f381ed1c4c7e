"""Tests of a node with GPU settings, run on the node itself."""

import json

from testinfra.host import Host

UNIT = "gpunode-gpu-settings"


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_the_gpus_are_set(host: Host) -> None:
    query = "nvidia-smi --query-gpu=power.limit,power.default_limit,compute_mode --format=csv,noheader,nounits"
    rows = [[cell.strip() for cell in line.split(",")] for line in output(host, query).splitlines()]
    assert [float(row[0]) for row in rows] == [round(float(row[1]) * 0.8) for row in rows]
    assert [row[2] for row in rows] == ["Exclusive_Process"] * 3 + ["Default"]


def test_mig_instances_are_those_of_the_rule(host: Host) -> None:
    listed = output(host, "nvidia-smi -L")
    assert [line.split()[1] for line in listed.splitlines() if line.startswith("  MIG")] == [
        "3g.40gb",
        "2g.20gb",
        "1g.10gb",
    ]


def test_the_unit_is_enabled_and_ran_before_docker_would(host: Host) -> None:
    unit = host.service(UNIT)
    assert unit.is_enabled
    assert unit.is_running
    before = output(host, f"systemctl show -p Before --value {UNIT}").split()
    assert {"docker.service", "containerd.service", "nvidia-dcgm.service"} <= set(before)


def test_the_report_names_what_was_applied(host: Host) -> None:
    report = json.loads(output(host, "cat /run/gpunode/gpu-settings.json"))
    results = {entry["result"] for gpu in report["gpus"].values() for entry in gpu["settings"].values()}
    assert results <= {"applied", "kept"}


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
