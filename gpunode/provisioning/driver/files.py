"""Files of the role nvidia_driver on a node, and their text."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from gpunode.provisioning.driver.model import DriverSettings
from gpunode.provisioning.manifest import ManagedFile
from gpunode.provisioning.role import Value

SOURCES_FILE = "/etc/apt/sources.list.d/gpunode-nvidia-driver.sources"
PREFERENCES = "/etc/apt/preferences.d/gpunode-nvidia-driver.pref"
UNATTENDED = "/etc/apt/apt.conf.d/52gpunode-nvidia-driver"
NOUVEAU = "/etc/modprobe.d/gpunode-nouveau.conf"
OPTIONS = "/etc/modprobe.d/gpunode-nvidia.conf"
PERSISTENCED = "/etc/systemd/system/nvidia-persistenced.service.d/gpunode.conf"
STAGED = "/var/lib/gpunode/nvidia_driver/key-staged"
"""The boot id of the boot in which the key that signs modules was staged."""
ALL = (SOURCES_FILE, PREFERENCES, UNATTENDED, NOUVEAU, OPTIONS, PERSISTENCED, STAGED)
_MARK = "Managed by gpunode (role nvidia_driver):"

NOUVEAU_TEXT = f"""\
# {_MARK} nouveau must not take the GPU before NVIDIA's module does.
blacklist nouveau
options nouveau modeset=0
"""
GPU_CONDITION = """\
ExecCondition=/bin/sh -c 'for device in /sys/bus/pci/devices/*; do read -r vendor < $$device/vendor; \
read -r class < $$device/class; case $$vendor:$$class in 0x10de:0x03*) exit 0;; esac; done; exit 1'
"""
"""Line of a unit that makes systemd skip it, without a failure, if no NVIDIA GPU is on the PCI bus."""
PERSISTENCED_TEXT = f"""\
# {_MARK} without an NVIDIA GPU on the PCI bus the daemon is skipped, not failed.
[Service]
{GPU_CONDITION}"""


class PinStanza(TypedDict):
    """One stanza of apt's preferences."""

    packages: list[str]
    pin: str
    priority: int


def sources_text(stanzas: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the file of apt sources; None if the node's own sources have everything."""
    if not stanzas:
        return None
    lines = [f"# {_MARK} the components of this node's own archives that hold the driver."]
    for stanza in stanzas:
        lines += ["", "Types: deb"]
        lines += [f"{name.title() if name != 'uris' else 'URIs'}: {' '.join(stanza[name])}" for name in _FIELDS]
        for name, value in sorted(stanza["options"].items(), key=lambda item: str(item[0]).lower()):
            gap = "" if value.startswith("\n") else " "
            lines.append(f"{name}:{gap}{value}".replace("\n", "\n "))
    return "\n".join(lines) + "\n"


_FIELDS = ("uris", "suites", "components")


def preferences_text(pins: Iterable[PinStanza]) -> str:
    """Return the preferences that pin the closure."""
    stanzas = [
        f"Package: {' '.join(pin['packages'])}\nPin: {pin['pin']}\nPin-Priority: {pin['priority']}\n" for pin in pins
    ]
    return f"# {_MARK} all packages of the driver come in this one version.\n" + "".join(stanzas)


def unattended_text(names: Iterable[str]) -> str:
    """Return the list for unattended upgrades; the next run reads from it what this role holds."""
    lines = "".join('  "^{}$";\n'.format(re.sub(r"[.+]", r"[\g<0>]", name)) for name in names)
    return (
        f"// {_MARK} the driver changes only on request, other upgrades continue.\n"
        f"Unattended-Upgrade::Package-Blacklist {{\n{lines}}};\n"
    )


def options_text(options: Mapping[str, Mapping[str, Value]]) -> str | None:
    """Return the options of the kernel modules; None if there are none."""
    if not options:
        return None
    lines = [
        f"options {module}" + "".join(f" {name}={value}" for name, value in sorted(values.items()))
        for module, values in sorted(options.items())
    ]
    return f"# {_MARK} nvidia_driver_module_options.\n" + "".join(line + "\n" for line in lines)


def common_files(settings: DriverSettings) -> Iterator[ManagedFile]:
    """Yield the files that do not depend on the package manager."""
    yield ManagedFile(path=OPTIONS, content=options_text(settings.module_options))
    if settings.persistence:
        yield ManagedFile(path=PERSISTENCED, content=PERSISTENCED_TEXT)
