"""Rules that decide what follows from the driver, and rules for requests that concern it.

What follows: pinning, removals, end of life, GPUDirect RDMA; beside the driver the fabric manager and related
components, DCGM, the container toolkit.
"""

from collections.abc import Iterator

from gpunode.catalog import Dcgm
from gpunode.catalog.driver_rules import DMA_BUF_CUDA, DMA_BUF_KERNEL, against_dma_buf
from gpunode.catalog.origins import table
from gpunode.stack.model import Library, Pin, Preference, Service
from gpunode.stack.naming import (
    DRIVER_VARIANTS,
    any_revision,
    applies,
    choices,
    fill,
    package_set,
    upstream_pattern,
    version_word,
)
from gpunode.stack.question import number
from gpunode.stack.rules import CandidateCase, Choice, Objection, refuse, rules, warn

PIN_PRIORITY = 1001
"""Above 1000 apt downgrades a package, which a pin must be able to do."""


@rules.decides(
    "R13-branch-eol",
    "eol",
    means="A branch past its end of life is a warning, or a refusal where that is requested and NVIDIA published "
    "the end",
    facts="branches",
)
def eol(case: CandidateCase) -> Iterator[Choice]:
    """Decide the end of life: the earlier of two dates if sources differ."""
    branch = case.candidate.branch
    if branch.eol is None:
        yield Choice("eol", None, f"the end of life of branch {branch.number} is unknown")
        return
    basis = "NVIDIA's table of branches" if branch.eol_promised else "the rule of thumb (release + 1 year, LTSB + 3)"
    yield Choice("eol", branch.eol, f"by {basis}")


@rules.decides(
    "R15-distro-repo",
    "pin",
    means="The source has the branch for this system and CPU; package names and pinning are those of source, system"
    " and branch",
    facts="systems, packages, pinning",
    needs=("systems.first_branch",),
)
def pin(case: CandidateCase) -> Iterator[Choice]:
    """Decide how the version is held: apt preferences with apt, module streams and locks with rpm."""
    candidate, catalog = case.candidate, case.question.catalog
    row = next(
        (row for row in catalog.pinning.values() if row.origin == candidate.source and applies(case, row)),
        None,
    )
    if row is None:
        yield Choice("pin", None, f"the catalog has no pinning for versions from {case.source_name}")
        return
    held = f"holds {version_word(case)} on {candidate.system.name}"
    pattern = None if row.pattern is None else fill(case, row.pattern)
    if row.kind == "preferences":
        stanza = Preference(
            packages=_closure_globs(case), pin=f"version {any_revision(version_word(case))}", priority=PIN_PRIORITY
        )
        yield Choice(
            "pin", Pin(mechanism="preferences", preferences=(stanza,)), f"an apt preferences file of ours {held}"
        )
    elif row.kind == "module-stream":
        stream = Pin(mechanism="module-stream", pattern=pattern or _stream(case))
        yield Choice("pin", stream, f"on {candidate.system.name} the module stream holds the branch, not a release")
    else:
        yield Choice("pin", Pin(mechanism=row.kind, pattern=pattern), f"a {row.kind} {held}")


def _stream(case: CandidateCase) -> str | None:
    row = package_set(case, "driver", DRIVER_VARIANTS)
    return None if row is None or row.stream is None else fill(case, row.stream)


def _closure_globs(case: CandidateCase) -> tuple[str, ...]:
    """Return patterns of the closure's packages: names, or sources (``src:``) where the closure is defined by these.

    The version in the pin excludes all other packages.
    """
    rows = [row for row in table().closures if row.origin == case.candidate.source]
    names = tuple(name for row in rows for name in row.packages)
    return names or tuple(f"src:{name}" for row in rows for name in row.sources)


@rules.decides(
    "R16-repo-mix",
    "remove",
    means="No second publisher beside the installed driver packages; an explicit switch of source removes the "
    "first. What the container toolkit superseded (nvidia-docker2) goes too",
    facts="origins.yml, container_toolkit",
)
def remove(case: CandidateCase) -> Iterator[Choice]:
    """Decide the removals: packages that a switch of source replaces, and those that the container toolkit
    superseded."""
    installed = case.question.node.installed
    if installed is None:
        yield Choice("remove", (), "no installed packages are known")
        return
    toolkit_row = next(iter(case.question.catalog.container_toolkit.values()))
    foreign = [package.name for package in installed.closure if package.origin != case.candidate.source]
    superseded = [package.name for package in installed.packages if package.name in toolkit_row.replaces]
    names = tuple(sorted({*foreign, *superseded}))
    yield Choice(
        "remove", names, "packages of another publisher, or superseded" if names else "no conflicting packages"
    )


