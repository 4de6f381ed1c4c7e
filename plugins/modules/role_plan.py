# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin role_plan, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: role_plan
short_description: Compute what a role of this collection changes on a node
description:
  - Computes the manifest of a role from the role's variables and from what is known of the node. It looks at the node
    (M(gpunode.node.node_state)) where nothing is known yet, and again after a plan that was due.
  - Fails with all reasons why the node must not be changed, in one message. Notes are printed as warnings.
  - Runs on the controller and changes nothing on the node. A plan of which everything is settled runs no module.
options:
  role:
    description: Name of the role without the name of the collection.
    type: str
    required: true
  settings:
    description: Values that win over the role's variables, by the names of the variables.
    type: dict
    default: {}
  refuse:
    description:
      - Whether reasons why the node must not be changed fail the task. With V(false) they are warnings, the node is not
        checked by preflight, and the plan is never due; its RV(reboot_reasons) count.
    type: bool
    default: true
attributes:
  action:
    support: full
    description: The plan is computed on the controller.
  check_mode:
    support: full
    description: The plan is the same; in check mode it starts from what the roles before would have done.
  diff_mode:
    support: none
    description: Nothing is changed.
notes:
  - With C(gpunode_force=true) every plan is due.
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
  ansible.builtin.include_tasks: change.yml
  when: __docker_plan.due
"""

RETURN = r"""
due:
  description: Whether the node differs from the manifest, or C(gpunode_force) is set.
  returned: success
  type: bool
due_reasons:
  description: Why, one line each.
  returned: success
  type: list
  elements: str
  sample: [libcuda1 is not held]
manifest:
  description: The manifest, with C(files), C(folders), C(packages), C(units) and C(values).
  returned: success
  type: dict
reboot_reasons:
  description: Why the node has to be rebooted, one line each.
  returned: success
  type: list
  elements: str
"""
