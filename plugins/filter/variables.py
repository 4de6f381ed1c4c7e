"""Typing errors in variables, found against the argument specifications of all roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode import variables
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None

# Set by the roles themselves.
FACTS = (
    *("gpunode_node", "gpunode_apt", "gpunode_plan", "gpunode_apt_planned", "gpunode_reboot_required"),
    *("gpunode_restart_required", "apt_transaction_changed"),
)


def unknown_variables(names: Iterable[str], root: str, sources: Iterable[str] = ()) -> list[str]:
    """One line for each variable that looks like ours and is none: where it is set, and the nearest right name.

    Ours are the options in ``ROOT/roles/*/meta/argument_specs.yml``; it is looked for in the inventory ``sources`` and
    in the variable files beside them.
    """
    if MISSING is not None:
        raise AnsibleFilterError(f"the Python package gpunode is needed on the controller ({MISSING})")
    top = Path(str(root))
    known = (*variables.known_variables(top), *FACTS)
    found = variables.unknown_variables([str(name) for name in names], known, variables.role_prefixes(top))
    places = [str(source) for source in sources]
    return [
        f"{variables.locate(name, places) or 'the variables'}: {name} is no variable of any role"
        + (f", did you mean {near}?" if near else "")
        for name, near in found
    ]


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"unknown_variables": unknown_variables}
