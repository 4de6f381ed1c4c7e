"""Mutants of the checks on driver, packages and libraries."""

from bundles import (
    GONE,
    KERNEL,
    Edit,
    Missing,
    Mutant,
    driver_node,
    garbled,
    grace,
    hgx,
    not_run,
    stdout,
    t4,
    text,
    timed_out,
    with_two_gpus,
)
from machines import GRACE, PCI, SECURE_BOOT

from gpunode.checks import Expectation, Status

WARN = Status.WARN

NEWER = "6.1.0-57-cloud-amd64"
MODULES = f"/lib/modules/{KERNEL}/"
NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"
FOREIGN = f"libnvidia-nscq-535\t535.247.01-1\tamd64\tinstall ok installed\tlibnvidia-nscq-535\t535.247.01-1\t{NVIDIA}\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.261\n"
NOTHING_LOADED = [
    text("/proc/driver/nvidia/version", None, None),
    text("/proc/modules", None, ""),
    not_run("nvidia-smi-xml"),
]
# Of two L40S, which have neither MIG nor NVLink and remap rows.
ASK_NVIDIA_SMI = (
    "gpu.answers",
    "gpu.clocks",
    "gpu.compute-mode",
    "gpu.count",
    "gpu.ecc-corrected",
    "gpu.ecc-mode",
    "gpu.ecc-uncorrected",
    "gpu.memory-size",
    "gpu.memory-used",
    "gpu.messages",
    "gpu.persistence",
    "gpu.power-draw",
    "gpu.power-limit",
    "gpu.settings-kept",
    "gpu.power-state",
    "gpu.recovery",
    "gpu.stuck",
    "gpu.remapped-rows",
    "gpu.temperature",
    "gpu.throttling",
    "gpu.vbios",
    "link.p2p",
    "link.pcie-replays",
    "link.topology",
)


def second_spec(path: str) -> list[Edit]:
    """Another CDI specification, of this driver, with a device that the first one has."""
    spec = f"file\t{path}\t99\ndriver\t535.261.03\nkind\tnvidia.com/gpu\nname\t0\nfile\t"
    return [stdout("cdi-specs", "file\t", spec)]


def newer_kernel(*, headers: bool, image: bool = True) -> list[Edit]:
    """Another kernel is installed, and nothing was built for it."""
    owner = f"linux-image-{NEWER}: /boot/vmlinuz-{NEWER}\n"
    return [
        text("/lib/modules/", KERNEL, f"{KERNEL}\n{NEWER}"),
        text(f"/lib/modules/{NEWER}/", None, "kernel\nmodules.dep\n" if image else "build\n"),
        text(f"/lib/modules/{NEWER}/build/", None, "Makefile\nscripts\n" if headers else None),
        stdout("dpkg-kernels", f"linux-image-{KERNEL}: /boot", f"{owner}linux-image-{KERNEL}: /boot"),
    ]


CURRENT = f"{MODULES}updates/dkms/nvidia-current.ko"
SECOND = f"{MODULES}kernel/drivers/video/nvidia.ko"
GRUB = "/boot/grub/grub.cfg"


def modinfo(path: str, version: str) -> str:
    """A block of modinfo."""
    kernel = path.split("/")[3]
    return f"filename:       {path}\nversion:        {version}\nlicense:        NVIDIA\nvermagic:       {kernel} SMP\n"


def second_module(path: str, version: str) -> list[Edit]:
    """Another GPU module is on disk."""
    return [
        stdout("find-modules", CURRENT, f"{CURRENT}\n{path}"),
        stdout("modinfo", "filename:", modinfo(path, version) + "filename:"),
        Edit(("commands", "modinfo", "argv"), None, ["modinfo", path, CURRENT]),
    ]


