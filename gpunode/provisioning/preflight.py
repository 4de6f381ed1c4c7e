"""The role preflight: why a node must not be provisioned as it is, before anything changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from gpunode.catalog import load
from gpunode.checks import Expectation, judge
from gpunode.content import collection_root
from gpunode.facts import NodeFacts
from gpunode.frozen import Frozen
from gpunode.provisioning import node_stack, nvidia_repository, service
from gpunode.provisioning.context import Context
from gpunode.provisioning.driver import plan as nvidia_driver
from gpunode.provisioning.driver.dnf import dnf_problems
from gpunode.provisioning.manifest import Manifest, NodeQuery, compared
from gpunode.provisioning.order import ORDER
from gpunode.provisioning.role import Role, Variables, option
from gpunode.provisioning.state import AptState, DnfState, NodeState
from gpunode.stack import Stack
from gpunode.text import did_you_mean, listed
from gpunode.variables import known_variables, locate, role_prefixes, unknown_variables

MANAGERS = ("apt", "dnf")
ARCHITECTURES = ("x86_64", "aarch64")
NEEDED = ("os", "architecture")
"""Facts without which no decision is possible."""
NEEDED_FOR_PACKAGES = ("packages", "disk_free_mib")
NEEDED_FOR_GPUS = ("kernels", "pci", "modules", "gpu_processes")
FACTS = ("gpunode_reboot_required", "gpunode_restart_required")
"""Variables that the roles, or a user's playbook, set."""


class PreflightSettings(Variables):
    """Variables of the role, and those of the playbooks: they are checked before anything happens."""

    min_free_mib: dict[str, int] = option(
        {"/": 2048, "/usr": 2048, "/var": 1024, "/boot": 128},
        "Minimum free space in MiB, by mount point. Kernel headers, compiler, driver and the built modules take about "
        "1.5 GiB in /usr and /var together; a new initramfs is written next to the old one in /boot.",
    )
    require_gpu: bool = option(
        True, "Refuse a node without an NVIDIA GPU; V(false) to build images on machines without one."
    )
    gpunode_roles: tuple[str, ...] = option(
        tuple(role.name for role in ORDER),
        "Roles that playbooks/site.yml runs, in its order; a Kubernetes node does not need docker.",
        choices=[role.name for role in ORDER],
    )
    gpunode_profile: Literal["training", "inference", "development", "hpc"] = option(
        "training", "Usage profile of the node for the roles ml_environment and kernel_tuning."
    )
    gpunode_force: bool = option(
        False, "Run the changes of every role even if none is pending. On a settled node they change nothing."
    )
    allow_secure_boot: bool = option(
        False,
        "Continue with secure boot: modules built by DKMS load only after their key was enrolled (mokutil --import).",
    )
    gpunode_allow_busy: bool = option(False, "Continue although processes use a GPU. Applies to all roles.")
    gpunode_reboot: Literal["never", "when_needed"] = option(
        "never", "Whether the last play of playbooks/site.yml may reboot a node that needs it."
    )
    gpunode_reboot_for_updates: bool = option(
        False,
        "Whether updates of the distribution that require a reboot are a reason too; playbooks/reboot.yml sets it.",
    )
    gpunode_drain_wait_s: int = option(
        3600, "How long to wait, in seconds, until nothing computes on the GPUs of a drained node."
    )
    lock_wait_s: int = option(
        900,
        "How long to wait, in seconds, for another package manager to finish; upgrades of a first boot take minutes.",
    )
    refuse_unknown_variables: bool = option(
        True, "Refuse unknown variables with a name similar to those of the roles: a typing error would have no effect."
    )
    gpunode_templates: str = option(
        "",
        "Folder of the site with templates that replace those of the roles: C(ROLE/NAME.j2). A relative path begins at "
        "the playbook. Empty: none.",
    )
    gpunode_expect: dict[str, object] = option(
        {}, "Expected properties of the node for playbooks/validate.yml, such as C({ gpus: 8 })."
    )
    gpunode_stack: dict[str, object] = option(
        {}, "Stack locked by C(gpunode plan --write) for this node; used where no other version is requested."
    )
    gpunode_change: str = option(
        "", "Token of the run of C(gpunode upgrade) that this run belongs to; that verb sets it."
    )
    gpunode_image: bool = option(
        False,
        "The node is the root of an image in a chroot: packages and files alone are changed, nothing is started. "
        "playbooks/image.yml sets it.",
    )
    gpunode_lab: bool = option(False, "Set by the inventory of C(gpunode lab); no behavior depends on it.")


