"""The import rules of the rooms: data flows one way, so that each room can be read and tested by itself."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Room -> rooms it may import. Modules directly under gpunode/ belong to nobody and are open to all.
MAY_IMPORT: dict[str, set[str]] = {
    "catalog": set(),
    "onnode": set(),
    "probe": set(),
    "facts": {"probe"},
    "stack": {"catalog", "facts"},
    "tuning": {"catalog", "facts", "onnode"},
    "expectations": {"catalog", "facts"},
    "checks": {"catalog", "facts", "onnode", "tuning", "expectations"},
    "provisioning": {"catalog", "facts", "stack", "tuning", "checks", "probe", "onnode"},
    "workload": {"catalog", "checks", "facts", "fleet", "onnode", "probe", "tuning"},
    "fabric": {"facts", "checks", "expectations", "fleet", "judging", "workload", "onnode", "probe"},
    "fleet": {"probe", "onnode", "stack"},
    "top": {"catalog", "checks", "fleet", "probe", "onnode"},
    "judging": {"catalog", "probe", "facts", "expectations", "checks"},
    "history": {"catalog", "checks", "facts", "judging"},
    "report": {"catalog", "change", "checks", "facts", "judging", "history", "stack"},
    "change": {"fleet", "probe", "onnode"},
    "upgrade": {
        *("catalog", "change", "checks", "fleet", "history", "judging", "provisioning", "stack", "workload"),
    },
    "lab": {"catalog"},
    "profiling": {"onnode"},
    "staging": set(),
    "plugins": {"catalog", "stack", "facts", "tuning", "checks", "probe", "provisioning", "change", "onnode"},
}
FREE = {"cli"}
# Room -> its greatest number of lines, and of mappings without a type of their values. Raising one is a line of a
# change, with its reason in the commit's message; one that is far above the room is lowered.
CEILINGS: dict[str, tuple[int, int]] = {
    "catalog": (2_960, 35),
    "change": (1_190, 2),
    "checks": (12_640, 11),
    "cli": (6_720, 18),
    "expectations": (590, 0),
    "fabric": (2_400, 19),
    "facts": (10_730, 52),
    "fleet": (3_040, 22),
    "history": (2_310, 1),
    "judging": (2_020, 19),
    "lab": (11_340, 152),
    "onnode": (4_600, 33),
    "plugins": (8_960, 171),
    "probe": (260, 6),
    "profiling": (1_050, 2),
    "provisioning": (15_160, 61),
    "report": (3_580, 11),
    "stack": (3_970, 16),
    "staging": (780, 0),
    "top": (1_280, 1),
    "upgrade": (1_160, 4),
    "tuning": (2_010, 0),
    "workload": (9_170, 179),
}
UNTYPED = re.compile(r"\b(?:dict|Mapping|MutableMapping)\[str, (?:Any|object)\]")
SLACK = 1.1
"""A ceiling of more than this above the room's size holds nothing."""
# Goes to nodes and runs there under another name, so it imports its own modules relatively, and the standard library.
ON_NODES = REPOSITORY / "gpunode/lab/simulator"


@cache
def imported_modules(source: str) -> tuple[str, ...]:
    """Dotted names of everything that ``source`` imports, at whatever depth."""
    return tuple(_imported_modules(source))


def _imported_modules(source: str) -> Iterator[str]:
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            if statement.level:
                yield "<relative>"
            elif statement.module == "gpunode":
                yield from (f"gpunode.{alias.name}" for alias in statement.names)
            elif statement.module:
                yield statement.module


def forbidden(room: str, source: str, rooms: set[str]) -> list[str]:
    """The imports of ``source`` that the room may not have."""
    wrong = []
    for module in imported_modules(source):
        parts = module.split(".")
        if module == "<relative>":
            wrong.append("a relative import: write the full name, so that the room shows")
        elif parts[0] == "gpunode" and len(parts) > 1 and parts[1] in rooms - {room} - MAY_IMPORT[room]:
            wrong.append(module)
    return wrong


def rooms_on_disk() -> set[str]:
    return {path.parent.name for path in (REPOSITORY / "gpunode").glob("*/__init__.py")}