def next_kernel(*others: str) -> list[Edit]:
    """GRUB starts a newer kernel, with a module of the driver; DKMS built ``others`` for the running one alone."""
    path = f"/lib/modules/{NEWER}/updates/dkms/nvidia-current.ko"
    rows = [f"{name}/1.0, {KERNEL}, x86_64: installed\n" for name in others]
    built = f"nvidia-current/535.261.03, {NEWER}, x86_64: installed\n"
    return [
        *newer_kernel(headers=True),
        *second_module(path, "535.261.03"),
        stdout("dkms-status", "nvidia-current/", f"{''.join(rows)}{built}nvidia-current/"),
        text(GRUB, 'set default="0"', 'set default="1>1"'),
        text("/proc/modules", "nvidia_uvm", "mlx5_core 2457600 0 - Live 0x0000000000000000\nnvidia_uvm"),
    ]


MUTANTS = [
    Mutant(
        "node.next-boot",
        "GRUB starts a kernel that is not installed",
        with_two_gpus,
        [text(GRUB, 'set default="0"', 'set default="1>1"')],
    ),
    Mutant(
        "node.next-boot",
        "the build of the new version failed, the older module stays",
        with_two_gpus,
        [stdout("modinfo", "version:        535.261.03", "version:        535.247.01")],
    ),
    Mutant("node.next-boot", "a module of the .run installer", with_two_gpus, second_module(SECOND, "470.57.02")),
    Mutant(
        "node.next-boot",
        "another file of the same version",
        with_two_gpus,
        second_module(SECOND, "535.261.03"),
        becomes=WARN,
    ),
    Mutant(
        "node.next-boot",
        "an older module in the initramfs",
        with_two_gpus,
        [stdout("initramfs", "newer\t\t", f"module\t51000000\tusr{CURRENT}")],
    ),
    Mutant(
        "node.next-boot",
        "an older module in the initramfs of dracut, which may have stripped it",
        with_two_gpus,
        [
            stdout("initramfs", "newer\t\t", f"module\t51000000\tusr{CURRENT}"),
            stdout("initramfs", f"/boot/initrd.img-{KERNEL}", f"/boot/initramfs-{KERNEL}.img"),
        ],
        becomes=WARN,
    ),
    Mutant("node.next-boot", "OFED is not built for the kernel", with_two_gpus, next_kernel("mlnx-ofed-kernel", "zfs")),
    Mutant(
        "node.next-boot",
        "an alias that is off",
        with_two_gpus,
        [text("/etc/modprobe.d/nvidia.conf", "install nvidia modprobe", "alias nvidia off\ninstall nvidia modprobe")],
    ),
    Mutant(
        "node.next-boot",
        "blacklisted, and the persistence daemon loads it",
        with_two_gpus,
        [text("/etc/modprobe.d/nvidia.conf", "install nvidia modprobe", "blacklist nvidia\ninstall nvidia modprobe")],
        becomes=WARN,
    ),
    Mutant(
        "node.next-boot",
        "refused by an argument of the next boot",
        with_two_gpus,
        [text(GRUB, "root=UUID=0d1f ro", "root=UUID=0d1f ro module_blacklist=nouveau,nvidia")],
    ),
    Mutant(
        "driver.hmm",
        "no address range for HMM",
        grace,
        [
            stdout(
                "journal-kernel",
                "(simulated)\n",
                "(simulated)\n2026-11-20T09:00:05+0000 n kernel: nvidia-uvm: uvm_pmm_gpu.c:3176 "
                "devmem_alloc_pagemap[pid:92821] request_free_mem_region() err -34\n",
            )
        ],
    ),
    Mutant(
        "driver.hmm",
        "another error of nvidia-uvm",
        grace,
        [
            stdout(
                "journal-kernel",
                "(simulated)\n",
                "(simulated)\n2026-11-20T09:00:05+0000 n kernel: nvidia-uvm: uvm_hmm.c:1 f[pid:1] g() err -12\n",
            )
        ],
        becomes=WARN,
    ),
    Mutant(
        "driver.gsp",
        "firmware switched off under open modules",
        grace,
        [
            text("/proc/driver/nvidia/params", "EnableGpuFirmware: 18", "EnableGpuFirmware: 0"),
            text(
                f"/proc/driver/nvidia/gpus/{GRACE.slots[0]}/information",
                "GPU Firmware: \t 580.95.05",
                "GPU Firmware: \t N/A",
            ),
        ],
    ),
    Mutant(
        "driver.libraries",
        "a library of the driver is empty",
        with_two_gpus,
        [stdout("library-files", "libcuda.so.535.261.03\t29000000", "libcuda.so.535.261.03\t0")],
    ),
    Mutant(
        "driver.libraries",
        "another library of the driver is empty",
        t4,
        [
            stdout(
                "library-files",
                "/lib/x86_64-linux-gnu/libnvidia-ml",
                "/lib/x86_64-linux-gnu/libnvidia-nvvm.so.4\t/lib/x86_64-linux-gnu/libnvidia-nvvm.so.535.261.03\t0\n"
                "/lib/x86_64-linux-gnu/libnvidia-ml",
            )
        ],
    ),
    Mutant(
        "driver.log",
        "a memory window of nothing",
        t4,
        [
            stdout(
                "journal-kernel",
                "(simulated)\n",
                "(simulated)\n2026-11-20T09:00:05+0000 n kernel: NVRM: This PCI I/O region assigned to your NVIDIA "
                "device is invalid:\n",
            )
        ],
    ),
    Mutant(
        "driver.module-built",
        "newer kernel with headers, nothing built",
        driver_node,
        newer_kernel(headers=True),
    ),
    Mutant(
        "driver.module-built",
        "older kernel with headers, nothing built",
        driver_node,
        [
            text("/lib/modules/", KERNEL, f"6.1.0-44-amd64\n{KERNEL}"),
            text("/lib/modules/6.1.0-44-amd64/", None, "kernel\n"),
            text("/lib/modules/6.1.0-44-amd64/build/", None, "Makefile\n"),
            stdout("dpkg-kernels", "linux-image", "linux-image-x: /boot/vmlinuz-6.1.0-44-amd64\nlinux-image"),
        ],
    ),
    Mutant("driver.module-built", "newest kernel without headers", driver_node, newer_kernel(headers=False)),
    Mutant(
        "driver.module-built",
        "module file gone",
        driver_node,
        [
            stdout("find-modules", None, ""),
            not_run("modinfo"),
        ],
    ),
    Mutant(
        "driver.module-built",
        "module built for another kernel",
        driver_node,
        [stdout("modinfo", f"vermagic:       {KERNEL}", "vermagic:       6.1.0-1-cloud-amd64")],
    ),
    Mutant(
        "driver.module-loaded",
        "module not in memory",
        with_two_gpus,
        NOTHING_LOADED,
        skips=(
            "container.cuda",
            "container.library",
            "driver.library-matches-module",
            "driver.tools-answer",
            "driver.expected",
            "driver.hmm",
            "gpu.device-nodes",
            *ASK_NVIDIA_SMI,
        ),
    ),
    Mutant(
        "driver.library-matches-module",
        "older module in memory",
        with_two_gpus,
        [text("/proc/driver/nvidia/version", "535.261.03", "535.247.01")],
        skips=("container.library",),
    ),
    Mutant(
        "driver.library-matches-module",
        "upgraded without a reboot, as nvidia-smi reports",
        with_two_gpus,
        [
            text("/proc/driver/nvidia/version", "535.261.03", "535.247.01"),
            stdout("nvidia-smi-xml", None, MISMATCH),
            Edit(("commands", "nvidia-smi-xml", "rc"), None, 18),
        ],
        skips=("container.library", "driver.tools-answer", *ASK_NVIDIA_SMI),
    ),
    Mutant(
        "driver.closure",
        "one library of another version",
        driver_node,
        [stdout("dpkg-packages", "libcuda1\t535.261.03-1", "libcuda1\t535.247.01-1")],
    ),
    Mutant(
        "driver.closure",
        "one package half configured",
        driver_node,
        [
            stdout(
                "dpkg-packages",
                "nvidia-kernel-dkms\t535.261.03-1\tamd64\thold ok installed",
                "nvidia-kernel-dkms\t535.261.03-1\tamd64\thold ok half-configured",
            )
        ],
    ),
    Mutant(
        "driver.held",
        "one hold removed",
        driver_node,
        [
            stdout(
                "dpkg-packages",
                "libnvidia-ml1\t535.261.03-1\tamd64\thold",
                "libnvidia-ml1\t535.261.03-1\tamd64\tinstall",
            )
        ],
    ),
    Mutant(
        "driver.origin",
        "a package of NVIDIA's repository, of another version and not held",
        driver_node,
        [stdout("dpkg-packages", "libnvidia-pkcs11", f"{FOREIGN}libnvidia-pkcs11")],
    ),
    Mutant(
        "driver.origin",
        "a package of nobody known",
        driver_node,
        [
            stdout(
                "dpkg-packages",
                "libnvidia-pkcs11",
                f"{FOREIGN.replace(NVIDIA, 'Me <me@example.org>')}libnvidia-pkcs11",
            )
        ],
    ),
    Mutant(
        "driver.nouveau",
        "nouveau loaded",
        with_two_gpus,
        [text("/proc/modules", "nvidia_uvm", "nouveau 2457600 0 - Live 0x0000000000000000\nnvidia_uvm")],
    ),
    Mutant(
        "driver.nouveau",
        "nouveau not blacklisted",
        driver_node,
        [text("/etc/modprobe.d/nvidia-blacklists-nouveau.conf", "blacklist nouveau", "#blacklist nouveau")],
        becomes=WARN,
    ),
    Mutant(
        "driver.tools-answer",
        "nvidia-smi topo hangs",
        t4,
        timed_out("nvidia-smi-topo"),
    ),
    Mutant(
        "driver.expected",
        "a GPU that this branch drives no longer",
        t4,
        [
            text(f"{PCI}0000:3b:00.0/uevent", "10DE:1EB8", "10DE:102D"),
            stdout("nvidia-smi-xml", "1EB810DE", "102D10DE"),
            stdout("nvidia-smi-xml", "Tesla T4", "Tesla K80"),
            stdout("nvidia-smi-xml", "<total>15360 MiB", "<total>11441 MiB"),
        ],
    ),
    Mutant(
        "driver.signed",
        "secure boot on, module not signed",
        with_two_gpus,
        [
            text(SECURE_BOOT, None, "\x06\x00\x00\x00\x01"),
            stdout("modinfo", "signer:", "unsigned:"),
            stdout("modinfo", "sig_id:", "unsigned_id:"),
        ],
    ),
    Mutant(
        "driver.signed",
        "locked down, module not signed",
        hgx,
        [
            text("/sys/kernel/security/lockdown", None, "none [integrity] confidentiality\n"),
            stdout("modinfo", "sig_id:", "unsigned_id:"),
        ],
    ),
    Mutant(
        "driver.libraries",
        "a second libcuda in the linker's cache",
        with_two_gpus,
        [
            stdout(
                "ldconfig",
                "\tlibcuda.so (libc6",
                "\tlibcuda.so.1 (libc6,x86-64) => /usr/local/lib/libcuda.so.1\n\tlibcuda.so (libc6",
            ),
            stdout(
                "library-files",
                "/lib/x86_64-linux-gnu/libcuda.so.1",
                "/usr/local/lib/libcuda.so.1\t/usr/local/lib/libcuda.so.550.54.14\n/lib/x86_64-linux-gnu/libcuda.so.1",
            ),
        ],
    ),
    Mutant(
        "driver.libraries",
        "an old copy that the linker does not know",
        with_two_gpus,
        [
            stdout(
                "library-files",
                "/lib/x86_64-linux-gnu/libcuda.so.1",
                "/usr/local/lib/libnvidia-ml.so.1\t/usr/local/lib/libnvidia-ml.so.470.57.02\n"
                "/lib/x86_64-linux-gnu/libcuda.so.1",
            ),
        ],
        becomes=WARN,
    ),
    Mutant(
        "library.copies",
        "NCCL in two versions",
        with_two_gpus,
        [
            stdout(
                "library-files",
                "/lib/x86_64-linux-gnu/libcuda.so.1",
                "/usr/lib/x86_64-linux-gnu/libnccl.so\t/usr/lib/x86_64-linux-gnu/libnccl.so.2.27.3\n"
                "/usr/local/lib/libnccl.so.2\t/usr/local/lib/libnccl.so.2.19.4\n/lib/x86_64-linux-gnu/libcuda.so.1",
            ),
        ],
        becomes=WARN,
    ),
    Mutant(
        "node.versions",
        "a package of another version than the site's file has",
        t4,
        [stdout("dpkg-packages", "dkms\t3.0.10-8+deb12u1", "dkms\t3.0.11-1")],
        expect=Expectation(packages={"dkms": "3.0.10-8+deb12u1"}),
    ),
    Mutant(
        "node.versions",
        "a package of the site's file is gone",
        t4,
        [stdout("dpkg-packages", "dkms\t", "dkms-of-others\t")],
        expect=Expectation(kernel="6.1", packages={"dkms": "3.0.10-8+deb12u1"}),
    ),
    Mutant(
        "driver.foreign-installs",
        "left by a .run installer",
        t4,
        [stdout("signs", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi\n/usr/bin/nvidia-uninstall")],
        becomes=WARN,
    ),
    Mutant(
        "driver.foreign-installs",
        "nvidia-docker",
        hgx,
        [stdout("signs", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-docker\n/usr/bin/nvidia-smi")],
        becomes=WARN,
    ),
    Mutant(
        "driver.automatic-updates",
        "upgrades reboot the node",
        with_two_gpus,
        [stdout("apt-config", 'APT::Periodic "";', 'Unattended-Upgrade::Automatic-Reboot "true";\nAPT::Periodic "";')],
        becomes=WARN,
    ),
    Mutant(
        "node.reboot-pending",
        "an upgraded kernel waits",
        with_two_gpus,
        [text("/run/reboot-required.pkgs", None, "linux-image-amd64\n")],
        becomes=WARN,
    ),
    Mutant(
        "node.failed-reverts",
        "a full disk stopped a revert",
        with_two_gpus,
        [
            text(
                "/run/gpunode/revert-accounts.json",
                None,
                '{"change": "accounts", "at": 1.0, "failed": ["/etc/x: full"]}',
            )
        ],
    ),
    Mutant(
        "container.toolkit",
        "one of four packages of another version",
        hgx,
        [stdout("dpkg-packages", "libnvidia-container1\t1.18.0-1", "libnvidia-container1\t1.17.8-1")],
    ),
    Mutant(
        "container.toolkit",
        "one of four packages half installed",
        t4,
        [
            stdout(
                "dpkg-packages",
                "libnvidia-container1\t1.18.0-1\tamd64\tinstall ok installed",
                "libnvidia-container1\t1.18.0-1\tamd64\tinstall ok unpacked",
            )
        ],
    ),
    Mutant(
        "container.runtime",
        "Docker was not restarted after the toolkit",
        t4,
        [stdout("docker-info", 'runtime="nvidia"\n', "")],
    ),
    Mutant(
        "container.cdi",
        "left from another driver",
        hgx,
        [stdout("cdi-specs", "driver\t580.95.05", "driver\t570.86.15")],
    ),
    Mutant(
        "container.cdi",
        "a file that it names is gone",
        t4,
        [stdout("cdi-specs", "name\tall", "missing\t/usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03\nname\tall")],
    ),
    Mutant("container.cdi-single", "another folder has one too", t4, second_spec("/etc/cdi/nvidia.yaml"), becomes=WARN),
    Mutant("container.cdi-single", "one folder has two", t4, second_spec("/var/run/cdi/gpus.yaml")),
    Mutant(
        "node.units-failed",
        "a failed unit",
        driver_node,
        [stdout("systemctl-failed", None, "ssh.service loaded failed failed OpenBSD Secure Shell server\n")],
    ),
]

# Data without which a check cannot judge anything: it must be an error, whatever was good before.
MISSING: Missing = {
    "node.next-boot": [
        (with_two_gpus, timed_out("dkms-status")),
        (with_two_gpus, [Edit(("commands", "initramfs"), None, GONE)]),
        (with_two_gpus, [stdout("initramfs", "newer\t\t", "unknown\t\tlsinitramfs: exit status 1")]),
        (with_two_gpus, timed_out("modinfo")),
    ],
    "driver.hmm": [(grace, [text("/sys/module/", None, None)])],
    "driver.gsp": [(grace, [text("/proc/driver/nvidia/params", None, None)])],
    "driver.module-built": [
        (driver_node, [not_run("uname")]),
        (driver_node, timed_out("modinfo")),
        (driver_node, timed_out("find-modules")),
        (driver_node, [not_run("dpkg-kernels")]),
    ],
    "driver.module-loaded": [
        (with_two_gpus, [Edit(("files", "/proc/driver/nvidia/version"), None, "garbage\n")]),
        (with_two_gpus, [text("/sys/bus/pci/devices/", None, None)]),
    ],
    "driver.library-matches-module": [(with_two_gpus, timed_out("ldconfig"))],
    "driver.closure": [(driver_node, [not_run("dpkg-packages")]), (driver_node, timed_out("dpkg-packages"))],
    "driver.held": [(driver_node, [stdout("dpkg-packages", None, "cut in the mid")])],
    "driver.origin": [(driver_node, [Edit(("commands", "dpkg-packages", "truncated"), None, True)])],
    "driver.nouveau": [
        (driver_node, [Edit(("files", "/proc/modules"), None, "garbage\n")]),
        (driver_node, [not_run("dpkg-packages")]),
    ],
    "driver.tools-answer": [(t4, [not_run("nvidia-smi-xml")]), (t4, garbled("nvidia-smi-xml"))],
    "driver.expected": [(t4, [text("/sys/bus/pci/devices/", None, None)])],
    "node.versions": [(t4, [not_run("dpkg-packages")])],
    "driver.signed": [(t4, [text("/sys/firmware/", None, "")]), (t4, timed_out("modinfo"))],
    "driver.libraries": [(t4, [not_run("library-files")]), (t4, timed_out("ldconfig"))],
    "library.copies": [(hgx, garbled("library-files"))],
    "driver.foreign-installs": [(t4, [not_run("signs")])],
    "driver.automatic-updates": [(t4, timed_out("apt-config")), (t4, garbled("apt-config"))],
    "node.reboot-pending": [(t4, [not_run("signs")])],
    "node.failed-reverts": [(t4, [text("/run/gpunode/revert-firewall.json", None, "{}")])],
    "container.toolkit": [(t4, [not_run("dpkg-packages")])],
    "container.runtime": [(t4, timed_out("docker-info")), (hgx, garbled("docker-info"))],
    "container.cdi": [(t4, [not_run("cdi-specs")]), (hgx, [Edit(("commands", "cdi-specs", "rc"), None, 1)])],
    "container.cdi-single": [(t4, [not_run("cdi-specs")]), (hgx, [Edit(("commands", "cdi-specs", "rc"), None, 1)])],
    "node.units-failed": [(driver_node, timed_out("systemctl-failed"))],
}
