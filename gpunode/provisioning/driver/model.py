"""The driver on a node: its settings, the package manager's answer, and the plan that both package managers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import Field, ValidationError

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.facts.packages import Kernel
from gpunode.frozen import Frozen, invalid_field
from gpunode.provisioning.manifest import UnitState
from gpunode.provisioning.role import PackageSettings, Value, option
from gpunode.provisioning.running_driver import (
    FABRIC_MANAGER,
    IMEX,
    STOPPABLE,
    gpus_in_use,
    imex_version,
    manager_version,
)
from gpunode.provisioning.state import NodeState
from gpunode.provisioning.transaction import RELEASE, Preview, Transaction
from gpunode.stack import TOGETHER, Stack, driver_names, installed_closure, releases_from
from gpunode.stack.model import InstalledPackage

DAEMON = "nvidia-persistenced"
PREVIEW_LIMIT_S = 900
MEMORY = "/var/lib/gpunode/nvidia_driver/packages-before"


class DriverSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): the driver is installed, matched and held. V(absent): everything that this role deployed is "
        "removed.",
    )
    source: Literal["auto", "nvidia", "ubuntu", "debian"] = option(
        "auto",
        "Where the driver comes from: V(nvidia) (NVIDIA's repository), V(ubuntu), V(debian) (their archives), or "
        "V(auto): the source of the installed driver, else NVIDIA's repository.",
    )
    flavour: Literal["auto", "proprietary", "open"] = option(
        "auto",
        "Kernel module: V(proprietary), V(open), or V(auto): what the GPUs need, else the installed one, else the "
        "default of the branch.",
    )
    version: str = option(
        "keep",
        "V(keep) (the installed one; the best match on a bare node), V(lts), V(production), V(newest), a branch "
        "(V(580): an installed release of it stays), V(580-latest) (its newest release), or a release (V(580.95.05)).",
    )
    switch: bool = option(
        False,
        "Whether conflicts may be removed: a driver from another source, mixed sources, foreign holds, a .run "
        "installation.",
    )
    profile: Literal["headless", "full"] = option(
        "headless",
        "V(headless): CUDA, NVML and nvidia-smi without any graphics. V(full): everything, with the X driver and "
        "OpenGL.",
    )
    extra_packages: tuple[str, ...] = option(
        (), "Packages of the driver's own release to install beside the profile's, such as libnvidia-encode1."
    )
    header_packages: tuple[str, ...] = option(
        (),
        "Header packages to install beside those of the installed kernels; for kernels that belong to no package.",
    )
    kernel_policy: Literal["hold", "follow"] = option(
        "hold",
        "With the modules that Ubuntu signs: V(hold) (kernel, modules and driver stay until the driver is changed) or "
        "V(follow) (they follow the updates of the archive together, within the branch).",
    )
    module_options: dict[str, dict[str, Value]] = option(
        {}, "Options of the kernel modules: C({ nvidia: { NVreg_RestrictProfilingToAdminUsers: 0 } })."
    )
    mok_hash: str = option(
        "",
        "With secure boot: output of C(mokutil --generate-hash) for a password; stages the key that signs the modules.",
        no_log=True,
    )
    reload: bool = option(False, "Reload the kernel module if no process uses a GPU, instead of waiting for a reboot.")
    persistence: bool = option(True, "Run the persistence daemon on nodes that have a GPU.")


class Build(Frozen):
    """A module that DKMS has to build."""

    kernel: str
    argv: tuple[str, ...]


class ModuleExchange(Frozen):
    """Arguments of ``driver_exchange``."""

    version: str
    units: tuple[str, ...] = ()
    unit_versions: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class DriverRequest:
    """The driver that a node is to have, and its current one."""

    state: NodeState
    stack: Stack
    settings: DriverSettings
    answer: Preview | None = None
    """None: the package manager was not asked."""

    @property
    def node(self) -> NodeFacts:
        """Return the facts of the node."""
        return self.state.facts

    @property
    def preview(self) -> Preview:
        """Return the answer; an empty one if it was not asked for."""
        return self.answer or Preview()

    @cached_property
    def installed(self) -> dict[str, InstalledPackage]:
        """Return every installed package of a driver closure, of any publisher, by name."""
        return installed_closure(self.node, load())

    @cached_property
    def of_stack(self) -> dict[str, str]:
        """Return installed packages of the closure from the stack's source: name to release."""
        return releases_from(self.stack.source, self.installed)

    @property
    def foreign(self) -> list[str]:
        """Return installed packages of a closure from another source."""
        return sorted(self.installed.keys() - self.of_stack.keys())

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
        return self.preview.target or (
            self.stack.driver.version if self.stack.driver.decided_by != "repository" else None
        )

    @property
    def constraint(self) -> str:
        """Return the release, or the shell pattern of releases if it is not known yet."""
        return self.target or self.stack.driver.constraint

    @property
    def wrong_versions(self) -> list[str]:
        """Return packages of the closure at another release, with it."""
        return [f"{name} {release}" for name, release in sorted(self.of_stack.items()) if release != self.target]

    @cached_property
    def names(self) -> list[tuple[tuple[str, ...], str]]:
        """Return ((name, its alternatives), pattern of versions with RELEASE in it) of the stack's packages."""
        rows = [row for row in self.stack.packages if row.component in TOGETHER and row.with_driver]
        full = driver_names(self.stack, load(), "full") if self.settings.profile == "full" else ()
        word = self.stack.driver.constraint
        return [(names, f"{RELEASE}-*") for names in full] + [
            ((row.name, *row.alternatives), (row.version or f"{word}-*").replace(word, RELEASE))
            for row in rows
            if not (full and row.component == "driver")
        ]

    def unmet(self, names: Iterable[str]) -> set[str]:
        """Return the packages that are not installed, and those of the closure at another release."""
        moved = {name for name, release in self.of_stack.items() if release != self.target}
        return {name for name in names if name not in self.state.installed} | moved


