"""cuda, dcgm and nvidia_container_toolkit through a real dnf, on a look-alike of Rocky: installed, repaired, removed.

The tests share a node and run in their order. The packages are the lab's simulations, their names those that were
recorded; no driver is installed, so that DCGM is enabled and not started.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_plays import Roles
from playbook_runs import Run, Site, yaml_list

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
CONCERNS = ("roles/cuda/", "roles/dcgm/", "roles/nvidia_container_toolkit/", "gpunode/provisioning/")

TOOLKIT = {"cuda-toolkit-12-9", "libnccl", "libnccl-devel", "cudnn9-cuda-12"}
FOUR = {
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
}
LOCKS = "/etc/dnf/plugins/versionlock.list"
# The container toolkit in the newest release that the lab's rpm repository has.
SETTINGS = (
    *("-e", '{"cuda_toolkit": ["12.9"], "cuda_nccl": true, "cuda_cudnn": true}'),
    *("-e", "nvidia_container_toolkit_version=1.20.0"),
)
STATE = """
rpm --query --all --queryformat '%{NAME} %{EVR}\\n' | sort
grep -r . /etc/dnf/plugins/versionlock.list /etc/yum.repos.d /etc/pki/rpm-gpg /etc/profile.d 2>/dev/null || true
"""


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    lab = Lab(f"roles-dnf-{os.getpid()}")
    folder: Path = tmp_path_factory.mktemp("plays")
    try:
        lab.up(1, "rocky-9", ["l40s-4"])
        (folder / "repository").mkdir()
        # Preflight asks for the driver's packages too, and dkms is EPEL's.
        Site(lab).sh("dnf --quiet --assumeyes install epel-release")
        Roles(Site(lab), folder / "repository", "nvidia_repository").done()
        yield Roles(Site(lab), folder, "cuda", "dcgm", "nvidia_container_toolkit")
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(roles: Roles) -> str:
    return roles.site.sh(STATE)


@pytest.fixture(scope="module")
def announced(roles: Roles, bare: str) -> Run:
    run = roles.done("--check", *SETTINGS)
    assert roles.site.sh(STATE) == bare
    return run


@pytest.fixture(scope="module")
def installed(roles: Roles, announced: Run) -> Run:
    return roles.done(*SETTINGS)


def versions(site: Site) -> dict[str, str]:
    reply = site.sh("rpm --query --all --queryformat '%{NAME} %{EVR}\\n'")
    # A key that dnf imports is not a package.
    return dict(line.split() for line in reply.splitlines() if not line.startswith("gpg-pubkey"))


def test_the_real_run_brings_what_was_announced(roles: Roles, bare: str, announced: Run, installed: Run) -> None:
    before = dict(line.split() for line in bare.splitlines() if line.count(" ") == 1 and ":" not in line.split()[0])
    new = {f"{name}={at}" for name, at in versions(roles.site).items() if before.get(name) != at}
    assert new == yaml_list(announced.output, "install")
    names = {line.partition("=")[0] for line in new}
    assert names >= TOOLKIT | FOUR | {"datacenter-gpu-manager-4-core"}
    assert not [name for name in names if name.startswith(("kmod-", "nvidia-driver"))]
    locks = {line for line in roles.site.sh(f"cat {LOCKS}").splitlines() if not line.startswith("#")}
    assert locks == yaml_list(announced.output, "hold")


def test_everything_is_locked_at_what_came(roles: Roles, installed: Run) -> None:
    packages = versions(roles.site)
    text = roles.site.sh(f"cat {LOCKS}")
    for name in (*FOUR, "cuda-toolkit-12-9", "datacenter-gpu-manager-4-core"):
        at = packages[name] if ":" in packages[name] else f"0:{packages[name]}"
        assert f"{name}-{at}.*" in text
    # Locks count for what dnf installs, not for what it lists; the lab's repository has newer ones.
    offered = roles.site.sh("dnf --quiet list --upgrades || true")
    assert {"cuda-toolkit-config-common.noarch", "libnccl.x86_64"} <= set(offered.split())
    assert "Nothing to do" in roles.site.sh("dnf --assumeno upgrade 2>&1 || true")


def test_a_second_run_changes_nothing(roles: Roles, installed: Run) -> None:
    before = roles.site.sh(STATE)
    run = roles.done(*SETTINGS)
    assert run.recap["changed"] == 0, run.changed
    assert roles.site.sh(STATE) == before


def test_what_is_damaged_is_repaired_and_nothing_else(roles: Roles, installed: Run) -> None:
    before = roles.site.sh(STATE)
    roles.site.sh(
        f"sed -i /libnvidia-container1/d {LOCKS}; rpm --erase --nodeps libnccl; echo > /etc/profile.d/gpunode-cuda.sh"
    )
    roles.done(*SETTINGS)
    assert roles.site.sh(STATE) == before


def test_absent_restores_the_node(roles: Roles, bare: str, installed: Run) -> None:
    states = [f"-e{role}_state=absent" for role in ("cuda", "dcgm", "nvidia_container_toolkit")]
    roles.done(*states)
    left = versions(roles.site).keys()
    assert not left & (TOOLKIT | FOUR | {"datacenter-gpu-manager-4-core"})
    assert "gpunode (role" not in roles.site.sh(f"cat {LOCKS} 2>/dev/null || true")
    assert roles.done(*states).recap["changed"] == 0
