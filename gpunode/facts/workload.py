"""What workloads recorded on the node."""

from pydantic import ValidationError

from gpunode.facts.errors import ParseError
from gpunode.facts.models.workload import Record
from gpunode.facts.seen import Seen, Unseen


def records(seen: Seen) -> tuple[Record, ...]:
    """Every record of the bundle; Unseen where no workload was run, ParseError where one of them is none."""
    if not seen.results:
        raise Unseen("no workload was run on this node (validate --level standard runs one)")
    found = []
    for number, result in enumerate(seen.results):
        try:
            found.append(Record.model_validate(result))
        except ValidationError as err:
            first = err.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the record"
            raise ParseError(f"expected a workload's record as result {number}: {place}: {first['msg']}") from None
    return tuple(found)
