# ruff: noqa: E501 - lines are as long as the tools print them
"""What the probe's further sources report on a node with one T4: typed after the tools' formats, not recorded."""

import json
from pathlib import Path
from typing import Any

from gpunode.probe import CommandResult


def answer(stdout: str = "", rc: int = 0, stderr: str = "", *argv: str, **more: Any) -> CommandResult:
    """A command's answer."""
    return CommandResult(argv=list(argv or ("tool",)), rc=rc, stdout=stdout, stderr=stderr, seconds=0.1, **more)


LSCPU = """\
Architecture:            x86_64
CPU(s):                  8
Vendor ID:               GenuineIntel
  Model name:            Intel(R) Xeon(R) Gold 6226R CPU @ 2.90GHz
    Thread(s) per core:  2
    Core(s) per socket:  2
    Socket(s):           2
NUMA node(s):            2
NUMA node0 CPU(s):       0-3
NUMA node1 CPU(s):       4-7
"""
LDCONFIG = """\
\tlibnvidia-ml.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ml.so.1
\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /usr/local/lib/libcuda.so.1
"""
LIBRARY_FILES = """\
/lib/i386-linux-gnu/libcuda.so.1\t/usr/lib/i386-linux-gnu/libcuda.so.535.309.01
/lib/x86_64-linux-gnu/libcuda.so.1\t/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.309.01
/lib/x86_64-linux-gnu/libnvidia-ml.so.1\t/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.309.01
/usr/lib/x86_64-linux-gnu/libnccl.so\t/usr/lib/x86_64-linux-gnu/libnccl.so.2.27.3
/usr/local/lib/libcuda.so.1\t/usr/local/lib/libcuda.so.1
"""
TOPO = """\
\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-3\t0\t\tN/A
NIC0\tPHB\t X

Legend:

  X    = Self

NIC Legend:

  NIC0: mlx5_0
"""
PEERS = " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
NVLINK = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11111111-2222-3333-4444-555555555555)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
"""
NVLINK_ERRORS = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11111111-2222-3333-4444-555555555555)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 2
\t Link 0: CRC Errors: 0
"""
INFORMATION = """\
Model: \t\t Tesla T4
IRQ:   \t\t 47
GPU UUID: \t GPU-11111111-2222-3333-4444-555555555555
Video BIOS: \t 90.04.38.00.03
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t 0000:00:1e.0
Device Minor: \t 0
GPU Firmware: \t 535.309.01
GPU Excluded:\t No
"""
APT_CONFIG = """\
Unattended-Upgrade "";
Unattended-Upgrade::Origins-Pattern "";
Unattended-Upgrade::Origins-Pattern:: "origin=Debian,codename=${distro_codename},label=Debian";
Unattended-Upgrade::Package-Blacklist "";
Unattended-Upgrade::Package-Blacklist:: "^nvidia-";
APT::Periodic "";
APT::Periodic::Update-Package-Lists "1";
APT::Periodic::Unattended-Upgrade "1";
"""
DOCKER_INFO = """\
version="28.5.1"
default="runc"
cgroup_driver="systemd"
cgroup_version="2"
storage="overlay2"
live_restore=true
runtime="io.containerd.runc.v2"
runtime="nvidia"
runtime="runc"

"""
CDI = """\
file\t/etc/cdi/nvidia.yaml\t12345
node\t/dev/nvidia-uvm\t510\t0
cdiVersion\t0.5.0
driver\t535.309.01
kind\tnvidia.com/gpu
missing\t/usr/lib/x86_64-linux-gnu/libcuda.so.535.247.01
name\tall
name\t0
file\t/var/run/cdi/other.json\t99
cdiVersion\t0.6.0
kind\texample.org/fpga
name\tone
"""
DAEMON_JSON = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}, "default-runtime": "nvidia"}\n'
TOOLKIT = '[nvidia-container-cli]\nno-cgroups = false\n\n[nvidia-container-runtime]\nmode = "auto"\n'
JOURNAL = """\
2026-11-20T09:00:00+0000 gpu-01 kernel: Linux version 6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org)
2026-11-20T09:10:00+0000 gpu-01 kernel: NVRM: Xid (PCI:0000:00:1e): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
2026-11-20T09:10:01+0000 gpu-01 kernel: pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)
2026-11-20T09:11:00+0000 gpu-01 kernel: Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB
2026-11-20T09:12:00+0000 gpu-01 kernel: mce: [Hardware Error]: Machine check events logged
"""
SHOW_MORE = """
Id=chrony.service
LoadState=loaded
ActiveState=active
SubState=running
UnitFileState=enabled
StateChangeTimestamp=Fri 2026-11-20 09:00:01 UTC
NRestarts=2
LimitNOFILE=524288
LimitMEMLOCK=infinity
"""
DF_LOCAL = """\
Type     1K-blocks      Avail   Inodes    IFree Mounted on
ext4     264212084   80837624 16777216 16292685 /
vfat        126710     114500        -        - /boot/efi
ext4       1048576     524288        0        0 /mnt/with a blank
"""
MEMINFO = "MemTotal:       394264852 kB\nMemAvailable:   380000000 kB\nSwapTotal: 0 kB\nHugePages_Total:       4\nHugepagesize: 2048 kB\n"
SMART = (
    '{"critical_warning":0,"temperature":311,"avail_spare":100,"percent_used":3,"media_errors":"0","power_cycles":"20"}'
)
# As a host with a bond, Docker and a VLAN prints it: the bond's ports have no address and no line.
ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
bond0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
bond0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
bond0.20\t0014A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""
NODE_MEMINFO = "Node 0 MemTotal:       197132426 kB\nNode 0 MemFree:        190000000 kB\n"
SOURCES = (
    "Types: deb\nURIs: https://packages.example.org/cuda\n https://mirror.example.org/cuda\nSuites: /\nEnabled: no\n"
)

