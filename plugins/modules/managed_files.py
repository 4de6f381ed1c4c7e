# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Write, change and remove many files and folders."""

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_files
short_description: Write, change and remove many files and folders
description:
  - Writes, changes and removes files in the given order, each through a temporary file in the same folder and one
    rename. A file that already has the requested state is not touched.
  - Validates all files before it changes the first one.
options:
  files:
    description: Files to write or remove.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: str
        required: true
      content:
        description: Content of the file. Without it, the file is removed.
        type: str
      encoding:
        description: Encoding of O(files[].content).
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
        description: Label by which O(phase) selects files.
        type: str
      validate_with:
        description: Command that must accept the file; C(%s) is the path of the temporary file.
        type: list
        elements: str
      backup:
        description: Keep a copy of the old file as C(PATH.TIME~).
        type: bool
        default: false
      expect_sha256:
        description: >-
          SHA-256 of the existing file from which the content was computed, or C(absent). If the file differs, nothing
          is changed and the module fails.
        type: str
      private:
        description: Leave the content out of diffs.
        type: bool
        default: false
  folders:
    description: Folders to create or remove. Folders are created before all files and removed after them.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Absolute path.
        type: str
        required: true
      state:
        description: V(absent_if_empty) removes the folder if it is empty.
        type: str
        choices: [present, absent_if_empty]
        default: present
      mode:
        description: Mode in octal digits.
        type: str
        default: "0755"
      phase:
        description: Label by which O(phase) selects folders.
        type: str
  phase:
    description: Process only entries with this label and entries without a label.
    type: str
attributes:
  check_mode:
    support: full
    description: Reports and shows what would change.
  diff_mode:
    support: full
    description: Shows each change of content, mode or owner.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Blacklist nouveau and remove a file of module options
  gpunode.node.managed_files:
    files:
      - path: /etc/modprobe.d/gpunode-nouveau.conf
        content: "blacklist nouveau\n"
      - path: /etc/modprobe.d/gpunode-nvidia.conf
  become: true
"""

RETURN = r"""
changed_paths:
  description: Files and folders that were changed, or would change in check mode.
  returned: success
  type: list
  elements: str
  sample: [/etc/modprobe.d/gpunode-nouveau.conf]
"""

from ansible_collections.gpunode.node.plugins.module_utils import managed
from ansible_collections.gpunode.node.plugins.module_utils.managed import FileRefusedError
from ansible_collections.gpunode.node.plugins.module_utils.quiet import QuietModule


def main() -> None:
    """Run the module."""
    module = QuietModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "default": [], "options": managed.FILE_OPTIONS},
            "folders": {"type": "list", "elements": "dict", "default": [], "options": managed.FOLDER_OPTIONS},
            "phase": {"type": "str"},
        },
        supports_check_mode=True,
    )
    wanted = (None, module.params["phase"])
    files, folders = (
        [entry for entry in module.params[name] if module.params["phase"] is None or entry["phase"] in wanted]
        for name in ("files", "folders")
    )
    try:
        paths, diff = managed.applied(files, folders, check=module.check_mode)
    except (FileRefusedError, OSError) as err:
        module.fail_json(msg=" ".join(str(err).split()))
    # A task with `diff: false` shows no diff.
    module.exit_json(changed=bool(paths), changed_paths=paths, diff=diff if module._diff else [])


if __name__ == "__main__":
    main()
