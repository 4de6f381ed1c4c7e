"""Tests of the node's sources after the role, run on the node itself."""

import re

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_apt_fetches_and_verifies_it_with_its_own_key(host: Host) -> None:
    text = output(host, "apt-get --error-on=any update")
    assert "http://vendor/compute/cuda/repos/debian12/x86_64" in text
    text = output(host, "cat /etc/apt/sources.list.d/gpunode-nvidia-cuda.sources")
    assert "Signed-By: /etc/apt/keyrings/gpunode-nvidia-cuda.asc" in text
    with host.sudo():
        host.run("mv /etc/apt/keyrings/gpunode-nvidia-cuda.asc /root/")
        refused = host.run("apt-get --error-on=any update")
        host.run("mv /root/gpunode-nvidia-cuda.asc /etc/apt/keyrings/")
    assert refused.rc != 0


def test_the_distributions_packages_come_first(host: Host) -> None:
    output(host, "apt-get update")
    policy = output(host, "apt-cache policy")
    assert re.search(r"(?m)^ *100 http://vendor/compute/cuda/repos", policy)


def test_what_older_instructions_left_is_gone(host: Host) -> None:
    for path in ("/etc/apt/sources.list.d/cuda-debian12-x86_64.list", "/etc/apt/preferences.d/cuda-repository-pin-600"):
        assert not host.file(path).exists


def test_nothing_was_installed(host: Host) -> None:
    assert output(host, "dpkg-query -W -f '${Package}\n' | grep -c nvidia || true") == "0"
