"""A site with every role: an HGX H100 with apt (a recorded Debian 12) and one with dnf, changed as roles change them.

Versions of NVIDIA's packages and what they depend on are those of the recorded indexes; other packages are invented.
"""

import copy
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from driver_samples import BUNDLE, DAY, HGX, facts_of
from node_samples import ABSENT, APT_STATE, DNF_STATE, file, settings_of

from gpunode.lab.packages.recorded import Offer, offers
from gpunode.onnode import gpu_settings as gpu_settings_program
from gpunode.provisioning import (
    cuda,
    firewall,
    first_boot,
    repository,
    ssh_hardening,
    toolkit,
)
from gpunode.provisioning.context import Context, Planned
from gpunode.provisioning.driver.files import UNATTENDED
from gpunode.provisioning.engines import number
from gpunode.provisioning.keys import KeyRefusedError
from gpunode.provisioning.manifest import Manifest, NodeQuery, compared
from gpunode.provisioning.roles import LOOKS, PLANS, ROLES
from gpunode.provisioning.state import BOOT_ID, NodeState
from gpunode.provisioning.transaction import MARK, Transaction, installed_by_role, lock_lines

SSH = Path(__file__).parents[2] / "fixtures" / "ssh" / "debian-12.json"
RELEASE = "580.95.05"
ORDER = tuple(ROLES)
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlMQ4QIoLa0nhzL10xJLycLZUvclZ1U9Ui9YZwHN8u3 ada"
PEM = "-----BEGIN CERTIFICATE-----\n" + "QUFB" * 30 + "\n-----END CERTIFICATE-----\n"
SETTINGS: dict[str, dict[str, Any]] = {
    "accounts": {"admins": [{"name": "ada", "keys": [KEY], "state": "present"}]},
    "base": {
        "address": "10.9.0.7",
        "ntp_servers": ["ntp.example.com"],
        "dns_servers": ["10.0.0.2"],
        "proxy_http": "http://proxy.example.com:3128",
        "ca_certificates": {"site": PEM},
        "timezone": "Europe/Berlin",
        "locale": "de_DE.UTF-8",
        "journal_max": "4G",
        "syslog_server": "logs.example.com",
        "ldap_uris": ["ldaps://ldap.example.com"],
        "ldap_search_base": "dc=example,dc=com",
    },
    "cuda": {"toolkit": ["12.9"], "nccl": True, "cudnn": True},
    "docker": {"source": "docker", "users": ["ada"], "daemon": {"data-root": "/scratch/docker"}},
    "firewall": {"ssh_networks": ["10.0.0.0/8"], "cluster_networks": ["10.9.0.0/16"]},
    "gpu_monitoring": {"dcgm_exporter": True},
    "gpu_settings": {"rules": [{"gpus": "all", "power_limit": 600, "compute_mode": "exclusive_process"}]},
    "gpu_tools": {"profiling": "everybody", "python": {"py-spy": ""}},
    "kernel_tuning": {"sysctl": {"vm.swappiness": "1"}, "acs": "off"},
    "kubernetes_node": {"installer": "k3s"},
    "nvidia_driver": {"source": "nvidia", "version": RELEASE},
    "slurm_node": {"conf": "NodeName=node Gres=gpu:h100:8\n", "prolog_settings": {"GPUNODE_BUDGET": "5s"}},
    "ssh_hardening": {"admin_users": ["ada"]},
    "storage": {
        "scratch_disks": ["nvme-eui.0025388b71b2c0d1", "nvme-eui.0025388b71b2c0d2"],
        "mounts": [{"path": "/data", "type": "nfs", "source": "store:/export"}],
    },
}
"""What a site sets beside the defaults, and ``ROLE_state: present``."""
SYSCTL = {"vm.swappiness": "60", "kernel.numa_balancing": "1", "vm.max_map_count": "65530", "vm.zone_reclaim_mode": "0"}
KERNELS = {"apt": "6.1.0-42-amd64", "dnf": "5.14.0-570.12.1.el9_6.x86_64"}
ROCKY = {"id": "rocky", "version_id": "9.6", "pretty_name": "Rocky Linux 9.6", "codename": None, "id_like": ["rhel"]}
LISTS: dict[str, Any] = {"lists": True, "headers": [f"linux-headers-{KERNELS['apt']}"]}
FILES = {
    "apt": {"/usr/sbin/update-grub": "", "/etc/default/grub": 'GRUB_CMDLINE_LINUX=""\n', "/usr/bin/setpci": ""},
    "dnf": {
        "/usr/sbin/grubby": "",
        "/usr/bin/setpci": "",
        "/etc/dnf/automatic.conf": "[commands]\nupgrade_type = default\n",
    },
}
TEXTS = {
    "/usr/local/bin/gpunode": "#!",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/etc/resolv.conf": "nameserver 192.0.2.1\n",
    "/etc/fstab": "UUID=aaaa / ext4 errors=remount-ro 0 1\n",
    BOOT_ID: "00000000-0000-0000-0000-000000000001\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
    "/proc/cmdline": "root=/dev/sda1 ro quiet\n",
}
MODULI = "# Time Type Tests Tries Size Generator Modulus\n" + "".join(
    f"20230101000000 2 6 100 {bits} 2 C0FFEE\n" for bits in (2047, 3071, 4095)
)
FREE: dict[str, Any] = {"mounts": [], "users": [], "kind": "absent", "mode": None, "entries": None}
GPU: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "pci_device_id": "10de:2330",
    "power_limit_w": 700.0,
    "power_default_limit_w": 700.0,
    "power_min_limit_w": 200.0,
    "power_max_limit_w": 700.0,
    "compute_mode": "Default",
    "processes": [],
}
VERSIONS = dict.fromkeys(("docker-ce", "docker-ce-cli"), "5:28.3.3-1") | {
    "containerd.io": "1.7.27-1",
    "datacenter-gpu-manager-exporter": "4.8.3-1",
}
UNITS = {
    "nvidia-persistenced": ("nvidia-persistenced.service",),
    "nvidia-fabricmanager": ("nvidia-fabricmanager.service",),
    "nvidia-imex": ("nvidia-imex.service",),
    "datacenter-gpu-manager-4-core": ("nvidia-dcgm.service",),
    "docker-ce": ("docker.service", "docker.socket"),
    "containerd.io": ("containerd.service",),
    "nvidia-container-toolkit-base": ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service"),
    "nftables": ("nftables.service",),
    "prometheus-node-exporter": ("prometheus-node-exporter.service",),
    "datacenter-gpu-manager-exporter": ("nvidia-dcgm-exporter.service",),
    "dnf-automatic": ("dnf-automatic.timer",),
    "chrony": ("chrony.service", "chronyd.service"),
    "rsyslog": ("rsyslog.service",),
    "sssd-ldap": ("sssd.service",),
    "munge": ("munge.service", "slurmd.service"),
}
"""Units of packages. They are enabled with apt, and disabled with dnf."""