class PreflightResult(Frozen):
    """What the playbooks read; known before the repository is set up, for users who drain a node first."""

    driver_pending: bool
    driver_in_use: bool
    """The driver changes while it is in use, or this is unknown."""


ROLE = Role(
    name="preflight",
    title="Check a node and refuse it before anything changes",
    about=(
        "Collects the node's facts and refuses a node that cannot be provisioned, one line per reason.",
        "Changes nothing.",
    ),
    settings=PreflightSettings,
    reads=("packages", "builds", "gpus", "nvidia_tools"),
    result=PreflightResult,
)


@ROLE.present
def present(state: NodeState, settings: PreflightSettings, context: Context) -> Manifest:
    """Return all reasons why the node must not be provisioned, and notes for its owner."""
    driver = context.settings_of("nvidia_driver")
    roles = set(context.roles or settings.gpunode_roles)
    shapes = [role for role in ORDER if role.name in roles]
    drives, for_gpus = "nvidia_driver" in roles, any(role.for_gpus for role in shapes)
    installs = any("packages" in role.needs for role in shapes)
    removing = driver["state"] == "absent"
    resolved = node_stack.of_context(state.facts, context) if for_gpus and not removing else None
    stack = resolved.stack if resolved is not None else None
    refusals: list[str] = []
    questions: dict[str, NodeQuery] = {}
    settled = not removing and not drives
    pending = False
    if removing and drives and not _cannot_be_asked(state):
        pending = compared(nvidia_driver.ROLE.plan(state, driver, context), state).pending
    if stack is not None and drives and not _cannot_be_asked(state):
        questions, more, settled, pending = _questions(state, context, with_repository="nvidia_repository" in roles)
        refusals += more
    if questions:
        return Manifest(role=ROLE.name, questions=questions)
    owner = service.holder(state, settings.gpunode_change)
    refusals = [
        *((f"held: {owner}: repeat its command, which continues",) if owner is not None else ()),
        *_undetermined(state.facts, packages=installs, gpus=for_gpus),
        *_unsupported(state.facts),
        *(_without_gpu(state.facts) if settings.require_gpu and for_gpus and not context.image else ()),
        *(_package_manager(state) if installs else ()),
        *(_left_by_others(state, roles) if not (removing or driver["switch"]) else ()),
        *(() if settled or settings.gpunode_allow_busy or context.drains else _busy(state.facts)),
        *(_other_line(state.facts) if drives and not removing else ()),
        *(_too_full(state.facts, settings.min_free_mib, driver=drives) if installs and not removing else ()),
        *(_for_modules(state, stack, settings, driver) if drives and not removing else ()),
        *(resolved.problems if resolved is not None else ()),
        *(dnf_problems(state.dnf) if installs else ()),
        *refusals,
        *(_misspelt(context) if settings.refuse_unknown_variables else ()),
    ]
    return Manifest(
        role=ROLE.name,
        refusals=tuple(dict.fromkeys(refusals)),
        notes=(*(_notes(state.facts, stack) if stack is not None else ()), *_unused(context)),
        result=PreflightResult(
            driver_pending=pending,
            driver_in_use=pending and (state.facts.loaded_driver is not None or bool(state.facts.gap("loaded_driver"))),
        ),
    )


def _cannot_be_asked(state: NodeState) -> bool:
    """Return whether the package manager cannot be queried: then this is the refusal, not its missing answers."""
    return state.apt is None and (state.dnf is None or state.dnf.error is not None)


