"""Kernel settings of a hardened node, and those of other guides that a GPU node must not have."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

SYSCTL = "/etc/sysctl.d/60-gpunode-accounts.conf"
SETTINGS = {
    "fs.protected_fifos": "1",
    "fs.protected_hardlinks": "1",
    "fs.protected_regular": "2",
    "fs.protected_symlinks": "1",
    "fs.suid_dumpable": "0",
    "kernel.dmesg_restrict": "1",
    "kernel.kptr_restrict": "1",
    "kernel.randomize_va_space": "2",
    "net.ipv4.conf.all.accept_redirects": "0",
    "net.ipv4.conf.all.accept_source_route": "0",
    "net.ipv4.conf.all.send_redirects": "0",
    "net.ipv4.conf.default.accept_redirects": "0",
    "net.ipv4.conf.default.accept_source_route": "0",
    "net.ipv4.conf.default.send_redirects": "0",
    "net.ipv4.icmp_echo_ignore_broadcasts": "1",
    "net.ipv4.icmp_ignore_bogus_error_responses": "1",
    "net.ipv4.tcp_syncookies": "1",
    "net.ipv6.conf.all.accept_redirects": "0",
    "net.ipv6.conf.all.accept_source_route": "0",
    "net.ipv6.conf.default.accept_redirects": "0",
    "net.ipv6.conf.default.accept_source_route": "0",
}
EXCEPTIONS = {
    "net.ipv4.ip_forward=0": "containers and CNI forward packets through the node",
    "net.ipv4.conf.*.rp_filter=1": "with several RDMA interfaces in one network, answers leave by another one",
    "net.ipv4.conf.*.arp_ignore": "multi-rail RoCE sets it by its own routing rules",
    "kernel.unprivileged_userns_clone=0, user.max_user_namespaces=0": "rootless Podman and Enroot need user namespaces",
    "kernel.yama.ptrace_scope=1": "py-spy attaches to running processes, and MPI copies between those of a user (CMA)",
    "kernel.perf_event_paranoid=3": "perf and Nsight sample programs of users",
    "kernel.modules_disabled=1": "the NVIDIA module is loaded, unloaded and built by DKMS while the node runs",
    "kernel.kexec_load_disabled=1": "kdump keeps a second kernel ready",
    "vm.overcommit_memory=2": "CUDA reserves more address space than the node has memory",
    "modprobe: squashfs, vfat, rds": "Enroot mounts squashfs, the EFI partition is vfat",
    "noexec on /tmp and /dev/shm": "compiled kernels are loaded from /tmp, and NCCL shares memory in /dev/shm",
}
"""Settings that are never made, with the reason."""


def owned(requested: Iterable[str]) -> dict[str, str]:
    """Return the settings without those that a user requests with kernel_tuning_sysctl: a name, or a pattern of names.

    Each key has one owner, and the user's is the role kernel_tuning, also with null, which leaves the kernel's value.
    """
    keys = tuple(requested)
    return {name: value for name, value in SETTINGS.items() if not any(fnmatchcase(name, pattern) for pattern in keys)}


def sysctl_path(name: str) -> str:
    """Return the path of a setting below /proc/sys."""
    return f"/proc/sys/{name.replace('.', '/')}"
