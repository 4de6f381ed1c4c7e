"""Every expression in the tasks of the planned roles, rendered by Ansible from manifests of several nodes."""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from test_role_templates import ROLES

sys.path.append(str(Path(__file__).parents[1] / "provisioning"))

from node_samples import context, node, planned
from test_provisioning_toolkit_plan import AT, DOCKER, FACTS, LOADED, NVIDIAS, RUNS

from gpunode.provisioning.manifest import Manifest

SETTINGS: dict[str, dict[str, Any]] = {
    "docker": {"source": "distribution", "users": ["operator"]},
    "nvidia_container_toolkit": {"repository": "cuda", "version": "1.20.0", "containerd": "true"},
    "cuda": {"toolkit": ["12.9"]},
    "dcgm": {},
}


def manifests(role: str) -> Iterator[Manifest]:
    run = context(others=NVIDIAS)
    states = (node(facts=FACTS), node({**AT, **DOCKER}, engine=RUNS, facts={**FACTS, **LOADED}))
    for state in states:
        yield planned(role, state, run, **SETTINGS[role])
        yield planned(role, state, run, **SETTINGS[role], state="absent")


def expressions(task: dict[str, Any]) -> Iterator[str]:
    """Texts with a template, and conditions, of one task."""
    for key, value in task.items():
        if key in ("when", "until", "changed_when", "failed_when"):
            yield from (f"{{{{ {each} }}}}" for each in (value if isinstance(value, list) else [value]))
        else:
            yield from (text for text in texts(value) if "{{" in text)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(each)


@cache
def content(file: Path) -> Any:
    return yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)


@pytest.mark.parametrize("role", sorted(SETTINGS))
def test_every_expression_is_rendered(role: str) -> None:
    loaded = {name: content(ROLES / role / name / "main.yml") or {} for name in ("defaults", "vars")}
    rendered = 0
    for manifest in manifests(role):
        plan = {"manifest": manifest.model_dump(mode="json"), "due": True, "changed": False}
        leaving = manifest.values.get("state") == "absent"
        for file in sorted((ROLES / role / "tasks").glob("*.yml")):
            if not manifest.values or ((file.name == "absent.yml") is not leaving and file.name != "main.yml"):
                continue
            for task in content(file):
                variables: dict[str, Any] = {
                    **{key: trusted(value) for each in loaded.values() for key, value in each.items()},
                    **{f"__{role}_{name}": plan for name in ("plan", "after_install", "last")},
                    "ansible_check_mode": False,
                    "__docker_daemon": manifest.values,
                    "__docker_live_restore": {"stdout": "true"},
                    "__docker_removed": {"rc": 0},
                    "__docker_data": {"files": []},
                    "__nvidia_container_toolkit_containerd": manifest.values.get("containerd"),
                    "__nvidia_container_toolkit_can_refresh": True,
                    "__nvidia_container_toolkit_sums": {"stdout": ""},
                    f"__{role}_packages": {"changed": True, "install": {"x": "1"}, "remove": []},
                    f"__{role}_files": {"changed": True},
                    "item": {"name": "x", "enabled": True, "state": None, "path": "/x"},
                    "omit": "",
                    **{key: trusted(value) for key, value in (task.get("vars") or {}).items()},
                }
                for text in expressions(task):
                    Templar(loader=DataLoader(), variables=variables).template(trust_as_template(text))
                    rendered += 1
    assert rendered > 20


def trusted(value: Any) -> Any:
    """A value of a role's file with its templates rendered by Ansible."""
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, dict):
        return {key: trusted(each) for key, each in value.items()}
    return [trusted(each) for each in value] if isinstance(value, list) else value
