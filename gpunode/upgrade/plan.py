"""The plan of a run: which nodes of a fleet get which release, in which wave, and measured in which image."""

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime

from packaging.version import Version

from gpunode.catalog import load
from gpunode.change.journal import OUT_OF_SERVICE, ChangeState, Journal, NodeRecord, RunRecord, new_token
from gpunode.change.scheduler import Availability, Scheduler, SchedulerError, SchedulerMissingError
from gpunode.errors import UsageError
from gpunode.fleet.inventory import Inventory
from gpunode.provisioning.node_stack import with_request
from gpunode.stack import LOCK_NAME, Plan, PlanHost, plan
from gpunode.stack.plan import PlanGroup
from gpunode.text import listed, now
from gpunode.upgrade.command import AT_TARGET, NO_PART, SHARE, ChangeCommand, ChangeGoal
from gpunode.upgrade.looks import NodeLook
from gpunode.upgrade.runs import owner
from gpunode.workload.run import image_for, no_image

DOMAIN = "gpunode_failure_domain"
"""Variable of the inventory: nodes with the same value change together (a rack, an NVLink partition)."""
Held = Mapping[str, tuple[Journal, NodeRecord]]
"""Nodes that earlier runs hold, each with the latest of these runs and its record there."""
Looks = Mapping[str, NodeLook]
AS_THEY_SHOULD_BE = (AT_TARGET, NO_PART, Availability.FOREIGN.value)
"""Begin of the reasons of nodes that are left out as they should be."""


@dataclass(frozen=True)
class PlannedRun:
    """A new run, of which nothing is written yet."""

    record: RunRecord
    document: Plan
    """The stacks of the nodes."""
    looks: Looks
    held: Held


def held_nodes(journals: Sequence[Journal]) -> Held:
    """Return the nodes that runs hold; ``journals`` has the latest run first."""
    held: dict[str, tuple[Journal, NodeRecord]] = {}
    for journal in reversed(journals):
        held |= {name: (journal, node) for name, node in journal.record.open_nodes.items()}
    return held


def planned(command: ChangeCommand, inventory: Inventory, looks: Looks, held: Held) -> PlannedRun:
    """Return a new run on the hosts of an inventory. Raises UsageError."""
    document = _stacks(command.goal, inventory, looks)
    chosen: dict[str, NodeRecord] = {}
    left_out: dict[str, str] = {}
    groups = {name: group for group in document.groups for name in group.hosts}
    for name in inventory.hosts:
        earlier = held[name][1] if name in held else None
        node, reason = _node_of_run(groups[name], looks[name], earlier)
        reason = reason or _not_at_disposal(command.scheduler, name, node)
        if reason:
            left_out[name] = reason
        else:
            chosen[name] = node
    domains = {name: str(variables.get(DOMAIN) or "") for name, variables in inventory.hosts.items()}
    for name, reason in incomplete(chosen, left_out, domains).items():
        del chosen[name]
        left_out[name] = reason
    options = command.options
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    record = RunRecord(
        run=f"{stamp}-{secrets.token_hex(2)}",
        command=command.identity,
        owner=owner(),
        started_at=now(),
        left_out=left_out,
        nodes=in_waves(chosen, domains, options.canary, options.waves),
    )
    if options.measure and record.nodes:
        record = record.model_copy(update={"image": image_of_run(options.image, record, lambda: looks)})
    return PlannedRun(record, document, looks, held)


def _stacks(goal: ChangeGoal, inventory: Inventory, looks: Looks) -> Plan:
    """Return the stack of each host of an inventory. Raises UsageError."""
    hosts = []
    for name, variables in inventory.hosts.items():
        look = looks[name]
        request = goal.request_of(name)
        reason = look.reason or look.undetermined or ("" if request else goal.reason_of(name))
        host = PlanHost(name, None if reason else look.picture, reason, variables.get(LOCK_NAME))
        hosts.append(with_request(host, variables, request or goal.request))
    return plan(hosts, goal.request, load(), date.today())


def _node_of_run(group: PlanGroup, look: NodeLook, earlier: NodeRecord | None) -> tuple[NodeRecord, str]:
    """Return the record of a node in a new run, and why it is left out.

    ``earlier``: the record in the run that holds it: it keeps the token and the release before.
    """
    target = group.stack.driver.version if group.stack is not None else None
    reason = group.undetermined or ""
    if not reason and group.stack is None:
        reason = "no stack matches: gpunode plan explains it"
    elif not reason and group.stack is not None and target is None:
        constraint = group.stack.driver.constraint
        reason = f"only the repository decides the release of {constraint}: name it with --to"
    elif not reason and earlier is None and look.release == look.loaded == target:
        reason = f"{AT_TARGET}{target}"
    if earlier is None:
        return NodeRecord(token=new_token(), before=look.release, target=target), reason
    out = earlier.state in OUT_OF_SERVICE or earlier.intent == "drain"
    state = ChangeState.HELD if out else ChangeState.PLANNED
    state = earlier.state if earlier.state is ChangeState.NOT_RETURNED else state
    update = {"state": state, "intent": "", "target": target, "back": False, "cause": ""}
    return earlier.model_copy(update=update), reason