def sources(room: str) -> list[Path]:
    folder = REPOSITORY / "plugins" if room == "plugins" else REPOSITORY / "gpunode" / room
    return sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_room_imports_only_what_it_may(room: str) -> None:
    rooms = rooms_on_disk()
    wrong = {
        str(path.relative_to(REPOSITORY)): imports
        for path in sources(room)
        if path.parent != ON_NODES and (imports := forbidden(room, path.read_text(encoding="utf-8"), rooms))
    }
    assert wrong == {}


def test_what_goes_to_nodes_imports_itself_and_the_standard_library() -> None:
    siblings = {path.stem for path in ON_NODES.glob("*.py")}
    wrong = set()
    for path in ON_NODES.glob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.ImportFrom) and statement.level:
                names = [statement.module] if statement.module else [alias.name for alias in statement.names]
                wrong |= {f"{path.name}: .{name}" for name in names if statement.level > 1 or name not in siblings}
        modules = imported_modules(path.read_text(encoding="utf-8"))
        roots = {module.split(".")[0] for module in modules if module != "<relative>"}
        wrong |= {f"{path.name}: {root}" for root in roots - sys.stdlib_module_names}
    assert len(siblings) > 20
    assert not wrong


def test_every_room_has_its_rule() -> None:
    assert rooms_on_disk() - FREE <= set(MAY_IMPORT)
    assert rooms_on_disk() | {"plugins"} == set(CEILINGS)


def size(room: str) -> tuple[int, int]:
    """Lines, and untyped mappings, of a room."""
    texts = [path.read_text(encoding="utf-8") for path in sources(room)]
    return sum(text.count("\n") for text in texts), sum(len(UNTYPED.findall(text)) for text in texts)


@pytest.mark.parametrize("room", sorted(CEILINGS))
def test_a_room_keeps_below_its_ceiling(room: str) -> None:
    lines, untyped = size(room)
    most, most_untyped = CEILINGS[room]
    assert lines <= most, f"{lines} lines: shorten the room, or raise CEILINGS with the reason in the commit's message"
    assert untyped <= most_untyped, f"{untyped} mappings without a type: give them models, or record why not"
    assert most <= lines * SLACK, f"{lines} lines: lower the ceiling of {most}"
    assert most_untyped <= max(untyped * SLACK, untyped + 5), f"{untyped} mappings: lower the ceiling of {most_untyped}"


def test_no_room_imports_ansible() -> None:
    """Ansible is GPL: it runs as a program of its own, never inside our process (plugins run inside Ansible)."""
    wrong = [
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "gpunode").rglob("*.py")
        if "ansible" in (text := path.read_text(encoding="utf-8"))
        and any(module.split(".")[0] == "ansible" for module in imported_modules(text))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("facts", "from gpunode.checks import judge"),
        ("facts", "def f():\n    import gpunode.judging.report"),
        ("catalog", "from gpunode import facts"),
        ("probe", "from ..facts import NodeFacts"),
    ],
)
def test_the_rule_sees_a_forbidden_import(room: str, source: str) -> None:
    assert forbidden(room, source, {"facts", "checks", "judging", "catalog", "probe"})


def test_the_rule_allows_what_is_allowed() -> None:
    source = "from gpunode.facts import NodeFacts\nfrom gpunode.errors import UsageError\nimport json"
    assert forbidden("checks", source, {"facts", "checks"}) == []


def test_the_text_module_imports_nothing_of_gpunode() -> None:
    source = (REPOSITORY / "gpunode" / "text.py").read_text(encoding="utf-8")
    assert not [module for module in imported_modules(source) if module.split(".")[0] in {"gpunode", "<relative>"}]


def test_one_module_compares_names() -> None:
    """Every suggestion comes from ``gpunode.text``."""
    wrong = [
        str(path.relative_to(REPOSITORY))
        for folder in ("gpunode", "plugins", "scripts")
        for path in (REPOSITORY / folder).rglob("*.py")
        if path.name != "text.py"
        and "difflib" in (text := path.read_text(encoding="utf-8"))
        and "difflib" in imported_modules(text)
    ]
    assert wrong == []