RULESET = """\
{"nftables": [{"metainfo": {"version": "1.0.6", "release_name": "Lester Gooch #5", "json_schema_version": 1}}, \
{"table": {"family": "ip", "name": "filter", "handle": 1}}, \
{"chain": {"family": "ip", "table": "filter", "name": "INPUT", "handle": 1, "type": "filter", "hook": "input", "prio": 0, "policy": "drop"}}, \
{"table": {"family": "inet", "name": "other", "handle": 2}}, \
{"chain": {"family": "inet", "table": "other", "name": "in", "handle": 1, "type": "filter", "hook": "input", "prio": 0, "policy": "accept"}}, \
{"rule": {"family": "inet", "table": "other", "chain": "in", "handle": 2, "expr": [{"match": {"op": "==", "left": {"meta": {"key": "iif"}}, "right": "lo"}}, {"accept": null}]}}]}
"""
SOCKETS = """\
udp   UNCONN 0      0      127.0.0.53%lo:53         0.0.0.0:*    users:(("systemd-resolve",pid=700,fd=13))
tcp   LISTEN 0      128          0.0.0.0:22         0.0.0.0:*    users:(("sshd",pid=800,fd=3))
tcp   LISTEN 0      128             [::]:22            [::]:*    users:(("sshd",pid=800,fd=4))
tcp   LISTEN 0      4096               *:9400             *:*    users:(("dcgm-exporter",pid=900,fd=7))
tcp   LISTEN 0      64           0.0.0.0:2049       0.0.0.0:*
"""
ADDRESSES = r"""1: lo    inet 127.0.0.1/8 scope host lo\       valid_lft forever preferred_lft forever
2: eth0    inet 10.0.0.7/24 brd 10.0.0.255 scope global eth0\       valid_lft forever preferred_lft forever
2: eth0    inet6 fe80::5054:ff:fe12:3456/64 scope link \       valid_lft forever preferred_lft forever
"""
SSH = json.loads((Path(__file__).parents[2] / "fixtures" / "ssh" / "daemon.json").read_text(encoding="utf-8"))
COMMANDS: dict[str, CommandResult] = {
    **{name: answer(reported["stdout"], reported["rc"]) for name, reported in SSH.items()},
    "nft-ruleset": answer(RULESET),
    "nft-own": answer("", 1, "Error: No such file or directory\n"),
    "sockets": answer(SOCKETS),
    "addresses": answer(ADDRESSES),
    "lscpu": answer(LSCPU),
    "journal-xids": answer(JOURNAL),
    "journal-links": answer(JOURNAL.partition("\n")[0] + "\n"),
    "ipmi-devices": answer(""),
    "rdma-nodes": answer(""),
    "ldconfig": answer(LDCONFIG),
    "library-files": answer(LIBRARY_FILES),
    "modules-dep": answer("/lib/modules/6.1.0-56-cloud-amd64/modules.dep:updates/dkms/nvidia-current.ko\n"),
    "module-files": answer("/lib/modules/6.1.0-56-cloud-amd64/updates/dkms/nvidia-current.ko\t56823808\t1760000000\n"),
    "initramfs": answer(
        "6.1.0-56-cloud-amd64\t/boot/initrd.img-6.1.0-56-cloud-amd64\t1750000000\tmodule\t56000000"
        "\tusr/lib/modules/6.1.0-56-cloud-amd64/updates/dkms/nvidia-current.ko\n"
    ),
    "nvidia-smi-topo": answer(TOPO, 0, "", "nvidia-smi", "topo", "-m"),
    "nvidia-smi-p2p": answer(PEERS, 0, "", "nvidia-smi", "topo", "-p2p", "r"),
    "nvidia-smi-nvlink": answer(NVLINK, 0, "", "nvidia-smi", "nvlink", "--status"),
    "nvidia-smi-nvlink-errors": answer(NVLINK_ERRORS, 0, "", "nvidia-smi", "nvlink", "-e"),
    "version-nv-fabricmanager": answer("Fabric Manager version is : 535.309.01\n", 0, "", "nv-fabricmanager"),
    "version-nv-hostengine": answer("Version : 3.3.9\nBuild ID : 123\n", 0, "", "nv-hostengine"),
    "version-dcgmi": answer("", 127, "dcgmi: No such file or directory", "dcgmi"),
    "version-docker": answer("Docker version 28.5.1, build e180ab8\n", 0, "", "docker", "--version"),
    "version-containerd": answer("containerd github.com/containerd/containerd v1.7.28 b98a3aa\n"),
    "version-podman": answer("", 127, "podman: No such file or directory"),
    "version-runc": answer("runc version 1.2.5\ncommit: v1.2.5-0-g59923ef\n"),
    "version-crun": answer("", 127, "crun: No such file or directory"),
    "version-nvidia-ctk": answer("NVIDIA Container Toolkit CLI version 1.18.0\ncommit: f8daa5e\n"),
    "docker-info": answer(DOCKER_INFO, 0, "", "docker", "info"),
    "cdi-specs": answer(CDI),
    "signs": answer(
        "/usr/bin/nvidia-uninstall\n/usr/bin/unattended-upgrade\n/usr/local/cuda-12.4/bin/cuda-uninstaller\n"
    ),
    "repository-files": answer("/etc/apt/sources.list\n/etc/apt/sources.list.d/cuda.sources\n"),
    "apt-config": answer(APT_CONFIG),
    "variables": answer("/etc/environment\tCUDA_LAUNCH_BLOCKING\t1\nsystemd\tNCCL_DEBUG\tINFO\n"),
    "boot-settings": answer(
        "/usr/lib/sysctl.d/50-default.conf\tvm.swappiness\t60\n/etc/sysctl.d/90-gpunode.conf\tvm.swappiness\t10\n"
    ),
    "cpu-clocks": answer(
        "idle_latency_us\t133\t8\n"
        "scaling_driver\tintel_pstate\t8\nscaling_governor\tperformance\t6\nscaling_governor\tpowersave\t2\n"
    ),
    "device-nodes": answer(
        "/dev/nvidia-caps\tfolder\t0755\troot\troot\t\t\n"
        "/dev/nvidia0\tcharacter\t0666\troot\troot\t195\t0\n"
        "/dev/nvidiactl\tfile\t0644\troot\troot\t\t\n"
    ),
    "device-links": answer("/dev/nvidia0\t20\tyes\n"),
    "container-devices": answer(f"docker-{'0a' * 32}.scope\tno\t3600000000\t0\n"),
    "own-name": answer("name\tgpu-01\naddress\t127.0.1.1\naddress\t10.0.0.7\n"),
    "local-mounts": answer("/\t/dev/sda1\text4\tro\trw\n/data\t/dev/sdb1\txfs\trw\t\n"),
    "remote-mounts": answer("/home\tstore:/home\tnfs4\trw\trw,relatime,vers=4.2,hard,nconnect=8\n"),
    "needrestart": answer("mode\ta\nspared\t^docker\n"),
    "slurm": answer("/etc/slurm/\n"),
    "version-slurmd": answer("slurm 24.05.2\n"),
    "slurm-controller": answer("SLURM_VERSION           = 24.11.1\n"),
    "dcgmi-versions": answer("Version : 4.7.0\n\nHostengine build info:\nVersion : 4.4.1\nBuild ID : 26\n"),
    "df-local": answer(DF_LOCAL),
    "journal-kernel": answer(JOURNAL),
    "nvme-nvme0": answer(SMART),
    "pci-paths": answer("0000:00:1e.0\t0000:00:01.0 0000:01:00.0\t17\n0000:5e:00.0\t0000:5d:00.0\t18\n"),
    "pci-acs": answer("0000:00:01.0\t000f\t001d\n0000:01:00.0\t000f\t0000\n"),
    "stuck-processes": answer("77\tdd\tio_schedule\n78\tnvidia-smi\t\n"),
    "systemctl-defaults": answer("DefaultLimitMEMLOCK=8388608\nDefaultLimitNOFILE=524288\n"),
    "timedatectl": answer("NTP=yes\nNTPSynchronized=yes\nTimezone=Etc/UTC\n"),
    "chronyc-tracking": answer(
        "C0A80001,192.168.0.1,3,1700000000.1,-0.000012,0.1,0.1,1.0,0.1,0.1,0.1,0.1,64.1,Normal\n"
    ),
}

