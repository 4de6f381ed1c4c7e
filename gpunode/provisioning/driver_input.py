"""Input of the driver's plans on every system, with any package manager."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.facts.node import Kernel
from gpunode.stack import Stack, installed_closure, releases_from


@dataclass(frozen=True)
class DriverInput:
    """A node, its stack and the role's settings; ``answer`` is the package manager's preview, if it was requested."""

    node: NodeFacts
    stack: Stack
    settings: Mapping[str, Any]
    answer: Mapping[str, Any]

    @cached_property
    def installed(self) -> dict[str, Any]:
        """Return every installed package of a driver closure, of any publisher, by name."""
        return installed_closure(self.node, load())

    @cached_property
    def own(self) -> dict[str, str]:
        """Return installed packages of the closure from the stack's source: name to release."""
        return releases_from(self.stack.source, self.installed)

    @property
    def foreign(self) -> list[str]:
        """Return installed packages of a closure from another source."""
        return sorted(self.installed.keys() - self.own.keys())

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Return kernels that come from packages; a container's kernel does not."""
        return [kernel for kernel in self.node.kernels or () if kernel.package]

    @property
    def precompiled(self) -> bool:
        """Return whether the modules are prebuilt and signed."""
        return self.stack.module.build == "precompiled"

    @property
    def target(self) -> str | None:
        """Return the release; None if only the repository can decide it and was not queried yet."""
        if self.answer.get("target"):
            return str(self.answer["target"])
        return self.stack.driver.version if self.stack.driver.decided_by != "repository" else None
