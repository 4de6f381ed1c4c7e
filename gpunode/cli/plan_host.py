"""A machine in a plan: shared by saved bundles and hosts of an inventory."""

from collections.abc import Iterable, Iterator
from typing import Any

from gpunode.catalog import Catalog
from gpunode.facts import NodeFacts
from gpunode.judging.evaluator import NodeAnswer
from gpunode.stack import PlanHost, picture_from_facts, undetermined


def host_of(name: str, facts: NodeFacts, catalog: Catalog, lock: Any = None) -> PlanHost:
    """Return one node by its facts."""
    picture = picture_from_facts(facts, catalog)
    reason = undetermined(facts, picture)
    return PlanHost(name, None if reason else picture, reason, lock)


def hosts_of(answers: Iterable[NodeAnswer], catalog: Catalog) -> Iterator[PlanHost]:
    """Yield nodes by their answers; one without facts has the reason."""
    for node in answers:
        yield (
            PlanHost(node.host, None, node.reason) if node.facts is None else host_of(node.host, node.facts, catalog)
        )
