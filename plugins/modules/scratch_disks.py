# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Create one file system on scratch disks, or release the disks."""

from __future__ import annotations

DOCUMENTATION = r"""
module: scratch_disks
short_description: Create one file system on scratch disks, or release the disks
description:
  - Creates an XFS file system on one disk, or on a RAID 0 array of several disks. Disks are named by their ids below
    C(/dev/disk/by-id).
  - Refuses a disk that is mounted, is swap, is held by LVM, an array or another program, or appears in C(/etc/fstab).
    Refuses a disk with a signature, partitions or data of an unknown kind unless O(erase) lists it.
  - Refuses to create the file system again where one was, for instance with a damaged superblock, unless O(erase) lists
    all disks. The message contains the commands that repair it.
  - Checks all disks before it writes to the first one.
options:
  state:
    description: V(absent) stops the array and erases the disks that O(erase) lists. Other disks keep their data.
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
    description: UUID of the array. Without it, the file system is created on the only disk.
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
  used:
    description: >-
      Whether the file system was created on these disks before. It is then created again only if O(erase) lists all
      disks, also where it cannot be found.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Reports what would be done.
  diff_mode:
    support: full
    description: Shows each step as one line.
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
  description: Steps that were done, or would be done in check mode.
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
            "used": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    act = scratch_disks.made if module.params["state"] == "present" else scratch_disks.released
    try:
        steps = act(module.params, check=module.check_mode)
    except (DiskError, OSError, ValueError) as err:
        module.fail_json(msg=" ".join(str(err).split()))
    shown = {"before": "", "after": "".join(f"{step}\n" for step in steps)}
    module.exit_json(changed=bool(steps), steps=steps, diff=[shown] if module._diff and steps else [])


if __name__ == "__main__":
    main()
