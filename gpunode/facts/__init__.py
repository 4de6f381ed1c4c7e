"""Parsers of tool output, and the typed facts of a node that checks evaluate."""

from gpunode.facts.build import facts_from_bundle
from gpunode.facts.node import NodeFacts

__all__ = ["NodeFacts", "facts_from_bundle"]
