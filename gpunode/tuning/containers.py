"""Arguments of ``docker run``: GPUs for this engine, and limits for training."""

import re
from collections.abc import Iterator

from packaging.version import Version

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.tuning.model import LeftAlone, Setting

GIB = 2**30
SHM_MIN_BYTES = GIB
"""Recommended by NCCL's guide (``--shm-size=1g``)."""
SHM_PER_GPU_GIB = 8
STACK_BYTES = 64 * 2**20
STACK_MIN_BYTES = 8 * 2**20
"""NCCL: never unlimited, at least 8192 KiB."""
ENGINES = "catalog (libraries.yml, container_engines)"
NCCL_GUIDE = "catalog (sources.yml, ncclgdr)"
KIND = "nvidia.com/gpu"
GPUS_OPTION = (19, 3)
GPU_ARGUMENTS = ("--gpus", "--device")
"""Options of ``docker run``, by their names in the list of settings left alone."""


def gpus(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    """Yield the option for GPUs: CDI if the engine supports it, its own option or the runtime if it is older."""
    name = "--gpus"
    if not node.gpus_on_bus:
        reason = (
            f"the PCI bus could not be read: {node.gap('pci')}"
            if node.gpus_on_bus is None
            else ("no NVIDIA GPU on the node")
        )
        yield LeftAlone(name=name, reason=reason)
        return
    version = engine_version(node)
    if version is None:
        yield LeftAlone(name=name, reason="no Docker on the node")
    elif cdi_is_on(node, version):
        yield _by_cdi(node, version)
    elif _mode(node) in ("cdi", "csv"):
        why = f"the toolkit's mode is {_mode(node)}, in which its hook does not support --gpus"
        yield from _by_runtime(why, "catalog (sources.yml, nct)")
    elif version[:2] >= GPUS_OPTION:
        yield Setting(
            name=name,
            value="all",
            reason=f"Docker {_shown(version)} {_why_no_cdi(version)}: the toolkit's hook passes GPUs to containers",
            source=ENGINES,
        )
    else:
        yield from _by_runtime(f"Docker {_shown(version)} has no option --gpus", "catalog (sources.yml, nct_old)")


def _mode(node: NodeFacts) -> str | None:
    return node.containers.toolkit_mode if node.containers else None


def _by_runtime(why: str, source: str) -> Iterator[Setting]:
    yield Setting(name="--runtime", value="nvidia", reason=why, source=source)
    yield Setting(
        name="--env", value="NVIDIA_VISIBLE_DEVICES=all", reason="the runtime nvidia reads it: all GPUs", source=source
    )


def engine_version(node: NodeFacts) -> tuple[int, ...] | None:
    """Return the version of the running daemon, else of the program on disk: ``(28, 5, 1)``."""
    version = (node.docker.version if node.docker else None) or (node.tool_versions or {}).get("docker")
    match = re.match(r"(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?", version or "")
    return tuple(int(part) for part in match.groups() if part is not None) if match else None


def cdi_is_on(node: NodeFacts, version: tuple[int, ...]) -> bool:
    """Return whether the engine supports ``--device nvidia.com/gpu=all``; daemon.json can turn it off."""
    settings = (node.containers.docker if node.containers else None) or {}
    features = settings.get("features")
    chosen = features.get("cdi") if isinstance(features, dict) else None
    if version >= _from("cdi_default"):
        return chosen is not False and settings.get("cdi-spec-dirs") != [""]
    return version >= _from("cdi") and chosen is True


def _why_no_cdi(version: tuple[int, ...]) -> str:
    return "has CDI disabled" if version >= _from("cdi") else "does not support CDI"


def _from(what: str) -> tuple[int, ...]:
    """Return the first Docker with a feature."""
    return Version(getattr(load().container_engines["docker"], what)).release


def _by_cdi(node: NodeFacts, version: tuple[int, ...]) -> Setting | LeftAlone:
    specs = [spec for spec in node.cdi_specs or () if spec.kind == KIND]
    if not any("all" in spec.devices for spec in specs):
        reason = f"no CDI specification of {KIND} has the device all" if specs else f"no CDI specification of {KIND}"
        return LeftAlone(
            name="--device",
            reason=f"{reason}: the role nvidia_container_toolkit generates one (Docker {_shown(version)})",
        )
    return Setting(
        name="--device",
        value=f"{KIND}=all",
        reason=f"Docker {_shown(version)} passes GPUs by CDI, which survives systemctl daemon-reload",
        source=ENGINES,
    )


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def limits(node: NodeFacts) -> Iterator[Setting | LeftAlone]:
    """Yield shared memory, locked memory, stack."""
    gib, reason = shm_gib(node)
    yield Setting(name="--shm-size", value=f"{gib}g", reason=reason, source=f"at least 1 GiB: {NCCL_GUIDE}")
    yield Setting(
        name="--ulimit",
        value="memlock=-1",
        reason="RDMA and pinned memory are locked memory; Docker's default is 64 KiB to 8 MiB",
        source=NCCL_GUIDE,
    )
    yield Setting(
        name="--ulimit",
        value=f"stack={STACK_BYTES}",
        reason="64 MiB for every thread: enough for deep recursion; NCCL does not support unlimited",
        source=NCCL_GUIDE,
    )
    if len(node.numa or ()) > 1:
        yield Setting(
            name="--cap-add",
            value="SYS_NICE",
            reason=f"{len(node.numa or ())} NUMA nodes: NCCL allocates memory near a GPU",
            source=NCCL_GUIDE,
        )
    yield LeftAlone(
        name="--ipc host", reason="--shm-size is sufficient and keeps the container isolated from the host's memory"
    )
    yield LeftAlone(name="--privileged", reason="no setting requires it")


def shm_gib(node: NodeFacts) -> tuple[int, str]:
    """Return the maximum of ``/dev/shm`` in GiB, and the reason; memory is used only for data that is written there."""
    number = max(1, len(node.gpus_on_bus or ()))
    requested = SHM_PER_GPU_GIB * number
    if node.memory is None:
        return 1, "the minimum for NCCL; the node's memory is unknown"
    half = node.memory.total_mib // 1024 // 2
    if requested <= half:
        what = f"{number} GPU{'s' if number > 1 else ''}"
        return (
            requested,
            f"{SHM_PER_GPU_GIB} GiB for the DataLoader's batches and NCCL of {what}; Docker's default is 64 MiB",
        )
    return max(1, half), f"half of the node's memory ({node.memory.total_mib // 1024} GiB)"
