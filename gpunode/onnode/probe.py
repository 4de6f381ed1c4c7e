# ruff: noqa: PLR0913, PLR0917, PTH110, PTH112, PTH116, PTH118, PTH119, PTH123, PTH207, PTH208
# ruff: noqa: RUF005, S105, SIM105, UP031
"""The probe: reads the state of one node, changes nothing, prints one bundle (``gpunode.bundle/1``) to stdout.

Runs as ``python3 -I -`` on any Linux with Python 3.6 or later, as root or not; it needs only the standard library. It
leaves nothing behind: no copy of itself, no temporary file, no process, and it does not load the NVIDIA module.
(timedatectl starts systemd-timedated, which ends by itself.) Of processes it reports names, never arguments or
environments; values that are named as a secret, and passwords in URLs, are covered before anything leaves the node.

Order: sources that only read (/proc, /sys, the package database) run first and in parallel. NVIDIA's tools follow, one
after another, and only if the module is loaded already, because ``nvidia-smi`` run as root would load it. After one
that does not end in time no other is started.
"""

import base64
import collections
import datetime
import errno
import glob
import grp
import json
import os
import pwd
import re
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Deque, Dict, List, Optional, Pattern, Set, Tuple

Answer = Dict[str, Any]

SCHEMA = "gpunode.bundle/1"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
COMMAND_S = 15.0
NVIDIA_TOOL_S = 30.0
NVIDIA_LEAST_S = 5.0
"""With less time left, another of NVIDIA's tools is not started: a slow one would look like one that hangs."""
PASSIVE_S = 20.0
TOTAL_S = 95.0
TOTAL_PER_GPU_S = 2.5
TOTAL_MOST_S = 115.0
"""The whole probe ends within TOTAL_S and TOTAL_PER_GPU_S for each GPU: drivers without persistence initialise every
GPU again for each call, which takes seconds. TOTAL_MOST_S stays below the time that the fleet gives a node.
"""
OUTPUT_BYTES = 4 * 1024 * 1024
FILE_BYTES = 1024 * 1024
HOLDERS_S = 5.0
KILL_WAIT_S = 2.0
DRAIN_S = 0.5
STUCK_S = 1.0
"""A process seen in state D at both ends of this time is reported."""
NVME_S = 5.0
DCB_S = 5.0
SLURM_S = 5.0
TREE_ENTRIES = 1024
"""Maximum number of network interfaces, PCI functions … that are read; thousands of virtual functions are not."""
KEY_ENTRIES = 200
"""Maximum number of files of one folder that are searched for private keys: no user hides the keys of another."""
KERNEL_LINES = 4000
"""Maximum number of matching lines of the kernel's log, the latest."""
LOOK_BACK = "-7d"
"""How far the logs of earlier boots are read; journalctl's --since."""
IPMI_S = 5.0
IPMI_EVENTS = "100"
"""Maximum number of events of the BMC, the latest: each takes a request over a slow bus."""

# One row per source that is a plain file, a plain folder or a plain command. A source that depends on another source's
# answer is a function in PASSIVE below.
FILES = (
    "/etc/os-release",
    "/usr/lib/os-release",
    "/proc/cmdline",
    "/var/lib/gpunode/kernel_tuning/command-line",
    "/proc/modules",
    "/proc/meminfo",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/net/route",
    "/proc/sys/kernel/tainted",
    "/proc/sys/kernel/modules_disabled",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/sys/module/nvidia/version",
    "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
    "/sys/kernel/security/lockdown",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/present",
    "/sys/devices/system/cpu/possible",
    "/sys/devices/system/cpu/smt/control",
    "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/class/dmi/id/product_name",
    "/sys/class/dmi/id/board_name",
    "/sys/class/dmi/id/bios_version",
    "/sys/class/dmi/id/bios_date",
    "/etc/dnf/plugins/versionlock.list",
    "/etc/dnf/versionlock.toml",
    "/etc/yum/pluginconf.d/versionlock.list",
    "/etc/security/limits.conf",
    "/etc/docker/daemon.json",
    "/var/snap/docker/current/config/daemon.json",
    "/etc/nvidia-container-runtime/config.toml",
    "/run/reboot-required.pkgs",
    "/var/lib/gpunode/updates/pending.json",
    "/etc/gpunode/lab-node",
    "/etc/gpunode/gpu-settings.json",
    "/run/gpunode/gpu-settings.json",
    "/run/gpunode/revert-accounts.json",
    "/run/gpunode/revert-firewall.json",
    "/run/gpunode/revert-ssh_hardening.json",
)
# Files of which only the relevant lines are kept: the others are private, or may contain passwords.
CONTAINERD = re.compile(r"nvidia|^\s*(version|imports|default_runtime_name|enable_cdi)\s*=")
FILTERED_FILES = (
    ("/etc/containerd/config.toml", CONTAINERD),
    ("/etc/containerd/conf.d/99-nvidia.toml", CONTAINERD),
    ("/etc/dnf/automatic.conf", re.compile(r"^\s*(\[|upgrade_type|apply_updates|reboot)")),
    ("/etc/dnf/dnf.conf", re.compile(r"^\s*(exclude|excludepkgs)\s*=")),
    ("/etc/group", re.compile(r"^(docker|sudo|wheel|admin):")),
    ("/proc/self/status", re.compile(r"^Cpus_allowed_list:")),
)
SLURM_CONTROLLER = re.compile(r"SLURM_VERSION\s*=")
# Where Slurm's configuration is: packages of SchedMD, of Debian, and a node that gets it from the controller.
SLURM_FOLDERS = ("/etc/slurm/", "/etc/slurm-llnl/", "/run/slurm/conf/")
SLURM_FILES = (
    ("slurm.conf", re.compile(r"(?i)^\s*(NodeName\s*=.*\bGres\s*=|GresTypes\s*=|TaskPlugin\s*=|include\s)")),
    ("gres.conf", re.compile(r"(?i)^\s*(NodeName|Name|AutoDetect|include)\b")),
    ("cgroup.conf", re.compile(r"(?i)^\s*(ConstrainDevices|include)\b")),
)
# Commands of which only the relevant lines are kept.
FILTERED_COMMANDS = (
    (
        "apt-config",
        ["apt-config", "dump", "Unattended-Upgrade", "APT::Periodic"],
        re.compile(
            r"(?i)^(Unattended-Upgrade::(Origins-Pattern|Allowed-Origins|Package-Blacklist|Automatic-Reboot)"
            r"|APT::Periodic::(Enable|Unattended-Upgrade|Update-Package-Lists))\b"
        ),
    ),
)
FOLDERS = (
    "/run/systemd/system/",
    "/sys/firmware/",
    "/sys/firmware/efi/efivars/",
    "/sys/class/iommu/",
    "/sys/kernel/mm/memory_peers/",
)
# Kernel settings, read from /proc/sys.
SYSCTLS = (
    "fs.file-max",
    "kernel.hung_task_timeout_secs",
    "kernel.numa_balancing",
    "kernel.panic",
    "kernel.pid_max",
    "kernel.randomize_va_space",
    "net.core.default_qdisc",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_max",
    "net.ipv4.neigh.default.gc_thresh1",
    "net.ipv4.neigh.default.gc_thresh2",
    "net.ipv4.neigh.default.gc_thresh3",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "vm.dirty_background_ratio",
    "vm.dirty_ratio",
    "vm.max_map_count",
    "vm.min_free_kbytes",
    "vm.nr_hugepages",
    "vm.overcommit_memory",
    "vm.swappiness",
    "vm.zone_reclaim_mode",
)
COMMANDS = (
    ("uname", ["uname", "-srm"]),
    ("lscpu", ["lscpu"]),
    ("systemd-detect-virt", ["systemd-detect-virt"]),
    ("systemctl-failed", ["systemctl", "list-units", "--failed", "--all", "--plain", "--no-legend", "--no-pager"]),
    ("systemctl-defaults", ["systemctl", "show", "-p", "DefaultLimitMEMLOCK,DefaultLimitNOFILE,DefaultLimitNPROC"]),
    ("timedatectl", ["timedatectl", "show", "-p", "NTP", "-p", "NTPSynchronized", "-p", "Timezone"]),
    ("chronyc-tracking", ["chronyc", "-n", "-c", "tracking"]),
    ("version-docker", ["docker", "--version"]),
    ("version-containerd", ["containerd", "--version"]),
    ("version-podman", ["podman", "--version"]),
    ("version-runc", ["runc", "--version"]),
    ("version-crun", ["crun", "--version"]),
    ("version-nvidia-ctk", ["nvidia-ctk", "--version"]),
)
# Run one after another, and only if the module is loaded.
USAGE = ["nvidia-smi", "--query-gpu=pci.bus_id,utilization.gpu,utilization.memory,power.draw", "--format=csv"]
USAGE_AGAIN_S = 10.0
IN_FULL_USE = re.compile(r"<gpu_util>\s*(?:99|100) %")
READS_NO_MEMORY = re.compile(r"<memory_util>\s*[01] %")
NVIDIA_TOOLS = (
    ("nvidia-smi-xml", ["nvidia-smi", "-q", "-x"]),
    ("nvidia-smi-topo", ["nvidia-smi", "topo", "-m"]),
    ("nvidia-smi-p2p", ["nvidia-smi", "topo", "-p2p", "r"]),
    ("nvidia-smi-nvlink", ["nvidia-smi", "nvlink", "--status"]),
    ("nvidia-smi-nvlink-errors", ["nvidia-smi", "nvlink", "-e"]),
    ("version-nv-fabricmanager", ["nv-fabricmanager", "--version"]),
    ("version-nv-hostengine", ["nv-hostengine", "--version"]),
    ("version-dcgmi", ["dcgmi", "--version"]),
    ("dcgmi-versions", ["dcgmi", "-v"]),
)

# Folders of the kernel with similar entries: (folder, names of entries, a file that an entry must have, its files). If
# a file does not exist, or the kernel has no value for it, nothing is recorded. A ``*`` stands for names.
TREES = (
    ("/proc/driver/nvidia/gpus/", r".", None, ("information",)),
    ("/sys/module/", r"nvidia(_|$)", None, ("parameters/*",)),
    ("/sys/devices/system/node/", r"node\d+$", None, ("cpulist", "meminfo", "distance")),
    ("/sys/devices/system/edac/mc/", r"mc\d+$", None, ("mc_name", "ce_count", "ue_count")),
    ("/sys/block/", r".", "device", ("size", "ro", "queue/rotational", "device/model")),
    (
        "/sys/class/nvme/",
        r"nvme\d+$",
        None,
        ("model", "firmware_rev", "state", "device/uevent", "device/numa_node", "hwmon*/temp1_input"),
    ),
    (
        "/sys/class/net/",
        r".",
        "device/uevent",
        ("operstate", "speed", "mtu", "carrier_changes", "device/uevent", "device/numa_node")
        + tuple("statistics/" + name for name in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped"))
        + ("statistics/rx_crc_errors", "statistics/rx_missed_errors")
        # Of drivers of MLNX_OFED and DOCA-OFED.
        + ("ecn/roce_*/enable/[0-7]",),
    ),
    ("/sys/kernel/config/rdma_cm/", r".", None, ("ports/*/default_roce_tos",)),
    (
        "/sys/class/infiniband/",
        r".",
        None,
        ("fw_ver", "board_id", "hca_type", "device/uevent", "device/numa_node")
        + tuple("ports/*/" + name for name in ("state", "phys_state", "rate", "link_layer", "lid"))
        # Programs use one of the first: link-local and IPv4, RoCE v1 and v2.
        + ("ports/*/gid_attrs/ndevs/0", "ports/*/gid_attrs/types/[0-7]", "ports/*/gids/[0-7]")
        + tuple(
            "ports/*/counters/" + name
            for name in (
                "symbol_error",
                "link_error_recovery",
                "link_downed",
                "port_rcv_errors",
                "port_rcv_remote_physical_errors",
                "port_xmit_discards",
                "port_xmit_wait",
                "local_link_integrity_errors",
                "excessive_buffer_overrun_errors",
            )
        )
        + tuple(
            "ports/*/hw_counters/" + name
            for name in ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "roce_adp_retrans")
        ),
    ),
    ("/sys/class/infiniband_verbs/", r"uverbs\d+$", None, ("ibdev",)),
    ("/sys/class/infiniband_mad/", r"(umad|issm)\d+$", None, ("ibdev", "port")),
)
PCI_FOLDER = "/sys/bus/pci/devices/"
PCI_FILES = (
    "uevent",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "numa_node",
    "local_cpulist",
    "power_state",
    "iommu_group/type",
)
# Values by which the kernel reports that it has none: the link is down, the device does not report it.
NO_VALUE = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO, errno.ENODATA})

