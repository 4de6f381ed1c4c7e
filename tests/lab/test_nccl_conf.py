"""/etc/nccl.conf of a RoCE node with a driver: the HCAs near its GPUs, and the GID index for an NCCL that needs it."""

import json
import os
from collections.abc import Iterator

import pytest
from playbook_runs import Run, Site, gpunode

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("roles/ml_environment/", "gpunode/tuning/network")

NCCL = "/etc/nccl.conf"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libnccl.so.2.18.5"
OF_FABRIC = {
    "NCCL_SOCKET_IFNAME": "=eth0",
    "NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7",
}


class Node(Site):
    """A RoCE server with driver and the role."""

    def done(self) -> Run:
        run = self.play()
        assert run.rc == 0, run.output
        return run

    def lines(self) -> dict[str, str]:
        text = self.sh(f"cat {NCCL}")
        return dict(line.split("=", 1) for line in text.splitlines() if not line.startswith("#"))

    def derived(self) -> list[dict[str, str]]:
        """Return what gpunode env has of the file, with the reasons."""
        document = json.loads(gpunode("env", "-i", str(self.lab.inventory_path), "--format", "json"))
        settings: list[dict[str, str]] = document["nodes"][0]["node"]["nccl"]
        return settings


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    lab = Lab(f"nccl-conf-{os.getpid()}")
    try:
        lab.up(1, "debian-12", "hgx-h100-8-roce")
        chosen = {
            "gpunode_roles": ["nvidia_repository", "nvidia_driver", "ml_environment"],
            "nvidia_driver_version": "580",
            "gpunode_reboot": "when_needed",
        }
        yield Node(lab, "-e", json.dumps(chosen))
    finally:
        lab.down()


def test_the_file_names_what_is_near_the_gpus_and_not_the_storage(node: Node) -> None:
    node.done()
    assert node.lines() == OF_FABRIC
    derived = node.derived()
    print(json.dumps(derived, indent=1))
    assert {setting["name"]: setting["value"] for setting in derived} == OF_FABRIC
    (hca,) = (setting for setting in derived if setting["name"] == "NCCL_IB_HCA")
    assert "excluded: mlx5_8, mlx5_9 (storage or management)" in hca["reason"]
    assert node.done().recap["changed"] == 0


def test_an_old_library_is_given_the_gid_index(node: Node) -> None:
    node.sh(f"install -m 0644 /dev/null {LIBRARY}")
    run = node.done()
    assert NCCL in run.paths
    assert node.lines() == {**OF_FABRIC, "NCCL_IB_GID_INDEX": "3"}
    print(json.dumps(node.derived(), indent=1))
    before = node.snapshot()
    assert node.done().recap["changed"] == 0
    assert node.snapshot() == before


def test_the_validator_agrees_and_names_what_does_not_exist(node: Node) -> None:
    inventory = str(node.lab.inventory_path)
    chosen = ("validate", "-i", inventory, "--select", "host.nccl-conf", "--level", "quick", "--format", "json")
    (judged,) = json.loads(gpunode(*chosen))["nodes"]
    assert {finding["status"] for finding in judged["findings"]} == {"pass"}, judged["findings"]
    node.sh(f"sed -i 's/=mlx5_0,/=mlx5_77,/' {NCCL}")
    (judged,) = json.loads(gpunode(*chosen))["nodes"]
    assert ["mlx5_77" in finding["message"] for finding in judged["findings"] if finding["status"] == "warn"] == [True]
    node.done()


def test_without_the_old_library_the_index_goes(node: Node) -> None:
    node.sh(f"rm {LIBRARY}")
    node.done()
    assert node.lines() == OF_FABRIC
