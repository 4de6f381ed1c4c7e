"""``resolve``: the first candidate that no rule refuses, or the smallest conflict. Deterministic, without side
effects."""

from collections.abc import Collection
from datetime import date

import gpunode.stack.consequences
import gpunode.stack.judges
import gpunode.stack.libraries
import gpunode.stack.requested
import gpunode.stack.services  # noqa: F401 (these five fill in the rules)
from gpunode.catalog import Catalog
from gpunode.stack.assemble import assemble
from gpunode.stack.conflict import explain, first_case
from gpunode.stack.model import Conflict, NodePicture, Request, Stack
from gpunode.stack.question import Question, must_be_known


def resolve(
    request: Request, node: NodePicture, catalog: Catalog, today: date, *, off: Collection[str] = ()
) -> Stack | Conflict:
    """Return the stack for a node, or the conflict.

    ``off`` skips rules by id. Raise UsageError if request or node name something that the catalog does not have.
    """
    question = Question(request, node, catalog, today)
    must_be_known(question)
    case = first_case(question, off)
    if case is not None:
        return assemble(case, off)
    return explain(question, off)
