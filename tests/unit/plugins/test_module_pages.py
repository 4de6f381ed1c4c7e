"""Every module has a page, and the page names the options that the module takes, with their defaults."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from gpunode.provisioning.manifest import NodeQuery

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "plugins" / "modules"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
PACKAGE = "ansible_collections.gpunode.node.plugins.modules"


class DeclaredError(Exception):
    """What a module declares."""


def declared(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """The argument specification that a module hands to Ansible; None where it runs on the controller alone."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    if not hasattr(module, "main"):
        return None
    specifications: list[dict[str, Any]] = []

    def take(argument_spec: dict[str, Any], supports_check_mode: bool = False, **_: Any) -> None:
        assert supports_check_mode, name
        specifications.append(argument_spec)
        raise DeclaredError

    monkeypatch.setattr(module, "QuietModule" if hasattr(module, "QuietModule") else "AnsibleModule", take)
    with pytest.raises(DeclaredError):
        module.main()
    return specifications[0]


def agree(documented: dict[str, Any], accepted: dict[str, Any], where: str) -> None:
    assert documented.keys() == accepted.keys(), where
    for name, page in documented.items():
        option = accepted[name]
        field = f"{where}.{name}"
        assert page["description"], field
        for part in ("type", "default", "choices", "elements"):
            assert page.get(part) == option.get(part), f"{field}: {part}"
        assert bool(page.get("required")) == bool(option.get("required")), field
        if "options" in option:
            agree(page["suboptions"], option["options"], field)


def test_there_are_modules() -> None:
    assert {"node_state", "role_plan", "managed_files", "package_transaction"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_names_what_the_module_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = yaml.safe_load(importlib.import_module(f"{PACKAGE}.{name}").DOCUMENTATION)
    assert page["module"] == name
    accepted = declared(name, monkeypatch)
    if accepted is not None:
        agree(page["options"], accepted, name)


def test_a_plan_asks_what_the_module_answers() -> None:
    module = importlib.import_module(f"{PACKAGE}.node_query")
    assert set(get_args(NodeQuery.model_fields["kind"].annotation)) == set(module.ANSWERS)


def test_ansible_doc_prints_every_page() -> None:
    program = Path(sys.executable).with_name("ansible-doc")
    argv = [str(program), "-t", "module", "--json", *(f"gpunode.node.{name}" for name in NAMES)]
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "collections")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    pages = json.loads(done.stdout)
    assert set(pages) == {f"gpunode.node.{name}" for name in NAMES}
    assert all(page["doc"] and page["examples"] for page in pages.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_module_returns_a_name_that_ansible_gives_a_meaning(name: str) -> None:
    """A task with a text under ``skipped`` counts as skipped."""
    module = importlib.import_module(f"{PACKAGE}.{name}")
    returned = yaml.safe_load(getattr(module, "RETURN", "") or "") or {}
    assert not {"skipped", "failed", "unreachable", "changed", "exception"} & returned.keys()
