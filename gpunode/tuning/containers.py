"""Arguments of ``docker run``: GPUs for this engine, and limits for training."""

import re
from collections.abc import Iterator

from packaging.version import Version

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.tuning import slices
from gpunode.tuning.model import LeftAlone, NodeSlice, Setting

GIB = 2**30
SHM_MIN_BYTES = GIB
"""Recommended by NCCL's guide (``--shm-size=1g``)."""
STACK_BYTES = 64 * 2**20
STACK_MIN_BYTES = 8 * 2**20
"""NCCL: never unlimited, at least 8192 KiB."""
ENGINES = "catalog (libraries.yml, container_engines)"
NCT = "catalog (sources.yml, nct)"
NCCL_GUIDE = "catalog (sources.yml, ncclgdr)"
KIND = "nvidia.com/gpu"
GPUS_OPTION = (19, 3)
GPU_ARGUMENTS = ("--gpus", "--device")
"""Options of ``docker run``, by their names in the list of settings left alone."""


def gpus(node: NodeFacts, part: NodeSlice | None = None) -> Iterator[Setting | LeftAlone]:
    """Yield the option for all GPUs or those of a slice: CDI if the engine supports it, else its own option or the
    runtime."""
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
        yield from _by_cdi(node, version, part)
    elif _mode(node) in ("cdi", "csv"):
        why = f"the toolkit's mode is {_mode(node)}, in which its hook does not support --gpus"
        yield from _by_runtime(why, NCT, part)
    elif version[:2] < GPUS_OPTION:
        yield from _by_runtime(f"Docker {_shown(version)} has no option --gpus", "catalog (sources.yml, nct_old)", part)
    elif part is not None and len(part.gpus) > 1:
        # --gpus '"device=0,1"' has quotes of its own, which the shell's substitution of this line would not remove.
        yield from _by_runtime("several devices of --gpus need quotes within the argument", NCT, part)
    else:
        yield Setting(
            name=name,
            value="all" if part is None else f"device={_handles(part)}",
            reason=f"Docker {_shown(version)} {_why_no_cdi(version)}: the toolkit's hook passes GPUs to containers",
            source=ENGINES,
        )


def _mode(node: NodeFacts) -> str | None:
    return node.containers.toolkit_mode if node.containers else None


def _handles(part: NodeSlice) -> str:
    """Return UUIDs, which stay with their GPUs, else indices."""
    return ",".join(part.uuids if len(part.uuids) == len(part.gpus) else map(str, part.gpus))


def _by_runtime(why: str, source: str, part: NodeSlice | None) -> Iterator[Setting]:
    which, title = ("all", "all GPUs") if part is None else (_handles(part), part.title)
    yield Setting(name="--runtime", value="nvidia", reason=why, source=source)
    yield Setting(
        name="--env",
        value=f"NVIDIA_VISIBLE_DEVICES={which}",
        reason=f"the runtime nvidia reads it: {title}",
        source=source,
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


def _from(feature: str) -> tuple[int, ...]:
    """Return the first Docker with a feature."""
    return Version(getattr(load().container_engines["docker"], feature)).release


def _by_cdi(node: NodeFacts, version: tuple[int, ...], part: NodeSlice | None) -> Iterator[Setting | LeftAlone]:
    specs = [spec for spec in node.cdi_specs or () if spec.kind == KIND]
    known = {name for spec in specs for name in spec.devices}
    names = {"all": "all" if "all" in known else None} if part is None else _cdi_names(part, known)
    missing = [title for title, name in names.items() if name is None]
    if missing:
        reason = f"no CDI specification of {KIND}" + (f" has the device {', '.join(missing)}" if specs else "")
        yield LeftAlone(
            name="--device",
            reason=f"{reason}: the role nvidia_container_toolkit generates one (Docker {_shown(version)})",
        )
        return
    for name in names.values():
        yield Setting(
            name="--device",
            value=f"{KIND}={name}",
            reason=f"Docker {_shown(version)} passes GPUs by CDI, which survives systemctl daemon-reload",
            source=ENGINES,
        )


def _cdi_names(part: NodeSlice, known: set[str]) -> dict[str, str | None]:
    """Return each GPU's name in the specifications: its UUID, which stays with it, else its index then."""
    uuids = part.uuids if len(part.uuids) == len(part.gpus) else ("",) * len(part.gpus)
    return {
        f"gpu{index}": next((name for name in (uuid, str(index), f"gpu{index}") if name and name in known), None)
        for index, uuid in zip(part.gpus, uuids, strict=True)
    }


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def limits(node: NodeFacts, part: NodeSlice | None = None) -> Iterator[Setting | LeftAlone]:
    """Yield shared memory, locked memory, stack; for a slice its processors and memory too."""
    if part is None:
        gib, reason = shm_gib(node)
    else:
        yield from slices.limits(part)
        gib, reason = part.shm_gib, f"{slices.SHM_PER_GPU_GIB} GiB per GPU, at most half of the slice's memory"
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
    requested = slices.SHM_PER_GPU_GIB * number
    if node.memory is None:
        return 1, "the minimum for NCCL; the node's memory is unknown"
    half = node.memory.total_mib // 1024 // 2
    if requested <= half:
        gpu_count = f"{number} GPU{'s' if number > 1 else ''}"
        return (
            requested,
            f"{slices.SHM_PER_GPU_GIB} GiB for the DataLoader's batches and NCCL of {gpu_count}; Docker's default "
            "is 64 MiB",
        )
    return max(1, half), f"half of the node's memory ({node.memory.total_mib // 1024} GiB)"
