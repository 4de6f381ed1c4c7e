# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin unit_states, which runs the builtin module systemd_service."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_states
short_description: Enable, start, stop, reload and restart systemd units
description:
  - Runs M(ansible.builtin.systemd_service) for each unit, in order.
  - In check mode, also reports changes of units that belong to packages not installed yet, on which the builtin module
    fails.
  - If a unit does not start, or has failed when all units are set, the error message ends with the last lines of its
    log.
options:
  units:
    description: Units to set.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the unit.
        type: str
        required: true
      enabled:
        description: Whether the unit starts at boot. Without it, this is not changed.
        type: bool
      state:
        description: Requested state. Without it, the unit is neither started nor stopped.
        type: str
        choices: [started, stopped, restarted, reloaded]
      ready:
        description: Command that has to print C(true) within 15 s before the unit is restarted or reloaded.
        type: list
        elements: str
      mark:
        description: File that records that the change is pending. It is removed afterwards.
        type: str
  daemon_reload:
    description:
      - Run C(systemctl daemon-reload) first. This is also done if M(gpunode.node.managed_files) changed a file of
        systemd in this run and nothing was reloaded since.
    type: bool
    default: false
attributes:
  action:
    support: full
    description: The builtin module runs on the node.
  check_mode:
    support: full
    description: Reports the changes that a run without check mode makes.
  diff_mode:
    support: full
    description: Shows each step as one line, such as C(enable docker.service).
seealso:
  - module: ansible.builtin.systemd_service
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Enable and start DCGM
  gpunode.node.unit_states:
    units: "{{ __common_plan.manifest.units }}"
  become: true
"""

RETURN = r"""
units:
  description: Changes that were made, or would be made in check mode, one line each.
  returned: success
  type: list
  elements: str
  sample: [enable nvidia-dcgm.service, start nvidia-dcgm.service]
"""