@cache
def recorded(manager: str) -> dict[str, Offer]:
    """The newest recorded version of each package of NVIDIA's repository."""
    packages = {offer.name: offer for offer in offers("debian12" if manager == "apt" else "rhel9", [RELEASE])}
    assert len(packages) > 30
    return packages


def with_dependencies(manager: str, names: Iterable[str]) -> list[str]:
    """The packages, and those of NVIDIA's repository that they depend on."""
    packages = dict.fromkeys(names)
    queue = [*packages]
    while queue:
        offer = recorded(manager).get(queue.pop())
        more = [text.split()[0] for text in offer.relations["depends"]] if offer is not None else []
        queue += [name for name in more if name in recorded(manager) and name not in packages]
        packages |= dict.fromkeys(name for name in more if name in recorded(manager))
    return [*packages]


def version_of(manager: str, name: str, pattern: str = "*") -> str:
    """A version of a package that matches the pattern."""
    offer = recorded(manager).get(name)
    version = offer.version if offer is not None else VERSIONS.get(name, "1.0-1")
    if not fnmatchcase(version, pattern):
        version = pattern.replace("*", "1")
    return version if "-" in version else f"{version}-1"


def fake_key(data: bytes, source: str, fingerprints: Any = (), sha256: str = "") -> str:
    """In place of ``keys.trusted_key``: the fingerprints that a role pins, as the key."""
    text = f"(the key {', '.join(fingerprints) or sha256} and no other, as armored text)\n"
    if data not in {b"fetched", text.encode()}:
        raise KeyRefusedError(f"{source} contains no OpenPGP key")
    return text


