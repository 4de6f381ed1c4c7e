"""Names of public classes: one concept has one name, and a name stands for one concept."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
OF_ANSIBLE = {"ActionModule", "FilterModule", "CallbackModule"}
"""Names by which Ansible finds plugins."""


def test_no_two_modules_have_a_public_class_of_the_same_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for folder in ("gpunode", "plugins"):
        for path in sorted(path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink()):
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                    places[statement.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in OF_ANSIBLE} == {}