@rules.decides(
    "R19-gdr",
    "gpudirect_rdma",
    means="GPUDirect RDMA over dma-buf needs the open modules, kernel 5.12, CUDA 11.7 and Turing or later",
    facts="NVIDIA's GPUDirect RDMA documentation (in the code)",
)
def gpudirect(case: CandidateCase) -> Iterator[Choice]:
    """Decide whether GPUDirect RDMA over dma-buf works with this stack."""
    kernel = case.question.kernel_release
    candidate = case.candidate
    against = against_dma_buf(case.models, candidate.flavour, candidate.branch.native_cuda, kernel)
    if against:
        yield Choice("gpudirect_rdma", False, f"not over dma-buf: {'; '.join(against)}")
    elif kernel is None:
        yield Choice(
            "gpudirect_rdma", None, f"over dma-buf with kernel {DMA_BUF_KERNEL} or newer; the kernel is unknown"
        )
    else:
        yield Choice(
            "gpudirect_rdma", True, f"open modules, kernel {DMA_BUF_KERNEL} or newer, CUDA {DMA_BUF_CUDA} or newer"
        )


def _service(case: CandidateCase, field: str, component: str, why: str) -> Choice:
    """Return a component of the board: its packages, in the driver's version if it belongs to the closure."""
    row = package_set(case, component)
    if row is None:
        return Choice(field, None, f"{case.source_name} has no {component} for branch {case.candidate.branch.number}")
    packages = choices(case, row)
    modules = case.question.board.kernel_modules if component == "nvlsm" else ()
    value = Service(
        version=version_word(case) if row.with_driver else None,
        same_as_driver=row.with_driver,
        packages=tuple(package.name for package in packages),
        kernel_modules=modules,
    )
    return Choice(field, value, why, packages)


@rules.decides(
    "R11-fm-exact",
    "fabric_manager",
    "nscq",
    means="A node with NVSwitches gets a fabric manager and NSCQ of the same version, from the same source",
    facts="platforms, packages",
)
def fabric_manager(case: CandidateCase) -> Iterator[Choice]:
    """Decide the fabric manager: with NVSwitches it must have exactly the driver's version."""
    board = case.question.board
    if "fabric-manager" not in board.services:
        why = board.unknown or f"not needed: {board.why}"
        yield Choice("fabric_manager", None, why)
        yield Choice("nscq", None, why)
        return
    exact = f"{board.why}; its version must be the driver's, from the same source"
    yield _service(case, "fabric_manager", "fabric-manager", exact)
    if "nvlsm" in board.services:
        yield Choice("nscq", None, "NVLink 5 switches are read through NVSDM")
    else:
        yield _service(case, "nscq", "nscq", f"reads the NVSwitches for DCGM; {exact}")


@rules.decides(
    "R12-nvlink5",
    "nvsdm",
    "nvlsm",
    "imex",
    means="HGX B200 and B300 get NVLSM, infiniband-diags and kernel modules in addition to the fabric manager; "
    "GB200 and "
    "GB300 get IMEX and no fabric manager",
    facts="platforms, packages",
)
def nvlink5(case: CandidateCase) -> Iterator[Choice]:
    """Decide the services of NVLink 5: a subnet manager on HGX boards, IMEX in racks."""
    board = case.question.board
    if "nvlsm" in board.services:
        yield _service(case, "nvlsm", "nvlsm", f"{board.why}: the NVLink 5 switches need a subnet manager")
        if case.candidate.arch == "x86_64":
            yield _service(case, "nvsdm", "nvsdm", "reads the NVLink 5 switches; version as the driver's")
        else:
            yield Choice("nvsdm", None, "NVSDM exists only for x86_64")
    else:
        for field in ("nvlsm", "nvsdm"):
            yield Choice(field, None, board.unknown or f"no NVLink 5 switch on the node: {board.why}")
    if "imex" in board.services:
        yield _service(case, "imex", "imex", f"{board.why}; its version must be the driver's")
    else:
        yield Choice("imex", None, board.unknown or f"no NVLink between nodes: {board.why}")


