"""Mutants of the checks on engines, services, Slurm, DCGM, the host's state, and RoCE's address tables."""

from bundles import Edit, Missing, Mutant, garbled, grace, hgx, hgx_4, not_run, stdout, t4, text, timed_out
from mutants_host import log

from gpunode.checks import Status

WARN = Status.WARN
TOOLKIT = "/etc/nvidia-container-runtime/config.toml"
SLURM = "/etc/slurm/"
TABLE = "/sys/class/infiniband/mlx5_1/ports/1/"
OPEN, CLOSED = "Open Kernel Module for x86_64", "x86_64 Kernel Module"
UNLINKED = stdout("device-links", "/dev/nvidia0\t20\tyes", "/dev/nvidia0\t20\tno")
HALF_READ = [Edit(("commands", "probe-read", "stderr"), None, "/sys/class/infiniband/: not finished within 20 s")]


def ipv4_at(index: int | None) -> list[Edit]:
    """Move the RoCE v2 entry with the IPv4 address of one port; None: remove it."""
    address = "0000:0000:0000:0000:0000:ffff:0a65:0001\n"
    edits = [text(f"{TABLE}gids/3", None, None), text(f"{TABLE}gid_attrs/types/3", None, None)]
    if index is not None:
        edits += [text(f"{TABLE}gids/{index}", None, address)]
        edits += [text(f"{TABLE}gid_attrs/types/{index}", None, "RoCE v2\n")]
    return edits


MUTANTS = [
    Mutant(
        "container.cgroups",
        "no-cgroups was left of a rootless engine",
        t4,
        [text(TOOLKIT, None, "[nvidia-container-cli]\nno-cgroups = true\n")],
    ),
    Mutant(
        "container.cgroups",
        "a reload takes the GPUs",
        t4,
        [text(TOOLKIT, None, '[nvidia-container-runtime]\nmode = "legacy"\n'), UNLINKED],
        becomes=WARN,
    ),
    Mutant(
        "container.cgroups",
        "a reload takes the GPUs, with an older toolkit",
        hgx,
        [stdout("version-nvidia-ctk", "1.18.0", "1.17.8"), UNLINKED],
        becomes=WARN,
    ),
    Mutant(
        "container.devices-kept",
        "systemd does not know the GPUs of a container",
        t4,
        [stdout("container-devices", "\tyes\t", "\tno\t")],
        becomes=WARN,
    ),
    Mutant(
        "container.devices-kept",
        "a reload took them",
        t4,
        [stdout("container-devices", "\tyes\t3600000000\t30000000", "\tno\t3600000000\t7200000000")],
    ),
    Mutant(
        "container.containerd",
        "the runtime is not there",
        grace,
        [text("/etc/containerd/config.toml", "runtimes.nvidia", "runtimes.runc")],
    ),
    Mutant(
        "container.cdi",
        "the number of a device has changed",
        t4,
        [stdout("cdi-specs", "node\t/dev/nvidia0\t195", "node\t/dev/nvidia0\t510")],
    ),
    Mutant(
        "container.cdi",
        "there is none, and Docker needs it",
        t4,
        [stdout("cdi-specs", None, ""), stdout("docker-info", "28.5.1", "29.1.3")],
        skips=("container.cdi-single",),
    ),
    Mutant(
        "container.runtime",
        "Docker is a snap",
        t4,
        [
            stdout("docker-info", 'runtime="nvidia"\n', ""),
            Edit(("commands", "version-docker", "rc"), None, 127),
            text("/var/snap/docker/current/config/daemon.json", None, '{"log-level": "error"}\n'),
        ],
    ),
    Mutant(
        "host.kernel-faults",
        "a lockup",
        hgx,
        log("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python:4242]"),
    ),
    Mutant("host.kernel-faults", "an Oops", t4, log("Oops: 0000 [#1] PREEMPT SMP NOPTI")),
    Mutant(
        "host.kernel-faults",
        "a file system failed",
        t4,
        log("EXT4-fs (sda1): Remounting filesystem read-only"),
    ),
    Mutant(
        "host.kernel-faults",
        "a blocked task",
        t4,
        log("INFO: task python:4242 blocked for more than 120 seconds."),
        becomes=WARN,
    ),
    Mutant(
        "host.kernel-faults",
        "another module than the driver was rejected",
        t4,
        log("Loading of module with unavailable key is rejected"),
        becomes=WARN,
    ),
    Mutant("host.read-only", "the root", t4, [stdout("local-mounts", "ext4\trw", "ext4\tro")]),
    Mutant(
        "host.nfs-soft",
        "the home directories",
        t4,
        [stdout("remote-mounts", ",hard,", ",soft,")],
        becomes=WARN,
    ),
    Mutant(
        "host.nfs-soft",
        "the home directories, with another error",
        t4,
        [stdout("remote-mounts", ",hard,", ",softerr,")],
        becomes=WARN,
    ),
    Mutant(
        "host.name",
        "its own name is a loopback address",
        hgx,
        [stdout("own-name", "address\t10.0.0.7", "address\t127.0.1.1")],
        becomes=WARN,
    ),
    Mutant(
        "host.needrestart",
        "slurmd is restarted under jobs",
        hgx,
        [stdout("needrestart", "spared\t^slurmd\n", "")],
        becomes=WARN,
    ),
    Mutant(
        "node.units-restarting",
        "57 times",
        t4,
        [stdout("systemctl-units", "NRestarts=0", "NRestarts=57")],
        becomes=WARN,
    ),
    Mutant("node.cloud-init", "it runs", t4, [stdout("signs", "/run/cloud-init/result.json\n", "")], becomes=WARN),
    Mutant("rdma.gids", "one port lost its address", hgx_4, ipv4_at(None)),
    Mutant("rdma.gids", "one port has it elsewhere", hgx_4, ipv4_at(5), becomes=WARN),
    Mutant(
        "rdma.gpudirect",
        "nvidia-peermem is loaded and not registered",
        hgx,
        [
            text("/proc/driver/nvidia/version", OPEN, CLOSED),
            text("/proc/modules", "nvidia ", "nvidia_peermem 16384 0 - Live 0x0 (POE)\nnvidia "),
        ],
        becomes=WARN,
    ),
    Mutant("slurm.gres", "four of eight", hgx, [text(SLURM + "slurm.conf", "gpu:h100:8", "gpu:h100:4")]),
    Mutant("slurm.gres", "four device files", hgx, [text(SLURM + "gres.conf", "[0-7]", "[0-3]")]),
    Mutant("slurm.gres", "jobs see all GPUs", hgx, [text(SLURM + "cgroup.conf", None, None)], becomes=WARN),
    Mutant(
        "slurm.devices",
        "slurmd was first",
        hgx,
        [stdout("device-links", "/dev/nvidia0\t20", "/dev/nvidia0\t90")],
        becomes=WARN,
    ),
    Mutant("slurm.version", "slurmd is newer", hgx, [stdout("version-slurmd", "22.05.8", "23.11.4")]),
    Mutant("slurm.version", "slurmd is too old", hgx, [stdout("slurm-controller", "22.05.8", "24.05.2")]),
    Mutant("dcgm.versions", "another dcgmi", hgx, [stdout("version-dcgmi", "4.4.1", "4.7.0")]),
    Mutant(
        "dcgm.versions",
        "the old engine still runs",
        hgx,
        [stdout("dcgmi-versions", "info:\nVersion : 4.4.1", "info:\nVersion : 4.3.0")],
    ),
    Mutant(
        "dcgm.versions",
        "the plugins of another CUDA",
        hgx,
        [stdout("dpkg-packages", "manager-4-cuda13", "manager-4-cuda12")],
    ),
]