_GPU = "/sys/bus/pci/devices/0000:00:1e.0/"
_PORT = "/sys/bus/pci/devices/0000:00:01.0/"
_HCA = "/sys/class/infiniband/mlx5_0/"
_BRIDGE = "PCI_CLASS=60400\nPCI_ID=8086:347A\n"

GRUB = """\
set default="${saved_entry}"
menuentry 'Debian GNU/Linux' $menuentry_id_option 'gnulinux-simple-0d1f' {
    linux /boot/vmlinuz-6.1.0-56-cloud-amd64 root=UUID=0d1f ro quiet
}
"""
FILES: dict[str, str | None] = {
    "/boot/grub/grub.cfg": GRUB,
    "/boot/grub/grubenv": "saved_entry=gnulinux-simple-0d1f\n",
    "/run/gpunode/gpu-settings.json": None,
    "/etc/slurm/slurm.conf": "nodename=DEFAULT Gres=gpu:4\nNodeName=gpu-[01-12] Gres=gpu:h100:8(S:0-1),nic:2 CPUs=8\n",
    "/etc/slurm/gres.conf": "NodeName=gpu-[02-12] Name=gpu File=/dev/nvidia[0-7]\nName=gpu File=/dev/nvidia[0-3,6]\n",
    "/etc/slurm/cgroup.conf": "ConstrainDevices = Yes # why\n",
    "/sys/kernel/mm/memory_peers/": "nv_mem\nnv_mem_nc\n",
    "/etc/group": "sudo:x:27:ada\ndocker:x:999:ada,bob\n",
    "/var/lib/gpunode/updates/pending.json": None,
    "/proc/driver/nvidia/gpus/": "0000:00:1e.0\n",
    "/proc/driver/nvidia/gpus/0000:00:1e.0/information": INFORMATION,
    "/proc/driver/nvidia/params": 'ModifyDeviceFiles: 1\nRegistryDwords: "RmX=1"\n',
    "/proc/meminfo": MEMINFO,
    "/sys/devices/system/cpu/online": "0-7\n",
    "/sys/devices/system/cpu/present": "0-7\n",
    "/sys/devices/system/cpu/possible": "0-7\n",
    "/sys/devices/system/cpu/smt/control": "on\n",
    "/sys/class/infiniband_verbs/": None,
    "/sys/class/infiniband_mad/": None,
    "/proc/uptime": "3600.50 7000.00\n",
    "/proc/net/route": ROUTES,
    "/proc/self/status": "Cpus_allowed_list:\t0-2,8\n",
    "/proc/loadavg": "4.66 4.09 2.81 17/249 21657\n",
    "/proc/sys/vm/swappiness": "60\n",
    "/etc/gpunode/gpu-settings.json": None,
    "/var/lib/gpunode/kernel_tuning/command-line": None,
    "/proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t33554432\n",
    "/sys/module/": "ext4\nnvidia\nnvidia_uvm\nnvidiafb\n",
    "/sys/module/nvidia_uvm/parameters/uvm_debug_prints": "0\n",
    "/sys/kernel/security/lockdown": "none [integrity] confidentiality\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "/sys/class/dmi/id/sys_vendor": "Supermicro\n",
    "/sys/class/dmi/id/product_name": "SYS-4029GP-TRT\n",
    "/sys/class/dmi/id/board_name": None,
    "/sys/class/dmi/id/bios_version": "3.3\n",
    "/sys/class/dmi/id/bios_date": "02/21/2020\n",
    "/sys/class/iommu/": "dmar0\n",
    _GPU + "current_link_speed": "2.5 GT/s PCIe\n",
    _GPU + "max_link_speed": "8.0 GT/s PCIe\n",
    _GPU + "current_link_width": "8\n",
    _GPU + "max_link_width": "16\n",
    _GPU + "numa_node": "1\n",
    _GPU + "local_cpulist": "4-7\n",
    _GPU + "power_state": "D0\n",
    _GPU + "iommu_group/type": "identity\n",
    "/sys/bus/pci/devices/": "0000:00:00.0\n0000:00:01.0\n0000:00:1e.0\n0000:01:00.0\n0000:5d:00.0\n0000:5e:00.0\n",
    _PORT + "uevent": _BRIDGE,
    _PORT + "current_link_speed": "Unknown\n",
    _PORT + "max_link_speed": "16.0 GT/s PCIe\n",
    _PORT + "current_link_width": "0\n",
    _PORT + "max_link_width": "255\n",
    "/sys/bus/pci/devices/0000:01:00.0/uevent": _BRIDGE,
    "/sys/bus/pci/devices/0000:5d:00.0/uevent": _BRIDGE,
    "/sys/bus/pci/devices/0000:5e:00.0/uevent": "DRIVER=mlx5_core\nPCI_CLASS=20700\nPCI_ID=15B3:101B\n",
    "/sys/bus/pci/devices/0000:5e:00.0/numa_node": "-1\n",
    "/sys/devices/system/node/": "has_cpu\nnode0\nnode1\nonline\n",
    "/sys/devices/system/node/node0/cpulist": "0-3\n",
    "/sys/devices/system/node/node0/distance": "10 21\n",
    "/sys/devices/system/node/node0/meminfo": NODE_MEMINFO,
    "/sys/devices/system/node/node1/cpulist": "\n",
    "/sys/devices/system/edac/mc/": "mc0\npower\n",
    "/sys/devices/system/edac/mc/mc0/mc_name": "Skylake Socket#0 IMC#0\n",
    "/sys/devices/system/edac/mc/mc0/ce_count": "12\n",
    "/sys/block/": "loop0\nnvme0n1\nsda\n",
    "/sys/block/nvme0n1/size": "7501476528\n",
    "/sys/block/nvme0n1/queue/rotational": "0\n",
    "/sys/block/nvme0n1/ro": "0\n",
    "/sys/block/nvme0n1/device/model": "SAMSUNG MZQL23T8HCLS-00A07   \n",
    "/sys/block/sda/size": "1000\n",
    "/sys/class/nvme/": "nvme0\n",
    "/sys/class/nvme/nvme0/model": "SAMSUNG MZQL23T8HCLS-00A07\n",
    "/sys/class/nvme/nvme0/firmware_rev": "GDC5602Q\n",
    "/sys/class/nvme/nvme0/state": "live\n",
    "/sys/class/nvme/nvme0/device/uevent": "DRIVER=nvme\nPCI_SLOT_NAME=0000:5F:00.0\n",
    "/sys/class/nvme/nvme0/device/numa_node": "0\n",
    "/sys/class/nvme/nvme0/hwmon3/temp1_input": "37850\n",
    "/sys/class/net/": "docker0\neth0\nib0\nlo\n",
    "/sys/class/net/eth0/operstate": "up\n",
    "/sys/class/net/eth0/speed": "25000\n",
    "/sys/class/net/eth0/mtu": "9000\n",
    "/sys/class/net/eth0/carrier_changes": "3\n",
    "/sys/class/net/eth0/device/uevent": "DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:5e:00.0\n",
    "/sys/class/net/eth0/device/numa_node": "1\n",
    "/sys/class/net/eth0/statistics/rx_errors": "7\n",
    "/sys/class/net/ib0/operstate": "down\n",
    "/sys/class/net/ib0/speed": "-1\n",
    "/sys/class/infiniband/": "mlx5_0\n",
    _HCA + "fw_ver": "20.31.1014\n",
    _HCA + "board_id": "MT_0000000223\n",
    _HCA + "hca_type": "MT4123\n",
    _HCA + "device/uevent": "PCI_SLOT_NAME=0000:5e:00.0\n",
    _HCA + "device/numa_node": "1\n",
    _HCA + "ports/1/state": "4: ACTIVE\n",
    _HCA + "ports/1/phys_state": "5: LinkUp\n",
    _HCA + "ports/1/rate": "200 Gb/sec (4X HDR)\n",
    _HCA + "ports/1/link_layer": "InfiniBand\n",
    _HCA + "ports/1/lid": "0x1a\n",
    _HCA + "ports/1/counters/link_downed": "1\n",
    _HCA + "ports/1/hw_counters/out_of_sequence": "5\n",
    _HCA + "ports/1/gid_attrs/ndevs/0": "ib0\n",
    _HCA + "ports/1/gid_attrs/types/0": "IB/RoCE v1\n",
    _HCA + "ports/1/gids/0": "fe80:0000:0000:0000:0e42:a1ff:fe5e:0001\n",
    _HCA + "ports/1/gid_attrs/types/3": "RoCE v2\n",
    _HCA + "ports/1/gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0203\n",
    _HCA + "ports/1/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000\n",
    "/etc/security/limits.conf": "# a comment\n*  soft  memlock  unlimited  # why\nbroken line\n",
    "/etc/security/limits.d/": "90-gpu.conf\nREADME\n",
    "/etc/security/limits.d/90-gpu.conf": "@gpu\t-\tnofile\t1048576\n",
    "/etc/docker/daemon.json": DAEMON_JSON,
    "/etc/nvidia-container-runtime/config.toml": TOOLKIT,
    "/etc/containerd/config.toml": "version = 2\n",
    "/etc/apt/sources.list": "deb [signed-by=/x.gpg] https://download.example.org/docker bookworm stable\n#deb http://y/cuda /\n",
    "/etc/apt/sources.list.d/cuda.sources": SOURCES,
    "/etc/dnf/automatic.conf": None,
    "/etc/dnf/dnf.conf": None,
    "/run/reboot-required.pkgs": "linux-image-amd64\nlinux-image-amd64\n",
    "/run/gpunode/revert-accounts.json": None,
    "/run/gpunode/revert-firewall.json": '{"change": "firewall", "at": 1.5, "failed": ["/etc/a: No space left"]}\n',
    "/run/gpunode/revert-ssh_hardening.json": None,
    "/var/log/nvidia-installer.log": "nvidia-installer log file '/var/log/nvidia-installer.log'\ninstaller version: 550.54.14\n",
}
