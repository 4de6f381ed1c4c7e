"""The output of ``nvidia-smi -q``, as XML or as indented text: a tree of labels with values."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

_NOT_A_WORD = re.compile(r"[^a-z0-9]+")
_KNOWN_CHARACTERS = 64
"""Longer labels are not remembered: a node must not fill memory that others need."""


def label_of(name: str) -> str:
    """Return ``SEC-DED`` as ``sec_ded``: one spelling for XML tags and for the labels of the text."""
    return _known_label(name) if len(name) <= _KNOWN_CHARACTERS else _label(name)


@lru_cache(maxsize=4096)
def _known_label(name: str) -> str:
    return _label(name)


def _label(name: str) -> str:
    return _NOT_A_WORD.sub("_", name.lower()).strip("_")


@dataclass(slots=True)
class TreeLabel:
    """One label of the output, with its value if it has one, and its children."""

    label: str
    value: str | None = None
    children: list["TreeLabel"] = field(default_factory=list)

    def all(self, label: str) -> list["TreeLabel"]:
        """Return the children of that label, in order."""
        return [child for child in self.children if child.label == label]

    def child(self, *labels: str) -> "TreeLabel":
        """Return the first child with one of the labels; an empty node if there is none."""
        for label in labels:
            for child in self.children:
                if child.label == label:
                    return child
        return TreeLabel("")

    def has(self, *labels: str) -> bool:
        """Return True if a child has one of the labels."""
        return any(child.label in labels for child in self.children)

    def get(self, *paths: str) -> str | None:
        """Return the value at the first of the paths (``pci/bus_id``) that has one."""
        for path in paths:
            node = self
            for label in path.split("/"):
                node = node.child(label)
            if node.value is not None:
                return node.value
        return None

    def leaves(self) -> Iterator["TreeLabel"]:
        """Yield all nodes below with a value, in order."""
        pending = list(reversed(self.children))
        while pending:
            node = pending.pop()
            if node.value is not None:
                yield node
            pending.extend(reversed(node.children))

    def first_below(self, *labels: str) -> str | None:
        """Return the value of the first node anywhere below with one of the labels."""
        return next((leaf.value for leaf in self.leaves() if leaf.label in labels), None)
