"""The rows of the documentation's table of facts.

What a fact is read from is what its reader asks of bundles: none of it is written down a second time.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

sys.path.append(str(Path(__file__).parents[1]))

from bundles import grace, guest, hgx, pcie_4, t4
from pydantic import BaseModel

from gpunode.facts.bundle_reader import BundleReader, UnknownFactError
from gpunode.facts.errors import ParseError
from gpunode.facts.node import FACTS, NodeFacts
from gpunode.probe.bundle import Bundle

ROOT = Path(__file__).parents[2]
OF_ONE_DEVICE = re.compile(r"\b(nvme|dcb-pfc)-[\w]+")
VARIES = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|(?<=/)[a-z_]+[0-9]+(?:n[0-9]+)?(?=/|$)")
OF_ONE_NODE = re.compile(r"(?<=/lib/modules/)[^/]+|(?<=/sys/block/)[^/]+|(?<=/efivars/SecureBoot-)[\w-]+")
MOST_FILES = 3
"""Of one folder; of more the folder stands for them."""


class Asked(dict[str, Any]):
    """A part of a bundle that notes what is asked of it."""

    def __init__(self, part: dict[str, Any], requested: set[str]) -> None:
        super().__init__(part)
        self.requested = requested

    def __getitem__(self, key: str) -> Any:
        self.requested.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.requested.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.requested.add(str(key))
        return super().__contains__(key)


def documents() -> Iterator[dict[str, Any]]:
    """Nodes of several kinds, also without dpkg and without a journal: readers then ask the next tool."""
    for base in (hgx, pcie_4, t4, guest, grace):
        yield base()
    for gone in (("dpkg", "apt"), ("journal",), ("rdma", "nvidia-smi")):
        document = hgx()
        commands = {key: value for key, value in document["commands"].items() if not key.startswith(gone)}
        yield {**document, "commands": commands}


def sources() -> dict[str, tuple[set[str], set[str]]]:
    """Return each fact's commands, by the probe's names, and files."""
    by_fact: dict[str, tuple[set[str], set[str]]] = {name: (set(), set()) for name in FACTS}
    for document in documents():
        bundle = Bundle.from_json(json.dumps(document), "a test's bundle")
        for name, source in FACTS.items():
            commands, files = by_fact[name]
            noted = {"commands": Asked(bundle.commands, commands), "files": Asked(bundle.files, files)}
            try:
                source.read(BundleReader(bundle.model_copy(update=noted)))
            except (UnknownFactError, ParseError):
                continue
    return by_fact


def read_from(commands: set[str], files: set[str]) -> str:
    """Return sources in short: commands, and files or the folder that many of them are in."""
    names = sorted({OF_ONE_DEVICE.sub(r"\1-*", name) for name in commands - {"probe-read"}})
    by_folder: dict[str, set[str]] = {}
    for path in files:
        general = OF_ONE_NODE.sub("*", VARIES.sub("*", path))
        by_folder.setdefault("/".join(general.split("/")[:-1][:4]), set()).add(general)
    for folder, paths in sorted(by_folder.items()):
        names += sorted(paths) if len(paths) <= MOST_FILES else [f"{folder}/…"]
    return ", ".join(f"`{name}`" for name in names)


def described() -> dict[str, tuple[str, str]]:
    """Return each fact's type and description, as NodeFacts declares them; without one, that of its model."""
    classes: dict[str, str] = {}
    areas: list[ast.stmt | None] = []
    for path in sorted((ROOT / "gpunode/facts").rglob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.ClassDef):
                classes[statement.name] = ast.get_docstring(statement) or ""
                areas += [*statement.body, None] if statement.name.endswith("Facts") else ()
    by_fact: dict[str, tuple[str, str]] = {}
    for field, following in pairwise(areas):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        source = FACTS.get(field.target.id)
        kind = ast.unparse(field.annotation).removesuffix(" | None")
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = str(following.value.value)
        names = [name for name in re.findall(r"[A-Z]\w+", kind) if name in classes]
        text = text or next((classes[name].split("\n\n")[0] for name in reversed(names)), "")
        if source is not None and source.none_means is not None:
            text += f"{'.' if text[-1:].isalnum() else ''} None without a gap: {source.none_means}."
        by_fact[field.target.id] = kind, " ".join(text.split()).replace("``", "`")
    return by_fact


def rows() -> Iterator[list[str]]:
    """Yield the cells of each fact."""
    words, by_fact = described(), sources()
    for name, source in sorted(FACTS.items(), key=lambda fact: fact[1].read.__module__):
        kind, text = words[name]
        module = source.read.__module__.removeprefix("gpunode.facts.")
        root = "yes" if source.needs_root else ""
        yield [f"`{name}`", f"`{kind}`", text, read_from(*by_fact[name]), root, f"`{module}.{source.read.__name__}`"]


def fields() -> set[str]:
    """Return the fields of NodeFacts that are facts of the node."""
    return set(NodeFacts.model_fields) - {"host", "collected_at", "simulated", "gaps"}


def model_rows() -> Iterator[list[str]]:
    """Yield the cells of each model that facts consist of: its name, and its fields with their types."""
    pending: list[Any] = [NodeFacts.model_fields[name].annotation for name in fields()]
    models: dict[str, type[BaseModel]] = {}
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind.__name__ not in models:
                models[kind.__name__] = kind
                pending += [field.annotation for field in kind.model_fields.values()]
        else:
            pending += get_args(kind)
    for name, model in sorted(models.items()):
        cells = [f"`{field}: {type_text(info.annotation)}`" for field, info in model.model_fields.items()]
        yield [f"`{name}`", ", ".join(cells)]


def type_text(kind: Any) -> str:
    """Return a type as an author of checks reads it: without modules."""
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else re.sub(r"\b(?:\w+\.)+", "", str(kind))
