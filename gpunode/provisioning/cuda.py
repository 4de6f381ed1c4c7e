"""The role cuda: toolkits on a host, side by side, with the libraries that match the first of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from typing import Literal

from packaging.version import InvalidVersion, Version

from gpunode.catalog import load
from gpunode.errors import GpunodeError, UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, NodeCommand
from gpunode.provisioning.node_stack import of_context
from gpunode.provisioning.role import PackageSettings, Role, option
from gpunode.provisioning.state import Look, NodeState
from gpunode.provisioning.transaction import Transaction
from gpunode.stack import PlanHost, Request, Stack, picture_from_facts
from gpunode.stack import plan as resolve

ROOT = "/usr/local/cuda"
ALTERNATIVE = "/etc/alternatives/cuda"
PREFERENCES = "/etc/apt/preferences.d/gpunode-cuda.pref"
PROFILE = "/etc/profile.d/gpunode-cuda.sh"
WITH_DRIVER = frozenset({"driver", "fabric-manager", "nscq", "nvsdm", "nvlsm", "imex"})
DRIVER_PACKAGES = (
    "cuda",
    "cuda-[0-9]*",
    "cuda-drivers*",
    "cuda-runtime-*",
    "nvidia-driver*",
    "nvidia-open",
    "nvidia-open-[0-9]*",
    "nvidia-headless*",
    "nvidia-utils-*",
    "nvidia-compute-utils-*",
    "nvidia-dkms*",
    "*nvidia-kernel-*",
    "nvidia-firmware*",
    "nvidia-persistenced",
    "nvidia-modprobe",
    "libnvidia-compute*",
    "libnvidia-cfg1*",
    "libnvidia-gpucomp*",
    "nvidia-fabricmanager*",
    "nvidia-fabric-manager*",
    "nvidia-imex*",
    "libnvidia-nscq*",
    "libnvsdm*",
    "nvlink5*",
    "nvlsm",
    "linux-modules-nvidia-*",
    "kmod-nvidia*",
    "nvidia-kmod*",
    "libnvidia-cfg",
    "libnvidia-fbc",
    "libnvidia-ml",
)
"""Only the role nvidia_driver installs a driver and packages with its version: from a repository with another newest
branch, a toolkit would install the driver of that one.
"""


@dataclass(frozen=True, slots=True)
class VersionPin:
    """Packages pinned to versions of one pattern."""

    packages: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class DefaultToolkit:
    """The toolkit behind /usr/local/cuda."""

    series: str
    path: str
    newest: bool
    """Of several, the packages themselves choose the newest."""


@dataclass(slots=True)
class ToolkitPackages:
    """Packages for the requested toolkits."""

    install: list[str] = field(default_factory=list)
    """``NAME`` or ``NAME=PATTERN``."""
    pins: list[VersionPin] = field(default_factory=list)
    hold: list[str] = field(default_factory=list)
    """Shell patterns of names."""
    default: DefaultToolkit | None = None
    """None if the toolkit is not a package of NVIDIA's."""
    problems: list[str] = field(default_factory=list)


class CudaSettings(PackageSettings):
    """Variables of the role."""

    state: Literal["present", "absent"] = option(
        "present",
        "V(present): the requested toolkits are installed. V(absent): everything that this role installed is removed.",
    )
    version: str = option(
        "",
        "CUDA version that containers require, such as V(13.0); preflight resolves the driver for it. Empty: no "
        "requirement.",
    )
    toolkit: tuple[str, ...] = option(
        (), 'Toolkits on the host, such as [12.9] or ["12.9", "13.0"]; containers have their own.'
    )
    default: str = option("", "The toolkit behind C(/usr/local/cuda); empty: the newest of cuda_toolkit.")
    cudnn: bool = option(False, "Install cuDNN beside the toolkit, in the build for the default toolkit's CUDA.")
    nccl: bool = option(False, "Install NCCL beside the toolkit, in the build for the default toolkit's CUDA.")
    profile: bool = option(True, "Add the toolkit to C(PATH) and C(LD_LIBRARY_PATH) of login shells.")


ROLE = Role(
    name="cuda",
    title="Install CUDA toolkits on a host, pinned and side by side",
    about=(
        "Toolkits with their configuration packages, cuDNN and NCCL of the right build, and the compat package where "
        "the rules allow.",
        "Never installs, changes or removes a driver.",
    ),
    settings=CudaSettings,
    for_gpus=True,
    files=(PREFERENCES, PROFILE),
    packages=(
        "cuda-toolkit-*",
        "cuda-compat-*",
        "cudnn[0-9]*-cuda-*",
        "libcudnn[0-9]*",
        "libnccl*",
        "nvidia-cuda-toolkit",
    ),
    held=("*-[0-9][0-9]-[0-9]", "cuda-toolkit-*-config-common"),
    locks=True,
    more=Look(paths=(ALTERNATIVE,)),
)


