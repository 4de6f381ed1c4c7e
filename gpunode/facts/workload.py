"""What workloads recorded on the node."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from gpunode.facts.models.measured import MEASURED
from gpunode.facts.models.workload import NAME, MalformedRecord, Record, RecordContainer
from gpunode.facts.seen import Seen, Unseen, first_line

RUN = "container"
"""The record of the run itself."""
JUDGED = frozenset(
    {
        RUN,
        *(f"versions.{part}" for part in ("system", "nvml", "cuda", "torch")),
        "defaults.limits",
        *(f"frameworks.{part}" for part in ("tensor", "amp", "matmul", "fp8", "compile")),
        *(f"frameworks.{part}" for part in ("cudnn", "dataloader", "memory", "p2p", "collective")),
        *(f"frameworks.{part}" for part in ("tensorflow", "dali")),
        "gpus.kernel",
        *MEASURED,
    }
)
"""Records that some check cannot do without: of any other, nobody would tell that it is malformed."""


def records(seen: Seen) -> tuple[MalformedRecord | Record, ...]:
    """Every result of the bundle, those that are no records first; Unseen where no workload was run."""
    if not seen.results:
        raise Unseen("no workload was run on this node (validate --level standard runs one)")
    found: list[Record] = []
    malformed: list[MalformedRecord] = []
    for number, result in enumerate(seen.results):
        try:
            found.append(Record.model_validate(result))
        except ValidationError as err:
            malformed += _malformed(number, result, err)
    # Of two under one name a check that wants one takes the first: never the good one, with the other unsaid.
    return (*malformed, *found)


def _malformed(number: int, result: dict[str, Any], err: ValidationError) -> Iterator[MalformedRecord]:
    """The result under its name; where that would not come to anybody's eyes, against the run too."""
    name, component = result.get("record"), result.get("component")
    named = isinstance(name, str) and re.fullmatch(NAME, name) is not None
    first = err.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "the whole of it"
    wrong = f"result {number} is not a record of a workload{f' {name}' if named else ''}: {place}: {first['msg']}"
    for each in ((str(name),) if named else ()) + (() if named and name in JUDGED else (RUN,)):
        yield MalformedRecord(
            record=each,
            # Checks of GPUs let the processor's records off, and it is not known that this is one.
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
