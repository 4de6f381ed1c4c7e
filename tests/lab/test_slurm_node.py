"""A Slurm cluster of Debian's packages: a controller, and a GPU node set up by the role slurm_node.

The GPUs are simulated; their device files have the driver's numbers, so that the device controller treats them as real
ones: opening one that no driver serves fails with ENXIO, one that the control group forbids with EPERM. The tests share
the two nodes and run in their order.
"""

import json
import os
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Site, gpunode
from slurm_conf import PROLOG, slurm_conf
from test_prolog import archive, put

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]

DRIVER = "580.95.05"
KEY = b64encode(bytes(range(128))).decode()
SETTINGS = {
    **PROLOG,
    "TaskPlugin": "task/cgroup",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "GresTypes": "gpu",
    "ReturnToService": "2",
    "RebootProgram": "/usr/local/sbin/gpunode-reboot",
    "MessageTimeout": "100",
}
"""Of ``slurm.conf``."""
# Memory and cores belong to the machine around the lab: only devices are constrained here.
CGROUP = {"ConstrainCores": None, "ConstrainRAMSpace": None, "CgroupPlugin": "cgroup/v1"}
OPENS = (
    "import errno, os\n"
    "for at in range(8):\n"
    "    try:\n"
    "        os.close(os.open(f'/dev/nvidia{at}', os.O_RDWR))\n"
    "    except OSError as err:\n"
    "        print(at, errno.errorcode[err.errno])\n"
)