UNITS = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-dcgm.service",
    "dcgm.service",
    "nvidia-cdi-refresh.service",
    "nvidia-cdi-refresh.path",
    "nvidia-powerd.service",
    "nvidia-peermem.service",
    "nvidia-suspend.service",
    "nvlsm.service",
    "gpunode-exporter.service",
    "gpunode-gpu-settings.service",
    "gpunode-roce@*.service",
    "gpunode-cpu.service",
    "gpunode-acs.service",
    "gpunode-verdict.service",
    "gpunode-verdict.timer",
    "prometheus-node-exporter.service",
    "nvidia-dcgm-exporter.service",
    "docker.service",
    "docker.socket",
    "containerd.service",
    "podman.socket",
    "kubelet.service",
    "k3s.service",
    "rke2-agent.service",
    "slurmd.service",
    "munge.service",
    "snap.docker.dockerd.service",
    "chrony.service",
    "chronyd.service",
    "ntp.service",
    "ntpd.service",
    "ntpsec.service",
    "systemd-timesyncd.service",
    "systemd-resolved.service",
    "NetworkManager.service",
    "rsyslog.service",
    "sssd.service",
    "ssh.service",
    "sshd.service",
    "irqbalance.service",
    "tuned.service",
    "cpupower.service",
    "openibd.service",
    "rdma.service",
    "opensm.service",
    "opensmd.service",
    "multipathd.service",
    "kdump.service",
    "kdump-tools.service",
    "gpunode-firewall.service",
    "gpunode-first-boot.service",
    "gpunode-host-keys.service",
    "nftables.service",
    "firewalld.service",
    "ufw.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "unattended-upgrades.service",
    "dnf-automatic.timer",
    "dnf-automatic-install.timer",
    "dnf5-automatic.timer",
)
UNIT_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,UnitFileState,StateChangeTimestamp,NRestarts,LimitMEMLOCK,LimitNOFILE"
    ",ActiveEnterTimestampMonotonic"
)
DPKG_FIELDS = ("Package", "Version", "Architecture", "Status", "source:Package", "source:Version", "Maintainer")
RPM_FIELDS = ("NAME", "VERSION", "RELEASE", "ARCH", "SOURCERPM", "VENDOR", "PACKAGER", "EPOCHNUM")
DISK_PATHS = ("/", "/boot", "/var", "/usr")
# The boot loader: what it starts next, without the parts of its configuration that only draw a menu.
GRUB_FILES = ("/boot/grub/grub.cfg", "/boot/grub2/grub.cfg")
GRUB_OF_FIRMWARE = "/boot/efi/EFI/*/grub.cfg"
GRUB_MENU = re.compile(r"(?m)^\s*(menuentry|blscfg)\b")
GRUB_LINES = re.compile(r"^\s*(set default=|(menuentry|submenu|linux(16|efi)?)\s|blscfg\b|function\s.*\{$|\}\s*$)")
GRUB_STATES = ("/boot/grub/grubenv", "/boot/grub2/grubenv")
GRUB_STATE = re.compile(r"^(saved|next)_entry=")
LOADER_FOLDERS = ("/boot/loader/", "/efi/loader/", "/boot/efi/loader/")
LOADER_ENTRY = re.compile(r"^(version|linux|sort-key|options)\s")
LOADER_ENTRIES = 64
LOADER_VARIABLES = ("LoaderInfo", "LoaderEntryDefault", "LoaderEntryOneShot")
LOADER_VARIABLE = "/sys/firmware/efi/efivars/%s-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
IMAGES = (
    "/boot/initrd.img-%s",
    "/boot/initramfs-%s.img",
    "/boot/*/%s/initrd",
    "/boot/efi/*/%s/initrd",
    "/efi/*/%s/initrd",
)
IMAGES_MOST = 3
"""Only images older than the module on disk are listed, which reads them whole: the newest kernels' so many."""
MODPROBE_FOLDERS = (
    "/etc/modprobe.d/",
    "/run/modprobe.d/",
    "/usr/local/lib/modprobe.d/",
    "/usr/lib/modprobe.d/",
    "/lib/modprobe.d/",
)

GPU_STACK = re.compile(
    r"nvidia|cuda|nccl|cudnn|cublas|dcgm|datacenter-gpu|libnv|nvlsm|nscq|nvsdm|tensorrt|gdrcopy|gdrdrv"
    r"|glx-alternative|glx-diversions|update-glx|^dkms\t"
    r"|^(docker([.-](io|ce|ee|engine|buildx|compose)\S*)?|moby-\S+|containerd(\.io)?|podman(-docker)?|runc|crun"
    r"|cri-o|cri-tools|kubelet|enroot\S*|apptainer|singularity-ce|dracut)\t"
    r"|^linux-image-(?!unsigned-)[a-z]\S*\t"  # the meta package that determines the next kernel
)
GPU_STACK_AND_KERNELS = re.compile(GPU_STACK.pattern + r"|^kernel(-|\t)")
# The GPU's own module under its names: nvidia, nvidia-current (Debian), nvidia-tesla-470, nvidia-legacy-390xx,
# nvidia-current-open. Not nvidia-uvm, nvidia-drm, nvidia-wmi-ec-backlight.
GPU_MODULE = re.compile(r"/nvidia([-_](current|tesla|legacy|open|srv|server|\d+(xx)?))*\.ko(\.(gz|xz|zst))?$")
LISTED_MODULE = re.compile(r"^-\S+\s.*" + GPU_MODULE.pattern)
PEER_MEMORY = b" ib_register_peer_memory_client"
GPU_DEVICE = re.compile(r"/dev/nvidia(\d|ctl|-uvm|-caps/|-modeset)")

TOOLS_RECORD = "/etc/gpunode/tools.json"
STORAGE_RECORD = "/etc/gpunode/storage.json"
STORAGE_S = 8.0
STORAGE_MOST = 32
NETWORK_TYPES = re.compile(r"(?:nfs4?|cifs|smb3|ceph|lustre|gpfs|beegfs|wekafs|afs|9p|fuse\..*)$")
MOUNT_OPTION = re.compile(r"(?!.*(?:pass|secret|key|cred|token|user))[\w.-]+(?:=[\w.:/-]{1,64})?$")
"""Options of a mount that are recorded: none that could be a secret, or name a person."""
PROGRAM_FOLDERS = ("/usr/local/bin/", "/usr/bin/", "/usr/sbin/", "/usr/local/sbin/", "/bin/", "/sbin/")
# Only their existence is recorded.
SIGNS = (
    "/usr/bin/nvidia-uninstall",
    "/usr/bin/nvidia-installer",
    "/usr/bin/nvidia-docker",
    "/usr/bin/nvidia-docker-plugin",
    "/usr/bin/unattended-upgrade",
    "/usr/bin/dnf-automatic",
    "/usr/libexec/dnf5/plugins/automatic",
    "/usr/lib/systemd/system/dnf5-automatic.timer",
    "/run/reboot-required",
    "/usr/bin/nvidia-smi",
    "/usr/bin/nvidia-cdi-hook",
    "/run/cloud-init/status.json",
    "/run/cloud-init/result.json",
    "/usr/local/cuda*/bin/cuda-uninstaller",
    "/usr/local/cuda*/bin/uninstall_cuda_*.pl",
    "/.dockerenv",
    "/run/.containerenv",
    "/run/systemd/container",
)
# A lab node with simulated hardware on a kernel without loadable modules, on which /proc/modules cannot exist.
LAB_MODULES = "/run/gpunode-lab/proc-modules"
INSTALLER_LOG = "/var/log/nvidia-installer.log"
INSTALLER_LINES = re.compile(
    r"^(nvidia-installer log file|creation time:|installer version:|-> Installation of|ERROR:)"
)

LIBRARY = re.compile(r"/lib(cuda|nvidia-ml|nccl|cudnn)\.so(\.[0-9.]+)?$")
OTHER_LIBRARY = re.compile(r"/lib(nvidia-[a-z0-9-]{1,40}|nvcuvid|nvoptix|cudadebugger)\.so(\.[0-9.]+)?$")
LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/*/nvidia/*",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/nvidia*",
    "/usr/lib/wsl/lib",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/lib/*-linux-gnu",
    "/usr/local/nvidia/lib*",
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/targets/*/lib",
    "/opt/nvidia/*/lib*",
    "/opt/nvidia/hpc_sdk/Linux_*/*/comm_libs/nccl/lib",
)
REPOSITORY_FILES = (
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d/*.list",
    "/etc/apt/sources.list.d/*.sources",
    "/etc/yum.repos.d/*.repo",
    "/etc/zypp/repos.d/*.repo",
)
REPOSITORY = re.compile(r"(?i)nvidia|cuda|dcgm|docker|container|podman|kubernetes|mellanox|doca")

# Variables that make a GPU job slow, verbose or wrong if they stay set for all users. No other is collected.
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_PATH",
    "CUDA_COREDUMP_SHOW_PROGRESS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_INJECTION64_PATH",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NCCL_[A-Z0-9_]{1,40}",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_ALLOCATOR",
    "TORCH_CPP_LOG_LEVEL",
    "TORCH_CUDA_SANITIZER",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_USE_CUDA_DSA",
    "UCX_LOG_LEVEL",
)
VARIABLE_FILES = (
    "/etc/environment",
    "/etc/environment.d/*.conf",
    "/usr/lib/environment.d/*.conf",
    "/etc/profile",
    "/etc/profile.d/*.sh",
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/zsh/zshenv",
    "/etc/security/pam_env.conf",
    "/etc/nccl.conf",
)
SETTING = re.compile(
    r"(?:^|(?<=[\s\"';]))(?P<name>%s)(?:[ \t]{1,20}DEFAULT)?=(?P<value>\"[^\"\n]*\"|'[^'\n]*'|[^\s;#\"']*)"
    % "|".join(VARIABLES),
    re.M,
)
COMMENT = re.compile(r"(?m)^[ \t]*#.*$")
# Folders in the order in which one file hides another of its name: sysctl.d(5), tmpfiles.d(5).
SYSCTL_FOLDERS = ("/etc/sysctl.d/", "/run/sysctl.d/", "/usr/local/lib/sysctl.d/", "/usr/lib/sysctl.d/")
TMPFILES_FOLDERS = ("/etc/tmpfiles.d/", "/run/tmpfiles.d/", "/usr/local/lib/tmpfiles.d/", "/usr/lib/tmpfiles.d/")
SYSCTL_LINE = re.compile(r"(?m)^[ \t]*-?[ \t]*(?P<name>[\w./-]+)[ \t]*=[ \t]*(?P<value>[^\n]*)$")
HUGEPAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
HUGEPAGES_LINE = re.compile(r"(?m)^[ \t]*w\S*[ \t]+%s(?:[ \t]+\S+){4}[ \t]+(?P<value>\w+)[ \t]*$" % HUGEPAGES)

# Users choose the names of programs that crash: many such lines would displace those of the driver.
NO_CRASH = r"^(?!.*\]: segfault at )(?=.*(?:%s))"
KERNEL_NEWS = re.compile(
    NO_CRASH
    % (
        r"NVRM|SXid|nouveau|\bAER\b|PCIe Bus Error|Out of memory|oom-kill|oom_reaper|Hardware Error\]|mce: "
        r"|Linux version|hard LOCKUP|soft lockup|blocked for more than |BUG: |BUG at |Oops|divide error: "
        r"|key is rejected|nvidia-uvm: .{1,200} err |EXT4-fs error|emounting filesystem |Shutting down filesystem"
    )
)
XID_NEWS = re.compile(NO_CRASH % "NVRM: Xid|SXid|Linux version")
LINK_NEWS = re.compile(
    r"mlx5_core \S{1,40} \S{1,40}: Link (?:up|down)$|systemd-networkd\[\d+\]: \S{1,40}: (?:lost|gained) carrier$"
    r"|Linux version \d",
    re.I,
)
IPMI_DEVICES = ("/dev/ipmi0", "/dev/ipmi/0", "/dev/ipmidev/0")
IPMI_COMMANDS = (
    ("ipmi-fans", ["ipmitool", "sdr", "type", "Fan"]),
    ("ipmi-power-supplies", ["ipmitool", "sdr", "type", "Power Supply"]),
    ("ipmi-events", ["ipmitool", "sel", "list", "last", IPMI_EVENTS]),
)
SSHD_SETTINGS = re.compile(
    r"^(port|permitrootlogin|passwordauthentication|kbdinteractiveauthentication|permitemptypasswords"
    r"|authenticationmethods|kexalgorithms|ciphers|macs) "
)
# sshd does not answer without its empty folder, which exists only while ssh.socket's service runs. It gets one in a
# mount namespace of its own: nothing is created on the node.
LACKS_FOLDER = "Missing privilege separation directory"
WITH_FOLDER = "mount -t tmpfs -o size=64k,mode=0755 tmpfs /run && mkdir -m 0755 /run/sshd && exec sshd -T"
KEY_KIND = re.compile(r"^(sk-)?(ssh|ecdsa)-[a-z0-9-]{3,40}(@openssh\.com)?$")
PUBLIC_KEY_BYTES = 65536
PRIVATE_KEY_FOLDERS = ("/root/.ssh/*", "/home/*/.ssh/*")
LOGIN_SHELL = re.compile(r"^(?!.*/(nologin|false|sync|shutdown|halt)$)")
CDI_FOLDERS = ("/etc/cdi/", "/var/run/cdi/")
CDI_TOKEN = re.compile(r"\"?\b(cdiVersion|kind|name|hostPath)\"?\s{0,4}:\s{0,4}\"?([^\"\s,}\]]{1,300})")
LIBRARY_VERSION = re.compile(r"/lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)$")
NEEDRESTART = ("/etc/needrestart/needrestart.conf", "/etc/needrestart/conf.d/*.conf")
NEEDRESTART_MODE = re.compile(r"(?m)^[ \t]*\$nrconf\{restart\}[ \t]*=[ \t]*[\"'](\w)[\"']")
NEEDRESTART_SPARED = re.compile(r"(?m)^[^#\n]{0,80}?qr\((.{1,120}?)\)\}?[ \t]*=>?[ \t]*0\b")
ROOT_MOUNT = "/"
# Of runc with systemd: the engines' names before the container's number.
CONTAINER_SCOPE = re.compile(r"/((?:docker|libpod|cri-containerd|crio|nerdctl)-[0-9a-f]{64}\.scope)(?:/|$)")
CONTAINERS_MOST = 64
GPU_ALLOWED = re.compile(r"(?m)^DeviceAllow=(?:/dev/nvidia|/dev/char/195:|char-nvidia|char-\*)\S* r")
CDI_NODE = re.compile(r"\"?\b(path|major|minor)\"?\s{0,4}:\s{0,4}\"?(/dev/[\w./-]{1,200}|\d{1,9})")
CDI_ITEM = re.compile(r"(?m)^\s*-\s|[{}]")
DOCKER_INFO = (
    "version={{json .ServerVersion}}\ndefault={{json .DefaultRuntime}}\ncgroup_driver={{json .CgroupDriver}}\n"
    "cgroup_version={{json .CgroupVersion}}\nstorage={{json .Driver}}\nlive_restore={{json .LiveRestoreEnabled}}\n"
    "{{range $name, $_ := .Runtimes}}runtime={{json $name}}\n{{end}}"
)

