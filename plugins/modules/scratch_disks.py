# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Make one file system of disks, or give them back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: scratch_disks
short_description: Make one file system of disks, or give them back
description:
  - Makes XFS on one disk, or on a RAID 0 array of several. Disks are named by their ids below C(/dev/disk/by-id).
  - A disk that is mounted, swap, held by LVM, an array or another program, or named in C(/etc/fstab) is refused. One
    that carries a signature, partitions or data of an unknown kind is refused unless O(erase) names it.
  - All disks are looked at before the first one is written to.
options:
  state:
    description: V(absent) stops the array and erases those of the disks that O(erase) names; others keep their data.
    type: str
    choices: [present, absent]
    default: present
  disks:
    description: Ids of whole disks.
    type: list
    elements: str
    required: true
  name:
    description: Name of the array.
    type: str
    default: gpunode-scratch
  array:
    description: UUID of the array. Without it the file system is on the only disk.
    type: str
  filesystem:
    description: UUID of the file system.
    type: str
    required: true
  erase:
    description: Ids of disks that may be erased.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Reports what would be done.
  diff_mode:
    support: full
    description: Shows what is done, one line each.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Create a file system on an empty disk
  gpunode.node.scratch_disks:
    disks: [nvme-eui.0025388b71b2c0d1]
    filesystem: 7f6a1c2e-8d3b-5a55-9d0e-4a1b2c3d4e5f
  become: true
"""

RETURN = r"""
steps:
  description: What was done, or would be.
  returned: success
  type: list
  elements: str
  sample: [create the file system on /dev/nvme1n1]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils import scratch_disks
from ansible_collections.gpunode.node.plugins.module_utils.block_devices import DiskError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "disks": {"type": "list", "elements": "str", "required": True},
            "name": {"type": "str", "default": "gpunode-scratch"},
            "array": {"type": "str"},
            "filesystem": {"type": "str", "required": True},
            "erase": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    act = scratch_disks.made if module.params["state"] == "present" else scratch_disks.given_back
    try:
        steps = act(module.params, pretend=module.check_mode)
    except (DiskError, OSError, ValueError) as err:
        module.fail_json(msg=" ".join(str(err).split()))
    shown = {"before": "", "after": "".join(f"{step}\n" for step in steps)}
    module.exit_json(changed=bool(steps), steps=steps, diff=[shown] if module._diff and steps else [])


if __name__ == "__main__":
    main()