class Cluster:
    """The two nodes, and the role's play on the GPU node."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.site = Site(lab)
        nodes = {bool(node.hardware): node for node in lab.nodes()}
        self.node, self.head = nodes[True], nodes[False]
        self.site.node = self.node
        self.folder = folder
        self.roles = Roles(self.site, folder, "slurm_node")

    def on_head(self, script: str) -> str:
        done = self.head.run(["bash", "-euc", script], timeout_s=300)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def variables(self, **changes: object) -> list[str]:
        head = f"{self.head.name}({self.on_head('hostname -I').split()[0]})"
        address, *_, cpus = self.site.sh("hostname -I; nproc").split()
        line = f"NodeAddr={address} CPUs={cpus} Gres=gpu:h100:8"
        conf = slurm_conf(head, {self.node.name: line}, **SETTINGS)
        extra_vars = {
            "slurm_node_state": "present",
            "slurm_node_conf": conf,
            "slurm_node_munge_key": KEY,
            "slurm_node_cgroup": CGROUP,
            "slurm_node_prolog_settings": {"GPUNODE_BUDGET": "60s"},
            **changes,
        }
        file = self.folder / "variables.json"
        file.write_text(json.dumps(extra_vars), encoding="utf-8")
        return ["-l", self.node.name, "-e", f"@{file}"]

    def state(self) -> tuple[str, str]:
        output = self.on_head(f"scontrol show node {self.node.name}")
        reason = re.search(r"^ *Reason=(.*?)(?: \[.*)?$", output, re.MULTILINE)
        return re.findall(r"State=(\S+)", output)[0], reason[1] if reason else ""

    def until(self, expected: str, seconds: float = 180) -> tuple[str, str]:
        """Wait for a state that matches; what it is at the end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not re.fullmatch(expected, self.state()[0]):
            time.sleep(1)
        return self.state()

    def opened(self, gpus: int) -> dict[int, str]:
        """What a job with so many GPUs gets when it opens each device file."""
        text = self.site.sh(f'cd /tmp; timeout 200 srun -N1 --gres=gpu:{gpus} python3 -I -c "{OPENS}"')
        return {int(at): name for at, name in (line.split() for line in text.splitlines())}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A GPU node with its driver, and a controller that knows it."""
    lab = Lab(f"test-slurm-node-{os.getpid()}")
    folder = tmp_path_factory.mktemp("cluster")
    try:
        lab.up(1, "debian-12", ["hgx-h100-8"])
        lab.up(1, "debian-12")
        slurm_cluster = Cluster(lab, folder)
        Roles(
            slurm_cluster.site, tmp_path_factory.mktemp("driver"), "nvidia_repository", "nvidia_driver", "nvidia_fabric"
        ).done("-l", slurm_cluster.node.name, "-e", f"nvidia_driver_version={DRIVER}")
        put(slurm_cluster.site, archive(folder), "/usr/local/bin/gpunode")
        slurm_cluster.site.sh("gpunode --version")  # unpacks once
        yield slurm_cluster
    finally:
        lab.down()
        # The node's slurmd made its groups in the hierarchy that it shares with this machine.
        for path in sorted(Path("/sys/fs/cgroup").glob("*/slurm/**/"), reverse=True):
            with suppress(OSError):
                path.rmdir()


def test_check_mode_announces_what_the_run_changes(cluster: Cluster) -> None:
    variables = cluster.variables()
    announced = cluster.roles.done("--check", *variables)
    cluster.on_head(
        "export DEBIAN_FRONTEND=noninteractive; apt-get update -q; "
        "apt-get install -qy --no-install-recommends munge slurmctld slurm-client; "
        f"base64 -d <<< {KEY} > /tmp/key; install -m 400 -o munge -g munge /tmp/key /etc/munge/munge.key; "
        "systemctl restart munge; mkdir -p /var/spool/slurmctld"
    )
    conf = json.loads((cluster.folder / "variables.json").read_text(encoding="utf-8"))["slurm_node_conf"]
    encoded = b64encode(conf.encode()).decode()
    # The controller only has to know the names of the devices.
    cluster.on_head(
        f"base64 -d <<< {encoded} > /etc/slurm/slurm.conf; systemctl restart slurmctld; systemctl is-active slurmctld"
    )
    run = cluster.roles.done(*variables)
    assert run.paths == announced.paths >= {"/etc/slurm/gres.conf", "/etc/slurm/slurm.conf", "/etc/munge/munge.key"}


def test_gres_conf_has_the_nodes_gpus_and_slurm_registers_them(cluster: Cluster) -> None:
    lines = [line for line in cluster.site.sh("cat /etc/slurm/gres.conf").splitlines() if line.startswith("Name=")]
    assert [line.split()[1:3] for line in lines] == [["Type=h100", f"File=/dev/nvidia{at}"] for at in range(8)]
    # NVSwitch: 18 links between each two.
    assert lines[0].endswith("Links=-1,18,18,18,18,18,18,18")
    assert cluster.until("IDLE") == ("IDLE", "")
    assert "Gres=gpu:h100:8" in cluster.on_head(f"scontrol show node {cluster.node.name}")


def test_a_second_run_changes_nothing_and_damage_is_repaired(cluster: Cluster) -> None:
    variables, before = cluster.variables(), cluster.site.snapshot()
    assert cluster.roles.done(*variables).recap["changed"] == 0
    assert cluster.site.snapshot() == before
    cluster.site.sh("sed -i 's/nvidia7/nvidia6/' /etc/slurm/gres.conf; rm /usr/local/sbin/gpunode-reboot")
    run = cluster.roles.done(*variables)
    assert {"/etc/slurm/gres.conf", "/usr/local/sbin/gpunode-reboot"} <= run.paths
    assert cluster.site.snapshot() == before


def test_a_job_opens_its_own_gpus_and_no_others(cluster: Cluster) -> None:
    assert cluster.until("IDLE")[0] == "IDLE"
    # Outside of a job no group forbids anything.
    outside = cluster.site.sh(f'python3 -I -c "{OPENS}"').split()
    assert set(outside[1::2]) == {"ENXIO"}
    opened = cluster.opened(2)
    assert sorted(opened.values()) == ["ENXIO"] * 2 + ["EPERM"] * 6
    visible = cluster.site.sh("cd /tmp; timeout 200 srun -N1 --gres=gpu:2 printenv CUDA_VISIBLE_DEVICES").strip()
    assert visible == ",".join(str(at) for at, name in sorted(opened.items()) if name == "ENXIO")


def test_a_restart_of_the_node_keeps_gres_and_slurmd_comes_after_the_devices(cluster: Cluster) -> None:
    before = cluster.site.sh("cat /etc/slurm/gres.conf")
    cluster.node.restart()
    assert cluster.until("IDLE", 300) == ("IDLE", "")
    assert cluster.site.sh("cat /etc/slurm/gres.conf") == before
    assert "Gres=gpu:h100:8" in cluster.on_head(f"scontrol show node {cluster.node.name}")
    # On the node, as in a prolog, the controller is not asked.
    words = ["validate", "-i", cluster.site.lab.inventory_path, "--limit", cluster.node.name]
    seen = {
        "skip": cluster.site.sh("gpunode validate --on-node --budget 120s --select 'slurm.*' --format json || true"),
        "pass": gpunode(*words, "--select", "slurm.*", "--format", "json"),
    }
    for version, text in seen.items():
        (report,) = json.loads(text)["nodes"]
        statuses = {finding["check"]: finding["status"] for finding in report["findings"]}
        assert statuses == {"slurm.gres": "pass", "slurm.devices": "pass", "slurm.version": version}
    assert sorted(cluster.opened(3).values()) == ["ENXIO"] * 3 + ["EPERM"] * 5


def test_a_fault_drains_the_node_and_its_repair_returns_it(cluster: Cluster) -> None:
    cluster.node.fault("pcie-narrow", "gpu3", width=4)
    try:
        state, reason = cluster.until(".*DRAIN.*")
        assert "DRAIN" in state
        assert reason.startswith("gpunode: link.pcie-width gpu3: ")
        done = cluster.node.run(["bash", "-c", "timeout 60 srun -N1 --gres=gpu:1 --immediate=30 true"], timeout_s=90)
        assert done.returncode != 0
    finally:
        cluster.node.heal("pcie-narrow", "gpu3")
    cluster.site.sh("scancel --user=root || true")
    assert cluster.until("IDLE") == ("IDLE", "")


def test_absent_removes_what_the_role_made(cluster: Cluster) -> None:
    variables = cluster.variables(slurm_node_state="absent")
    run = cluster.roles.done(*variables)
    # The purge of Debian's slurm-wlm-basic-plugins has removed /etc/slurm before.
    assert run.paths >= {"/usr/local/sbin/gpunode-prolog", "/usr/local/sbin/gpunode-reboot"}
    left = cluster.site.sh(
        "find /etc/slurm /etc/systemd /etc/needrestart /usr/local/sbin /etc/default /var/lib/gpunode/slurm_node "
        "-name '*gpunode*' -o -name gres.conf -o -name slurm.conf 2>/dev/null || true; command -v slurmd || true"
    )
    # The lab's own files, and the drop-ins of the roles of the driver.
    assert [line for line in left.splitlines() if "lab" not in line and "/nvidia-" not in line] == []
    assert cluster.roles.done(*variables).recap["changed"] == 0
