"""Puts the Ansible half into the wheel, as the collection gpunode.node inside the package."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTENT = ("ansible.cfg", "galaxy.yml", "meta", "playbooks", "plugins", "roles")


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """An editable install reads the checkout itself; a copy beside it would go stale."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        inside = "gpunode/ansible_collections/gpunode/node"
        build_data["force_include"].update({name: f"{inside}/{name}" for name in CONTENT})
