"""Tests of an NVLink 5 node after it was provisioned, run on the node itself."""

from testinfra.host import Host


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def version(host: Host, package: str) -> str:
    """The installed version of a package, without its revision."""
    return output(host, f"dpkg-query -W -f '${{Version}}' {package}").partition("-")[0]


def test_the_closure_carries_the_drivers_version(host: Host) -> None:
    driver = version(host, "nvidia-kernel-open-dkms")
    assert driver.startswith("580.")
    assert {version(host, name) for name in ("nvidia-fabricmanager", "libnvsdm", "libcuda1")} == {driver}
    assert {"nvidia-fabricmanager", "libnvsdm"} <= set(output(host, "apt-mark showhold").split())


def test_the_subnet_manager_and_its_tools_are_there(host: Host) -> None:
    assert host.package("nvlsm").is_installed
    assert host.package("infiniband-diags").is_installed
    assert not host.package("libnvidia-nscq").is_installed


def test_the_fabric_manager_runs_with_the_subnet_manager_as_its_child(host: Host) -> None:
    service = host.service("nvidia-fabricmanager")
    assert service.is_enabled
    assert service.is_running
    assert "nvlsm" in output(host, "systemctl status --no-pager -l nvidia-fabricmanager")


def test_its_modules_are_loaded_now_and_at_every_boot(host: Host) -> None:
    assert {"ib_umad", "mlx5_core"} <= set(output(host, "lsmod").split())
    assert output(host, "grep -v '^#' /etc/modules-load.d/gpunode-nvidia-fabric.conf").split() == [
        "mlx5_core",
        "ib_umad",
    ]


def test_settings_are_merged_into_its_file(host: Host) -> None:
    text = output(host, "cat /usr/share/nvidia/nvswitch/fabricmanager.cfg").splitlines()
    assert text.count("LOG_LEVEL=3") == 1
    assert "DAEMONIZE=1" in text


def test_the_gpus_joined_the_fabric(host: Host) -> None:
    text = output(host, "nvidia-smi -q")
    assert text.count("State                             : Completed") == 8


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
