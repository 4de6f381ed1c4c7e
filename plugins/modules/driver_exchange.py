# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Exchange the loaded kernel modules of the NVIDIA driver for the installed ones."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_exchange
short_description: Exchange the loaded kernel modules of the NVIDIA driver for the installed ones
description:
  - Stops the given units, unloads the driver's modules, loads the installed ones and starts the units again.
  - Before it stops anything, the module tests whether all kernel modules can be unloaded. If a process of another unit
    has a device open, a foreign module uses the driver (C(gdrdrv), C(nvidia_fs)), or the module of the requested
    version is not installed, nothing is changed and the reason is printed as a warning. A reboot then loads the
    installed modules.
  - A unit of O(unit_versions) is started only if its version is the version of the loaded module.
options:
  version:
    description: Driver release that has to be loaded at the end.
    type: str
    required: true
  units:
    description: Active units that use the modules, in the order in which they are stopped.
    type: list
    elements: str
    default: []
  unit_versions:
    description: Unit to version, for units that require a kernel module of exactly their version.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Reports whether the modules would be exchanged.
  diff_mode:
    support: none
    description: The module changes no file.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Reload the kernel modules
  gpunode.node.driver_exchange:
    version: 580.178.04
    units: [nvidia-dcgm.service, nvidia-persistenced.service]
  become: true
"""

RETURN = r"""
reason:
  description: Why the modules were not reloaded, or not all units were started again; empty on success.
  returned: success
  type: str
  sample: dcgm-exporter (pid 812, dcgm-exporter.service) holds /dev/nvidia0
loaded:
  description: Version of the loaded module at the end; empty if none is loaded.
  returned: success
  type: str
"""

import os
import re
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils.commands import run
from ansible_collections.gpunode.node.plugins.module_utils.gpu_use import FAMILY, holders, modules, obstacles

COMMAND_LIMIT_S = 180
SETTLE_S = 15
LOADED = Path("/proc/driver/nvidia/version")


class ExchangeRefusedError(Exception):
    """Why the modules were not exchanged."""


def done(argv: list[str]) -> str:
    """Run a command; return the last line of its errors, empty on success."""
    code, output, errors = run(argv, COMMAND_LIMIT_S)
    lines = (errors or output).strip().splitlines()
    return "" if code == 0 else lines[-1] if lines else f"exit status {code}"


def on_disk(kernel: str) -> str:
    """Return the version of the module that a kernel would load; empty if it has no module."""
    code, output, _ = run(["modinfo", "-k", kernel, "-F", "version", "nvidia"], COMMAND_LIMIT_S)
    return output.strip() if code == 0 else ""


def loaded_version() -> str:
    """Return the version of the loaded module; empty if no module is loaded."""
    try:
        text = LOADED.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def known_modules() -> dict[str, tuple[int, list[str]]]:
    """Return the loaded modules with their users."""
    code, output, errors = run(["lsmod"], COMMAND_LIMIT_S)
    if code != 0:
        raise ExchangeRefusedError(f"lsmod ended with status {code}: {errors.strip()}")
    loaded: dict[str, tuple[int, list[str]]] = modules(output)
    return loaded


def in_the_way(units: list[str]) -> list[str]:
    """Return why the modules cannot be unloaded now."""
    reasons: list[str] = obstacles(known_modules(), holders(), units)
    return reasons


def refuse(version: str, units: list[str]) -> None:
    """Raise ExchangeRefusedError if the exchange would fail. Called before anything is stopped."""
    kernel = os.uname().release
    installed = on_disk(kernel)
    if installed != version:
        raise ExchangeRefusedError(f"kernel {kernel} would load module {installed or 'none'}, not {version}")
    reasons = in_the_way(units)
    if reasons:
        raise ExchangeRefusedError("; ".join(reasons[:5]))


def exchange(version: str, units: list[str]) -> None:
    """Stop the units and exchange the modules. Raise ExchangeRefusedError if a module stays loaded."""
    if units:
        error = done(["systemctl", "stop", *units])
        if error:
            raise ExchangeRefusedError(f"systemctl stop: {error}")
    end = time.monotonic() + SETTLE_S
    while in_the_way([]) and time.monotonic() < end:
        time.sleep(0.5)
    reasons = in_the_way([])
    if reasons:
        raise ExchangeRefusedError("; ".join(reasons[:5]))
    before = known_modules()
    loaded = [name for name in FAMILY if name in before]
    for name in loaded:
        error = done(["rmmod", name])
        if error and name in known_modules():
            raise ExchangeRefusedError(f"module {name} stays: {error}")
    for name in dict.fromkeys([*reversed(loaded), "nvidia_uvm"]):
        error = done(["modprobe", name])
        if error and name in ("nvidia", "nvidia_uvm"):
            raise ExchangeRefusedError(f"module {name} {version} does not load: {error}")


def started(units: list[str], versions: dict[str, Any], requested: str) -> list[str]:
    """Start the units that match the loaded module; return a reason for each unit that was not started.

    If a module other than the requested one is loaded, all installed programs belong to another release than it does.
    """
    now, reasons = loaded_version(), []
    for unit in reversed(units):
        needs = versions.get(unit) or requested
        if needs != now:
            reasons.append(f"{unit} is {needs} and was not started, module {now or 'none'} is loaded")
        else:
            error = done(["systemctl", "start", unit])
            reasons += [f"systemctl start {unit}: {error}"] if error else []
    return reasons


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str", "required": True},
            "units": {"type": "list", "elements": "str", "default": []},
            "unit_versions": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    version, units = module.params["version"], module.params["units"]
    if loaded_version() == version:
        module.exit_json(changed=False, reason="", loaded=version)
    try:
        refuse(version, units)
    except (ExchangeRefusedError, OSError) as err:
        reason = " ".join(str(err).split())
        module.warn(f"the loaded module remains until a reboot: {reason}")
        module.exit_json(changed=False, reason=reason, loaded=loaded_version())
    if module.check_mode:
        module.exit_json(changed=True, reason="", loaded=loaded_version())
    reasons = []
    try:
        exchange(version, units)
    except (ExchangeRefusedError, OSError) as err:
        reasons.append(" ".join(str(err).split()))
    reasons += started(units, module.params["unit_versions"], version)
    if reasons:
        module.warn(f"a reboot is pending: {'; '.join(reasons)}")
    module.exit_json(changed=True, reason="; ".join(reasons), loaded=loaded_version())


if __name__ == "__main__":
    main()
