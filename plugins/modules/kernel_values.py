# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Set values of the running kernel, and restore them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_values
short_description: Set values of the running kernel, and restore them
description:
  - Writes settings below C(/proc/sys) and C(/sys/kernel/mm) of the running kernel. For the files that are read at
    boot, use M(gpunode.node.managed_files).
  - Records the values from before the first change. A setting that is removed from O(values) is restored to its
    recorded value. An empty O(values) restores all settings.
  - A setting that the kernel does not have or refuses is reported as a warning. The other settings are set.
options:
  values:
    description: Path of a setting to its value. Several numbers are separated by one blank.
    type: dict
    default: {}
  memory:
    description: File on the node that records the values from before the first change.
    type: path
    required: true
attributes:
  check_mode:
    support: full
    description: Reports and shows what would change.
  diff_mode:
    support: full
    description: Shows each value before and after the change.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Reduce swapping
  gpunode.node.kernel_values:
    values:
      /proc/sys/vm/swappiness: "10"
    memory: /var/lib/example/before.json
  become: true
"""

RETURN = r"""
refused:
  description: Settings that the kernel does not have or refused, one line each.
  returned: success
  type: list
  elements: str
  sample: ["/proc/sys/vm/swap: the kernel has no such setting"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils import kernel_state
from ansible_collections.gpunode.node.plugins.module_utils.kernel_state import KernelChangeRefusedError


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "values": {"type": "dict", "default": {}},
            "memory": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    wanted = {str(path): str(value) for path, value in module.params["values"].items()}
    try:
        diffs, refused = kernel_state.applied(wanted, module.params["memory"], check=module.check_mode)
    except (KernelChangeRefusedError, OSError) as err:
        module.fail_json(msg=" ".join(str(err).split()))
    for line in refused:
        module.warn(line)
    shown = [
        {
            "before_header": diff["path"],
            "after_header": diff["path"],
            "before": f"{diff['before']}\n",
            "after": f"{diff['after']}\n",
        }
        for diff in diffs
    ]
    module.exit_json(changed=bool(diffs), refused=refused, diff=shown if module._diff else [])


if __name__ == "__main__":
    main()