def _questions(
    state: NodeState, context: Context, *, with_repository: bool
) -> tuple[dict[str, NodeQuery], list[str], bool, bool]:
    """Return the remaining questions, why repository or driver must not be changed, and two facts of the driver.

    These are whether its packages do not change, and whether its role has something to do.
    """
    if with_repository:
        repository = nvidia_repository.ROLE.plan(state, context.settings_of("nvidia_repository"), context)
        open_ = {name: question for name, question in repository.questions.items() if name not in context.answers}
        if open_ or repository.refusals:
            return open_, list(repository.refusals), False, False
        context = replace(context, planned=context.planned.with_files(repository.source_files))
    driver = nvidia_driver.ROLE.plan(state, context.settings_of(nvidia_driver.ROLE.name), context)
    open_ = {name: question for name, question in driver.questions.items() if name not in context.answers}
    of_driver = driver.result
    settled = isinstance(of_driver, nvidia_driver.DriverResult) and not of_driver.changes and not of_driver.runfile
    return open_, list(driver.refusals), settled and not driver.refusals, compared(driver, state).pending


def _undetermined(node: NodeFacts, *, packages: bool, gpus: bool) -> Iterator[str]:
    for field in (*NEEDED, *(NEEDED_FOR_PACKAGES if packages else ()), *(NEEDED_FOR_GPUS if gpus else ())):
        reason = node.gap(field)
        if reason is not None:
            yield f"undetermined: {field} could not be determined: {reason}"


def _unsupported(node: NodeFacts) -> Iterator[str]:
    """Yield why the system is unsupported: the roles need apt or dnf; the catalog knows other systems only for plan."""
    if node.os is not None:
        row = load().os_of(node.os.id, node.os.version_id)
        name = node.os.pretty_name or f"{node.os.id} {node.os.version_id}"
        known = ", ".join(row.name for row in load().systems.values() if row.supported and row.manager in MANAGERS)
        if row is not None and row.supported and row.manager not in MANAGERS:
            yield f"unsupported: {name}: the roles install through apt and dnf only, not {row.manager}: for {known}"
        elif row is None or not row.supported:
            yield f"unsupported: {name} is not supported; supported are {known}"
    if node.architecture is not None and node.architecture not in ARCHITECTURES:
        yield (
            f"unsupported: architecture {node.architecture} is not supported; "
            f"supported are {' and '.join(ARCHITECTURES)}"
        )


def _without_gpu(node: NodeFacts) -> Iterator[str]:
    if node.gpus_on_bus is not None and not node.gpus_on_bus:
        yield (
            "no-gpu: the node has no NVIDIA GPU on its PCI bus: remove it from the hosts (gpunode_hosts), or set "
            "preflight_require_gpu: false to build images on machines without one"
        )


def _package_manager(state: NodeState) -> Iterator[str]:
    manager: AptState | DnfState | None = state.apt or state.dnf
    if manager is None:
        return
    if manager.lock_holder:
        yield (
            f"package-lock: {manager.lock_holder} still holds the package lock: wait until it ends, then run this again"
        )
    left = set(state.apt.left) if state.apt is not None else set()
    # The roles finish packages that dpkg left half-installed, of the driver or in a transaction of ours.
    unfinished = [
        name for name in manager.unfinished if name not in left and not re.search(r"nvidia|libcuda|cuda-drivers", name)
    ]
    if unfinished:
        yield f"half-configured: dpkg has not finished {', '.join(sorted(unfinished))}: run dpkg --configure -a"


def _left_by_others(state: NodeState, roles: set[str]) -> Iterator[str]:
    """Yield files and packages of other installers, which the switch removes."""
    drives = "nvidia_driver" in roles
    for finding in judge(state.facts, Expectation(), only=["driver.origin"]) if drives else ():
        if finding.status == "fail":
            yield (
                f"mixed-sources: the driver's packages are mixed: {finding.message}: set the requested source with "
                "nvidia_driver_source, and set nvidia_driver_switch: true to replace the others"
            )
    if drives and state.apt is not None and state.apt.runfile:
        yield (
            "runfile: a driver of NVIDIA's .run installer is installed: remove it with /usr/bin/nvidia-uninstall, or "
            "set nvidia_driver_switch: true to replace it"
        )
    if "nvidia-docker2" in state.installed and roles & {"nvidia_driver", "nvidia_container_toolkit"}:
        yield (
            "nvidia-docker2: nvidia-docker2 is installed, which the container toolkit replaces: set "
            "nvidia_driver_switch:true to replace it, or remove it (apt-get remove nvidia-docker2)"
        )


