"""Typing errors in variables, found against the argument specifications of all roles."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

# Set by the roles themselves, by the playbooks and by the lab.
FACTS = {"gpunode_node", "gpunode_apt", "gpunode_reboot_required", "gpunode_hosts", "gpunode_lab"}
VARIABLE_FILES = ("*.yml", "*.yaml", "*.ini", "hosts", "group_vars/**/*", "host_vars/**/*")
# Nearer than this, a name is taken for a slip of the keyboard and not for somebody else's variable.
SLIP = 0.88


def unknown_variables(names: Iterable[str], roles: str, folders: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Variables that look like ours and are none: ``[{name, nearest, files}]``.

    Ours are the options in ``ROLES/*/meta/argument_specs.yml``. A name looks like ours where it begins as they do,
    or is a slip away from one. ``nearest`` is None where nothing is near; ``files`` below ``folders`` set it.
    """
    specs = [yaml.safe_load(path.read_text()) for path in sorted(Path(roles).glob("*/meta/argument_specs.yml"))]
    entries = [entry for spec in specs for entry in spec["argument_specs"].values()]
    valid = sorted({option for entry in entries for option in entry.get("options", {})} | FACTS)
    ours = ("gpunode_", *(f"{path.name}_" for path in sorted(Path(roles).iterdir()) if path.is_dir()))
    wrong = []
    for name in sorted({str(name) for name in names} - set(valid)):
        if re.match(r"_|ansible_", name):
            continue
        near = difflib.get_close_matches(name, valid, n=1, cutoff=0.6 if name.startswith(ours) else SLIP)
        if near or name.startswith(ours):
            files = _files_that_set(name, [Path(str(folder)) for folder in folders])
            wrong.append({"name": name, "nearest": near[0] if near else None, "files": files})
    return wrong


def _files_that_set(name: str, folders: Iterable[Path]) -> list[str]:
    """Inventory and variable files in which a line begins to set ``name``, or sets it beside a host."""
    line = re.compile(rf"(?m)(^|\s)[\"']?{re.escape(name)}[\"']?\s*[:=]")
    paths = sorted({path for folder in folders for pattern in VARIABLE_FILES for path in folder.glob(pattern)})
    return [str(path) for path in paths if path.is_file() and line.search(path.read_text(errors="replace"))]


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {"unknown_variables": unknown_variables}
