"""Tests of a node with two toolkits, run on the node itself."""

import pytest
from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


@pytest.mark.parametrize("series", ["12.8", "12.9"])
def test_each_toolkit_is_there(host: Host, series: str) -> None:
    assert f"release {series}" in output(host, f"/usr/local/cuda-{series}/bin/nvcc --version")


def test_the_requested_one_is_the_default(host: Host) -> None:
    assert output(host, "readlink -f /usr/local/cuda") == "/usr/local/cuda-12.8"
    assert "release 12.8" in output(host, "bash -lc 'nvcc --version'")


def test_configuration_follows_the_newest_requested_one(host: Host) -> None:
    shown = output(host, "dpkg-query -W -f '${Version}\\n' cuda-toolkit-config-common cuda-toolkit-12-config-common")
    assert [line[:5] for line in shown.splitlines()] == ["12.9.", "12.9."]
    assert "Candidate: 12.9." in output(host, "apt-cache policy cuda-toolkit-config-common")


def test_nccl_is_of_the_toolkits_build(host: Host) -> None:
    assert "+cuda12." in output(host, "dpkg-query -W -f '${Version}' libnccl2")


def test_all_of_it_is_held_and_no_driver_came(host: Host) -> None:
    held = set(output(host, "apt-mark showhold").split())
    assert held >= {
        "cuda-toolkit-12-8",
        "cuda-toolkit-12-9",
        "cuda-toolkit-config-common",
        "libnccl2",
        "cuda-nvcc-12-9",
    }
    packages = output(host, r"dpkg-query -W -f '${Package}\n'").split()
    assert not [
        name for name in packages if name.startswith(("nvidia-driver", "nvidia-kernel", "cuda-drivers", "libcuda1"))
    ]
