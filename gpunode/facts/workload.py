"""Records of workloads on the node."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError, first_line
from gpunode.facts.models import FactArea, fact
from gpunode.facts.models.measured import MEASURED
from gpunode.facts.models.workload import NAME, MalformedRecord, Record, RecordContainer
from gpunode.frozen import invalid_field

RUN = "container"
"""The record of the run itself."""
JUDGED = frozenset(
    {
        RUN,
        *(f"versions.{part}" for part in ("system", "nvml", "cuda", "torch")),
        "defaults.limits",
        *(f"frameworks.{part}" for part in ("tensor", "amp", "matmul", "fp8", "compile")),
        *(f"frameworks.{part}" for part in ("cudnn", "dataloader", "memory", "p2p", "collective")),
        *(f"frameworks.{part}" for part in ("tensorflow", "tensorflow-training", "dali")),
        "gpus.kernel",
        *MEASURED,
    }
)
"""Records that a check requires. A malformed record of any other name is reported by the run's own record."""


def read_records(bundle: BundleReader) -> tuple[MalformedRecord | Record, ...]:
    """Return every result of the bundle, malformed ones first; raise UnknownFactError if no workload was run."""
    if not bundle.results:
        raise UnknownFactError("no workload was run on this node (validate --level standard runs one)")
    records: list[Record] = []
    malformed: list[MalformedRecord] = []
    for number, result in enumerate(bundle.results):
        try:
            records.append(Record.model_validate(result))
        except ValidationError as err:
            malformed += _malformed(number, result, err)
    # If two records have one name, a check uses the first: a malformed one must not be hidden by a good one.
    return (*malformed, *records)


def _malformed(number: int, result: dict[str, Any], err: ValidationError) -> Iterator[MalformedRecord]:
    """Yield the result under its name, and also under the run's name if no check requires a record of its own name."""
    name, component = result.get("record"), result.get("component")
    named = isinstance(name, str) and re.fullmatch(NAME, name) is not None
    field, why = invalid_field(err, "the whole of it")
    wrong = f"result {number} is not a record of a workload{f' {name}' if named else ''}: {field}: {why}"
    for each in ((str(name),) if named else ()) + (() if named and name in JUDGED else (RUN,)):
        yield MalformedRecord(
            record=each,
            # Checks of GPUs ignore records of the processor, and the device of a malformed one is unknown.
            device="cuda",
            component=component if isinstance(component, str) else "node",
            seconds=0,
            container=_container(result.get("container")),
            simulated=result.get("simulated") is True,
            malformed=first_line(" ".join(wrong.split())),
        )


def _container(value: object) -> RecordContainer | None:
    try:
        return RecordContainer.model_validate(value)
    except ValidationError:
        return None


class WorkloadFacts(FactArea):
    """Records of workloads."""

    records: tuple[MalformedRecord | Record, ...] | None = fact(read_records, volatile=True)
    """Records of workloads on the node, malformed results first; a gap if no workload was run."""
