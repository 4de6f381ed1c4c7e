"""The role kubernetes_node: what kubelet's installer expects of a node, and containerd for it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import field_validator

from gpunode.provisioning.base_settings import like
from gpunode.provisioning.containerd import CONFIG, UNIT, kubernetes_config, restarted
from gpunode.provisioning.context import Context
from gpunode.provisioning.engines import installed_engine
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, NodeCommand, NodeQuery, UnitState
from gpunode.provisioning.role import PackageSettings, Role, keeping, option
from gpunode.provisioning.state import Look, NodeState, sysctl_path
from gpunode.tuning.kernel import in_container

MODULES = "/etc/modules-load.d/gpunode-kubernetes.conf"
SYSCTL = "/etc/sysctl.d/90-gpunode-kubernetes.conf"
SWAP = "/etc/systemd/system/swap.target"
BEFORE = "/var/lib/gpunode/kubernetes_node/containerd-before.toml"
NEEDED = ("overlay", "br_netfilter")
VALUES: Mapping[str, str] = {
    "net.bridge.bridge-nf-call-iptables": "1",
    "net.bridge.bridge-nf-call-ip6tables": "1",
    "net.ipv4.ip_forward": "1",
}
"""What kubeadm's preflight checks, and what it checked until 1.30 (kubernetes.io: container runtimes)."""
SWAPS, FILE_SYSTEMS = "/proc/swaps", "/proc/filesystems"
BRIDGE = "/proc/sys/net/bridge/bridge-nf-call-iptables"
CONTAINERD = ("containerd", "containerd.io")
_IMAGE = re.compile(r"(?!https?:)[a-z0-9][A-Za-z0-9._:/@-]{0,300}")
OWN_RUNTIME = ("k3s", "rke2")
"""Installers with a containerd of their own, which registers the NVIDIA runtime by itself when it finds the toolkit."""


class KubernetesNodeSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep) (nothing is done), V(present) (the node is prepared for kubelet) or V(absent) (that is undone; "
        "kubelet and its pods are not touched).",
    )
    installer: Literal["kubeadm", "k3s", "rke2", "other"] = option(
        "kubeadm",
        "What installs kubelet afterwards. k3s and RKE2 have a containerd of their own; for the others, containerd is "
        "installed and configured.",
    )
    swap: Literal["off", "keep"] = option(
        "off", "V(off): swap is switched off, now and at each boot. V(keep): for a kubelet with failSwapOn: false."
    )
    sandbox_image: str = option(
        "",
        "Image of the pods' sandbox in a registry of the site: registry.example.com/pause:3.10. Empty: unchanged.",
    )

    @field_validator("sandbox_image")
    @classmethod
    def _image(cls, value: str) -> str:
        return like(_IMAGE, value, "name of an image (example: registry.example.com/pause:3.10)")


ROLE = Role(
    name="kubernetes_node",
    title="Prepare a GPU node for kubelet: containerd, kernel modules, kernel settings, swap",
    about=(
        "Prepares what kubelet requires of a node, and configures containerd for it; kubelet itself comes from the "
        "site's installer. The role nvidia_container_toolkit registers the NVIDIA runtime and CDI with containerd.",
        "Restores the previous state with O(kubernetes_node_state=absent).",
    ),
    settings=KubernetesNodeSettings,
    for_images=True,
    reads=("gpus",),
    files=(MODULES, SYSCTL, SWAP),
    packages=("containerd", "containerd.io"),
    kernel=True,
    more=Look(contents=(CONFIG, BEFORE)),
)


