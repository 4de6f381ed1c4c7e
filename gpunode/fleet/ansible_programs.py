"""Read an inventory and settings of Ansible in one start of Python: most of the cost of each is importing what both
share.

Run as a program by the interpreter in the environment where Ansible is installed; an argument is the folder of packages
in which Ansible is. stdin has a JSON object:

- ``listing``: the command line of ``ansible-inventory``, or null
- ``settings``: a list of ``[section, kind, plugin, names]``, kind and plugin null for Ansible's own settings

stdout gets ``{"listing": [exit code, stdout, stderr], "settings": {"section.name": value}, "error": null}``. Settings
at their default are omitted, as in ``ansible-config dump --only-changed``; ``error`` is why they cannot be read.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def listing(argv: list[str]) -> tuple[int, str, str]:
    """Run ``ansible-inventory`` in this process; return its exit code, its stdout and its stderr."""
    run = importlib.import_module("ansible.cli.inventory").main
    code: object = 0
    with redirected(1) as stdout, redirected(2) as stderr:
        try:
            run(argv)
        except SystemExit as end:
            code = end.code
    return code if isinstance(code, int) else int(code is not None), text(stdout), text(stderr)


@contextmanager
def redirected(stream: int) -> Iterator[int]:
    """Redirect a stream to a file in memory; yield its descriptor."""
    kept, memory = os.dup(stream), os.memfd_create(str(stream))
    os.dup2(memory, stream)
    try:
        yield memory
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept, stream)
        os.close(kept)


def text(descriptor: int) -> str:
    """Return the content of a file in memory."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        return file.read()


def settings(requested: Iterable[tuple[str, str | None, str | None, list[str]]]) -> dict[str, Any]:
    """Return the settings that are not at their default, found as ``ansible-config dump`` finds them."""
    constants = importlib.import_module("ansible.constants")
    loaders = importlib.import_module("ansible.plugins.loader")
    config = constants.config
    known = {name: getattr(constants, name) for name in dir(constants) if not name.startswith("__")}
    changed = {}
    for section, kind, plugin, names in requested:
        if kind:
            # Loading a plugin adds its settings to the configuration.
            getattr(loaders, f"{kind}_loader").get(plugin, class_only=True)
        # All settings of a plugin: a value of another type is refused, also for one that was not requested.
        for name in config.get_configuration_definitions(kind, plugin) if kind else names:
            value, origin = config.get_config_value_and_origin(
                name, plugin_type=kind, plugin_name=plugin, variables=known
            )
            if name in names and origin not in ("default", "REQUIRED", None):
                changed[f"{section}.{name}"] = value
    return changed


def main() -> None:
    """Answer the request on stdin."""
    # The program ends before garbage collection pays off.
    gc.disable()
    sys.path += [folder for folder in sys.argv[1:] if folder not in sys.path]
    request = json.load(sys.stdin)
    answer: dict[str, Any] = {"listing": None, "settings": {}, "error": None}
    importlib.import_module("ansible.cli")  # it reports a configuration that cannot be read
    errors = importlib.import_module("ansible.errors")
    if request["listing"]:
        answer["listing"] = listing(request["listing"])
    else:
        importlib.import_module("ansible.plugins.loader").init_plugin_loader()
    try:
        answer["settings"] = settings(request["settings"])
    except errors.AnsibleError as err:
        answer["error"] = str(err)
    json.dump(answer, sys.stdout, default=str)


if __name__ == "__main__":
    main()
