"""Rules for requests only: a range of drivers, a framework release, the kernel policy."""

from collections.abc import Iterator

from gpunode.stack.libraries import covers, framework_builds
from gpunode.stack.naming import package_set
from gpunode.stack.rules import CandidateCase, Objection, refuse, rules, warn


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
    "R20-framework",
    means="A framework's wheel runs where the driver reaches the floor of its CUDA and the GPU is in its list of "
    "compute capabilities",
    facts="frameworks, wheels",
)
def framework_requested(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a driver or GPUs that no published wheel of the requested framework supports."""
    row = case.question.framework
    if row is None:
        return
    name = f"{row.name} {row.version}"
    if row.released is None and row.planned is not None:
        yield refuse(f"{name} is not released; it is planned for {row.planned}")
    elif not row.builds:
        yield warn(f"the CUDA builds of {name} are not in the catalog: not evaluated")
    elif row.name == "pytorch" and not _wheels_known(case, row.version):
        text = f"the GPUs supported by the wheels of {name} for {case.candidate.arch} are not in the catalog"
        yield warn(f"{text}: whether one runs here was not decided")
    elif not framework_builds(case, row) and (experimental := framework_builds(case, row, row.experimental)):
        yield warn(f"only wheels of {name} for CUDA {', '.join(experimental)} run here, which are experimental")
    elif not framework_builds(case, row):
        on = ", ".join(dict.fromkeys(f"compute capability {gpu.compute_capability}" for gpu in case.models))
        yield refuse(
            f"no wheel of {name} (CUDA {', '.join(row.builds)}) runs on driver {case.candidate.version}, "
            f"{case.candidate.arch}{f' and {on}' if on else ''}"
        )


def _wheels_known(case: CandidateCase, version: str) -> bool:
    rows = case.question.catalog.wheels.values()
    return any(row.arch == case.candidate.arch and covers(row.since, row.until, version) for row in rows)


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
