"""A simulated HGX H100 before NVIDIA's repository, and its driver's packages, for the tests of the role nvidia_driver.

The tests of one file share one node and run in their order.
"""

import re

import pytest
from playbook_runs import Run, Site

from gpunode.lab import Lab

FIRST, SECOND = "580.95.05", "595.91.07"
NEWEST_OF_FIRST = "580.178.04"
VERSION = ("-e", f"nvidia_driver_version={FIRST}")
REPOSITORY_FILES = {
    "/etc/apt/sources.list.d/gpunode-nvidia-cuda.sources",
    "/etc/apt/preferences.d/gpunode-nvidia-cuda.pref",
    "/etc/apt/keyrings/gpunode-nvidia-cuda.asc",
}
DRIVER_FILES = {
    "/etc/apt/preferences.d/gpunode-nvidia-driver.pref",
    "/etc/apt/apt.conf.d/52gpunode-nvidia-driver",
    "/etc/modprobe.d/gpunode-nouveau.conf",
    "/etc/systemd/system/nvidia-persistenced.service.d/gpunode.conf",
}
# The roles under test alone: what else site.yml brings is tested with those roles.
PARTS = [f"nvidia_{role}_{part}" for role in ("repository", "driver") for part in ("install", "configure")]
CLOSURE = {"nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-fabricmanager", "libnvidia-nscq", "libcuda1"}
TRANSACTIONS = "grep -c '^Start-Date' /var/log/apt/history.log || true"


def closure(site: Site) -> dict[str, str]:
    """Installed packages of the driver with their releases; others of NVIDIA have versions of their own, as dkms."""
    form = "${Package} ${Version} ${db:Status-Status} ${Maintainer}\n"
    lines = site.sh(f"dpkg-query -W -f '{form}'").splitlines()
    words = [line.split() for line in lines if "cudatools@nvidia.com" in line and " installed " in line]
    own_versions = re.compile(r"(dh-)?dkms$|libnvidia-egl-|eglexternalplatform|nvidia-driver-pinning-")
    return {name: version.rpartition("-")[0] for name, version, *_ in words if not own_versions.match(name)}


@pytest.fixture(scope="module")
def site(lab: Lab) -> Site:
    lab.up(1, "debian-12", hardware=["hgx-h100-8"])
    return Site(lab, "--tags", ",".join([*PARTS, "nvidia_driver_service"]))


@pytest.fixture(scope="module")
def bare(site: Site) -> list[str]:
    return site.snapshot()


@pytest.fixture(scope="module")
def provisioned(site: Site, bare: list[str]) -> Run:
    run = site.play(*VERSION)
    assert run.rc == 0, run.output
    return run
