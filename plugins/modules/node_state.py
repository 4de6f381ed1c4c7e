# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Collect the state of a node once, for all roles."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_state
short_description: Collect the state of a node once, for all roles
description:
  - Collects in one round trip everything from which the roles of this collection compute their plans. This is the
    output of the gpunode probe, the package database and its sources, kind, digest, mode and owner of files, the
    content of a few documents, and the answers of the container engine.
  - Changes nothing on the node.
  - The action plugin of this module passes the list of paths to the node and keeps the result on the controller for
    the rest of the run, where the plans of the roles read it (M(gpunode.node.role_plan)). Run this module after tasks
    of your own that changed packages, files or units that the roles manage.
options:
  lock_wait_s:
    description: Seconds to wait for another package manager to finish.
    type: int
    default: 900
  return_state:
    description: >-
      Return the state as the documents C(node), C(apt) and C(dnf). A state that was collected earlier in the run is
      not collected again.
    type: bool
    default: false
  probe:
    description: Source text of the probe. Set by the action plugin.
    type: str
  paths:
    description: Further paths to collect kind, digest, mode and owner of.
    type: list
    elements: str
    default: []
  globs:
    description: Further shell patterns of paths to collect kind, digest, mode and owner of.
    type: list
    elements: str
    default: []
  contents:
    description: Further text files to collect the content of, at most 1 MiB each.
    type: list
    elements: str
    default: []
  parts:
    description:
      - Parts that only some roles need. V(packages) is the package manager and its sources, V(engine) the container
        engine, V(ssh) the SSH daemon, its keys and the accounts.
      - The action plugin of M(gpunode.node.role_plan) names those that its role needs, and leaves commands out of the
        probe that the role does not need.
    type: list
    elements: str
    choices: [packages, engine, ssh]
    default: [packages, engine, ssh]
  users:
    description: Users to look up by name for that part; those of LDAP or SSSD are in no local file.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: The module only reads.
  diff_mode:
    support: none
    description: Nothing is changed.
requirements:
  - The Python package gpunode on the controller.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Read the node state again after other changes
  gpunode.node.node_state:
  become: true
"""

RETURN = r"""
host:
  description: Name of the node.
  returned: success
  type: str
  sample: gpu1
"""

import json
import os
import signal
import subprocess
import sys
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import (
    apt_state,
    dnf_state,
    engine_state,
    files_state,
    module_key,
    old_keys,
    ssh_state,
)
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import SIGNALS, leave_orderly
from ansible_collections.gpunode.node.plugins.module_utils.quiet import QuietModule

PROBE_LIMIT_S = 150
MOST_PARENTS = 30
PARTS = ["packages", "engine", "ssh"]


def connection(proc: Path = Path("/proc")) -> dict[str, Any] | None:
    """Return client address and port of the SSH connection that this module runs over; None without one.

    sudo removes SSH_CONNECTION from the environment; a parent process of the login still has it.
    """
    number = os.getpid()
    for _ in range(MOST_PARENTS):
        try:
            environment = (proc / str(number) / "environ").read_bytes()
            stat = (proc / str(number) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        for entry in environment.split(b"\0"):
            words = entry.partition(b"SSH_CONNECTION=")[2].decode("ascii", "replace").split()
            if entry.startswith(b"SSH_CONNECTION=") and len(words) == 4 and words[3].isdigit():
                return {"client": words[0], "port": int(words[3])}
        number = int(stat.rpartition(")")[2].split()[1])
        if number <= 1:
            return None
    return None


def by_dnf(root: Path = Path("/")) -> bool:
    """Return whether rpm manages the packages. The other package tool may be installed too (rpm on Debian)."""
    if not (root / "usr/bin/rpm").exists():
        return False
    try:
        lines = (root / "etc/os-release").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return not (root / "etc/debian_version").exists()
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    named = {word for key in ("ID", "ID_LIKE") for word in fields.get(key, "").strip("\"'").split()}
    return not named & {"debian", "ubuntu"}


def started(text: str) -> subprocess.Popen[bytes]:
    """Start the probe in its own process group and return the process."""
    argv = [sys.executable, "-I", "-"]
    child = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    source, child.stdin = child.stdin, None
    if source is not None:
        with source:
            source.write(text.encode())
    return child


def looked(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the requested parts of the state; the probe runs in parallel with the other readers."""
    package_state, parts = dnf_state if by_dnf() else apt_state, parameters["parts"]
    holder = package_state.awaited(float(parameters["lock_wait_s"])) if "packages" in parts else None
    probe = started(parameters["probe"])
    try:
        packages = package_state.collected(holder) if "packages" in parts else None
        if packages is not None and not packages.get("error"):
            packages["key"] = module_key.key()
        state: dict[str, Any] = files_state.collected(parameters["paths"], parameters["globs"], parameters["contents"])
        state["engine"] = engine_state.collected() if "engine" in parts else {}
        state["connection"] = connection()
        state["ssh"] = ssh_state.collected(parameters["users"]) if "ssh" in parts else None
        output, errors = probe.communicate(timeout=PROBE_LIMIT_S)
    finally:
        if probe.poll() is None:
            os.killpg(probe.pid, signal.SIGKILL)
            probe.communicate()
    if probe.returncode != 0:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise OSError(f"the probe ended with status {probe.returncode}: {lines[-1] if lines else 'no message'}")
    state["bundle"] = output.decode("utf-8", "replace")
    if package_state is apt_state and packages is not None:
        packages["old_keys"] = old_keys.keyrings()
    state["apt"], state["dnf"] = (None, packages) if package_state is dnf_state else (packages, None)
    return state


def main() -> None:
    """Run the module."""
    module = QuietModule(
        argument_spec={
            "lock_wait_s": {"type": "int", "default": 900},
            "return_state": {"type": "bool", "default": False},
            "probe": {"type": "str"},
            "paths": {"type": "list", "elements": "str", "default": []},
            "globs": {"type": "list", "elements": "str", "default": []},
            "contents": {"type": "list", "elements": "str", "default": []},
            "parts": {"type": "list", "elements": "str", "choices": PARTS, "default": PARTS},
            "users": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    if not module.params["probe"]:
        module.fail_json(msg="node_state requires the Python package gpunode on the controller: it runs its probe")
    for number in SIGNALS:
        signal.signal(number, leave_orderly)
    try:
        state = looked(module.params)
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        module.fail_json(msg=f"the node could not be probed: {' '.join(str(err).split())}")
    # One text: the controller parses it within limits of its own, in place of Ansible. It is compressed because -vvv
    # prints it, and it has the contents of files such as daemon.json.
    module.exit_json(changed=False, state=b64encode(zlib.compress(json.dumps(state).encode())).decode())


if __name__ == "__main__":
    main()