@ROLE.present
def present(state: NodeState, settings: KubernetesNodeSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    if "swaps" not in context.answers:
        paths = [SWAPS, FILE_SYSTEMS, *map(sysctl_path, VALUES)]
        return Manifest(role=ROLE.name, questions={"swaps": NodeQuery(kind="contents", body={"paths": paths})})
    answer = context.answers["swaps"]
    own_runtime = settings.installer in OWN_RUNTIME
    installed = context.planned.installed(state.installed)
    package = next((name for name in CONTAINERD if name in installed), None)
    text = state.contents.get(CONFIG)
    config, problem = (text, None) if own_runtime else kubernetes_config(text, settings.sandbox_image)
    swaps = _swaps(answer.get(SWAPS)) if settings.swap == "off" else []
    refusals = [*([problem] if problem else []), *_contradicted(context), *_too_full(state, swaps)]
    if refusals:
        return Manifest(role=ROLE.name, refusals=tuple(refusals))
    texts = ROLE.texts(context)
    files = [
        ManagedFile(path=MODULES, content=texts("modules.conf.j2", names=NEEDED), phase="after"),
        ManagedFile(path=SYSCTL, content=texts("sysctl.conf.j2", values=VALUES), phase="after"),
        # systemd does not load a unit with an empty file: swap.target is masked, and no boot switches swap on.
        ManagedFile(path=SWAP, content="" if settings.swap == "off" else None, phase="after"),
    ]
    units: tuple[UnitState, ...] = ()
    marks: tuple[ManagedFile, ...] = ()
    deferred: dict[str, str] = {}
    if not own_runtime:
        if state.contents.get(BEFORE) is None and config != text:
            files.append(ManagedFile(path=BEFORE, content=text or "", mode="0600", phase="after", private=True))
        attributes = state.attributes(CONFIG) if text is not None else {}
        changed = ManagedFile(path=CONFIG, content=config, phase="after", private=True, **attributes)
        files.append(changed)
        change = restarted(state, config != text, context.allow_busy, "its plugin for Kubernetes was configured")
        marks, deferred = change.marks, change.deferred
        units = (UnitState(name=UNIT, enabled=True, state="started"), *change.units) if package else ()
    missing = () if in_container(state.facts) else tuple(_missing_modules(answer))
    # With the module come its settings; a container has those of its host, as far as it has any.
    values = {sysctl_path(name): value for name, value in VALUES.items()}
    runtime = {path: value for path, value in values.items() if answer.get(path) is not None or missing}
    return Manifest(
        role=ROLE.name,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=ROLE.transaction(state, settings, () if own_runtime or package is not None else (_package(state),)),
        modules=missing,
        kernel_values=runtime,
        kernel_memory=ROLE.kernel_memory,
        commands=(NodeCommand(argv=("swapoff", "-a")),) if swaps else (),
        units=units,
        marks=marks,
        restarts=deferred,
        notes=tuple(_notes(installed, own_runtime=own_runtime)),
        pending_reasons=(
            *(f"swap is on: {name}" for name in swaps),
            *(
                f"{path} is {_value(answer, path) or 'unknown'}, not {value}"
                for path, value in runtime.items()
                if _value(answer, path) != value
            ),
        ),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, context: Context) -> Manifest:
    """Return the removal with containerd's configuration as it was; swap comes with the next boot, or swapon -a."""
    before, text = state.contents.get(BEFORE), state.contents.get(CONFIG)
    files = []
    changes = before is not None and before != (text or "")
    if before is not None:
        attributes = state.attributes(CONFIG) if text is not None else {}
        written, _ = kubernetes_config(before, ROLE.of(context).sandbox_image)
        restored = ManagedFile(path=CONFIG, content=before or None, phase="after", private=True, **attributes)
        # What others added since then, such as a registry, is in the backup.
        files.append(restored.model_copy(update={"backup": text not in (None, before, written)}))
        files.append(ManagedFile(path=BEFORE, content=None, phase="after", private=True))
    # An engine that was installed since then needs it.
    engine = installed_engine(context.planned.installed(state.installed)).package
    manifest = keeping(manifest, state, CONTAINERD if engine else ())
    change = restarted(state, changes, context.allow_busy, "its configuration was restored")
    goes = any(reason.startswith("containerd") for reason in manifest.pending_reasons)
    swapped = state.kind(SWAP) == "file"
    return manifest.updated(
        files=(*manifest.files, *files),
        units=() if goes else change.units,
        marks=() if goes else change.marks,
        restarts={} if goes else change.deferred,
        notes=("swap is switched on by the next boot, or by systemctl start swap.target",) if swapped else (),
    )


def _package(state: NodeState) -> str:
    """Return the package of containerd: for the RHEL family it comes from Docker's repository."""
    return state.by_manager(apt="containerd", dnf="containerd.io")


def uses_containerd(context: Context) -> bool:
    """Return whether kubelet uses the containerd that the role configures."""
    settings = context.settings_of(ROLE.name)
    return settings["state"] == "present" and settings["installer"] not in OWN_RUNTIME


def _value(answer: Mapping[str, object], path: str) -> str | None:
    text = answer.get(path)
    return text.strip() if isinstance(text, str) else None


def _missing_modules(answer: Mapping[str, object]) -> Iterator[str]:
    """Yield the modules that the kernel lacks; one that is built into it is in no list of modules."""
    file_systems = answer.get(FILE_SYSTEMS)
    if not (isinstance(file_systems, str) and "overlay" in file_systems.split()):
        yield "overlay"
    if answer.get(BRIDGE) is None:
        yield "br_netfilter"


def _contradicted(context: Context) -> Iterator[str]:
    """Yield values of the role kernel_tuning that would win at each boot, with which kubelet does not work."""
    tuning = context.settings_of("kernel_tuning")
    if tuning["state"] == "present":
        for name in VALUES.keys() & tuning["sysctl"].keys():
            value = tuning["sysctl"][name]
            text = str(int(value)) if isinstance(value, bool) else str(value)
            if value is not None and text != VALUES[name]:
                yield f"kernel_tuning_sysctl: {name} = {text}: kubelet needs {VALUES[name]}: remove that line"


def _swaps(text: object) -> list[str]:
    """Return the names of the active swap areas, from ``/proc/swaps``."""
    lines = text.splitlines()[1:] if isinstance(text, str) else []
    return [line.split()[0] for line in lines if line.split()]


def _too_full(state: NodeState, swaps: list[str]) -> Iterator[str]:
    """Yield why swap cannot be switched off: what is in it would not fit into memory."""
    memory = state.facts.memory
    if not swaps or memory is None or None in (memory.swap_total_mib, memory.swap_free_mib, memory.available_mib):
        return
    used = (memory.swap_total_mib or 0) - (memory.swap_free_mib or 0)
    if used >= (memory.available_mib or 0):
        yield (
            f"swap-in-use: {used} MiB are swapped out and {memory.available_mib} MiB of memory are available: end "
            "programs first, or set kubernetes_node_swap: keep"
        )


def _notes(installed: Mapping[str, str], *, own_runtime: bool) -> Iterator[str]:
    if own_runtime and "containerd" in installed and installed_engine(installed).package is None:
        yield "containerd of the distribution is installed beside the installer's own: kubelet does not use it"
