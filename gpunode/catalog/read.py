"""Catalog files as text with locations: YAML in, sections of rows out, overlays merged.

Every scalar stays text until a row's model converts it: ``13.10`` is not a number and ``20e6`` is a PCI id. Only
``null``, ``~`` and an empty value are None.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from gpunode.errors import UsageError

try:
    from yaml import CSafeLoader as _Safe
except ImportError:  # PyYAML without libyaml: the same, slower
    from yaml import SafeLoader as _Safe  # type: ignore[assignment]

NULL = "tag:yaml.org,2002:null"
TEXT = "tag:yaml.org,2002:str"


class _Loader(_Safe):
    """A YAML loader that recognizes null; every other scalar is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as yaml declares it)
        first: [pair for pair in pairs if pair[0] == NULL] for first, pairs in _Safe.yaml_implicit_resolvers.items()
    }

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
        """Return the tag of a node; most are text that cannot be null."""
        if kind is yaml.ScalarNode and not (implicit[0] and value[:1] in _NULLS):
            return TEXT
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return tag


_NULLS = frozenset(_Loader.yaml_implicit_resolvers) - {
    first for first, pairs in _Loader.yaml_implicit_resolvers.items() if not pairs
}
"""How the text of null begins."""


Key = tuple[str | int, ...]
MOST_LEVELS = 20
MOST_NODES = 500_000


@dataclass(frozen=True, order=True)
class Problem:
    """One problem in a catalog file; its text is the line that a user sees."""

    file: str
    line: int
    key: str
    message: str
    rule: str = field(compare=False)
    """The rule of the linter that found it."""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        text = f"{where}: {self.key + ': ' if self.key else ''}{self.message}"
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class BadFileError(UsageError):
    """A file that cannot be read as a catalog file."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def dotted(key: Key) -> str:
    """Return a location in a file for messages: ``gpus.t4.memory_gb``."""
    return ".".join(str(part) for part in key)


@dataclass(frozen=True)
class Document:
    """One catalog file: section → row id → fields, all text."""

    name: str
    root: yaml.MappingNode

    @cached_property
    def duplicates(self) -> list[Problem]:
        """Return keys that occur twice in one mapping: YAML silently uses the last."""
        return list(_duplicates(self.name, self.root, ()))

    @cached_property
    def sections(self) -> dict[str, Any]:
        """Return the content; a section that is not a mapping is kept unchanged, for the linter to report."""
        return {str(key.value): _plain(value) for key, value in self.root.value}

    def line(self, key: Key) -> int | None:
        """Return the line of a key, of its deepest part that exists; None if the section does not exist."""
        node: yaml.Node = self.root
        number: int | None = None
        for part in key:
            step = _step(node, part)
            if step is None:
                break
            mark, node = step
            number = mark.start_mark.line + 1
        return number

    def has(self, key: Key) -> bool:
        """Return True if this file has a value under the key."""
        node: yaml.Node = self.root
        for part in key:
            step = _step(node, part)
            if step is None:
                return False
            node = step[1]
        return True

    def replaces(self, key: Key) -> bool:
        """Return True if this file has a value above the key that is not a mapping, which ``merge`` replaces as a
        whole."""
        node: yaml.Node = self.root
        for part in key:
            if not isinstance(node, yaml.MappingNode):
                return True
            step = _step(node, part)
            if step is None:
                return False
            node = step[1]
        return True


def _step(node: yaml.Node, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {key.value: _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if node.tag == NULL:
        return None
    return node.value


def _duplicates(name: str, node: yaml.Node, above: Key) -> Iterable[Problem]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            location = (*above, str(key.value))
            if str(key.value) in seen:
                yield Problem(name, line, dotted(location), f"stands here and in line {seen[key.value]}", "unique-id")
            seen[str(key.value)] = line
            yield from _duplicates(name, value, location)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _duplicates(name, item, (*above, index))


def read(path: Path, name: str | None = None) -> Document:
    """Read one file; raise BadFileError if it is missing, not YAML, or not a mapping of sections."""
    name = name or str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise BadFileError(Problem(name, 0, "", f"cannot be read: {err.strerror}", "yaml")) from None
    except UnicodeDecodeError:
        raise BadFileError(Problem(name, 0, "", "is not UTF-8 text", "yaml")) from None
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse the text of one file; raise BadFileError if it is not YAML, or not a mapping of sections."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        _size(root, 0)
    except (RecursionError, OverflowError):
        raise BadFileError(Problem(name, 0, "", "is nested too deep, too large, or refers to itself", "yaml")) from None
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        line = mark.line + 1 if mark else 0
        raise BadFileError(Problem(name, line, "", f"is not YAML: {err.problem or err.context}", "yaml")) from None
    except yaml.YAMLError as err:
        raise BadFileError(Problem(name, 0, "", f"is not YAML: {str(err).splitlines()[0]}", "yaml")) from None
    if not isinstance(root, yaml.MappingNode):
        line = root.start_mark.line + 1 if root else 1
        raise BadFileError(Problem(name, line, "", "expected a mapping of sections (gpus, branches …)", "yaml"))
    return Document(name, root)


def _size(node: yaml.Node | None, depth: int) -> int:
    """Return the number of nodes with all anchors followed; raise OverflowError beyond the limit, so that anchors
    cannot expand without bound."""
    if depth > MOST_LEVELS:
        raise OverflowError
    parts = node.value if isinstance(node, yaml.CollectionNode) else ()
    inner = (part for item in parts for part in (item if isinstance(item, tuple) else (item,)))
    size = 1
    for part in inner:
        size += _size(part, depth + 1)
        if size > MOST_NODES:
            raise OverflowError
    return size


def merge(old: Any, new: Any) -> Any:
    """Return ``new`` merged over ``old``: mappings key by key, everything else as a whole."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{key: merge(old[key], value) if key in old else value for key, value in new.items()}}
    return new