MISSING: Missing = {
    "container.cgroups": [(t4, timed_out("docker-info")), (t4, [text(TOOLKIT, None, "not = [toml\n")])],
    "container.devices-kept": [(t4, [not_run("container-devices")]), (t4, garbled("container-devices"))],
    "container.containerd": [(grace, timed_out("systemctl-units"))],
    "host.kernel-faults": [(t4, [not_run("journal-kernel")])],
    "host.read-only": [(t4, garbled("local-mounts")), (t4, [stdout("local-mounts", None, "")])],
    "host.nfs-soft": [(t4, garbled("remote-mounts")), (t4, [not_run("remote-mounts")])],
    "host.name": [(hgx, garbled("own-name")), (hgx, [not_run("own-name")])],
    "host.needrestart": [(hgx, garbled("needrestart")), (hgx, [Edit(("commands", "needrestart", "rc"), None, 1)])],
    "node.units-restarting": [(t4, timed_out("systemctl-units"))],
    "node.cloud-init": [(t4, [not_run("signs")])],
    "rdma.gids": [(hgx_4, HALF_READ)],
    "slurm.gres": [(hgx, [text(SLURM + "slurm.conf", None, "")]), (hgx, [not_run("slurm")])],
    "slurm.version": [(hgx, garbled("slurm-controller")), (hgx, timed_out("slurm-controller"))],
    "slurm.devices": [(hgx, [stdout("device-links", None, "")]), (hgx, garbled("device-links"))],
    "dcgm.versions": [
        (hgx, garbled("dcgmi-versions", "Hostengine build info:\nnone\n")),
        (hgx, [not_run("dpkg-packages")]),
    ],
}
