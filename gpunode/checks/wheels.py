"""Checks on the builds in an image: support of PyTorch, cuDNN and NCCL for these GPUs and this CUDA."""

import re
from collections.abc import Iterable, Iterator, Sequence

from packaging.version import Version

from gpunode.catalog import Row, WheelArchitectures, load
from gpunode.checks.compare import at_most, failed, parsed_version, passed, undetermined, warned
from gpunode.checks.gpus import model_of
from gpunode.checks.inside_driver import driver_runs
from gpunode.checks.registry import CheckResult, Skip, Status, Undetermined, registry
from gpunode.checks.workload import image_of, known, of, record_check, single_record, where
from gpunode.facts.models.workload import CudaValues, Record, SystemValues, TorchValues
from gpunode.facts.node import NodeFacts
from gpunode.text import listed

Inside = TorchValues | CudaValues
LIBRARIES_SOURCE = "catalog (libraries.yml)"
CPP_EXTENSION = "torch.utils.cpp_extension of PyTorch: another major version ends the build"
NEWER = (
    "Update gpunode: a newer catalog may have the release. gpunode catalog list cudnn and gpunode catalog list nccl "
    "show those of this one."
)
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d{2,3})([af]?)")


def capabilities(node: NodeFacts) -> tuple[Version, ...]:
    """Return compute capabilities of the node's GPUs, each once: as in the container, else as in the catalog."""
    seen: set[str] = set()
    kinds: tuple[tuple[str, type[Inside]], ...] = (("versions.torch", TorchValues), ("versions.cuda", CudaValues))
    for name, kind in kinds:
        values = known(node, name, kind)
        if not seen and values is not None:
            seen = {gpu.compute_capability for gpu in values.gpus if gpu.compute_capability}
    if not seen:
        matches = [model_of(device) for device in node.gpus_on_bus or ()]
        by_catalog = [match.common.get("compute_capability") for match in matches if match]
        seen = {str(capability) for capability in by_catalog if capability is not None}
    return tuple(sorted(Version(text) for text in seen))


def runs_on(architectures: Iterable[str], capability: Version) -> bool:
    """Return True if code runs on a capability: on later minors of its major, ``sm_90a`` on 9.0 only, PTX on all
    newer."""
    for text in architectures:
        match = _ARCHITECTURE.fullmatch(text)
        if match is None:
            continue
        kind, digits, limited = match.groups()
        built = Version(f"{digits[:-1]}.{digits[-1]}")
        if limited == "a":
            fits = built == capability
        elif kind == "compute":
            fits = capability >= built
        else:
            fits = capability.major == built.major and capability >= built
        if fits:
            return True
    return False


def wheel_architectures(row: WheelArchitectures) -> list[str]:
    """Return the architectures of a wheel of the catalog, as PyTorch names them."""
    names = [f"sm_{text.replace('.', '')}" for text in row.compute_capabilities]
    return [*names, *([f"compute_{row.ptx.replace('.', '')}"] if row.ptx else [])]


@registry.check(
    "framework.wheel",
    level="standard",
    needs=("records", "loaded_driver"),
    needs_gpu=True,
    means="The image's PyTorch is a CUDA build with code for every GPU of the node.",
    remedy="Install a build that supports these GPUs; gpunode plan -i INVENTORY shows one.",
    state="observe",
    actions=("fix_configuration",),
)
def wheel(node: NodeFacts) -> Iterator[CheckResult]:
    try:
        record, torch = single_record(node, "versions.torch", TorchValues)
    except Skip:
        if not _without_framework(node):
            raise
        yield warned(
            f"neither PyTorch nor TensorFlow is in {image_of(node)}: no framework was tried",
            remedy="Choose an image with the framework that will be used; with --no-container, name the Python of its "
            "virtual environment by --python.",
        )
        return
    present = capabilities(node)
    if not present:
        raise Undetermined("the compute capability of the GPUs is unknown and not in the catalog")
    remedy = _build_for(node, present)
    if torch.cuda is None:
        if node.simulated:
            raise Skip(f"PyTorch {torch.version} is a build for the processor, and the GPUs are simulated")
        fault = f"PyTorch {torch.version} is a build for the processor: it uses no GPU{where(record)}"
        yield failed(fault, expected="a build for CUDA", measured=torch.version, remedy=remedy)
        return
    if not torch.architectures:
        raise Undetermined(f"PyTorch {torch.version} does not report its architectures")
    left = [str(capability) for capability in present if not runs_on(torch.architectures, capability)]
    yield at_most(
        len(left),
        0,
        f"PyTorch {torch.version} (CUDA {torch.cuda}) has code for every GPU",
        f"PyTorch {torch.version} has no code for compute capability {listed(left)}{where(record)}",
        expected=listed([str(capability) for capability in present]),
        measured=listed(torch.architectures, most=12),
        remedy=remedy,
    )