def _not_at_disposal(scheduler: Scheduler, name: str, node: NodeRecord) -> str:
    """Return why a node is not at the run's disposal. Raises UsageError if the scheduler's program is missing."""
    try:
        state = scheduler.state(name, node.token)
    except SchedulerMissingError:
        raise
    except SchedulerError as err:
        return str(err)
    return "" if state.service in (Availability.IN_SERVICE, Availability.OURS) else state.text


def image_of_run(image: str | None, record: RunRecord, look: Callable[[], Looks]) -> str:
    """Return the image that a run measures nodes in: one for all of them, before and after. Raises UsageError.

    ``image`` is the requested one. ``look`` is called only if neither that nor the record names one.
    """
    if image is not None:
        return image
    if record.image is not None:
        return record.image
    looks = look()
    pictures = [picture for name in record.nodes if (picture := looks[name].picture) is not None]
    return image_for_releases(
        {release for node in record.nodes.values() for release in (node.before, node.target) if release},
        {picture.arch for picture in pictures if picture.arch},
        {model for picture in pictures for group in picture.gpus for model in group.models},
    )


def image_for_releases(releases: Collection[str], architectures: Collection[str], models: Collection[str]) -> str:
    """Return the newest image of the catalog that all releases of the driver support. Raises UsageError.

    A driver runs images of an older CUDA: the release with the oldest one decides.
    """
    catalog = load()
    ask = "name one that all of them support with --image"
    cudas = {release: catalog.branch_of(release).native_cuda for release in releases}
    unknown = sorted(release for release, cuda in cudas.items() if cuda is None)
    if unknown:
        raise UsageError(f"--measure: the catalog has no CUDA for driver {listed(unknown)}: {ask}")
    by_release = {release: Version(cuda) for release, cuda in cudas.items() if cuda is not None}
    oldest = min(by_release, key=by_release.__getitem__)
    capabilities = {str(catalog.gpu(model).compute_capability) for model in models}
    image = image_for(by_release[oldest], architectures, capabilities)
    if image is None:
        why = no_image(str(by_release[oldest]), architectures, capabilities)
        raise UsageError(f"--measure: {why} (drivers {listed(sorted(releases))}): {ask}")
    return image


def wave_numbers(nodes: int, canary: int, sizes: Sequence[str]) -> list[int]:
    """Return the wave of each node, in their order."""
    waves: list[int] = []
    for wave in range(nodes):
        left = nodes - len(waves)
        if not left:
            break
        size = str(canary) if wave == 0 else sizes[min(wave, len(sizes)) - 1]
        share = SHARE.fullmatch(size)
        number = max(1, nodes * int(share[1]) // 100) if share else int(size)
        waves += [wave] * min(number, left)
    return waves


def incomplete(chosen: Iterable[str], left_out: Mapping[str, str], domains: Mapping[str, str]) -> dict[str, str]:
    """Return the chosen nodes with a failure domain of which another node is left out, with the reason."""
    missing = {
        domains[name]: name
        for name, why in left_out.items()
        if domains[name] and not why.startswith((AT_TARGET, NO_PART))
    }
    return {
        name: f"{domains[name]}: {missing[domains[name]]} is left out" for name in chosen if domains[name] in missing
    }


def in_waves(
    chosen: Mapping[str, NodeRecord], domains: Mapping[str, str], canary: int, sizes: Sequence[str]
) -> dict[str, NodeRecord]:
    """Return the nodes with their waves: a failure domain is in one wave, and counts as one node.

    Nodes of earlier runs come first: they are out of service already.
    """
    units: dict[str, list[str]] = {}
    for name in sorted(chosen, key=lambda name: chosen[name].state is ChangeState.PLANNED):
        units.setdefault(domains[name] or f"node {name}", []).append(name)
    waves = zip(units.values(), wave_numbers(len(units), canary, sizes), strict=True)
    return {
        name: chosen[name].model_copy(update={"wave": wave, "domain": domains[name]})
        for names, wave in waves
        for name in names
    }
