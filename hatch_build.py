"""Puts the Ansible half into the wheel, as the collection gpunode.node beside the package.

Ansible searches the folders of sys.path for collections, so its own programs find it in the virtual environment.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTENT = ("ansible.cfg", "galaxy.yml", "inventory", "meta", "playbooks", "plugins", "roles")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install reads the checkout itself; a copy beside it would go stale."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        inside = "ansible_collections/gpunode/node"
        build_data["force_include"].update({name: f"{inside}/{name}" for name in CONTENT})
        build_data["force_include"]["requirements.lock"] = "gpunode/requirements.lock"
