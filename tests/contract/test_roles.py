"""What every role of the collection has: specification, defaults, README, tags, tests."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import role_files
import yaml

from gpunode.catalog import load as load_catalog
from gpunode.checks import registry
from gpunode.provisioning.manifest import Manifest
from gpunode.provisioning.order import ORDER
from gpunode.provisioning.role import Role
from gpunode.provisioning.roles import ROLES as SHAPES

ROOT = Path(__file__).parents[2]
ROLES = sorted(path.parents[1] for path in (ROOT / "roles").glob("*/meta/main.yml"))
COMMON = ROOT / "roles" / "common" / "tasks"
OUR_MODULES = re.compile(r"ansible\.builtin\.\w+|gpunode\.node\.\w+")
TASK_KEYWORDS = {
    "name",
    "when",
    "no_log",
    "environment",
    "always",
    "register",
    "become",
    "block",
    "rescue",
    "tags",
    "loop",
    "loop_control",
    "notify",
    "vars",
    "until",
    "retries",
    "delay",
    "diff",
    "changed_when",
    "failed_when",
    "check_mode",
}


def load(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)


def options(role: Path) -> dict[str, dict[str, Any]]:
    spec: dict[str, dict[str, Any]] = load(role / "meta" / "argument_specs.yml")["argument_specs"]["main"]["options"]
    return spec


def tasks(role: Path) -> list[dict[str, Any]]:
    """All tasks and handlers of a role, those in blocks too."""
    every_task: list[dict[str, Any]] = []
    pending = [
        task for folder in ("tasks", "handlers") for file in (role / folder).glob("*.yml") for task in load(file)
    ]
    while pending:
        task = pending.pop()
        pending += task.get("block", []) + task.get("rescue", [])
        every_task.append(task)
    return every_task


@pytest.fixture(params=ROLES, ids=lambda path: path.name)
def role(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_each_role_has_a_shape_and_a_folder() -> None:
    assert [path.name for path in ROLES] == sorted(SHAPES)


def test_defaults_and_specification_agree(role: Path) -> None:
    defaults = load(role / "defaults" / "main.yml")
    assert defaults.keys() == options(role).keys()
    for name, option in options(role).items():
        assert option["default"] == defaults[name], name
        assert option["description"], name


def test_every_default_is_explained_in_the_line_above(role: Path) -> None:
    blocks = re.split(r"\n\s*\n", (role / "defaults" / "main.yml").read_text(encoding="utf-8"))
    for name in options(role):
        block = next(block for block in blocks if re.search(rf"(?m)^{name}:", block))
        assert re.search(rf"(?m)^# .+\n{name}:", block), name


def test_variables_carry_the_roles_name(role: Path) -> None:
    assert all(name.startswith((f"{role.name}_", "gpunode_")) for name in options(role))
    file = role / "vars" / "main.yml"
    private = (load(file) if file.exists() else None) or {}
    assert all(name.startswith(f"__{role.name}_") for name in private)


def test_readme_names_every_variable_and_tag(role: Path) -> None:
    readme = (role / "README.md").read_text(encoding="utf-8")
    missing = [name for name in options(role) if f"`{name}`" not in readme]
    assert not missing
    tags = {tag for task in tasks(role) for tag in _listed(task.get("tags"))} - {"always"}
    assert all(f"{tag}_".startswith(f"{role.name}_") and f"`{tag}`" in readme for tag in tags)


def test_readme_names_only_checks_that_exist(role: Path) -> None:
    areas = "|".join(sorted({check.id.partition(".")[0] for check in registry}))
    named = re.findall(rf"`((?:{areas})\.[a-z0-9-]+)`", (role / "README.md").read_text(encoding="utf-8"))
    assert {name for name in named if not name.endswith((".service", ".conf"))} <= {check.id for check in registry}


def test_roles_that_change_a_node_have_the_three_tags() -> None:
    tags = {tag for task in tasks(ROOT / "roles" / "nvidia_driver") for tag in _listed(task.get("tags"))}
    assert {f"nvidia_driver_{part}" for part in ("install", "configure", "service")} <= tags


def test_no_skipped_tag_skips_a_plan_that_tasks_of_other_parts_read() -> None:
    """``--skip-tags ROLE_service`` skips each task that has the tag among others."""
    files = sorted((ROOT / "roles").glob("*/tasks/*.yml"))
    plans = [
        (file.parts[-3], task["name"], task.get("tags"))
        for file in files
        for task in load(file)
        if "gpunode.node.role_plan" in task
    ]
    assert len(plans) > 4
    assert [plan for plan in plans if len(_listed(plan[2])) > 1] == []
    # The plan of the common tasks is read in all parts.
    assert {plan[2] for plan in plans if plan[0] == "common"} == {"always"}


def test_a_release_of_the_catalog_is_a_platform_of_each_role(tmp_path: Path) -> None:
    row = "{name: Debian 14, os: debian, version: 14, codename: forky, supported: true, origins: {}, date: 2026-11-29}"
    (tmp_path / "site.yml").write_text(f"systems: {{debian-14: {row}}}\n")
    platforms = role_files.platforms(load_catalog([tmp_path / "site.yml"]))
    assert platforms["Debian"] == ["bookworm", "trixie", "forky"]
    assert (platforms["Ubuntu"], platforms["EL"]) == (["jammy", "noble", "resolute"], ["9", "10"])


def test_every_role_begins_with_the_common_plan(role: Path) -> None:
    """A tag of a part that is skipped would skip a plan with this tag: the plan selects by itself."""
    if role.name == "preflight":
        return
    (only,) = load(role / "tasks" / "main.yml")
    assert (role / "tasks" / only["ansible.builtin.import_tasks"]).resolve() == COMMON / "main.yml"
    # An import passes its tags on to all that is included below.
    assert only.keys() <= {"name", "vars", "ansible.builtin.import_tasks"}


@pytest.mark.parametrize("file", ["main.yml", "after_site.yml"])
def test_the_common_plan_has_no_tag_that_skips_it(file: str) -> None:
    plan, change = load(COMMON / file)
    assert "gpunode.node.role_plan" in plan
    assert plan["tags"] == change["tags"] == "always"
    # Ansible selects by tags before it knows what a task registered.
    assert change["ansible.builtin.include_tasks"]["apply"]["tags"] == ["{{ role_name }}"]


def test_a_task_that_repeats_a_command_does_not_wait_for_it_in_check_mode(role: Path) -> None:
    """In check mode a command is skipped and never has the awaited output."""
    for task in tasks(role):
        conditions = str(task.get("when", ""))
        assert "until" not in task or "not ansible_check_mode" in conditions, task["name"]


def test_only_builtin_modules_and_our_own_are_used(role: Path) -> None:
    for task in tasks(role):
        modules = task.keys() - TASK_KEYWORDS
        assert "block" in task or len(modules) == 1, task["name"]
        assert all(OUR_MODULES.fullmatch(module) for module in modules), task["name"]


def test_no_task_only_prints_or_carries_a_program(role: Path) -> None:
    """What a module does it also announces; a program is a file of the collection."""
    for task in tasks(role):
        assert not {"ansible.builtin.debug", "ansible.builtin.script"} & task.keys(), task["name"]
        assert not re.search(r"python\S*['\"]?,? +(['\"]?-\w+['\"]?,? +)*['\"]?-\w*c\b", str(task)), task["name"]


FILES_OF_THE_CONTROLLER = {
    f"ansible.builtin.{module}"
    for module in ("include_tasks", "import_tasks", "include_role", "import_role", "include_vars", "copy", "template",
                   "unarchive", "script", "assemble", "fetch")
}  # fmt: skip


def test_no_task_names_a_file_of_the_controller_by_a_variable_that_a_node_can_set(role: Path) -> None:
    """In a play of a user's own, an answer of Ansible's modules sets variables: the plan reads ours before."""
    settings = {name for folder in ROLES for name in options(folder)}
    for task in (
        *tasks(role),
        *load(COMMON / "main.yml"),
        *load(COMMON / "after_site.yml"),
        *load(COMMON / "removal.yml"),
    ):
        if not FILES_OF_THE_CONTROLLER & task.keys():
            continue
        read = str([value for key, value in task.items() if key not in {"name", "when", "tags", "register", "vars"}])
        # A choice between two fixed names.
        read = re.sub(r"'?\b\w+_state == '\w+'", "", read)
        names = set(re.findall(r"(?<![.\w])\w+", read))
        assert [name for name in names if name in settings or name.startswith(("gpunode_", "__gpunode_"))] == [], task


def test_commands_declare_when_they_change_something(role: Path) -> None:
    for task in tasks(role):
        if {"ansible.builtin.command", "ansible.builtin.shell"} & task.keys():
            assert "changed_when" in task, task["name"]


def test_the_default_scenario_runs_the_site_playbook() -> None:
    assert "../../playbooks/site.yml" in (ROOT / "molecule" / "default" / "converge.yml").read_text(encoding="utf-8")


def test_defaults_in_playbooks_are_those_of_the_roles() -> None:
    """Ansible gives a play no defaults of a role that it does not list, and none to its hosts and conditions."""
    known = {name: option["default"] for role in ROLES for name, option in options(role).items()}
    kept = {name for name, default in known.items() if name.endswith("_state") and default == "keep"}
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "playbooks").rglob("*.yml"))
    defaults = re.findall(r"\b(\w+) \| default\(([^_)][^)]*)\)", text)
    assert {name for name, _ in defaults} >= kept
    wrong = {name: value for name, value in defaults if name in known and yaml.safe_load(value) != known[name]}
    assert wrong == {}


def test_users_and_mounts_come_before_docker_and_users_before_ssh_lets_only_them_in() -> None:
    order = [role.name for role in ORDER]
    assert max(map(order.index, ("accounts", "storage"))) < order.index("docker") < order.index("ssh_hardening")


def imports_of(play: dict[str, Any]) -> list[dict[str, Any]]:
    """The tasks of a play that import a role."""
    return [task for task in play.get("tasks", ()) if "ansible.builtin.import_role" in task]


@pytest.mark.parametrize(
    ("playbook", "shapes", "first"),
    [("site.yml", ORDER, []), ("image.yml", [role for role in ORDER if role.for_images], ["preflight"])],
)
def test_a_playbook_runs_the_roles_in_their_order(playbook: str, shapes: list[Role[Any]], first: list[str]) -> None:
    play = load(ROOT / "playbooks" / playbook)[-1]
    names = [role.name for role in shapes]
    assert play["vars"]["__gpunode_all"] == names
    imports = [task["ansible.builtin.import_role"]["name"] for task in imports_of(play)]
    entries = [*(entry["role"] for entry in play.get("roles", ())), *imports]
    assert entries == [f"gpunode.node.{name}" for name in (*first, *names)]


def test_site_imports_a_role_without_its_validation_and_an_optional_one_by_its_state() -> None:
    """The first plan of a run reads the settings of all roles."""
    for role, task in zip(ORDER, imports_of(load(ROOT / "playbooks" / "site.yml")[-1]), strict=True):
        assert task["ansible.builtin.import_role"]["rolespec_validate"] is False
        state = f"{role.name}_state"
        optional = options(ROOT / "roles" / role.name).get(state, {}).get("default") == "keep"
        condition = f"{state} | default('keep') != 'keep' and " if optional else ""
        assert task["when"] == f"{condition}'{role.name}' in __gpunode_roles"


def test_the_page_of_images_names_their_roles() -> None:
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"(?m)^\| roles (.*); others are refused", page)
    assert [*re.findall(r"`(\w+)`", row), "first_boot"] == [role.name for role in ORDER if role.for_images]


def test_reboots_are_planned_by_the_roles_that_may_require_one() -> None:
    (task,) = [task for task in load(ROOT / "playbooks/tasks/reboot_reasons.yml") if "loop" in task]
    sources = {role.name: inspect.getsource(sys.modules[role.settings.__module__]) for role in ORDER}
    assert task["vars"]["__gpunode_reasons"] == [name for name in sources if "reboot_reasons" in sources[name]]


@pytest.mark.parametrize("name", SHAPES)
def test_defaults_specification_and_metadata_are_those_of_the_role(name: str) -> None:
    stale = [
        str(path.relative_to(ROOT))
        for path, text in role_files.files(SHAPES[name], load_catalog()).items()
        if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "out of date: .venv/bin/python tests/contract/role_files.py"


@pytest.mark.parametrize("name", SHAPES)
def test_tasks_read_only_what_the_manifest_and_the_result_have(name: str) -> None:
    """A misspelt name fails here and not on a node."""
    files = [*(ROOT / "roles" / name / "tasks").glob("*.yml"), *(ROOT / "roles" / "common" / "tasks").glob("*.yml")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    result = SHAPES[name].result
    assert {*re.findall(r"(?:manifest\.result\.|problems: )(\w+)", text)} <= {
        *(result.model_fields if result is not None else ())
    }
    assert {*re.findall(r"(?:manifest|__common_now)\.(\w+)", text)} <= Manifest.model_fields.keys()
    assert "['values']" not in text


def test_a_plan_with_the_result_deploys_only_what_needs_no_restart() -> None:
    deploying = [task for task in load(ROOT / "roles/common/tasks/verify.yml") if "gpunode.node.managed_files" in task]
    assert [task["gpunode.node.managed_files"]["phase"] for task in deploying] == ["last"]


def _announced(file: Path, conditions: tuple[str, ...] = ()) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield (task, what it brings about, conditions) of what a run in check mode announces without tags."""
    for task in load(file):
        when = task.get("when", [])
        terms = (*conditions, *map(str, when if isinstance(when, list) else [when]))
        for inner in task.get("block", ()):
            assert "import" not in str(inner.keys()) or "ansible.builtin.import_tasks" in inner
            if "ansible.builtin.import_tasks" in inner:
                yield from _announced(file.parent / inner["ansible.builtin.import_tasks"], terms)
        if "ansible.builtin.import_tasks" in task:
            yield from _announced(file.parent / task["ansible.builtin.import_tasks"], terms)
        whole = " and ".join(terms)
        if "not ansible_check_mode" in whole or "ansible_run_tags" in whole or task.get("diff") is False:
            continue
        arguments = {key: value for key, value in task.items() if key.startswith("gpunode.node.")}
        of_manifest = re.sub(r"__\w+\.manifest|__common_now", "MANIFEST", str(arguments))
        if "MANIFEST." in of_manifest and "role_plan" not in of_manifest and "MANIFEST.result" not in of_manifest:
            yield task["name"], of_manifest.replace(", 'folders': '{{ MANIFEST.folders }}'", ""), frozenset(terms)


