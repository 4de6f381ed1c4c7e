"""What each further source of the probe records, on folders made to look like a node."""

import json
import os
import re
import stat
import subprocess
import time
from pathlib import Path

import pytest
from probe_node import collect, link, printing, put, tool

from gpunode.facts import facts_from_bundle
from gpunode.onnode import probe as script
from gpunode.onnode.probe import Probe, Sink

DEVICES = "/sys/bus/pci/devices/"


def stdout(root: Path, key: str) -> str:
    return collect(root, root / "bin").commands[key].stdout


def pci_function(root: Path, path: str, uevent: str) -> str:
    """A function below /sys/devices with its link on the bus; its slot."""
    slot = path.rpartition("/")[2]
    put(root, f"/sys/devices/{path}/uevent", uevent)
    link(root, f"{DEVICES}{slot}", f"../../../devices/{path}")
    return slot


def config_space(acs_control: int | None) -> bytes:
    """4096 bytes with a vendor capability, and an ACS capability behind it."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x000B | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    if acs_control is not None:
        space[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x14C:0x14E] = (0x5F).to_bytes(2, "little")
        space[0x14E:0x150] = acs_control.to_bytes(2, "little")
    return bytes(space)


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """A GPU behind a switch, a NIC with a virtual function, a disk controller, a host bridge."""
    root_port, switch = "pci0000:16/0000:16:01.0", "pci0000:16/0000:16:01.0/0000:17:00.0"
    pci_function(tmp_path, "pci0000:00/0000:00:00.0", "PCI_CLASS=60000\nPCI_ID=8086:0D57\n")
    pci_function(tmp_path, "pci0000:00/0000:00:17.0", "PCI_CLASS=10601\nPCI_ID=8086:A182\n")
    pci_function(tmp_path, root_port, "PCI_CLASS=60400\nPCI_ID=8086:347A\n")
    pci_function(tmp_path, switch, "PCI_CLASS=60400\nPCI_ID=1000:C030\n")
    pci_function(tmp_path, f"{switch}/0000:18:00.0", "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n")
    pci_function(tmp_path, f"{root_port}/0000:19:00.0", "PCI_CLASS=20700\nPCI_ID=15B3:101B\n")
    pci_function(tmp_path, f"{root_port}/0000:19:00.1", "PCI_CLASS=20700\nPCI_ID=15B3:101C\n")
    pci_function(tmp_path, "pci0000:5d/0000:5d:00.0", "PCI_CLASS=10802\nPCI_ID=144D:A80A\n")
    link(tmp_path, f"/sys/devices/{root_port}/0000:19:00.1/physfn", "../0000:19:00.0")
    link(tmp_path, f"/sys/devices/{switch}/0000:18:00.0/iommu_group", "/sys/kernel/iommu_groups/17")
    put(tmp_path, f"/sys/devices/{switch}/0000:18:00.0/current_link_speed", "32.0 GT/s PCIe\n")
    put(tmp_path, f"/sys/devices/{root_port}/config", config_space(0x1D))
    put(tmp_path, f"/sys/devices/{switch}/config", config_space(None))
    return tmp_path


def test_places_on_the_bus(bus: Path) -> None:
    bundle = collect(bus, bus / "bin")
    assert bundle.commands["pci-paths"].stdout.splitlines() == [
        "0000:18:00.0\t0000:16:01.0 0000:17:00.0\t17",
        "0000:19:00.0\t0000:16:01.0\t",
        "0000:5d:00.0\t\t",
    ]
    kept = {path.split("/")[5] for path in bundle.files if path.startswith(DEVICES) and path != DEVICES}
    assert kept == {"0000:16:01.0", "0000:17:00.0", "0000:18:00.0", "0000:19:00.0", "0000:5d:00.0"}
    assert bundle.files[f"{DEVICES}0000:18:00.0/current_link_speed"] == "32.0 GT/s PCIe\n"
    assert f"{DEVICES}0000:18:00.0/max_link_speed" not in bundle.files


def test_access_control_is_read_from_configuration_space(bus: Path) -> None:
    result = collect(bus, bus / "bin").commands["pci-acs"]
    assert (result.rc, result.stdout) == (0, "0000:16:01.0\t005f\t001d\n")


def test_configuration_space_that_is_cut_is_reported(bus: Path) -> None:
    put(bus, "/sys/devices/pci0000:16/0000:16:01.0/config", config_space(0x1D)[:64])
    result = collect(bus, bus / "bin").commands["pci-acs"]
    assert (result.rc, result.stdout) == (1, "")
    assert result.stderr == "the configuration space of 1 of 2 bridges cannot be seen"


def test_the_facts_of_that_bus(bus: Path) -> None:
    facts = facts_from_bundle(collect(bus, bus / "bin"))
    (gpu,) = facts.gpus_on_bus or ()
    assert (gpu.ports, gpu.iommu_group) == (("0000:17:00.0", "0000:16:01.0"), 17)
    assert gpu.link is not None
    assert gpu.link.speed_gt_per_s == 32.0
    assert [device.class_id for device in facts.pci_io or ()] == ["020700", "010802"]
    assert [(port.slot, port.redirects) for port in facts.pci_acs or ()] == [("0000:16:01.0", True)]


def test_a_loop_in_configuration_space_ends() -> None:
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    assert script.extended_capability(bytes(space), 0x000D) is None
    assert script.extended_capability(b"\xff" * 4096, 0x000D) is None
    assert script.extended_capability(b"", 0x000D) is None


def test_trees(tmp_path: Path) -> None:
    put(tmp_path, "/sys/class/net/eth0/device/uevent", "DRIVER=e1000\n")
    put(tmp_path, "/sys/class/net/eth0/operstate", "up\n")
    put(tmp_path, "/sys/class/net/docker0/operstate", "up\n")
    put(tmp_path, "/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    put(tmp_path, "/sys/class/infiniband/mlx5_0/ports/2/counters/link_downed", "0\n")
    put(tmp_path, "/sys/module/nvidia_uvm/parameters/uvm_x", "1\n")
    put(tmp_path, "/sys/module/nvidiafb/parameters/x", "1\n")
    put(tmp_path, "/sys/module/ext4/parameters/x", "1\n")
    bundle = collect(tmp_path, tmp_path / "bin")
    trees = ("/sys/class/", "/sys/module/")
    assert {path for path, text in bundle.files.items() if path.startswith(trees) and text is not None} == {
        "/sys/class/net/",
        "/sys/class/net/eth0/device/uevent",
        "/sys/class/net/eth0/operstate",
        "/sys/class/infiniband/",
        "/sys/class/infiniband/mlx5_0/ports/1/state",
        "/sys/class/infiniband/mlx5_0/ports/2/counters/link_downed",
        "/sys/module/",
        "/sys/module/nvidia_uvm/parameters/uvm_x",
    }
    assert bundle.files["/sys/class/nvme/"] is None


def test_a_tree_that_hangs_is_named_and_the_others_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sysfs file of a device that is gone: the read never returns."""
    put(tmp_path, "/sys/class/infiniband/mlx5_0/fw_ver", "20.31\n")
    put(tmp_path, "/sys/class/net/eth0/device/uevent", "DRIVER=e1000\n")
    content = Probe.content

    def hanging(probe: Probe, path: str) -> bytes:
        if path.endswith("/fw_ver"):
            time.sleep(20)
        return content(probe, path)

    monkeypatch.setattr(Probe, "content", hanging)
    started = time.monotonic()
    bundle = Probe(root=str(tmp_path), path=str(tmp_path / "bin"), passive_s=2).collect()
    assert time.monotonic() - started < 6
    assert "/sys/class/infiniband/: not finished within 2 s" in bundle["commands"]["probe-read"]["stderr"]
    assert bundle["files"]["/sys/class/net/eth0/device/uevent"] == "DRIVER=e1000\n"


