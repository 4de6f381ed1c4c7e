"""Whether a driver can drive a GPU model: the rules by which a stack is resolved, asked of the loaded driver."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from packaging.version import Version

from gpunode.catalog import Gpu, Platform, load
from gpunode.checks.gpus import CATALOG
from gpunode.checks.registry import Status, Verdict
from gpunode.errors import UsageError
from gpunode.facts.node import LoadedDriver

Objection = tuple[str, str | int, bool]
"""Message, what is expected, and whether the fact behind it is sure."""


def fits(loaded: LoadedDriver, models: Sequence[Gpu], boards: Sequence[Platform]) -> Verdict:
    """Return the verdict on a driver and the models that a PCI id stands for, on the platforms that the node may be.

    Only what holds for all models fails; what holds for some of them, or rests on a fact that is not sure, warns.
    """
    told = Verdict(Status.PASS, "", measured=loaded.version, source=CATALOG)
    found = [_objection(loaded, model, boards) for model in models]
    against = [objection for objection in found if objection is not None]
    if not against:
        listed_since = _not_listed(loaded, models[0])
        if listed_since is not None:
            return replace(told, status=Status.WARN, message=listed_since)
        flavour = f" ({loaded.flavour})" if loaded.flavour else ""
        return replace(told, message=f"driver {loaded.version}{flavour} fits {models[0].name}")
    message, expected, _ = against[0]
    all_refuse = len(against) == len(found) and all(sure for _, _, sure in against)
    return replace(told, status=Status.FAIL if all_refuse else Status.WARN, message=message, expected=expected)


def _objection(loaded: LoadedDriver, gpu: Gpu, boards: Sequence[Platform]) -> Objection | None:
    version = _number(loaded.version)
    if gpu.last_branch is not None and version.major > gpu.last_branch:
        message = f"branch {gpu.last_branch} is the last that drives {gpu.name}"
        return message, gpu.last_branch, gpu.sure("last_branch")
    if gpu.modules in ("open", "proprietary") and loaded.flavour not in (None, gpu.modules):
        message = f"{gpu.name} needs the {gpu.modules} kernel modules, the {loaded.flavour} ones are loaded"
        return message, gpu.modules, gpu.sure("modules")
    return _floor(version, gpu, boards) or _too_old_for_cuda(version, gpu)


def _floor(version: Version, gpu: Gpu, boards: Sequence[Platform]) -> Objection | None:
    """The documented minimum of the model, of the platform, of all boards that the model comes on."""
    if gpu.min_driver is not None and version < _number(gpu.min_driver):
        return f"{gpu.name} needs driver {gpu.min_driver} or newer", gpu.min_driver, gpu.sure("min_driver")
    own = [board for board in boards if board.min_driver is not None]
    if own and len(own) == len(boards):
        lowest = min(own, key=lambda board: _number(str(board.min_driver)))
        if version < _number(str(lowest.min_driver)):
            message = f"{lowest.name} needs driver {lowest.min_driver} or newer"
            return message, str(lowest.min_driver), lowest.sure("min_driver")
    with_it = [row for row in load().platforms.values() if gpu.id in row.gpus]
    floors = _sure_floors(with_it)
    if not boards and gpu.fabric != "none" and floors and len(floors) == len(with_it):
        floor = min(floors, key=_number)
        if version < _number(floor):
            return f"{gpu.name} comes on boards that need driver {floor} or newer", floor, True
    return None


def _sure_floors(rows: Iterable[Platform]) -> list[str]:
    return [row.min_driver for row in rows if row.min_driver is not None and row.sure("min_driver")]


def _too_old_for_cuda(version: Version, gpu: Gpu) -> Objection | None:
    """A driver that carries a CUDA from before the first that has code for the architecture."""
    try:
        branch = load().branch_of(str(version.major))
    except UsageError:
        return None
    architecture = load().architectures[gpu.architecture]
    first = architecture.first_cuda.get(gpu.compute_capability)
    if branch.native_cuda is None or first is None or _number(branch.native_cuda) >= _number(first):
        return None
    lowest = min(map(_number, architecture.first_cuda.values()))
    sure = architecture.sure("first_cuda") or _number(branch.native_cuda) < lowest
    message = f"branch {branch.id} (CUDA {branch.native_cuda}) does not know {gpu.name}: CUDA {first} is the first"
    return message, str(first), sure


def _not_listed(loaded: LoadedDriver, gpu: Gpu) -> str | None:
    """Why the README of the open kernel modules casts doubt on a release; None where it lists the model."""
    version = _number(loaded.version)
    first = gpu.first_listed_on(version.major)
    if loaded.flavour != "open" or first in ("from the start", "unknown"):
        return None
    if first == "never":
        return f"no release of branch {version.major} lists {gpu.name} among the GPUs of its open modules"
    if version >= _number(first):
        return None
    return f"no release of branch {version.major} before {first} lists {gpu.name} among the GPUs of its open modules"


def _number(version: str) -> Version:
    return Version(".".join(re.findall(r"\d+", version)[:4]) or "0")
