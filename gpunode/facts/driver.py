"""What the loaded module says without any tool, and the device files that lead to it."""

import re

from gpunode.facts.errors import ParseError
from gpunode.facts.modules import loaded_driver
from gpunode.facts.node import DeviceNode, DriverGpu
from gpunode.facts.parsers.values import bus_id, is_nothing
from gpunode.facts.seen import Seen, Unseen, first_line, whole

_GPUS = "/proc/driver/nvidia/gpus/"
_PARAMS = "/proc/driver/nvidia/params"
_MODULES = "/sys/module/"
_VERSION = re.compile(r"(?<![0-9.])[0-9]{1,4}(?:\.[0-9]{1,6}){1,3}")


def driver_gpus(seen: Seen) -> tuple[DriverGpu, ...]:
    """From ``/proc/driver/nvidia/gpus/SLOT/information``; a field that reads ``??`` or ``Unknown`` is None."""
    if loaded_driver(seen) is None:
        return ()
    names = seen.folder(_GPUS)
    seen.require_finished(_GPUS)
    if names is None:
        raise Unseen(f"{_GPUS} is not there, though the module is loaded")
    return tuple(_gpu(seen, name) for name in names)


def _gpu(seen: Seen, name: str) -> DriverGpu:
    slot = bus_id(name)
    text = seen.text(f"{_GPUS}{name}/information")
    if slot is None or text is None:
        raise ParseError(f"expected a PCI slot with its information in {_GPUS}, found '{first_line(name)}'")
    values = {
        key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in text.splitlines()) if colon
    }
    excluded = values.get("GPU Excluded", values.get("Blacklisted", "")).lower()
    return DriverGpu(
        slot=slot,
        model=_known(values.get("Model")),
        uuid=_known(values.get("GPU UUID")),
        minor=whole(values.get("Device Minor")),
        excluded={"yes": True, "no": False}.get(excluded),
        firmware=_known(values.get("GPU Firmware")),
    )


def _known(text: str | None) -> str | None:
    return None if text is None or is_nothing(text) or "?" in text else text


def device_nodes(seen: Seen) -> tuple[DeviceNode, ...]:
    """``/dev/nvidia*``."""
    return tuple(
        DeviceNode(path=path, kind=kind, mode=mode, user=user, group=group, major=whole(major), minor=whole(minor))
        for path, kind, mode, user, group, major, minor in seen.rows("device-nodes", 7)
    )


def driver_parameters(seen: Seen) -> dict[str, str]:
    """``NAME: VALUE`` lines of ``/proc/driver/nvidia/params``; values keep their quotes off."""
    if loaded_driver(seen) is None:
        return {}
    text = seen.text(_PARAMS)
    if text is None:
        raise Unseen(f"{_PARAMS} is not there, though the module is loaded")
    found = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            raise ParseError(f"expected NAME: VALUE in {_PARAMS}, found '{first_line(line)}'")
        found[name.strip()] = value.strip().strip('"')
    return found


def module_parameters(seen: Seen) -> dict[str, dict[str, str]]:
    """From ``/sys/module/nvidia*/parameters``; those that only root may read are left out without root."""
    names = seen.folder(_MODULES)
    seen.require_finished(_MODULES)
    if names is None:
        raise Unseen(f"{_MODULES} is not there")
    found: dict[str, dict[str, str]] = {name: {} for name in names if name == "nvidia" or name.startswith("nvidia_")}
    for path in seen.under(_MODULES):
        name, _, rest = path[len(_MODULES) :].partition("/parameters/")
        value = seen.value(path)
        if name in found and rest and value is not None:
            found[name][rest] = value
    return found


def nvidia_tool_versions(seen: Seen) -> dict[str, str] | None:
    """``--version`` of fabric manager, DCGM's host engine and dcgmi."""
    keys = {
        "nv-fabricmanager": "version-nv-fabricmanager",
        "nv-hostengine": "version-nv-hostengine",
        "dcgmi": "version-dcgmi",
    }
    if not any(seen.ran(key) for key in keys.values()) and loaded_driver(seen) is None:
        return None
    return {name: version for name, key in keys.items() if (version := version_of(seen, key)) is not None}


def version_of(seen: Seen, key: str) -> str | None:
    """The first version in what a program prints; None where there is no such program."""
    result = seen.command(key)
    if result.missing:
        return None
    text = first_line(result.stdout) if result.rc == 0 else ""
    match = _VERSION.search(result.stdout[:4000]) if text else None
    if match is None:
        said = first_line(result.stdout) or first_line(result.stderr)
        raise ParseError(f"expected a version from {' '.join(result.argv[:2])}, found '{said}'")
    return match[0]