def _without_framework(node: NodeFacts) -> bool:
    """Return whether the image has neither framework, which proves nothing; TensorFlow alone is valid."""
    tensorflow = [record for record in of(node, "versions.tensorflow") if not (record.skipped or record.error)]
    return bool(of(node, "versions.torch")) and not tensorflow


def _build_for(node: NodeFacts, present: Sequence[Version]) -> str | None:
    """Return the newest release and CUDA with a wheel for driver and GPUs; None: the catalog has none.

    A CUDA that the driver runs by minor-version compatibility alone, which container.cuda warns about, comes last.
    """
    catalog = load()
    driver = node.loaded_driver.version if node.loaded_driver else None
    fitting = []
    for row in catalog.wheels.values():
        names = wheel_architectures(row)
        if row.arch != node.architecture or not all(runs_on(names, capability) for capability in present):
            continue
        for series in row.cuda:
            number = Version(series)
            status = Status.PASS if driver is None else driver_runs(node, "", number, driver).status
            if status in (Status.PASS, Status.WARN):
                fitting.append((status is Status.PASS, Version(row.until or row.since), number))
    if not fitting:
        return None
    index = f"cu{str(max(fitting)[-1]).replace('.', '')}"
    return f"pip install torch --index-url https://download.pytorch.org/whl/{index}, or an image with that build."


@record_check(
    "framework.build-tools",
    "versions.system",
    SystemValues,
    after=("framework.wheel",),
    means="The image can compile extensions of PyTorch at run time, as DeepSpeed does: the nvcc that PyTorch uses is "
    "of its CUDA, with a C++ compiler and ninja.",
    remedy="Set CUDA_HOME and PATH to the toolkit of PyTorch's CUDA (torch.version.cuda), apt-get install g++ "
    "ninja-build libaio-dev; or install wheels that are built already.",
    state="observe",
    actions=("fix_configuration",),
)
def build_tools(values: SystemValues, record: Record, node: NodeFacts) -> CheckResult:
    torch, tools = known(node, "versions.torch", TorchValues), values.build
    if torch is None or torch.cuda is None:
        raise Skip("no PyTorch for CUDA in the image")
    if tools is None:
        raise Undetermined("the tools are unknown: an older payload wrote the record")
    if tools.nvcc is None:
        raise Skip("no nvcc in the image: extensions need wheels that are built already")
    nvcc, cuda = parsed_version(tools.nvcc), parsed_version(torch.cuda)
    if nvcc is None or cuda is None:
        raise Undetermined(f"nvcc '{tools.nvcc}' and CUDA '{torch.cuda}' are not valid versions")
    if nvcc.major != cuda.major:
        return failed(
            f"nvcc of {tools.cuda_home} is of CUDA {nvcc}, PyTorch of {cuda}: extensions do not compile{where(record)}",
            expected=str(cuda),
            measured=str(nvcc),
            source=CPP_EXTENSION,
        )
    lacking = [
        text
        for text, wrong in {
            f"PATH has nvcc {tools.nvcc_in_path}, CUDA_HOME {nvcc}": tools.nvcc_in_path not in (None, tools.nvcc),
            "no C++ compiler": tools.compiler is None,
            "no ninja": not tools.ninja,
        }.items()
        if wrong
    ]
    if lacking:
        return warned(f"{', '.join(lacking)}: extensions do not compile as expected{where(record)}")
    without = "" if tools.libaio else "; without libaio DeepSpeed's async_io is not built"
    return passed(f"nvcc {nvcc}, C++ compiler {tools.compiler}, ninja for PyTorch with CUDA {cuda}{without}")


