"""Rules that decide the software on top of the driver: toolkit and libraries on the host, framework wheels."""

from collections.abc import Iterable, Iterator

from packaging.version import Version as Number

from gpunode.catalog import Framework, Toolkit
from gpunode.stack.model import Frameworks, Library, PackageChoice
from gpunode.stack.naming import choices, package_set, upstream_pattern
from gpunode.stack.question import number
from gpunode.stack.rules import CandidateCase, Choice, Objection, refuse, rules, warn


@rules.decides(
    "R14-compat-matrix",
    "cuda_compat",
    means="A cuda-compat package only on branches that NVIDIA's table allows, before their end of life, and on "
    "data-centre GPUs",
    facts="forward_compat",
    needs=("forward_compat.works_on",),
)
def cuda_compat(case: CandidateCase) -> Iterator[Choice]:
    """Decide the package with a newer CUDA for an older branch: on the host only for the host's own toolkit."""
    compat = case.candidate.compat
    if compat is None:
        yield Choice("cuda_compat", None, "not needed: the driver itself reaches the requested CUDA")
        return
    if not compat_on_host(case):
        yield Choice("cuda_compat", None, f"not on the host: the image must contain {compat.package}")
        return
    row = package_set(case, "cuda-compat")
    packages = (
        choices(case, row, cuda=compat.id)
        if row is not None
        else (PackageChoice(name=compat.package, version=None, component="cuda-compat"),)
    )
    why = f"branch {case.candidate.branch.number} is below the floor of CUDA {compat.id}, and NVIDIA's table allows it"
    yield Choice("cuda_compat", Library(version=None, packages=(compat.package,)), why, packages)


def compat_on_host(case: CandidateCase) -> bool:
    """Return True if the host's own toolkit needs the package; containers use the one in their image."""
    row = case.question.toolkit
    return row is not None and case.candidate.number < number(case.question.floor(row))


def _host_toolkit(case: CandidateCase, row: Toolkit) -> tuple[PackageChoice, ...] | None:
    """Return the source's packages of a toolkit; None if it has none of that version."""
    names = package_set(case, "cuda-toolkit", (None, "full"))
    if names is None:
        return None
    version = case.question.request.toolkit or row.series
    pattern = names.version if names.version and "{" not in names.version else None
    if pattern is not None and not pattern.split("~")[0].startswith(f"{version}."):
        return None
    exact = version.count(".") == 2
    return choices(
        case, names, cuda=row.series, version=None if pattern else (f"{version}-*" if exact else f"{row.series}.*")
    )