# Secrets that must not leave the node. User and password of a URL end at the last @ before the host; a secret's value
# ends at its quotes or brackets, or at the next blank.
USERINFO = re.compile(r"://(?:[^/\s\"'<>]{1,256}@|[^/\s:\"'<>@]{0,128}:[^\s\"'<>@]{1,256}@)")
# The same without a scheme: USER:PASSWORD@HOST, but not an image's digest, and of the kernel's command line neither
# memory (crashkernel=2G-:128M@16M) nor a video mode (HDMI-A-1:1920x1080@60). A value that is named as a proxy is
# covered further, as is iSCSI.
BARE_USERINFO = re.compile(
    r"(?i)(?<![\w.%+-])[\w.%+-]{1,128}:[^\s\"'<>/]{1,256}@(?=[\w\[])(?!sha\d{3}:|0x|\d{1,9}[a-z]?(?![\w.:-]))"
)
PROXY = re.compile(
    r"(?i)(?P<name>proxy[\w.:-]{0,80}[\"']?(?:\s{0,3}[=:]\s{0,3}[\"']?|\s{1,3}[\"'])(?:\w{1,10}://)?|\biscsi:)"
    r"[^\s\"'<>]{1,256}@"
)
SECRET_NAME = (
    r"(?:passw(?:or)?d|passphrase|(?<![a-z0-9])pass(?![-_]?through)|(?<!by)(?<!com)pass(?![\w.-])"
    r"|(?<![a-z0-9])pwd|pwd?(?![\w.-])|(?<![a-z0-9])psk|secret|token|credential|authorization"
    r"|(?<![a-z0-9])auth(?!ors?\b)|luks\.key"
    r"|(?:api|access|private|signing|account|encryption|shared|licen[cs]e|activation|registration|product|subscription"
    r"|enrol?lment|storage|master)[-_]?key|(?:registration|activation|enrol?lment)[-_]?code|regcode|webhook)[\w.-]{0,40}"
)
SECRET_VALUE = (
    r"(?P<value>\"{3}|'{3}|\$?\"(?:[^\"\\]|\\[\s\S]){0,4096}\"|\$?'[^']{0,4096}'|[\[{]|\r?\n"
    r"|[|>][0-9+-]{0,2}[ \t]{0,9}\r?\n|(?:(?:basic|bearer|digest|negotiate|ntlm|token)\s{1,3})?\S{1,4096})"
)
VALUE = re.compile(SECRET_VALUE)
SECRET = re.compile(
    r"(?i)(?P<name>%s[\"']?(?:[ \t]{0,20}[=:][ \t]{0,40}|\s{1,3}(?=[\"'])))%s" % (SECRET_NAME, SECRET_VALUE)
)
SECRET_FLAG = re.compile(
    r"(?i)(?P<name>(?<![\w-])--?[\w.-]{0,40}?%s[\"']?(?:,\s{0,40}|\s{1,3}))%s" % (SECRET_NAME, SECRET_VALUE)
)
# What precedes the name of a secret that is its line's setting: the value may contain blanks.
SETTING_START = re.compile(r"[ \t]*(?:[#;][ \t]*|export[ \t]+|(?:-[ \t]+)+)?[\w.:-]*$")
INDENTATION = re.compile(r"[ \t]*")
LIST_INDENTATION = re.compile(r"[ \t]*(?:-[ \t]+)*")
QUOTED = re.compile(r"\$?([\"'])[\s\S]*\1$")
SHELL_PART = re.compile(r"\\.|\$?\"(?:[^\"\\]|\\[\s\S]){0,4096}\"|\$?'[^']{0,4096}'|\w{1,4096}")
VALUE_CHARACTERS = 65536
BRACKET = re.compile(r"\"(?:[^\"\\\n]|\\.){0,4096}\"|'[^'\n]{0,4096}'|[\[\]{}]")
BRACKETS_DEPTH = 8
BRACKETS_CHARACTERS = 65536
# A URL's path and query: whoever has such an address has access.
URL = re.compile(r"(?<=://)[^\s\"'<>\\]{4,4096}")
URL_PARAMETER = re.compile(
    r"(?i)(?P<name>[?&;#](?:x-(?:amz|goog|ms)-[\w-]{1,40}|[\w.-]{0,40}(?:sig|signature|token|key|keyid|secret|code|auth|pass|pwd"
    r"|password|credential|policy|sas|session|hash)[\w-]{0,10})=)[^&;#]{1,2048}"
)
# Long and of letters and digits; names of packages, folders and systems have dots or hyphens, or are shorter. A time
# (20260101T000000Z) names the state of an archive.
URL_TOKEN = re.compile(
    r"(?<=[/=])(?:bot\d{5,16}:[\w-]{20,256}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?:@[0-9a-f-]{36})?"
    r"|(?!\d{8}T\d{6}Z)(?=(?:[A-Za-z_]{0,256}\d){3})(?=[\d_]{0,256}[A-Za-z])\w{16,256}"
    r"|(?=[\w-]{0,256}\d)(?=[\w-]{0,256}[A-Z])(?=[\w-]{0,256}[a-z])[\w-]{30,256})(?=[/?&;#]|$)"
)
# Secrets that are recognised by their own form, under any name.
TOKEN = re.compile(
    r"(?<![\w-])(?:gh[opsur]_\w{20,255}|github_pat_\w{20,255}|glpat-[\w-]{16,255}|xox[abeprs]-[\w-]{10,255}"
    r"|hf_[A-Za-z0-9]{20,255}|nvapi-[\w-]{20,255}|dckr_pat_[\w-]{16,255}|sk-[A-Za-z0-9][\w-]{18,255}|A(?:KIA|SIA)[0-9A-Z]{16}"
    r"|AIza[\w-]{30,64}|AGE-SECRET-KEY-1[0-9A-Z]{40,64}|eyJ[\w-]{10,4096}\.[\w-]{4,4096}(?:\.[\w-]{0,4096})?)(?![\w-])"
)
TOKEN_MARKS = ("gh", "glpat-", "xox", "hf_", "nvapi-", "dckr_pat_", "sk-", "AKIA", "ASIA", "AIza", "AGE-", "eyJ")
PRIVATE_KEY = re.compile(r"-{4,5} ?BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}|PuTTY-User-Key-File-\d{1,2}:")
PRIVATE_KEY_END = re.compile(r"-{4,5} ?END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}|Private-MAC:[ \t]*\w{1,256}")


def text_of(data: bytes) -> str:
    """Decode bytes; invalid UTF-8 becomes ``\\xNN``, so that the bundle is always JSON."""
    return data.decode("utf-8", "backslashreplace")


def scrub(text: str) -> str:
    """Return the text with secrets covered: user information, tokens and signatures in URLs, named secrets, tokens,
    keys.
    """
    if "PRIVATE KEY" in text or "PuTTY-User-Key" in text:
        text = without_private_keys(text)
    if any(mark in text for mark in TOKEN_MARKS):
        text = TOKEN.sub("***", text)
    if "@" in text:
        text = USERINFO.sub("://***@", text)
        text = PROXY.sub(r"\g<name>***@", text)
        text = BARE_USERINFO.sub("***@", text)
    if "://" in text:
        text = URL.sub(lambda match: covered_url(match.group()), text)
    return covered(SECRET_FLAG, covered(SECRET, text))


def without_private_keys(text: str) -> str:
    """Return the text with stars in place of every private key; one without an end reaches to the end of the text."""
    parts: List[str] = []
    at = 0
    while True:
        begin = PRIVATE_KEY.search(text, at)
        if begin is None:
            return "".join(parts) + text[at:]
        parts += [text[at : begin.start()], "***"]
        end = PRIVATE_KEY_END.search(text, begin.end())
        at = len(text) if end is None else end.end()


def covered_url(address: str) -> str:
    """Return a URL after its ``://``, with stars in place of credentials: in the path, the query and the fragment."""
    return URL_TOKEN.sub("***", URL_PARAMETER.sub(r"\g<name>***", address))


def covered(pattern: Pattern[str], text: str) -> str:
    """Return the text with stars in place of every secret's value, within its original quotes.

    A list or a table becomes a list of stars, which JSON and TOML both know.
    """
    parts: List[str] = []
    at = 0
    while True:
        match = pattern.search(text, at)
        if match is None:
            return "".join(parts) + text[at:]
        start, end, stars = covered_value(text, match.start(), match.group("name"), match.span("value"))
        parts += [text[at:start], stars]
        at = end


def covered_value(text: str, key: int, name: str, span: Tuple[int, int]) -> Tuple[int, int, str]:
    """Return where a secret's value starts and ends, and the stars for it. ``span`` is what the pattern found of it:
    its first word, or what opens it.
    """
    start, end = span
    value = text[start:end]
    if value in ("[", "{"):
        return start, bracket_end(text, start), '["***"]'
    if value in (3 * '"', 3 * "'"):
        close = text.find(value, end, end + VALUE_CHARACTERS)
        return start, close + 3 if close >= 0 else len(text), value + "***" + value
    if QUOTED.match(value):
        return start, quoted_end(text, end), value.lstrip("$")[0] + "***" + value[-1]
    if value[0] in "|>\r\n" and value[-1] == "\n":
        return indented_value(text, key, name, span)
    line = text.rfind("\n", 0, key) + 1
    separated = name.rstrip(" \t")
    quote = None if separated.rstrip("=:")[-1:] in ("'", '"') else quote_before(text, line, key)
    close = text.find(quote, start, line_end(text, start)) if quote else -1
    if close >= 0:
        # "NAME=two words": up to the quotation mark around both.
        return start, close, "***"
    setting = separated != name and separated[-1:] in ("=", ":") and SETTING_START.match(text[line:key])
    end = continued_end(text, line_end(text, start) if setting else end)
    if setting:
        end = deeper_lines(text, end, line)
    return start, end, "***"


def quote_before(text: str, line: int, key: int) -> Optional[str]:
    """Return the quotation mark that opens the word before ``key``; None if there is none in the line.

    It looks back from the key: a search from the line's start takes quadratic time for a line of many keys.
    """
    at = key
    while at > line and (text[at - 1].isalnum() or text[at - 1] in "_.:-"):
        at -= 1
    return text[at - 1] if at > line and text[at - 1] in "\"'" else None


def indented_value(text: str, key: int, name: str, span: Tuple[int, int]) -> Tuple[int, int, str]:
    """Return the same for a value that begins in the next line: every line with more indentation than the name's."""
    start, end = span
    line = text.rfind("\n", 0, key) + 1
    first = end + indentation(INDENTATION, text, end)
    if name.rstrip(" \t").endswith(":") and text[first : first + 1] in ("[", "{", '"', "'"):
        # JSON and YAML: the value is on a line of its own.
        inner = VALUE.match(text, first)
        if inner is not None:
            return covered_value(text, key, name, inner.span())
    # The entries of a list may be aligned with its name.
    last = deeper_lines(text, end - 1, line, entries=text[start] in "\r\n")
    if not text[end:last].strip():
        return start, end, text[start:end]
    return start, last, "***" if name[-1:] in (" ", "\t") else " ***"


def deeper_lines(text: str, end: int, key_line: int, entries: bool = False) -> int:
    """Return the end of the lines after ``end`` that are indented further than the line of the name; with
    ``entries``, also of the list that is aligned with it.
    """
    key_depth = indentation(LIST_INDENTATION, text, key_line)
    if text[key_line + key_depth : key_line + key_depth + 1] in ("#", ";"):
        return end
    at = end
    while True:
        line = text.find("\n", at) + 1
        if line == 0 or line == len(text):
            return end
        at = line_end(text, line)
        depth = indentation(INDENTATION, text, line)
        content = text[line + depth : at]
        if content and depth <= key_depth and not (entries and depth == key_depth and content.startswith("- ")):
            return end
        end = at if content else end


def indentation(pattern: Pattern[str], text: str, line: int) -> int:
    """Return the length of the indentation at the beginning of a line."""
    match = pattern.match(text, line)
    return match.end() - line if match is not None else 0


def quoted_end(text: str, end: int) -> int:
    """Return the end of a quoted value; a shell joins what follows it without a blank."""
    while text[end : end + 1] and (text[end] in "\"'$\\" or text[end].isalnum()):
        part = SHELL_PART.match(text, end)
        if part is None:
            return end
        end = part.end()
    return end


def continued_end(text: str, end: int) -> int:
    """Return where a value ends that a backslash before the end of its line continues in the next."""
    while text[end - 1 : end] == "\\" and text[end : end + 1] in ("\r", "\n"):
        end = line_end(text, text.find("\n", end) + 1)
    return end


def line_end(text: str, start: int) -> int:
    """Return where the line ends, without its carriage return and line feed."""
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    return end - 1 if end > start and text[end - 1] == "\r" else end


def bracket_end(text: str, start: int) -> int:
    """Return where the bracket that opens at ``start`` is closed; the end of its line if it is not."""
    depth = 0
    for match in BRACKET.finditer(text, start, start + BRACKETS_CHARACTERS):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.end()
        if depth > BRACKETS_DEPTH:
            break
    line_end = text.find("\n", start)
    return len(text) if line_end < 0 else line_end


