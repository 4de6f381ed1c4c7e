# ruff: noqa: E501 - lines are as long as the tools print them
"""What the host of a simulated node prints: its hardware, its settings, its services."""

from collections.abc import Iterator

from machine_driver import NVME_SLOT, device_files
from machine_exposure import has_no_policy
from machine_packages import module_looks, toolkit
from machine_shapes import SECURE_BOOT, Document, Machine, answer, recorded


def rails(machine: Machine) -> list[tuple[int, str]]:
    """RoCE interfaces with their numbers: each has a network of its own, 10.9.NUMBER.0/24."""
    return [*enumerate(machine.interfaces)] if machine.roce else []


def rail_network(number: int) -> str:
    """The network of a rail as /proc/net/route has it."""
    return f"00{number:02X}090A"


def rail_routes(machine: Machine) -> str:
    """Their lines in /proc/net/route."""
    row = "{name}\t{network}\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    return "".join(row.format(name=name, network=rail_network(at)) for at, name in rails(machine))


def rail_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    """Each rail has the strict filter, as RHEL sets it."""
    for _, name in rails(machine):
        yield f"/proc/sys/net/ipv4/conf/{name}/rp_filter", "1\n"
    if machine.roce:
        yield "/proc/sys/net/ipv4/conf/all/rp_filter", "0\n"


