"""All settings for one node and one workload."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, get_args

from gpunode.facts import NodeFacts
from gpunode.tuning import containers, libraries, network
from gpunode.tuning.model import LeftAlone, Setting, Tuning

Workload = Literal["pytorch", "tensorflow", "nccl-tests"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)

Rule = Callable[[NodeFacts], Iterable[Setting | LeftAlone]]
ENVIRONMENT: Mapping[Workload, tuple[Rule, ...]] = {
    "pytorch": (libraries.cuda, libraries.threads),
    "tensorflow": (libraries.cuda, libraries.threads, libraries.tensorflow),
    "nccl-tests": (libraries.cuda,),
}


def tune(node: NodeFacts, workload: Workload, *, multi_node: bool = False, expandable: bool = False) -> Tuning:
    """The settings for a workload on a node, or over several nodes of which this is one.

    What the facts do not say is left alone, with that as the reason. ``expandable``: PyTorch's expandable segments.
    """
    environment = [*network.nccl(node, multi_node=multi_node)]
    environment += [part for rule in ENVIRONMENT[workload] for part in rule(node)]
    if workload == "pytorch":
        environment.append(libraries.allocator(node, expandable=expandable))
    docker = [*containers.gpus(node), *containers.limits(node), *network.devices(node, multi_node=multi_node)]
    return Tuning(
        host=node.host,
        simulated=node.simulated,
        workload=workload,
        multi_node=multi_node,
        environment=tuple(part for part in environment if isinstance(part, Setting)),
        docker=tuple(part for part in docker if isinstance(part, Setting)),
        left_alone=tuple(part for part in (*environment, *docker) if isinstance(part, LeftAlone)),
    )
