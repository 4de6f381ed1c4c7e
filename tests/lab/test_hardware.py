"""A node with simulated hardware: what lspci, kmod and the probe see, what a reboot keeps, and each of its faults."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from programs import run_program

from gpunode.errors import UsageError
from gpunode.facts.parsers.kinds import parsed
from gpunode.lab import Lab, LabNode

pytestmark = [pytest.mark.lab, pytest.mark.timeout(900)]
CONCERNS = ("gpunode/lab/", "gpunode/probe/", "gpunode/onnode/probe", "gpunode/facts/")

HARDWARE = "hgx-h100-8"
BRANCH = "580.95.05-*"
OTHER = "580.178.04-*"
UNITS = ("nvidia-persistenced", "nvidia-fabricmanager")
PACKAGES = ("nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-fabricmanager")


@pytest.fixture(scope="module")
def bare(lab: Lab) -> LabNode:
    """The node before anything is installed."""
    (node,) = lab.up(1, "debian-12", HARDWARE)
    return node


@pytest.fixture(scope="module")
def node(lab: Lab, bare: LabNode) -> LabNode:
    """The node with a driver and fabric manager from the lab's vendor repository, all of one release."""
    source = (
        "Types: deb\nURIs: http://vendor/compute/cuda/repos/debian12/x86_64/\nSuites: /\n"
        "Signed-By: /etc/apt/keyrings/vendor.asc\n"
    )
    key = lab.state.vendor_key("nvidia").read_text(encoding="ascii")
    write(bare, "/etc/apt/keyrings/vendor.asc", key)
    write(bare, "/etc/apt/sources.list.d/vendor.sources", source)
    pins = "".join(
        f"Package: {name}\nPin: version {BRANCH}\nPin-Priority: 1000\n\n" for name in ("*nvidia*", "libcuda*")
    )
    write(bare, "/etc/apt/preferences.d/vendor", pins)
    good(bare, "apt-get", "update", "-qq")
    good(bare, *INSTALL, "linux-headers-cloud-amd64", *PACKAGES, limit_s=600)
    good(bare, "systemctl", "enable", "--quiet", *UNITS)
    bare.restart()
    return bare


@pytest.fixture(scope="module")
def healthy(lab: Lab, node: LabNode) -> set[tuple[str, str]]:
    """Return the findings of validate on the node while its hardware is healthy."""
    return validated(lab, node).bad()


INSTALL = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-qq", "--no-install-recommends")


def write(node: LabNode, path: str, text: str) -> None:
    done = node.run(["sh", "-c", 'mkdir -p "$(dirname "$0")" && printf %s "$TEXT" > "$0"', path], env={"TEXT": text})
    assert done.returncode == 0, done.stderr


def good(node: LabNode, *argv: str, limit_s: float = 60) -> str:
    done = node.run(argv, timeout_s=limit_s)
    assert done.returncode == 0, f"{argv}: {(done.stdout + done.stderr)[-1500:]}"
    return done.stdout.strip()


def refused(node: LabNode, *argv: str) -> str:
    done = node.run(argv)
    assert done.returncode == 1, f"{argv}: {done.returncode} {done.stdout}{done.stderr}"
    return done.stderr.strip()


@dataclass(frozen=True)
class Judged:
    """Return the findings of validate: status by (check, component), and all messages."""

    status: dict[tuple[str, str], str] = field(repr=False)
    messages: dict[tuple[str, str], str]

    def bad(self) -> set[tuple[str, str]]:
        return {key for key, status in self.status.items() if status in ("fail", "error", "warn")}


def validated(lab: Lab, node: LabNode) -> Judged:
    argv = [sys.executable, "-m", "gpunode", "validate", "-i", str(lab.inventory_path), "--limit", node.name]
    argv += ["--level", "quick", "--format", "json"]
    done = run_program(argv, limit_s=180)
    (judged,) = json.loads(done.stdout)["nodes"]
    assert judged["simulated"] is True
    findings = judged["findings"]
    return Judged(
        {(each["check"], each["component"]): each["status"] for each in findings},
        {(each["check"], each["component"]): each["message"] for each in findings},
    )


# --- the bare machine