def test_a_value_that_the_kernel_has_not_just_now_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "/sys/class/net/eth0/device/uevent", "DRIVER=e1000\n")
    content = Probe.content

    def refusing(probe: Probe, path: str) -> bytes:
        if path.endswith("/speed"):
            raise OSError(22, "Invalid argument")
        if path.endswith("/mtu"):
            raise OSError(5, "Input/output error")
        return content(probe, path)

    monkeypatch.setattr(Probe, "content", refusing)
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.commands["probe-read"].stderr == "/sys/class/net/eth0/mtu: Input/output error"
    assert "/sys/class/net/eth0/speed" not in bundle.files


def test_copies_of_libraries(tmp_path: Path) -> None:
    put(tmp_path, "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1.2", "ELF")
    put(tmp_path, "/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.535.1.2")
    put(tmp_path, "/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.535.1.2", "ELF")
    put(tmp_path, "/usr/lib/x86_64-linux-gnu/libnuma.so.1")
    link(tmp_path, "/usr/lib/x86_64-linux-gnu/libcuda.so.1", "libcuda.so.535.1.2")
    put(tmp_path, "/usr/local/cuda-12.4/lib64/libcudnn.so.9.1.0")
    put(tmp_path, "/usr/local/cuda-12.4/lib64/libcudart.so.12")
    put(tmp_path, "/usr/lib64/libnccl_static.a")
    put(tmp_path, "/opt/site/libnccl.so.2.18.3")
    link(tmp_path, "/usr/lib64/libnccl.so.2", "gone")
    cache = [
        "\tlibnccl.so.2 (libc6,x86-64) => /opt/site/libnccl.so.2.18.3",
        "\tlibc.so.6 (libc6,x86-64) => /lib/libc.so.6",
    ]
    tool(tmp_path / "bin", "ldconfig", printing(cache))
    driver = "/usr/lib/x86_64-linux-gnu/libcuda.so.535.1.2"
    empty = "/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.535.1.2"
    assert stdout(tmp_path, "library-files").splitlines() == [
        "/opt/site/libnccl.so.2.18.3\t/opt/site/libnccl.so.2.18.3\t0",
        f"/usr/lib/x86_64-linux-gnu/libcuda.so.1\t{driver}\t3",
        f"{driver}\t{driver}\t3",
        f"{empty}\t{empty}\t0",
        "/usr/local/cuda-12.4/lib64/libcudnn.so.9.1.0\t/usr/local/cuda-12.4/lib64/libcudnn.so.9.1.0\t0",
    ]


