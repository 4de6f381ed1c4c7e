"""Short ways to ask, for the tests of the resolver."""

from datetime import date
from typing import Any

from gpunode.catalog import load
from gpunode.stack import Conflict, GpuGroup, Installed, NodePicture, Request, Stack, resolve
from gpunode.stack.candidates import Candidate
from gpunode.stack.model import InstalledPackage
from gpunode.stack.question import Question
from gpunode.stack.rules import CandidateCase, Choice, Objection, rules

CATALOG = load()
TODAY = date(2026, 11, 20)
SETTINGS = set(Request.model_fields)


def group(name: str, count: int | None = 1) -> GpuGroup:
    """GPUs by name."""
    return GpuGroup(label=name, models=tuple(gpu.id for gpu in CATALOG.find_gpu(name).gpus), count=count)


def on_node(*packages: tuple[str, str, str], flavour: Any = None) -> Installed:
    """Driver packages as (name, version, origin)."""
    versions = {version.split("-")[0] for _, version, _ in packages}
    return Installed(
        version=versions.pop() if len(versions) == 1 else None,
        flavour=flavour,
        packages=tuple(
            InstalledPackage(name=name, version=version, origin=origin, closure=origin)
            for name, version, origin in packages
        ),
    )


def parts(*gpus: GpuGroup | str, **settings: Any) -> tuple[Request, NodePicture]:
    """A request and a node: fields of either by name; GPUs by name, one of each."""
    groups = tuple(group(gpu) if isinstance(gpu, str) else gpu for gpu in gpus)
    request = Request(**{name: value for name, value in settings.items() if name in SETTINGS})
    rest = {name: value for name, value in settings.items() if name not in SETTINGS}
    return request, NodePicture(**{"os": "ubuntu-24.04", "gpus": groups, **rest})


def ask(*gpus: GpuGroup | str, today: date = TODAY, **settings: Any) -> Stack | Conflict:
    """What the resolver answers."""
    return resolve(*parts(*gpus, **settings), CATALOG, today)


def stack(*gpus: GpuGroup | str, today: date = TODAY, **settings: Any) -> Stack:
    """The stack; the test fails on a conflict."""
    answer = ask(*gpus, today=today, **settings)
    assert isinstance(answer, Stack), answer.message
    return answer


def conflict(*gpus: GpuGroup | str, today: date = TODAY, **settings: Any) -> Conflict:
    """The conflict; the test fails on a stack."""
    answer = ask(*gpus, today=today, **settings)
    assert isinstance(answer, Conflict), f"a stack: {answer.driver} on {answer.os}"
    return answer


def case(*gpus: GpuGroup | str, today: date = TODAY, **settings: Any) -> CandidateCase:
    """One candidate in front of a question: ``version``, ``flavour`` and ``compat`` make the candidate."""
    version, flavour = settings.pop("version", "580.95.05"), settings.pop("flavour", "open")
    compat, decided_by = settings.pop("compat", None), settings.pop("decided_by", "catalog")
    arch: Any = settings.get("arch") or "x86_64"
    question = Question(*parts(*gpus, **settings), CATALOG, today)
    candidate = Candidate(
        CATALOG.os(question.node.os or "ubuntu-24.04"),
        arch,
        question.source,
        CATALOG.branch_of(version),
        version,
        decided_by,
        flavour,
        CATALOG.forward_compat[compat] if compat else None,
    )
    return CandidateCase(question, candidate)


def reported(rule_id: str, about: CandidateCase) -> list[Objection]:
    """What one rule reports against a case, about the question and about the candidate."""
    rule = rules[rule_id]
    objections = list(rule.ask(about.question)) if rule.ask else []
    return objections + (list(rule.judge(about)) if rule.judge else [])


def decided(rule_id: str, about: CandidateCase) -> dict[str, Choice]:
    """What one rule decides, by field."""
    decide = rules[rule_id].decide
    assert decide is not None
    return {choice.field: choice for choice in decide(about)}
