"""What the role nvidia_container_toolkit decides: version, runtimes, CDI specification and its flags."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.catalog import load
    from gpunode.errors import GpunodeError
    from gpunode.facts import NodeFacts
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

SPEC = "/var/run/cdi/nvidia.yaml"
OUTPUT = "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH"
FLAGS = "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS"
NO_GIDS = "no-additional-gids-for-device-nodes"
BEGIN = "# BEGIN gpunode (role nvidia_container_toolkit): an engine here cannot read CDI 0.7.0"
END = "# END gpunode"
CRI, CRI_VERSION = "io.containerd.grpc.v1.cri", 2
RUNTIME = {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}


def _need_gpunode() -> None:
    if MISSING is not None:
        raise AnsibleFilterError(
            f"the Python package gpunode is needed beside Ansible on the controller ({MISSING}): "
            "install it into the environment that ansible-playbook runs from, with pip install gpunode"
        )


def toolkit_wish(
    version: str, installed: Mapping[str, Any] | None, planned: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Which toolkit a node gets: version (None: none), packages, replaces, repository, key, fingerprints.

    ``version`` is ``keep`` (the installed one where all packages carry it, else the stack's), ``stack``, ``none`` or
    exact. ``installed`` is name to version, ``planned`` the ``container_toolkit`` of the resolved stack. A stack
    without one goes without, unless the toolkit is installed or an exact version is requested.
    """
    _need_gpunode()
    try:
        catalog = load()
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None
    row = next(iter(catalog.container_toolkit.values()))
    packages = list(next(each.names for each in catalog.packages.values() if each.component == "container-toolkit"))
    have = {re.sub(r"-[^-]*$", "", str((installed or {}).get(name, ""))) for name in packages}
    one = next(iter(have)) if len(have) == 1 else ""
    resolved = str((planned or {}).get("version") or "")
    wished = {"keep": one or resolved or _newest(have), "stack": resolved or one, "none": ""}.get(version, version)
    return {
        "version": wished or None,
        "packages": list((planned or {}).get("packages") or packages),
        "replaces": list(row.replaces),
        "repository": row.repository.removesuffix("/stable"),
        "key": row.key,
        "fingerprints": list(row.fingerprints),
    }


def _newest(versions: Iterable[str]) -> str:
    """Of packages in several versions the newest: nothing is taken back."""
    known = [version for version in versions if re.fullmatch(r"\d+(\.\d+)+", version)]
    return max(known, key=lambda version: [int(part) for part in version.split(".")], default="")


def toolkit_daemon(
    engine: Mapping[str, Any], cdi: bool, default_runtime: bool, cgroup_driver: str | None, present: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of daemon.json that give containers GPUs, as ``nvidia-ctk runtime configure`` writes them.

    ``engine`` is what the filter container_engine says, ``cgroup_driver`` the running daemon's, ``present`` the
    file as it is. An engine without CDI whose cgroups systemd makes is moved to cgroupfs: at ``systemctl
    daemon-reload`` systemd would write the devices of its containers anew, and knows nothing of those that the
    runtime's hook added. Who has chosen a driver keeps it.
    """
    features = present.get("features")
    switched_off = isinstance(features, Mapping) and features.get("cdi") is False
    wished: dict[str, Any] = {"runtimes": RUNTIME}
    if cdi and (engine["cdi"] == "feature" or (engine["cdi"] == "default" and switched_off)):
        wished["features"] = {"cdi": True}
    if default_runtime:
        wished["default-runtime"] = "nvidia"
    options = present.get("exec-opts")
    chosen = isinstance(options, list) and any(
        str(option).startswith("native.cgroupdriver=systemd") for option in options
    )
    ours = isinstance(options, list) and "native.cgroupdriver=cgroupfs" in options
    if engine["cdi"] == "none" and not chosen and (ours or cgroup_driver == "systemd"):
        wished["exec-opts"] = ["native.cgroupdriver=cgroupfs"]
    return wished


def needs_old_cdi(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Engines of the node that cannot read CDI 0.7.0, in words; ``engines``: name to the filter container_engine."""
    return sorted(
        f"{name} {engine['version']}" for name, engine in engines.items() if engine.get("additional_gids") is False
    )


def cdi_refresh_env(text: str | None, old_cdi: bool) -> dict[str, Any]:
    """The environment of nvidia-cdi-refresh.service: ``{text, output}``.

    With ``old_cdi`` the flag that leaves ``additionalGids`` out is set in a block of ours, beside the flags that a
    user has set; without, the block goes. ``output`` is where the unit writes.
    """
    lines: list[str] = []
    inside = False
    for line in (text or "").splitlines():
        inside = inside or line == BEGIN
        if not inside:
            lines.append(line)
        inside = inside and line != END
    values = dict(re.findall(r"(?m)^\s*(\w+)=[\"']?([^\"'\n]*)", "\n".join(lines)))
    flags = [flag for flag in values.get(FLAGS, "").split(",") if flag]
    if old_cdi and NO_GIDS not in flags:
        lines += [BEGIN, f"{FLAGS}={','.join([*flags, NO_GIDS])}", END]
    return {"text": "".join(f"{line}\n" for line in lines), "output": values.get(OUTPUT, "").strip() or SPEC}


def containerd_config(text: str | None) -> str:
    """containerd's configuration in which the toolkit's runtime has the usual one beside it.

    containerd 1 knows runc by itself only as long as its file names no runtime at all: with the toolkit's alone, its
    plugin for Kubernetes does not start. ``text`` is the file as it is, None where there is none. Comments stay.
    """
    text = text or "version = 2\n"
    runc = f'\n[plugins."{CRI}".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
    try:
        document = tomllib.loads(text)
        settings = document.get("plugins", {}).get(CRI, {}).get("containerd", {})
        known = settings.get("default_runtime_name", "runc") != "runc" or "runc" in settings.get("runtimes", {})
        tomllib.loads(text + runc)
    except (ValueError, AttributeError):
        return text  # nvidia-ctk has the words for what is no such file
    return text if known or document.get("version") != CRI_VERSION else text + runc


def cdi_refresh_reason(facts: Mapping[str, Any], output: str = SPEC) -> str | None:
    """Why the specification has to be written anew, None where it fits.

    ``facts`` is a NodeFacts document. A node whose driver is not loaded has nothing to write one of, and with the
    module of another release in memory the unit cannot: it does so at the boot that is due then.
    """
    _need_gpunode()
    node = NodeFacts.model_validate(plain(facts))
    if node.loaded_driver is None or node.driver_library_version not in (None, node.loaded_driver.version):
        return None
    same = output.replace("/var/run/", "/run/")
    spec = next((spec for spec in node.cdi_specs or () if spec.path.replace("/var/run/", "/run/") == same), None)
    installed = node.driver_library_version or node.loaded_driver.version
    if spec is None:
        return f"{output} is not there"
    if any(version != installed for version in spec.driver_versions):
        return f"{output} was made for driver {', '.join(spec.driver_versions)}, {installed} is installed"
    if spec.missing:
        return f"{output} names what is not there: {', '.join(spec.missing[:3])}"
    if not spec.devices:
        return f"{output} names no device"
    return None


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "toolkit_wish": toolkit_wish,
            "toolkit_daemon": toolkit_daemon,
            "needs_old_cdi": needs_old_cdi,
            "cdi_refresh_env": cdi_refresh_env,
            "containerd_config": containerd_config,
            "cdi_refresh_reason": cdi_refresh_reason,
        }