def names_in(folder: str) -> List[str]:
    """Return the sorted names in a folder, as text."""
    return sorted(text_of(os.fsencode(name)) for name in os.listdir(folder))


def answer(
    argv: List[str],
    rc: int,
    stdout: str,
    stderr: str,
    seconds: float,
    timed_out: bool = False,
    truncated: bool = False,
) -> Answer:
    """Return one command's answer in the bundle's form."""
    return {
        "argv": argv,
        "rc": rc,
        "stdout": stdout,
        "stderr": stderr,
        "seconds": round(seconds, 3),
        "timed_out": timed_out,
        "truncated": truncated,
    }


class Sink:
    """Receiver of a command's output that keeps the requested part.

    With ``keep``, only matching lines are kept, and any amount may be read; with ``last``, the latest so many of them.
    """

    def __init__(self, keep: Optional[Pattern[str]] = None, last: Optional[int] = None) -> None:
        self.keep = keep
        self.lines: Deque[str] = collections.deque(maxlen=last)
        self.rest = bytearray()
        self.size = 0

    @property
    def full(self) -> bool:
        """Return True once more has arrived than the probe keeps."""
        return self.size > OUTPUT_BYTES or len(self.rest) > OUTPUT_BYTES

    def feed(self, data: bytes) -> None:
        """Read one piece of output."""
        self.rest += data
        if self.keep is not None and b"\n" in data:
            whole, _, rest = bytes(self.rest).rpartition(b"\n")
            self.rest = bytearray(rest)
            self.take(text_of(whole))

    def take(self, text: str) -> None:
        """Keep the requested lines. Only "\n" ends one: users choose other characters within a line of the log."""
        for line in text.split("\n"):
            if self.keep is not None and self.keep.search(line):
                if self.lines.maxlen is None:
                    self.size += len(line) + 1
                self.lines.append(line)

    def text(self) -> str:
        """Return all that was kept."""
        if self.keep is None:
            return text_of(bytes(self.rest[:OUTPUT_BYTES]))
        if self.rest:
            self.take(text_of(bytes(self.rest[:OUTPUT_BYTES])))
            self.rest = bytearray()
        return "".join(line + "\n" for line in self.lines)


class Probe:
    """One collection from one node. ``root`` and ``path`` differ from the defaults only in tests."""

    def __init__(
        self,
        root: str = "/",
        path: str = PATH,
        command_s: float = COMMAND_S,
        nvidia_tool_s: float = NVIDIA_TOOL_S,
        passive_s: float = PASSIVE_S,
        budget_s: Optional[float] = None,
    ) -> None:
        """Set the limits; ``budget_s``: seconds for the whole, in place of TOTAL_S, half of it for passive sources.

        With more than TOTAL_S, each part has more in proportion, so that a slow node is read as completely as another.
        """
        total_s = TOTAL_S if budget_s is None else budget_s
        more = max(1.0, total_s / TOTAL_S)
        command_s, nvidia_tool_s, passive_s = command_s * more, nvidia_tool_s * more, passive_s * more
        may_be_longer = budget_s is None
        budget_s = budget_s if total_s < TOTAL_S else None
        self.root = root
        self.environment = {"PATH": path, "LC_ALL": "C", "LANG": "C", "HOME": "/"}
        self.command_s = command_s
        self.nvidia_tool_s = nvidia_tool_s
        self.passive_s = passive_s if budget_s is None else min(passive_s, budget_s / 2)
        self.budget_s = budget_s
        self.total_s = total_s
        self.may_be_longer = may_be_longer
        self.deadline = time.monotonic() + total_s
        self.passive_end = time.monotonic() + self.passive_s
        self.lock = threading.Lock()
        self.closed = False
        self.commands: Dict[str, Answer] = {}
        self.files: Dict[str, Optional[str]] = {}
        self.unreadable: Dict[str, str] = {}
        self.groups: Set[int] = set()
        self.leaving = False

    def passive_left(self) -> float:
        """Return the seconds that a source may still take, so that it is ended before the passive ones are."""
        return max(0.0, round(self.passive_end - time.monotonic() - KILL_WAIT_S, 1))

    # Reading

    def real(self, path: str) -> str:
        """Return where ``path`` of the node is under this probe's root."""
        return os.path.join(self.root, path.lstrip("/"))

    def read(
        self, path: str, requested: Optional[Pattern[str]] = None, keep: Optional[Pattern[str]] = None
    ) -> Optional[str]:
        """Record a file's text and return it; None, with the reason recorded, if it cannot be read.

        A file that does not exist has no reason. With ``requested``, a text in which it is not found is not recorded;
        with ``keep``, only matching lines are.
        """
        try:
            text = text_of(self.content(path))
        except OSError as err:
            self.note_file(path, None, self.reason(err))
            return None
        if keep is not None:
            text = "".join(line + "\n" for line in text.splitlines() if keep.search(line))
        if requested is None or requested.search(text):
            self.note_file(path, text, None)
        return text

    def read_as(self, path: str, stand_in: str) -> None:
        """Record the text of the replacement file as that of ``path``."""
        try:
            self.note_file(path, text_of(self.content(stand_in)), None)
        except OSError as err:
            self.note_file(path, None, self.reason(err))

    def content(self, path: str) -> bytes:
        """Return a file's bytes; raise OSError if it cannot be read, is not a regular file, or is too large."""
        return self.data_of(os.open(self.real(path), os.O_PATH | os.O_CLOEXEC), FILE_BYTES)[1]

    def users_content(self, path: str, most: int) -> Tuple[os.stat_result, bytes]:
        """Return status and first bytes of a file in a home; raise OSError as ``content``, and for links of users."""
        descriptor = os.open(self.root, os.O_PATH | os.O_CLOEXEC)
        for name in path.strip("/").split("/"):
            descriptor, folder = self.without_users_link(descriptor, name), descriptor
            os.close(folder)
        status, data = self.data_of(descriptor, most, cut=True)
        return status, data

    @staticmethod
    def without_users_link(folder: int, name: str) -> int:
        """Return a descriptor of a name in a folder. A link is followed only if root alone could have made it."""
        above = os.fstat(folder)
        try:
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            status = os.fstat(descriptor)
            if stat.S_ISLNK(status.st_mode) and status.st_uid == above.st_uid == 0 and not above.st_mode & 0o022:
                os.close(descriptor)
                descriptor = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            os.close(folder)
            raise
        return descriptor

    @staticmethod
    def data_of(descriptor: int, most: int, cut: bool = False) -> Tuple[os.stat_result, bytes]:
        """Return status and bytes of a regular file by a descriptor that opens nothing, and close it.

        A pipe would block, and the opening of a device can start something. With ``cut``, the rest is not read.
        """
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise OSError(0, "is a pipe" if stat.S_ISFIFO(status.st_mode) else "is not a regular file")
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with os.fdopen(os.open("/proc/self/fd/%d" % descriptor, flags), "rb") as stream:
                data = stream.read(most + 1) or b""
        finally:
            os.close(descriptor)
        if len(data) > most and not cut:
            raise OSError(0, "larger than %d bytes" % most)
        return status, data[:most]

    def read_value(self, path: str) -> None:
        """Record one of the kernel's small files; nothing if it does not exist, or has no value at present."""
        try:
            self.note_file(path, text_of(self.content(path)), None)
        except OSError as err:
            if err.errno not in NO_VALUE and self.reason(err):
                self.note_file(path, None, self.reason(err))

    def matching(self, pattern: str) -> List[str]:
        """Return the node's paths that match a pattern with ``*``, sorted."""
        if "*" not in pattern:
            return [pattern] if os.path.lexists(self.real(pattern)) else []
        root = self.root.rstrip("/")
        paths = glob.glob(glob.escape(root) + pattern)
        return sorted(path[len(root) :] for path in paths)

    def tree(self, folder: str, names: str, must_have: Optional[str], files: Tuple[str, ...]) -> None:
        """Record one row of TREES."""
        entries = [name for name in self.folder(folder) or [] if re.match(names, name)]
        if must_have:
            entries = [name for name in entries if os.path.exists(self.real(folder + name + "/" + must_have))]
        for name in entries[:TREE_ENTRIES]:
            for file in files:
                pattern = folder + name + "/" + file
                for path in self.matching(pattern) if "*" in file else [pattern]:
                    self.read_value(path)

    def folder(self, path: str) -> Optional[List[str]]:
        """Record the names in a folder (``path`` ends in ``/``) and return them; None as in ``read``."""
        try:
            names = names_in(self.real(path))
        except OSError as err:
            self.note_file(path, None, self.reason(err))
            return None
        self.note_file(path, "".join(name + "\n" for name in names), None)
        return names

    @staticmethod
    def reason(err: OSError) -> Optional[str]:
        """Return why a path could not be read; None if it does not exist."""
        if isinstance(err, (FileNotFoundError, NotADirectoryError)):
            return None
        return err.strerror or str(err)

    def note_file(self, path: str, text: Optional[str], reason: Optional[str]) -> None:
        """Add one file's text to the bundle, or the reason why there is none."""
        with self.lock:
            if not self.closed:
                self.files[path] = text
                if reason:
                    self.unreadable[path] = reason

    def note_answer(self, key: str, reply: Answer) -> None:
        """Add one command's answer to the bundle."""
        with self.lock:
            if not self.closed:
                self.commands[key] = reply

    def note_look(self, key: str, action: str, lines: List[str], problems: List[str], seconds: float = 0.0) -> None:
        """Add data that the probe collected itself to the bundle: lines, and what could not be read."""
        stdout = scrub("".join(line + "\n" for line in lines))
        stderr = "; ".join(problems)
        self.note_answer(key, answer(["(probe)", action], 1 if problems else 0, stdout, stderr, seconds))

    # Running

    def run(
        self,
        key: str,
        argv: List[str],
        limit_s: Optional[float] = None,
        keep: Optional[Pattern[str]] = None,
        last: Optional[int] = None,
    ) -> Optional[Answer]:
        """Run a command, record it, and return the record. ``keep`` and ``last`` are those of Sink."""
        self.note_answer(key, self.execute(argv, limit_s, keep, last))
        return self.commands.get(key)

    def execute(
        self,
        argv: List[str],
        limit_s: Optional[float] = None,
        keep: Optional[Pattern[str]] = None,
        last: Optional[int] = None,
    ) -> Answer:
        """Run a command and return its answer in the bundle's form.

        It has a process group of its own, which is killed if the time or the output exceeds its limit. A process
        that cannot be killed (state D) is left, so that it takes its time limit and no more.
        """
        started = time.monotonic()
        own_s = limit_s or self.command_s
        limit_s = max(0.0, min(own_s, self.deadline - started))
        if self.leaving:
            return answer(argv, 126, "", "not started: the probe was ended", 0.0)
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=self.environment,
                close_fds=True,
                start_new_session=True,
            )
        except OSError as err:
            rc = 127 if isinstance(err, FileNotFoundError) else 126
            return answer(argv, rc, "", "%s: %s" % (argv[0], err.strerror or err), time.monotonic() - started)
        with self.lock:
            self.groups.add(process.pid)
        sinks = [Sink(keep, last), Sink()]
        why = self.drain(process, started + limit_s, sinks)
        left = self.kill(process)
        with self.lock:
            self.groups.discard(process.pid)
        stdout, stderr = [scrub(sink.text()) for sink in sinks]
        rc = process.returncode
        if rc is None or why == "timeout":
            rc = 124
        elif rc < 0:
            rc = 128 - rc
        if why == "timeout":
            stderr = stderr[:2000] + "\nkilled: " + late(limit_s, own_s)
        if left:
            stderr += "\nstill there after being killed: state %s" % left
        seconds = time.monotonic() - started
        return answer(argv, rc, stdout, stderr.strip(), seconds, why == "timeout", why == "flood")

    @staticmethod
    def drain(process: "subprocess.Popen[bytes]", deadline: float, sinks: List["Sink"]) -> str:
        """Read both pipes to their end. Return why it ended early: "timeout", "flood" or "".

        A child left in the background may hold the pipes open: once the command itself has ended they are read for a
        moment longer and then closed.
        """
        pipes = [stream.fileno() for stream in (process.stdout, process.stderr) if stream]
        sink_of = dict(zip(pipes, sinks))
        open_pipes = list(pipes)
        why = ""
        gone_at = None
        while open_pipes:
            now = time.monotonic()
            if gone_at is None and process.poll() is not None:
                gone_at = now
            if gone_at is not None and now > gone_at + DRAIN_S:
                break
            if now >= deadline:
                why = "timeout" if gone_at is None else ""
                break
            ready = select.select(open_pipes, [], [], min(0.1, deadline - now))[0]
            for number in ready:
                data = os.read(number, 65536)
                if data:
                    sink_of[number].feed(data)
                else:
                    open_pipes.remove(number)
            if any(sink.full for sink in sinks):
                why = "flood"
                break
        return why or await_end(process, deadline)

    @staticmethod
    def kill(process: "subprocess.Popen[bytes]") -> Optional[str]:
        """Kill the command's process group and close its pipes; return the state letter of a process that stays, or
        None.
        """
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass  # The group has ended: nothing was left to kill.
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
        if await_end(process, time.monotonic() + KILL_WAIT_S) == "":
            return None
        try:
            with open("/proc/%d/stat" % process.pid, "rb") as stream:
                return text_of(stream.read().rpartition(b")")[2].split()[0])
        except (OSError, IndexError):
            return "unknown"

    def kill_all(self) -> None:
        """Kill every command that still runs, before exit. One may have been started a moment ago by a thread that had
        no time to record its group: the process table lists it, and the second scan finds those started in the
        meantime.
        """
        self.leaving = True
        for _ in range(2):
            for group in set(self.groups) | children_of(os.getpid()):
                try:
                    os.killpg(group, signal.SIGKILL)
                except OSError:
                    continue  # It ended by itself.

    # The whole

    def collect(self) -> Answer:
        """Collect everything and return the bundle."""
        started = datetime.datetime.now(datetime.timezone.utc)
        threads = []
        for key, argv in COMMANDS:
            threads.append((key, threading.Thread(target=self.run, args=(key, argv))))
        for key, argv, keep in FILTERED_COMMANDS:
            threads.append((key, threading.Thread(target=self.run, args=(key, argv, None, keep))))
        for source in PASSIVE:
            threads.append((source.__name__, threading.Thread(target=source, args=(self,))))
        for row in TREES:
            threads.append((row[0], threading.Thread(target=self.tree, args=row)))
        for _, thread in threads:
            thread.daemon = True
            thread.start()
        for _, thread in threads:
            thread.join(max(0.0, self.passive_end - time.monotonic()))
        nvidia_tools(self)
        with self.lock:
            self.closed = True
        stuck = [name for name, thread in threads if thread.is_alive()]
        return self.bundle(started, stuck)

    def bundle(self, started: datetime.datetime, stuck: List[str]) -> Answer:
        """Return the document, with a record of what the probe itself could not read."""
        lab = "/etc/gpunode/lab-node"
        simulated = self.files.get(lab) is not None or lab in self.unreadable
        problems = ["%s: %s" % item for item in sorted(self.unreadable.items())]
        problems += ["%s: not finished within %g s" % (name, self.passive_s) for name in stuck]
        commands = dict(self.commands)
        commands["probe-read"] = answer(
            ["(probe)", "read files and folders"], 1 if problems else 0, "", "\n".join(problems), 0.0, bool(stuck)
        )
        return {
            "schema": SCHEMA,
            "host": text_of(os.fsencode(socket.gethostname())),
            "collected_at": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "simulated": simulated,
            "commands": commands,
            "files": {path: None if text is None else scrub(text) for path, text in self.files.items()},
            "results": [],
        }


