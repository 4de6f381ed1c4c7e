"""Named limits: what a check compares with, where the number comes from, and what a site's policy puts in its place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from gpunode.catalog import GpuMatch

Number = int | float
EVERY = "default"
"""The key of an override that holds for all models."""


@dataclass(frozen=True, eq=False)
class Threshold:
    """One named limit of a check.

    A check reads ``value``, or ``of(match)`` where a GPU's model may have a value of its own. ``name`` begins with the
    check's id, or with its area where several checks share it: ``gpu.temperature.near``.
    """

    name: str
    default: Number
    unit: str
    means: str
    source: str
    by: Mapping[str, Number] = field(default_factory=dict)
    """Values of GPU models and architectures, by the ids of the catalog: ``{"hopper": 3}``."""
    least: Number = 0
    most: Number | None = None
    """What a policy may set: a value outside is refused."""

    @property
    def value(self) -> Number:
        """The limit in force, whatever the model."""
        return self.of(None)

    def of(self, match: GpuMatch | None) -> Number:
        """Return the limit in force for a GPU: the policy's before the check's own, the model's before the others."""
        overrides = _IN_FORCE.get()
        found = overrides.read(self, _keys(match))
        if found is not None:
            return found
        return next((self.by[key] for key in _keys(match) if key in self.by), self.default)


def _keys(match: GpuMatch | None) -> list[str]:
    """Under which names a model is looked up: its id, its architecture."""
    if match is None:
        return []
    architecture = match.common.get("architecture")
    return [*([match.gpu.id] if match.gpu else []), *([architecture] if architecture else [])]


class Overrides:
    """The limits that a policy sets: name → model, architecture or ``default`` → value."""

    def __init__(self, values: Mapping[str, Mapping[str, Number]], source: str) -> None:
        self._values = values
        self._source = source
        self._read: dict[str, str] = {}

    def read(self, threshold: Threshold, keys: list[str]) -> Number | None:
        """Return the policy's value, None where it has none; what was read is remembered for ``taken``."""
        values = self._values.get(threshold.name, {})
        key = next((key for key in (*keys, EVERY) if key in values), None)
        if key is None:
            return None
        self._read[threshold.name] = f"{values[key]:g} {threshold.unit}"
        return values[key]

    def taken(self) -> str | None:
        """Return which limits were read since the last call, as the source of a finding; None where none was."""
        if not self._read:
            return None
        words = ", ".join(f"{name} {value}" for name, value in self._read.items())
        self._read.clear()
        return f"{self._source} ({words})"


_NONE = Overrides({}, "")
_IN_FORCE: ContextVar[Overrides] = ContextVar("thresholds_in_force", default=_NONE)


@contextmanager
def in_force(overrides: Overrides) -> Iterator[None]:
    """Within the block, thresholds have the values that a policy sets."""
    token = _IN_FORCE.set(overrides)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def overridden() -> str | None:
    """Return what a finding owes to the policy: see ``Overrides.taken``."""
    return _IN_FORCE.get().taken()
