"""Rules that decide the services beside the driver: fabric manager and related components, DCGM, container toolkit."""

from collections.abc import Iterator

from gpunode.catalog import Dcgm
from gpunode.stack.model import Library, Service
from gpunode.stack.naming import choices, package_set, version_word
from gpunode.stack.question import number
from gpunode.stack.rules import CandidateCase, Choice, rules


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
    pattern = f"{version}-*" if case.candidate.system.family == "deb" else version
    packages = choices(case, row, version=pattern)
    why = f"{version} is the newest known; its {len(packages)} packages have the same version"
    yield Choice("container_toolkit", Library(version=version, packages=tuple(p.name for p in packages)), why, packages)
