"""A module that answers without its arguments."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule


# Ansible has no types: for mypy its class is Any.
class QuietModule(AnsibleModule):  # type: ignore[misc]
    """A module that gets contents of files as arguments.

    Ansible's modules return their arguments, and ``-vvv`` prints all that a module returns, also with ``no_log``: the
    log of a job would have the password of a proxy.
    """

    def exit_json(self, **answer: Any) -> NoReturn:
        """Return the answer, without the arguments."""
        super().exit_json(**{"invocation": {}, **answer})
        sys.exit(0)

    def fail_json(self, msg: str, **answer: Any) -> NoReturn:
        """Return a failure, without the arguments."""
        super().fail_json(msg, **{"invocation": {}, **answer})
        sys.exit(1)
