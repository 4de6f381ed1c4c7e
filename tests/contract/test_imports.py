"""No import runs in a circle, not even one within a function; what is imported is declared."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {"yaml": "pyyaml", "ansible": "ansible-core", "pydantic_core": "pydantic"}
"""Packages by the name under which they are imported, where that is another one."""
OURS = {"gpunode", "ansible_collections"}
ON_NODES = {"dnf", "_typeshed", "file_access"}
"""What is there without a declaration: the node's own library, names for the type checker, a copy beside guard.py."""
OF_PLAYBOOKS = {"jinja2"}
"""What no module imports: the language of the playbooks' expressions, which ansible-core runs."""


def modules() -> dict[str, Path]:
    by_name = {}
    for path in sorted((ROOT / "gpunode").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        by_name[".".join(parts).removesuffix(".__init__")] = path
    return by_name


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each import as (module, name from it); what stands under TYPE_CHECKING is not run."""
    if isinstance(tree, ast.expr):
        return
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)
        yield from imported(node)


@cache
def imports(path: Path) -> frozenset[tuple[str, str]]:
    """The imports of a file."""
    return frozenset(imported(ast.parse(path.read_text(encoding="utf-8"))))


def graph(paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    edges = {}
    for name, path in paths.items():
        package = name.rpartition(".")[0]  # relative imports, in what goes to nodes, are of one folder
        absolute = {
            (f"{package}.{base[1:]}".rstrip(".") if base[:1] == "." else base, part) for base, part in imports(path)
        }
        modules = {f"{base}.{part}" if f"{base}.{part}" in paths else base for base, part in absolute}
        edges[name] = {module for module in modules if module in paths and module != name}
    return edges


def test_no_import_runs_in_a_circle() -> None:
    paths = modules()
    assert len(paths) > 300
    TopologicalSorter(graph(paths)).prepare()


def test_a_circle_within_a_function_is_found(tmp_path: Path) -> None:
    texts = {"a": "import b", "b": "def late():\n    from c import x", "c": "from a import y"}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    with pytest.raises(CycleError):
        TopologicalSorter(graph({name: tmp_path / f"{name}.py" for name in texts})).prepare()


def declared(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=!\[ ;]", line)[0].lower() for line in requirements}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    inside = {path.stem for path in (ROOT / "gpunode" / "lab" / "repositories" / "inside").glob("*.py")}
    imported = set()
    for folder in ("gpunode", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            imported |= {name.split(".")[0] for name, _ in imports(path) if not name.startswith(".")}
    outside = imported - set(sys.stdlib_module_names) - OURS - ON_NODES - inside - {"module_utils"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {DISTRIBUTIONS.get(name, name).lower() for name in outside}
    assert named | OF_PLAYBOOKS == declared(project["dependencies"])


WITHOUT = """
import subprocess
import sys
from importlib.metadata import packages_distributions

names = packages_distributions()

class Absent:
    def find_spec(self, name, path=None, target=None):
        kept = {one.lower().replace("_", "-") for one in names.get(name, ["gpunode"])} & {"gpunode", *sys.argv[1:]}
        if "." not in name and not kept:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
from gpunode.cli import run
from gpunode.lab import Lab
from gpunode.lab.hardware import describe
from gpunode.lab.packages.plan import plan
describe("hgx-h100-8", "lab/node"), plan(), Lab("x")
assert run(["lab", "up", "--help"]) == 0
assert not {"ansible", "paramiko", "fabric"} & set(sys.modules)
"""


@pytest.mark.parametrize("lost", [None, "pyyaml"])
def test_the_demo_makes_its_nodes_with_a_part_of_the_virtual_environment(lost: str | None) -> None:
    script = (ROOT / "scripts" / "bootstrap").read_text(encoding="utf-8")
    names = re.findall(r'^lab="([^"]+)"', script, re.MULTILINE)[0].split()
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert [name for name in names if not re.search(rf"^{re.escape(name)}==\S+ \\$", lock, re.MULTILINE)] == []
    argv = [sys.executable, "-c", WITHOUT, *(name for name in names if name != lost)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert (done.returncode == 0) is (lost is None), done.stderr
