"""Import the package gpunode before ansible-playbook forks, so that no worker imports it again for each task."""

from __future__ import annotations

import gc
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: preload
type: aggregate
short_description: Import gpunode once
description:
  - Ansible runs each task in a process of its own. Without this callback, the first plugin of the collection in each
    process imports the Python package C(gpunode) and reads its catalog. With it, the main process does so once, and
    all task processes inherit the result, which their garbage collection leaves alone.
  - Without the package this callback does nothing; the plugins that need the package report that it is missing.
author: gpunode
requirements:
  - enable in configuration
"""


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """The callback plugin: imports the package at the start of a playbook and prints nothing."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "gpunode.node.preload"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, _: object) -> None:
        """Import the package and read the catalog before the first task."""
        if find_spec("gpunode") is None:
            return
        gc.disable()
        try:
            load()
            gc.freeze()  # A collection in a task process would copy the pages of all objects that it inherited.
        finally:
            gc.enable()


def load() -> None:
    """Import all policies, and read what they use."""
    for policy in iter_modules(import_module("gpunode.provisioning").__path__):
        import_module(f"gpunode.provisioning.{policy.name}")
    rows = import_module("gpunode.catalog").load()
    for section in import_module("gpunode.catalog.catalog").MODELS:
        rows.rows(section)
    import_module("gpunode.catalog.origins").table()
    import_module("gpunode.provisioning.templates").preload()
    for module, model in (("facts", "NodeFacts"), ("stack", "Stack")):
        getattr(import_module(f"gpunode.{module}"), model).model_rebuild()