def host_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    guest = machine.virtualization != "none"
    # By these the probe sees what to ask: a package manager, df, Docker, a BMC.
    yield "/var/lib/dpkg/status", ""
    yield "/boot/", ""
    yield "/run/docker.pid", "800\n" if machine.docker else None
    yield "/dev/ipmi0", None if guest else ""
    yield "/run/systemd/system/", ""
    yield from boot_files(machine)
    yield "/proc/cmdline", f"BOOT_IMAGE=/boot/vmlinuz-{machine.kernel} root=/dev/sda1 ro\n"
    yield (
        "/proc/meminfo",
        (
            f"MemTotal:       {machine.memory_gib * 1024 * 1024 - 4_000_000} kB\nMemAvailable:   {machine.memory_gib * 1000 * 1000} kB\n"
            "SwapTotal:             0 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n"
        ),
    )
    yield "/proc/uptime", "86400.00 1000000.00\n"
    yield (
        "/proc/net/route",
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "eth0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n" + rail_routes(machine),
    )
    yield from rail_files(machine)
    yield "/proc/self/status", f"Cpus_allowed_list:\t0-{machine.processors - 1}\n"
    yield "/proc/loadavg", "0.52 0.58 0.59 1/1234 4242\n"
    yield "/proc/sys/vm/swappiness", "10\n"
    yield "/var/lib/gpunode/kernel_tuning/command-line", "0c3e6c0e-boot\nro\n"
    yield "/sys/firmware/", "acpi\nefi\n"
    yield "/sys/firmware/efi/efivars/", SECURE_BOOT.rpartition("/")[2] + "\n"
    yield SECURE_BOOT, "\x06\x00\x00\x00\x00"
    yield "/sys/kernel/security/lockdown", "[none] integrity confidentiality\n"
    yield "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"
    every = f"0-{machine.processors - 1}\n"
    for name in ("online", "present", "possible"):
        yield f"/sys/devices/system/cpu/{name}", every
    yield "/sys/devices/system/cpu/smt/control", "notsupported\n" if machine.architecture == "aarch64" else "on\n"
    first = "0\n" if machine.architecture == "aarch64" else "0-1\n"
    yield "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", first
    for name in ("sys_vendor", "product_name", "board_name", "bios_version", "bios_date"):
        yield f"/sys/class/dmi/id/{name}", f"simulated {name}\n"
    for node in range(machine.sockets):
        yield f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       100000000 kB\n"
    yield "/sys/devices/system/edac/mc/", None if guest else "mc0\n"
    if not guest:
        yield "/sys/devices/system/edac/mc/mc0/mc_name", "Simulated IMC\n"
        yield "/sys/devices/system/edac/mc/mc0/ce_count", "0\n"
        yield "/sys/devices/system/edac/mc/mc0/ue_count", "0\n"
    yield from disks(machine)
    yield "/etc/security/limits.conf", "# empty\n"
    yield "/etc/security/limits.d/", "90-gpu.conf\n"
    yield "/etc/security/limits.d/90-gpu.conf", "* - memlock unlimited\n* - nofile 1048576\n"
    yield "/proc/sys/kernel/hostname", f"{machine.name}\n"
    yield "/etc/hosts", f"127.0.0.1\tlocalhost\n10.0.0.7\t{machine.name}.example.org {machine.name}\n"
    yield "/etc/fstab", "UUID=0d1f7a58 / ext4 errors=remount-ro 0 1\n/dev/sda2 /boot/efi vfat umask=0077 0 1\n"
    yield (
        "/proc/self/mountinfo",
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw,errors=remount-ro\n"
        "30 22 8:2 / /boot/efi rw,relatime - vfat /dev/sda2 rw,fmask=0077\n"
        "31 22 0:5 / /mnt/image ro,relatime - squashfs /dev/loop0 ro\n"
        "32 22 0:51 / /home rw,relatime - nfs4 store:/home rw,vers=4.2,hard,proto=tcp,nconnect=8\n",
    )
    yield "/etc/needrestart/needrestart.conf", NEEDRESTART
    yield "/run/cloud-init/status.json", "{}"
    yield "/run/cloud-init/result.json", "{}"
    if machine.slurm:
        numbers = f"[0-{len(machine.gpus) - 1}]"
        yield "/etc/slurm/slurm.conf", f"NodeName={machine.name} CPUs=224 Gres=gpu:h100:{len(machine.gpus)}\n"
        yield "/etc/slurm/gres.conf", f"Name=gpu File=/dev/nvidia{numbers}\n"
        yield "/etc/slurm/cgroup.conf", "ConstrainDevices=yes\n"
    if "kubelet.service" in machine.extra_units:
        yield "/etc/containerd/config.toml", "version = 2\n[plugins.x.containerd.runtimes.nvidia]\n"
    yield "/etc/docker/daemon.json", '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}\n'
    for path in (
        "/etc/nvidia-container-runtime/config.toml",
        *(["/etc/containerd/config.toml"] if "kubelet.service" not in machine.extra_units else []),
        "/etc/containerd/conf.d/99-nvidia.toml",
        "/run/reboot-required.pkgs",
        "/run/gpunode/revert-accounts.json",
        "/run/gpunode/revert-firewall.json",
        "/run/gpunode/revert-ssh_hardening.json",
        "/var/log/nvidia-installer.log",
    ):
        yield path, None
    yield "/sys/class/net/", "".join(f"{name}\n" for name in sorted(["eth0", *machine.interfaces, "lo"]))
    for name, nic in machine.interfaces.items():
        yield f"/sys/class/net/{name}/operstate", "up\n"
        yield f"/sys/class/net/{name}/mtu", "4092\n"
        yield f"/sys/class/net/{name}/device/uevent", f"DRIVER=mlx5_core\nPCI_SLOT_NAME={nic['pci_bus_id']}\n"
        if machine.roce:
            yield f"/sys/class/net/{name}/type", "1\n"
            yield f"/sys/kernel/config/rdma_cm/{nic['name']}/ports/1/default_roce_tos", "106\n"
            yield f"/sys/class/net/{name}/device/infiniband/", f"{nic['name']}\n"
        for side in ("np", "rp") if machine.roce else ():
            for priority in range(8):
                yield f"/sys/class/net/{name}/ecn/roce_{side}/enable/{priority}", f"{int(priority == 3)}\n"
    yield "/sys/class/net/eth0/operstate", "up\n"
    yield "/sys/class/net/eth0/device/uevent", "DRIVER=e1000e\n"