@dataclass
class Machine:
    """One node with the roles' changes so far."""

    manager: str
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kernel = {"release": KERNELS[self.manager], "package": "linux-image", "running": True, "newest": True}
        facts = {
            **facts_of(BUNDLE),
            "simulated": False,
            "virtualization": "none",
            "secure_boot": False,
            "pci": HGX,
            "kernels": [{**kernel, "headers": False, "image": True}],
            "packages": [],
            "modules": [],
            "module_files": [],
            "dkms": [],
            "driver_library_version": None,
            "units": [],
            "packet_filter": {"tables": [], "refusing": [], "ipv4_refused": False, "ipv6_refused": False, "own": None},
            "sysctl": dict(SYSCTL),
            "limits": {"defaults": {"memlock": "8388608", "nofile": "524288"}, "settings": []},
            "transparent_hugepages": "always",
            "cpu_frequency": {"driver": "intel_pstate", "governors": {"powersave": 8}, "preferences": {}},
            "iommu": {"units": ["dmar0"], "group_types": {1: "DMA-FQ"}},
            "command_line": "ro quiet",
            "pci_acs": [],
            "peer_memory": None,
            "nics": [],
            "numa": [],
            "own_name": {"name": "node", "addresses": []},
            "driver_gpus": [],
            "slurm": None,
        }
        if self.manager == "dnf":
            facts["os"] = {**facts["os"], **ROCKY}
        texts = {**TEXTS, **FILES[self.manager]}
        looked = {path for look in LOOKS.values() for path in (*look.paths, *look.contents)}
        read = {path for look in LOOKS.values() for path in look.contents}
        image = "initrd.img-{}" if self.manager == "apt" else "initramfs-{}.img"
        self.document = {
            "facts": facts,
            "apt": {**APT_STATE, "installed": {"initramfs-tools": "0.142"}, **LISTS} if self.manager == "apt" else None,
            "dnf": {**DNF_STATE, "installed": {"dracut": "057-1"}} if self.manager == "dnf" else None,
            "files": {
                **dict.fromkeys(sorted(looked), ABSENT),
                **{path: file(text) for path, text in texts.items()},
                f"/boot/{image.format(KERNELS[self.manager])}": file(""),
            },
            "contents": {**dict.fromkeys(sorted(read)), **{path: text for path, text in texts.items() if path in read}},
            "engine": {"group": []},
            "ssh": json.loads(SSH.read_text(encoding="utf-8")),
            "connection": {"client": "10.1.2.3", "port": 22},
        }
        self.disks: dict[str, Any] | None = None
        self.absent = ""  # the role that is removed
        self.folders: dict[str, Any] = {}
        self.locks: dict[str, tuple[str, ...]] = {}
        self.planned: Planned | None = None
        self.coming: dict[str, dict[str, str | None]] = {}

    # --- plans

    def plan(self, role: str, *, check: bool = False, texts: Any = None) -> Manifest:
        """The manifest of a role, with the node's answers to its questions."""
        state = NodeState.model_validate(self.document).with_files(texts or {})
        answers: dict[str, Any] = {}
        for _ in range(5):
            run = Context(
                host="node",
                settings_of=lambda name: {**settings(name), **({"state": "absent"} if name == self.absent else {})},
                today=date.fromisoformat(DAY),
                check=check,
                answers=answers,
                planned=self.planned or Planned(),
            )
            with patch.object(repository, "trusted_key", fake_key):
                manifest = PLANS[role](state, run.settings_of(role), run)
            unanswered = {name: question for name, question in manifest.questions.items() if name not in answers}
            if not unanswered or manifest.refusals:
                return manifest
            answers |= {name: self.answer(question) for name, question in unanswered.items()}
        raise AssertionError(f"{role}: too many questions")

    def pending(self, manifest: Manifest) -> tuple[str, ...]:
        """Why a manifest is refused, or something is pending."""
        return (*manifest.refusals, *compared(manifest, NodeState.model_validate(self.document)).pending_reasons)

    def preview(self, role: str) -> Manifest:
        """The manifest of a role in check mode, on the node as it is, after those of the roles before it."""
        self.planned = self.planned if self.planned is not None else Planned()
        others = {path: text for name, texts in self.coming.items() if name != role for path, text in texts.items()}
        manifest = self.plan(role, check=True, texts=others)
        after = copy.deepcopy(self)
        if manifest.packages is not None:
            after._packages(manifest.packages)
        new = {name: version for name, version in after._installed.items() if self._installed.get(name) != version}
        gone = self._installed.keys() - after._installed.keys()
        self.planned = Planned(
            files={**self.planned.files, **manifest.source_files},
            packages={**self.planned.packages, **new},
            purge=(*self.planned.purge, *sorted(gone)),
            users=(*self.planned.users, *result_of(manifest).get("create", ())),
        )
        self.coming[role] = {file.path: file.content for file in manifest.files if file.encoding == "utf-8"}
        return manifest

    def answer(self, question: NodeQuery) -> dict[str, Any]:
        """What this node answers, from the recorded indexes where it is about NVIDIA's packages."""
        body = question.body
        match question.kind:
            case "package_transaction":
                return self._preview(body)
            case "package_offers":
                names = [name for name in body["names"] if "*" not in name]
                return {"offered": {name: [version_of(self.manager, name)] for name in names}}
            case "signing_key":
                return {"key": "ZmV0Y2hlZA=="}
            case "nft_check":
                return {"error": None}
            case "contents":
                known = {ssh_hardening.MODULI: MODULI, ssh_hardening.MODULI_BEFORE: MODULI}
                known["/proc/filesystems"] = "nodev\toverlay\n"
                known |= {
                    f"/proc/sys/{name.replace('.', '/')}": text
                    for name, text in self.document["facts"]["sysctl"].items()
                }
                return {
                    path: known.get(path, "0\n" if path.startswith("/proc/sys/") else None) for path in body["paths"]
                }
            case "ssh_login":
                return self._login(body)
            case "block_devices":
                return self._disks(body)
        raise AssertionError(question.kind)

    def _preview(self, body: Mapping[str, Any]) -> dict[str, Any]:
        target = body["constraint"] if "*" not in body["constraint"] else RELEASE
        names = [entry.partition("=")[0] for entry in (*body["bound"], *body.get("install", ()))]
        optional = [entry.partition("=")[0] for entry in body.get("optional", ())]
        names += [name for name in optional if name in {*recorded(self.manager), *LISTS["headers"]}]
        versions = {name: version_of(self.manager, name) for name in with_dependencies(self.manager, names)}
        new = {name: version for name, version in sorted(versions.items()) if self._installed.get(name) != version}
        return {
            "target": target,
            "exact": [f"{name}={version}" for name, version in new.items()],
            "install": new,
            "sources": dict(zip(new, new, strict=True)),
            "remove": [],
            "stream": body.get("stream"),
        }

    def _login(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded daemon with the settings of the files."""
        requested: dict[str, str] = {}
        for row in body["files"]:
            for line in (row.get("content") or "").splitlines():
                name, _, value = line.partition(" ")
                if name and not name.startswith("#"):
                    requested.setdefault(name.lower(), value)
        lines = str(self.document["ssh"]["effective"]).splitlines()
        kept = [line for line in lines if line.partition(" ")[0] not in requested]
        text = "\n".join([*kept, *(f"{name} {value}" for name, value in requested.items())])
        return {"effective": text, "logins": {login["user"]: text for login in body["logins"]}}

    def _disks(self, body: Mapping[str, Any]) -> dict[str, Any]:
        mounted: dict[str, Any] = {"kind": "folder", "mode": "1777", "entries": None, "users": []}
        sources = {"/scratch": ("/dev/md127", "xfs"), "/data": ("systemd-1", "autofs")}
        kinds = {path: {"source": source, "fstype": kind} for path, (source, kind) in sources.items()}
        has_disks = self.disks is not None
        paths = {path: self.folders.get(path, FREE) for path in body["paths"]}
        if has_disks:
            paths |= {path: {**mounted, "mounts": [row]} for path, row in kinds.items() if path in paths}
        trim = ("enabled", "active") if has_disks else ("disabled", "inactive")
        return {
            "disks": {},
            "paths": paths,
            "target": "/dev/md127" if has_disks else None,
            "filesystem": has_disks,
            "refusals": [],
            "trim": dict(zip(("enabled", "active"), trim, strict=True)),
            "autofs": True,
        }

    # --- changes

    @property
    def _installed(self) -> dict[str, str]:
        installed: dict[str, str] = self.document[self.manager]["installed"]
        return installed

    def apply(self, manifest: Manifest) -> None:
        """Do what the tasks of the role do with a manifest."""
        self._files(manifest, "first")
        self._files(manifest, "before")
        if manifest.packages is not None:
            self._packages(manifest.packages)
        self._files(manifest, "guarded")
        self._files(manifest, "after")
        self._special(manifest)
        self._files(manifest, "last")
        for mark in (unit.mark for unit in manifest.units if unit.mark in self.document["contents"]):
            self._write(str(mark), None)
        for unit in manifest.units:
            row = next((row for row in self.document["facts"]["units"] if row["name"] == unit.name), None)
            if row is None:
                continue
            if unit.enabled is not None:
                row["enabled"] = "enabled" if unit.enabled else "disabled"
            if unit.state is not None:
                row["active"] = "inactive" if unit.state == "stopped" else "active"

    def _files(self, manifest: Manifest, phase: str) -> None:
        for managed in manifest.files:
            if managed.phase == phase:
                self._file(managed.model_dump())
        for folder in manifest.folders:
            if folder.phase != phase:
                continue
            if folder.state == "present":
                self.document["files"][folder.path] = {"kind": "folder", "mode": folder.mode, "entries": 1}
            elif not any(path.startswith(f"{folder.path}/") for path in self.present):
                self.document["files"][folder.path] = ABSENT

    def _file(self, row: Mapping[str, Any]) -> None:
        path, content = row["path"], row["content"]
        new = (
            ABSENT
            if content is None
            else {**file(content, mode=row["mode"]), "owner": row["owner"], "group": row["group"]}
        )
        if new != ABSENT and row.get("encoding") == "base64":
            raise AssertionError(f"{path}: decode it")
        self.document["files"][path] = new
        if path == UNATTENDED and self.manager == "apt":
            self.document["apt"]["own_holds"] = re.findall(r'"\^(.+)\$";', content or "")
        if path in self.document["contents"]:
            self.document["contents"][path] = content
        folder, _, name = path.rpartition("/")
        if folder == "/etc/systemd/system":
            units = self.document["facts"]["units"]
            units[:] = [row for row in units if row["name"] != name]
            if content is not None:
                units.append({"name": name, "load": "loaded", "active": "inactive", "sub": "x", "enabled": "disabled"})

    def _packages(self, change: Transaction) -> None:
        before = dict(self._installed)
        state = NodeState.model_validate(self.document)
        added = installed_by_role(state, change.memory) if change.memory else set()
        installed = self._installed
        entries = change.install
        if change.manager == "dnf":
            entries = (*entries, *(f"{name}=*{change.constraint}*" for name in change.bound))
        for name in [*installed]:
            if _fits(name, change.remove) or (name in added and _fits(name, change.remove_new)):
                del installed[name]
        patterns = dict(entry.partition("=")[::2] for entry in entries)
        for entry in with_dependencies(self.manager, patterns):
            pattern = patterns.get(entry, "")
            name = "kernel-devel" if entry.startswith("kernel-devel-") else entry
            if name not in installed or not fnmatchcase(installed[name], pattern or "*"):
                installed[name] = version_of(self.manager, name, pattern or "*")
        self._record(change, added | (installed.keys() - before.keys()))
        self._arrivals()
        part = self.document[self.manager]
        if change.manager == "apt":
            held = {*part["held"], *(name for name in installed if _fits(name, change.hold))} - {*change.unhold}
            if change.state == "absent":
                held = {*part["held"]} - {*change.unhold}
            part["held"] = sorted(held & installed.keys())
        else:
            if change.stream:
                module, _, stream = change.stream.partition(":")
                part.setdefault("streams", {})[module] = stream
            if change.reset:
                part.setdefault("streams", {}).pop(change.reset, None)
            if change.hold or change.state == "absent":
                lines = lock_lines(installed, change.hold) if change.state == "present" else ()
                self.locks[change.lock_mark] = lines
                driver_locks = self.locks.get("gpunode (role nvidia_driver)", ())
                part["own_locks"] = list(driver_locks)
                part["locks"] = [line for mark, rows in self.locks.items() for line in rows if line not in driver_locks]

    def _record(self, change: Transaction, added: set[str]) -> None:
        if change.memory and change.state == "present" and (change.memory in self.document["contents"]):
            text = MARK + "\n" + "".join(f"{name}\n" for name in sorted(added & self._installed.keys()))
            self._write(change.memory, text)

    def _arrivals(self) -> None:
        """What the packages that came or went bring with them."""
        facts = self.document["facts"]
        facts["packages"] = [
            {"name": name, "version": version, "architecture": "amd64", "source": name, "installed": True}
            | {
                "maintainer": "NVIDIA CORPORATION <cudatools@nvidia.com>"
                if name in recorded(self.manager)
                else "the distribution"
            }
            | {"state": "ok", "held": False}
            for name, version in sorted(self._installed.items())
        ]
        rows = {row["name"]: row for row in facts["units"]}
        for package, names in UNITS.items():
            for name in names:
                if package in self._installed and name not in rows:
                    on = "enabled" if self.manager == "apt" else "disabled"
                    active = "active" if self.manager == "apt" and name != "nftables.service" else "inactive"
                    facts["units"].append({"name": name, "load": "loaded", "active": active, "sub": "x", "enabled": on})
                elif package not in self._installed and name in rows:
                    facts["units"].remove(rows[name])
        module = next(
            (name for name in self._installed if re.fullmatch(r"(kmod-nvidia|nvidia-kernel)-open-dkms", name)), None
        )
        kernel = KERNELS[self.manager]
        built = {
            "kernel": kernel,
            "path": "x",
            "version": RELEASE,
            "flavour": "open",
            "vermagic": kernel,
            "signed": False,
        }
        dkms = {"name": "nvidia", "version": RELEASE, "kernel": kernel, "architecture": "x86_64", "state": "installed"}
        facts["module_files"], facts["dkms"] = ([built], [dkms]) if module else ([], [])
        facts["driver_library_version"] = RELEASE if module else None
        for row in facts["kernels"]:
            row["headers"] = not self._installed.keys().isdisjoint({"kernel-devel", f"linux-headers-{kernel}"})

    def _special(self, manifest: Manifest) -> None:
        """Do what a role's own tasks do."""
        facts, values = self.document["facts"], result_of(manifest)
        if manifest.kernel_memory and manifest.kernel_memory in self.document["files"]:
            self._write(manifest.kernel_memory, "{}\n" if manifest.kernel_values else None)
        for path, value in (manifest.kernel_values or values.get("live") or {}).items():
            facts["sysctl"][path.removeprefix("/proc/sys/").replace("/", ".")] = value
            if path.endswith("hugepage/enabled"):
                facts["transparent_hugepages"] = value
            if path in self.document["contents"]:
                self.document["contents"][path] = value
        for row in values.get("guarded", ()):
            self._file(row)
        group = {*(self.document["engine"].get("group") or ())}
        for command in manifest.commands:
            if command.argv[0] == "gpasswd":
                group = group | {command.argv[2]} if command.argv[1] == "--add" else group - {command.argv[2]}
                self.document["engine"]["group"] = sorted(group)
            if command.argv[:3] == ("update-alternatives", "--set", "cuda"):
                self.document["files"][cuda.ALTERNATIVE] = {"kind": "link", "target": command.argv[3]}
            if command.argv[0] in {"update-initramfs", "dracut"}:
                image = "/boot/initrd.img-" if self.manager == "apt" else "/boot/initramfs-"
                for path in self.document["files"]:
                    if path.startswith(image):
                        self.document["files"][path] = file("", mtime=200.0)
        facts["modules"] = [*facts["modules"], *manifest.modules, *(values.get("modprobe") or ())]
        getattr(self, f"_after_{manifest.role}", lambda _values: None)(values)

    def _after_nvidia_driver(self, _values: Mapping[str, Any]) -> None:
        facts, built = self.document["facts"], bool(self.document["facts"]["module_files"])
        if "nvidia-uvm" in facts["modules"] and not facts["loaded_driver"]:
            facts["loaded_driver"] = {"version": RELEASE, "flavour": "open"}
            facts["modules"] = [*facts["modules"], "nvidia"]
            gpus = [{**GPU, "index": at, "uuid": f"GPU-{at}"} for at in range(2)]
            facts["driver_gpus"] = [
                {"slot": gpu["slot"], "model": None, "uuid": None, "minor": at, "excluded": False, "firmware": None}
                for at, gpu in enumerate(device for device in HGX if (device["class_id"] or "").startswith("03"))
            ]
            facts["smi"] = {"document": {"driver_version": RELEASE, "attached_gpus": len(gpus), "gpus": gpus}}
        if not built:
            # After the reboot that the plan names.
            facts |= {"loaded_driver": None, "smi": None, "modules": [], "driver_gpus": []}

    def _after_gpu_settings(self, _values: Mapping[str, Any]) -> None:
        """The unit sets the GPUs, and records what they had."""
        rule = SETTINGS["gpu_settings"]["rules"][0]
        set_to = {"power_limit_w": float(rule["power_limit"]), "compute_mode": "Exclusive_Process"}
        smi = self.document["facts"]["smi"]
        for gpu in smi["document"]["gpus"] if smi else ():
            gpu.update(set_to if self.absent != "gpu_settings" else {name: GPU[name] for name in set_to})
        if smi and self.absent != "gpu_settings":
            before = {f"GPU-{at}": {"power_limit": 700.0, "compute_mode": "default"} for at in range(2)}
            self._write(gpu_settings_program.MEMORY, json.dumps(before))

    def _after_kernel_tuning(self, _values: Mapping[str, Any]) -> None:
        facts, tuned = self.document["facts"], self.absent != "kernel_tuning"
        facts["limits"]["defaults"]["memlock"] = "infinity" if tuned else "8388608"
        facts["cpu_frequency"]["governors"] = {"performance" if tuned else "powersave": 8}

    def _after_accounts(self, values: Mapping[str, Any]) -> None:
        for name in values["create"]:
            keys = [{"type": "ssh-ed25519", "bits": 256, "blob": KEY.split()[1], "options": ""}]
            row = {"name": name, "uid": 1002, "group": name, "home": values["homes"][name], "shell": "/bin/bash"}
            row |= {"groups": [], "password": "locked", "keys": keys, "document": f"{KEY}\n", "folder": "folder"}
            self.document["ssh"]["accounts"].append(row)
        for row in self.document["ssh"]["accounts"]:
            row["password"] = "locked" if row["name"] in values["lock"] else row["password"]

    def _after_base(self, _values: Mapping[str, Any]) -> None:
        """The commands set what systemd keeps."""
        if self.absent != "base":
            self.document["facts"]["time_sync"] = {"synchronized": True, "service": None, "timezone": "Europe/Berlin"}
            self._write("/etc/locale.conf", "LANG=de_DE.UTF-8\n")

    def _after_first_boot(self, values: Mapping[str, Any]) -> None:
        """The virtual environment is built or removed."""
        if self.absent == "first_boot":
            self.document["files"] |= {first_boot.VENV: ABSENT, first_boot.RECORD: ABSENT}
            self.document["contents"][first_boot.RECORD] = None
        elif values["venv"]:
            self.document["files"][first_boot.VENV] = {"kind": "folder", "entries": 1, "mode": "0755"}
            self._write(first_boot.RECORD, values["record"])

    def _after_storage(self, values: Mapping[str, Any]) -> None:
        if values:
            self.disks = None if values["leaves"] else values["disks"]

    def _after_docker(self, values: Mapping[str, Any]) -> None:
        for folder in values["folders"]:
            self.folders[folder["path"]] = {**FREE, "kind": "folder", "mode": folder["mode"], "entries": 0}
        if "docker-ce" in self._installed:
            version = number(self._installed["docker-ce"])
            info = {"version": version, "running": 0, "live_restore": True, "cgroup_driver": "systemd"}
            self.document["engine"] |= {"started": 1000.0, "info": info, "options": ["live-restore"]}
        else:
            self.document["engine"] = {"group": self.document["engine"]["group"]}

    def _after_nvidia_container_toolkit(self, _values: Mapping[str, Any]) -> None:
        """The unit writes the specification; the engine reads its file."""
        row = {
            "path": toolkit.SPECIFICATION,
            "size_bytes": 9,
            "cdi_version": "0.7.0",
            "kind": toolkit.GPU_KIND,
            "missing": [],
        }
        row |= {"devices": ["0", "all"], "driver_versions": [RELEASE]}
        self.document["facts"]["cdi_specs"] = [] if self.absent == "nvidia_container_toolkit" else [row]

    def _after_gpu_tools(self, values: Mapping[str, Any]) -> None:
        for venv in values.get("venvs", ()):
            folder = venv["path"]
            self.document["files"] |= {
                path: {"kind": "folder", "entries": 1, "mode": "0755"} for path in (folder, folder.rpartition("/")[0])
            }
            self._write(f"{folder}/gpunode-version", f"{venv['version']}\n")
            for program in venv["programs"]:
                self._write(f"{folder}/bin/{program}", "#!")
                link = {"kind": "link", "target": f"{folder}/bin/{program}"}
                self.document["files"][f"/usr/local/bin/{program}"] = link
        self.document["files"] |= dict.fromkeys(values.get("leaving", ()), ABSENT)

    def _after_ssh_hardening(self, values: Mapping[str, Any]) -> None:
        assert not values
        self.document["ssh"]["weak_moduli"] = 0 if ssh_hardening.MODULI_BEFORE in self.present else 1

    def _after_firewall(self, _values: Mapping[str, Any]) -> None:
        """The unit loads the rules, and records the digests."""
        rules = self.document["files"][firewall.RULES]
        digest = rules.get("sha256") if self.absent != "firewall" else None
        table = "a" * 64 if digest else None
        self.document["facts"]["packet_filter"] |= {"own": table, "tables": ["inet gpunode"] if table else []}
        self._write(firewall.LOADED, f"{digest}  -\n{table}  -\n" if table else None)

    @property
    def present(self) -> set[str]:
        """Paths of the files on the node."""
        return {path for path, row in self.document["files"].items() if row["kind"] == "file"}

    def _write(self, path: str, text: str | None) -> None:
        self._file({"path": path, "content": text, "mode": "0644", "owner": "root", "group": "root"})


def result_of(manifest: Manifest) -> dict[str, Any]:
    """What the role's own tasks read."""
    return manifest.result.model_dump(mode="json") if manifest.result else {}


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@cache
def settings(role: str) -> dict[str, Any]:
    """The settings of a role: the defaults, ``present``, and those of SETTINGS."""
    defaults = settings_of(role)
    return {**defaults, **({"state": "present"} if "state" in defaults else {}), **SETTINGS.get(role, {})}
