# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Answer one question of a plan without changing the node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_query
short_description: Answer one question of a plan
description:
  - Returns information that a plan (M(gpunode.node.role_plan)) needs and that M(gpunode.node.node_state) does not
    collect. Simulates apt or dnf in a private folder, fetches and verifies a key, validates rules with nft, inspects
    disks, reads the effective configuration of sshd, or reads files.
  - Changes nothing on the node.
options:
  kind:
    description: Kind of the question.
    type: str
    choices:
      - apt_preview
      - block_devices
      - dnf_preview
      - nft_check
      - package_offers
      - repository_key
      - signing_key
      - contents
      - ssh_login
    required: true
  question:
    description: The question, in the format of its O(kind).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: The module only reads.
  diff_mode:
    support: none
    description: Nothing is changed.
author:
  - The gpunode maintainers
"""

EXAMPLES = r"""
- name: Fetch and verify the key of a repository
  gpunode.node.node_query:
    kind: repository_key
    question: "{{ question }}"
  become: true
"""

RETURN = r"""
answer:
  description: The answer as JSON.
  returned: success
  type: str
"""

import json
import signal
from collections.abc import Callable
from typing import Any

from ansible.module_utils.common.respawn import has_respawned, probe_interpreters_for_module, respawn_module
from ansible_collections.gpunode.node.plugins.module_utils import (
    apt_preview,
    block_devices,
    dnf_transaction,
    files_state,
    nft_check,
    package_offers,
    repository_key,
    signing_key,
    ssh_state,
)
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import SIGNALS, leave_orderly
from ansible_collections.gpunode.node.plugins.module_utils.quiet import QuietModule

ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "apt_preview": apt_preview.answered,
    "block_devices": block_devices.answered,
    "dnf_preview": lambda asked: dnf_transaction.answered({**asked, "simulate": True}),
    "nft_check": nft_check.answered,
    "package_offers": package_offers.answered,
    "repository_key": repository_key.answered,
    "signing_key": signing_key.answered,
    "contents": lambda asked: {str(path): files_state.document(str(path)) for path in asked["paths"]},
    "ssh_login": ssh_state.answered,
}
"""Kind of a question to the function that answers it."""
PYTHONS = ("/usr/libexec/platform-python", "/usr/bin/python3")


def main() -> None:
    """Run the module."""
    module = QuietModule(
        argument_spec={
            "kind": {"type": "str", "choices": list(ANSWERS), "required": True},
            "question": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    kind, question = module.params["kind"], module.params["question"]
    for number in SIGNALS:
        signal.signal(number, leave_orderly)
    if kind == "dnf_preview" and dnf_transaction.dnf is None:
        interpreter = None if has_respawned() else probe_interpreters_for_module(PYTHONS, "dnf")
        if interpreter is None:
            module.exit_json(
                changed=False, answer=json.dumps({"error": "dnf 4 has no bindings in any Python of the node"})
            )
        respawn_module(interpreter)
    module.exit_json(changed=False, answer=json.dumps(ANSWERS[kind](question)))


if __name__ == "__main__":
    main()
