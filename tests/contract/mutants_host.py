"""Mutants of the checks on the host."""

from bundles import Edit, Missing, Mutant, garbled, hgx, not_run, pcie_4, stdout, t4, text, timed_out, with_two_gpus
from machines import PCI
from mutants_gpu import LOG

from gpunode.checks import Status

WARN, NOTE = Status.WARN, Status.NOTE


def log(line: str) -> list[Edit]:
    """The kernel's log has this line beside that of the boot."""
    return [stdout("journal-kernel", None, LOG.format(line=line))]


MUTANTS = [
    Mutant("host.time", "not synchronised", t4, [stdout("timedatectl", "NTPSynchronized=yes", "NTPSynchronized=no")]),
    Mutant("host.tools", "one was removed", t4, [stdout("tools", "/usr/bin/fio", "")], becomes=WARN),
    Mutant(
        "host.scratch",
        "not mounted",
        t4,
        [stdout("storage", "\txfs\trw,noatime\tyes\t3661824\t3400000", "\t\t\t\t5000\t400")],
    ),
    Mutant("host.scratch", "another disk", t4, [stdout("storage", "\tyes\t", "\tno\t")]),
    Mutant("host.scratch", "read-only", t4, [stdout("storage", "rw,noatime", "ro,noatime")]),
    Mutant("host.scratch", "no room", t4, [stdout("storage", "3400000", "34000")], becomes=WARN),
    Mutant("host.scratch", "an option is lost", t4, [stdout("storage", "rw,noatime", "rw,relatime")], becomes=WARN),
    Mutant(
        "host.remote-data",
        "the server is down",
        t4,
        [stdout("storage", "nfs4\trw,relatime\t\t102400\t51200\t", "\t\t\t\t\tno answer within 8 s")],
    ),
    Mutant("host.time", "a second off", t4, [stdout("chronyc-tracking", "-0.000012", "-1.250000")], becomes=WARN),
    Mutant("host.disk-space", "full", t4, [stdout("df-local", "180837624", "2642120")]),
    Mutant("host.disk-space", "no inodes left", t4, [stdout("df-local", "16292685", "1000")]),
    Mutant("host.disk-space", "nearly full", t4, [stdout("df-local", "180837624", "20000000")], becomes=WARN),
    Mutant(
        "host.memory-free",
        "none left",
        t4,
        [text("/proc/meminfo", "MemAvailable:   64000000", "MemAvailable:   640000")],
        becomes=WARN,
    ),
    Mutant(
        "host.cpu-governor",
        "processors save power",
        hgx,
        [stdout("cpu-clocks", "scaling_governor\tperformance", "scaling_governor\tpowersave")],
        becomes=WARN,
    ),
    Mutant(
        "host.limits",
        "little memory may be locked beside RDMA",
        hgx,
        [text("/etc/security/limits.d/90-gpu.conf", "* - memlock unlimited", "* - memlock 65536")],
        becomes=WARN,
    ),
    Mutant(
        "host.limits",
        "few open files",
        t4,
        [text("/etc/security/limits.d/90-gpu.conf", "nofile 1048576", "nofile 4096")],
        becomes=WARN,
    ),
    Mutant(
        "host.environment",
        "CUDA_LAUNCH_BLOCKING was left",
        t4,
        [stdout("variables", "NCCL_DEBUG\tWARN", "CUDA_LAUNCH_BLOCKING\t1")],
        becomes=WARN,
    ),
    Mutant(
        "host.environment",
        "GPUs hidden from everybody",
        t4,
        [stdout("variables", "NCCL_DEBUG\tWARN", "CUDA_VISIBLE_DEVICES\t0,1")],
        becomes=WARN,
    ),
    Mutant(
        "host.environment",
        "a debugging variable of NCCL in its file",
        t4,
        [stdout("variables", "/etc/nccl.conf\t", "/etc/nccl.conf\tNCCL_ALGO\tRing\n/etc/nccl.conf\t")],
        becomes=WARN,
    ),
    Mutant(
        "host.limits",
        "only logins may lock memory",
        t4,
        [stdout("systemctl-defaults", "MEMLOCK=infinity", "MEMLOCK=8388608")],
        becomes=WARN,
    ),
    Mutant(
        "host.kernel-settings",
        "a value that the next boot changes",
        t4,
        [text("/proc/sys/vm/swappiness", None, "60\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.kernel-settings",
        "a value that files set otherwise",
        t4,
        [stdout("boot-settings", "90-gpunode.conf\tvm.swappiness\t10", "90-gpunode.conf\tvm.swappiness\t1")],
        becomes=WARN,
    ),
    Mutant(
        "host.kernel-settings",
        "huge pages were changed by hand",
        t4,
        [stdout("boot-settings", "transparent_hugepage\tmadvise", "transparent_hugepage\tnever")],
        becomes=WARN,
    ),
    Mutant(
        "host.kernel-settings",
        "a word waits for a reboot",
        t4,
        [text("/var/lib/gpunode/kernel_tuning/command-line", None, "boot\nro iommu=pt\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.nccl-conf",
        "an interface that the node does not have",
        t4,
        [stdout("variables", "=eth0", "=eth9")],
    ),
    Mutant(
        "host.nccl-conf",
        "one of two interfaces is gone",
        t4,
        [stdout("variables", "=eth0", "=eth0,eth9")],
        becomes=WARN,
    ),
    Mutant(
        "host.nccl-conf",
        "HCAs that the node does not have",
        hgx,
        [stdout("variables", "NCCL_SOCKET_IFNAME\t=eth0", "NCCL_IB_HCA\t=mlx9_0:1")],
    ),
    Mutant(
        "host.sized-for-gpus",
        "few cores",
        hgx,
        [
            stdout("lscpu", "Core(s) per socket:  56", "Core(s) per socket:  8"),
            stdout("lscpu", "CPU(s):                  224", "CPU(s):                  32"),
        ],
        becomes=NOTE,
    ),
    Mutant(
        "host.sized-for-gpus",
        "a slow network",
        pcie_4,
        [text("/sys/class/net/eth0/speed", None, "10000\n")],
        becomes=NOTE,
    ),
    Mutant("host.sized-for-gpus", "no local disk", t4, [text("/sys/block/", "nvme0n1\n", "")], becomes=NOTE),
    Mutant(
        "host.memory-errors",
        "an uncorrected error",
        t4,
        [text("/sys/devices/system/edac/mc/mc0/ue_count", None, "1\n")],
    ),
    Mutant(
        "host.memory-errors",
        "corrected errors",
        t4,
        [text("/sys/devices/system/edac/mc/mc0/ce_count", None, "12\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.nvme", "a warning of its own", t4, [stdout("nvme-nvme0", '"critical_warning":0', '"critical_warning":4')]
    ),
    Mutant("host.nvme", "not live", t4, [text("/sys/class/nvme/nvme0/state", None, "dead\n")]),
    Mutant(
        "host.nvme", "media errors", t4, [stdout("nvme-nvme0", '"media_errors":0', '"media_errors":3')], becomes=WARN
    ),
    Mutant("host.nvme", "worn out", t4, [stdout("nvme-nvme0", '"percent_used":3', '"percent_used":104')], becomes=WARN),
    Mutant(
        "host.stuck-processes",
        "nvidia-smi hangs in the kernel",
        hgx,
        [stdout("stuck-processes", None, "78\tnvidia-smi\trm_ioctl\n")],
    ),
    Mutant(
        "host.stuck-processes",
        "a process waits for a disk",
        t4,
        [stdout("stuck-processes", None, "77\tdd\tio_schedule\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.pcie-errors",
        "uncorrected",
        hgx,
        log(
            "pcieport 0000:17:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)"
        ),
    ),
    Mutant(
        "host.pcie-errors",
        "corrected",
        hgx,
        log("nvidia 0000:19:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"),
        becomes=WARN,
    ),
    Mutant("host.machine-checks", "one", t4, log("mce: [Hardware Error]: Machine check events logged"), becomes=WARN),
    Mutant(
        "host.killed-processes",
        "one",
        t4,
        log("Out of memory: Killed process 4242 (python) total-vm:1kB, anon-rss:1kB"),
        becomes=WARN,
    ),
    Mutant(
        "host.iommu",
        "addresses are translated",
        hgx,
        [text(f"{PCI}0000:19:00.0/iommu_group/type", None, "DMA-FQ\n")],
        becomes=WARN,
    ),
    Mutant(
        "host.acs",
        "a bridge redirects",
        hgx,
        [stdout("pci-acs", "0000:17:00.0\t001f\t0000", "0000:17:00.0\t001f\t001d")],
        becomes=WARN,
    ),
]

MISSING: Missing = {
    "host.scratch": [(t4, garbled("storage")), (t4, [stdout("storage", "3661824", "")])],
    "host.remote-data": [(t4, garbled("storage")), (t4, [stdout("storage", "102400", "")])],
    "host.tools": [(t4, [stdout("tools", "\t", " ")])],
    "host.time": [(t4, timed_out("timedatectl")), (t4, [stdout("timedatectl", "NTPSynchronized=yes\n", "")])],
    "host.disk-space": [(t4, timed_out("df-local")), (t4, garbled("df-local"))],
    "host.memory-free": [
        (t4, [text("/proc/meminfo", None, None)]),
        (t4, [text("/proc/meminfo", "MemAvailable", "MemElse")]),
    ],
    "host.cpu-governor": [(t4, [not_run("cpu-clocks")]), (t4, garbled("cpu-clocks"))],
    "host.limits": [(hgx, timed_out("systemctl-defaults"))],
    "host.environment": [(t4, [Edit(("commands", "variables", "rc"), None, 1)]), (t4, garbled("variables"))],
    "host.kernel-settings": [
        (t4, [not_run("boot-settings")]),
        (t4, garbled("boot-settings")),
        (t4, [Edit(("commands", "boot-settings", "rc"), None, 1)]),
    ],
    "host.nccl-conf": [(t4, garbled("variables"))],
    "host.sized-for-gpus": [(t4, timed_out("lscpu")), (t4, [text("/sys/block/", None, None)])],
    "host.memory-errors": [(t4, [text("/sys/devices/system/edac/mc/mc0/ue_count", None, None)])],
    "host.nvme": [
        (
            t4,
            [
                Edit(("files", "/sys/class/nvme/"), None, None),
                Edit(("commands", "probe-read", "stderr"), None, "/sys/class/nvme/: Permission denied"),
            ],
        ),
        (t4, garbled("nvme-nvme0")),
        (t4, timed_out("nvme-nvme0")),
    ],
    "host.stuck-processes": [(t4, [not_run("stuck-processes")]), (t4, garbled("stuck-processes"))],
    "host.pcie-errors": [(hgx, timed_out("journal-kernel"))],
    "host.machine-checks": [(t4, [not_run("journal-kernel")])],
    "host.killed-processes": [(t4, [not_run("journal-kernel")])],
    "host.iommu": [
        (hgx, [text(f"{PCI}0000:19:00.0/iommu_group/type", None, None)]),
        (pcie_4, timed_out("systemd-detect-virt")),
    ],
    "host.acs": [(hgx, [Edit(("commands", "pci-acs", "rc"), None, 1)]), (with_two_gpus, [not_run("pci-acs")])],
}
