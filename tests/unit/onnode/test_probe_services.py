"""What the probe reads of a node's name, mounts, services, storage, tools, links, RDMA devices and containers."""

import json
import os
import time
from pathlib import Path

import pytest
from probe_node import collect, link, printing, put, tool

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.containers import ContainerDevices
from gpunode.facts.disks import LocalMount
from gpunode.facts.updates import Needrestart
from gpunode.onnode import probe as script

SCOPE = f"docker-{'0a' * 32}.scope"


def facts_of(root: Path) -> NodeFacts:
    (root / "bin").mkdir(exist_ok=True)
    return facts_from_bundle(collect(root, root / "bin"))


def test_its_own_name_and_no_other_of_the_hosts_file(tmp_path: Path) -> None:
    put(tmp_path, "/proc/sys/kernel/hostname", "gpu-1\n")
    put(
        tmp_path,
        "/etc/hosts",
        "127.0.0.1 localhost\n#10.0.0.1 gpu-1\n127.0.1.1\tgpu-1.x gpu-1 # why\n10.0.0.2 gpu-10\n",
    )
    host = facts_of(tmp_path).own_name
    assert host is not None
    assert (host.name, host.addresses) == ("gpu-1", ("127.0.1.1",))
    assert "gpu-10" not in collect(tmp_path, tmp_path / "bin").to_json()


@pytest.mark.parametrize(
    ("mount", "superblock", "read_only"),
    [
        ("rw,relatime", "rw,errors=remount-ro", False),
        ("rw,relatime", "ro", True),
        ("ro", "ro", True),
        ("ro", "rw", False),
    ],
)
def test_the_superblock_shows_whether_a_file_system_is_read_only(
    tmp_path: Path, mount: str, superblock: str, read_only: bool
) -> None:
    put(
        tmp_path,
        "/etc/fstab",
        "# /old\nUUID=1 / ext4 defaults 0 1\n/dev/sdb1\t/data\txfs\tro,noatime 0 0\nnfs:/x /x nfs rw 0 0\n",
    )
    put(
        tmp_path,
        "/proc/self/mountinfo",
        f"22 1 8:1 / / {mount} - ext4 /dev/sda1 {superblock}\n30 22 8:2 / /data ro - xfs /dev/sdb1 ro\n"
        "31 22 0:40 / /x rw - nfs nfs:/x rw\n32 22 8:1 / /var/lib/pods/a ro - ext4 /dev/sda1 rw\n",
    )
    assert facts_of(tmp_path).local_mounts == (
        LocalMount(path="/", source="/dev/sda1", type="ext4", read_only=read_only, fstab_read_only=False),
        LocalMount(path="/data", source="/dev/sdb1", type="xfs", read_only=True, fstab_read_only=True),
    )


def test_network_mounts_have_the_options_of_the_file_system_and_no_secret(tmp_path: Path) -> None:
    put(
        tmp_path,
        "/proc/self/mountinfo",
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 22 0:50 / /data rw - autofs systemd-1 rw,fd=5\n"
        "32 31 0:51 / /data rw,nosuid - nfs4 store:/x rw,vers=4.2,soft,proto=tcp,nconnect=16,addr=10.0.0.9\n"
        "33 22 0:52 / /win ro - cifs //nas/x ro,vers=3.1.1,username=ada,domain=A,password=hunter2,soft\n"
        "34 22 0:53 / /ceph rw - ceph 10.0.0.1:6789:/ rw,name=ada,secret=hunter2,acl\n"
        "35 22 0:54 / /s3 rw - fuse.rclone bucket: rw,user_id=0,allow_other,odd\\040option\n"
        "36 22 0:55 / /dav rw - fuse.davfs https://ada:hunter2@dav.example/ rw\n"
        "37 22 0:51 / /sets ro - nfs4 store:/x rw,soft\n",
    )
    text = collect(tmp_path, tmp_path / "bin").to_json()
    assert "hunter2" not in text
    assert "username" not in text
    assert [
        (mount.path, mount.type, mount.read_only, mount.options) for mount in facts_of(tmp_path).remote_mounts or ()
    ] == [
        ("/ceph", "ceph", False, ("name=ada", "acl")),
        ("/data", "nfs4", False, ("nosuid", "vers=4.2", "soft", "proto=tcp", "nconnect=16", "addr=10.0.0.9")),
        ("/dav", "fuse.davfs", False, ()),
        ("/s3", "fuse.rclone", False, ("allow_other",)),
        ("/sets", "nfs4", True, ("soft",)),
        ("/win", "cifs", True, ("vers=3.1.1", "domain=A", "soft")),
    ]