def test_check_mode_announces_nothing_twice(role: Path) -> None:
    """Without a change between them, two tasks with the same part of the manifest announce the same."""
    file = role / "tasks" / "change.yml"
    seen: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for name, part, terms in _announced(file if file.exists() else ROOT / "roles/common/tasks/apply.yml"):
        for other, earlier in seen.get(part, ()):
            exclusive = any(f"not {term}" in earlier for term in terms) or any(
                f"not {term}" in terms for term in earlier
            )
            assert exclusive, (other, name)
        seen.setdefault(part, []).append((name, terms))
    assert seen or role.name == "preflight"


def test_the_tag_of_the_configuration_records_what_was_before_the_disks() -> None:
    files = [ROOT / f"roles/storage/tasks/{name}.yml" for name in ("change", "disks")]
    steps = [task for file in files for task in load(file) if "storage_configure" in task.get("tags", ())]
    first = steps[0]["gpunode.node.managed_files"]
    assert (first["phase"], "folders" in first) == ("first", True)
    assert "gpunode.node.scratch_disks" in steps[1]


def _expected_tasks(tree: ast.Module) -> Iterator[str]:
    """Names of tasks that a test compares with those that changed."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        inner = [*ast.walk(node)] if isinstance(node, ast.Compare | ast.BinOp) else []
        if any(isinstance(part, ast.Attribute) and part.attr == "changed" for part in inner):
            names = {part.value for part in inner if isinstance(part, ast.Constant)}
            names |= {constants.get(part.id) for part in inner if isinstance(part, ast.Name)}
            yield from (text for text in names if isinstance(text, str) and re.match("[A-Z].* ", text))


def test_tests_on_nodes_expect_tasks_that_exist() -> None:
    """They run on a node only, and seldom: a task's new name fails here."""
    files = [*(ROOT / "roles").rglob("tasks/*.yml"), *(ROOT / "playbooks").rglob("*.yml")]
    names = {
        name for file in files for name in re.findall(r"- name: (.+?)(?: #.*)?\n", file.read_text(encoding="utf-8"))
    }
    sources = [*(ROOT / "tests/lab").glob("*.py"), *(ROOT / "tests/vm").glob("*.py")]
    expected = {text for file in sources for text in _expected_tasks(ast.parse(file.read_text(encoding="utf-8")))}
    assert len(expected) > 5
    assert expected - names == set()


def test_every_role_has_its_scenario(role: Path) -> None:
    """The scenario `default` runs all roles as they are set by default; preflight runs in every scenario."""
    folder = ROOT / "molecule" / role.name
    scenario = (folder / "converge.yml").exists() and any((folder / "tests").glob("test_*.py"))
    assert scenario or role.name == "preflight", f"molecule/{role.name}: molecule.yml, converge.yml, tests/test_*.py"


def test_no_mirror_is_named() -> None:
    folders = [*(role / part for role in ROLES for part in ("defaults", "vars", "tasks", "templates", "files"))]
    folders += [ROOT / "playbooks", ROOT / "molecule"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    named = [str(path) for path in files if re.search(rb"(https?|ftp)://(?!vendor/|127\.0\.0\.1:)", path.read_bytes())]
    assert files
    assert not named


def _listed(tags: str | list[str] | None) -> list[str]:
    return [tags] if isinstance(tags, str) else tags or []
