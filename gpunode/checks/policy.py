"""A site's policy: its own limits, and checks that it mutes or only observes, each with a reason and an expiry date."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from gpunode.checks.thresholds import Number, Overrides

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
