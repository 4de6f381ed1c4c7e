"""Evaluation of nodes' answers, each in a process of its own: see ``gpunode.isolation``.

An answer is parsed once, in the child that judges it: this process handles its bytes and the child's result.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from gpunode.checks import Level, described
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.frozen import invalid_field
from gpunode.isolation import AnswerLimits, Exceeded, Workers
from gpunode.judging.report import NodeReport, judged, unchecked, unreachable
from gpunode.judging.request import EvaluatedNode, Json, JudgingRequest, findings_of, level_of
from gpunode.probe import Answer, Collected

Item = TypeVar("Item")
Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class JudgedNode:
    """The result of one node."""

    report: NodeReport
    level: Level = "quick"
    """The level at which it was judged."""
    extracted: dict[str, Json] | None = None
    """Results of the request's ``extracts``; None: the node has no facts."""
    document: bytes | None = None
    """The bundle as it is saved, if the request has ``documents``; None: there is none."""


@dataclass(frozen=True)
class NodeAnswer:
    """The facts of one node, or why there are none: exactly one of both is set."""

    host: str
    facts: NodeFacts | None
    reason: str | None


class Evaluator:
    """Evaluation of the answers of one run; created before any thread of it starts, and closed at its end."""

    def __init__(self, request: JudgingRequest | None = None) -> None:
        self._request = request or JudgingRequest()
        tasks: dict[str, Callable[..., bytes]] = {"document": _document, "facts": _facts, "judge": self._judge}

        def work(task: str, *arguments: Any) -> bytes:
            return tasks[task](*arguments)

        self._workers = Workers(work, AnswerLimits())

    def judge_fleet(self, nodes: Iterable[Collected], *, strict: bool = False) -> Iterator[JudgedNode]:
        """Yield the result of each node or saved bundle, in their order; at most a few of them are in memory.

        One that cannot be evaluated costs no other its result. Of two saved bundles of one host, the file follows the
        second's name. ``strict``: raise UsageError for the first that is not a bundle.
        """
        names = _Names()
        for node, result in self._each(nodes, lambda node: self._judged(node, strict=strict)):
            host = names(node, result.report.host)
            same = host == result.report.host
            yield result if same else replace(result, report=result.report.model_copy(update={"host": host}))

    def facts_of_fleet(self, nodes: Iterable[Collected], *, strict: bool = False) -> Iterator[NodeAnswer]:
        """Yield the facts of each node or saved bundle, in the same way, one at a time."""
        names = _Names()
        for node in nodes:
            if node.answer is None:
                yield NodeAnswer(node.host, None, node.reason or "no answer")
                continue
            try:
                facts = self.facts(node.answer)
            except (UsageError, Exceeded) as err:
                if strict and isinstance(err, UsageError):
                    raise
                yield NodeAnswer(node.host, None, _reason(node, err))
                continue
            host = names(node, facts.host)
            yield NodeAnswer(host, facts.model_copy(update={"host": host}), None)

    def documents_of_fleet(
        self, nodes: Iterable[Collected], model: type[Model], derive: Callable[[NodeFacts], Model] | None
    ) -> Iterator[tuple[Collected, bytes | None, Model | None]]:
        """Yield each node with its bundle as it is saved, and with what a function of a module derives from its facts.

        One with an answer that is not a bundle gets a reason; one with facts that cannot be read has its bundle only.
        """
        for node, (reason, document, derived) in self._each(nodes, lambda node: self._saved(node, model, derive)):
            yield (node if reason is None else replace(node, answer=None, reason=reason)), document, derived

    def facts(self, answer: Answer) -> NodeFacts:
        """Return the facts of one answer. Raises UsageError if it is not a bundle, and Exceeded."""
        return _returned(NodeFacts, self._workers("facts", answer))

    def _saved(
        self, node: Collected, model: type[Model], derive: Callable[[NodeFacts], Model] | None
    ) -> tuple[str | None, bytes | None, Model | None]:
        if node.answer is None:
            return node.reason, None, None
        try:
            head, _, document = self._workers("document", node.answer, derive).partition(b"\n")
            return None, document, _returned(model, head) if head else None
        except Exceeded as err:
            return (str(err), None, None) if derive is None else self._saved(node, model, None)
        except UsageError as err:
            return str(err), None, None

    def _judged(self, node: Collected, *, strict: bool) -> JudgedNode:
        if node.answer is None:
            return JudgedNode(unreachable(node.host, node.reason or "no answer", node.seconds))
        try:
            head, _, document = self._workers("judge", node.answer, node.host, node.seconds).partition(b"\n")
            result = _returned(_Judged, head)
        except (UsageError, Exceeded) as err:
            if strict and isinstance(err, UsageError):
                raise
            report = unreachable(node.host, _reason(node, err), node.seconds)
            saved = self._saved(node, NodeFacts, None)[1] if self._request.documents else None
            return JudgedNode(report, document=saved)
        report = result.node if node.unchecked is None else unchecked(result.node, node.unchecked)
        return JudgedNode(report, result.level, result.extracted, document or None)

    def _judge(self, answer: Answer, host: str, seconds: float | None) -> bytes:
        """Return the result on one answer: a line with a document of ``_Judged``, and the bundle if requested."""
        request = self._request
        bundle = answer.bundle()
        facts = facts_from_bundle(bundle)
        level = request.level or level_of(bundle)
        policy = request.policy_of(host)
        findings = findings_of(bundle, facts, request, level=level, policy=policy)
        node = EvaluatedNode(facts, judged(bundle.host, described(facts), findings, seconds, policy), level)
        extracted = {name: extract(node) for name, extract in request.extracts.items()}
        result = _Judged(level=level, node=node.report, extracted=extracted)
        document = bundle.to_json() if request.documents else ""
        return f"{result.model_dump_json(by_alias=True)}\n{document}".encode()

    def _each(self, items: Iterable[Item], work: Callable[[Item], Result]) -> Iterator[tuple[Item, Result]]:
        """Yield each item with its result, a few at a time; items are fetched only when there is room."""
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        with ThreadPoolExecutor(max_workers=self._workers.most) as pool:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                while len(waiting) > 2 * self._workers.most or (waiting and waiting[0][1].done()):
                    done, result = waiting.popleft()
                    yield done, result.result()
            while waiting:
                done, result = waiting.popleft()
                yield done, result.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, at: TracebackType | None) -> None:
        self._workers.close()