LISTING = """\
drwxr-xr-x   2 root     root            0 Nov 20 09:00 usr/lib/modules/6.1/updates/dkms
-rw-r--r--   1 root     root     52000000 Nov 20 09:00 usr/lib/modules/6.1/updates/dkms/nvidia-current.ko
-rw-r--r--   1 root     root      1500000 Nov 20 09:00 usr/lib/modules/6.1/updates/dkms/nvidia-current-uvm.ko
-rw-r--r--   1 root     root        99000 Nov 20 09:00 usr/lib/modules/6.1/kernel/drivers/block/virtio_blk.ko
""".splitlines()
FOUND = "module\t52000000\tusr/lib/modules/6.1/updates/dkms/nvidia-current.ko"


@pytest.mark.parametrize(
    ("tools", "older", "budget_s", "expected"),
    [
        ({"lsinitramfs": printing(LISTING)}, True, None, FOUND),
        ({"lsinitrd": printing(["Image: /boot/initrd.img-6.1: 90M", *LISTING])}, True, None, FOUND),
        ({"lsinitramfs": printing(LISTING[3:])}, True, None, "without\t\t"),
        ({"lsinitramfs": "exit 1"}, True, None, "unknown\t\tlsinitramfs: exit status 1"),
        ({}, True, None, "unknown\t\tneither lsinitramfs nor lsinitrd is installed"),
        ({"lsinitramfs": printing(LISTING)}, True, 60.0, "unknown\t\tnot listed, to save time"),
        ({"lsinitramfs": printing(LISTING)}, True, 600.0, FOUND),
        # An image that is newer than the module is not read.
        ({"lsinitramfs": "exit 1"}, False, None, "newer\t\t"),
    ],
)
def test_an_initramfs_is_listed_if_it_is_older_than_the_module(
    tmp_path: Path, tools: dict[str, str], older: bool, budget_s: float | None, expected: str
) -> None:
    module, image = "/lib/modules/6.1/updates/dkms/nvidia-current.ko", "/boot/initrd.img-6.1"
    put(tmp_path, module, "ELF")
    put(tmp_path, image)
    now = int(time.time())
    written = now + (-100 if older else 100)
    os.utime(tmp_path / image.lstrip("/"), (written, written))
    for name, body in {"find": printing([module]), **tools}.items():
        tool(tmp_path / "bin", name, body)
    probe = Probe(root=str(tmp_path), path=f"{tmp_path / 'bin'}", budget_s=budget_s)
    script.module_files(probe)
    assert probe.commands["initramfs"]["stdout"] == f"6.1\t{image}\t{written}\t{expected}\n"
    path, size, changed = probe.commands["module-files"]["stdout"].split()
    assert (path, size) == (module, "3")
    assert abs(int(changed) - now) < 60


