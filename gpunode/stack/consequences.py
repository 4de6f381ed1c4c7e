"""Rules that decide what follows from the driver: pinning, removals, end of life, GPUDirect RDMA."""

from collections.abc import Iterator

from gpunode.catalog.driver_rules import DMA_BUF_CUDA, DMA_BUF_KERNEL, against_dma_buf
from gpunode.catalog.origins import table
from gpunode.stack.model import Pin, Preference
from gpunode.stack.naming import DRIVER_VARIANTS, any_revision, applies, fill, package_set, version_word
from gpunode.stack.rules import CandidateCase, Choice, rules

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