@rules.judges(
    "R24-toolkit-source",
    means="The source has the toolkit requested on the host, in that version",
    facts="systems, packages",
    needs=("systems.first_toolkit",),
)
def toolkit_in_source(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a toolkit that the source does not have: Debian 12 has only 11.8."""
    row, offer = case.question.toolkit, case.candidate.offer
    if row is None or offer is None:
        return
    version = case.question.request.toolkit
    if row.driver_only:
        yield refuse(f"CUDA {version} was never a toolkit: only the driver of branch {row.branch} carries it")
    elif _host_toolkit(case, row) is None:
        yield refuse(f"{case.source_name} has no CUDA toolkit {version}")
    elif offer.first_toolkit is not None and number(row.series) < number(offer.first_toolkit):
        field = f"origins.{case.candidate.source}.first_toolkit"
        text = f"{case.source_name} starts at CUDA {offer.first_toolkit}: no toolkit {version}"
        yield refuse(text, sure=case.candidate.system.sure(field))


@rules.decides("R24-toolkit-source", "toolkit")
def toolkit(case: CandidateCase) -> Iterator[Choice]:
    """Decide the toolkit: on the host only if it is requested."""
    row = case.question.toolkit
    if row is None:
        yield Choice("toolkit", None, "not requested: containers have their own")
        return
    packages = _host_toolkit(case, row)
    if packages is None:
        yield Choice("toolkit", None, f"{case.source_name} has no CUDA toolkit {case.question.request.toolkit}")
        return
    value = Library(version=case.question.request.toolkit, packages=tuple(package.name for package in packages))
    yield Choice("toolkit", value, f"requested on the host: {case.question.request.toolkit}", packages)


@rules.decides(
    "R04-arch-cuda",
    "cudnn",
    "nccl",
    means="No CUDA with a lowest compute capability above the GPU's (CUDA 13: 7.5), and no cuDNN or NCCL built for it",
    facts="cuda_majors, architectures, cudnn, nccl",
    needs=(
        "architectures.last_cuda?",
        "cuda_majors.min_compute_capability",
    ),
)
def host_libraries(case: CandidateCase) -> Iterator[Choice]:
    """Decide cuDNN and NCCL beside a toolkit on the host, in builds that support the GPUs."""
    row = case.question.toolkit
    if row is None:
        for field in ("cudnn", "nccl"):
            yield Choice(field, None, "no toolkit on the host requested: containers have their own")
        return
    yield _cudnn(case, row)
    yield _nccl(case, row)


def _cudnn(case: CandidateCase, toolkit_row: Toolkit) -> Choice:
    lowest = min((gpu.capability for gpu in case.models), default=None)
    rows = sorted(case.question.catalog.cudnn.values(), key=lambda row: number(row.since), reverse=True)
    for row in rows:
        build = row.builds.get(toolkit_row.major)
        knows = lowest is None or lowest >= number(row.min_compute_capability)
        reached = case.candidate.compat is not None or build is None or case.candidate.number >= number(build.floor)
        if build is None or not knows or not reached:
            continue
        names = package_set(case, "cudnn", release=int(row.since.split(".")[0]))
        if names is None:
            return Choice("cudnn", None, f"{case.source_name} has no cuDNN")
        latest = build.until or build.latest or row.latest
        packages = choices(case, names, cuda=toolkit_row.series, version=upstream_pattern(case, latest))
        why = f"newest known for CUDA {toolkit_row.major} and compute capability {row.min_compute_capability}"
        return Choice("cudnn", Library(version=latest, packages=tuple(p.name for p in packages)), why, packages)
    return Choice("cudnn", None, f"no cuDNN for CUDA {toolkit_row.major} runs on every GPU of the node")


def _nccl(case: CandidateCase, toolkit_row: Toolkit) -> Choice:
    names = package_set(case, "nccl")
    if names is None:
        return Choice("nccl", None, f"{case.source_name} has no NCCL")
    lowest = min((gpu.capability for gpu in case.models), default=None)
    rows = sorted(case.question.catalog.nccl.values(), key=lambda row: number(row.id), reverse=True)
    for row in rows:
        floor = row.min_compute_capability.get(toolkit_row.major)
        builds = [build for build in row.builds if build.split(".")[0] == str(toolkit_row.major)]
        if not builds or (floor is not None and lowest is not None and lowest < number(floor)):
            continue
        build = max(builds, key=number)
        packages = choices(case, names, cuda=toolkit_row.series, version=names.version or f"{row.id}-*+cuda{build}")
        why = f"newest known build for CUDA {toolkit_row.major}, with a version ending in +cuda{build}"
        return Choice("nccl", Library(version=row.id, packages=tuple(p.name for p in packages)), why, packages)
    return Choice("nccl", None, f"no NCCL build for CUDA {toolkit_row.major} runs on every GPU of the node")


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


@rules.decides("R20-framework", "frameworks")
def frameworks(case: CandidateCase) -> Iterator[Choice]:
    """Decide the newest wheels that this driver and these GPUs can run."""
    newest = {name: _newest(case, name) for name in ("pytorch", "tensorflow")}
    if not any(newest.values()):
        yield Choice("frameworks", None, "no framework of the catalog has a wheel for this driver and these GPUs")
        return
    value = Frameworks.model_validate(
        {
            key: part
            for name, pair in newest.items()
            for key, part in ((name, pair and pair[0]), (f"{name}_cuda", pair and pair[1]))
        }
    )
    yield Choice("frameworks", value, "newest releases with wheels for this driver's CUDA and these GPUs")


def framework_builds(case: CandidateCase, row: Framework, builds: Iterable[str] | None = None) -> list[str]:
    """Return the CUDA series of a framework release with wheels that the case's driver and GPUs can run.

    ``builds`` default: those of the release that are not experimental.
    """
    return [
        cuda
        for cuda in (row.builds if builds is None else builds)
        if _driver_runs(case, cuda) and _gpus_run(case, row, cuda)
    ]


def _newest(case: CandidateCase, name: str) -> tuple[str, str] | None:
    """Return release and CUDA: the requested release of a requested framework, else the newest."""
    requested = case.question.framework
    rows = [row for row in case.question.catalog.frameworks.values() if row.name == name]
    rows = [row for row in rows if requested is None or requested.name != name or row == requested]
    for row in sorted(rows, key=lambda row: number(row.version), reverse=True):
        runs = framework_builds(case, row)
        if runs:
            # Native support first: a newer CUDA by minor-version compatibility lacks PTX of its own.
            branch_cuda = case.candidate.branch.native_cuda
            native = [cuda for cuda in runs if branch_cuda is not None and number(cuda) <= number(branch_cuda)]
            return row.version, max(native or runs, key=number)
    return None


def _driver_runs(case: CandidateCase, cuda: str) -> bool:
    major = case.question.catalog.cuda_majors.get(cuda.split(".", maxsplit=1)[0])
    return major is not None and case.candidate.number >= number(major.floor)


def _gpus_run(case: CandidateCase, framework: Framework, cuda: str) -> bool:
    least = framework.min_compute_capability
    if case.candidate.arch not in framework.arches:
        return False
    if least is not None and any(gpu.capability < number(least) for gpu in case.models):
        return False
    if framework.name == "pytorch":
        wheels = [
            row
            for row in case.question.catalog.wheels.values()
            if covers(row.since, row.until, framework.version) and cuda in row.cuda and row.arch == case.candidate.arch
        ]
        if not wheels:
            return False
        return all(_in_wheel(gpu.capability, wheels[0].compute_capabilities, wheels[0].ptx) for gpu in case.models)
    catalog = case.question.catalog
    for gpu in case.models:
        architecture = catalog.architectures[gpu.architecture]
        first = architecture.first_cuda.get(gpu.compute_capability)
        if first is None or number(cuda) < number(first):
            return False
        if architecture.last_cuda is not None and int(cuda.split(".", maxsplit=1)[0]) > architecture.last_cuda:
            return False
    return True


def covers(since: str, until: str | None, version: str) -> bool:
    """Return True if a version is inside a range with an inclusive end; the range is open without an end."""
    return number(since) <= number(version) and (until is None or number(version) <= number(until))


def _in_wheel(capability: Number, listed: Iterable[str], ptx: str | None) -> bool:
    """Return True if a wheel supports a capability: code runs on later minors of its major, PTX on everything later."""
    if ptx is not None and capability >= number(ptx):
        return True
    return any(capability.major == number(code).major and capability >= number(code) for code in listed)
