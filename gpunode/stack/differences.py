"""``gpunode plan --diff A B``: the differences between two saved plans."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from gpunode.errors import UsageError
from gpunode.frozen import invalid_field
from gpunode.stack import LOCK_NAME, Plan, PlanGroup, Stack
from gpunode.yaml_file import LOADER, load_bounded

MOST_BYTES = 16_000_000


class FieldDifference(NamedTuple):
    """One field that differs; None: that plan has no such field."""

    host: str
    field: str
    before: Any
    after: Any

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{where}{self.field}: {_shown(self.before)} -> {_shown(self.after)}"


def differences(first: Path, second: Path, *, verbose: bool) -> list[FieldDifference]:
    """Return the differences, host by host. Warnings are compared; reasons only with ``verbose``. Raises UsageError."""
    before, after = _answers(first), _answers(second)
    if len(before) == len(after) == 1:
        # Two plans for hypothetical nodes, or for one host under two names, are comparable.
        (name,) = after
        before = {name: next(iter(before.values()))}
    return [
        change
        for host in dict.fromkeys([*before, *after])
        for change in _changes(host, before.get(host, {}), after.get(host, {}), verbose=verbose)
    ]


def _answers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the answer by host of a saved plan, a stack or a lock; "" for a hypothetical node."""
    document = _read(path)
    try:
        if LOCK_NAME in document or document.get("schema") == "gpunode.stack/1":
            return {"": _flat(Stack.model_validate(document.get(LOCK_NAME, document)).model_dump(mode="json"))}
        plan = Plan.model_validate(document)
    except ValidationError as err:
        where, why = invalid_field(err)
        raise UsageError(f"{path}: {where}: {why}; expected a plan of --format json") from None
    return {host: _flat(_answer(group)) for group in plan.groups for host in group.hosts or ("",)}


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES // 1_000_000} MB: not a plan")
        document = load_bounded(path.read_text(encoding="utf-8"), LOADER)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError):
        raise UsageError(f"{path}: is not valid JSON or YAML; expected a plan of --format json") from None
    if not isinstance(document, dict):
        raise UsageError(f"{path}: contains no document; expected a plan of --format json")
    return document


def _answer(group: PlanGroup) -> dict[str, Any]:
    if group.stack is not None:
        return group.stack.model_dump(mode="json")
    if group.conflict is not None:
        return {"conflict": group.conflict.message}
    return {"undetermined": group.undetermined}


def _flat(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested fields under dotted names; packages by name, warnings by rule, other lists as a whole."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{above}{key}"
        if key == "packages" and not above:
            flat |= {f"packages {row['name']}": row["version"] or "set by the repository" for row in item}
        elif key == "warnings":
            flat |= {f"warning [{row['rule']}] {row['text']}": "yes" for row in item}
        elif isinstance(item, Mapping):
            flat |= _flat(item, f"{name}.")
        elif key != "schema_name":
            flat[name] = item
    return flat


def _changes(
    host: str, before: Mapping[str, Any], after: Mapping[str, Any], *, verbose: bool
) -> Iterator[FieldDifference]:
    for field in dict.fromkeys([*before, *after]):
        if before.get(field) != after.get(field) and (verbose or not field.startswith("reasons.")):
            yield FieldDifference(host, field, before.get(field), after.get(field))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text) or "-"