def test_lspci_sees_the_hardware(bare: LabNode) -> None:
    devices = parsed("lspci", good(bare, "lspci", "-nn"))["devices"]
    ids = [f"{device['vendor_id']}:{device['device_id']}" for device in devices]
    assert (ids.count("10de:2330"), ids.count("10de:22a3"), ids.count("15b3:1021")) == (8, 4, 8)
    described = json.loads(good(bare, "cat", "/etc/gpunode/lab-hardware.json"))
    gpus = [f"0000:{device['slot']}" for device in devices if device["device_id"] == "2330"]
    assert gpus == [gpu["pci_bus_id"] for gpu in described["gpus"]]


def test_lspci_reads_links_and_tree(bare: LabNode) -> None:
    (gpu,) = parsed("lspci", good(bare, "lspci", "-nn", "-vv", "-s", "19:00.0"))["devices"]
    assert gpu["link"] == {
        "speed_gt_per_s": 32.0,
        "width": 16,
        "speed_max_gt_per_s": 32.0,
        "width_max": 16,
    }
    assert gpu["subsystem_id"] == "10de:16c1"
    tree = good(bare, "lspci", "-t")
    assert "-[0000:15]---01.0-[16-1a]----00.0-[17-1a]--+-00.0-[19]----00.0" in tree


def test_the_model_is_named_by_its_pci_id_before_a_driver_is_there(lab: Lab, bare: LabNode) -> None:
    judged = validated(lab, bare)
    assert any("H100 SXM5 80GB" in message for message in judged.messages.values()), judged.messages
    assert judged.status["driver.module-loaded", "node"] == "fail"
    assert not [key for key in judged.bad() if key[0].startswith(("link.", "gpu."))]


def test_without_a_driver_modprobe_fails_as_the_real_one(bare: LabNode) -> None:
    kernel = good(bare, "uname", "-r")
    assert (
        refused(bare, "modprobe", "nvidia")
        == f"modprobe: FATAL: Module nvidia not found in directory /lib/modules/{kernel}"
    )
    assert refused(bare, "rmmod", "nvidia") == "rmmod: ERROR: Module nvidia is not currently loaded"
    assert refused(bare, "modprobe", "no-such-module").startswith("modprobe: FATAL: Module no-such-module not found")


def test_the_kernel_that_runs_is_the_newest_of_the_node(bare: LabNode) -> None:
    kernel = good(bare, "uname", "-r")
    assert good(bare, "test", "-e", f"/boot/vmlinuz-{kernel}") == ""
    assert good(bare, "python3", "-c", "import os; print(os.uname().release)") == kernel
    assert good(bare, "dpkg", "-S", f"/boot/vmlinuz-{kernel}").startswith("linux-image-")


def test_adapters_are_in_sysfs(bare: LabNode) -> None:
    assert good(bare, "ls", "/sys/class/infiniband").split() == [f"mlx5_{number}" for number in range(8)]
    assert good(bare, "cat", "/sys/class/infiniband/mlx5_0/ports/1/rate") == "400 Gb/sec (4X NDR)"
    assert good(bare, "readlink", "-e", "/sys/class/infiniband/mlx5_0/device").endswith("/0000:1a:00.0")


def test_systemd_boots_without_a_failed_unit(bare: LabNode) -> None:
    assert good(bare, "systemctl", "is-system-running") == "running"


# --- with a driver


def test_modules_load_at_boot_and_the_stack_is_healthy(lab: Lab, node: LabNode) -> None:
    assert "Open Kernel Module for x86_64  580.95.05" in good(node, "cat", "/proc/driver/nvidia/version")
    assert good(node, "cat", "/sys/module/nvidia/version") == "580.95.05"
    assert good(node, "modinfo", "-F", "version", "nvidia") == "580.95.05"
    assert "Kernel driver in use: nvidia" in good(node, "lspci", "-k", "-s", "19:00.0")
    assert len(good(node, "sh", "-c", "ls -d /dev/nvidia[0-9]*").split()) == 8
    judged = validated(lab, node)
    assert {
        key for key in judged.bad() if key[0].startswith(("gpu.", "link.", "nvlink.", "fabric.", "nvswitch."))
    } == set()
    assert judged.status["gpu.xid", "node"] == "pass"
    assert judged.status["driver.module-loaded", "node"] == "pass"