def test_the_files_of_needrestart_together(tmp_path: Path) -> None:
    assert facts_of(tmp_path).needrestart is None
    assert "needrestart" not in facts_of(tmp_path).gaps
    put(
        tmp_path,
        "/etc/needrestart/needrestart.conf",
        "#$nrconf{restart} = 'i';\n$nrconf{restart} = 'l';\n$nrconf{override_rc} = {\n    qr(^dbus) => 0,\n"
        "    #qr(^slurm) => 0,\n    qr(^(open|free)swan) => 0,\n    qr(^cron) => 1,\n};\n",
    )
    put(tmp_path, "/etc/needrestart/conf.d/a.conf", "$nrconf{restart} = 'a';\n$nrconf{override_rc}{qr(^docker)} = 0;\n")
    assert facts_of(tmp_path).needrestart == Needrestart(mode="a", spared=("^(open|free)swan", "^dbus", "^docker"))


def test_slurm_is_read_from_the_folder_that_the_node_has(tmp_path: Path) -> None:
    assert facts_of(tmp_path).slurm is None
    put(tmp_path, "/proc/sys/kernel/hostname", "gpu-1.example.org\n")
    put(
        tmp_path, "/etc/slurm-llnl/slurm.conf", "AuthInfo=secret\nNodeName=gpu-[1-4] Gres=gpu:8\nNodeName=cpu1 CPUs=4\n"
    )
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.files["/etc/slurm-llnl/slurm.conf"] == "NodeName=gpu-[1-4] Gres=gpu:8\n"
    slurm = facts_from_bundle(bundle).slurm
    assert slurm is not None
    assert (slurm.configured, slurm.device_files, slurm.constrains_devices) == (8, None, False)


def test_cloud_init_runs_until_it_has_a_result(tmp_path: Path) -> None:
    assert facts_of(tmp_path).cloud_init_running is False
    put(tmp_path, "/run/cloud-init/status.json", "{}")
    assert facts_of(tmp_path).cloud_init_running is True
    put(tmp_path, "/run/cloud-init/result.json", "{}")
    assert facts_of(tmp_path).cloud_init_running is False


