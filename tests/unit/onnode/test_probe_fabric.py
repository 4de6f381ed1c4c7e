"""What the probe records of links, RDMA devices, processors and the management controller."""

from pathlib import Path

import pytest
from probe_node import collect, printing, put, tool

from gpunode.facts import facts_from_bundle

BOOT = "2026-11-20T09:00:00+0000 n kernel: Linux version 6.8.0-60-generic (buildd@lcy02) #1 SMP"
XID = "2026-11-20T09:00:00+0000 n kernel: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."
DOWN = "2026-11-20T10:00:00+0000 n kernel: mlx5_core 0000:41:00.0 enp65s0f0np0: Link down"
LOST = "2026-11-20T11:00:00+0000 n systemd-networkd[539]: ib6: Lost carrier"
OTHER = "2026-11-20T11:00:00+0000 n systemd-networkd[539]: eth0: DHCPv4 address 192.0.2.1/24"


def test_only_lines_of_links_and_xids_leave_the_node(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "journalctl", printing([BOOT, XID, DOWN, LOST, OTHER]))
    commands = collect(tmp_path, tmp_path / "bin").commands
    assert commands["journal-links"].stdout.splitlines() == [BOOT, DOWN, LOST]
    assert commands["journal-xids"].stdout.splitlines() == [BOOT, XID]
    assert "dmesg-links" not in commands


def test_dmesg_is_asked_for_links_where_the_journal_reports_nothing(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "journalctl", "exit 0")
    tool(tmp_path / "bin", "dmesg", printing([DOWN]))
    assert collect(tmp_path, tmp_path / "bin").commands["dmesg-links"].stdout == DOWN + "\n"


def test_processors_and_rdma_devices(tmp_path: Path) -> None:
    for name, text in (("online", "0-3"), ("present", "0-7"), ("possible", "0-7"), ("smt/control", "off")):
        put(tmp_path, f"/sys/devices/system/cpu/{name}", text + "\n")
    put(tmp_path, "/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
    put(tmp_path, "/sys/class/infiniband_verbs/abi_version", "6\n")
    put(tmp_path, "/sys/class/infiniband_mad/umad0/ibdev", "mlx5_0\n")
    put(tmp_path, "/sys/class/infiniband_mad/umad0/port", "1\n")
    put(tmp_path, "/dev/infiniband/uverbs0")
    facts = facts_from_bundle(collect(tmp_path, tmp_path / "bin"))
    assert facts.cpu_sets is not None
    assert (len(facts.cpu_sets.online), len(facts.cpu_sets.present), facts.cpu_sets.smt) == (4, 8, "off")
    # A plain file in a device's place is not a device.
    assert [(node.name, node.device, node.port, node.file) for node in facts.rdma_nodes or ()] == [
        ("uverbs0", "mlx5_0", None, False),
        ("umad0", "mlx5_0", 1, False),
    ]


def test_the_peer_memory_interface_is_looked_for_where_the_kernel_has_rdma(tmp_path: Path) -> None:
    put(tmp_path, "/proc/kallsyms", "0000000000000000 T ib_register_client\t[ib_core]\n")
    assert "peer-memory" not in collect(tmp_path, tmp_path / "bin").commands
    put(tmp_path, "/sys/module/ib_core/version", "1\n")
    assert facts_from_bundle(collect(tmp_path, tmp_path / "bin")).peer_memory is False
    put(tmp_path, "/proc/kallsyms", "0000000000000000 T ib_register_peer_memory_client\t[ib_core]\n")
    assert facts_from_bundle(collect(tmp_path, tmp_path / "bin")).peer_memory is True


def test_flow_control_is_asked_of_ethernet_interfaces_of_rdma_adapters(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "dcb", 'printf "%s " "$@"; echo')
    for name, kind, adapter in (("eth0", "1", False), ("eth1", "1", True), ("ib0", "32", True)):
        put(tmp_path, f"/sys/class/net/{name}/type", f"{kind}\n")
        put(tmp_path, f"/sys/class/net/{name}/device/uevent", "DRIVER=mlx5_core\n")
        if adapter:
            put(tmp_path, f"/sys/class/net/{name}/device/infiniband/mlx5_0/fw_ver", "28\n")
    put(tmp_path, "/sys/class/net/eth1/ecn/roce_np/enable/3", "1\n")
    bundle = collect(tmp_path, tmp_path / "bin")
    outputs = {key: result.stdout for key, result in bundle.commands.items() if key.startswith("dcb")}
    assert outputs == {
        "dcb-pfc-eth1": "pfc show dev eth1 \n",
        "dcb-app-eth1": "-N app show dev eth1 dscp-prio \n",
        "dcb-dcbx-eth1": "dcbx show dev eth1 \n",
    }
    assert "ip-rules" in bundle.commands
    assert bundle.files["/sys/class/net/eth1/ecn/roce_np/enable/3"] == "1\n"


def test_the_controller_is_asked_where_the_kernel_has_a_device(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "ipmitool", 'printf "%s " "$@"; echo')
    assert not [
        key for key in collect(tmp_path, tmp_path / "bin").commands if key.startswith("ipmi-") and key != "ipmi-devices"
    ]
    put(tmp_path, "/dev/ipmi0")
    commands = collect(tmp_path, tmp_path / "bin").commands
    assert commands["ipmi-devices"].stdout == "/dev/ipmi0\n"
    assert commands["ipmi-power-supplies"].stdout == "sdr type Power Supply \n"
    assert commands["ipmi-events"].stdout == "sel list last 100 \n"


@pytest.mark.parametrize("body", [None, "exec sleep 60"])
def test_a_controller_that_does_not_answer_is_asked_once(tmp_path: Path, body: str | None) -> None:
    put(tmp_path, "/dev/ipmi0")
    tools = tmp_path / "bin"
    tool(tools, "sleep", "exec /bin/sleep 60")
    if body:
        tool(tools, "ipmitool", body)
    commands = collect(tmp_path, tools).commands
    assert commands["ipmi-fans"].rc == (124 if body else 127)
    assert "ipmi-power-supplies" not in commands