def test_used_modules_stay(node: LabNode) -> None:
    good(node, "systemctl", "stop", *UNITS)
    assert refused(node, "rmmod", "nvidia") == (
        "rmmod: ERROR: Module nvidia is in use by: nvidia_drm nvidia_modeset nvidia_uvm"
    )
    node.fault("gpu-busy", "gpu2")
    try:
        assert refused(node, "rmmod", "nvidia_uvm") == "rmmod: ERROR: Module nvidia_uvm is in use"
        holders = [line for line in good(node, "nvidia-smi").splitlines() if "python3" in line]
        assert len(holders) == 1
    finally:
        node.heal()
    good(node, "modprobe", "-r", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
    assert node.run(["test", "-e", "/proc/driver/nvidia/version"]).returncode == 1
    assert node.run(["test", "-e", "/sys/module/nvidia"]).returncode == 1
    good(node, "modprobe", "nvidia")
    good(node, "modprobe", "nvidia-uvm")
    good(node, "systemctl", "start", *UNITS)


def test_what_a_reload_and_a_reboot_keep_on_hopper(node: LabNode) -> None:
    good(node, "nvidia-smi", "-i", "0", "-mig", "1")
    good(node, "nvidia-smi", "-i", "0", "-pl", "500")
    good(node, "nvidia-smi", "-i", "1", "-e", "0")
    fields = "index,mig.mode.current,power.limit,ecc.mode.current,ecc.mode.pending"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "-i", "0,1"]
    first, second = good(node, *query).splitlines()
    assert first == "0, Enabled, 500.00 W, Enabled, Enabled"
    assert second == "1, Disabled, 700.00 W, Enabled, Disabled"
    node.restart()
    first, second = good(node, *query).splitlines()
    assert first == "0, Disabled, 700.00 W, Enabled, Enabled"
    assert second == "1, Disabled, 700.00 W, Disabled, Disabled"
    good(node, "nvidia-smi", "-i", "1", "-e", "1")
    node.restart()


OF_GPUS = {
    ("gpu-lost", "gpu3"): ("gpu.answers", "gpu3"),
    ("ecc-uncorrected", "gpu1"): ("gpu.ecc-uncorrected", "gpu1"),
    ("remap-pending", "gpu2"): ("gpu.remapped-rows", "gpu2"),
    ("xid", "gpu5"): ("gpu.xid", "gpu5"),
    ("nvlink-down", "gpu0/link4"): ("nvlink.state", "gpu0"),
    ("pcie-narrow", "gpu4"): ("link.pcie-width", "gpu4"),
    ("throttle", "gpu6"): ("gpu.throttling", "gpu6"),
}
OF_THE_NODE = {
    "library-mismatch": "driver.library-matches-module",
    "fabric-manager-version": "fabric.manager-version",
    "fabric-not-completed": "fabric.state",
    "smi-hangs": "driver.tools-answer",
}


def test_faults_of_gpus_are_seen_where_they_are_and_healed(
    lab: Lab, node: LabNode, healthy: set[tuple[str, str]]
) -> None:
    assert not healthy & set(OF_GPUS.values())
    for fault, component in OF_GPUS:
        node.fault(fault, component)
    try:
        assert len(node.faults()) == len(OF_GPUS)
        judged = validated(lab, node)
        missed = {key: judged.messages.get(key) for key in OF_GPUS.values() if key not in judged.bad()}
        assert missed == {}
        assert not [component for _, component in judged.bad() - healthy if component == "gpu7"]
    finally:
        healed = node.heal()
    assert len(healed) == len(OF_GPUS)
    assert validated(lab, node).bad() == healthy


@pytest.mark.parametrize("fault", OF_THE_NODE)
def test_a_fault_of_the_node_is_seen_and_healed(
    lab: Lab, node: LabNode, healthy: set[tuple[str, str]], fault: str
) -> None:
    assert not [check for check, _ in healthy if check == OF_THE_NODE[fault]]
    node.fault(fault)
    try:
        judged = validated(lab, node)
        assert any(check == OF_THE_NODE[fault] for check, _ in judged.bad()), judged.messages
    finally:
        assert len(node.heal()) == 1
    assert validated(lab, node).bad() == healthy


