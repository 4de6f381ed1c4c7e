"""Hosts of an inventory in ``gpunode plan``."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpunode.catalog import Catalog
from gpunode.cli.selection import ask_password, explained, shown_progress
from gpunode.content import collection_root
from gpunode.errors import UsageError
from gpunode.fleet import Collected, collect
from gpunode.fleet.inventory import Inventory, read_with_settings
from gpunode.fleet.locks import refuse_inventory
from gpunode.fleet.targets import SETTINGS, targets
from gpunode.judging.evaluator import Evaluator
from gpunode.provisioning.node_stack import REQUESTED, request_of, requested_by
from gpunode.stack import LOCK_NAME, PlanHost, Request
from gpunode.stack.picture import host_of


class FleetPlanOptions(Protocol):
    """The options of the command line that are used here."""

    @property
    def inventories(self) -> tuple[str, ...]: ...
    @property
    def limit(self) -> str | None: ...
    @property
    def parallel(self) -> int: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def ask_become_pass(self) -> bool: ...


@dataclass(frozen=True)
class Answers:
    """Hosts in the order of their answers, and their inventory."""

    inventory: Inventory
    hosts: Iterable[PlanHost]


def of_inventory(options: FleetPlanOptions, evaluator: Evaluator, catalog: Catalog, request: Request) -> Answers:
    """Collect from the hosts of an inventory. Raises UsageError if it cannot be read.

    The variables of a host request its stack, as in ``gpunode provision``; ``request`` (the options) takes precedence.
    """
    with explained():
        inventory, config = read_with_settings(options.inventories, options.limit, SETTINGS)
    refuse_inventory(collection_root(), inventory)
    found = targets(inventory, config)
    password = ask_password() if options.ask_become_pass else None

    def answers() -> Iterator[Collected]:
        with shown_progress([target.name for target in found]) as update:
            for answer in collect(
                found, parallel=options.parallel, timeout_s=options.timeout_s, become_password=password
            ):
                update(answer.host)
                yield answer

    def hosts() -> Iterator[PlanHost]:
        for node in evaluator.facts_of_fleet(answers()):
            if node.facts is None:
                yield PlanHost(node.host, None, node.reason)
            else:
                variables = inventory.hosts[node.host]
                host = host_of(node.host, node.facts, catalog, variables.get(LOCK_NAME))
                yield with_request(host, variables, request)

    return Answers(inventory, hosts())


def with_request(host: PlanHost, variables: Mapping[str, Any], request: Request) -> PlanHost:
    """Return a host with the request of its variables and of the options."""
    if host.picture is None:
        return host
    given = requested_by(variables)
    template = next((REQUESTED[name] for name, value in given.items() if "{{" in str(value)), None)
    options = {
        "source": request.source,
        "version": request.driver,
        "flavour": request.kernel_module,
        "cuda": request.cuda,
        "toolkit": request.toolkit,
    }
    given |= {name: value for name, value in options.items() if value is not None}
    if template is not None and "{{" in str(given):
        reason = f"{template} is a template, which only gpunode provision evaluates: set the option of gpunode plan"
        return PlanHost(host.name, None, reason)
    try:
        own = request_of(host.picture, given, [], locked=bool(host.lock))
    except UsageError as err:
        raise UsageError(f"{host.name}: {err}") from None
    own = own.model_copy(update={name: getattr(request, name) for name in ("framework", "kernel_policy", "past_eol")})
    return replace(host, request=own)
