"""The whole of site.yml through a real dnf, on a look-alike of Rocky with an HGX board: installed, settled, removed.

DKMS builds the simulated module, which is loaded. Docker is Debian's engine in packages
that have the names, requirements and scriptlets of Docker's own. The tests share a node and run in their order.
"""

import os
import re
from collections.abc import Iterator

import pytest
from playbook_runs import Run, Site, yaml_list
from test_roles_dnf import versions

from gpunode.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(2400)]
CONCERNS = ("roles/", "plugins/", "playbooks/", "gpunode/provisioning/", "gpunode/lab/packages/")

SETTINGS = (
    *("-e", '{"cuda_toolkit": ["12.9"], "cuda_nccl": true, "nvidia_driver_version": "580.95.05"}'),
    *("-e", "nvidia_container_toolkit_version=1.20.0"),
)
ROLES = (
    *("nvidia_container_toolkit", "docker", "dcgm", "cuda", "nvidia_fabric", "nvidia_driver", "nvidia_repository"),
    *("gpu_settings", "kernel_tuning", "ml_environment"),
)
PACKAGES = {
    *("nvidia-driver-cuda", "kmod-nvidia-open-dkms", "nvidia-fabricmanager", "libnvidia-nscq"),
    *("cuda-toolkit-12-9", "libnccl", "datacenter-gpu-manager-4-core", "nvidia-container-toolkit"),
    *("docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin", "docker-compose-plugin"),
}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    lab = Lab(f"site-dnf-{os.getpid()}")
    try:
        lab.up(1, "rocky-9", ["hgx-h100-8"])
        site = Site(lab, *SETTINGS)
        site.sh("dnf --quiet --assumeyes install epel-release")  # dkms is EPEL's
        yield site
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(site: Site) -> list[str]:
    return site.snapshot()


@pytest.fixture(scope="module")
def announced(site: Site, bare: list[str]) -> Run:
    run = site.play("--check")
    assert run.rc == 0, run.output[-3000:]
    assert site.snapshot() == bare
    return run


@pytest.fixture(scope="module")
def installed(site: Site, announced: Run) -> Run:
    run = site.play()
    assert run.rc == 0, run.output[-3000:]
    return run


def test_the_real_run_brings_what_was_announced(site: Site, bare: list[str], announced: Run, installed: Run) -> None:
    packages = {f"{name}={version}" for name, version in versions(site).items()}
    new_packages = {line for line in packages if line.replace("=", " ") not in bare}
    assert new_packages == yaml_list(announced.output, "install")
    assert {line.partition("=")[0] for line in new_packages} >= PACKAGES
    locked = {line for line in site.sh("cat /etc/dnf/plugins/versionlock.list").splitlines() if line[:1] not in "# "}
    assert locked == yaml_list(announced.output, "hold")


def test_the_engine_runs_and_knows_the_runtime(site: Site, installed: Run) -> None:
    assert "nvidia" in site.sh("docker info --format '{{ json .Runtimes }}'")
    assert site.sh("systemctl is-enabled docker.service").strip() == "enabled"


def test_a_second_run_changes_nothing_nor_does_a_forced_one(site: Site, installed: Run) -> None:
    before = site.snapshot()
    for more in ((), ("-e", "gpunode_force=true")):
        run = site.play(*more)
        assert (run.rc, run.recap["changed"]) == (0, 0), run.changed
    assert site.snapshot() == before


def test_absent_restores_the_node(site: Site, bare: list[str], installed: Run) -> None:
    states = [f"-e{role}_state=absent" for role in ROLES]
    run = site.play(*states)
    assert run.rc == 0, run.output[-3000:]
    # Keys that dnf imported stay, accounts that scriptlets made too, the list of versionlock and the file of a module
    # that was reset are empty where there was none. The engine is Debian's: it writes key.json, has an init script and
    # waits for network-online.target, which nothing stops.
    stays = re.compile(
        r"gpg-pubkey |.* etc/(passwd|group|shadow|gshadow)-?$|.* etc/dnf/modules.d/nvidia-driver.module$"
        r"|.* etc/docker/key.json$|etc/rc\d.d/\w+docker |network-online.target "
    )
    left, original = ({line for line in lines if not stays.match(line)} for lines in (site.snapshot(), bare))
    differences = [
        *(f"+ {line}" for line in sorted(left - original)),
        *(f"- {line}" for line in sorted(original - left)),
    ]
    assert not differences, "\n".join(differences)
    assert site.play(*states).recap["changed"] == 0
