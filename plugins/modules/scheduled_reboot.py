# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin scheduled_reboot, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: scheduled_reboot
short_description: Reboot a node, through the scheduler that drained it if it can
description:
  - Works as M(ansible.builtin.reboot). The node has rebooted once its boot id has changed.
  - With O(scheduler), the scheduler is asked for the reboot on the controller, so that it expects it. What it does not
    take is rebooted as by M(ansible.builtin.reboot), and the reason is printed.
  - Fails if it is unknown whether the scheduler took the request, if the request was withdrawn, and if the node did not
    boot in time.
options:
  reboot_timeout:
    description: Seconds within which the node has to boot, and to answer.
    type: int
    default: 600
  msg:
    description: Message to users before a reboot over the connection.
    type: str
    default: Reboot initiated by Ansible
  scheduler:
    description: What drained the node, as of C(gpunode upgrade --scheduler).
    type: str
    default: none
  token:
    description: Token of the drain.
    type: str
attributes:
  action:
    support: full
    description: The scheduler is asked on the controller.
  check_mode:
    support: full
    description: Reports a reboot, and does not ask for it.
  diff_mode:
    support: none
    description: A reboot has no difference to show.
requirements:
  - The Python package gpunode on the controller.
seealso:
  - module: ansible.builtin.reboot
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Reboot a node that Slurm drained
  gpunode.node.scheduled_reboot:
    scheduler: slurm
    token: gpunode-upgrade-0123456789ab
    reboot_timeout: 1200
  become: true
"""

RETURN = r"""
rebooted:
  description: Whether the node was rebooted.
  returned: always
  type: bool
elapsed:
  description: Seconds that the reboot took.
  returned: always
  type: int
"""