class _Judged(BaseModel):
    """The result of a child."""

    level: Level
    node: NodeReport
    extracted: dict[str, Any]


class _Names:
    """Names of nodes in one run: for a second saved bundle of a host, the host's name is followed by the file."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def __call__(self, node: Collected, host: str) -> str:
        if node.answer is None or node.answer.host is not None:
            return host
        name = f"{host} ({node.host})" if host in self._used else host
        self._used.add(name)
        return name


def _reason(node: Collected, err: Exception) -> str:
    """Return why an answer was not evaluated; a result that is named after a file does not repeat its name."""
    return str(err).removeprefix(f"{node.host}: ")


def _returned(model: type[Model], text: bytes) -> Model:
    """Return what a child wrote. Raises Exceeded if the model refuses it: only this node has no result then."""
    try:
        return model.model_validate_json(text)
    except ValidationError as err:
        field, why = invalid_field(err, "the whole of it")
        raise Exceeded(f"evaluating its answer failed: {field}: {why}") from None


def _document(answer: Answer, derive: Callable[[NodeFacts], BaseModel] | None) -> bytes:
    """Return a line with what is derived, if anything is, and the bundle."""
    bundle = answer.bundle()
    derived = "" if derive is None else derive(facts_from_bundle(bundle)).model_dump_json()
    return f"{derived}\n{bundle.to_json()}".encode()


def _facts(answer: Answer) -> bytes:
    return facts_from_bundle(answer.bundle()).model_dump_json().encode()