@record_check(
    "framework.cudnn-version",
    "versions.torch",
    TorchValues,
    on_gpu=True,
    after=("framework.wheel",),
    means="PyTorch's cuDNN is built for its CUDA and supports these GPUs.",
    remedy="Use a PyTorch build with a matching cuDNN; see gpunode catalog list cudnn.",
    state="observe",
    actions=("fix_configuration",),
)
def cudnn_version(values: TorchValues, record: Record, node: NodeFacts) -> CheckResult:
    if values.cudnn is None:
        return failed(f"PyTorch {values.version} finds no cuDNN{where(record)}")
    version, cuda = parsed_version(values.cudnn), parsed_version(values.cuda)
    if version is None or cuda is None:
        raise Undetermined(f"cuDNN '{values.cudnn}' and CUDA '{values.cuda}' are not valid versions")
    rows = [row for row in load().cudnn.values() if _within(version, row.since, row.until)]
    if not rows:
        return undetermined(f"the catalog does not have cuDNN {values.cudnn}", source=LIBRARIES_SOURCE, remedy=NEWER)
    row = rows[0]
    name = f"cuDNN {values.cudnn}"
    if cuda.major not in row.builds:
        message = f"no {name} exists for CUDA {cuda.major}{where(record)}"
        return CheckResult(_fault(row, "builds"), message, measured=values.cudnn, source=LIBRARIES_SOURCE)
    floor = Version(row.min_compute_capability)
    below = [str(capability) for capability in capabilities(node) if capability < floor]
    return at_most(
        len(below),
        0,
        f"{name} is built for CUDA {cuda.major} and these GPUs",
        f"{name} needs compute capability {floor}, here is {listed(below)}{where(record)}",
        fault=_fault(row, "min_compute_capability"),
        expected=f"at least {floor}" if below else None,
        measured=values.cudnn,
        source=LIBRARIES_SOURCE,
    )


@record_check(
    "framework.nccl-version",
    "versions.torch",
    TorchValues,
    on_gpu=True,
    after=("framework.wheel",),
    means="PyTorch's NCCL is built for its CUDA and supports these GPUs.",
    remedy="Use a PyTorch build with a matching NCCL; see gpunode catalog list nccl.",
    state="observe",
    actions=("fix_configuration",),
)
def nccl_version(values: TorchValues, record: Record, node: NodeFacts) -> CheckResult:
    if values.nccl is None:
        several = values.count > 1
        fault = f"PyTorch {values.version} carries no NCCL{where(record)}"
        return CheckResult(Status.FAIL if several else Status.SKIP, fault)
    version, cuda = parsed_version(values.nccl), parsed_version(values.cuda)
    if version is None or cuda is None:
        raise Undetermined(f"NCCL '{values.nccl}' and CUDA '{values.cuda}' are not valid versions")
    older = [row for row in load().nccl.values() if Version(row.id) <= version]
    if not older:
        return undetermined(f"the catalog has no NCCL as old as {values.nccl}", source=LIBRARIES_SOURCE, remedy=NEWER)
    row = max(older, key=lambda one_row: Version(one_row.id))
    name = f"NCCL {values.nccl}"
    if cuda.major not in row.cuda_majors:
        message = f"no {name} exists for CUDA {cuda.major}{where(record)}"
        return CheckResult(_fault(row, "cuda_majors"), message, measured=values.nccl, source=LIBRARIES_SOURCE)
    floor = row.min_compute_capability.get(cuda.major)
    below = [str(each) for each in capabilities(node) if floor is not None and each < Version(floor)]
    return at_most(
        len(below),
        0,
        f"{name} is built for CUDA {cuda.major} and these GPUs",
        f"{name} for CUDA {cuda.major} needs compute capability {floor}, here is {listed(below)}",
        fault=_fault(row, "min_compute_capability"),
        expected=f"at least {floor}" if below else None,
        measured=values.nccl,
        source=LIBRARIES_SOURCE,
    )


def _fault(row: Row, field: str) -> Status:
    return Status.FAIL if row.sure(field) else Status.WARN


def _within(version: Version, since: str, until: str | None) -> bool:
    """Return True within the range, compared to the precision of the shorter version: 9.10.2 is within ...
    9.10.2.21."""
    if version < Version(since):
        return False
    if until is None:
        return True
    last = Version(until).release
    return version.release <= last[: max(len(version.release), 1)]