@rules.decides(
    "R17-dcgm",
    "dcgm",
    means="DCGM's package is that of the driver's CUDA major; where a GPU is too old for it, the older one is there"
    " too",
    facts="dcgm",
)
def dcgm(case: CandidateCase) -> Iterator[Choice]:
    """Decide DCGM by the CUDA major of the driver."""
    branch, system = case.candidate.branch.number, case.candidate.system
    if case.lacks("dcgm"):
        yield Choice("dcgm", None, f"{case.source_name} has no DCGM")
        return
    rows = sorted(case.question.catalog.dcgm.values(), key=lambda row: number(row.latest), reverse=True)
    for row in rows:
        names = package_set(case, "dcgm", release=int(row.id))
        known_on = not row.systems or system.id in row.systems
        if names is None or branch < row.min_branch or not known_on or not row.cuda_major_by_branch:
            continue
        majors = _dcgm_majors(case, row)
        version = f"{row.epoch}:{row.latest}-*" if system.family == "deb" else row.latest
        packages = tuple(
            package for major in majors for package in choices(case, names, cuda=str(major), version=version)
        )
        why = f"branch {branch} carries CUDA {majors[0]}"
        if len(majors) > 1:
            why += f"; also for CUDA {majors[1]}, because CUDA {majors[0]} does not support all GPUs of the node"
        yield Choice("dcgm", Library(version=row.latest, packages=tuple(p.name for p in packages)), why, packages)
        return
    yield Choice("dcgm", None, f"no known DCGM for {system.name} and branch {branch}")


def _dcgm_majors(case: CandidateCase, row: Dcgm) -> list[int]:
    """Return the CUDA majors of the packages: the driver's, and an older one if GPUs need it."""
    branch = case.candidate.branch.number
    major = row.cuda_major_by_branch[max(first for first in row.cuda_major_by_branch if first <= branch)]
    lowest = number(case.question.catalog.cuda_majors[str(major)].min_compute_capability)
    also = row.also_cuda_major.get(major)
    return [major, also] if also is not None and any(gpu.capability < lowest for gpu in case.models) else [major]


@rules.decides(
    "R18-ctk",
    "container_toolkit",
    means="The container toolkit's four packages carry one version",
    facts="container_toolkit",
)
def container_toolkit(case: CandidateCase) -> Iterator[Choice]:
    """Decide the container toolkit: four packages, one version."""
    if case.lacks("container-toolkit"):
        yield Choice("container_toolkit", None, f"{case.source_name} has no container toolkit")
        return
    version = next(iter(case.question.catalog.container_toolkit))
    row = package_set(case, "container-toolkit")
    if row is None:
        yield Choice("container_toolkit", None, f"no known container toolkit for {case.candidate.system.name}")
        return
    packages = choices(case, row, version=upstream_pattern(case, version))
    why = f"{version} is the newest known; its {len(packages)} packages have the same version"
    yield Choice("container_toolkit", Library(version=version, packages=tuple(p.name for p in packages)), why, packages)


@rules.judges(
    "R25-driver-range",
    means="The release is within the requested range; the newest one of each branch is used",
    facts="branches",
)
def driver_range(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a release outside the requested range: ``>=580,<595`` allows 580 and 590, each with its newest release
    inside."""
    question, candidate = case.question, case.candidate
    if question.driver_range is None:
        return
    if not question.in_range(candidate.version):
        yield refuse(f"{candidate.version} is outside the requested range {question.request.driver}")
    elif candidate.decided_by == "repository":
        yield warn(f"the archive decides the release: check that it is inside {question.request.driver}")


@rules.judges(
    "R26-kernel-policy",
    means="A requested kernel policy concerns modules that the distribution signed: what it holds or moves is a "
    "warning",
    facts="packages",
)
def kernel_policy(case: CandidateCase) -> Iterator[Objection]:
    """Warn about the kernel policy: modules that the distribution signed match one kernel, and are held or upgraded
    with it."""
    policy = case.question.request.kernel_policy
    if policy is None:
        return
    if package_set(case, "driver", ("precompiled",)) is None:
        yield warn(f"kernel policy {policy} changes nothing here: DKMS builds the modules for every installed kernel")
    elif policy == "hold":
        yield warn(
            "kernel policy hold: kernel, headers, modules and driver stay at one version; the kernel gets no security "
            "updates until the driver is changed"
        )
    else:
        yield warn(
            "kernel policy follow: kernel, modules and driver move on with the archive's updates; after one, new CUDA "
            "processes fail until the node is rebooted"
        )