@ROLE.present
def present(state: NodeState, settings: CudaSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    versions = [version for version in settings.toolkit if version]
    resolved = of_context(state.facts, context)
    stack = resolved.stack
    if stack is None:
        return _without_stack(settings, versions, resolved.problems, context)
    selection = toolkit_packages(
        state.facts,
        stack,
        versions,
        state.installed,
        # Without toolkits there is no default one.
        default=settings.default if versions else "",
        cudnn=settings.cudnn,
        nccl=settings.nccl,
    )
    if selection.problems:
        return Manifest(role=ROLE.name, refusals=tuple(selection.problems))
    if not versions and not selection.install:
        requested = [f"cuda_{name}" for name in ("cudnn", "nccl") if getattr(settings, name)]
        note = f"{' and '.join(requested)}: not installed, because no toolkit is requested: set cuda_toolkit"
        return Manifest(role=ROLE.name, notes=(note,) if requested else ())
    files, text = [], ROLE.texts(context)
    preferences = text("apt.pref.j2", pins=selection.pins) if selection.pins else ""
    if state.manager == "apt" and preferences:
        files.append(ManagedFile(path=PREFERENCES, content=preferences, phase="after"))
    default = selection.default
    if default is not None:
        profile = text("profile.sh.j2") if settings.profile else None
        shell = ("/bin/sh", "-n", "%s") if profile else None
        files.append(ManagedFile(path=PROFILE, content=profile, phase="after", validate_with=shell))
    link = state.files.get(ALTERNATIVE)
    chosen = default is None or (link is not None and link.target == default.path)
    # Whether the rpm packages register an alternative is not recorded: without one there is nothing to choose from.
    alone = state.manager == "dnf" and not state.exists(ALTERNATIVE)
    notes: tuple[str, ...] = ()
    if alone and default is not None and f"cuda-toolkit-{default.series.replace('.', '-')}" in state.installed:
        notes = (f"the packages registered no alternative for {ROOT}: it is not changed",)
    chosen = chosen or alone
    path = None if chosen or default is None else default.path
    return Manifest(
        role=ROLE.name,
        notes=notes,
        files=tuple(files),
        folders=(ManagedFolder(path=ROLE.folder),),
        packages=_packages(state, settings, stack, selection, preferences),
        pending_reasons=(f"{ROOT} is not {path}",) if path else (),
        commands=(NodeCommand(argv=("update-alternatives", "--set", "cuda", path)),) if path else (),
    )


def _packages(
    state: NodeState, settings: CudaSettings, stack: Stack, selection: ToolkitPackages, preferences: str
) -> Transaction:
    install = selection.install
    if state.manager == "dnf":
        # The configuration of a major version is installed with its toolkits; installed packages are locked. A stack's
        # version for rpm omits the release, which dnf compares too.
        install = [
            re.sub(r"(=[^-*]+)$", r"\1-*", entry)
            for entry in install
            if re.match(r"cuda-toolkit-[0-9]+-config-common", entry) is None
        ]
    return ROLE.transaction(
        state,
        settings,
        install,
        never=(*(row.name for row in stack.packages if row.component in WITH_DRIVER), *DRIVER_PACKAGES),
        hold=selection.hold,
        files={PREFERENCES: preferences},
    )


def _without_stack(
    settings: CudaSettings, versions: list[str], problems: tuple[str, ...], context: Context
) -> Manifest:
    """Return the manifest without a stack: toolkits are resolved with a driver, so a request cannot be met."""
    requested = [f"cuda_toolkit: {', '.join(versions)}"] if versions else []
    requested += [f"cuda_version: {settings.version}"] if settings.version else []
    lines = tuple(f"{'; '.join(requested)}: {problem}" for problem in problems) if requested else ()
    # The driver is on its way out, and nothing is installed for it.
    removing = context.settings_of("nvidia_driver")["state"] == "absent"
    return Manifest(role=ROLE.name, notes=lines if removing else (), refusals=() if removing else lines)


def toolkit_packages(  # noqa: PLR0913
    node: NodeFacts,
    stack: Stack,
    toolkits: Iterable[str],
    installed: Mapping[str, str] | None = None,
    *,
    default: str = "",
    cudnn: bool = False,
    nccl: bool = False,
) -> ToolkitPackages:
    """Return packages, pins and holds for ``toolkits`` with the driver of ``stack``, which is not changed.

    ``installed`` is name to version of the node's packages: matching cuDNN and NCCL are kept at their version.
    ``default`` is the toolkit behind /usr/local/cuda; if empty, the newest. Every toolkit goes through the
    rules of the resolver with this driver; what they refuse is a problem. Raises UsageError for a malformed version.
    """
    selection = ToolkitPackages()
    answers: dict[str, Stack] = {}
    for version in dict.fromkeys(toolkits):
        answer = _resolved(node, stack, version)
        if isinstance(answer, str):
            selection.problems.append(f"toolkit {version}: {answer}")
        else:
            answers[version] = answer
    chosen = default or max(answers, key=_number, default="")
    if chosen and not selection.problems and chosen not in answers:
        selection.problems.append(f"cuda_default {chosen} is not among the requested toolkits ({', '.join(answers)})")
    if selection.problems:
        return selection
    have = installed or {}
    _compat(stack, selection)
    _toolkits(answers, have, selection)
    if chosen:
        first = answers[chosen]
        if first.source == "nvidia":
            series = _series(chosen)
            selection.default = DefaultToolkit(series, f"{ROOT}-{series}", chosen == max(answers, key=_number))
        for component, requested in (("cudnn", cudnn), ("nccl", nccl)):
            if requested:
                _library(first, component, have, selection)
    return selection


def _number(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise UsageError(f"{version} is not a toolkit version (examples: 12.9, 12.9.1)") from None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _resolved(node: NodeFacts, base: Stack, toolkit: str) -> Stack | str:
    """Return the stack with this toolkit and the planned driver, or why there is none."""
    _number(toolkit)
    try:
        request = Request(
            source=base.source,
            driver=base.driver.version or str(base.driver.branch),
            kernel_module=base.module.flavour,
            cuda=base.cuda.wished,
            toolkit=toolkit,
        )
        catalog = load()
        host = PlanHost(node.host, picture_from_facts(node, catalog), None, None)
        group = resolve([host], request, catalog, date.today()).groups[0]
    except GpunodeError as err:
        return str(err)
    if group.stack is None:
        return group.conflict.message if group.conflict else str(group.undetermined)
    return group.stack


def _compat(base: Stack, selection: ToolkitPackages) -> None:
    for package in base.packages:
        if package.component == "cuda-compat":
            selection.install.append(package.name + (f"={package.version}" if package.version else ""))
            selection.hold.append(package.name)


def _toolkits(answers: Mapping[str, Stack], installed: Mapping[str, str], selection: ToolkitPackages) -> None:
    """Add the toolkits with their configuration packages, which without a series in their name would follow the newest.

    They stay with the newest toolkit that is requested or installed: an installed one requires them not to be older.
    """
    newest: dict[str, str] = {}
    matches = [match for name in installed if (match := re.fullmatch(r"cuda-toolkit-([0-9]+)-([0-9]+)", name))]
    for version in sorted(answers, key=_number):
        stack, series = answers[version], _series(version)
        for package in stack.packages:
            if package.component == "cuda-toolkit":
                selection.install.append(package.name + (f"={package.version}" if package.version else ""))
                selection.hold.append(package.name)
        if stack.source == "nvidia":
            name = series.replace(".", "-")
            selection.hold += [f"*-{name}", f"cuda-toolkit-{name}-config-common"]
            newest[f"cuda-toolkit-{series.split('.', maxsplit=1)[0]}-config-common"] = series
            newest["cuda-toolkit-config-common"] = series
    for name, requested in newest.items():
        major = name.removeprefix("cuda-toolkit-").partition("-")[0]
        rivals = [f"{match[1]}.{match[2]}" for match in matches if major in ("config", match[1])]
        series = max([requested, *rivals], key=_number)
        selection.install.append(f"{name}={series}.*")
        selection.hold.append(name)
        selection.pins.append(VersionPin((name,), f"{series}.*"))


def _any_point(stack: Stack, pattern: str) -> str:
    """Return the pattern of cuDNN for every release of its major, if the catalog has no last compatible one.

    The catalog does not list the releases in a repository; the newest of them is installed.
    """
    version = stack.cudnn.version if stack.cudnn is not None else None
    rows = load().cudnn.values()
    # The builds of a CUDA major may have releases of their own.
    row = next((row for row in rows if version in (row.latest, *(each.latest for each in row.builds.values()))), None)
    if version is None or row is None or row.until is not None:
        return pattern
    # apt treats a star at the end as any text, and another one before it literally.
    return f"{version.partition('.')[0]}.*"


def _library(stack: Stack, component: str, installed: Mapping[str, str], selection: ToolkitPackages) -> None:
    """Add cuDNN or NCCL; an installed one of the same build keeps its version."""
    packages = [package for package in stack.packages if package.component == component]
    if not packages:
        selection.problems.append(f"{component}: {stack.reasons[component].text}")
        return
    for package in packages:
        pattern = package.version or "*"
        if component == "cudnn":
            pattern = _any_point(stack, pattern)
        build = re.search(r"\+cuda[0-9.]+$", pattern)
        kept = installed.get(package.name)
        if kept is not None and (build is None or fnmatchcase(kept, f"*{build[0]}")):
            pattern = f"{kept.rpartition('-')[0]}-*{build[0] if build else ''}"
        selection.install.append(f"{package.name}={pattern}")
        names = [package.name]
        if component == "cudnn" and package.name.startswith("cudnn"):
            # The metapackage's own: libcudnn9-cuda-12, libcudnn9-dev-cuda-12 …
            major, _, cuda = package.name.removeprefix("cudnn").partition("-")
            names.append(f"libcudnn{major}*-{cuda}")
        selection.hold += names
        selection.pins.append(VersionPin(tuple(names), pattern))