def test_a_busy_gpu_is_held_by_a_real_process(lab: Lab, node: LabNode) -> None:
    node.fault("gpu-busy", "gpu7", user="operator")
    try:
        held = good(node, "sh", "-c", "ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c /dev/nvidia7")
        assert int(held) >= 1
        assert "python3" in good(node, "nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader")
    finally:
        node.heal()
    assert good(node, "nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader") == ""


def test_a_lost_gpu_is_not_on_the_bus_after_a_reboot_and_comes_back_when_healed(
    lab: Lab, node: LabNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = ("gpu.present", "node")
    with monkeypatch.context() as saving:
        saving.setenv("GPUNODE_HISTORY", str(tmp_path))
        assert validated(lab, node).status[present] == "pass"
    node.fault("gpu-lost", "gpu3")
    node.fault("xid", "gpu0", number=48)
    assert "rev ff" in good(node, "lspci", "-s", "5d:00.0") or "Unknown header type" in good(
        node, "lspci", "-v", "-s", "5d:00.0"
    )
    node.restart()
    assert good(node, "lspci", "-s", "5d:00.0") == ""
    assert [line.split()[1] for line in node.faults()] == ["gpu-lost"]
    assert "Xid" not in good(node, "dmesg")
    assert len(good(node, "nvidia-smi", "-L").splitlines()) == 7
    by_board = validated(lab, node)
    monkeypatch.setenv("GPUNODE_HISTORY", str(tmp_path))
    by_history = validated(lab, node)
    assert (by_board.status[present], by_history.status[present]) == ("fail", "fail")
    assert by_board.messages[present].startswith("7 NVIDIA GPUs on the PCI bus (")
    assert "has 8 (4 NVSwitches, 8 network adapters of one kind on the bus)" in by_board.messages[present]
    assert by_history.messages[present].endswith(": the previous run found 8")
    assert {key for key in by_board.bad() if key[0].startswith("gpu.")} == {present}
    node.heal("gpu-lost")
    assert "NVIDIA" in good(node, "lspci", "-s", "5d:00.0")
    assert len(good(node, "nvidia-smi", "-L").splitlines()) == 8
    node.restart()
    assert len(good(node, "nvidia-smi", "-L").splitlines()) == 8
    assert validated(lab, node).status[present] == "pass"


def test_an_upgrade_without_a_reboot_is_a_mismatch_and_a_reboot_cures_it(lab: Lab, node: LabNode) -> None:
    pins = good(node, "cat", "/etc/apt/preferences.d/vendor").replace(BRANCH, OTHER)
    write(node, "/etc/apt/preferences.d/vendor", pins + "\n")
    good(node, *INSTALL, "--allow-change-held-packages", *PACKAGES, limit_s=600)
    done = node.run(["nvidia-smi"])
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        18,
        "Failed to initialize NVML: Driver/library version mismatch",
    )
    assert validated(lab, node).status["driver.library-matches-module", "node"] == "fail"
    node.restart()
    assert "580.178.04" in good(node, "cat", "/proc/driver/nvidia/version")
    assert validated(lab, node).status["driver.library-matches-module", "node"] == "pass"


def test_wrong_faults_list_what_there_is(lab: Lab, node: LabNode) -> None:
    for words, line in (
        (("gpu9", "xid"), "this node has gpu0 to gpu7"),
        (("gpu0/link18", "nvlink-down"), "gpu0 has link0 to link17"),
        (("smoke",), "known: library-mismatch, gpu-lost"),
        (("gpu0", "pcie-narrow", "width=3"), "the link's best is gen 5 x16"),
        (("gpu0", "smi-hangs"), "omit the component"),
        (("xid", "color=red"), "it has number, text"),
    ):
        with pytest.raises(UsageError, match=line):
            node.fault_words(words)
    assert node.faults() == []


def test_a_second_up_changes_nothing(lab: Lab, node: LabNode) -> None:
    written = lab.inventory_path.read_text()
    started = time.monotonic()
    (again,) = lab.up(1, "debian-12", HARDWARE)
    assert again.container.id == node.container.id
    assert lab.inventory_path.read_text() == written
    assert time.monotonic() - started < 60
