"""Parsers (text in, typed facts out) and the picture of a node that checks judge."""

from gpunode.facts.build import facts_from_bundle
from gpunode.facts.node import NodeFacts

__all__ = ["NodeFacts", "facts_from_bundle"]