def section(documents: Sequence[Document], name: str, base: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the raw rows of one section: the documents' rows merged in order, defaults filled in.

    A file's ``defaults: {SECTION: {field: value}}`` (and ``defaults: {all: …}``) fill fields that its own new rows
    leave out. New rows of a later file use the first file's defaults too, except source and date: their source is
    ``site``. ``base``: whole rows below all documents; they come last.
    """
    rows: dict[str, Any] = {}
    shipped: dict[str, Any] = {}
    for place_in_line, document in enumerate(documents):
        defaults = _defaults(document, name)
        if place_in_line == 0:
            shipped = {field: value for field, value in defaults.items() if field not in ("source", "date")}
            shipped |= {} if name == "sources" else {"source": "site"}
        else:
            defaults = {**shipped, **defaults}
        content = document.sections.get(name)
        for key, fields in content.items() if isinstance(content, Mapping) else ():
            if key in rows or key in base:
                rows[key] = merge(rows.get(key, base.get(key)), fields)
            else:
                rows[key] = {**defaults, **fields} if isinstance(fields, Mapping) else fields
    return {**rows, **{key: fields for key, fields in base.items() if key not in rows}}


def _defaults(document: Document, name: str) -> dict[str, Any]:
    defaults = document.sections.get("defaults")
    if not isinstance(defaults, Mapping):
        return {}
    parts = (defaults.get(key) for key in (("all", name) if name != "sources" else (name,)))
    return {field: value for part in parts if isinstance(part, Mapping) for field, value in part.items()}


def location_of(documents: Sequence[Document], key: Key) -> tuple[str, int]:
    """Return file and line of a key: the last overlay that sets it, or the last document that has the longest part of
    it."""
    for document in reversed(documents[1:]):
        if document.replaces(key):
            return document.name, document.line(key) or 1
    for length in range(len(key), 0, -1):
        for document in reversed(documents):
            if document.has(key[:length]):
                return document.name, document.line(key[:length]) or 1
    return documents[-1].name if documents else "", 1
