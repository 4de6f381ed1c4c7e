"""What of the probe's own lists the facts need.

The probe's script holds them too, since it runs alone on a node; importing it here would compile all its patterns at
every start. A test compares both.
"""

import re

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
MODPROBE_FOLDERS = (
    "/etc/modprobe.d/",
    "/run/modprobe.d/",
    "/usr/local/lib/modprobe.d/",
    "/usr/lib/modprobe.d/",
    "/lib/modprobe.d/",
)
GPU_MODULE = re.compile(r"/nvidia([-_](current|tesla|legacy|open|srv|server|\d+(xx)?))*\.ko(\.(gz|xz|zst))?$")
