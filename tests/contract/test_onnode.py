"""What runs on nodes and in containers runs under their Python: its syntax, its library, and nothing of ours.

ruff has the same versions (``per-file-target-version``) and refuses newer syntax in these files.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from gpunode.onnode import OLDEST, program_text

ROOT = Path(__file__).parents[2]
PAYLOAD = "gpunode.workload.payload"
OTHERS = {
    "gpunode/workload/payload/*.py": (3, 8),
    "gpunode/lab/simulator/*.py": (3, 9),
    "roles/rdma/files/roce": (3, 9),
    "roles/first_boot/files/gpunode-first-boot": (3, 9),
}
"""Programs beside ``gpunode/onnode``, with the oldest Python of each."""
SENDING = {"gpunode/workload/payload/__init__.py"}
"""Runs on the sending side only."""
RUFF_KNOWS = (3, 7)
# What later Pythons brought, from the "New in version" and "Changed in version" notes of the library's documentation.
NAMES = {
    **dict.fromkeys(("time_ns", "fromisoformat", "nullcontext", "isascii", "get_running_loop"), (3, 7)),
    **dict.fromkeys(("cached_property", "addaudithook", "perm", "comb", "isqrt", "singledispatchmethod"), (3, 8)),
    **dict.fromkeys(("removeprefix", "removesuffix", "is_relative_to", "to_thread", "randbytes", "unparse"), (3, 9)),
    **dict.fromkeys(("pairwise", "bit_count", "hardlink_to", "stdlib_module_names", "aclosing"), (3, 10)),
    **dict.fromkeys(("UTC", "ExceptionGroup", "add_note"), (3, 11)),
    **dict.fromkeys(("batched",), (3, 12)),
}
MODULES = {"contextvars": (3, 7), "dataclasses": (3, 7), "graphlib": (3, 9), "zoneinfo": (3, 9), "tomllib": (3, 11)}
OPTIONS = {
    **dict.fromkeys(("capture_output",), (3, 7)),
    **dict.fromkeys(("missing_ok", "dirs_exist_ok"), (3, 8)),
    **dict.fromkeys(("usedforsecurity",), (3, 9)),
    **dict.fromkeys(("strict", "root_dir"), (3, 10)),
    **dict.fromkeys(("process_group",), (3, 11)),
}
"""Arguments of functions."""
BUILT_IN = {
    "dict",
    "frozenset",
    "list",
    "set",
    "tuple",
    "type",
    "Callable",
    "Iterable",
    "Iterator",
    "Mapping",
    "Sequence",
}
SUBSCRIPTED = (3, 9)
"""``list[int]`` where it is evaluated."""
UNIONS = (3, 10)
"""``int | None`` in an annotation that is evaluated."""


def programs() -> dict[str, tuple[int, int]]:
    """Path -> oldest Python, of all that runs on nodes."""
    by_path = {f"gpunode/onnode/{name}.py": oldest for name, oldest in OLDEST.items()}
    for pattern, oldest in OTHERS.items():
        by_path |= {str(path.relative_to(ROOT)): oldest for path in sorted(ROOT.glob(pattern))}
    return {path: oldest for path, oldest in by_path.items() if path not in SENDING}


def annotations(tree: ast.AST) -> Iterator[ast.AST]:
    """Each node of each annotation."""
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            yield from ast.walk(part) if part is not None else ()


def unevaluated(tree: ast.AST) -> set[int]:
    """The parts of a module that no Python evaluates: what only a type checker reads, and postponed annotations."""
    nodes = list(ast.walk(tree))
    typed = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in typed for part in node.body for inner in ast.walk(part)}
    if any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in nodes):
        skipped |= {id(node) for node in annotations(tree)}
    return skipped


def too_new(text: str, oldest: tuple[int, int]) -> Iterator[str]:
    """Yield what such an old Python lacks. Raises SyntaxError for its syntax."""
    tree = ast.parse(text, feature_version=oldest)
    skipped = unevaluated(tree) | guarded(tree)
    if oldest < (3, 7) and "__future__" in text:
        yield "from __future__ import annotations"
    unions = (node for node in annotations(tree) if isinstance(node, ast.BinOp) and oldest < UNIONS)
    yield from (f"line {node.lineno}: {ast.unparse(node)}" for node in unions if id(node) not in skipped)
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Attribute) and NAMES.get(node.attr, oldest) > oldest:
            yield f"line {node.lineno}: {node.attr}"
        elif isinstance(node, ast.keyword) and OPTIONS.get(node.arg or "", oldest) > oldest:
            yield f"line {node.lineno}: {node.arg}="
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            if node.value.id in BUILT_IN and oldest < SUBSCRIPTED:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            late = [name for name in modules_of(node) if MODULES.get(name, oldest) > oldest]
            late += [name for name in names if NAMES.get(name, oldest) > oldest]
            yield from (f"line {node.lineno}: {name}" for name in late)


def modules_of(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.ImportFrom):
        return ["." * statement.level + (statement.module or "")]
    return [alias.name for alias in statement.names]


def guarded(tree: ast.AST) -> set[int]:
    """The imports that may fail: within ``try`` with ``except ImportError``."""
    tries = (node for node in ast.walk(tree) if isinstance(node, ast.Try))
    caught = (
        node for node in tries if any("ImportError" in ast.unparse(handler.type or node) for handler in node.handlers)
    )
    return {id(statement) for node in caught for statement in node.body}


def test_every_program_has_its_python() -> None:
    files = {path.stem for path in (ROOT / "gpunode" / "onnode").glob("*.py")} - {"__init__"}
    assert files == set(OLDEST)
    assert len(programs()) > 60
    assert all(list(ROOT.glob(pattern)) for pattern in OTHERS)


@pytest.mark.parametrize("path", programs())
def test_its_oldest_python_can_run_it(path: str) -> None:
    assert list(too_new((ROOT / path).read_text(encoding="utf-8"), programs()[path])) == []


@pytest.mark.parametrize("path", programs())
def test_it_imports_the_standard_library_and_its_own_folder(path: str) -> None:
    local = (".", PAYLOAD) if "onnode" not in path else ()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name for node in imports for name in modules_of(node) if not (local and name.startswith(local))}
    assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} == set()


@pytest.mark.parametrize("path", programs())
def test_ruff_has_the_same_python(path: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    targets = project["tool"]["ruff"]["per-file-target-version"]
    versions = [
        target for pattern, target in targets.items() if any(fnmatch(path, glob) for glob in alternatives(pattern))
    ]
    oldest = max(RUFF_KNOWS, programs()[path])
    assert versions == [f"py{oldest[0]}{oldest[1]}"]


def alternatives(pattern: str) -> list[str]:
    """``a/{b,c}.py`` as ``a/b.py`` and ``a/c.py``."""
    before, brace, rest = pattern.partition("{")
    within, _, after = rest.partition("}")
    return [before + part + after for part in within.split(",")] if brace else [pattern]


@pytest.mark.parametrize(
    ("text", "oldest"),
    [
        ("subprocess.run(argv, capture_output=True)", (3, 6)),
        ("from __future__ import annotations", (3, 6)),
        ("import dataclasses", (3, 6)),
        ("'ab'.removeprefix('a')", (3, 8)),
        ("from itertools import pairwise", (3, 9)),
        ("Row = dict[str, int]", (3, 8)),
        ("zip(a, b, strict=True)", (3, 9)),
        ("def f() -> list[int]: ...", (3, 8)),
        ("x: int | None = 1", (3, 9)),
    ],
)
def test_what_is_too_new_is_found(text: str, oldest: tuple[int, int]) -> None:
    assert list(too_new(text, oldest))
    assert not list(too_new(text, (3, 12)))


@pytest.mark.parametrize(
    ("text", "oldest"),
    [("if (n := 1): pass", (3, 7)), ("match x:\n    case 1: pass", (3, 9)), ("def f(a, /): pass", (3, 7))],
)
def test_newer_syntax_is_refused(text: str, oldest: tuple[int, int]) -> None:
    with pytest.raises(SyntaxError):
        list(too_new(text, oldest))


def test_a_program_is_read_as_text() -> None:
    assert all(program_text(name).count("\n") > 50 for name in OLDEST)
