"""How strict a site is: limits of its own, and checks that it mutes or only observes, each with a reason and an end."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from gpunode.checks.thresholds import Number, Overrides

Mode = Literal["mute", "observe"]


@dataclass(frozen=True)
class PolicyRule:
    """What a policy says of one check. ``mute``: it is not run. ``observe``: its findings count for nothing."""

    mode: Mode
    reason: str
    until: date
    """The last day on which it holds."""

    def __str__(self) -> str:
        return f"{self.reason} (until {self.until})"


@dataclass(frozen=True)
class Policy:
    """What a site demands. ``rules`` holds those that are in force; ``expired`` has a line for each other."""

    source: str = ""
    """As findings name it: ``policy site.yml``."""
    thresholds: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    rules: Mapping[str, PolicyRule] = field(default_factory=dict)
    expired: tuple[str, ...] = ()
    own_checks: frozenset[str] = frozenset()
    """Ids of the checks that the policy's files declare: other nodes are not judged by them."""

    def overrides(self) -> Overrides:
        """Return its limits, for ``in_force``."""
        return Overrides(self.thresholds, self.source)


NO_POLICY = Policy()
