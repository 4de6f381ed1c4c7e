"""Tests of the node prepared for kubelet, run on the node itself."""

import tomllib

from testinfra.host import Host

CRI = "io.containerd.grpc.v1.cri"


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_containerd_runs_with_systemds_cgroups_and_the_sites_sandbox(host: Host) -> None:
    with host.sudo():
        assert host.service("containerd").is_running
        assert host.service("containerd").is_enabled
    settings = tomllib.loads(output(host, "containerd config dump"))["plugins"][CRI]
    assert settings["containerd"]["runtimes"]["runc"]["options"]["SystemdCgroup"] is True
    assert settings["sandbox_image"] == "registry.example.com/pause:3.10"
    assert f"{CRI.rpartition('.')[2]} " in output(host, "ctr plugins ls | grep -w ok")


def test_the_toolkit_registered_its_runtime_and_cdi(host: Host) -> None:
    settings = tomllib.loads(output(host, "containerd config dump"))["plugins"][CRI]
    runtimes = settings["containerd"]["runtimes"]
    assert runtimes["nvidia"]["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"
    assert runtimes["nvidia"]["options"]["SystemdCgroup"] is True
    assert settings["enable_cdi"] is True


def test_modules_and_settings_come_at_each_boot_and_swap_does_not(host: Host) -> None:
    assert output(host, "cat /etc/modules-load.d/gpunode-kubernetes.conf").splitlines()[1:] == [
        "overlay",
        "br_netfilter",
    ]
    assert "net.ipv4.ip_forward = 1" in output(host, "cat /etc/sysctl.d/90-gpunode-kubernetes.conf")
    assert output(host, "cat /proc/sys/net/ipv4/ip_forward") == "1"
    assert output(host, "systemctl show -p LoadState --value swap.target") == "masked"


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
