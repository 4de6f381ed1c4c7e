"""ml_environment and kernel_tuning on four kinds of node: what gpunode env derives is what stands on the node.

The nodes share one lab and one play; each keeps its own values.
"""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_plays import Roles
from playbook_runs import SNAPSHOT, Run, Site, gpunode

from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1800)]
CONCERNS = ("roles/kernel_tuning/", "roles/ml_environment/", "gpunode/tuning/")

HARDWARE = ("hgx-h100-8", "v100-2", "hgx-h100-8-roce", "t4-1")
NCCL, PROFILE, SYSCTL = "/etc/nccl.conf", "/etc/profile.d/gpunode-ml.sh", "/etc/sysctl.d/90-gpunode.conf"
FILES = {
    NCCL,
    PROFILE,
    "/etc/environment.d/90-gpunode-ml.conf",
    "/etc/gpunode/job.json",
    "/usr/local/bin/gpunode-run",
    "/usr/local/share/doc/gpunode/torchrun.sh",
    "/etc/systemd/logind.conf.d/90-gpunode.conf",
    SYSCTL,
    "/etc/security/limits.d/90-gpunode.conf",
    "/etc/systemd/system.conf.d/90-gpunode.conf",
    "/etc/systemd/user.conf.d/90-gpunode.conf",
    "/etc/tmpfiles.d/gpunode-kernel-tuning.conf",
}
PROFILE_CHOSEN = ("-e", "gpunode_profile=inference", "-e", "kernel_tuning_fleet_size=500")


