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

STORE = {"path": "/data", "type": "nfs", "source": "store:/export"}
FREE: dict[str, Any] = {"kind": "absent", "mode": None, "entries": None, "mounts": [], "users": []}
TABLE = {"/etc/fstab": "UUID=aaaa / ext4 defaults 0 1\n"}
EMPTY = {"paths": {"/data": FREE, "/scratch": FREE}, "autofs": True}
SHAPED: dict[str, dict[str, Any]] = {
    "cuda": {"toolkit": ["12.9"]},
    "dcgm": {},
    "nvidia_fabric": {},
    "rdma": {},
    "storage": {"scratch_disks": ["nvme-x"], "mounts": [STORE]},
    "nvidia_repository": {},
    "kernel_tuning": {"command_line": ["quiet"]},
    "gpu_settings": {"rules": [{"gpus": "all", "power_limit": "80%"}]},
    "updates": {},
    "ml_environment": {"malloc": "jemalloc"},
    "gpu_tools": {"tools": ["numactl"], "python": {"py-spy": ""}},
    "docker": {"source": "distribution", "users": ["operator"]},
    "firewall": {"ssh_networks": ["10.0.0.0/8"], "require_controller": False},
    "nvidia_container_toolkit": {"repository": "cuda", "version": "1.20.0", "containerd": "true"},
}
"""Roles with a manifest that ``roles/common`` applies, with settings that change something."""


def manifests(role: str) -> Iterator[Manifest]:
    settings = SHAPED[role]
    offered = {name: ["1"] for name in ("numactl", "python3-venv", "xfsprogs", "nfs-common")}
    run = context(others=NVIDIAS, answers={"offers": {"offered": offered}, "disks": EMPTY, "rules": {}})
    states = (node({}, TABLE, facts=FACTS), node({**AT, **DOCKER}, TABLE, engine=RUNS, facts={**FACTS, **LOADED}))
    for state in states:
        yield planned(role, state, run, **{"state": "present", **settings})
        yield planned(role, state, run, **{**settings, "state": "absent"})


def expressions(task: dict[str, Any]) -> Iterator[str]:
    """Texts with a template, and conditions, of one task."""
    for key, value in task.items():
        if key in ("when", "until", "changed_when", "failed_when"):
            yield from (f"{{{{ {each} }}}}" for each in (value if isinstance(value, list) else [value]))
        else:
            yield from (text for text in texts(value) if "{{" in text)


def conditions(task: dict[str, Any]) -> list[Any]:
    """The conditions of one task."""
    clauses = task.get("when", [])
    return [trust_as_template(str(clause)) for clause in (clauses if isinstance(clauses, list) else [clauses])]


def steps(file: Path) -> Iterator[dict[str, Any]]:
    """The tasks of a file, those in blocks with the variables of their block."""
    for task in content(file):
        for inner in task.get("block", ()):
            yield {**inner, "vars": {**task.get("vars", {}), **inner.get("vars", {})}}
        if "block" not in task:
            yield task


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts(each)


@cache
def content(file: Path) -> Any:
    return yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)


@pytest.mark.parametrize("role", sorted(SHAPED))
def test_every_expression_of_a_role_with_a_shape_is_rendered(role: str) -> None:
    files = [*(ROLES / "common" / "tasks").glob("*.yml"), *(ROLES / role / "tasks").glob("*.yml")]
    rendered = 0
    for manifest in filter(lambda each: each.manages, manifests(role)):
        first = {
            "manifest": manifest.model_dump(mode="json"),
            "settings": {},
            "pending": True,
            "pending_reasons": ["x"],
        }
        first |= {"tasks": ["/x.yml"], "own_tasks": "/x.yml"}
        for plan in ({**first, "skipped": again} for again in (0, 1)):
            for task in (task for file in files for task in steps(file)):
                variables: dict[str, Any] = {
                    "role_name": role,
                    "ansible_check_mode": False,
                    "__common_plan": plan,
                    "__common_again": plan,
                    "__common_now": plan["manifest"],
                    "__common_venv": {**dict.fromkeys(("path", "files", "python", "program"), "x"), "install": ["x"]},
                    "__common_file": "/x.yml",
                    "__common_later": "/x.yml",
                    "__kernel_tuning_now": plan,
                    "__common_packages": {"changed": True, "install": {"x": "1"}, "remove": []},
                    "__gpu_tools_venv": {"name": "x", "path": "/x", "version": "1", "locked": True, "programs": ["x"]},
                    "item": {"argv": ["x"], "changes": True, "creates": None, "path": "/x"},
                    "__common_last": plan,
                    "__docker_data": {"files": []},
                    "accounts_revert_s": 60,
                    "storage_hooks": [],
                    "__storage_hook": "x.yml",
                    "ansible_failed_result": {"msg": "x"},
                    "__rdma_installed": plan,
                    "nvidia_fabric_imex_nodes": ["10.0.0.1"],
                    "omit": "",
                    **trusted(task.get("vars") or {}),
                }
                templar = Templar(loader=DataLoader(), variables=variables)
                if "loop" not in task and not all(map(templar.evaluate_conditional, conditions(task))):
                    continue
                for text in (*expressions(task), *(tag for tag in task.get("tags", ()) if "{{" in tag)):
                    templar.template(trust_as_template(text))
                    rendered += 1
    assert rendered > 20


def trusted(value: Any) -> Any:
    """A value of a role's file with its templates rendered by Ansible."""
    if isinstance(value, str):
        return trust_as_template(value)
    if isinstance(value, dict):
        return {key: trusted(each) for key, each in value.items()}
    return [trusted(each) for each in value] if isinstance(value, list) else value


def common_task(name: str) -> dict[str, Any]:
    """The task of the common files with this name."""
    return next(
        task for file in (ROLES / "common" / "tasks").glob("*.yml") for task in steps(file) if task["name"] == name
    )


@pytest.mark.parametrize("name", ["Run commands that come before the packages", "Run commands that apply the files"])
@pytest.mark.parametrize(
    ("may_fail", "status", "outcome"), [(True, 3, (False, False)), (False, 3, (True, False)), (False, 0, (False, True))]
)
def test_a_command_that_may_fail_is_then_no_change(
    name: str, may_fail: bool, status: int, outcome: tuple[bool, bool]
) -> None:
    task = common_task(name)
    variables = {"item": {"changes": True, "may_fail": may_fail}, "__common_command": {"rc": status}}
    templar = Templar(loader=DataLoader(), variables=variables)
    conditions = (task.get("failed_when", f"{status} != 0"), task["changed_when"])
    assert tuple(templar.evaluate_conditional(trust_as_template(str(condition))) for condition in conditions) == outcome


def test_the_record_of_new_packages_reports_what_the_role_reads_again() -> None:
    (written,) = common_task("Record that units have to be restarted")["gpunode.node.managed_files"]["files"]
    manifest = Manifest(role="x", restart_mark="/run/gpunode/x", restart_text="a.service\n")
    templar = Templar(loader=DataLoader(), variables={"__common_plan": {"manifest": manifest.model_dump(mode="json")}})
    assert templar.template(trusted(written)) == {"path": "/run/gpunode/x", "content": "a.service\n"}
