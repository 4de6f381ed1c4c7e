"""The machine: bare metal or guest, its platforms in the catalog, and the number of GPUs that it should have."""

import re
from dataclasses import dataclass

from gpunode.catalog import Platform, load
from gpunode.checks.gpus import CATALOG, model_of
from gpunode.checks.registry import EarlierGpus
from gpunode.facts.node import NodeFacts
from gpunode.text import counted, listed

# systemd-detect-virt's names of containers: the machine is the host itself, as far as is known.
CONTAINERS = frozenset(
    {
        "container-other",
        "docker",
        "lxc",
        "lxc-libvirt",
        "openvz",
        "podman",
        "private-users",
        "proot",
        "rkt",
        "systemd-nspawn",
    }
)


def is_guest(node: NodeFacts) -> bool:
    """Return True in a virtual machine: the hypervisor controls buses and paths to other GPUs."""
    return node.virtualization is not None and node.virtualization != "none" and node.virtualization not in CONTAINERS


def is_container(node: NodeFacts) -> bool:
    """Return True in a container: kernel, clock and firmware are the host's."""
    return node.virtualization in CONTAINERS


def gpu_ids(node: NodeFacts) -> dict[str, int] | None:
    """Return catalog ids of the GPUs on the bus with their number; None if the catalog does not have one of them."""
    numbers: dict[str, int] = {}
    for device in node.gpus_on_bus or ():
        match = model_of(device)
        if match is None or match.gpu is None:
            return None
        numbers[match.gpu.id] = numbers.get(match.gpu.id, 0) + 1
    return numbers


def platforms(node: NodeFacts) -> tuple[Platform, ...]:
    """Return the catalog's platforms with this node's GPUs and architecture; empty if none is known."""
    ids = gpu_ids(node)
    if not ids:
        return ()
    rows = [row for row in load().platforms_with(ids) if node.architecture in (None, *row.hosts)]
    own_kind = [row for row in rows if row.virtual == is_guest(node)]
    return tuple(own_kind or rows)


def nvswitches(node: NodeFacts) -> tuple[str, ...]:
    """Return the slots of the NVSwitches on the bus."""
    switches = {part.id for part in load().pci_parts.values() if part.role == "nvswitch"}
    return tuple(device.slot for device in node.pci or () if device.pci_id in switches)


ONE_BOARD = ("board", "server", "tray")
"""Kinds of platforms with a number of GPUs that is fixed by their construction."""
ONE_SHORT = (7,)
"""Numbers of cards that show one gone: servers with more than four have eight or more."""
DIVIDED = (1, 2, 4)
"""Numbers of GPUs that smaller boards have, and virtual machines with a part of one: ``fm_guide``, passthrough."""


@dataclass(frozen=True)
class TooFew:
    """A board with fewer GPUs on the bus than it is built with."""

    expected: int
    measured: int
    certain: bool
    """False if the catalog or the node leaves a doubt."""
    reason: str
    source: str = CATALOG


def fewer_than_before(node: NodeFacts, earlier: EarlierGpus) -> TooFew | None:
    """Return what is missing since the node's previous run; None if nothing is, or if it has another model now.

    A virtual machine may be given fewer GPUs on purpose: it leaves a doubt.
    """
    present = len(node.gpus_on_bus or ())
    models = {gpu.id for device in node.gpus_on_bus or () if (match := model_of(device)) for gpu in match.gpus}
    if present >= earlier.number or (earlier.model is not None and models and earlier.model not in models):
        return None
    reason = f"the previous run found {earlier.number}"
    return TooFew(earlier.number, present, not is_guest(node), reason, earlier.origin)


def too_few(node: NodeFacts) -> TooFew | None:
    """Return what is missing of the node's board; None if nothing is, or if the catalog has no such board."""
    models = [{gpu.id for gpu in match.gpus} for device in node.gpus_on_bus or () if (match := model_of(device))]
    switches = nvswitches(node)
    rows = [row for row in load().platforms.values() if row.kind in ONE_BOARD and _present(row, models)]
    rows = [row for row in rows if node.architecture in (None, *row.hosts) and (row.nvswitch or not switches)]
    named = [row for row in rows if _is_named(row, node)]
    if not rows:
        return _odd_number(node, models)
    missing = [row for row in named or rows if row.gpu_count > _present(row, models)]
    if not missing or any(row.gpu_count == _present(row, models) for row in named or rows):
        return None
    row = min(missing, key=lambda row: row.gpu_count)
    present = _present(row, models)
    adapters = 0 if is_guest(node) else _adapters(node)
    doubt = not (switches or named or adapters >= row.gpu_count) and (
        present in DIVIDED or is_guest(node) or node.virtualization is None
    )
    if doubt and has_part(node, present):
        return None
    numbers = sorted({row.gpu_count for row in missing})
    if len(numbers) > 1:
        reason = f"boards with them have {listed(map(str, numbers))}"
    else:
        signs = [counted(len(switches), "NVSwitch", "NVSwitches")] if switches else []
        signs += (
            [counted(adapters, "network adapter of one kind", "network adapters of one kind")] if adapters > 1 else []
        )
        reason = f"{row.name} has {row.gpu_count}{f' ({listed(signs)} on the bus)' if signs else ''}"
    return TooFew(row.gpu_count, present, row.sure("gpus") and not doubt, reason)


def has_part(node: NodeFacts, present: int) -> bool:
    """Return whether a guest may have been given a part of a board, of which it sees this number of GPUs."""
    return present in DIVIDED and is_guest(node) and not nvswitches(node)


def _present(row: Platform, models: list[set[str]]) -> int:
    """Return the number of GPUs on the bus that may be those of a platform."""
    return sum(any(gpu in ids for gpu in row.gpus) for ids in models)


def _adapters(node: NodeFacts) -> int:
    """Return the number of network adapters of the most frequent kind: boards have one for each GPU.

    Functions of one card count once, virtual functions are not collected.
    """
    kinds: dict[tuple[str, str | None], set[str]] = {}
    for device in node.pci_io or ():
        if device.class_id.startswith("02"):
            kinds.setdefault((device.pci_id, device.subsystem_id), set()).add(device.slot.partition(".")[0])
    return max((len(slots) for slots in kinds.values()), default=0)


def _is_named(row: Platform, node: NodeFacts) -> bool:
    """Return True if the firmware names the platform: ``DGXH100``."""
    return row.kind == "server" and _letters(row.name) in _letters(node.machine.product if node.machine else None)


def _letters(text: str | None) -> str:
    return re.sub(r"[^a-z0-9]", "", (text or "").lower())


def _odd_number(node: NodeFacts, models: list[set[str]]) -> TooFew | None:
    """Return what may be missing of a server with cards, or of a cloud shape: they have an even number of them."""
    rows = [row for row in load().platforms.values() if row.gpu_count > 2]
    cards = {gpu for row in rows if row.kind == "pcie" for gpu in row.gpus}
    if is_guest(node):
        # Of cards that anybody buys, a guest may have any number.
        cards = {gpu for row in rows if row.virtual for gpu in row.gpus} - cards
    present = sum(bool(ids & cards) for ids in models)
    if present == 1 or present % 2 == 0 or present != len(models):
        return None
    reason = "an odd number; servers with several of them have an even one"
    return TooFew(present + 1, present, present in ONE_SHORT and not is_guest(node), reason)
