"""Files of own checks: reading them, and testing each check by the contract of gpunode's own checks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from gpunode.checks import Expectation, Finding, Status, registry
from gpunode.checks.declared import DeclaredCheck, UnknownFact, register
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.frozen import Frozen
from gpunode.judging.report import WORST_FIRST
from gpunode.judging.saved import read_file
from gpunode.probe.bundle import Bundle
from gpunode.text import unknown
from gpunode.yaml_file import first_error, read_mapping

KEYS = ("checks", "tests")
_INDEX = re.compile(r"(\w+)(?:\[(\d*)\])?")
_files: dict[Path, frozenset[str]] = {}
"""Files with registered checks, with their ids."""


class Mutant(Frozen):
    """A change of the facts that the check must find."""

    set: dict[str, Any] = Field(min_length=1)
    becomes: Status


class CheckTrial(Frozen):
    """The test of one check."""

    check: str
    fixture: str
    """A bundle that the check passes, relative to the file."""
    mutants: tuple[Mutant, ...] = Field(min_length=1)


class OwnFile(Frozen):
    """The file."""

    checks: tuple[DeclaredCheck, ...] = ()
    tests: tuple[CheckTrial, ...] = ()


def load_files(names: Iterable[str], folder: Path, where: str) -> frozenset[str]:
    """Register the checks of files, named relative to a folder, and return their ids. Raises UsageError."""
    ids: frozenset[str] = frozenset()
    for name in names:
        path = folder / name
        ids |= load_file(path, f"{where}: own_checks")[1]
    registry.of_policies |= ids
    return ids


def load_file(path: Path, option: str) -> tuple[OwnFile, frozenset[str]]:
    """Read a file and register its checks, once. Raises UsageError."""
    content, _ = read_mapping(option, path, ", ".join(KEYS))
    where = f"{option} {path}"
    for key in content:
        if key not in KEYS:
            raise UsageError(f"{where}: {unknown('key', str(key), KEYS)}")
    try:
        contents = OwnFile.model_validate(content)
    except ValidationError as err:
        raise UsageError(f"{where}: {first_error(err)}") from None
    real = path.resolve()
    if real not in _files:
        with registry.loading(f"file {path.name}") as ids:
            for check in contents.checks:
                _register(check, path.name, where)
        _files[real] = frozenset(ids)
    return contents, _files[real]


def _register(check: DeclaredCheck, source: str, where: str) -> None:
    try:
        register(registry, check, source)
    except UnknownFact as err:
        raise UsageError(f"{where}: {check.id}: fact: {unknown('fact', err.name, err.known)}") from None
    except ValueError as err:
        raise UsageError(f"{where}: {check.id}: {err}") from None


@dataclass(frozen=True)
class Tried:
    """One case of the contract, and why it failed; None: it passed."""

    check: str
    case: str
    problem: str | None


def try_file(path: Path) -> Iterator[Tried]:
    """Test every check of a file, and of packages as far as the file has tests of them. Raises UsageError."""
    contents, ids = load_file(path, "checks test")
    tested = [case.check for case in contents.tests]
    for case in contents.tests:
        if case.check not in registry or registry[case.check].origin is None:
            known = [check.id for check in registry if check.origin is not None]
            raise UsageError(f"checks test {path}: tests: {unknown('own check', case.check, known)}")
    if not contents.tests:
        raise UsageError(f"checks test {path}: no tests: each test needs check, fixture and mutants")
    for check_id in sorted(ids - set(tested)):
        yield Tried(check_id, "is tested", "the file contains no test for it")
    everyone = sorted(ids | set(tested))
    for case in contents.tests:
        yield from _case(case, path, everyone)


def _case(case: CheckTrial, path: Path, everyone: list[str]) -> Iterator[Tried]:
    fixture = path.parent / case.fixture
    node = facts_from_bundle(Bundle.from_json(read_file(fixture), str(fixture)))
    before = {check_id: _status(_findings(check_id, node)) for check_id in everyone}
    passed = before[case.check] is Status.PASS
    faults = "; ".join(finding.message for finding in _findings(case.check, node) if finding.status is not Status.PASS)
    problem = None if passed else f"it is {before[case.check].value}: {faults}"
    yield Tried(case.check, f"passes {case.fixture}", problem)
    for mutant in case.mutants:
        changes = ", ".join(f"{name}={value}" for name, value in mutant.set.items())
        yield Tried(case.check, f"finds {changes}", _mutant_problem(case, mutant, node, before))
    if not registry[case.check].needs:
        yield Tried(case.check, "names the facts that it needs", "without needs, missing data would be judged")
    for field in registry[case.check].needs:
        yield Tried(case.check, f"reports an error without {field}", _missing_problem(case.check, field, node))


def _mutant_problem(case: CheckTrial, mutant: Mutant, node: NodeFacts, before: Mapping[str, Status]) -> str | None:
    try:
        changed = _changed(node, mutant.set)
    except (UsageError, ValidationError) as err:
        reason = first_error(err) if isinstance(err, ValidationError) else str(err)
        return f"the facts cannot be changed in this way: {reason}"
    after = {check_id: _status(_findings(check_id, changed)) for check_id in before}
    if after[case.check] is not mutant.becomes:
        return f"it is {after[case.check].value}, {mutant.becomes.value} expected"
    moved = [check_id for check_id in before if after[check_id] is not before[check_id] and check_id != case.check]
    if moved:
        return f"other site checks change too: {', '.join(moved)}"
    broken = [
        finding for finding in _findings(case.check, changed) if finding.status is mutant.becomes and not finding.remedy
    ]
    return "its finding has no remedy" if broken and mutant.becomes in (Status.WARN, Status.FAIL) else None


def _missing_problem(check_id: str, field: str, node: NodeFacts) -> str | None:
    gaps = {**node.gaps, field: "removed by the test"}
    without = node.model_copy(update={field: None, "gaps": gaps})
    status = _status(_findings(check_id, without))
    return None if status in (Status.ERROR, Status.SKIP) else f"it is {status.value}: missing data must not be judged"


def _findings(check_id: str, node: NodeFacts) -> list[Finding]:
    return registry[check_id].findings(node, Expectation())


def _status(findings: list[Finding]) -> Status:
    return min((finding.status for finding in findings), key=WORST_FIRST.index)


def _changed(node: NodeFacts, values: Mapping[str, Any]) -> NodeFacts:
    document = node.model_dump(mode="json")
    for path, value in values.items():
        _set(document, path, value)
    return NodeFacts.model_validate(document)


def _set(document: Any, path: str, value: Any) -> None:
    """Set the value at a path: ``disks[0].name`` of the first, ``disks[].name`` of every element."""
    name, _, rest = path.partition(".")
    match = _INDEX.fullmatch(name)
    if match is None or not isinstance(document, dict) or match[1] not in document:
        known = list(document) if isinstance(document, dict) else []
        raise UsageError(unknown("fact", name, known) if known else f"{path} has no fields")
    inner = document[match[1]]
    if match[2] is None:
        if rest:
            _set(inner, rest, value)
        else:
            document[match[1]] = value
        return
    chosen = range(len(inner)) if match[2] == "" else [int(match[2])]
    for number in chosen:
        if number >= len(inner):
            raise UsageError(f"{match[1]} has {len(inner)} elements, [{number}] is out of range")
        if rest:
            _set(inner[number], rest, value)
        else:
            inner[number] = value
