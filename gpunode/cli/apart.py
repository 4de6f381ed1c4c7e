"""Work of verbs on a node's answer, each in a process of its own: see ``isolation``."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from gpunode.errors import UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.isolation import AnswerLimits, Exceeded, Workers
from gpunode.probe.bundle import Bundle

ANSWER = "the node's answer"
"""The name of the probe's output in messages."""
_SMALL = 2 * 1024 * 1024
"""Maximum bytes of a document that is parsed in this process: Python objects need some fifty times that."""


class Apart:
    """The work of one run of a verb; created before any thread of it starts, and closed at its end."""

    def __init__(self, **tasks: Callable[..., bytes]) -> None:
        every: dict[str, Callable[..., bytes]] = {"bundle": _bundle, "facts": _facts, **tasks}

        def work(task: str, *arguments: Any) -> bytes:
            return every[task](*arguments)

        self._workers = Workers(work, AnswerLimits())

    def call(self, task: str, *arguments: Any) -> bytes:
        """Run one of the tasks by its name. Raises UsageError if the task does, and Exceeded."""
        return self._workers(task, *arguments)

    def bundle(self, output: bytes) -> Bundle:
        """Parse a bundle, see ``Bundle.from_json``; UsageError also for one that cannot be read within the limits."""
        if len(output) > _SMALL:
            try:
                self.call("bundle", output)
            except Exceeded as err:
                raise UsageError(f"{ANSWER} cannot be read: {err}") from None
        return Bundle.from_json(output, ANSWER)

    def facts(self, bundle: Bundle) -> NodeFacts:
        """Return the facts of a bundle, see ``facts_from_bundle``. Raises Exceeded."""
        try:
            return self.replayed(bundle.to_json().encode(), ANSWER)
        except UsageError as err:
            # Its document can be larger than what the node sent: the limits may refuse it only now.
            raise Exceeded(str(err)) from None

    def replayed(self, text: bytes, where: str) -> NodeFacts:
        """Return the facts of a bundle's text. Raises UsageError if it is invalid, and Exceeded."""
        return NodeFacts.model_validate_json(self.call("facts", text, where))

    @property
    def most(self) -> int:
        """Return the maximum number of answers in progress."""
        return self._workers.most

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._workers.close()


def _bundle(output: bytes) -> bytes:
    Bundle.from_json(output, ANSWER)
    return b""


def _facts(text: bytes, where: str) -> bytes:
    return facts_from_bundle(Bundle.from_json(text, where)).model_dump_json().encode()
