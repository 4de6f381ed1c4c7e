"""Checks on measurements of several GPUs: collectives, their transport, single bad links, training."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from gpunode.checks.compare import at_least, failed, passed, skipped, undetermined
from gpunode.checks.measurements import NVLINKS, OF_FIGURES, MeasuredNode, judged, measurement_check
from gpunode.checks.performance import corrupted
from gpunode.checks.registry import CheckResult, Status
from gpunode.checks.thresholds import Threshold
from gpunode.expectations import Figure, Shape
from gpunode.expectations.assess import sums_in_switch
from gpunode.expectations.limits import Pair, Where
from gpunode.facts.models.measured import COLLECTIVES, BadLink, NcclValues, PairsValues, TrainingValues
from gpunode.facts.models.workload import Record
from gpunode.text import counted, listed

RATIO_WARNS = Threshold(
    "performance.training.ratio",
    0.5,
    "of the measured bus bandwidth",
    "The messages of a training step that move slower warn.",
    source="our choice: they are smaller than the message of which the bus bandwidth was measured",
    most=1,
)
NVLS_RANKS = Threshold(
    "performance.transport.nvls-ranks",
    5,
    "GPUs",
    "With this many GPUs or more, an all-reduce without NVLS warns if the NVSwitches support it.",
    source="NVIDIA/nccl issue 1455: NVLS is as fast as rings up to 4 GPUs and faster from 5 on (H100, H200 alike)",
    least=2,
)
NVLINKED = frozenset({"P2P", "NVLS"})
BY_NETWORK = frozenset({"IB", "socket"})
OF_ALL = tuple(f"nccl.{name}" for name in COLLECTIVES)
TRANSPORTS = (
    "NCCL_DEBUG=INFO shows why a transport was refused. SHM or sockets although GPUs are linked: NCCL_P2P_DISABLE, "
    "NCCL_P2P_LEVEL or NCCL_NVLS_ENABLE in the environment, access between GPUs that is off (link.p2p, host.acs, "
    "host.iommu), a fabric that is not up (fabric.state). Without shared memory: docker run --shm-size or --ipc=host."
)


@measurement_check(
    "performance.collectives",
    OF_ALL,
    NcclValues,
    means="Every NCCL collective over all GPUs returns correct values, no rank is missing, and large messages "
    "reach the bus bandwidth that NVSwitch, NVLink or PCIe between these GPUs allows.",
    remedy="performance.transport shows what NCCL uses; performance.bad-links and performance.peer-copy show "
    "the slow pair; nvlink.state, nvlink.speed, nvlink.errors, fabric.state and link.topology show the cause.",
    state="drain",
    actions=("fix_configuration", "run_role:nvidia_fabric", "reset_gpu", "open_support_case"),
    thresholds=OF_FIGURES,
    category="nvlink",
)
def collectives(values: NcclValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    name = record.record.partition(".")[2].replace("-", "_")
    wrong = sum(row.wrong or 0 for row in values.rows)
    if values.missing:
        ranks = listed([f"rank {rank}" for rank in values.missing])
        yield failed(f"{name}: no answer of {ranks} of {values.ranks}")
    elif wrong:
        yield corrupted(wrong, f"{name} over {values.ranks} ranks")
    elif values.ranks < 2:
        yield _of_one_rank(run)
    elif not values.rows:
        yield undetermined(f"{name}: no message size was recorded")
    else:
        largest = max(values.rows, key=lambda row: row.size_bytes)
        where = Where(ranks=values.ranks, nodes=values.nodes)
        algorithm = "nvls" if "NVLS" in values.kinds else None
        figure = Figure(f"{name}_busbw", largest.busbw_gb_per_s, where, largest.size_bytes, algorithm)
        label = f"{name} over {counted(values.ranks, 'GPU')}, {largest.size_bytes / 2**20:.0f} MiB"
        yield judged(figure, run.shape, run.expect, "node", label=label)
        if all(row.wrong is None for row in values.rows):
            yield undetermined(f"{name}: its values were not verified")


def _of_one_rank(run: MeasuredNode) -> CheckResult:
    """Return a skip where the node has one GPU; the others of several were busy, or left out."""
    alone = len(run.node.gpus_on_bus or ()) == 1
    return skipped("only one GPU") if alone else undetermined("a single rank measures no collective")


@measurement_check(
    "performance.transport",
    OF_ALL,
    NcclValues,
    broken_in="performance.collectives",
    means="NCCL moves data by the fastest transport that the machine has: within the switches (NVLS) or NVLink before "
    "shared memory, InfiniBand, RoCE or EFA before TCP sockets.",
    remedy=TRANSPORTS,
    state="observe",
    actions=("fix_configuration", "run_role:nvidia_fabric"),
    thresholds=(NVLS_RANKS,),
    category="nvlink",
)
def transport(values: NcclValues, record: Record, run: MeasuredNode) -> Iterator[CheckResult]:
    name = record.record.partition(".")[2]
    used = ", ".join(f"{number} by {way}" for way, number in values.transports.items()) or ", ".join(values.kinds)
    expected, status = _expected_transport(values, run, reduces=name == "all-reduce")
    measured = ", ".join(values.kinds)
    if values.ranks < 2:
        yield _of_one_rank(run)
    elif not values.kinds:
        yield undetermined(f"{name}: NCCL's log contains no transport")
    elif status is Status.PASS:
        yield passed(f"{name}: {used}", expected=expected, measured=measured)
    else:
        yield CheckResult(status, f"{name}: {used}; expected {expected}", expected=expected, measured=measured)


def _expected_transport(values: NcclValues, run: MeasuredNode, *, reduces: bool) -> tuple[str, Status]:
    """Return the transport that this machine should use, and the status of those that were used."""
    kinds = set(values.kinds)
    if values.nodes > 1:
        active = [port for device in run.node.infiniband or () for port in device.ports if port.state == "ACTIVE"]
        if any(port.of_provider for port in active) and "socket" in kinds:
            return "libfabric (aws-ofi-nccl) over EFA between nodes, which the node has", Status.FAIL
        if any(not port.of_provider for port in active) and "IB" not in kinds:
            return "InfiniBand or RoCE between nodes, which the node has", Status.FAIL
        return "a network between nodes", Status.PASS
    if kinds & BY_NETWORK:
        return "no network within one node", Status.FAIL
    if run.shape.ring_of_nvlinks is None and _may_be_linked(run.shape):
        # P2P is the best transport that exists; nothing is known about the path of shared memory.
        status = Status.PASS if kinds & NVLINKED else Status.ERROR
        return "P2P; the NVLinks between the GPUs are unknown (nvidia-smi topo -m)", status
    if not run.shape.ring_of_nvlinks:
        return "P2P or SHM over PCIe", Status.PASS
    if not kinds & NVLINKED:
        return "P2P over NVLink", Status.FAIL
    if reduces and values.ranks >= NVLS_RANKS.value and sums_in_switch(run.shape) and "NVLS" not in kinds:
        return "NVLS: these NVSwitches can reduce", Status.WARN
    return "NVLink", Status.PASS


def _may_be_linked(shape: Shape) -> bool:
    """Return whether GPUs of this model can have NVLinks; True also for an unknown model."""
    return shape.gpu is None or shape.gpu.nvlink is not None


@measurement_check(
    "performance.bad-links",
    ("nccl.pairs",),
    PairsValues,
    level="deep",
    means="Pairs of GPUs exchange data in rounds: no link is slower than links of the same type (nvidia-smi "
    "topo -m), broken, or corrupts data. Bad links are reported.",
    remedy="One pair: reseat the bridge or cable, then exchange it; nvlink.errors of both ends. All pairs of a GPU: "
    "the GPU itself, or its slot.",
    state="drain",
    actions=("reset_gpu", "open_support_case", "replace_hardware"),
    category="nvlink",
    scope="link",
)
def bad_links(values: PairsValues, run: MeasuredNode) -> Iterator[CheckResult]:
    names = [_name_of(rank, values.uuids, run) for rank in range(values.ranks)]
    unknown = values.links - values.cleared - len(values.bad)
    usual = _slow_by_kind(values, _kinds(values, run), all_known=unknown <= 0)
    bad = [link for link in values.bad if _pair(link) not in usual]
    ranks = {rank for rank in values.bad_ranks if not any(rank in pair for pair in usual)}
    for rank in sorted(ranks & set(range(values.ranks))):
        yield failed(f"every link of {names[rank]} that was measured is bad", component=names[rank])
    for link in bad:
        if not ranks.intersection(link.ranks):
            yield _of_link(link, names, values)
    if unknown > 0:
        text = f"{unknown} of {values.links} links were not measured: the time limit was reached"
        yield undetermined(text, measured=values.cleared, expected=values.links, unit="links")
    elif not bad and not ranks:
        text = (
            f"{counted(values.links, 'link')} between {values.ranks} GPUs are healthy "
            f"({counted(values.rounds, 'round')})"
        )
        if usual:
            text += f"; {len(usual)} of them are slower than the median, like all of their kind (nvidia-smi topo -m)"
        yield passed(text, expected=0, measured=0, unit="bad links")


def _pair(link: BadLink) -> Pair:
    first, second = sorted(link.ranks)
    return first, second


def _kinds(values: PairsValues, run: MeasuredNode) -> dict[Pair, str]:
    """Return the connection of every two ranks, as ``nvidia-smi topo -m`` names it; empty if it is unknown."""
    labels = [f"GPU{run.index(uuid)}" for uuid in values.uuids]
    kinds = {}
    for first, label in enumerate(labels):
        for second in range(first + 1, len(labels)):
            cell = run.node.gpu_links.get(label, {}).get(labels[second])
            if cell is not None:
                kinds[first, second] = cell
    return kinds


def _slow_by_kind(values: PairsValues, kinds: Mapping[Pair, str], *, all_known: bool) -> set[Pair]:
    """Return the slow links that are as fast as the others of their kind, if none of the kind is as fast as the median.

    Beside pairs that a bridge joins, or that share a PCIe switch, links across the processors are slow and healthy.
    """
    bad = {_pair(link) for link in values.bad}
    rates = {
        _pair(link): link.bandwidth_gb_per_s
        for link in values.bad
        if link.verdict == "slow" and link.bandwidth_gb_per_s is not None
    }
    pairs: set[Pair] = set()
    for kind in {kinds[pair] for pair in rates if pair in kinds}:
        alike = [pair for pair, other in kinds.items() if other == kind]
        faster = max(_links_in(other) for other in kinds.values()) > _links_in(kind)
        of_kind_good = all_known and any(pair not in bad for pair in alike)
        if len(alike) == len(kinds) or of_kind_good or (_links_in(kind) and not faster):
            continue
        usual = median(rates[pair] for pair in alike if pair in rates)
        pairs |= {pair for pair in alike if pair in rates and rates[pair] * values.slow_factor >= usual}
    return pairs


def _links_in(kind: str) -> int:
    """Return the NVLinks of ``NV12``; 0 for a path over PCIe."""
    links = NVLINKS.fullmatch(kind)
    return int(links[1]) if links else 0


def _name_of(rank: int, uuids: Sequence[str], run: MeasuredNode) -> str:
    index = run.index(uuids[rank]) if rank < len(uuids) else None
    return f"rank {rank}" if index is None else f"gpu{index}"


def _of_link(link: BadLink, names: Sequence[str], values: PairsValues) -> CheckResult:
    ends = [names[rank] if rank < len(names) else f"rank {rank}" for rank in link.ranks]
    name = "-".join(ends)
    rate = f", {link.bandwidth_gb_per_s:.3g} GB/s" if link.bandwidth_gb_per_s is not None else ""
    others = f"; the median is {values.median_gb_per_s:.3g} GB/s" if values.median_gb_per_s is not None else ""
    text = f"the link {ends[0]} to {ends[1]} is {link.verdict}{rate}{others} ({counted(values.rounds, 'round')})"
    return failed(text, component=name, expected=values.median_gb_per_s, measured=link.bandwidth_gb_per_s, unit="GB/s")


@measurement_check(
    "performance.training",
    ("ddp.replicated", "ddp.sharded"),
    TrainingValues,
    level="deep",
    means="Training on all GPUs computes the gradients of a single process, and communicates about as fast as "
    "the measured bus bandwidth allows.",
    remedy="Wrong gradients with correct collectives: the image's PyTorch. Slow: bucket_cap_mb of "
    "DistributedDataParallel, processes bound to the wrong NUMA node, too few processor cores (host.cpus-online).",
    state="observe",
    actions=("fix_configuration",),
    thresholds=(RATIO_WARNS,),
    category="nvlink",
)
def training(values: TrainingValues, record: Record) -> Iterator[CheckResult]:
    name = record.record.partition(".")[2]
    if values.missing:
        ranks = listed([f"rank {rank}" for rank in values.missing])
        yield failed(f"{name}: no answer of {ranks} of {values.ranks}")
    elif values.wrong is None or not values.steps:
        yield undetermined(f"{name}: no step was compared")
    elif values.wrong:
        yield corrupted(values.wrong, f"{name}: gradients")
    elif values.ratio is None:
        text = f"{name}: gradients correct; speed unknown without a bus bandwidth of this run"
        yield passed(text, expected=0, measured=values.wrong, unit="elements")
    else:
        overlap = f", {values.overlap:.0%} of it overlapped with computation" if values.overlap is not None else ""
        text = f"{name}: gradients correct; communication at {values.ratio:.0%} of the measured bus bandwidth{overlap}"
        measured, source = round(values.ratio, 4), "nccl.all-reduce of this run"
        yield at_least(values.ratio, RATIO_WARNS.value, text, fault=Status.WARN, measured=measured, source=source)