@dataclass(frozen=True, kw_only=True)
class DriverPlan(DriverRequest):
    """What changes on a node for its driver: the packages, as computed for its package manager, then the modules."""

    question: Transaction
    """What brings the driver to its release: the package manager previews it."""
    change: Transaction
    """What is carried out: the question as it was answered, with what is held."""
    settled: bool
    """Nothing has to change, so that the package manager need not be queried."""
    changes: bool
    """Packages change."""
    missing: tuple[str, ...]
    """Packages that are missing, half-installed or at another release."""
    refusals: tuple[str, ...]
    """Why the driver must not be changed, one line each: name, reason, and remedy."""
    wanting: tuple[Kernel, ...]
    """The kernels that need a module."""
    names_in_dkms: Mapping[str, str]
    """Name that DKMS will use for the modules of each flavour, if it is not ``nvidia``."""
    has_daemon: bool
    """The persistence daemon is installed."""
    pinned: str = ""
    """Release or pattern of releases that apt's preferences pin the closure to."""

    @property
    def asks(self) -> bool:
        """Return whether the package manager has to be queried first."""
        return self.answer is None and not self.settled

    @property
    def closure_problems(self) -> tuple[str, ...]:
        """Return why the closure is not at one version after the transaction."""
        whole = [f"not all of {', '.join(self.missing)} is installed"] if self.missing else []
        actual = "; ".join([*self.wrong_versions, *whole])
        return (f"{self.target} is requested for the whole closure, found {actual}",) if actual else ()

    @property
    def pending_reasons(self) -> Iterator[str]:
        """Yield which packages change."""
        if not self.changes:
            return
        for name in self.missing:
            version = self.state.installed.get(name)
            wanted = f"is at {version}, {self.target or 'another release'} is requested"
            yield f"{name} {wanted if version else 'is not installed'}"
        yield from (f"{name} must be removed" for name in self.question.remove)
        if not (self.missing or self.question.remove):
            yield f"{self.question.manager} has packages to change for driver {self.target}"

    # --- the kernel modules

    @cached_property
    def built(self) -> set[str]:
        """Return the kernels that have a module of the target."""
        return {file.kernel for file in self.node.module_files or () if file.version == self.target}

    @property
    def loaded(self) -> str:
        """Return the release of the loaded module; empty if none is loaded."""
        return (self.node.loaded_driver.version if self.node.loaded_driver else None) or ""

    @property
    def dkms(self) -> str:
        """Return the name of the module in DKMS."""
        rows = sorted({row.name for row in self.node.dkms or () if row.version == self.target and "nvidia" in row.name})
        return rows[0] if rows else self.names_in_dkms.get(self.stack.module.flavour, "nvidia")

    @property
    def without_module(self) -> list[str]:
        """Return the kernels that lack their module."""
        return [kernel.release for kernel in self.wanting if kernel.release not in self.built]

    @property
    def builds(self) -> tuple[Build, ...]:
        """Return the pending builds."""
        if self.precompiled or not self.target:
            return ()
        head = ("dkms", "install", "--force", "-m", self.dkms, "-v", self.target, "-k")
        return tuple(Build(kernel=kernel, argv=(*head, kernel)) for kernel in self.without_module)

    @property
    def module_problems(self) -> tuple[str, ...]:
        """Return why the newest or the running kernel has no module after the builds."""
        important = [kernel for kernel in self.kernels if kernel.newest or kernel.running]
        bare = [] if self.precompiled else sorted({kernel.release for kernel in important if not kernel.headers})
        lacking = [*self.without_module, *bare]
        why = f" (no headers for {', '.join(bare)})" if bare else ""
        return (f"no module {self.target} for {', '.join(lacking)}{why}",) if lacking else ()

    @property
    def _nouveau(self) -> bool:
        return "nouveau" in (self.node.modules or ())

    @property
    def loadable(self) -> bool:
        """Return whether the module can be loaded without a reboot."""
        ready = self.node.running_kernel in self.built
        return bool(self.node.gpus_on_bus) and not self.loaded and not self._nouveau and ready

    @property
    def exchange(self) -> ModuleExchange | None:
        """Return the exchange of the loaded module; None if it stays, is in use, or none is loaded."""
        loadable = bool(self.node.gpus_on_bus) and self.node.running_kernel in self.built
        if self.loaded in ("", self.target) or self.target is None or not loadable or gpus_in_use(self.node):
            return None
        active = {unit.name for unit in self.node.units or () if unit.active == "active"}
        needs = {FABRIC_MANAGER: manager_version(self.state), IMEX: imex_version(self.state)}
        return ModuleExchange(
            version=self.target,
            units=tuple(name for name in STOPPABLE if name in active),
            unit_versions={name: version for name, version in needs.items() if version},
        )

    @property
    def reboot_reasons(self) -> Iterator[str]:
        """Yield why only a reboot brings the driver into use."""
        gpus, running = bool(self.node.gpus_on_bus), self.node.running_kernel
        if gpus and self._nouveau:
            yield "nouveau is loaded and keeps NVIDIA's module off the GPU"
        if self.loaded and self.target and self.loaded != self.target:
            idle = " (no process uses a GPU, so nvidia_driver_reload: true would exchange it)"
            yield f"module {self.loaded} is loaded, {self.target} is installed{'' if gpus_in_use(self.node) else idle}"
        if gpus and not self.loaded and self.built and running not in self.built:
            yield f"kernel {running} runs and has no module, {', '.join(sorted(self.built))} has"

    def daemon(self, *, running: bool) -> tuple[UnitState, ...]:
        """Return the persistence daemon if it is installed; ``running``: a module is loaded by then."""
        if not self.has_daemon:
            return ()
        on, runs = self.settings.persistence, running and bool(self.node.gpus_on_bus)
        state: Literal["started", "stopped"] = "started" if on else "stopped"
        return (UnitState(name=f"{DAEMON}.service", enabled=on, state=state if runs else None),)


def answered(answer: Mapping[str, object] | None) -> Preview | None:
    """Return an answer of a node as its model. Raises UsageError for a malformed one."""
    try:
        return None if answer is None else Preview.model_validate(answer)
    except ValidationError as err:
        field, why = invalid_field(err)
        raise UsageError(f"the package manager's answer is malformed: {field}: {why}") from None
