"""What the plans of the driver read on every system, whatever manages the packages."""

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
    """A node, its stack and the role's settings; ``answer`` is the package manager's preview, where it was asked."""

    node: NodeFacts
    stack: Stack
    settings: Mapping[str, Any]
    answer: Mapping[str, Any]

    @cached_property
    def installed(self) -> dict[str, Any]:
        """Every installed package of a driver closure, whoever published it, by name."""
        return installed_closure(self.node, load())

    @cached_property
    def own(self) -> dict[str, str]:
        """Installed packages of the closure from the stack's source: name to release."""
        return releases_from(self.stack.source, self.installed)

    @property
    def strangers(self) -> list[str]:
        """Installed packages of a closure from another source."""
        return sorted(self.installed.keys() - self.own.keys())

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Kernels that come from packages; a container's is none of them."""
        return [kernel for kernel in self.node.kernels or () if kernel.package]

    @property
    def precompiled(self) -> bool:
        """Whether the modules come built and signed."""
        return self.stack.module.build == "precompiled"

    @property
    def target(self) -> str | None:
        """The release; None where only the repository can say and was not asked yet."""
        if self.answer.get("target"):
            return str(self.answer["target"])
        return self.stack.driver.version if self.stack.driver.decided_by != "repository" else None
