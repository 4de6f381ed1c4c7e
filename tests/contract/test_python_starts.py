"""Every Python that gpunode starts is isolated (``-I``): none imports from the working folder or PYTHONPATH."""

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"(\S*/)?(platform-python|python3?(\.\d+)?)")
ISOLATED = re.compile(r"-[A-Za-z]*I[A-Za-z]*")
# "python3 -c …", "python3 - x" and "#!… python3 -S" within a text. What only asks for the version imports nothing.
START = re.compile(
    r"(?:(?<!-)\bpython3?(?:\.\d+)?|\{\{ *\w*python\w* *\}\}|\$python\"?)(?= +-)(?! +-[A-Za-z]*I)"
    r"(?! +(?:--version|-V)\b)"
)
SHEBANG = re.compile(r"^#!.*\bpython(?!.* -[A-Za-z]*I)", re.MULTILINE)

NOT_OURS = {
    "gpunode/lab/repositories/image.py": "programs in a root-owned folder of our own image, which import each other",
    "gpunode/lab/repositories/vendor.py": "the same",
    "gpunode/onnode/launcher.py": "asks the Python of a user's job, as that user, what the job would import",
    "benchmarks/fleet.py": "a script of the checkout, by its path",
    "scripts/mutation_tests.py": "tests import the changed copy of the package, by PYTHONPATH",
}
"""Starts of a script by its path, with the reason why its own folder may lend it modules."""


def sources(*suffixes: str) -> Iterator[Path]:
    """Files that start programs: the package, the collection, the scripts; no tests and no pages."""
    for folder in ("gpunode", "plugins", "roles", "playbooks", "scripts", "benchmarks", "images"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and (path.suffix in suffixes or (not path.suffix and "" in suffixes)):
                yield path


def bare_starts(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Lists and tuples of Python code in which a Python is followed by something else than ``-I``."""
    for node in nodes:
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
        for python, following in pairwise(words):
            if _is_python(python) and _is_argument(following):
                yield ast.unparse(node)


def _is_python(word: ast.expr) -> bool:
    if isinstance(word, ast.Constant):
        return isinstance(word.value, str) and PYTHON.fullmatch(word.value) is not None
    return ast.unparse(word) in ("sys.executable", "interpreter", "str(interpreter)", "_NAME")


def _is_argument(word: ast.expr) -> bool:
    """Not ``-I``, and no further name of a list of packages either."""
    if isinstance(word, ast.Constant) and isinstance(word.value, str):
        text = word.value
        return not (ISOLATED.fullmatch(text) or PYTHON.fullmatch(text)) and (
            text.startswith(("-", "/")) or text.endswith((".py", ".pyz"))
        )
    return not isinstance(word, ast.Constant)


def bare_words(value: Any) -> Iterator[str]:
    """Lists of a YAML document in which a Python is followed by something else than ``-I``."""
    if isinstance(value, dict):
        for part in value.values():
            yield from bare_words(part)
    elif isinstance(value, list):
        for word, following in pairwise(value):
            python = isinstance(word, str) and PYTHON.fullmatch(word)
            if python and str(following).startswith(("-", "/", "{{")) and not ISOLATED.fullmatch(str(following)):
                yield str(value)
        for part in value:
            yield from bare_words(part)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with Ansible's own tags."""


_Loader.add_multi_constructor("!", lambda _, tag, node: f"{tag} {node.value}")


def bare_in_jinja(text: str) -> Iterator[str]:
    """Lists within a template: ``['python3', '-c', …]``."""
    for match in re.finditer(r"""(['"])(?:/\S*/)?python3?\1,\s*(['"])(?!-[A-Za-z]*I)""", text):
        yield text[match.start() : match.start() + 40]


def _found(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    starts = [match[0] for match in SHEBANG.finditer(text)]
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(text)))
        starts += bare_starts(nodes)
        starts += [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and START.search(node.value)
        ]
        return starts
    starts += [line.strip() for line in text.splitlines() if START.search(line) or list(bare_in_jinja(line))]
    if path.suffix in (".yml", ".yaml"):
        for document in yaml.load_all(text, _Loader):
            starts += bare_words(document)
    return starts


def test_every_python_is_started_isolated() -> None:
    looked_at = 0
    wrong: dict[str, list[str]] = {}
    for path in sources(".py", ".yml", ".yaml", ".sh", ".j2", ".service", ".md", ""):
        if path.suffix == ".md" and "roles" not in path.parts:
            continue
        name = str(path.relative_to(ROOT))
        looked_at += 1
        starts = _found(path)
        if starts and name not in NOT_OURS:
            wrong[name] = starts
    assert looked_at > 300
    assert not wrong, wrong


def test_every_exception_is_still_one() -> None:
    assert [name for name in NOT_OURS if not _found(ROOT / name)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", 'run(["python3", "-c", text])'),
        ("a.py", "run([sys.executable, script])"),
        ("a.py", 'run(("/usr/bin/python3", "-", "5"))'),
        ("a.py", 'COMMAND = "sudo python3 - 5"'),
        ("a.py", '"#!/usr/bin/python3 -sS\\n"'),
        ("a.yml", "argv: [python3, -c, x]"),
        ("a.yml", "argv:\n  - /usr/bin/python3\n  - -m\n  - json.tool\n"),
        ("a.yml", "cmd: python3 - 5"),
        ("a.yml", """argv: "{{ ['python3', '-c', x] }}" """),
        ("a.yml", "cmd: '{{ ansible_python_interpreter }} -c x'"),
        ("a", "#!/usr/bin/env python3\n"),
        ("a", 'python3 -m json.tool "$1"\n'),
    ],
)
def test_a_start_without_it_is_found(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert _found(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", 'run([sys.executable, "-I", "-m", "pip"])'),
        ("a.py", 'PACKAGES = ("python3", "rpm")'),
        ("a.py", '"#!/usr/bin/python3 -IS\\n"'),
        ("a.yml", "argv: [python3, -I, -c, x]"),
        ("a.yml", "- python3\n- rpm\n"),
        ("a", "python3 --version\n"),
        ("a", "torchrun --no-python --nproc-per-node 8 gpunode-run ./train.py\n"),
    ],
)
def test_others_are_left_alone(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert not _found(path)
