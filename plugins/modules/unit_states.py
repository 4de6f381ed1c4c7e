# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin unit_states, which runs the builtin module systemd_service."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_states
short_description: Enable, start, stop and restart systemd units
description:
  - Runs M(ansible.builtin.systemd_service) for each unit, in order.
  - In check mode it also announces units that the node does not have yet because their package is not installed, where
    the builtin module fails.
  - Where a unit does not start, the message ends with the end of its log.
options:
  units:
    description: The units.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the unit.
        type: str
        required: true
      enabled:
        description: Whether it starts at boot; without it that stays as it is.
        type: bool
      state:
        description: What it does now; without it that stays as it is.
        type: str
        choices: [started, stopped, restarted]
  daemon_reload:
    description: Whether systemd reads its units again first.
    type: bool
    default: false
attributes:
  action:
    support: full
    description: The builtin module runs on the node.
  check_mode:
    support: full
    description: Reports what the real run then does.
  diff_mode:
    support: full
    description: One line for each step, such as C(enable docker.service).
seealso:
  - module: ansible.builtin.systemd_service
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Run DCGM
  gpunode.node.unit_states:
    units: "{{ __dcgm_plan.manifest.units }}"
  become: true
"""

RETURN = r"""
units:
  description: What was changed, one line each, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [enable nvidia-dcgm.service, start nvidia-dcgm.service]
"""
