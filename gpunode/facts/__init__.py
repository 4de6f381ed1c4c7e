"""Parsers of tool output, and the typed facts of a node that checks evaluate."""

from gpunode.facts.node import NodeFacts, facts_from_bundle

__all__ = ["NodeFacts", "facts_from_bundle"]