def late(limit_s: float, own_s: float) -> str:
    """Return which limit ended a command: its own, or the rest of the whole probe's time."""
    if limit_s >= own_s:
        return "no answer within %g s" % own_s
    return "no answer within %.1f s, which was left of the time for the whole probe" % limit_s


def gpus_on_bus(probe: Probe) -> int:
    """Return the number of NVIDIA display controllers that the probe found on the PCI bus."""
    texts = [text or "" for path, text in list(probe.files.items()) if path.startswith(PCI_FOLDER)]
    return sum(1 for text in texts if re.search(r"(?m)^PCI_CLASS=30", text) and re.search(r"(?m)^PCI_ID=10DE:", text))


def children_of(parent: int) -> Set[int]:
    """Return the numbers of a process's children."""
    children = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb") as stream:
                fields = stream.read(4096).rpartition(b")")[2].split()
        except OSError:
            continue  # Ended in the meantime.
        if len(fields) > 1 and int(fields[1]) == parent:
            children.add(int(name))
    return children


def await_end(process: "subprocess.Popen[bytes]", deadline: float) -> str:
    """Wait for a process; return "" once it ended, "timeout" if the deadline came first."""
    try:
        process.wait(max(0.01, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "timeout"
    return ""


# Passive sources: each gets the probe, and records its data.


def plain_files(probe: Probe) -> None:
    """Record every row of FILES and FOLDERS."""
    for path in FILES:
        probe.read(path)
    if probe.files.get("/proc/modules") is None and os.path.exists(probe.real(LAB_MODULES)):
        probe.read_as("/proc/modules", LAB_MODULES)
    for path, keep in FILTERED_FILES:
        probe.read(path, keep=keep)
    for path in FOLDERS:
        probe.folder(path)
    for name in SYSCTLS:
        probe.read_value("/proc/sys/" + name.replace(".", "/"))


def pci_functions(probe: Probe) -> None:
    """Record the names of all PCI functions; of NVIDIA's, of network and NVMe ones the data of sysfs, and of bridges
    above them.

    ``pci-paths`` has a line for each: slot, its path below the root port, IOMMU group. ``pci-acs`` has the Access
    Control Services that a bridge has and has enabled, from its configuration space.
    """
    started = time.monotonic()
    slots = probe.folder(PCI_FOLDER) or []
    lines: List[str] = []
    bridges: Set[str] = set()
    for slot in slots[: TREE_ENTRIES * 8]:
        if not wanted_function(probe, slot):
            continue
        chain = os.path.realpath(probe.real(PCI_FOLDER + slot)).split("/")
        above = [part for part in chain[:-1] if re.match(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", part)]
        group = os.path.basename(os.path.realpath(probe.real(PCI_FOLDER + slot + "/iommu_group")))
        lines.append("\t".join([slot, " ".join(above), group if group.isdigit() else ""]))
        bridges.update(above)
        for name in PCI_FILES:
            probe.read_value(PCI_FOLDER + slot + "/" + name)
    for slot in sorted(bridges):
        for name in PCI_FILES:
            probe.read_value(PCI_FOLDER + slot + "/" + name)
    if slots:
        probe.note_look("pci-paths", "resolve links in " + PCI_FOLDER, lines, [], time.monotonic() - started)
    if bridges:
        access_control(probe, sorted(bridges))


def wanted_function(probe: Probe, slot: str) -> bool:
    """Return True for NVIDIA's functions, and network adapters and NVMe controllers that are not virtual functions."""
    try:
        text = text_of(probe.content(PCI_FOLDER + slot + "/uevent"))
    except OSError as err:
        reason = probe.reason(err)
        if reason:
            probe.note_file(PCI_FOLDER + slot + "/uevent", None, reason)
        return False
    if re.search(r"(?m)^PCI_ID=10DE:", text):
        return True
    requested = re.search(r"(?m)^PCI_CLASS=(2|108)[0-9A-F]{2,4}$", text) is not None
    return requested and not os.path.lexists(probe.real(PCI_FOLDER + slot + "/physfn"))


def access_control(probe: Probe, bridges: List[str]) -> None:
    """Record one line per bridge with ACS: slot, capability and control register in hexadecimal."""
    lines, hidden = [], 0
    for slot in bridges:
        try:
            space = probe.content(PCI_FOLDER + slot + "/config")
        except OSError:
            hidden += 1
            continue
        if len(space) <= 256:
            hidden += 1
            continue
        at = extended_capability(space, 0x000D)
        if at:
            words = [int.from_bytes(space[at + offset : at + offset + 2], "little") for offset in (4, 6)]
            lines.append("%s\t%04x\t%04x" % (slot, words[0], words[1]))
    problems = []
    if hidden:
        problems.append("the configuration space of %d of %d bridges cannot be seen" % (hidden, len(bridges)))
    probe.note_look("pci-acs", "read configuration space", lines, problems)


def extended_capability(space: bytes, requested: int) -> Optional[int]:
    """Return where a PCI Express extended capability begins; None if the device does not have it."""
    at, seen = 0x100, set()  # type: int, Set[int]
    while 0x100 <= at <= len(space) - 8 and at not in seen:
        seen.add(at)
        header = int.from_bytes(space[at : at + 4], "little")
        if header & 0xFFFF == requested:
            return at
        at = header >> 20
    return None


def kernels(probe: Probe) -> None:
    """Record kernels with a folder in /lib/modules, the target of each ``build`` link, and the owning packages."""
    paths = []
    for release in probe.folder("/lib/modules/") or []:
        modules = "/lib/modules/%s" % release
        probe.folder(modules + "/")
        probe.folder(modules + "/build/")
        paths.append("/boot/vmlinuz-" + release)
        for path in (modules + "/kernel", modules + "/build"):
            paths += [path, "/usr" + path]
    if paths and has_dpkg(probe):
        probe.run("dpkg-kernels", ["dpkg-query", "-S"] + paths)


def module_files(probe: Probe) -> None:
    """Record NVIDIA's modules on disk, and modinfo's output on the GPU's own one in each kernel."""
    reply = probe.run("find-modules", ["find", "/lib/modules/", "-name", "nvidia*.ko*"])
    paths = [line for line in (reply["stdout"] if reply else "").splitlines() if GPU_MODULE.search(line)]
    if paths:
        probe.run("modinfo", ["modinfo"] + paths)
        kernels = sorted({path.split("/")[3] for path in paths})
        depends = ["/lib/modules/%s/modules.dep" % kernel for kernel in kernels]
        probe.run("modules-dep", ["grep", "-H", "-o", "-E", "^[^:]*/nvidia[^/:]*[.]ko[^:]*"] + depends)
    sizes, lines, problems = {}, [], []  # type: Dict[str, Tuple[int, int]], List[str], List[str]
    for path in paths:
        try:
            found_file = os.stat(probe.real(path))
        except OSError as err:
            problems.append("%s: %s" % (path, err.strerror))
            continue
        # A package keeps the time of its build: the time of the change is that of the installation.
        sizes[path] = (found_file.st_size, int(max(found_file.st_mtime, found_file.st_ctime)))
        lines.append("%s\t%d\t%d" % ((path,) + sizes[path]))
    probe.note_look("module-files", "look at modules", lines, problems)
    images(probe, sizes)


def images(probe: Probe, sizes: Dict[str, Tuple[int, int]]) -> None:
    """Record the initramfs of each kernel with a GPU module: a line ``kernel, image, time, state, size, path``.

    An image that was written after the module was installed is ``newer``. An older one is listed: ``without`` a GPU
    module, ``module`` with its size and path (a line each), ``unknown`` with the reason in place of the path.
    """
    started = time.monotonic()
    lines, listed = [], 0
    changed = {}  # type: Dict[str, int]
    for path, (_, at) in sizes.items():
        kernel = path.split("/")[3]
        changed[kernel] = max(at, changed.get(kernel, 0))
    for kernel in sorted(changed, key=lambda name: changed[name], reverse=True):
        for path in [path for pattern in IMAGES for path in probe.matching(pattern % kernel)]:
            try:
                written = int(os.stat(probe.real(path)).st_mtime)
            except OSError:
                continue  # Removed in the meantime.
            head = [kernel, path, str(written)]
            if written >= changed[kernel]:
                lines.append("\t".join(head + ["newer", "", ""]))
                continue
            listed += 1
            left_s = probe.passive_left()
            if probe.budget_s is not None or listed > IMAGES_MOST or left_s <= 0:
                lines.append("\t".join(head + ["unknown", "", "not listed, to save time"]))
            else:
                lines += ["\t".join(head + tail) for tail in modules_in(probe, path, left_s)]
    probe.note_look("initramfs", "list images", lines, [], time.monotonic() - started)


def modules_in(probe: Probe, path: str, limit_s: float) -> List[List[str]]:
    """Return state, size and path of each GPU module in an initramfs."""
    for argv in (["lsinitramfs", "-l", path], ["lsinitrd", path]):
        reply = probe.execute(argv, limit_s, keep=LISTED_MODULE)
        if reply["rc"] == 127:
            continue
        if reply["rc"] != 0:
            reason = "no answer in time" if reply["timed_out"] else "exit status %d" % reply["rc"]
            return [["unknown", "", "%s: %s" % (argv[0], reason)]]
        rows = [line.split(None, 5) for line in reply["stdout"].splitlines()]
        # -rw-r--r-- 1 root root 56823808 Nov 20 09:00 usr/lib/modules/... (lsinitrd prints a year in place of the time)
        named = [["module", row[4], row[5].split()[-1]] for row in rows if len(row) == 6 and row[4].isdigit()]
        return named or [["without", "", ""]]
    return [["unknown", "", "neither lsinitramfs nor lsinitrd is installed"]]


def boot_loader(probe: Probe) -> None:
    """Record what decides which kernel starts next: GRUB's menu and state, entries of the boot loader specification,
    the firmware's variables of systemd-boot.
    """
    for path in GRUB_FILES:
        probe.read(path, keep=GRUB_LINES)
    for path in probe.matching(GRUB_OF_FIRMWARE):
        probe.read(path, GRUB_MENU, GRUB_LINES)
    for path in GRUB_STATES:
        probe.read(path, keep=GRUB_STATE)
    for folder in LOADER_FOLDERS:
        probe.read(folder + "loader.conf", keep=re.compile(r"^default\s"))
        for name in (probe.folder(folder + "entries/") or [])[:LOADER_ENTRIES]:
            if name.endswith(".conf"):
                probe.read(folder + "entries/" + name, keep=LOADER_ENTRY)
    for name in LOADER_VARIABLES:
        probe.read_value(LOADER_VARIABLE % name)


def has_dpkg(probe: Probe) -> bool:
    """Return True if dpkg is the node's package manager; a system of RHEL's family may have a dpkg as a tool."""
    rpm_family = re.search(r"(?m)^ID(_LIKE)?=.*\b(rhel|fedora|centos)\b", probe.read("/etc/os-release") or "")
    return not rpm_family and os.path.exists(probe.real("/var/lib/dpkg/status"))


def packages(probe: Probe) -> None:
    """Record the GPU stack's packages. Holds are in dpkg's status; for rpm in the lock lists among FILES."""
    if has_dpkg(probe):
        form = "\\t".join("${%s}" % field for field in DPKG_FIELDS) + "\\n"
        probe.run("dpkg-packages", ["dpkg-query", "-W", "-f", form], keep=GPU_STACK)
        return
    form = "\\t".join("%%{%s}" % field for field in RPM_FIELDS) + "\\n"
    probe.run("rpm-packages", ["rpm", "-qa", "--qf", form], keep=GPU_STACK_AND_KERNELS)


def library(probe: Probe) -> None:
    """Record the linker cache's entries of libcuda, libnvidia-ml, libnccl and libcudnn, and the copies on disk.

    ``library-files`` has a line per path: the path, the file that it links to, its size.
    """
    cache = probe.run("ldconfig", ["ldconfig", "-p"], keep=re.compile(r"\blib(nvidia-ml|cuda|nccl|cudnn)\.so"))
    cached = [line.rpartition("=> ") for line in (cache["stdout"] if cache else "").splitlines()]
    entries = [entry for entry in cached if "libnvidia-ml.so.1 (" in entry[0]]
    if entries:
        native = [entry for entry in entries if "x86-64" in entry[0] or "AArch64" in entry[0]]
        probe.run("readlink-libnvidia-ml", ["readlink", "-e", (native or entries)[0][2].strip()])
    started = time.monotonic()
    paths = [entry[2].strip() for entry in cached if entry[1]]
    for folder in LIBRARY_FOLDERS:
        for name in ("cuda", "nvidia-ml", "nccl", "cudnn"):
            paths += [path for path in probe.matching("%s/lib%s.so*" % (folder, name)) if LIBRARY.search(path)]
    lines = []
    for path in sorted(set(paths)):
        real = os.path.realpath(probe.real(path))
        size = file_size(real)
        if size is not None:
            lines.append("%s\t%s\t%d" % (path, shown_path(probe, real), size))
    # Of the driver's other libraries only those that a full disk or a container left empty.
    for folder in LIBRARY_FOLDERS:
        for path in probe.matching(folder + "/lib[nc][vu]*.so.*"):
            real = os.path.realpath(probe.real(path))
            if OTHER_LIBRARY.search(path) and file_size(real) == 0:
                lines.append("%s\t%s\t0" % (path, shown_path(probe, real)))
    lines = sorted(set(lines))
    probe.note_look("library-files", "look for libraries", lines, [], time.monotonic() - started)


def file_size(path: str) -> Optional[int]:
    """Return the size of a file; None if it does not exist."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def shown_path(probe: Probe, real: str) -> str:
    """Return a resolved path as on the node."""
    root = os.path.realpath(probe.root).rstrip("/")
    return text_of(os.fsencode(real[len(root) :] if real.startswith(root + "/") else real))


def signs(probe: Probe) -> None:
    """Record paths with a meaning by their existence, among them those that other installers leave."""
    lines = [path for pattern in SIGNS for path in probe.matching(pattern)]
    probe.note_look("signs", "look for paths", lines, [])
    probe.read(INSTALLER_LOG, keep=INSTALLER_LINES)


def tools(probe: Probe) -> None:
    """Record the programs listed by the role gpu_tools: a line ``name, path`` each, an empty path if there is none."""
    try:
        record = json.loads(text_of(probe.content(TOOLS_RECORD)))
        names = [name for name in record["programs"] if re.match(r"[A-Za-z0-9._+-]{1,60}$", name)][:100]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as err:
        probe.note_look("tools", "look for programs", [], ["%s: %s" % (TOOLS_RECORD, err)])
        return
    paths = [(name, [path for folder in PROGRAM_FOLDERS for path in probe.matching(folder + name)]) for name in names]
    probe.note_look("tools", "look for programs", ["\t".join((name, (at or [""])[0])) for name, at in paths], [])


def storage(probe: Probe) -> None:
    """Record the mounts listed by the role storage: a line each with the expected and the current state.

    A remote one is opened, which mounts it: each in a process of its own, so that a server that does not answer
    takes its time limit and nothing else.
    """
    try:
        requested = json.loads(text_of(probe.content(STORAGE_RECORD)))["mounts"][:STORAGE_MOST]
        rows = [[str(mount[key]) for key in ("path", "source", "type")] for mount in requested]
        marks = [
            ("remote" if mount["remote"] else "scratch", ",".join(map(str, mount["options"]))) for mount in requested
        ]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as err:
        probe.note_look("storage", "look at mounts", [], ["%s: %s" % (STORAGE_RECORD, err)])
        return
    sizes = {}  # type: Dict[str, Answer]

    def look(path: str) -> None:
        sizes[path] = probe.execute(["stat", "--file-system", "--format", "%S %b %a", path + "/."], STORAGE_S)

    threads = [threading.Thread(target=look, args=(row[0],)) for row in rows]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(STORAGE_S + KILL_WAIT_S + 1)
    mounts = mounts_by_path(probe)
    lines = []
    for row, mark in zip(rows, marks):
        reply = sizes.get(row[0]) or answer([], 124, "", "", STORAGE_S, timed_out=True)
        mounted = [mount for mount in mounts.get(row[0], []) if mount[1] != "autofs"]
        lines.append("\t".join([*row, *mark, *storage_state(probe, row[1], mounted), *storage_size(reply)]))
    probe.note_look("storage", "look at mounts", lines, [])


def mounts_by_path(probe: Probe) -> Dict[str, List[List[str]]]:
    """Return the mounts on each path, the newest last: source, type, options, and of the superblock ``ro`` or ``rw``
    and all options.

    After an error the kernel makes the superblock read-only and leaves the mount's own flag: the options have ``ro`` if
    one of the two does, as in /proc/mounts.
    """
    mounts = {}  # type: Dict[str, List[List[str]]]
    for line in text_of(probe.content("/proc/self/mountinfo")).split("\n"):
        head, _, tail = line.partition(" - ")
        fields, kinds = head.split(" "), tail.split(" ")
        if len(fields) > 5 and len(kinds) > 2:
            superblock = "ro" if "ro" in kinds[2].split(",") else "rw"
            options = re.sub(r"^rw\b", superblock, fields[5])
            mounts.setdefault(fields[4], []).append([kinds[1], kinds[0], options, superblock, kinds[2]])
    return mounts


def storage_state(probe: Probe, source: str, mounts: List[List[str]]) -> List[str]:
    """Return type and options of a mount, and whether it is the device with the expected UUID."""
    if not mounts:
        return ["", "", ""]
    same = ""
    if source.startswith("UUID="):
        device = os.path.realpath(probe.real("/dev/disk/by-uuid/" + source[5:]))
        same = "yes" if device == os.path.realpath(probe.real(mounts[-1][0])) else "no"
    return [mounts[-1][1], mounts[-1][2], same]


def storage_size(reply: Answer) -> List[str]:
    """Return size and free space in MiB, and why there is none."""
    words = reply["stdout"].split()
    if reply["timed_out"]:
        return ["", "", "no answer within %g s" % STORAGE_S]
    if reply["rc"] != 0 or len(words) != 3:
        return ["", "", " ".join(reply["stderr"].split())[:200] or "stat ended with %d" % reply["rc"]]
    block, blocks, free = [int(word) for word in words]
    return [str(block * blocks >> 20), str(block * free >> 20), ""]


def repositories(probe: Probe) -> None:
    """Record package sources of the GPU stack or of containers, completely; of the others only that they exist."""
    names = [path for pattern in REPOSITORY_FILES for path in probe.matching(pattern)]
    for path in names:
        probe.read(path, REPOSITORY)
    probe.note_look("repository-files", "look for package sources", names, [])


def variables(probe: Probe) -> None:
    """Record the variables of VARIABLES that are set for all users: a line ``path, name, value`` each, separated by
    tabs.
    """
    lines, problems = [], []
    for path in [path for pattern in VARIABLE_FILES for path in probe.matching(pattern)]:
        try:
            text = COMMENT.sub("", text_of(probe.content(path)))
        except OSError as err:
            problems.append("%s: %s" % (path, probe.reason(err) or "gone"))
            continue
        lines += ["\t".join((path,) + setting) for setting in settings_in(text)]
    systemd = probe.execute(["systemctl", "show", "-p", "Environment", "-p", "DefaultEnvironment"])
    if systemd["rc"] == 0:
        text = re.sub(r"(?m)^(Default)?Environment=", " ", systemd["stdout"])
        lines += ["\t".join(("systemd",) + setting) for setting in settings_in(text)]
    elif probe.folder("/run/systemd/system/") is not None:
        problems.append("systemd's environment: " + (systemd["stderr"].strip().splitlines() or ["no answer"])[-1])
    probe.note_look("variables", "read settings of the environment", lines, problems)


def settings_in(text: str) -> List[Tuple[str, str]]:
    """Return (name, value) of each of VARIABLES that a text sets."""
    pairs = [(match.group("name"), match.group("value").strip("\"'")) for match in SETTING.finditer(text)]
    return [(name, " ".join(value.split())[:400]) for name, value in pairs]


def boot_settings(probe: Probe) -> None:
    """Record the next boot's values of SYSCTLS and of huge pages: a line ``path, name, value`` each, the last one is
    effective.
    """
    lines, problems = [], []
    for folders, parse in ((SYSCTL_FOLDERS, sysctls_in), (TMPFILES_FOLDERS, hugepages_in)):
        chosen: Dict[str, str] = {}
        for folder in folders:
            for name in probe.folder(folder) or []:
                if name.endswith(".conf"):
                    chosen.setdefault(name, folder + name)
        for name in sorted(chosen):
            try:
                text = COMMENT.sub("", text_of(probe.content(chosen[name])))
            except OSError as err:
                problems.append("%s: %s" % (chosen[name], probe.reason(err) or "gone"))
                continue
            lines += ["\t".join((chosen[name],) + setting) for setting in parse(text)]
    probe.note_look("boot-settings", "read sysctl.d and tmpfiles.d", lines, problems)


def sysctls_in(text: str) -> List[Tuple[str, str]]:
    """Return (name, value) of each of SYSCTLS that a file of sysctl.d sets."""
    pairs = [(match.group("name"), match.group("value")) for match in SYSCTL_LINE.finditer(text)]
    # The first separator of a name decides whether slashes or dots divide it.
    named = [(name.replace("/", ".") if "/" in name else name, value) for name, value in pairs]
    return [(name, " ".join(value.split())[:400]) for name, value in named if name in SYSCTLS]


def hugepages_in(text: str) -> List[Tuple[str, str]]:
    """Return (name, value) if a file of tmpfiles.d sets the huge pages' mode."""
    return [("transparent_hugepage", match.group("value")) for match in HUGEPAGES_LINE.finditer(text)]


def limits(probe: Probe) -> None:
    """Record the drop-ins of limits.conf."""
    for name in probe.folder("/etc/security/limits.d/") or []:
        if name.endswith(".conf"):
            probe.read("/etc/security/limits.d/" + name)


def cpu_clocks(probe: Probe) -> None:
    """Record the number of processors by scaling driver, governor, energy preference and deepest idle state."""
    started = time.monotonic()
    counts: Dict[Tuple[str, str], int] = {}
    for policy in probe.matching("/sys/devices/system/cpu/cpufreq/policy*"):
        try:
            cpus = len(probe.content(policy + "/related_cpus").split()) or 1
        except OSError:
            cpus = 1
        for name in ("scaling_driver", "scaling_governor", "energy_performance_preference"):
            try:
                value = text_of(probe.content(policy + "/" + name)).strip()
            except OSError:
                continue  # Not every driver has a preference.
            counts[name, value] = counts.get((name, value), 0) + cpus
    for idle in probe.matching("/sys/devices/system/cpu/cpu[0-9]*/cpuidle"):
        longest = -1
        for state in probe.matching(idle + "/state*"):
            try:
                if int(probe.content(state + "/disable")) == 0:
                    longest = max(longest, int(probe.content(state + "/latency")))
            except (OSError, ValueError):
                continue
        if longest >= 0:
            counts["idle_latency_us", str(longest)] = counts.get(("idle_latency_us", str(longest)), 0) + 1
    lines = ["%s\t%s\t%d" % (name, value, number) for (name, value), number in sorted(counts.items())]
    probe.note_look("cpu-clocks", "read /sys/devices/system/cpu/cpufreq", lines, [], time.monotonic() - started)


def device_nodes(probe: Probe) -> None:
    """Record ``/dev/nvidia*``: a line each of path, kind, mode, user, group, major and minor number."""
    lines, problems = [], []
    for path in probe.matching("/dev/nvidia*") + probe.matching("/dev/nvidia*/*"):
        try:
            status = os.lstat(probe.real(path))
        except OSError as err:
            problems.append("%s: %s" % (path, err.strerror))
            continue
        kinds = ((stat.S_ISCHR, "character"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"), (stat.S_ISREG, "file"))
        kind = next((word for is_kind, word in kinds if is_kind(status.st_mode)), "other")
        numbers = ["", ""]
        if kind == "character":
            numbers = [str(os.major(status.st_rdev)), str(os.minor(status.st_rdev))]
        mode = "%04o" % stat.S_IMODE(status.st_mode)
        lines.append("\t".join([path, kind, mode, user_name(status.st_uid), group_name(status.st_gid)] + numbers))
    probe.note_look("device-nodes", "look at /dev/nvidia*", lines, problems)


def device_links(probe: Probe) -> None:
    """Record character devices ``/dev/nvidia*``: a line each of path, seconds from the boot to its creation, and
    whether ``/dev/char`` has a link to it, which runc passes to systemd.
    """
    lines, booted = [], time.time() - time.monotonic()
    for path in probe.matching("/dev/nvidia*") + probe.matching("/dev/nvidia*/*"):
        try:
            status = os.lstat(probe.real(path))
        except OSError:
            continue  # Removed in the meantime; device-nodes has the reason of others.
        if stat.S_ISCHR(status.st_mode):
            link = "/dev/char/%d:%d" % (os.major(status.st_rdev), os.minor(status.st_rdev))
            linked = "yes" if os.path.lexists(probe.real(link)) else "no"
            lines.append("%s\t%d\t%s" % (path, status.st_mtime - booted, linked))
    probe.note_look("device-links", "look at /dev/char", lines, [])


def container_devices(probe: Probe) -> None:
    """Record running containers with GPUs in cgroups that systemd manages: a line each of scope, whether it allows
    the devices, and the microseconds from the boot to its start and to systemd's latest reload.

    A device that the scope does not list was allowed behind systemd's back, and is refused after the next reload.
    """
    pids, hidden = {}, 0  # type: Dict[str, str], int
    for pid in names_like(probe, "/proc", r"\d+$"):
        try:
            scope = CONTAINER_SCOPE.search(text_of(probe.content("/proc/%s/cgroup" % pid)))
            if scope and scope.group(1) not in pids and len(pids) < CONTAINERS_MOST:
                os.stat(probe.real("/proc/%s/root/dev" % pid))
                if os.path.lexists(probe.real("/proc/%s/root/dev/nvidiactl" % pid)):
                    pids[scope.group(1)] = pid
        except PermissionError:
            hidden += 1
        except OSError:
            continue  # Ended in the meantime.
    lines, problems = [], ["%d containers could not be looked into" % hidden] if hidden else []
    if pids:
        times = probe.execute(["systemctl", "show", "-p", "UnitsLoadTimestampMonotonic"])
        loaded = re.search(r"(\d+)$", times["stdout"].strip())
        shown = ["systemctl", "show", "-p", "Id", "-p", "DeviceAllow", "-p", "ActiveEnterTimestampMonotonic"]
        answered = probe.execute(shown + sorted(pids))
        if answered["rc"] != 0:
            problems.append("systemctl show: " + (answered["stderr"].strip().splitlines() or ["no answer"])[-1])
        for block in answered["stdout"].split("\n\n"):
            values = dict(line.partition("=")[::2] for line in block.splitlines())
            if values.get("Id") in pids:
                allowed = "yes" if GPU_ALLOWED.search(block) else "no"
                started = values.get("ActiveEnterTimestampMonotonic", "")
                lines.append("\t".join([values["Id"], allowed, started, loaded.group(1) if loaded else ""]))
    probe.note_look("container-devices", "look at containers' devices", sorted(lines), problems)


def own_name(probe: Probe) -> None:
    """Record the node's name, and the addresses that /etc/hosts has for it: ``name NAME``, ``address ADDRESS``."""
    lines, problems = [], []
    try:
        name = text_of(probe.content("/proc/sys/kernel/hostname")).strip()
        lines.append("name\t" + name)
        text = COMMENT.sub("", text_of(probe.content("/etc/hosts")))
        for words in [line.partition("#")[0].split() for line in text.split("\n")]:
            if len(words) > 1 and name and name in words[1:]:
                lines.append("address\t" + words[0][:64])
    except OSError as err:
        if probe.reason(err):
            problems.append("/etc/hosts: %s" % probe.reason(err))
    probe.note_look("own-name", "read /etc/hosts", lines, problems)


def local_mounts(probe: Probe) -> None:
    """Record the root and the mounted file systems of /etc/fstab on block devices: a line each of path, source, type,
    the superblock's ``ro`` or ``rw``, and what fstab requests ("" without an entry).
    """
    lines, problems, requested = [], [], {ROOT_MOUNT: ""}
    try:
        mounts = mounts_by_path(probe)
        try:
            text = COMMENT.sub("", text_of(probe.content("/etc/fstab")))
        except OSError as err:
            text = ""
            if probe.reason(err):
                problems.append("/etc/fstab: %s" % probe.reason(err))
        for words in [line.split() for line in text.split("\n")]:
            if len(words) > 3 and words[1].startswith("/"):
                requested[words[1]] = "ro" if "ro" in words[3].split(",") else "rw"
        for path in sorted(requested)[:TREE_ENTRIES]:
            for source, kind, _, superblock, _ in mounts.get(path, [])[-1:]:
                if path == ROOT_MOUNT or source.startswith("/dev/"):
                    lines.append("\t".join([path, source, kind, superblock, requested[path]]))
    except OSError as err:
        problems.append("/proc/self/mountinfo: %s" % (probe.reason(err) or "gone"))
    probe.note_look("local-mounts", "look at local mounts", lines, problems)


def remote_mounts(probe: Probe) -> None:
    """Record mounted network file systems: a line each of path, source, type, ``rw`` or ``ro`` (of the mount or of its
    superblock), and the options of both. Nothing is opened: a server that does not answer costs nothing.
    """
    lines, problems = [], []
    try:
        for path, mounts in sorted(mounts_by_path(probe).items()):
            for source, kind, flags, _, all_of_it in mounts[-1:]:
                if NETWORK_TYPES.match(kind):
                    access = flags.split(",")[0]
                    options = [option for option in (flags + "," + all_of_it).split(",") if MOUNT_OPTION.match(option)]
                    options = [option for option in options if option not in ("ro", "rw")]
                    lines.append("\t".join([path, source, kind, access, ",".join(dict.fromkeys(options))]))
    except OSError as err:
        problems.append("/proc/self/mountinfo: %s" % (probe.reason(err) or "gone"))
    probe.note_look("remote-mounts", "look at network mounts", lines[:TREE_ENTRIES], problems)


def needrestart(probe: Probe) -> None:
    """Record needrestart's mode and the services that it must not restart: ``mode MODE``, ``spared PATTERN``. Without
    needrestart, nothing.
    """
    paths = [path for pattern in NEEDRESTART for path in probe.matching(pattern)]
    if not paths:
        return
    modes, spared, problems = [], [], []  # type: List[str], List[str], List[str]
    for path in paths:
        try:
            text = text_of(probe.content(path))
        except OSError as err:
            problems.append("%s: %s" % (path, probe.reason(err) or "gone"))
            continue
        modes += NEEDRESTART_MODE.findall(text)
        spared += NEEDRESTART_SPARED.findall(text)
    lines = ["mode\t" + mode for mode in modes[-1:]] + ["spared\t" + pattern for pattern in sorted(set(spared))]
    probe.note_look("needrestart", "read needrestart's configuration", lines, problems)


def slurm(probe: Probe) -> None:
    """Record the lines on GPUs of Slurm's configuration, from the first folder that has a slurm.conf, and versions."""
    folders = [folder for folder in SLURM_FOLDERS if os.path.exists(probe.real(folder + "slurm.conf"))][:1]
    for folder in folders:
        for name, keep in SLURM_FILES:
            probe.read(folder + name, keep=keep)
    probe.note_look("slurm", "look for Slurm's configuration", folders, [])
    if folders:
        probe.run("version-slurmd", ["slurmd", "-V"])
        # A prolog asks the controller nothing: each job would.
        if probe.budget_s is None:
            probe.run("slurm-controller", ["scontrol", "show", "config"], SLURM_S, keep=SLURM_CONTROLLER)


def rdma_nodes(probe: Probe) -> None:
    """Record ``/dev/infiniband/*``: a line each of path and kind."""
    lines, problems = [], []
    for path in probe.matching("/dev/infiniband/*"):
        try:
            kind = "character" if stat.S_ISCHR(os.stat(probe.real(path)).st_mode) else "other"
        except OSError as err:
            problems.append("%s: %s" % (path, err.strerror))
            continue
        lines.append("%s\t%s" % (path, kind))
    probe.note_look("rdma-nodes", "look at /dev/infiniband", lines, problems)


def peer_memory(probe: Probe) -> None:
    """Record whether the loaded ib_core supports registering memory of other devices, as nvidia-peermem does: ``yes``
    or ``no``.
    """
    if not os.path.isdir(probe.real("/sys/module/ib_core")):
        return
    lines, problems = [], []
    try:
        with open(probe.real("/proc/kallsyms"), "rb") as stream:
            lines.append("yes" if any(PEER_MEMORY in line for line in stream) else "no")
    except OSError as err:
        problems.append("/proc/kallsyms: %s" % err.strerror)
    probe.note_look("peer-memory", "look for the peer memory interface", lines, problems)


def flow_control(probe: Probe) -> None:
    """Record flow control and the reverse path filter of each Ethernet interface of an RDMA adapter, and the rules of
    routing by source.
    """
    rails = []
    for name in names_like(probe, "/sys/class/net/", r".")[:TREE_ENTRIES]:
        folder = probe.real("/sys/class/net/" + name)
        try:
            with open(folder + "/type", "rb") as stream:
                ethernet = stream.read(16).strip() == b"1"
        except OSError:
            continue
        if not ethernet or not os.path.isdir(folder + "/device/infiniband"):
            continue
        rails.append(name)
    for name in rails:
        probe.read_value("/proc/sys/net/ipv4/conf/%s/rp_filter" % name)
    if rails:
        probe.read_value("/proc/sys/net/ipv4/conf/all/rp_filter")
        probe.run("ip-rules", ["ip", "rule", "show"])
    for name in rails:
        reply = probe.run("dcb-pfc-%s" % name, ["dcb", "pfc", "show", "dev", name], DCB_S)
        if reply and reply["rc"] in (126, 127):
            break
        probe.run("dcb-app-%s" % name, ["dcb", "-N", "app", "show", "dev", name, "dscp-prio"], DCB_S)
        probe.run("dcb-dcbx-%s" % name, ["dcb", "dcbx", "show", "dev", name], DCB_S)


def user_name(number: int) -> str:
    """Return a user's name, or its number if it has none."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def group_name(number: int) -> str:
    """Return a group's name, or its number if it has none."""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def docker_daemon(probe: Probe) -> None:
    """Record the answer of Docker's daemon if it already runs: a request would start one that waits at its socket."""
    if os.path.exists(probe.real("/run/docker.pid")):
        probe.run("docker-info", ["docker", "info", "--format", DOCKER_INFO])
    elif os.path.exists(probe.real("/run/snap.docker/docker.pid")):
        # Of the snap, which is not in PATH.
        probe.run("docker-info", ["/snap/bin/docker", "info", "--format", DOCKER_INFO])


def packet_filter(probe: Probe) -> None:
    """Record rules of nftables without the contents of sets, and the listening sockets."""
    probe.run("nft-ruleset", ["nft", "-j", "-t", "list", "ruleset"])
    probe.run("nft-own", ["nft", "-s", "-t", "list", "table", "inet", "gpunode"])
    probe.run("sockets", ["ss", "-H", "-l", "-n", "-t", "-u", "-p"])
    probe.run("addresses", ["ip", "-o", "address", "show"])


def ssh_daemon(probe: Probe) -> None:
    """Record sshd's effective settings, private keys (path, mode, owner, type, bits, time), and accounts without a
    password.

    Of keys and passwords nothing else leaves the node.
    """
    settings = probe.execute(["sshd", "-T"], keep=SSHD_SETTINGS)
    if LACKS_FOLDER in settings["stderr"]:
        apart = probe.execute(["unshare", "--mount", "sh", "-c", WITH_FOLDER], keep=SSHD_SETTINGS)
        settings = apart if apart["rc"] == 0 else settings
    probe.note_answer("sshd-settings", settings)
    paths = probe.matching("/etc/ssh/ssh_host_*_key")
    for folder in PRIVATE_KEY_FOLDERS:
        paths += probe.matching(folder)
    lines, problems = [], [] if os.geteuid() == 0 else ["keys of others are seen by root alone"]
    in_folder: Dict[str, int] = {}
    for path in paths:
        folder = path.rpartition("/")[0]
        in_folder[folder] = in_folder.get(folder, 0) + 1
        line = private_key(probe, path) if in_folder[folder] <= KEY_ENTRIES and path.isprintable() else None
        if line:
            lines.append(line)
    probe.note_look("private-keys", "look at private keys", lines, problems)
    accounts, problems = [], []
    try:
        shells = {row[0]: row[6] for row in account_rows(probe, "/etc/passwd", 7)}
        hashes = {row[0]: row[1] for row in account_rows(probe, "/etc/shadow", 9)}
        accounts = [name for name, hashed in hashes.items() if not hashed and LOGIN_SHELL.search(shells.get(name, ""))]
    except OSError as err:
        problems.append("the passwords could not be looked at: %s" % (probe.reason(err) or "/etc/shadow is not there"))
    probe.note_look("empty-passwords", "look for empty passwords", sorted(accounts), problems)


def account_rows(probe: Probe, path: str, width: int) -> List[List[str]]:
    """Return the lines of one of the databases of accounts, split into fields."""
    rows = [line.split(":") for line in text_of(probe.content(path)).split("\n")]
    return [row for row in rows if len(row) == width]


def private_key(probe: Probe, path: str) -> Optional[str]:
    """Return one line on a private key; None if the file is not one. The type is that of its public key file."""
    try:
        status, start = probe.users_content(path, 64)
    except OSError:
        return None
    if b"PRIVATE KEY-----" not in start:
        return None
    kind, bits = "", 0
    try:
        kind, bits = key_kind(text_of(probe.users_content(path + ".pub", PUBLIC_KEY_BYTES)[1]))
    except (OSError, ValueError, struct.error):
        pass  # Without a public key file the type is unknown.
    row = (
        path,
        "%04o" % stat.S_IMODE(status.st_mode),
        user_name(status.st_uid),
        kind,
        str(bits),
        str(int(status.st_mtime)),
    )
    return "\t".join(row)


def key_kind(text: str) -> Tuple[str, int]:
    """Return type and size in bits of a public key; ValueError if it is invalid."""
    words = text.split(None, 2)
    # A link could lead anywhere: only the name of a kind of key is read from the file.
    if len(words) < 2 or not KEY_KIND.match(words[0]):
        raise ValueError("no public key")
    kind, data = words[0], base64.b64decode(words[1])
    sizes = {"ssh-ed25519": 256, "ssh-dss": 1024}
    if kind.startswith("ecdsa-sha2-nistp"):
        return kind, int(kind[-3:])
    if kind != "ssh-rsa":
        return kind, sizes.get(kind, 0)
    at = 0
    for _ in range(2):
        at += 4 + struct.unpack(">I", data[at : at + 4])[0]
    length = struct.unpack(">I", data[at : at + 4])[0]
    return kind, int.from_bytes(data[at + 4 : at + 4 + length], "big").bit_length()


def cdi_specs(probe: Probe) -> None:
    """Record CDI specifications: ``file PATH SIZE``, its versions, kinds, names, host paths, and those that are
    missing, and the numbers of its devices.
    """
    lines, problems = [], []
    for folder in CDI_FOLDERS:
        for name in probe.folder(folder) or []:
            if not name.endswith((".yaml", ".yml", ".json")):
                continue
            try:
                text = text_of(probe.content(folder + name))
            except OSError as err:
                problems.append("%s%s: %s" % (folder, name, probe.reason(err) or "gone"))
                continue
            lines.append("file\t%s\t%d" % (folder + name, len(text.encode())))
            lines += cdi_lines(probe, text)
    probe.note_look("cdi-specs", "read CDI specifications", lines, problems)


def cdi_lines(probe: Probe, text: str) -> List[str]:
    """Return the content of one specification, each item once."""
    lines = []
    for item in CDI_ITEM.split(text):
        values = dict(CDI_NODE.findall(item))
        if values.get("path", "").startswith("/dev/") and "major" in values:
            lines.append("node\t%s\t%s\t%s" % (values["path"], values["major"], values.get("minor", "")))
    for key, value in sorted(set(CDI_TOKEN.findall(text))):
        if key != "hostPath":
            lines.append("%s\t%s" % (key, value))
            continue
        if not os.path.lexists(probe.real(value)):
            lines.append("missing\t%s" % value)
        version = LIBRARY_VERSION.search(value)
        if version:
            lines.append("driver\t%s" % version.group(1))
    return sorted(set(lines))


def kernel_log(probe: Probe) -> None:
    """Record this boot's kernel log lines on errors: from the journal, or from dmesg if the journal has none."""
    journal = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-iso"]
    kept = probe.run("journal-kernel", journal, keep=KERNEL_NEWS, last=KERNEL_LINES)
    if not kept or kept["rc"] != 0 or not kept["stdout"]:
        probe.run("dmesg", ["dmesg", "--time-format", "iso"], keep=KERNEL_NEWS, last=KERNEL_LINES)


def earlier_xids(probe: Probe) -> None:
    """Record Xids and SXids of this boot and of earlier ones, up to LOOK_BACK; a boot begins with its version."""
    journal = ["journalctl", "_TRANSPORT=kernel", "--since=" + LOOK_BACK, "-q", "--no-pager", "-o", "short-iso"]
    probe.run("journal-xids", journal, keep=XID_NEWS, last=KERNEL_LINES)


def link_log(probe: Probe) -> None:
    """Record lines of this boot on links that went up or down: of Mellanox's driver, of systemd-networkd. The kernel's
    first line shows how far the log goes.
    """
    journal = ["journalctl", "-b", "-q", "--no-pager", "-o", "short-iso", "_TRANSPORT=kernel", "+"]
    units = ["_SYSTEMD_UNIT=systemd-networkd.service"]
    kept = probe.run("journal-links", journal + units, keep=LINK_NEWS, last=KERNEL_LINES)
    if not kept or kept["rc"] != 0 or not kept["stdout"]:
        probe.run("dmesg-links", ["dmesg", "--time-format", "iso"], keep=LINK_NEWS, last=KERNEL_LINES)


def bmc(probe: Probe) -> None:
    """Record fans, power supplies and the latest events of the management controller, if the kernel has a device for
    it.
    """
    devices = [path for path in IPMI_DEVICES if os.path.exists(probe.real(path))]
    probe.note_look("ipmi-devices", "look for a BMC", devices, [])
    for key, argv in IPMI_COMMANDS if devices else ():
        reply = probe.run(key, argv, IPMI_S)
        if reply and (reply["rc"] in (126, 127) or reply["timed_out"]):
            break


def nvme_health(probe: Probe) -> None:
    """Record ``nvme smart-log`` of each controller; it reads a log page and needs root."""
    for name in names_like(probe, "/sys/class/nvme/", r"nvme\d+$")[:64]:
        reply = probe.run("nvme-%s" % name, ["nvme", "smart-log", "/dev/" + name, "-o", "json"], NVME_S)
        if reply and reply["rc"] in (126, 127):
            break


def names_like(probe: Probe, folder: str, names: str) -> List[str]:
    """Return the names in a folder that match; none if the folder does not exist."""
    try:
        return [name for name in names_in(probe.real(folder)) if re.match(names, name)]
    except OSError:
        return []  # The row of TREES about this folder has the reason.


def stuck_processes(probe: Probe) -> None:
    """Record processes in state D at both ends of STUCK_S: a line each of number, name and the kernel's function."""
    first = waiting(probe)
    if first:
        time.sleep(STUCK_S if probe.budget_s is None else min(STUCK_S, probe.budget_s / 10))
    second = waiting(probe) if first else {}
    lines = []
    for pid in sorted(set(first) & set(second), key=int):
        if first[pid] != second[pid]:
            continue
        try:
            function = text_of(probe.content("/proc/%s/wchan" % pid)).strip()
        except OSError:
            function = ""
        lines.append("\t".join([pid, second[pid][0], function if function != "0" else ""]))
    problems = [] if names_like(probe, "/proc", r"\d+$") else ["/proc shows no process"]
    probe.note_look("stuck-processes", "read /proc/*/stat twice", lines, problems, STUCK_S if first else 0.0)


def waiting(probe: Probe) -> Dict[str, Tuple[str, str]]:
    """Return processes in state D: number to (name, time of start)."""
    processes = {}
    for pid in names_like(probe, "/proc", r"\d+$"):
        try:
            head, _, tail = text_of(probe.content("/proc/%s/stat" % pid)).rpartition(")")
        except OSError:
            continue  # Ended in the meantime.
        fields = tail.split()
        if len(fields) > 19 and fields[0] == "D":
            processes[pid] = (" ".join(head.partition("(")[2].split()), fields[19])
    return processes


def units(probe: Probe) -> None:
    """Record the states of the GPU stack's units."""
    probe.run("systemctl-units", ["systemctl", "show", "-p", UNIT_PROPERTIES] + list(UNITS))


def dkms(probe: Probe) -> None:
    """Record DKMS's modules: it starts dozens of processes for each, and compares each file with the one installed."""
    probe.run("dkms-status", ["dkms", "status"], probe.passive_left())


def modprobe_settings(probe: Probe) -> None:
    """Record the names of all modprobe configuration files, and the text of those that name nouveau or NVIDIA."""
    requested = re.compile("nouveau|nvidia")
    for folder in MODPROBE_FOLDERS:
        for name in probe.folder(folder) or []:
            if name.endswith(".conf"):
                probe.read(folder + name, requested)


def disk_space(probe: Probe) -> None:
    """Record the free space of the folders of packages and kernels."""
    paths = [path for path in DISK_PATHS if os.path.isdir(probe.real(path))]
    probe.run("df", ["df", "-Pk"] + paths)
    kinds = ["-x", "tmpfs", "-x", "devtmpfs", "-x", "squashfs", "-x", "overlay", "-x", "efivarfs"]
    columns = "--output=fstype,size,avail,itotal,iavail,target"
    others = re.compile(r"^(?!.* /(var/lib/(docker|containerd|kubelet|containers)|run|snap)/)")
    probe.run("df-local", ["df", "-l", "-k"] + kinds + [columns], keep=others)


def device_holders(probe: Probe) -> None:
    """Record processes that hold /dev/nvidia*: one line each, ``pid, user, name, devices``, separated by tabs."""
    started = time.monotonic()
    lines, unseen, late = [], 0, False
    pids = names_like(probe, "/proc", r"\d+$")
    for pid in pids:
        if time.monotonic() > started + HOLDERS_S:
            late = True
            break
        devices = held_devices(probe.real("/proc/%s/fd" % pid))
        if devices is None:
            unseen += 1
        elif devices:
            lines.append("\t".join([pid] + owner(probe, pid) + [" ".join(devices)]))
    problems = [] if pids else ["/proc shows no process"]
    if unseen:
        problems.append("%d of %d processes belong to others and could not be looked into" % (unseen, len(pids)))
    if late:
        problems.append("not all processes were looked at within %g s" % HOLDERS_S)
    probe.note_look("device-holders", "read /proc/*/fd", lines, problems, time.monotonic() - started)


def held_devices(folder: str) -> Optional[List[str]]:
    """Return GPU devices among the open files of a process; None if they are not readable, [] if it has ended."""
    devices = set()
    try:
        for number in os.listdir(folder):
            try:
                target = os.readlink(os.path.join(folder, number))
            except OSError:
                continue  # Closed in the meantime.
            if GPU_DEVICE.match(target):
                devices.add(target)
    except PermissionError:
        return None
    except OSError:
        return []
    return sorted(devices)


def owner(probe: Probe, pid: str) -> List[str]:
    """Return [user, name] of a process, "?" for unknown ones. Tabs and line ends in a name become blanks."""
    user = name = "?"
    try:
        uid = os.stat(probe.real("/proc/%s" % pid)).st_uid
        user = str(uid)
        user = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        pass  # The process has ended, or its number has no name: what is known so far is returned.
    try:
        with open(probe.real("/proc/%s/comm" % pid), "rb") as stream:
            name = " ".join(text_of(stream.read(64)).split()) or "?"
    except OSError:
        pass  # Ended in the meantime.
    return [user, name]


PASSIVE = (
    plain_files,
    pci_functions,
    kernels,
    dkms,
    module_files,
    boot_loader,
    packages,
    library,
    signs,
    storage,
    tools,
    repositories,
    units,
    modprobe_settings,
    variables,
    boot_settings,
    limits,
    cpu_clocks,
    disk_space,
    nvme_health,
    device_nodes,
    device_links,
    container_devices,
    own_name,
    local_mounts,
    remote_mounts,
    needrestart,
    slurm,
    device_holders,
    docker_daemon,
    packet_filter,
    ssh_daemon,
    cdi_specs,
    kernel_log,
    earlier_xids,
    link_log,
    bmc,
    rdma_nodes,
    peer_memory,
    flow_control,
    stuck_processes,
)


def nvidia_tools(probe: Probe) -> None:
    """Record NVIDIA's own tools, if a module is loaded that they can use."""
    modules = probe.files.get("/proc/modules") or ""
    if probe.files.get("/proc/driver/nvidia/version") is None and not re.search(r"(?m)^nvidia ", modules):
        return
    hung = None
    least_s = NVIDIA_LEAST_S
    if probe.may_be_longer:
        probe.deadline += min(TOTAL_PER_GPU_S * gpus_on_bus(probe), TOTAL_MOST_S - TOTAL_S)
    elif probe.budget_s is not None:
        least_s = min(least_s, probe.budget_s / 10)
    for key, argv in NVIDIA_TOOLS:
        reason = "%s did not come back before it" % hung if hung else None
        if reason is None and time.monotonic() + least_s > probe.deadline:
            reason = "the time for the whole probe is used up; each tool before it was slow"
        if reason:
            probe.note_answer(key, answer(argv, 124, "", "not run: " + reason, 0.0, timed_out=True))
            continue
        reply = probe.run(key, argv, probe.nvidia_tool_s)
        if reply and reply["timed_out"]:
            hung = key
    if hung is None:
        usage_again(probe, least_s)
    owners = threading.Thread(target=process_owners, args=(probe,))
    owners.daemon = True
    owners.start()
    owners.join(max(0.0, min(HOLDERS_S, probe.deadline - time.monotonic())))


def usage_again(probe: Probe, least_s: float) -> None:
    """Record utilization and power a second time if GPUs look as if they waited for each other for ever: several are
    in full use, and read no memory."""
    seen = probe.commands.get("nvidia-smi-xml")
    gpus = re.split(r"<gpu id=", seen["stdout"])[1:] if seen else []
    if sum(bool(IN_FULL_USE.search(gpu)) and bool(READS_NO_MEMORY.search(gpu)) for gpu in gpus) < 2:
        return
    if time.monotonic() + USAGE_AGAIN_S + least_s > probe.deadline:
        reason = "not run: the time for the whole probe is too short for a second sample"
        probe.note_answer("nvidia-smi-usage", answer(USAGE, 124, "", reason, 0.0, timed_out=True))
        return
    time.sleep(USAGE_AGAIN_S)
    probe.run("nvidia-smi-usage", USAGE, probe.nvidia_tool_s)


def process_owners(probe: Probe) -> None:
    """Record user and name of the processes in nvidia-smi's output. A user database that hangs costs only the names."""
    seen = probe.commands.get("nvidia-smi-xml")
    pids = sorted(set(re.findall(r"<pid>(\d{1,9})</pid>", seen["stdout"] if seen else "")), key=int)
    if pids:
        probe.note_look("process-owners", "read /proc/PID", ["\t".join([pid] + owner(probe, pid)) for pid in pids], [])


def main() -> None:
    """Print the bundle. On a signal, end the commands too. An argument is the budget in seconds."""
    probe = Probe(budget_s=float(sys.argv[1]) if len(sys.argv) > 1 else None)

    def leave(number: int, _frame: Any) -> None:
        probe.kill_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, leave)
    signal.alarm(int(max(TOTAL_MOST_S, probe.total_s)) + 3)
    text = json.dumps(probe.collect(), sort_keys=True)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    probe.kill_all()
    # A thread that hangs in a read must not delay the probe's exit.
    os._exit(0)


if __name__ == "__main__":
    main()
