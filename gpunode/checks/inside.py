"""Checks on the container itself: does it run, and does it see the GPUs that it was given."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from gpunode.checks.inside_driver import MISMATCH_CUDA, NO_COMPAT, refused
from gpunode.checks.registry import Expectation, Status, Verdict, no_gpu, registry
from gpunode.checks.words import counted, listed
from gpunode.checks.workload import explained, nothing_ran, of, one, where
from gpunode.facts.models.workload import (
    ContainerValues,
    CudaValues,
    NvmlValues,
    Record,
    TorchValues,
    values_of,
)
from gpunode.facts.node import NodeFacts

NOT_READY = 802
ARGUMENTS = "gpunode env --format docker-args HOST prints the arguments for docker run."
ON_HOST = "on the host itself, in no container"
SIMULATED = "simulated GPUs: no library in a container can compute on them"


@registry.check(
    "container.runs",
    level="standard",
    means="A container was started on the node with its idle GPUs, and the workload in it came to its end.",
    remedy="docker run by hand with the arguments of gpunode env; journalctl -u docker shows the engine's messages.",
    state="drain",
    actions=("restart_service:docker.service",),
)
def runs(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:
    if node.records is None:
        absent = no_gpu(node, expect) if node.pci is not None else None
        reason = node.gap("records") or "records: not in the collected data"
        yield Verdict(Status.SKIP, absent) if absent else Verdict(Status.ERROR, reason)
        return
    found = of(node, "container")
    if not found:
        if node.records and all(record.container is None for record in node.records):
            yield Verdict(Status.SKIP, f"ran {ON_HOST}")
        else:
            yield Verdict(
                Status.ERROR, "there is no record of the container: it is not known whether it came to its end"
            )
        return
    yield from _run(found[0])


def _run(record: Record) -> Iterator[Verdict]:
    if record.error is not None:
        named = record.container is not None and record.container.image in record.error
        yield Verdict(Status.ERROR, record.error if named else f"{record.error}{where(record)}")
        return
    if record.skipped is not None:
        yield Verdict(Status.SKIP, record.skipped)
        return
    values = values_of(record, ContainerValues)
    if isinstance(values, str):
        yield Verdict(Status.ERROR, values)
        return
    for line in values.busy:
        gpu, _, process = line.partition(": ")
        yield Verdict(Status.SKIP, f"left out, busy with {process or 'a process'}", component=gpu)
    handed = "without GPUs" if not values.gpus else f"with {counted(values.gpus, 'GPU')}"
    if values.complete is False:
        yield Verdict(Status.ERROR, f"ran {handed} and broke off after {record.seconds:.0f} s{where(record)}")
    elif values.complete is None:
        yield Verdict(Status.ERROR, f"it is not known whether it came to its end{where(record)}")
    elif record.container is None:
        yield Verdict(Status.SKIP, f"ran {handed} in {record.seconds:.0f} s {ON_HOST}")
    else:
        yield Verdict(Status.PASS, f"ran {handed} in {record.seconds:.0f} s{where(record)}")


@registry.check(
    "container.gpus",
    level="standard",
    needs=("records",),
    needs_gpu=True,
    means="The management library, CUDA and PyTorch count the same GPUs inside the container: all that it was given.",
    remedy="Give it the GPUs: --device nvidia.com/gpu=all (CDI) or --gpus all; role nvidia_container_toolkit sets both "
    "up. " + ARGUMENTS,
    state="drain",
    actions=("run_role:nvidia_container_toolkit",),
)
def gpus(node: NodeFacts, expect: Expectation) -> Iterator[Verdict]:  # noqa: ARG001
    nvml, cuda = one(node, "versions.nvml", NvmlValues), one(node, "versions.cuda", CudaValues)
    for answer in (nvml, cuda):
        if isinstance(answer, Verdict):
            yield _untold(node, answer)
            return
    if isinstance(nvml, Verdict) or isinstance(cuda, Verdict):
        return
    if refused(node):
        yield Verdict(Status.SKIP, "the libraries inside do not fit the module (container.library reports the cause)")
    elif cuda[1].forward_compat and cuda[1].result in (MISMATCH_CUDA, NO_COMPAT):
        yield Verdict(Status.SKIP, "cuda-compat is refused (container.forward-compat reports the cause)")
    else:
        yield _counts(node, nvml[1], cuda[1])


def _untold(node: NodeFacts, answer: Verdict) -> Verdict:
    """A library of the driver that is not there, or broken, is the fault itself: the container was given no GPU."""
    if answer.status is Status.ERROR or nothing_ran(node) is not None:
        return answer
    return Verdict(Status.SKIP, SIMULATED) if node.simulated else replace(answer, status=Status.FAIL)


def _counts(node: NodeFacts, nvml: NvmlValues, cuda: CudaValues) -> Verdict:
    for name, result, said in (("NVML", nvml.result, nvml.result_name), ("CUDA", cuda.result, cuda.result_name)):
        if result != 0:
            remedy = "Fabric manager is not ready: role nvidia_fabric; driver.* and fabric.* checks say more."
            return Verdict(
                Status.FAIL,
                f"{name} does not start inside: {said or 'error'} ({result})",
                remedy=remedy if result == NOT_READY else None,
            )
    counts = {"NVML": nvml.count, "CUDA": cuda.count}
    torch = one(node, "versions.torch", TorchValues)
    # A build for the processor, or for a CUDA that the driver lacks, counts none; that has checks of its own.
    if not isinstance(torch, Verdict) and torch[1].cuda is not None and not explained(node, ("container.cuda",)):
        counts["PyTorch"] = torch[1].count
    untold = [name for name, count in counts.items() if count is None]
    if untold:
        return Verdict(Status.ERROR, f"{listed(untold)} did not say how many GPUs there are")
    document = (node.smi.document if node.smi else None) or {}
    if any(gpu.get("mig_mode") for gpu in document.get("gpus", ())):
        return Verdict(Status.SKIP, "GPUs are divided by MIG: NVML counts cards, CUDA counts what it may use")
    given = next((values.gpus for _, values in _container(node) if values.gpus is not None), None)
    words = listed([f"{name} {count}" for name, count in counts.items()])
    expected = given if given is not None else counts["NVML"]
    told = partial(Verdict, expected=expected, measured=min(count or 0 for count in counts.values()), unit="GPUs")
    if set(counts.values()) == {expected}:
        return told(Status.PASS, f"{words}, as given")
    return told(Status.FAIL, f"given {expected}; counted inside: {words}")


def _container(node: NodeFacts) -> Iterator[tuple[Record, ContainerValues]]:
    for record in of(node, "container"):
        values = values_of(record, ContainerValues)
        if isinstance(values, ContainerValues):
            yield record, values
