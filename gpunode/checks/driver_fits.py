"""Support of a GPU model by the loaded driver, by the bounds of ``gpunode.catalog.driver_rules``."""

import re
from collections.abc import Sequence

from packaging.version import Version

from gpunode.catalog import Gpu, Platform, driver_rules, load
from gpunode.checks.compare import failed, passed, warned
from gpunode.checks.gpus import CATALOG
from gpunode.checks.registry import CheckResult
from gpunode.errors import UsageError
from gpunode.facts.modules import LoadedDriver

Objection = tuple[str, str | int, bool]
"""Message, expected value, and whether the fact is sure."""


def fits(loaded: LoadedDriver, models: Sequence[Gpu], boards: Sequence[Platform]) -> CheckResult:
    """Return the result for a driver, the models that a PCI id stands for, and the platforms that the node may be.

    An objection fails only if it applies to all models; if it applies to some, or depends on an unsure fact, it warns.
    """
    objections = [_objection(loaded, model, boards) for model in models]
    against = [objection for objection in objections if objection is not None]
    if against:
        message, expected, _ = against[0]
        all_refuse = len(against) == len(objections) and all(sure for _, _, sure in against)
        refused = failed if all_refuse else warned
        return refused(message, expected=expected, measured=loaded.version, source=CATALOG)
    doubt = _not_listed(loaded, models[0])
    flavour = f" ({loaded.flavour})" if loaded.flavour else ""
    good = f"driver {loaded.version}{flavour} fits {models[0].name}"
    return (warned if doubt else passed)(doubt or good, measured=loaded.version, source=CATALOG)


def _objection(loaded: LoadedDriver, gpu: Gpu, boards: Sequence[Platform]) -> Objection | None:
    version = _number(loaded.version)
    last = driver_rules.last_branch(gpu, version.major)
    if last is not None:
        return f"branch {last.value} is the last that drives {gpu.name}", int(last.value), last.sure
    only = driver_rules.modules(load(), gpu, loaded.flavour)
    if only is not None:
        message = f"{gpu.name} needs the {only.value} kernel modules, the {loaded.flavour} ones are loaded"
        return message, only.value, only.sure
    return _below_minimum(version, gpu, boards) or _too_old_for_cuda(version, gpu)


def _below_minimum(version: Version, gpu: Gpu, boards: Sequence[Platform]) -> Objection | None:
    """Return the objection by the documented minimum of the model, the platform, or all boards of the model; else
    None."""
    of_model = driver_rules.min_driver(gpu, version)
    if of_model is not None:
        return f"{gpu.name} needs driver {of_model.value} or newer", of_model.value, of_model.sure
    of_boards = [(board, bound) for board in boards if (bound := driver_rules.min_driver(board, version)) is not None]
    if of_boards and len(of_boards) == len(boards):
        board, bound = min(of_boards, key=lambda pair: _number(pair[1].value))
        return f"{board.name} needs driver {bound.value} or newer", bound.value, bound.sure
    of_all = None if boards else driver_rules.min_driver_of_boards(load(), gpu, version)
    if of_all is not None:
        return f"{gpu.name} is on boards that require driver {of_all.value} or newer", of_all.value, of_all.sure
    return None


def _too_old_for_cuda(version: Version, gpu: Gpu) -> Objection | None:
    """Return the objection to a driver with a CUDA older than the first with code for the model; else None."""
    try:
        branch = load().branch_of(str(version.major))
    except UsageError:
        return None
    first = None if branch.native_cuda is None else driver_rules.first_cuda(load(), gpu, branch.native_cuda)
    if first is None:
        return None
    known = f"CUDA {first.value} is the first"
    message = f"branch {branch.id} (CUDA {branch.native_cuda}) does not support {gpu.name}: {known}"
    return message, first.value, first.sure


def _not_listed(loaded: LoadedDriver, gpu: Gpu) -> str | None:
    """Return why the README of the open kernel modules casts doubt on a release; None if it lists the model."""
    version = _number(loaded.version)
    first = driver_rules.first_listed(gpu, version.major, version)
    if loaded.flavour != "open" or first is None:
        return None
    which = "" if first.value == "never" else f" before {first.value}"
    return f"no release of branch {version.major}{which} lists {gpu.name} among the GPUs of its open modules"


def _number(version: str) -> Version:
    return Version(".".join(re.findall(r"\d+", version)[:4]) or "0")
