"""All settings for one node and one workload."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from gpunode.facts import NodeFacts
from gpunode.tuning import containers, kernel, libraries, network, slices
from gpunode.tuning.model import LeftAlone, NodeSlice, NodeTuning, Setting, Tuning
from gpunode.tuning.profiles import TRAITS, Profile, Traits

Workload = Literal["pytorch", "tensorflow", "nccl-tests"]
WORKLOADS: tuple[Workload, ...] = get_args(Workload)


def tune(  # noqa: PLR0913
    node: NodeFacts,
    workload: Workload,
    *,
    profile: Profile = "training",
    multi_node: bool = False,
    expandable: bool = False,
    part: NodeSlice | None = None,
) -> Tuning:
    """Return the settings for a workload on a node or a slice of it, or over several nodes including this one.

    Settings without the necessary facts are left alone, with that as the reason. ``expandable``: PyTorch's expandable
    segments.
    """
    environment = [
        *network.nccl(node, multi_node=multi_node),
        *(slices.visible(part) if part else ()),
        *_of_workload(node, workload, TRAITS[profile], part, expandable=expandable),
    ]
    docker = [
        *containers.gpus(node, part),
        *containers.limits(node, part),
        *network.devices(node, multi_node=multi_node),
    ]
    return Tuning(
        host=node.host,
        simulated=node.simulated,
        profile=profile,
        workload=workload,
        multi_node=multi_node,
        environment=_settings(environment),
        docker=_settings(docker),
        program=tuple(slices.program(node, part, workload)) if part else (),
        part=part,
        left_alone=_left(environment, docker),
        node=tune_node(node, profile),
    )


def _of_workload(
    node: NodeFacts, workload: Workload, traits: Traits, part: NodeSlice | None, *, expandable: bool
) -> Iterable[Setting | LeftAlone]:
    yield from libraries.cuda(node)
    if workload != "nccl-tests":
        yield from libraries.threads(node) if part is None else slices.threads(part, libraries.THREADS)
    if workload == "tensorflow":
        yield from libraries.tensorflow(node, traits)
    if workload == "pytorch":
        yield libraries.allocator(node, expandable=expandable)


def tune_node(node: NodeFacts, profile: Profile, *, shared: bool = False, fleet: int = 0) -> NodeTuning:
    """Return the settings of a node for all users.

    ``shared``: users who share it get a default number of threads; ``fleet``: number of nodes on one network, 0 if it
    is unknown.
    """
    traits = TRAITS[profile]
    environment = [*libraries.order(node), *libraries.tensorflow(node, traits)]
    environment += libraries.threads(node) if shared else ()
    nccl = [*network.nccl_conf(node)]
    of_kernel = [*kernel.settings(node, traits, fleet=fleet)]
    return NodeTuning(
        environment=_settings(environment),
        nccl=_settings(nccl),
        kernel=_settings(of_kernel),
        left_alone=_left(environment, nccl, of_kernel),
    )


def _settings(parts: Sequence[Setting | LeftAlone]) -> tuple[Setting, ...]:
    return tuple(part for part in parts if isinstance(part, Setting))


def _left(*lists: Sequence[Setting | LeftAlone]) -> tuple[LeftAlone, ...]:
    return tuple(part for parts in lists for part in parts if isinstance(part, LeftAlone))
