"""Conversion of documents from nodes and from Ansible to the models that the policies read."""

from collections.abc import Mapping
from typing import Any

from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.stack import Stack
from gpunode.variables import plain


def node_of(facts: NodeFacts | Mapping[str, Any]) -> NodeFacts:
    """Return the facts of a node. Raises UsageError for an invalid document."""
    if isinstance(facts, NodeFacts):
        return facts
    try:
        return NodeFacts.model_validate(plain(facts))
    except ValueError as err:
        raise UsageError(f"not a NodeFacts document: {err}") from None


def stack_of(stack: Stack | Mapping[str, Any]) -> Stack:
    """Return a stack. Raises UsageError for an invalid document."""
    if isinstance(stack, Stack):
        return stack
    try:
        return Stack.model_validate(plain(stack))
    except ValueError as err:
        raise UsageError(f"not a stack: {err}") from None