class Nodes:
    """The lab's nodes, by their hardware."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.roles = Roles(Site(lab), folder, "kernel_tuning", "ml_environment")
        self.by_hardware = {str(node.hardware): node for node in lab.nodes()}

    def play(self, *arguments: str) -> Run:
        run = self.roles.play(*PROFILE_CHOSEN, *arguments)
        assert run.rc == 0, run.output
        return run

    def sh(self, node: LabNode, script: str) -> str:
        done = node.run(["bash", "-euc", script], timeout_s=300)
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def snapshots(self) -> dict[str, list[str]]:
        return {name: self.sh(node, SNAPSHOT).splitlines() for name, node in self.by_hardware.items()}

    def derived(self) -> dict[str, dict[str, Any]]:
        """Return what gpunode env prints, by hardware."""
        printed = gpunode("env", "-i", self.lab.inventory_path, "--profile", "inference", "--format", "json")
        by_host = {node["host"]: node for node in json.loads(printed)["nodes"]}
        return {name: by_host[node.name] for name, node in self.by_hardware.items()}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    lab = Lab(f"settings-{os.getpid()}")
    try:
        for hardware in HARDWARE:
            lab.up(1, "debian-12", hardware)
        yield Nodes(lab, tmp_path_factory.mktemp("play"))
    finally:
        lab.down()


@pytest.fixture(scope="module")
def clean(nodes: Nodes) -> dict[str, list[str]]:
    return nodes.snapshots()


@pytest.fixture(scope="module")
def announced(nodes: Nodes, clean: dict[str, list[str]]) -> Run:
    return nodes.play("--check")


@pytest.fixture(scope="module")
def done(nodes: Nodes, announced: Run) -> Run:
    return nodes.play()


def test_check_mode_announces_every_file_and_changes_nothing(
    nodes: Nodes, clean: dict[str, list[str]], announced: Run
) -> None:
    assert announced.paths >= FILES
    assert nodes.snapshots() == clean


def test_the_node_has_exactly_what_is_derived(nodes: Nodes, done: Run) -> None:
    assert done.paths >= FILES
    for hardware, tuning in nodes.derived().items():
        node, of_node = nodes.by_hardware[hardware], tuning["node"]
        print(f"\n{hardware}: {json.dumps(of_node, indent=1)}")
        lines = [line for line in nodes.sh(node, f"cat {NCCL}").splitlines() if not line.startswith("#")]
        assert lines == [f"{setting['name']}={setting['value']}" for setting in of_node["nccl"]]
        for variable in of_node["environment"]:
            assert nodes.sh(node, f"bash -lc 'echo ${variable['name']}'").strip() == variable["value"]
        sysctls = [line for line in nodes.sh(node, f"cat {SYSCTL}").splitlines() if not line.startswith("#")]
        expected = {setting["name"]: setting["value"] for setting in of_node["kernel"] if "." in setting["name"]}
        assert {name: value for name, value in expected.items() if "gc_thresh" not in name}.items() <= dict(
            line.split(" = ") for line in sysctls
        ).items()
        job = json.loads(nodes.sh(node, "cat /etc/gpunode/job.json"))
        assert job["docker"] == [
            word for setting in tuning["docker"] for word in (setting["name"], setting["value"]) if word
        ]


def assert_ranks_share_the_cores(nodes: Nodes, node: LabNode) -> None:
    """Ask each rank for its threads and processors: all processors of the node, each once, a thread for each core."""
    lines = nodes.sh(node, "lscpu --parse=CPU,Core,Socket | grep -v '^#'").splitlines()
    cores = {cpu: core for cpu, _, core in (line.partition(",") for line in lines)}
    for ranks in {1, len(set(cores.values()))}:
        bound: list[str] = []
        for rank in range(ranks):
            script = "echo $OMP_NUM_THREADS; python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)))'"
            command = f"LOCAL_RANK={rank} gpunode-run --ranks {ranks} sh -c {shlex.quote(script)}"
            threads, processors = nodes.sh(node, command).splitlines()
            assert int(threads) == len({cores[cpu] for cpu in processors.split()})
            bound += processors.split()
        assert sorted(bound) == sorted(cores)


def test_services_and_jobs_get_what_logins_get(nodes: Nodes, done: Run) -> None:
    for node in nodes.by_hardware.values():
        assert nodes.sh(node, "systemctl show -p DefaultLimitMEMLOCK").strip() == "DefaultLimitMEMLOCK=infinity"
        assert_ranks_share_the_cores(nodes, node)
        assert "--shm-size" in nodes.sh(node, "gpunode-run --print docker")
        assert nodes.sh(node, "systemctl --failed --plain --no-legend") == ""


def test_a_second_run_changes_nothing(nodes: Nodes, done: Run) -> None:
    before = nodes.snapshots()
    run = nodes.play()
    assert run.changed == {}
    assert nodes.snapshots() == before


def test_damaged_files_are_repaired_and_nothing_else(nodes: Nodes, done: Run) -> None:
    before = nodes.snapshots()
    harms = ("echo damaged >> {}", "chmod 0666 {}", "rm {}", "echo '# x' > {}")
    paths = sorted(FILES - {NCCL})
    script = "\n".join(harms[number % len(harms)].format(path) for number, path in enumerate(paths))
    for node in nodes.by_hardware.values():
        nodes.sh(node, f"{script}\nsed -i '/^# BEGIN/,$d' {NCCL}; echo NCCL_IB_TC=106 >> {NCCL}")
    run = nodes.play()
    assert {path for path in run.paths if path.startswith(("/etc/", "/usr/"))} == FILES
    for node in nodes.by_hardware.values():
        # What somebody else wrote stays.
        nodes.sh(node, f"sed -i '/^NCCL_IB_TC/d' {NCCL}")
    assert nodes.snapshots() == before
    assert nodes.play().changed == {}


def test_what_does_not_exist_is_named_and_the_rest_is_written(nodes: Nodes, done: Run) -> None:
    before = nodes.snapshots()
    wrong = {"ml_environment_nccl": {"NCCL_SOCKET_IFNAME": "=eth9", "NCCL_IB_TC": 106}}
    run = nodes.play("-e", json.dumps(wrong))
    assert "/etc/nccl.conf: NCCL_SOCKET_IFNAME==eth9: the node has no interface eth9" in " ".join(run.output.split())
    for node in nodes.by_hardware.values():
        assert "NCCL_IB_TC=106" in nodes.sh(node, f"cat {NCCL}")
    nodes.play()
    assert nodes.snapshots() == before


def test_absent_leaves_the_node_as_it_was(nodes: Nodes, clean: dict[str, list[str]], done: Run) -> None:
    nodes.play("-e", "kernel_tuning_state=absent", "-e", "ml_environment_state=absent")
    assert nodes.snapshots() == clean
    assert nodes.play("-e", "kernel_tuning_state=absent", "-e", "ml_environment_state=absent").changed == {}
