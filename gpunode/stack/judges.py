"""Rules that refuse a candidate or warn about it. Each function is one rule."""

from collections.abc import Iterator

from gpunode.catalog import Gpu, OriginOffer, driver_rules
from gpunode.catalog.hardware import FIRST_OPEN_BRANCH, Flavour
from gpunode.catalog.origins import upstream_version
from gpunode.stack.candidates import is_native, past_eol
from gpunode.stack.consequences import container_toolkit, dcgm
from gpunode.stack.libraries import compat_on_host
from gpunode.stack.naming import DRIVER_VARIANTS, package_set
from gpunode.stack.question import GpuTerm, Question, number
from gpunode.stack.rules import CandidateCase, Objection, over_gpus, refuse, rules, warn


@rules.judges(
    "R01-minor-floor",
    means="The driver reaches the floor of the requested CUDA's major (11: 450.80.02, 12: 525.60.13, 13: "
    "580.65.06), or a cuda-compat package fills the gap",
    facts="cuda_majors, toolkits",
    needs=(
        "toolkits.floor?",
        "cuda_majors.floor",
    ),
)
def minor_floor(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a driver below the floor of the requested CUDA: CUDA 13 on 570 does not start."""
    candidate = case.candidate
    if candidate.compat is not None:
        return
    for user, row in case.question.requested_cuda:
        floor = case.question.floor(row)
        if candidate.number < number(floor):
            yield refuse(
                f"CUDA {row.series} for {user} needs driver {floor} or newer, and this is {candidate.version}",
                sure=row.sure("floor"),
            )


@rules.judges(
    "R02-native",
    means="Below the driver of the CUDA itself only minor-version compatibility holds: a warning, for PTX of newer "
    "toolkits is not compiled there",
    facts="toolkits",
    needs=("toolkits.branch",),
)
def native(case: CandidateCase) -> Iterator[Objection]:
    """Warn of minor-version compatibility: CUDA 13.2 on 580 starts, and cannot compile PTX of 13.2."""
    candidate = case.candidate
    if candidate.compat is not None or is_native(case.question, candidate):
        return
    for user, row in case.question.requested_cuda:
        full = row.driver or f"a driver of branch {row.branch}"
        yield warn(
            f"CUDA {row.series} for {user} runs on {candidate.version} by minor-version compatibility: its PTX is "
            f"not compiled at run time, and new driver features are missing; full support from {full}"
        )


@rules.judges(
    "R03-arch-last-branch",
    means="No branch newer than the last one that supports the GPU (Kepler 470; Maxwell, Pascal, Volta 580)",
    facts="gpus, architectures",
    needs=("gpus.last_branch?",),
)
def last_branch(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a branch after the last one that supports the GPU: 595 does not support a V100."""
    branch = case.candidate.branch.number

    def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
        last = driver_rules.last_branch(gpu, branch)
        if last is None:
            return None
        return refuse(f"{term.named(gpu)} is driven up to branch {last.value}, not by {branch}", sure=last.sure)

    yield from over_gpus(case.question, against)


@rules.asks("R04-arch-cuda")
def too_old_for_cuda(question: Question) -> Iterator[Objection]:
    """Refuse a CUDA without code for a GPU: CUDA 13 has none for a V100."""
    catalog = question.catalog
    for user, row in question.requested_cuda:
        major = catalog.cuda_majors[str(row.major)]

        def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
            architecture = catalog.architectures[gpu.architecture]
            last = architecture.last_cuda
            if last is not None and row.major > last:  # noqa: B023 (called before the next round)
                sure = architecture.sure("last_cuda")
            elif gpu.capability < number(major.min_compute_capability):  # noqa: B023
                sure = gpu.sure("compute_capability") and major.sure("min_compute_capability")  # noqa: B023
            else:
                return None
            return refuse(
                f"{term.named(gpu)} is below the floor of CUDA {major.id}, which is compute capability "  # noqa: B023
                f"{major.min_compute_capability}: no CUDA {row.series} for {user}",  # noqa: B023
                sure=sure,
            )

        yield from over_gpus(question, against)


def _unknown_to(question: Question, subject: str, cuda: str) -> Iterator[Objection]:
    """Yield objections for GPUs that are newer than a CUDA."""

    def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
        first = driver_rules.first_cuda(question.catalog, gpu, cuda)
        if first is None:
            return None
        text = f"{subject} does not support {term.named(gpu)}; CUDA {first.value} and later do"
        return refuse(text, sure=first.sure)

    yield from over_gpus(question, against)


@rules.asks(
    "R05-arch-first-cuda",
    means="The requested CUDA, and the driver's own, support the GPU's architecture (Blackwell from 12.8, Ada and "
    "Hopper from 11.8)",
    facts="architectures, branches",
    needs=(
        "branches.native_cuda",
        "architectures.first_cuda",
    ),
)
def request_too_old(question: Question) -> Iterator[Objection]:
    """Refuse a requested CUDA older than a GPU: CUDA 12.2 does not support a B200."""
    for user, row in question.requested_cuda:
        yield from _unknown_to(question, f"CUDA {row.series} for {user}", row.series)


@rules.judges("R05-arch-first-cuda")
def driver_too_old(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a driver with a CUDA older than a GPU."""
    branch = case.candidate.branch
    if branch.native_cuda is not None:
        subject = f"branch {branch.number} (CUDA {branch.native_cuda})"
        yield from _unknown_to(case.question, subject, branch.native_cuda)


def _needed(question: Question) -> set[str]:
    """Return the flavours that some GPU of the node requires, whichever model a name stands for."""
    alone = [{gpu.modules for gpu in term.models} for term in question.gpus]
    return {flavours.copy().pop() for flavours in alone if len(flavours) == 1 and flavours != {"either"}}


def _flavour_needed(case: CandidateCase, needed: Flavour) -> Iterator[Objection]:
    question = case.question
    if _needed(question) >= {"open", "proprietary"} or case.candidate.flavour == needed:
        return

    def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
        only = driver_rules.modules(question.catalog, gpu, case.candidate.flavour)
        if only is None or only.value != needed:
            return None
        return refuse(f"{term.named(gpu)} requires the {needed} kernel modules", sure=only.sure)

    yield from over_gpus(case.question, against)


@rules.judges(
    "R06-open-required",
    means="Blackwell and Grace Hopper require the open kernel modules",
    facts="gpus, architectures",
    needs=("gpus.modules",),
)
def open_required(case: CandidateCase) -> Iterator[Objection]:
    """Refuse proprietary modules for a GPU that requires the open ones: a B200 does not start with them."""
    yield from _flavour_needed(case, "open")


@rules.judges(
    "R07-proprietary-required",
    means="Maxwell, Pascal and Volta require the proprietary kernel modules",
    facts="gpus, architectures",
    needs=("gpus.modules",),
)
def proprietary_required(case: CandidateCase) -> Iterator[Objection]:
    """Refuse open modules for a GPU without GSP, which they require: a V100 has none."""
    yield from _flavour_needed(case, "proprietary")


@rules.judges(
    "R08-no-proprietary",
    means="The module's flavour is in the branch's packages (open from 515 on, proprietary up to 610; 615 is unsure)",
    facts="branches",
    needs=("branches.modules",),
)
def flavour_in_branch(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a flavour that the branch does not have: 620 has no proprietary modules, 510 no open ones."""
    branch, flavour = case.candidate.branch, case.candidate.flavour
    if flavour not in branch.modules:
        has = " and ".join(branch.modules)
        yield refuse(
            f"branch {branch.number} has no {flavour} kernel modules, only {has} ones", sure=branch.sure("modules")
        )


@rules.asks(
    "R09-mixed-flavour",
    means="A GPU that needs the open modules and one that needs the proprietary ones cannot share a node",
    facts="gpus, architectures",
)
def mixed_flavour(question: Question) -> Iterator[Objection]:
    """Refuse V100 and B200 in one node: one kernel loads one module, and no flavour supports both."""
    if not _needed(question) >= {"open", "proprietary"}:
        return
    by_flavour = {
        flavour: [term.named(gpu) for term in question.gpus for gpu in term.models[:1] if gpu.modules == flavour]
        for flavour in ("open", "proprietary")
    }
    yield refuse(
        f"{', '.join(by_flavour['proprietary'])} needs the proprietary kernel modules and "
        f"{', '.join(by_flavour['open'])} the open ones; a node loads one of them"
    )


def _unlisted(case: CandidateCase, term: GpuTerm, gpu: Gpu) -> Objection | None:
    """Return the objection to a release with a list of GPUs that does not contain the id; else None."""
    candidate, branch = case.candidate, case.candidate.branch.number
    first = driver_rules.first_listed(gpu, branch, candidate.number)
    if first is None:
        late = next(driver_rules.listed_late(gpu, branch, candidate.number), None)
        return None if late is None else warn(f"{term.label} on {candidate.version}: {late}")
    if first.value == "never":
        return refuse(f"no release of branch {branch} lists {term.label} among its GPUs", sure=first.sure)
    text = f"no release of branch {branch} before {first.value} lists {term.label} among its GPUs, and this is {{}}"
    if branch == FIRST_OPEN_BRANCH:
        return warn(text.format(candidate.version)) if candidate.flavour == "open" else None
    return refuse(text.format(candidate.version), sure=first.sure)


@rules.judges(
    "R10-gpu-min-driver",
    means="The driver reaches the documented minimum of the GPU or board, and is a release that lists the GPU's id,"
    " whichever the flavour",
    facts="gpus, platforms",
    needs=("gpus.first_listed",),
)
def gpu_min_driver(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a release below the documented minimum, or with a README that does not list the GPU."""
    candidate, platform = case.candidate, case.question.platform
    lowest = None if platform is None else driver_rules.min_driver(platform, candidate.number)
    if platform is not None and lowest is not None:
        text = f"{platform.name} needs driver {lowest.value} or newer, and this is {candidate.version}"
        yield refuse(text, sure=lowest.sure)

    def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
        minimum = driver_rules.min_driver(gpu, candidate.number)
        if minimum is not None:
            text = f"{term.named(gpu)} needs driver {minimum.value} or newer, and this is {candidate.version}"
            return refuse(text, sure=minimum.sure)
        boards = driver_rules.min_driver_of_boards(case.question.catalog, gpu, candidate.number)
        if platform is None and boards is not None:
            return refuse(f"{term.named(gpu)} is on boards that require driver {boards.value} or newer")
        return _unlisted(case, term, gpu)

    yield from over_gpus(case.question, against)


@rules.judges("R13-branch-eol")
def branch_eol(case: CandidateCase) -> Iterator[Objection]:
    """Warn of a branch past its end of life, or refuse it: 535 ended in June 2026."""
    branch, question = case.candidate.branch, case.question
    if past_eol(case.candidate, question):
        basis = "" if branch.eol_promised else " by the rule of thumb (release plus one year, LTSB three)"
        text = f"branch {branch.number} is past its end of life: {branch.eol}{basis}"
        yield refuse(text, sure=branch.eol_promised) if question.request.past_eol == "refuse" else warn(text)
    elif branch.superseded_by is not None:
        yield warn(f"branch {branch.number} gets no more releases: it was superseded by {branch.superseded_by}")
    elif branch.eol is None:
        yield warn(f"the end of life of branch {branch.number} is unknown")


@rules.judges("R14-compat-matrix")
def compat_matrix(case: CandidateCase) -> Iterator[Objection]:
    """Refuse cuda-compat outside NVIDIA's table: cuda-compat-13-0 needs 535 or 570, in their lifetime, and data-centre
    GPUs."""
    candidate = case.candidate
    compat, branch = candidate.compat, candidate.branch
    if compat is None:
        return
    if branch.number not in compat.works_on:
        yield refuse(f"{compat.package} does not exist for branch {branch.number}", sure=compat.sure("works_on"))
    if past_eol(candidate, case.question):
        text = f"{compat.package} is not supported on branch {branch.number}, which ended on {branch.eol}"
        yield refuse(text, sure=branch.eol_promised)
    if compat_on_host(case) and case.lacks("cuda-compat"):
        yield refuse(f"{case.source_name} has no {compat.package}")
    if branch.type == "NFB":
        yield warn(f"NVIDIA excludes new-feature branches such as {branch.number} from {compat.package}")
    where = f"through {compat.package} on the host" if compat_on_host(case) else f"in an image with {compat.package}"
    yield warn(
        f"CUDA {compat.id} runs on branch {branch.number} only {where}, without OpenGL and Vulkan; "
        "without it once the driver is newer"
    )

    def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
        if gpu.market == "datacenter":
            return None
        text = f"{compat.package} works only on data-center GPUs, {term.label} is not one (error 804)"
        return refuse(text, sure=gpu.sure("market") and gpu.market != "workstation")

    yield from over_gpus(case.question, against)


@rules.judges("R15-distro-repo")
def distro_repo(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a branch that the source does not have: ubuntu2604 starts at 595, Debian 12 has only 535."""
    candidate, offer = case.candidate, case.candidate.offer
    system, branch = candidate.system, candidate.branch.number
    if offer is None:
        others = " and ".join(system.origins)
        yield refuse(f"{system.name} has no source {candidate.source!r}; it has {others}")
        return
    missing = list(_out_of_reach(case, offer))
    yield from missing
    names = package_set(case, "driver", (*DRIVER_VARIANTS, "precompiled"))
    if names is None and not any(verdict.refuses for verdict in missing):
        yield refuse(f"{case.source_name} has no packages of branch {branch} with {candidate.flavour} modules")
    named = case.question.driver_branch
    if named is not None and named.number != branch and offer.transitional.get(named.number) == branch:
        yield warn(f"branch {named.number} is transitional in {case.source_name}: its packages install {branch}")
    if names is not None and not names.by_role:
        yield warn(
            f"role nvidia_driver does not install {names.names[0]}: install the packages of this plan with apt-get"
        )
    held = offer.versions.get(branch, {}).get(candidate.flavour, ())
    wished = candidate.decided_by == "wish"
    if held and wished and candidate.version not in map(upstream_version, held):
        yield refuse(
            f"{case.source_name} has only {' and '.join(held)} of branch {branch}",
            sure=system.sure(f"origins.{candidate.source}"),
        )
    elif held:
        yield from _held_back(case, offer)
    elif wished and candidate.version not in candidate.branch.points:
        yield warn(f"{candidate.version} is not a release of branch {branch} in the catalog")


def _held_back(case: CandidateCase, offer: OriginOffer) -> Iterator[Objection]:
    """Yield the objection to a release that is older than other packages of its branch in an archive."""
    candidate = case.candidate
    every = offer.versions[candidate.branch.number]
    newest = max(
        (version for held in every.values() for version in held), key=lambda version: number(upstream_version(version))
    )
    if candidate.installed or candidate.number >= number(upstream_version(newest)):
        return
    if candidate.decided_by == "wish":
        yield warn(
            f"{case.source_name} has {newest}: {candidate.version} lacks its fixes, which include those of security"
        )
        return
    yield refuse(
        f"{case.source_name} has {every[candidate.flavour][0]} of the {candidate.flavour} kernel modules and {newest} "
        f"of the driver: apt does not install them together (driver {candidate.version} requests that release of "
        "all packages)",
        sure=candidate.system.sure(f"origins.{candidate.source}"),
    )


def _out_of_reach(case: CandidateCase, offer: OriginOffer) -> Iterator[Objection]:
    """Yield objections outside the bounds of the source for the system; only warnings for the installed driver."""
    candidate = case.candidate
    branch = candidate.branch.number
    sure = candidate.system.sure(f"origins.{candidate.source}") and not candidate.installed
    if branch in offer.transitional:
        other = offer.transitional[branch]
        yield refuse(f"branch {branch} is transitional in {case.source_name}: its packages install {other}", sure=sure)
    elif branch in offer.missing or (offer.branches and branch not in offer.branches):
        has = f"; it has {', '.join(map(str, offer.branches))}" if offer.branches else ""
        servers = " for servers" if offer.branches else ""
        yield refuse(f"{case.source_name} does not have branch {branch}{servers}{has}", sure=sure)
    if offer.first_branch is not None and branch < offer.first_branch:
        yield refuse(f"{case.source_name} starts at branch {offer.first_branch}: no {branch}", sure=sure)
    if offer.last_branch is not None and branch > offer.last_branch:
        yield refuse(f"{case.source_name} ends at branch {offer.last_branch}: no {branch}", sure=sure)
    if candidate.arch not in offer.arches:
        yield refuse(f"{case.source_name} has no packages for {candidate.arch}", sure=sure)


@rules.asks("R16-repo-mix")
def repo_mix(question: Question) -> Iterator[Objection]:
    """Refuse a second publisher in the driver closure; a switch of source must be requested."""
    installed = question.installed
    if installed is None:
        return
    if question.request.source is not None:
        if installed.runfile is not None:
            yield warn(f"a driver of a .run installer is on the node: remove it first with {installed.runfile}")
    elif len(installed.origins) > 1:
        yield refuse(
            f"drivers from {' and '.join(installed.origins)} are mixed on the node; a requested source replaces them"
        )
    elif installed.origins != (question.source,):
        yield refuse(
            f"the installed driver is from {installed.origins[0]}, not from {question.source}: a requested source "
            "replaces it"
        )


@rules.asks("R11-fm-exact")
def board_unknown(question: Question) -> Iterator[Objection]:
    """Warn if it is unknown or unsure whether the board has an NVSwitch."""
    board = question.board
    if board.unknown is not None:
        yield warn(board.unknown)
    elif board.unsure is not None:
        yield warn(f"{board.unsure} ({board.why})")


@rules.judges(
    "R21-no-service",
    means="A source without fabric manager, NVLSM or IMEX does not serve a board that needs them (Debian's "
    "archive); a stack without DCGM or container toolkit has a warning",
    facts="systems, platforms, dcgm, packages",
)
def no_service(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a source without the board's services: an HGX board without fabric manager has no CUDA."""
    board = case.question.board
    for service in board.services:
        if package_set(case, service) is None:
            text = (
                f"{case.source_name} has no {service} for branch {case.candidate.branch.number}, and the board needs it"
            )
            yield refuse(text, sure=board.unsure is None)
    if board.unknown is not None and case.lacks("fabric-manager"):
        yield warn(f"{case.source_name} has no fabric manager: a board with NVSwitches would not work")
    for component, decide in (("dcgm", dcgm), ("container-toolkit", container_toolkit)):
        if case.lacks(component):
            yield warn(f"{case.source_name} has no {component}: the stack omits it")
        else:
            yield from (warn(f"{choice.text}: the stack omits it") for choice in decide(case) if not choice.value)


@rules.judges(
    "R22-host-arch",
    means="The GPU exists for this CPU architecture (GH200, GB200, GB300: aarch64)",
    facts="gpus, platforms",
    needs=("gpus.hosts",),
)
def host_arch(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a GPU that does not exist for the architecture: a GH200 has an Arm CPU."""
    arch, platform = case.candidate.arch, case.question.platform
    if platform is not None and arch not in platform.hosts:
        yield refuse(f"{platform.name} is a machine with {' or '.join(platform.hosts)}", sure=platform.sure("hosts"))

    def against(term: GpuTerm, gpu: Gpu) -> Objection | None:
        if arch in gpu.hosts:
            return None
        return refuse(
            f"{term.label} exists only in machines with {' or '.join(gpu.hosts)}, not {arch}", sure=gpu.sure("hosts")
        )

    yield from over_gpus(case.question, against)


@rules.judges(
    "R23-kernel-floor",
    means="The kernel modules of either flavour build against this kernel: 4.15 or newer from branch 580 on, 3.10 "
    "from 510 on",
    facts="branches",
    needs=("branches.kernel_floor",),
)
def kernel_floor(case: CandidateCase) -> Iterator[Objection]:
    """Refuse a kernel that is too old to build the modules of either flavour."""
    release, branch = case.question.kernel_release, case.candidate.branch
    floor = branch.kernel_floor
    if release is not None and floor is not None and release < number(floor):
        text = f"the kernel modules of branch {branch.number} need kernel {floor} or newer, and this is "
        yield refuse(f"{text}{case.question.node.kernel}", sure=branch.sure("kernel_floor"))
