"""The role kernel_tuning on a kernel of its own: applied at once, there after a reboot, repaired, and taken back."""

import json
import re

import pytest
from machine import Machine
from playbook_runs import KERNEL_TUNING_ALONE, Playbooks, Run, gpunode

pytestmark = [pytest.mark.vm, pytest.mark.timeout(5400)]
CONCERNS = ("gpunode/provisioning/kernel_", "plugins/modules/kernel_values")

SETTINGS = {
    **KERNEL_TUNING_ALONE,
    "kernel_tuning_fleet_size": 2000,
    "kernel_tuning_sysctl": {"net.core.somaxconn": 8192, "vm.no_such_setting": 1, "vm.max_map_count": None},
    "kernel_tuning_transparent_hugepages": "never",
    "kernel_tuning_governor": "performance",
    "kernel_tuning_iommu": "pt",
    "kernel_tuning_command_line": ["gpunode.word=1"],
    "kernel_tuning_module_options": {"loop": "max_loop=5"},
    "kernel_tuning_acs": "off",
}
LIVE = {
    "vm.swappiness": "10",
    "net.core.somaxconn": "8192",
    "net.ipv4.neigh.default.gc_thresh1": "2048",
    "net.ipv4.neigh.default.gc_thresh3": "8192",
}
HARM = """
echo damaged >> /etc/sysctl.d/90-gpunode.conf
chmod 0666 /etc/security/limits.d/90-gpunode.conf
rm /etc/tmpfiles.d/gpunode-kernel-tuning.conf
sysctl -q -w vm.swappiness=77
echo always > /sys/kernel/mm/transparent_hugepage/enabled
"""


class Node(Playbooks):
    """A virtual machine as the plays' node."""

    def apply(self, *arguments: str, **changes: object) -> Run:
        return self.play("-e", json.dumps({**SETTINGS, **changes}), *arguments)

    def sh(self, script: str) -> str:
        # On a busy machine systemd in the guest may take longer than the 25 s for which systemctl waits.
        return super().sh(f"export SYSTEMD_BUS_TIMEOUT=200\n{script}")

    def live(self) -> dict[str, str]:
        """Return what the running kernel has of the settings that the role sets."""
        shown = self.sh(f"sysctl {' '.join(LIVE)} vm.max_map_count")
        settings = {name.strip(): value.strip() for name, value in (line.split("=") for line in shown.splitlines())}
        settings["thp"] = re.findall(r"\[(\w+)\]", self.sh("cat /sys/kernel/mm/transparent_hugepage/enabled"))[0]
        settings["memlock"] = self.sh(
            "systemd-run --quiet --wait --pipe grep 'Max locked memory' /proc/self/limits"
        ).split()[3]
        return settings

    def kept(self) -> list[str]:
        """Return what a boot does not change by itself: /etc, packages, and which units start."""
        lines = self.snapshot()
        cut = len(lines) - lines[::-1].index("---")
        units = self.sh("systemctl --root=/ list-unit-files --no-legend --no-pager").splitlines()
        # Logins come and go as transient units.
        return [*lines[:cut], *(unit for unit in units if " transient " not in unit)]

    def judged(self) -> dict[tuple[str, str], str]:
        """Return the validator's findings about the settings: (check, component) to status."""
        chosen = ("--select", "host.kernel-settings,host.limits", "--level", "quick", "--timeout", "300")
        (report,) = json.loads(gpunode("validate", "-i", self.lab.inventory_path, *chosen, "--format", "json"))["nodes"]
        return {(finding["check"], finding["component"]): finding["status"] for finding in report["findings"]}


@pytest.fixture(scope="module")
def node(vm: Machine) -> Node:
    return Node(vm)


def test_a_kernel_is_set_stays_so_over_a_reboot_and_is_restored(node: Node, vm: Machine) -> None:
    before, clean = node.live(), node.kept()
    assert before["thp"] != "never"
    assert before["memlock"] != "unlimited"

    announced = node.apply("--check")
    assert announced.rc == 0, announced.output
    assert {"/etc/sysctl.d/90-gpunode.conf", "/etc/default/grub.d/90-gpunode.cfg"} <= announced.paths
    assert "/proc/sys/vm/swappiness" in announced.paths
    assert node.live() == before
    assert node.kept() == clean

    run = node.apply()
    assert run.rc == 0, run.output
    assert "vm.no_such_setting: the kernel has no such setting" in run.output
    assert "kernel_tuning_acs: off is refused: not bare metal" in run.output
    assert "iommu=pt gpunode.word=1" in run.output
    assert run.paths >= announced.paths
    expected = {**LIVE, "thp": "never", "memlock": "unlimited", "vm.max_map_count": before["vm.max_map_count"]}
    assert node.live() == expected

    vm.reboot()
    assert {"iommu=pt", "gpunode.word=1"} <= set(node.sh("cat /proc/cmdline").split())
    assert node.live() == expected
    assert node.sh("modprobe loop; cat /sys/module/loop/parameters/max_loop").strip() == "5"
    # No clock is the kernel's to choose here: the unit is skipped and not failed.
    assert node.sh("systemctl is-enabled gpunode-cpu.service").strip() == "enabled"
    assert node.sh("systemctl show -p ConditionResult --value gpunode-cpu.service").strip() == "no"
    assert node.sh("systemctl --failed --plain --no-legend") == ""

    kernel = "host.kernel-settings"
    agreed = node.judged()
    for name in ("vm.swappiness", "net.core.somaxconn", "transparent_hugepage", "command line"):
        assert agreed[kernel, name] == "pass"
    assert agreed["host.limits", "memlock of services"] == "pass"

    settled = node.snapshot()
    again = node.apply()
    assert again.rc == 0, again.output
    assert again.recap["changed"] == 0
    assert "a reboot is pending" not in again.output
    assert node.snapshot() == settled

    node.sh(HARM)
    warned = {name for (check, name), status in node.judged().items() if check == kernel and status == "warn"}
    assert warned == {"vm.swappiness"}
    repaired = node.apply()
    assert repaired.rc == 0, repaired.output
    assert {path for path in repaired.paths if path.startswith("/etc/")} == {
        "/etc/sysctl.d/90-gpunode.conf",
        "/etc/security/limits.d/90-gpunode.conf",
        "/etc/tmpfiles.d/gpunode-kernel-tuning.conf",
    }
    assert node.live() == expected
    assert node.snapshot() == settled

    removed = node.apply(kernel_tuning_state="absent")
    assert removed.rc == 0, removed.output
    assert node.live() == before
    assert node.kept() == clean
    vm.reboot()
    assert not {"iommu=pt", "gpunode.word=1"} & set(node.sh("cat /proc/cmdline").split())
    assert node.live() == before