@pytest.mark.parametrize(
    ("budget_s", "command_s", "nvidia_tool_s", "passive_s"),
    [(None, 15, 30, 20), (10, 15, 30, 5), (94, 15, 30, 20), (190, 30, 60, 40), (950, 150, 300, 200)],
)
def test_more_time_for_the_whole_is_more_for_each_part(
    budget_s: float | None, command_s: float, nvidia_tool_s: float, passive_s: float
) -> None:
    probe = Probe(budget_s=budget_s)
    assert (probe.command_s, probe.nvidia_tool_s, probe.passive_s) == (command_s, nvidia_tool_s, passive_s)
    # What takes long may take all but the end of it.
    assert passive_s - 3 < probe.passive_left() <= passive_s - script.KILL_WAIT_S
    assert probe.deadline - time.monotonic() == pytest.approx(budget_s or 95, abs=1)


def test_of_the_boot_loader_only_what_decides_is_kept(tmp_path: Path) -> None:
    menu = "menuentry 'x' --id y {\n  insmod gzio\n  linux /boot/vmlinuz-6.1 ro password=s3cret\n}\n"
    put(tmp_path, "/boot/grub/grub.cfg", f'set timeout=5\npassword_pbkdf2 root grub.pbkdf2.AB\nset default="0"\n{menu}')
    put(tmp_path, "/boot/grub/grubenv", "# GRUB\nsaved_entry=y\nrecordfail=1\n#####")
    put(tmp_path, "/boot/efi/EFI/debian/grub.cfg", "search.fs_uuid ab root\nconfigfile $prefix/grub.cfg\n")
    files = collect(tmp_path, tmp_path / "bin").files
    assert files["/boot/grub/grub.cfg"] == (
        "set default=\"0\"\nmenuentry 'x' --id y {\n  linux /boot/vmlinuz-6.1 ro password=***\n}\n"
    )
    assert files["/boot/grub/grubenv"] == "saved_entry=y\n"
    assert "/boot/efi/EFI/debian/grub.cfg" not in files


def test_signs_of_other_installers(tmp_path: Path) -> None:
    put(tmp_path, "/usr/bin/nvidia-uninstall")
    put(tmp_path, "/usr/local/cuda-12.4/bin/cuda-uninstaller")
    put(
        tmp_path,
        "/var/log/nvidia-installer.log",
        "nvidia-installer log file\nlots of lines\ninstaller version: 550.54.14\n",
    )
    bundle = collect(tmp_path, tmp_path / "bin")
    assert bundle.commands["signs"].stdout == "/usr/bin/nvidia-uninstall\n/usr/local/cuda-12.4/bin/cuda-uninstaller\n"
    assert bundle.files["/var/log/nvidia-installer.log"] == "nvidia-installer log file\ninstaller version: 550.54.14\n"


def test_package_sources_about_other_things_are_named_alone(tmp_path: Path) -> None:
    put(tmp_path, "/etc/apt/sources.list", "deb http://deb.example.org bookworm main\n")
    put(tmp_path, "/etc/apt/sources.list.d/cuda.list", "deb https://x.example.org/cuda /\n")
    bundle = collect(tmp_path, tmp_path / "bin")
    assert len(bundle.commands["repository-files"].stdout.splitlines()) == 2
    assert "/etc/apt/sources.list" not in bundle.files
    assert bundle.files["/etc/apt/sources.list.d/cuda.list"] is not None


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        ("export NCCL_DEBUG=INFO\n", [("NCCL_DEBUG", "INFO")]),
        ('CUDA_LAUNCH_BLOCKING="1"\n', [("CUDA_LAUNCH_BLOCKING", "1")]),
        ("NCCL_SOCKET_IFNAME DEFAULT=eth0\n", [("NCCL_SOCKET_IFNAME", "eth0")]),
        ("A=1 LD_PRELOAD=/x.so; OMP_NUM_THREADS=1\n", [("LD_PRELOAD", "/x.so"), ("OMP_NUM_THREADS", "1")]),
        ('"CUDA_VISIBLE_DEVICES=0,1" other\n', [("CUDA_VISIBLE_DEVICES", "0,1")]),
        ("MY_CUDA_LAUNCH_BLOCKING=1\nHF_TOKEN=x\nunset LD_PRELOAD\n", []),
    ],
)
def test_variables(text: str, variables: list[tuple[str, str]]) -> None:
    assert script.settings_in(text) == variables


