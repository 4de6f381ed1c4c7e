"""Functions of gpunode.provisioning as Ansible plugins: one test for the package, one translation of errors."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError


def missing(err: ImportError) -> str:
    """Return the message for a controller without the package gpunode or one of its requirements."""
    return (
        f"the Python package gpunode is required on the controller ({err}): "
        "install it into the environment that ansible-playbook runs from, with pip install gpunode"
    )


def room(name: str) -> ModuleType:
    """Return a module of the package gpunode. Raise AnsibleError if the controller lacks the package."""
    try:
        return import_module(f"gpunode.{name}")
    except ImportError as err:
        raise AnsibleError(missing(err)) from None


def registered(module: str, *names: str) -> dict[str, Callable[..., Any]]:
    """Return functions of ``gpunode.provisioning.MODULE`` as filters, by name."""
    return {name: _filter(module, name) for name in names}


def _filter(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        policy = getattr(room(f"provisioning.{module}"), name)
        error: type[Exception] = room("errors").GpunodeError
        try:
            return policy(*args, **kwargs)
        except error as err:
            raise AnsibleFilterError(str(err)) from None

    call.__name__ = name
    return call
