"""Every check declares what a scheduler and a site need: actions, the state it asks for, and every number by name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpunode.catalog import load
from gpunode.checks import registry
from gpunode.checks.actions import State

ROOT = Path(__file__).parents[2]
CHECKS = ROOT / "gpunode" / "checks"
PROCESSORS = {"x86_64", "aarch64"}
NUMBERS_OF_A_PROTOCOL = {
    "gpu.py": "exit statuses of nvidia-smi",
    "gpus.py": "an exit status and an Xid",
    "inside_driver.py": "results of NVML and CUDA",
    "fabric.py": "the compute capability from which on there is a fabric",
}
"""Files with numeric constants that name something; none of them is a limit that a site could move."""
COUNTS = (0, 1, 2, -1)
"""None, one, a pair, unlimited: no limits either."""


def test_every_check_has_a_remedy_or_an_action() -> None:
    """``drain`` with nothing to do does not help, and neither does doing something for nothing."""
    for check in registry:
        assert check.actions, check.id
        assert ([step.action for step in check.actions] == ["none"]) == (check.state is State.NONE), check.id
        assert len({*map(str, check.actions)}) == len(check.actions), check.id


def test_roles_and_tags_of_actions_exist() -> None:
    targets = {step.target for check in registry for step in check.actions if step.action == "run_role"}
    assert targets
    for target in filter(None, targets):
        role, _, tag = target.partition(":")
        assert (ROOT / "roles" / role).is_dir(), target
        assert not tag or f"`{tag}`" in (ROOT / "roles" / role / "README.md").read_text(encoding="utf-8"), target


def test_the_mildest_steps_come_first() -> None:
    """A person who follows the list does not replace a card before it was reset."""
    order = ("fix_configuration", "restart_service", "run_role", "reload_driver", "reset_gpu", "restart_os")
    harsh = ("power_cycle", "replace_hardware")
    for check in registry:
        names = [step.action for step in check.actions]
        assert names == sorted(names, key=lambda name: name in harsh), check.id
        ladder = [name for name in names if name in ("reload_driver", "reset_gpu", "restart_os")]
        assert ladder == sorted(ladder, key=order.index), check.id


def test_thresholds_are_named_after_their_check_and_have_a_source() -> None:
    known = {*load().architectures, *load().gpus}
    for check in registry:
        area = check.id.partition(".")[0]
        for threshold in check.thresholds:
            assert threshold.name.startswith((f"{check.id}.", f"{area}.")), threshold.name
            assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+){1,2}", threshold.name), threshold.name
            assert threshold.unit, threshold.name
            assert threshold.means.endswith("."), threshold.name
            assert threshold.source, threshold.name
            assert set(threshold.by) <= known, threshold.name
            for value in (threshold.default, *threshold.by.values()):
                assert threshold.least <= value <= (threshold.most or value), threshold.name


def test_architectures_are_those_of_the_catalog() -> None:
    for check in registry:
        assert set(check.architectures) <= {*load().architectures, *PROCESSORS}, check.id


def sources() -> list[Path]:
    return [path for path in sorted(CHECKS.glob("*.py")) if path.name not in NUMBERS_OF_A_PROTOCOL]


def literals(source: str) -> Iterator[str]:
    """Comparisons with a number in the code, or with a module's constant that is one: limits without a name."""
    tree = ast.parse(source)
    numbers = {
        target.id
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target, value in pairs(statement)
        if is_number(value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("at_most", "at_least"):
            sides = node.args[1:2]
        else:
            continue
        for side in sides:
            for part in ast.walk(side):
                constant = is_number(part) and part.value not in COUNTS  # type: ignore[attr-defined]
                if constant or (isinstance(part, ast.Name) and part.id in numbers):
                    yield ast.unparse(node)


def pairs(statement: ast.Assign) -> Iterator[tuple[ast.Name, ast.expr]]:
    for target in statement.targets:
        if isinstance(target, ast.Name):
            yield target, statement.value
        elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            for name, value in zip(target.elts, statement.value.elts, strict=True):
                if isinstance(name, ast.Name):
                    yield name, value


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_no_check_compares_with_a_number_that_has_no_name(path: Path) -> None:
    numbers = [text for text in literals(path.read_text(encoding="utf-8")) if text not in STRUCTURE]
    assert numbers == []


STRUCTURE = frozenset(
    {
        "float(capability) >= 8.0",
        "float(capability) < 8.0",
        "len(gpus) > MOST_IN_A_MESH",
        "len(values.uuids) > MOST_PARTS",
        "0 < len(rows) <= MOST_PARTS",
        "result == NO_PERMISSION",
        "(name, result) == ('CUDA', NOT_INITIALIZED)",
        "result == NOT_READY",
        "number == RECOVERY",
        "number == NVLINK_ERROR",
    }
)
"""Where an architecture begins, a form of cabling, what a report draws, results of CUDA, Xids: no limits of health."""


def test_a_number_in_a_comparison_is_found() -> None:
    source = (
        "MOST = 7\nA, B = 3, 4\ndef f(x):\n    return x > 5, x < MOST, x == 0.5 * B, x > 0, x != 1, x > LIMIT.value\n"
        "def g(x):\n    return at_most(x, 0, ''), at_most(x, MOST, ''), at_least(x, 5, ''), at_least(x, L.of(m), '')\n"
    )
    assert list(literals(source)) == [
        *("x > 5", "x < MOST", "x == 0.5 * B", "x == 0.5 * B"),
        *("at_most(x, MOST, '')", "at_least(x, 5, '')"),
    ]


def test_every_threshold_of_a_module_is_declared_by_a_check() -> None:
    """One that no decorator names could not be listed, and a policy could not set it."""
    for path in sorted(CHECKS.glob("*.py")):
        for name in re.findall(r'= Threshold\(\s*"([^"]+)"', path.read_text(encoding="utf-8")):
            assert name in registry.thresholds, f"{path.name}: {name}"


def test_every_module_with_checks_is_imported_by_the_room() -> None:
    tree = ast.parse((CHECKS / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module == "gpunode.checks"
        for alias in statement.names
    }
    with_checks = {
        path.stem
        for path in CHECKS.glob("*.py")
        if re.search(r"(?m)^@(registry\.check|\w+_check)\(", path.read_text(encoding="utf-8"))
    }
    assert len(with_checks) > 20
    assert not with_checks - imported, "gpunode/checks/__init__.py does not import these"