def test_variables_in_comments_do_not_count(tmp_path: Path) -> None:
    put(tmp_path, "/etc/profile.d/gpu.sh", "# export NCCL_DEBUG=INFO\n  export NCCL_DEBUG=WARN\n")
    assert stdout(tmp_path, "variables") == "/etc/profile.d/gpu.sh\tNCCL_DEBUG\tWARN\n"


def test_what_the_next_boot_sets_is_read_in_the_order_of_files(tmp_path: Path) -> None:
    put(tmp_path, "/usr/lib/sysctl.d/50-default.conf", "-vm.swappiness = 60\nkernel.core_pattern = |x\n")
    put(tmp_path, "/usr/lib/sysctl.d/90-x.conf", "vm.swappiness = 1\n")
    put(
        tmp_path, "/etc/sysctl.d/90-x.conf", "# vm.swappiness=2\nnet/ipv4/tcp_rmem = 4096\t131072 9\nvm.swappiness=10\n"
    )
    put(tmp_path, "/etc/sysctl.d/readme", "vm.swappiness = 7\n")
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    put(
        tmp_path,
        "/etc/tmpfiles.d/thp.conf",
        f"d /run/x 0755 root root -\nw! {path} - - - - madvise\n#w {path} - - - - never\n",
    )
    assert stdout(tmp_path, "boot-settings").splitlines() == [
        "/usr/lib/sysctl.d/50-default.conf\tvm.swappiness\t60",
        "/etc/sysctl.d/90-x.conf\tnet.ipv4.tcp_rmem\t4096 131072 9",
        "/etc/sysctl.d/90-x.conf\tvm.swappiness\t10",
        "/etc/tmpfiles.d/thp.conf\ttransparent_hugepage\tmadvise",
    ]


def test_systemd_that_hides_its_environment_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    tool(tmp_path / "bin", "systemctl", "echo 'Failed to connect to bus' >&2; exit 1")
    result = collect(tmp_path, tmp_path / "bin").commands["variables"]
    assert (result.rc, result.stderr) == (1, "systemd's environment: Failed to connect to bus")