def _other_line(node: NodeFacts) -> Iterator[str]:
    """Yield conflicts with Debian's packages for old GPUs, which exist in addition to the current driver."""
    names = [
        package.name
        for package in node.packages or ()
        if package.installed and re.match(r"nvidia-graphics-drivers-(tesla|legacy)", package.source)
    ]
    if names:
        yield (
            f"other-line: a driver of another line is installed ({', '.join(sorted(names)[:5])}): it is not changed; "
            "to install the current one, purge it first"
        )


def _busy(node: NodeFacts) -> Iterator[str]:
    users = [process.title for process in node.gpu_processes or () if process.computes]
    if users:
        yield f"busy: GPUs are in use by {listed(users, 5)}: end them, or set gpunode_allow_busy: true"


def _too_full(node: NodeFacts, required: Mapping[str, int], *, driver: bool) -> Iterator[str]:
    for mount, free in (node.disk_free_mib or {}).items():
        # A new initramfs is the driver's alone.
        if free < required.get(mount, 0) and (driver or mount != "/boot"):
            yield f"disk-full: {mount} has {free} MiB free, {required[mount]} MiB are needed (preflight_min_free_mib)"


def _for_modules(
    state: NodeState, stack: Stack | None, settings: PreflightSettings, driver: Mapping[str, Any]
) -> Iterator[str]:
    """Yield missing requirements of modules that are built on the node."""
    if state.apt is not None:
        if stack is not None and stack.module.build == "precompiled":
            return
        yield from _no_headers(state.facts, state.apt)
    if not settings.allow_secure_boot:
        yield from _secure_boot(state.facts, state.apt or state.dnf, staged=bool(driver["mok_hash"]))


def _secure_boot(node: NodeFacts, manager: AptState | DnfState | None, *, staged: bool) -> Iterator[str]:
    key = manager.key if manager is not None else None
    if not node.secure_boot or staged or (key is not None and (key.enrolled or key.waits)):
        return
    signed = "" if isinstance(manager, DnfState) else "use modules that Ubuntu signs (nvidia_driver_source: ubuntu), "
    yield (
        f"secure-boot: secure boot is on and the key of modules built by DKMS is not known to be enrolled: "
        "set nvidia_driver_mok_hash (mokutil --generate-hash) to stage it for confirmation at the console, "
        f"{signed}or set preflight_allow_secure_boot: true"
    )


def _no_headers(node: NodeFacts, apt: AptState) -> Iterator[str]:
    """Yield missing headers of the running and the newest kernel, if apt's lists are known."""
    for kernel in node.kernels or ():
        package = f"linux-headers-{kernel.release}"
        matters = kernel.package and (kernel.running or kernel.newest) and not kernel.headers
        if matters and apt.lists and package not in apt.headers:
            yield f"no-headers: {package} is in no apt source of the node: run apt-get update, or boot a current kernel"


def _misspelt(context: Context) -> Iterator[str]:
    """Yield variables with our prefix that do not exist, with the file that sets them."""
    root: Path = collection_root()
    known = (*known_variables(root), *FACTS)
    for name, near in unknown_variables(context.variables, known, role_prefixes(root)):
        location = locate(name, list(context.inventories)) or "the variables"
        yield f"{location}: unknown variable {name}" + (f"; {did_you_mean([near])}" if near else "")


def _unused(context: Context) -> Iterator[str]:
    """Yield settings of the site without effect."""
    tools = context.settings_of("gpu_tools")
    for name in ("gpunode_extra_packages", "gpunode_extra_files"):
        if tools[name] and tools["state"] == "keep":
            yield f"{name} has no effect: the role gpu_tools installs them, set gpu_tools_state: present"


def _notes(node: NodeFacts, stack: Stack) -> Iterator[str]:
    """Yield notes on a node that is not refused."""
    yield from (warning.text for warning in stack.warnings)
    reason = node.gap("secure_boot")
    if reason is not None and stack.module.build == "dkms":
        yield (
            f"secure boot could not be determined ({reason}): if it is on, a module built by DKMS loads only after "
            "its key was enrolled"
        )
