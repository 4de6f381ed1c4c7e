"""Tests of the toolkit, run on the node itself."""

import json

from testinfra.host import Host

FOUR = {
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
}


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_four_packages_in_one_version_are_held(host: Host) -> None:
    lines = output(host, r"dpkg-query -W -f '${Package} ${Version}\n' " + " ".join(FOUR)).splitlines()
    assert len({line.split()[1] for line in lines}) == 1
    assert set(output(host, "apt-mark showhold").split()) >= FOUR


def test_docker_knows_the_runtime_and_cdi(host: Host) -> None:
    daemon = json.loads(output(host, "cat /etc/docker/daemon.json"))
    assert daemon["runtimes"] == {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}
    assert daemon["features"] == {"cdi": True}
    assert "nvidia" in json.loads(output(host, "docker info --format '{{json .Runtimes}}'"))
    assert json.loads(output(host, "docker info --format '{{json .CDISpecDirs}}'"))


def test_one_specification_of_the_gpu_is_left_and_names_it(host: Host) -> None:
    assert output(host, "grep -l -r 'kind: nvidia.com/gpu' /etc/cdi /run/cdi") == "/run/cdi/nvidia.yaml"
    assert "nvidia.com/gpu=0" in output(host, "nvidia-ctk cdi list")


def test_the_units_keep_it(host: Host) -> None:
    with host.sudo():
        assert host.service("nvidia-cdi-refresh.path").is_running
        assert host.service("nvidia-cdi-refresh.path").is_enabled
        assert host.service("nvidia-cdi-refresh.service").is_enabled


def test_a_container_sees_the_gpu(host: Host) -> None:
    tiny = (
        "cd / && tar -ch bin/sh bin/ls $(ldd bin/sh bin/ls | grep -o '/[^ ]*[.]so[^ ]*' | sort -u | cut -c 2-)"
        " | docker import - tiny"
    )
    with host.sudo():
        host.check_output("sh -c %s", tiny)
    assert "/dev/nvidia0" in output(host, "docker run --rm --device nvidia.com/gpu=all tiny /bin/ls /dev/nvidia0")


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
