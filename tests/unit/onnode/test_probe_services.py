"""What the probe reads of a node's name, mounts, services, and of containers with GPUs."""

import os
from pathlib import Path

import pytest
from probe_node import collect, link, put, tool

from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.containers import ContainerDevices
from gpunode.facts.disks import LocalMount
from gpunode.facts.updates import Needrestart

SCOPE = f"docker-{'0a' * 32}.scope"


def facts(root: Path) -> NodeFacts:
    (root / "bin").mkdir(exist_ok=True)
    return facts_from_bundle(collect(root, root / "bin"))


def test_its_own_name_and_no_other_of_the_hosts_file(tmp_path: Path) -> None:
    put(tmp_path, "/proc/sys/kernel/hostname", "gpu-1\n")
    put(
        tmp_path,
        "/etc/hosts",
        "127.0.0.1 localhost\n#10.0.0.1 gpu-1\n127.0.1.1\tgpu-1.x gpu-1 # why\n10.0.0.2 gpu-10\n",
    )
    host = facts(tmp_path).own_name
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
    assert facts(tmp_path).local_mounts == (
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
        (mount.path, mount.type, mount.read_only, mount.options) for mount in facts(tmp_path).remote_mounts or ()
    ] == [
        ("/ceph", "ceph", False, ("name=ada", "acl")),
        ("/data", "nfs4", False, ("nosuid", "vers=4.2", "soft", "proto=tcp", "nconnect=16", "addr=10.0.0.9")),
        ("/dav", "fuse.davfs", False, ()),
        ("/s3", "fuse.rclone", False, ("allow_other",)),
        ("/sets", "nfs4", True, ("soft",)),
        ("/win", "cifs", True, ("vers=3.1.1", "domain=A", "soft")),
    ]


def test_the_files_of_needrestart_together(tmp_path: Path) -> None:
    assert facts(tmp_path).needrestart is None
    assert "needrestart" not in facts(tmp_path).gaps
    put(
        tmp_path,
        "/etc/needrestart/needrestart.conf",
        "#$nrconf{restart} = 'i';\n$nrconf{restart} = 'l';\n$nrconf{override_rc} = {\n    qr(^dbus) => 0,\n"
        "    #qr(^slurm) => 0,\n    qr(^(open|free)swan) => 0,\n    qr(^cron) => 1,\n};\n",
    )
    put(tmp_path, "/etc/needrestart/conf.d/a.conf", "$nrconf{restart} = 'a';\n$nrconf{override_rc}{qr(^docker)} = 0;\n")
    assert facts(tmp_path).needrestart == Needrestart(mode="a", spared=("^(open|free)swan", "^dbus", "^docker"))


def test_slurm_is_read_from_the_folder_that_the_node_has(tmp_path: Path) -> None:
    assert facts(tmp_path).slurm is None
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
    assert facts(tmp_path).cloud_init_running is False
    put(tmp_path, "/run/cloud-init/status.json", "{}")
    assert facts(tmp_path).cloud_init_running is True
    put(tmp_path, "/run/cloud-init/result.json", "{}")
    assert facts(tmp_path).cloud_init_running is False


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
    assert facts(tmp_path).container_devices == (
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
    nodes = facts(tmp_path).device_nodes or ()
    assert [(node.path, node.linked) for node in nodes] == [("/dev/nvidia0", True), ("/dev/nvidia1", False)]
    assert all(node.created_s is not None and node.created_s > 0 for node in nodes)
