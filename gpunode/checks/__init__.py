"""The check registry. Importing this package registers every check."""

from gpunode.checks.registry import Check, Expectation, Finding, Status, judge, registry

__all__ = ["Check", "Expectation", "Finding", "Status", "judge", "registry"]