def test_device_nodes(tmp_path: Path) -> None:
    put(tmp_path, "/dev/nvidia0")
    (tmp_path / "dev/nvidia0").chmod(0o640)
    (tmp_path / "dev/nvidia-caps").mkdir(mode=0o755)
    put(tmp_path, "/dev/nvidia-caps/nvidia-cap1")
    link(tmp_path, "/dev/nvidiactl", "nvidia0")
    rows = [line.split("\t") for line in stdout(tmp_path, "device-nodes").splitlines()]
    assert [(row[0], row[1], row[5]) for row in rows] == [
        ("/dev/nvidia-caps", "folder", ""),
        ("/dev/nvidia0", "file", ""),
        ("/dev/nvidiactl", "link", ""),
        ("/dev/nvidia-caps/nvidia-cap1", "file", ""),
    ]
    assert rows[1][2] == "0640"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_device_numbers(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    try:
        os.mknod(tmp_path / "dev/nvidia3", 0o666 | stat.S_IFCHR, os.makedev(195, 3))
    except PermissionError:
        pytest.skip("devices cannot be made here")
    (tmp_path / "dev/nvidia3").chmod(0o666)
    assert stdout(tmp_path, "device-nodes") == "/dev/nvidia3\tcharacter\t0666\troot\troot\t195\t3\n"


def test_docker_is_asked_only_where_it_runs(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "docker", f'echo "$1" >> {tmp_path}/calls; echo "Docker version 1.2.3"')
    assert "docker-info" not in collect(tmp_path, tmp_path / "bin").commands
    assert (tmp_path / "calls").read_text() == "--version\n"
    put(tmp_path, "/run/docker.pid", "1\n")
    assert "docker-info" in collect(tmp_path, tmp_path / "bin").commands


CDI_YAML = """\
---
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
- name: all
containerEdits:
  deviceNodes:
  - major: 510
    minor: 1
    path: /dev/nvidia-uvm-tools
  - path: /dev/nvidia-uvm
    type: c
    major: 510
  mounts:
  - containerPath: /x
    hostPath: /usr/lib/libcuda.so.535.1.2
  - hostPath: /usr/lib/gone.so
  hooks:
  - hookName: createContainer
"""


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_cdi(tmp_path: Path, form: str) -> None:
    text = CDI_YAML
    if form == "json":
        mounts = [{"hostPath": "/usr/lib/libcuda.so.535.1.2"}, {"hostPath": "/usr/lib/gone.so"}]
        text = json.dumps(
            {
                "cdiVersion": "0.5.0",
                "kind": "nvidia.com/gpu",
                "devices": [{"name": "0"}, {"name": "all"}],
                "containerEdits": {
                    "deviceNodes": [
                        {"path": "/dev/nvidia-uvm-tools", "major": 510, "minor": 1},
                        {"path": "/dev/nvidia-uvm", "major": 510},
                    ],
                    "mounts": mounts,
                },
            }
        )
    put(tmp_path, f"/etc/cdi/nvidia.{form}", text)
    put(tmp_path, "/etc/cdi/README", "name: x\n")
    put(tmp_path, "/usr/lib/libcuda.so.535.1.2")
    (spec,) = facts_from_bundle(collect(tmp_path, tmp_path / "bin")).cdi_specs or ()
    assert (spec.path, spec.size_bytes, spec.cdi_version) == (f"/etc/cdi/nvidia.{form}", len(text), "0.5.0")
    assert (spec.kind, spec.devices) == ("nvidia.com/gpu", ("0", "all"))
    assert (spec.driver_versions, spec.missing) == (("535.1.2",), ("/usr/lib/gone.so",))
    assert [(node.path, node.major, node.minor) for node in spec.nodes] == [
        ("/dev/nvidia-uvm", 510, None),
        ("/dev/nvidia-uvm-tools", 510, 1),
    ]


def test_simulated_modules_are_read_where_the_kernel_has_no_list(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for path, text in (
        ("run/gpunode-lab/proc-modules", "nvidia 1 0 - Live 0x0\n"),
        ("proc/modules", "ext4 1 0 - Live 0x0\n"),
    ):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert collect(root, tmp_path / "bin").files["/proc/modules"] == "ext4 1 0 - Live 0x0\n"
    (root / "proc/modules").unlink()
    assert collect(root, tmp_path / "bin").files["/proc/modules"] == "nvidia 1 0 - Live 0x0\n"


JOURNAL_LINE = "2026-11-20T09:00:00+0000 h kernel: NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."


def test_the_kernel_log_is_filtered_on_the_node(tmp_path: Path) -> None:
    tool(
        tmp_path / "bin",
        "journalctl",
        printing([JOURNAL_LINE, "2026-11-20T09:00:00+0000 h kernel: usb 1-1: new device"]),
    )
    tool(tmp_path / "bin", "dmesg", f"touch {tmp_path}/asked")
    assert stdout(tmp_path, "journal-kernel") == JOURNAL_LINE + "\n"
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("journal", ["exit 0", "echo No journal files were found >&2; exit 1"])
def test_dmesg_is_asked_where_the_journal_reports_nothing(tmp_path: Path, journal: str) -> None:
    tool(tmp_path / "bin", "journalctl", journal)
    tool(tmp_path / "bin", "dmesg", printing(["2026-11-20T09:00:00,1+00:00 Out of memory: Killed process 1 (x)"]))
    assert "Out of memory" in stdout(tmp_path, "dmesg")


def test_of_a_long_log_the_latest_lines_are_kept(tmp_path: Path) -> None:
    """More than the probe would keep of any output, most of it not requested."""
    script_text = "for n in range(140000): print('NVRM: line %06d' % n if n % 20 == 0 else 'x' * 40)"
    (tmp_path / "log.py").write_text(script_text)
    # The other questions of the journal get no line: each would take as long, in one process.
    tool(tmp_path / "bin", "journalctl", f'[ "$1" = -k ] || exit 0\nexec /usr/bin/python3 {tmp_path}/log.py')
    result = collect(tmp_path, tmp_path / "bin").commands["journal-kernel"]
    lines = result.stdout.splitlines()
    assert not result.truncated
    assert not result.timed_out
    assert (len(lines), lines[-1]) == (script.KERNEL_LINES, "NVRM: line 139980")


def test_a_sink_keeps_lines_that_come_in_pieces() -> None:
    sink = Sink(keep=re.compile("keep"))
    for piece in (b"ke", b"ep 1\nno\nkee", b"p 2\nke", b"ep 3"):
        sink.feed(piece)
    assert sink.text() == "keep 1\nkeep 2\nkeep 3\n"


def test_a_sink_is_full_of_one_endless_line() -> None:
    sink = Sink(keep=re.compile("keep"))
    sink.feed(b"x" * (script.OUTPUT_BYTES + 1))
    assert sink.full


def test_a_process_is_stuck_that_is_so_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STUCK_S", 0.3)
    rest = " ".join(str(number) for number in range(4, 53))
    put(tmp_path, "/proc/77/stat", f"77 (a) b) D {rest}\n")
    put(tmp_path, "/proc/77/wchan", "io_schedule")
    put(tmp_path, "/proc/78/stat", f"78 (sleeps) S {rest}\n")
    put(tmp_path, "/proc/79/stat", f"79 (short) D {rest}\n")
    waiting = script.waiting
    calls: list[int] = []

    def then_gone(probe: Probe) -> dict[str, tuple[str, str]]:
        if calls:
            put(tmp_path, "/proc/79/stat", f"79 (short) R {rest}\n")
        calls.append(1)
        return waiting(probe)

    monkeypatch.setattr(script, "waiting", then_gone)
    assert stdout(tmp_path, "stuck-processes") == "77\ta) b\tio_schedule\n"


def test_processors_are_counted_by_their_settings(tmp_path: Path) -> None:
    for policy, cpus, governor in ((0, "0 1", "performance"), (2, "2 3", "performance"), (4, "4", "powersave")):
        folder = f"/sys/devices/system/cpu/cpufreq/policy{policy}/"
        put(tmp_path, folder + "related_cpus", cpus + "\n")
        put(tmp_path, folder + "scaling_governor", governor + "\n")
    for cpu in range(3):
        for number, (latency, disabled) in enumerate((("0", "0"), ("2", "0"), ("133", str(cpu // 2)), ("x", "0"))):
            folder = f"/sys/devices/system/cpu/cpu{cpu}/cpuidle/state{number}/"
            put(tmp_path, folder + "latency", latency + "\n")
            put(tmp_path, folder + "disable", disabled + "\n")
    put(tmp_path, "/sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n")
    assert stdout(tmp_path, "cpu-clocks").splitlines() == [
        "idle_latency_us\t133\t2",
        "idle_latency_us\t2\t1",
        "scaling_governor\tperformance\t4",
        "scaling_governor\tpowersave\t1",
    ]


def test_health_of_disks_is_asked_once_where_there_is_no_tool(tmp_path: Path) -> None:
    put(tmp_path, "/sys/class/nvme/nvme0/model", "x\n")
    put(tmp_path, "/sys/class/nvme/nvme1/model", "x\n")
    put(tmp_path, "/sys/class/nvme/nvme-fabrics/x", "")
    commands = collect(tmp_path, tmp_path / "bin").commands
    assert commands["nvme-nvme0"].rc == 127
    assert "nvme-nvme1" not in commands
    tool(tmp_path / "bin", "nvme", 'echo "$@"')
    assert stdout(tmp_path, "nvme-nvme1") == "smart-log /dev/nvme1 -o json\n"


def big_node(root: Path) -> Path:
    """Eight GPUs behind switches, twelve NICs, 256 processors, 2000 processes; tools that answer at once."""
    for number in range(8):
        chain = f"pci0000:{16 + number:02x}/0000:{16 + number:02x}:01.0/0000:{32 + number:02x}:00.0"
        pci_function(root, chain.rpartition("/")[0], "PCI_CLASS=60400\nPCI_ID=8086:347A\n")
        pci_function(root, chain, "PCI_CLASS=60400\nPCI_ID=1000:C030\n")
        slot = f"0000:{64 + number:02x}:00.0"
        pci_function(root, f"{chain}/{slot}", "DRIVER=nvidia\nPCI_CLASS=30200\nPCI_ID=10DE:2330\n")
        for name in script.PCI_FILES[1:]:
            put(root, f"/sys/devices/{chain}/{slot}/{name}", "1\n")
        put(root, f"/proc/driver/nvidia/gpus/{slot}/information", "Model: \t NVIDIA H100 80GB HBM3\n")
    for number in range(12):
        for counter in ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_wait"):
            put(root, f"/sys/class/infiniband/mlx5_{number}/ports/1/counters/{counter}", "0\n")
        put(root, f"/sys/class/net/ib{number}/device/uevent", "DRIVER=mlx5_core\n")
    for cpu in range(256):
        put(root, f"/sys/devices/system/cpu/cpufreq/policy{cpu}/scaling_governor", "performance\n")
    for pid in range(1000, 3000):
        put(root, f"/proc/{pid}/stat", f"{pid} (x) S " + "1 " * 40)
        (root / f"proc/{pid}/fd").mkdir()
    put(root, "/proc/driver/nvidia/version", "NVRM version: x\n")
    tools = root / "bin"
    for name in (
        "uname",
        "lscpu",
        "dkms",
        "systemctl",
        "ldconfig",
        "journalctl",
        "apt-config",
        "df",
        "find",
        "nvidia-smi",
    ):
        tool(tools, name, "echo x")
    return tools


def test_a_node_with_eight_gpus_takes_a_few_seconds(tmp_path: Path) -> None:
    """Five seconds are what a node of its own may take; here other tests share the processors."""
    tools = big_node(tmp_path)
    before = time.process_time()
    started = time.monotonic()
    bundle = collect(tmp_path, tools)
    elapsed, worked = time.monotonic() - started, time.process_time() - before
    assert bundle.commands["probe-read"].rc == 0
    print(f"\nthe probe on a made-up node of 8 GPUs: {elapsed:.2f} s, {worked:.2f} s of them Python's own")
    assert worked < 5
    assert elapsed < 15
    assert len(bundle.to_json()) < 500_000


def hung(tools: Path, name: str) -> None:
    tool(tools, name, "exec sleep 60")


@pytest.mark.parametrize("name", ["docker", "systemctl", "journalctl", "ldconfig", "nvme", "dkms"])
def test_one_tool_that_hangs_costs_its_limit_and_is_named(tmp_path: Path, name: str) -> None:
    put(tmp_path, "/run/docker.pid", "1\n")
    put(tmp_path, "/sys/class/nvme/nvme0/model", "x\n")
    tools = tmp_path / "bin"
    hung(tools, name)
    tool(tools, "sleep", "exec /bin/sleep 60")
    tool(tools, "uname", "echo Linux 6.1 x86_64")
    started = time.monotonic()
    bundle = Probe(root=str(tmp_path), path=f"{tools}", command_s=1, nvidia_tool_s=1, passive_s=6).collect()
    assert time.monotonic() - started < 9
    late = {key for key, result in bundle["commands"].items() if result["timed_out"]}
    assert late
    assert all(name in bundle["commands"][key]["argv"][0] for key in late)
    assert bundle["commands"]["uname"]["stdout"] == "Linux 6.1 x86_64\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_without_root_the_facts_report_what_was_not_seen() -> None:
    answer = subprocess.run(
        ["/usr/bin/python3", "-I", "-"],
        input=Path(script.__file__).read_bytes(),
        capture_output=True,
        check=True,
        timeout=90,
        cwd="/",
        user=65534,
        group=65534,
        extra_groups=[],
        start_new_session=True,
    )
    bundle = json.loads(answer.stdout)
    assert bundle["commands"]["device-holders"]["rc"] == 1
    dmesg = bundle["commands"].get("dmesg")
    assert dmesg is None or dmesg["rc"] in {0, 1}