GRUB = """\
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
else
   set default="0"
fi
function load_video {
}
menuentry 'Simulated' --class gnu-linux $menuentry_id_option 'gnulinux-simple-0d1f' {
    linux   /boot/vmlinuz-KERNEL root=UUID=0d1f ro
}
submenu 'Advanced options' $menuentry_id_option 'gnulinux-advanced-0d1f' {
    menuentry 'Simulated, with Linux KERNEL' --class gnu-linux $menuentry_id_option 'gnulinux-KERNEL-advanced-0d1f' {
        linux   /boot/vmlinuz-KERNEL root=UUID=0d1f ro
    }
    menuentry 'Simulated, with Linux 6.1.0-57-cloud-amd64' $menuentry_id_option 'gnulinux-6.1.0-57-cloud-amd64-advanced-0d1f' {
        linux   /boot/vmlinuz-6.1.0-57-cloud-amd64 root=UUID=0d1f ro
    }
}
"""
"""As update-grub writes it; its last entry is that of mutants that install another kernel."""


def boot_files(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield "/boot/grub/grub.cfg", GRUB.replace("KERNEL", machine.kernel)
    yield "/boot/grub/grubenv", "# GRUB Environment Block\nsaved_entry=\n########\n"


def disks(machine: Machine) -> Iterator[tuple[str, str | None]]:
    yield "/sys/block/", "nvme0n1\nsda\n" if machine.nvme else "sda\n"
    yield "/sys/block/sda/device/", ""
    yield "/sys/block/sda/size", "1875385008\n"
    yield "/sys/block/sda/queue/rotational", "0\n"
    yield "/sys/class/nvme/", "nvme0\n" if machine.nvme else None
    if machine.nvme:
        yield "/sys/block/nvme0n1/device/", ""
        yield "/sys/block/nvme0n1/size", "7501476528\n"
        yield "/sys/block/nvme0n1/ro", "0\n"
        yield "/sys/class/nvme/nvme0/model", "Simulated NVMe\n"
        yield "/sys/class/nvme/nvme0/state", "live\n"
        yield "/sys/class/nvme/nvme0/device/uevent", f"DRIVER=nvme\nPCI_SLOT_NAME={NVME_SLOT}\n"


def unit(name: str, active: str = "active", sub: str = "running", load: str = "loaded") -> str:
    """One block of systemctl show."""
    return (
        f"Id={name}\nLoadState={load}\nActiveState={active}\nSubState={sub}\nUnitFileState=enabled\n"
        "StateChangeTimestamp=Fri 2026-11-20 09:00:01 UTC\nNRestarts=0\nActiveEnterTimestampMonotonic=30000000\nLimitNOFILE=524288\nLimitMEMLOCK=infinity\n"
    )


def host_commands(machine: Machine) -> dict[str, Document]:
    running = ["nvidia-persistenced.service", "chrony.service", *machine.extra_units]
    running += ["docker.service"] if machine.docker else []
    running += ["slurmd.service"] if machine.slurm else []
    running += [] if has_no_policy(machine) else ["gpunode-firewall.service"]
    absent = [name for name in ("nvidia-fabricmanager.service", "nvidia-imex.service") if name not in running]
    units = [unit(name) for name in running] + [unit(name, "inactive", "dead", "not-found") for name in absent]
    guest = machine.virtualization != "none"
    cpus = machine.processors
    governor = "" if guest else f"scaling_driver\tintel_pstate\t{cpus}\nscaling_governor\tperformance\t{cpus}\n"
    no = "No such file or directory"
    commands = {
        "uname": answer(f"Linux {machine.kernel} {machine.architecture}\n", argv=("uname", "-srm")),
        "lscpu": answer(lscpu(machine, cpus), argv=("lscpu",)),
        "systemd-detect-virt": answer(f"{machine.virtualization}\n", 0 if guest else 1, argv=("systemd-detect-virt",)),
        "systemctl-units": answer("\n".join(units), argv=("systemctl", "show")),
        "systemctl-failed": answer(argv=("systemctl", "list-units", "--failed")),
        "systemctl-defaults": answer(
            "DefaultLimitMEMLOCK=infinity\nDefaultLimitNOFILE=524288\n", argv=("systemctl", "show")
        ),
        "timedatectl": answer("NTP=yes\nNTPSynchronized=yes\nTimezone=Etc/UTC\n", argv=("timedatectl", "show")),
        "chronyc-tracking": answer(
            "C0A80001,192.168.0.1,3,1700000000.1,-0.000012,0.1,0.1,1.0,0.1,0.1,0.1,0.1,64.1,Normal\n", argv=("chronyc",)
        ),
        "signs": answer(
            "/usr/bin/unattended-upgrade\n/usr/bin/nvidia-smi\n/run/cloud-init/status.json\n/run/cloud-init/result.json\n",
            argv=("(probe)", "look for paths"),
        ),
        "apt-config": answer(
            'Unattended-Upgrade "";\nUnattended-Upgrade::Origins-Pattern:: "origin=Debian,label=Debian";\n'
            'APT::Periodic "";\nAPT::Periodic::Unattended-Upgrade "1";\n',
            argv=("apt-config", "dump"),
        ),
        "variables": answer(
            "/etc/environment\tNCCL_DEBUG\tWARN\n/etc/nccl.conf\tNCCL_SOCKET_IFNAME\t=eth0\n",
            argv=("(probe)", "read settings of the environment"),
        ),
        "boot-settings": answer(
            "/usr/lib/sysctl.d/50-default.conf\tvm.swappiness\t60\n/etc/sysctl.d/90-gpunode.conf\tvm.swappiness\t10\n"
            "/etc/tmpfiles.d/gpunode-kernel-tuning.conf\ttransparent_hugepage\tmadvise\n",
            argv=("(probe)", "read sysctl.d and tmpfiles.d"),
        ),
        "tools": answer("fio\t/usr/bin/fio\npy-spy\t/usr/local/bin/py-spy\n", argv=("(probe)", "look for programs")),
        "storage": answer(
            "/scratch\tUUID=0d1f7a58-2f3a-5c0e-9a2b-6f7e8d9c0b1a\txfs\tscratch\tnoatime\txfs\trw,noatime\tyes\t3661824\t3400000\t\n"
            "/data\tstore:/export\tnfs\tremote\t\tnfs4\trw,relatime\t\t102400\t51200\t\n",
            argv=("(probe)", "look at mounts"),
        ),
        "repository-files": answer(argv=("(probe)", "look for package sources")),
        "cpu-clocks": answer(governor, argv=("(probe)", "read cpufreq")),
        "df-local": answer(DF, argv=("df", "-l", "-k")),
        "journal-kernel": answer(
            f"2026-11-20T09:00:00+0000 {machine.name} kernel: Linux version {machine.kernel} (simulated)\n",
            argv=("journalctl", "-k", "-b"),
        ),
        "journal-xids": answer(EARLIER_BOOTS.format(name=machine.name), argv=("journalctl", "_TRANSPORT=kernel")),
        "journal-links": answer(links(machine), argv=("journalctl", "-b")),
        "ipmi-devices": answer("" if guest else "/dev/ipmi0\n", argv=("(probe)", "look for a BMC")),
        "stuck-processes": answer(argv=("(probe)", "read /proc/*/stat twice")),
        "container-devices": answer(
            f"docker-{'0123456789abcdef' * 4}.scope\tyes\t3600000000\t30000000\n" if machine.docker else "",
            argv=("(probe)", "look at containers' devices"),
        ),
        "cdi-specs": answer(cdi(machine) if machine.docker else "", argv=("(probe)", "read CDI specifications")),
        "library-files": answer(
            "/lib/x86_64-linux-gnu/libcuda.so\t/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03\t29000000\n"
            "/lib/x86_64-linux-gnu/libcuda.so.1\t/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03\t29000000\n"
            "/lib/x86_64-linux-gnu/libnvidia-ml.so.1\t/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.261.03\t1800000\n",
            argv=("(probe)", "look for libraries"),
        ),
        **module_looks(
            f"/lib/modules/{machine.kernel}/updates/dkms/nvidia-current.ko",
            f"nvidia-current/{machine.driver}, {machine.kernel}, {machine.architecture}",
        ),
        "version-docker": answer("Docker version 28.5.1, build e180ab8\n", argv=("docker", "--version")),
        "version-nvidia-ctk": answer("NVIDIA Container Toolkit CLI version 1.18.0\n", argv=("nvidia-ctk", "--version")),
    }
    for tool in ("containerd", "podman", "runc", "crun"):
        commands[f"version-{tool}"] = answer("", 127, f"{tool}: {no}", (tool, "--version"))
    if not guest:
        commands |= bmc()
    if machine.nvme:
        commands["nvme-nvme0"] = answer(
            '{"critical_warning":0,"avail_spare":100,"percent_used":3,"media_errors":0}\n', argv=("nvme", "smart-log")
        )
    if machine.docker:
        commands["docker-info"] = answer(DOCKER_INFO, argv=("docker", "info", "--format"))
        commands["dpkg-packages"] = answer(recorded()["commands"]["dpkg-packages"]["stdout"] + toolkit("amd64"))
    return commands


NEEDRESTART = """\
$nrconf{restart} = 'a';
$nrconf{override_rc} = {
    # qr(^slurm-old) => 0,
    qr(^docker) => 0,
    qr(^emergency\\.service$) => 0,
};
$nrconf{override_rc}{qr(^containerd)} = 0;
$nrconf{override_rc}{qr(^kubelet)} = 0;
$nrconf{override_rc}{qr(^slurmd)} = 0;
$nrconf{override_rc}{qr(^nvidia-)} = 0;
"""
DF = """\
Type     1K-blocks      Avail   Inodes    IFree Mounted on
ext4     264212084  180837624 16777216 16292685 /
vfat        126710     114500        -        - /boot/efi
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


EARLIER_BOOTS = """\
2026-11-18T09:00:00+0000 {name} kernel: Linux version 6 (simulated)
2026-11-19T09:00:00+0000 {name} kernel: Linux version 6 (simulated)
2026-11-20T09:00:00+0000 {name} kernel: Linux version 6 (simulated)
"""


def links(machine: Machine) -> str:
    """The log of links: all came up with the boot."""
    head = f"2026-11-20T09:00:00+0000 {machine.name} kernel: Linux version {machine.kernel} (simulated)\n"
    up = "2026-11-20T09:00:09+0000 {name} kernel: mlx5_core {slot} {interface}: Link up\n"
    slots = ((name, nic["pci_bus_id"]) for name, nic in machine.interfaces.items())
    return head + "".join(up.format(name=machine.name, slot=slot, interface=name) for name, slot in slots)


FANS = """\
FAN1             | 41h | ok  | 29.1 | 5600 RPM
FAN2             | 42h | ok  | 29.2 | 5500 RPM
FAN5             | 45h | ns  | 29.5 | No Reading
"""
SUPPLIES = """\
PS1 Status       | C8h | ok  | 10.1 | Presence detected
PS2 Status       | C9h | ok  | 10.2 | Presence detected
"""
EVENTS = """\
   1 | 11/01/2026 | 06:34:16 | Power Supply #0x3b | Power Supply AC lost | Asserted
   2 | 11/01/2026 | 06:40:16 | Power Supply #0x3b | Power Supply AC lost | Deasserted
   3 | 11/01/2026 | 06:41:16 | System ACPI Power State #0xd5 | S0/G0: working | Asserted
"""


def bmc() -> dict[str, Document]:
    return {
        "ipmi-fans": answer(FANS, argv=("ipmitool", "sdr", "type", "Fan")),
        "ipmi-power-supplies": answer(SUPPLIES, argv=("ipmitool", "sdr", "type", "Power Supply")),
        "ipmi-events": answer(EVENTS, argv=("ipmitool", "sel", "list", "last", "100")),
    }


def lscpu(machine: Machine, cpus: int) -> str:
    threads = cpus // (machine.sockets * machine.cores)
    return (
        f"Architecture:            {machine.architecture}\nCPU(s):                  {cpus}\n"
        f"  Model name:            Simulated\n    Thread(s) per core:  {threads}\n"
        f"    Core(s) per socket:  {machine.cores}\n    Socket(s):           {machine.sockets}\n"
    )


def cdi(machine: Machine) -> str:
    names = "".join(f"name\t{number}\n" for number in range(len(machine.gpus)))
    nodes = "".join(f"node\t{path}\t{major}\t{minor}\n" for path, major, minor, _ in device_files(machine))
    return f"file\t/var/run/cdi/nvidia.yaml\t12345\ncdiVersion\t0.7.0\ndriver\t{machine.driver}\nkind\tnvidia.com/gpu\nname\tall\n{names}{nodes}"
