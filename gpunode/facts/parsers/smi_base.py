"""Base of the parsers of nvidia-smi: a tree of labels with values, and the errors in place of the output."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from gpunode.facts.models.smi import Failure, ToolError
from gpunode.facts.parsers.values import lines_of

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


_KINDS = (
    (re.compile(r"version mismatch", re.I), "driver-library-mismatch"),
    (re.compile(r"insufficient permissions|permission denied|access blocked", re.I), "permission"),
    (re.compile(r"no devices (?:were )?found", re.I), "no-devices"),
    (re.compile(r"unable to determine the device handle|gpu is lost|fallen off the bus", re.I), "gpu-lost"),
    (re.compile(r"couldn't communicate with the nvidia driver|driver (?:is )?not loaded", re.I), "driver-not-loaded"),
    (re.compile(r"couldn't find libnvidia-ml|nvml: shared library not found", re.I), "library-missing"),
    (re.compile(r"failed to initialize nvml: unknown error", re.I), "nvml-unknown"),
)
_ERROR_LINE = re.compile(
    r"""\s*(?:
        Failed\ to\ (?:initialize|properly\ shut\ down)\ NVML
      | NVIDIA-SMI\ has\ failed
      | NVIDIA-SMI\ couldn't\ find
      | NVIDIA:\ could\ not\ open\ the\ device\ file
      | No\ devices\ (?:were\ )?found
      | Unable\ to\ determine\ the\ device\ handle
      | Error:?\ (?:Driver|Unable|Failed|Unknown|No)
      | (?:NVML|nvidia-smi):\s
      | Field\ ".*"\ is\ not\ a\ valid\ field
      | GPU\ is\ lost
      | Insufficient\ Permissions\s*$
    )""",
    re.I | re.X,
)
_WARNING = re.compile(r"\s*(?:WARNING|Warning|NOTE|Treating as warning)\b")
_NVML_VERSION = re.compile(r"\s*NVML library version:?\s+(\d{1,9}(?:\.\d{1,9})+)\s*")
_SEARCHED_LINES = 200


def error_kind(message: str) -> str:
    """Return the kind of an error message; ``other`` if it is unknown."""
    return next((kind for pattern, kind in _KINDS if pattern.search(message[:2000])), "other")


def is_error_line(line: str) -> bool:
    """Return True for a line by which nvidia-smi reports a failure."""
    return _ERROR_LINE.match(line[:2000]) is not None


def is_remark(line: str) -> bool:
    """Return True for a line that nvidia-smi prints beside its output: an error, or ``WARNING: infoROM is corrupted
    ...``."""
    return any((is_error_line(line), _WARNING.match(line[:2000]), _NVML_VERSION.fullmatch(line[:2000])))


def remarks(text: str) -> list[str]:
    """Return the lines of a text that ``is_remark`` accepts."""
    lines = lines_of(text[:100_000])[:_SEARCHED_LINES]
    return [line.strip() for line in lines if is_remark(line)]


def find_error(text: str) -> Failure | None:
    """Return the failure that nvidia-smi reports, None if the text reports none.

    For text in which no output was found.
    """
    lines = lines_of(text[:100_000])[:_SEARCHED_LINES]
    message = next((line.strip() for line in lines if is_error_line(line)), None)
    if message is None:
        return None
    versions = (match[1] for line in lines if (match := _NVML_VERSION.fullmatch(line)))
    return Failure(error=ToolError(kind=error_kind(message), message=message, nvml_version=next(versions, None)))
