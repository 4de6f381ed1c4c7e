"""The facts of the nodes that a verb is about: collected, or from saved bundles."""

from collections.abc import Iterator

from gpunode.cli.selection import Selection
from gpunode.facts import NodeFacts
from gpunode.judging.evaluator import Evaluator
from gpunode.judging.saved import bundle_files, saved_answers


def facts_of(selection: Selection, evaluator: Evaluator, missed: list[str], *, replay: bool) -> Iterator[NodeFacts]:
    """Yield the facts of each node; add a line to ``missed`` for one without facts."""
    files = bundle_files(selection.hosts) if replay else []
    answers = saved_answers(files) if replay else selection.collect()
    for node in evaluator.facts_of_fleet(answers, strict=len(files) == 1):
        if node.facts is None:
            missed.append(f"{node.host}: {node.reason}")
        else:
            yield node.facts
