"""Tests of a node with slurmd, run on the node itself. tests/lab/test_slurm_node.py has a cluster and its jobs."""

import re
import time

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_gres_conf_has_the_nodes_gpus(host: Host) -> None:
    lines = [line for line in output(host, "cat /etc/slurm/gres.conf").splitlines() if line.startswith("Name=")]
    # Without NVLink there are no links, and slurm.conf of the test has no sockets: no cores.
    assert lines == [f"Name=gpu Type=l40s File=/dev/nvidia{at}" for at in range(4)]
    assert "ConstrainDevices=yes" in output(host, "cat /etc/slurm/cgroup.conf")


def test_slurmd_accepts_its_configuration(host: Host) -> None:
    assert re.search(r"Name=gpu Type=l40s Count=1 Index=3", output(host, "slurmd -G 2>&1").replace("Gres ", ""))
    assert output(host, "systemctl is-active slurmd munge").split() == ["active", "active"]
    assert output(host, "systemctl show -p After --value slurmd").count("nvidia-persistenced.service") == 1


def test_slurmd_registers_with_a_controller(host: Host) -> None:
    """The controller is installed here, after the role, so that the removal finds the role's packages alone."""
    output(host, "DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends slurmctld")
    output(host, "systemctl restart slurmctld")
    try:
        end = time.monotonic() + 120
        while "State=IDLE " not in (text := output(host, "scontrol show node || true")):
            assert time.monotonic() < end, text
            time.sleep(2)
        assert "Gres=gpu:l40s:4" in text
    finally:
        output(host, "DEBIAN_FRONTEND=noninteractive apt-get purge -qy slurmctld")


def test_needrestart_leaves_slurmd_alone(host: Host) -> None:
    assert "qr(^slurmd)} = 0" in output(host, "cat /etc/needrestart/conf.d/gpunode-slurm.conf")


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
