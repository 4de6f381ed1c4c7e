"""Named limits: the number that a check compares with, its source, and the override by a site; the policy of a site."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from gpunode.catalog import GpuMatch

Number = int | float
EVERY = "default"
"""The key of an override for all models."""


@dataclass(frozen=True, eq=False)
class Threshold:
    """One named limit of a check.

    A check reads ``value``, or ``of(match)`` if a GPU's model may have a value of its own. ``name`` begins with the
    check's id, or with its area if several checks share it: ``gpu.temperature.near``.
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
    """Range that a policy may set: other values are refused."""

    @property
    def value(self) -> Number:
        """Return the limit in force for any model."""
        return self.of(None)

    def of(self, match: GpuMatch | None) -> Number:
        """Return the limit in force for a GPU: the policy's before the check's own, the model's before the others."""
        overrides = _IN_FORCE.get()
        override = overrides.read(self, _keys(match))
        if override is not None:
            return override
        return next((self.by[key] for key in _keys(match) if key in self.by), self.default)


def _keys(match: GpuMatch | None) -> list[str]:
    """Return the names under which a model is looked up: its id, its architecture."""
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
        """Return the policy's value, None if it has none; the access is recorded for ``taken``."""
        values = self._values.get(threshold.name, {})
        key = next((key for key in (*keys, EVERY) if key in values), None)
        if key is None:
            return None
        self._read[threshold.name] = f"{values[key]:g} {threshold.unit}"
        return values[key]

    def taken(self) -> str | None:
        """Return the limits that were read since the last call, as the source of a finding; None if there are none."""
        if not self._read:
            return None
        words = ", ".join(f"{name} {value}" for name, value in self._read.items())
        self._read.clear()
        return f"{self._source} ({words})"


_NONE = Overrides({}, "")
_IN_FORCE: ContextVar[Overrides] = ContextVar("thresholds_in_force", default=_NONE)


@contextmanager
def in_force(overrides: Overrides) -> Iterator[None]:
    """Apply the values of a policy to thresholds within the block."""
    token = _IN_FORCE.set(overrides)
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def overridden() -> str | None:
    """Return the policy's part in a finding's source: see ``Overrides.taken``."""
    return _IN_FORCE.get().taken()


Mode = Literal["mute", "observe"]


@dataclass(frozen=True)
class PolicyRule:
    """The rule of a policy for one check. ``mute``: it is not run. ``observe``: its findings do not count."""

    mode: Mode
    reason: str
    until: date
    """The last day on which it applies."""

    def __str__(self) -> str:
        return f"{self.reason} (until {self.until})"


@dataclass(frozen=True)
class Policy:
    """The requirements of a site. ``rules`` has those in force; ``expired`` has a line for each of the others."""

    source: str = ""
    """Name in findings: ``policy site.yml``."""
    thresholds: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    rules: Mapping[str, PolicyRule] = field(default_factory=dict)
    expired: tuple[str, ...] = ()
    own_checks: frozenset[str] = frozenset()
    """Ids of the checks that the policy's files declare; they are not run on other nodes."""

    def overrides(self) -> Overrides:
        """Return its limits, for ``in_force``."""
        return Overrides(self.thresholds, self.source)


NO_POLICY = Policy()
