# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin role_plan, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: role_plan
short_description: Compute what a role of this collection changes on a node
description:
  - Computes the manifest of a role from the role's variables and the state of the node. The state is collected with
    M(gpunode.node.node_state) if it is not known yet, and again after a plan with pending changes.
  - If the node must not be changed, fails with all reasons in one message. Notes are printed as warnings.
  - Runs on the controller and changes nothing on the node. It runs no module on the node if the state is known and
    the plan has no questions.
options:
  role:
    description: Name of the role, without the collection name.
    type: str
    required: true
  settings:
    description: Values that take precedence over the role's variables, by variable name.
    type: dict
    default: {}
  refuse:
    description:
      - Whether the task fails if the node must not be changed. With V(false), the reasons are warnings, preflight does
        not check the node, and the plan has no pending changes. Its RV(reboot_reasons) are still recorded.
    type: bool
    default: true
  fresh:
    description: Collect the state of the node again, even if it is known.
    type: bool
    default: false
  unchanged:
    description:
      - Whether no task changed the node since the plan before this one, which had pending changes. The state is not
        collected again then, unless a module of this collection made a change.
    type: bool
    default: false
  problems:
    description: Field of RV(manifest)'s C(result). What it reports fails the task, except in check mode.
    type: str
  begin:
    description:
      - The first plan of a role in a run. It is skipped if no tag of the role is selected. If the site has tasks before
        the role, RV(tasks) has them, and the plan is computed after them.
    type: bool
    default: false
attributes:
  action:
    support: full
    description: The plan is computed on the controller.
  check_mode:
    support: full
    description: Computes the same plan. In check mode it includes the changes that earlier roles would have made.
  diff_mode:
    support: none
    description: Nothing is changed.
notes:
  - With C(gpunode_force=true), the changes of every plan are pending.
requirements:
  - The Python package gpunode on the controller.
seealso:
  - module: gpunode.node.managed_files
  - module: gpunode.node.package_transaction
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Plan the container engine
  gpunode.node.role_plan:
    role: docker
  become: true
  register: __docker_plan

- name: Change the container engine
  ansible.builtin.include_tasks: "{{ item }}"
  loop: "{{ __docker_plan.tasks }}"
"""

RETURN = r"""
pending:
  description: Whether the node differs from the manifest, or C(gpunode_force) is set.
  returned: success
  type: bool
pending_reasons:
  description: Differences between the node and the manifest, one line each.
  returned: success
  type: list
  elements: str
  sample: [libcuda1 is not held]
manifest:
  description: The manifest, with C(files), C(folders), C(packages), C(units) and C(result).
  returned: success
  type: dict
reboot_reasons:
  description: Why the node has to be rebooted, one line each.
  returned: success
  type: list
  elements: str
own_tasks:
  description: File with the role's own tasks, for a removal.
  returned: success
  type: str
settings:
  description: O(settings), for a later plan of the same role.
  returned: success
  type: dict
tasks:
  description:
    - Files of tasks to include, in this order. The role's own are among them if changes are pending, and the site's
      (C(ROLE_tasks_before), C(ROLE_tasks_after)) always.
  returned: success
  type: list
  elements: str
"""
