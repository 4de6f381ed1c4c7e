"""Filters of the role nvidia_container_toolkit; what they decide is in gpunode.provisioning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleFilterError

try:
    from gpunode.errors import GpunodeError
    from gpunode.provisioning import cdi, containerd, toolkit
    from gpunode.provisioning.documents import node_of
    from gpunode.provisioning.engines import EngineSupport, engines_before_cdi_07
    from gpunode.variables import plain
except ImportError as err:
    MISSING: str | None = str(err)
else:
    MISSING = None


def answered(decide: Callable[[], Any]) -> Any:
    """Return what ``decide`` does, with its errors as Ansible's."""
    if MISSING is not None:
        raise AnsibleFilterError(
            f"the Python package gpunode is needed on the controller ({MISSING}): "
            "install it into the environment that ansible-playbook runs from, with pip install gpunode"
        )
    try:
        return decide()
    except GpunodeError as err:
        raise AnsibleFilterError(str(err)) from None


def toolkit_wish(version: str, installed: Any, planned: Any) -> dict[str, Any]:
    """Return ``toolkit_request`` as a document."""
    found = asdict(answered(lambda: toolkit.toolkit_request(version, plain(installed), plain(planned))))
    return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}


def support(engine: Mapping[str, Any]) -> EngineSupport:
    """Return what the filter container_engine told, as a type."""
    return EngineSupport(engine["version"], engine["cdi"], engine["additional_gids"])


def toolkit_daemon(
    engine: Mapping[str, Any], cdi_on: bool, default_runtime: bool, cgroup_driver: str | None, present: Any
) -> dict[str, Any]:
    """Return ``toolkit_daemon`` for an engine as the filter container_engine describes it."""
    keys: dict[str, Any] = answered(
        lambda: toolkit.toolkit_daemon(support(engine), cdi_on, default_runtime, cgroup_driver, plain(present))
    )
    return keys


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name to function."""
        return {
            "toolkit_wish": toolkit_wish,
            "toolkit_daemon": toolkit_daemon,
            "needs_old_cdi": lambda engines: answered(
                lambda: engines_before_cdi_07({name: support(each) for name, each in engines.items()})
            ),
            "cdi_refresh_env": lambda text, old: answered(lambda: asdict(cdi.refresh_environment(text, old))),
            "containerd_config": lambda text: answered(lambda: containerd.containerd_config(text)),
            "cdi_refresh_reason": lambda facts, output=None: answered(
                lambda: cdi.refresh_reason(node_of(facts), output or cdi.SPECIFICATION)
            ),
        }
