"""Tests of the node after it was provisioned, run on the node itself."""

import re

import pytest
from testinfra.host import Host

DRIVER = re.compile(r"535\.\d+\.\d+|550\.\d+\.\d+")
CLOSURE = ("nvidia-graphics-drivers", "nvidia-open-gpu-kernel-modules")


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


@pytest.fixture
def kernel(host: Host) -> str:
    """The newest installed kernel: the node runs the one of its host, which belongs to no package."""
    return output(host, "linux-version list | linux-version sort | tail -n 1")


@pytest.fixture
def closure(host: Host) -> dict[str, str]:
    """The driver's packages and their versions."""
    lines = output(
        host, r"dpkg-query -W -f '${source:Package} ${Package} ${Version} ${db:Status-Status}\n'"
    ).splitlines()
    rows = [line.split() for line in lines]
    return {row[1]: row[2] for row in rows if row[0] in CLOSURE and row[3] == "installed"}


@pytest.fixture
def version(closure: dict[str, str]) -> str:
    """The driver's version: the one that all its packages carry."""
    versions = {full.rpartition("-")[0] for full in closure.values()}
    assert len(versions) == 1, closure
    return versions.pop()


def test_the_driver_is_installed_in_one_version(closure: dict[str, str], version: str) -> None:
    assert {"nvidia-kernel-dkms", "libcuda1", "libnvidia-ml1", "nvidia-smi"} <= closure.keys()
    assert DRIVER.fullmatch(version)


def test_the_module_is_built_for_the_installed_kernel(host: Host, kernel: str, version: str) -> None:
    assert output(host, f"modinfo -k {kernel} -F version nvidia-current") == version
    assert output(host, f"modinfo -k {kernel} -F vermagic nvidia-current").split()[0] == kernel
    for module in ("uvm", "modeset", "drm"):
        assert output(host, f"modinfo -k {kernel} -F version nvidia-current-{module}") == version


def test_dkms_has_it_installed(host: Host, kernel: str, version: str) -> None:
    assert re.search(rf"(?m)^nvidia-current/{version}, {kernel}, \w+: installed$", output(host, "dkms status"))


def test_headers_come_with_the_next_kernel(host: Host) -> None:
    images = output(host, r"dpkg-query -W -f '${Package}\n' 'linux-image-*'").split()
    flavours = [name.removeprefix("linux-image-") for name in images if not name[len("linux-image-")].isdigit()]
    assert flavours
    for flavour in flavours:
        assert host.package(f"linux-headers-{flavour}").is_installed


def test_the_whole_closure_is_held_and_nothing_else(host: Host, closure: dict[str, str]) -> None:
    assert set(output(host, "apt-mark showhold").split()) == closure.keys()


def test_unattended_upgrades_pass_over_the_driver_alone(host: Host, closure: dict[str, str]) -> None:
    text = output(host, "unattended-upgrade --dry-run --debug 2>&1")
    excluded = re.search(r"Initial blacklist: (.*)", text)
    assert excluded
    engine = {"^containerd$", "^runc$", "^docker[.]io$"}  # by the role docker
    assert set(excluded[1].split()) - engine == {f"^{name}$" for name in closure}
    assert "Allowed origins are:" in text


def test_apt_would_not_move_the_driver(host: Host, version: str) -> None:
    policy = output(host, "apt-cache policy libcuda1")
    assert re.search(rf"Candidate: {re.escape(version)}-", policy)
    assert "libcuda1" not in output(host, "apt-get --simulate upgrade | grep ^Inst || true")


def test_the_components_come_from_the_nodes_own_archive(host: Host) -> None:
    text = output(host, "cat /etc/apt/sources.list.d/gpunode-nvidia-driver.sources")
    archive = output(host, "cat /etc/apt/sources.list.d/debian.sources")
    assert set(re.findall(r"(?m)^URIs: (.*)$", text)) == set(re.findall(r"(?m)^URIs: (.*)$", archive))
    assert "main" not in text


def test_nouveau_stays_away_also_early_in_boot(host: Host, kernel: str) -> None:
    assert "blacklist nouveau" in output(host, "modprobe --showconfig | grep nouveau")
    inside = output(host, f"lsinitramfs /boot/initrd.img-{kernel}")
    assert "etc/modprobe.d/gpunode-nouveau.conf" in inside


def test_the_persistence_daemon_waits_for_a_gpu(host: Host) -> None:
    assert output(host, "systemctl is-enabled nvidia-persistenced.service") == "enabled"
    with host.sudo():
        started = host.run("systemctl start nvidia-persistenced.service")
    shown = output(host, "systemctl show -p ActiveState,Result nvidia-persistenced.service").split()
    assert started.rc == 0
    assert shown == ["Result=exec-condition", "ActiveState=inactive"]


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
