# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Answer one question of a plan without changing the node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_query
short_description: Answer one question of a plan
description:
  - Returns information that a plan (M(gpunode.node.role_plan)) needs and that M(gpunode.node.node_state) does not
    collect. Simulates apt or dnf in a private folder, fetches a key, validates rules with nft, inspects
    disks, reads the effective configuration of sshd, or reads files.
  - Changes nothing on the node.
options:
  kind:
    description: Kind of the question.
    type: str
    choices:
      - block_devices
      - nft_check
      - package_offers
      - package_transaction
      - signing_key
      - contents
      - ssh_login
    required: true
  question:
    description: >-
      The question, in the format of its O(kind); for V(package_transaction) the options of
      M(gpunode.node.package_transaction), which is simulated.
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
- name: Fetch the key of a repository
  gpunode.node.node_query:
    kind: signing_key
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

from ansible_collections.gpunode.node.plugins.module_utils import (
    block_devices,
    files_state,
    nft_check,
    package_engine,
    package_offers,
    signing_key,
    ssh_state,
)
from ansible_collections.gpunode.node.plugins.module_utils.apt_private import SIGNALS, leave_orderly
from ansible_collections.gpunode.node.plugins.module_utils.quiet import QuietModule

ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "block_devices": block_devices.answered,
    "nft_check": nft_check.answered,
    "package_offers": package_offers.answered,
    "package_transaction": lambda question: package_engine.answered(question, simulate=True),
    "signing_key": signing_key.answered,
    "contents": lambda question: {str(path): files_state.document(str(path)) for path in question["paths"]},
    "ssh_login": ssh_state.answered,
}
"""Kind of a question to the function that answers it."""


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
    module.exit_json(changed=False, answer=json.dumps(ANSWERS[kind](question)))


if __name__ == "__main__":
    main()
