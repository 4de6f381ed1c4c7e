# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Bring many files and folders to the state that they have to have."""

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_files
short_description: Bring many files and folders to the state that they have to have
description:
  - Writes, changes and removes files, each through a temporary file beside it and one rename, in the order in which
    they are given. A file that is as it has to be is not touched.
  - All files are validated before the first one is changed.
options:
  files:
    description: The files.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: str
        required: true
      content:
        description: Text of the file. Without it the file is removed.
        type: str
      encoding:
        description: How O(files[].content) stands for the bytes of the file.
        type: str
        choices: [utf-8, base64]
        default: utf-8
      mode:
        description: Mode in octal digits.
        type: str
        default: "0644"
      owner:
        description: Name of the owner.
        type: str
        default: root
      group:
        description: Name of the group.
        type: str
        default: root
      phase:
        description: Word by which O(phase) selects files.
        type: str
      validate_with:
        description: Command that must accept the file; C(%s) is the path of the temporary file.
        type: list
        elements: str
      backup:
        description: Keep a copy of the file that was there, as C(PATH.TIME~).
        type: bool
        default: false
      expect_sha256:
        description: >-
          Digest that the file must have, or C(absent): the content was computed from that file. Otherwise nothing is
          changed and the module fails.
        type: str
      private:
        description: The content is in no diff.
        type: bool
        default: false
  folders:
    description: The folders. Those that have to be there are made first, those that have to go are removed last.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: str
        required: true
      state:
        description: V(absent_if_empty) removes the folder where nothing is in it.
        type: str
        choices: [present, absent_if_empty]
        default: present
      mode:
        description: Mode in octal digits.
        type: str
        default: "0755"
      phase:
        description: Word by which O(phase) selects folders.
        type: str
  phase:
    description: Only entries with this word, and those without one, count.
    type: str
attributes:
  check_mode:
    support: full
    description: Reports and shows what would be changed.
  diff_mode:
    support: full
    description: Shows each change of a content, mode or owner.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Keep nouveau off the GPU, and set no options of the modules
  gpunode.node.managed_files:
    files:
      - path: /etc/modprobe.d/gpunode-nouveau.conf
        content: "blacklist nouveau\n"
      - path: /etc/modprobe.d/gpunode-nvidia.conf
  become: true
"""

RETURN = r"""
changed_paths:
  description: Files and folders that were changed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [/etc/modprobe.d/gpunode-nouveau.conf]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils import managed
from ansible_collections.gpunode.node.plugins.module_utils.managed import FileRefusedError

FILE = {
    "path": {"type": "str", "required": True},
    "content": {"type": "str"},
    "encoding": {"type": "str", "choices": ["utf-8", "base64"], "default": "utf-8"},
    "mode": {"type": "str", "default": "0644"},
    "owner": {"type": "str", "default": "root"},
    "group": {"type": "str", "default": "root"},
    "phase": {"type": "str"},
    "validate_with": {"type": "list", "elements": "str"},
    "backup": {"type": "bool", "default": False},
    "expect_sha256": {"type": "str"},
    "private": {"type": "bool", "default": False},
}
FOLDER = {
    "path": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent_if_empty"], "default": "present"},
    "mode": {"type": "str", "default": "0755"},
    "phase": {"type": "str"},
}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "default": [], "options": FILE},
            "folders": {"type": "list", "elements": "dict", "default": [], "options": FOLDER},
            "phase": {"type": "str"},
        },
        supports_check_mode=True,
    )
    wanted = (None, module.params["phase"])
    files, folders = (
        [one for one in module.params[name] if module.params["phase"] is None or one["phase"] in wanted]
        for name in ("files", "folders")
    )
    try:
        paths, diff = managed.brought_about(files, folders, pretend=module.check_mode)
    except (FileRefusedError, OSError) as err:
        module.fail_json(msg=" ".join(str(err).split()))
    # With `diff: false` on the task no diff is to be shown.
    module.exit_json(changed=bool(paths), changed_paths=paths, diff=diff if module._diff else [])


if __name__ == "__main__":
    main()