@pytest.mark.parametrize(
    ("allow", "allowed"),
    [
        ("DeviceAllow=/dev/char/195:255 rw\n", True),
        ("DeviceAllow=char-nvidia-frontend rwm\n", True),
        ("DeviceAllow=char-* m\nDeviceAllow=/dev/char/1:3 rwm\n", False),
        ("", False),
    ],
)
def test_a_container_with_gpus_is_compared_with_its_scope(tmp_path: Path, allow: str, allowed: bool) -> None:
    others = f"docker-{'0b' * 32}.scope"
    for pid, path in (
        (100, f"0::/system.slice/{SCOPE}\n"),
        (101, f"0::/system.slice/{others}\n"),
        (102, "0::/init.scope\n"),
    ):
        put(tmp_path, f"/proc/{pid}/cgroup", path)
        (tmp_path / f"proc/{pid}/root/dev").mkdir(parents=True)
    put(tmp_path, "/proc/100/root/dev/nvidiactl")
    block = f"Id={SCOPE}\n{allow}ActiveEnterTimestampMonotonic=5000000"
    shown = f"*{SCOPE}*) printf '%s\\n' '{block}'"
    tool(
        tmp_path / "bin",
        "systemctl",
        f'case "$*" in *UnitsLoad*) echo UnitsLoadTimestampMonotonic=7000000;; {shown};; esac',
    )
    assert facts_of(tmp_path).container_devices == (
        ContainerDevices(scope=SCOPE, allowed=allowed, started_us=5000000, reloaded_us=7000000),
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device files")
def test_links_of_devices(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for minor in (0, 1):
        try:
            os.mknod(tmp_path / f"dev/nvidia{minor}", 0o20666, os.makedev(195, minor))
        except PermissionError:
            pytest.skip("this container may not make device files")
    link(tmp_path, "/dev/char/195:0", "../nvidia0")
    nodes = facts_of(tmp_path).device_nodes or ()
    assert [(node.path, node.linked) for node in nodes] == [("/dev/nvidia0", True), ("/dev/nvidia1", False)]
    assert all(node.created_s is not None and node.created_s > 0 for node in nodes)


UUID = "0d1f7a58-2f3a-5c0e-9a2b-6f7e8d9c0b1a"
SCRATCH = {"path": "/scratch", "source": f"UUID={UUID}", "type": "xfs", "options": ["noatime"], "remote": False}
DATA = {"path": "/data", "source": "store:/export", "type": "nfs", "options": [], "remote": True}
DOWN = {**DATA, "path": "/down"}
MOUNTS = """\
22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw
30 22 9:127 / /scratch rw,noatime shared:2 - xfs /dev/md127 rw,attr2
31 22 0:50 / /data rw,relatime shared:3 - autofs systemd-1 rw,fd=5
32 31 0:51 / /data ro,relatime shared:4 - nfs4 store:/export ro,vers=4.2
33 22 0:52 / /down rw,relatime shared:5 - autofs systemd-1 rw,fd=6
"""
STAT = """\
for path in "$@"; do :; done
case $path in
/scratch/.) echo '4096 1000000 600000' ;;
/data/.) echo '1048576 102400 51200' ;;
*) exec /bin/sleep 30 ;;
esac
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(script, "STORAGE_S", 1.0)
    put(tmp_path, "/etc/gpunode/storage.json", json.dumps({"mounts": [SCRATCH, DATA, DOWN]}))
    put(tmp_path, "/proc/self/mountinfo", MOUNTS)
    put(tmp_path, "/dev/md127")
    link(tmp_path, f"/dev/disk/by-uuid/{UUID}", "../../md127")
    tool(tmp_path / "bin", "stat", STAT)
    return tmp_path


def test_mounts_are_compared_and_a_server_that_hangs_costs_its_limit_alone(node: Path) -> None:
    started = time.monotonic()
    facts = facts_of(node)
    assert time.monotonic() - started < 20
    scratch, data, down = facts.storage or ()
    assert (scratch.mounted_type, scratch.mounted_options, scratch.same_device) == ("xfs", ("rw", "noatime"), True)
    assert (scratch.size_mib, scratch.free_mib, scratch.options) == (3906, 2343, ("noatime",))
    assert (data.mounted_type, data.free_mib, data.problem, data.remote) == ("nfs4", 51200, None, True)
    assert (down.mounted_type, down.problem) == (None, "no answer within 1 s")


def test_a_file_system_that_an_error_made_read_only_is_seen(node: Path) -> None:
    """The kernel then leaves the mount's own flag: only the superblock has it."""
    before = [line for line in MOUNTS.splitlines() if " - xfs " in line]
    assert len(before) == 1
    head, _, tail = before[0].partition(" - ")
    kind, source, options = tail.split(" ")
    after = f"{head} - {kind} {source} {options.replace('rw', 'ro', 1)}"
    put(node, "/proc/self/mountinfo", MOUNTS.replace(before[0], after))
    scratch = (facts_of(node).storage or ())[0]
    assert "ro" in scratch.mounted_options
    assert "rw" not in scratch.mounted_options


def test_another_device_and_an_empty_place_are_seen(node: Path) -> None:
    put(
        node,
        "/proc/self/mountinfo",
        MOUNTS.replace("/dev/md127", "/dev/sda1").replace("31 22", "").replace("32 31", ""),
    )
    put(node, "/dev/sda1")
    tool(node / "bin", "stat", "echo 'stat: cannot read: Input/output error' >&2; exit 1")
    scratch, data, _ = facts_of(node).storage or ()
    assert scratch.same_device is False
    assert scratch.problem == "stat: cannot read: Input/output error"
    assert data.mounted_type is None


@pytest.mark.parametrize("text", ["{", "[]", '{"mounts": [{"path": 1}]}', '{"mounts": 5}'])
def test_a_damaged_record_is_a_gap_and_no_verdict(node: Path, text: str) -> None:
    put(node, "/etc/gpunode/storage.json", text)
    facts = facts_of(node)
    assert facts.storage is None
    assert "storage.json" in facts.gaps["storage"]


def test_a_node_without_records_has_neither(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert (facts.storage, facts.tools) == (None, None)
    assert not {"storage", "tools"} & facts.gaps.keys()


def test_recorded_programs_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    put(tmp_path, "/etc/gpunode/tools.json", json.dumps({"programs": ["fio", "nvme", "../sh"]}))
    put(tmp_path, "/usr/bin/fio")
    facts = facts_of(tmp_path)
    assert facts.tools == {"fio": "/usr/bin/fio", "nvme": None}
    put(tmp_path, "/etc/gpunode/tools.json", "{}")
    assert "tools.json" in facts_of(tmp_path).gaps["tools"]


BOOT = "2026-11-20T09:00:00+0000 n kernel: Linux version 6.8.0-60-generic (buildd@lcy02) #1 SMP"
XID = "2026-11-20T09:00:00+0000 n kernel: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."
LINK_DOWN = "2026-11-20T10:00:00+0000 n kernel: mlx5_core 0000:41:00.0 enp65s0f0np0: Link down"
LOST = "2026-11-20T11:00:00+0000 n systemd-networkd[539]: ib6: Lost carrier"
OTHER = "2026-11-20T11:00:00+0000 n systemd-networkd[539]: eth0: DHCPv4 address 192.0.2.1/24"


def test_only_lines_of_links_and_xids_leave_the_node(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "journalctl", printing([BOOT, XID, LINK_DOWN, LOST, OTHER]))
    commands = collect(tmp_path, tmp_path / "bin").commands
    assert commands["journal-links"].stdout.splitlines() == [BOOT, LINK_DOWN, LOST]
    assert commands["journal-xids"].stdout.splitlines() == [BOOT, XID]
    assert "dmesg-links" not in commands


def test_dmesg_is_asked_for_links_where_the_journal_reports_nothing(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "journalctl", "exit 0")
    tool(tmp_path / "bin", "dmesg", printing([LINK_DOWN]))
    assert collect(tmp_path, tmp_path / "bin").commands["dmesg-links"].stdout == LINK_DOWN + "\n"


def test_processors_and_rdma_devices(tmp_path: Path) -> None:
    for name, text in (("online", "0-3"), ("present", "0-7"), ("possible", "0-7"), ("smt/control", "off")):
        put(tmp_path, f"/sys/devices/system/cpu/{name}", text + "\n")
    put(tmp_path, "/sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n")
    put(tmp_path, "/sys/class/infiniband_verbs/abi_version", "6\n")
    put(tmp_path, "/sys/class/infiniband_mad/umad0/ibdev", "mlx5_0\n")
    put(tmp_path, "/sys/class/infiniband_mad/umad0/port", "1\n")
    put(tmp_path, "/dev/infiniband/uverbs0")
    facts = facts_of(tmp_path)
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
    assert facts_of(tmp_path).peer_memory is False
    put(tmp_path, "/proc/kallsyms", "0000000000000000 T ib_register_peer_memory_client\t[ib_core]\n")
    assert facts_of(tmp_path).peer_memory is True


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
