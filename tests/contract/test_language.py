"""Plain technical English in docstrings, comments, messages, task names and pages, without the words listed here.

Code in backticks and fenced blocks of pages are not read: names, options and JSON values stay what they are.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ROOMS = ("gpunode", "plugins", "scripts", "benchmarks")
TESTS = ("tests", "molecule")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "roles/*/README.md")
TASKS = ("roles/*/tasks/*.yml",)
RULED_OUT = re.compile(
    r"(?i:\b(?:told|tells?|said|says?|wish(?:e[sd])?|want(?:s|ed)?|thought (?:node|experiment)|strangers?|crooked|whose"
    r"|let (?:us|it) in|(?:take|took|taken|put)s? away|lets? go of|giv(?:e|es|en) (?:\S+ ){0,3}back|has taken"
    r"|could not be seen|unseen|can x\d+|anew|that which)\b)"
    r"|(?<!there )(?<!There )\bis (?:none\b|no (?!longer|more|less|earlier|later|such))"
)
CODE = re.compile(r"``[^`]*``|`[^`]*`")
DATA = frozenset({"wish", "says", "wished", "wanted", "wants"})
"""Strings that are keys or values of published documents."""
QUOTED = ("WantedBy=", "Wants=", ".target.wants", "db:Status-Want", "sshd_config says Port", "|says more|says why|")
"""Text of other programs, and terms that contain a word of the list."""
WORD_LISTS = (Path(__file__),)
"""Files that hold the words as data."""
OLD_NAMES = re.compile(
    r"\b(?:want(?:s|ed)?|wish(?:e[sd])?|told|tells?|said|says?|strangers?|crooked|whose|unseen|anew"
    r"|taken|due|departures?|brought about|pretend(?:s|ed)?)\b"
)
PRONOUNS = frozenset(
    {"found", "one", "there", "own", "what", "ours", "theirs", "place", "given", "asked", "came", "said"}
    | {"its", "here", "mine"}
)
"""Names that do not say what a variable holds."""
VERBS = frozenset(
    {
        *("Activate", "Add", "Answer", "Append", "Apply", "Ask", "Assign", "Attribute", "Begin", "Bind", "Build"),
        *("Call", "Check", "Choose", "Close", "Collect", "Compare", "Compile", "Compute", "Configure", "Confirm"),
        *("Connect", "Convert", "Copy", "Count", "Create", "Cut", "Deactivate", "Decide", "Decode", "Delete"),
        *("Disable", "Discard", "Disconnect", "Do", "Download", "Draw", "Drop", "Enable", "End", "Erase", "Exclude"),
        *(
            "Exit",
            "Explain",
            "Fetch",
            "Fill",
            "Forget",
            "Give",
            "Heal",
            "Hide",
            "Hold",
            "Import",
            "Inject",
            "Install",
            "Join",
            "Judge",
        ),
        *("Keep", "Kill", "Leave", "Let", "Link", "List", "Load", "Log", "Look", "Make", "Manage", "Mark", "Mask"),
        *("Measure", "Merge", "Mount", "Move", "Open", "Parse", "Pass", "Print", "Provision", "Publish", "Raise"),
        *(
            "Read",
            "Reboot",
            "Record",
            "Redirect",
            "Refresh",
            "Refuse",
            "Register",
            "Remove",
            "Rename",
            "Replace",
            "Request",
        ),
        *("Reset", "Resolve", "Restart", "Restore", "Return", "Run", "Save", "See", "Send", "Serve", "Set", "Show"),
        *("Sign", "Sort", "Split", "Start", "Stop", "Take", "Test", "Undo", "Unpack", "Update", "Validate", "Verify"),
        *("Wait", "Warn", "Write", "Yield"),
    }
)
"""First words of docstrings. A new verb is added here in its imperative form."""


def ruled_out(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line within a text, and the words that the text must not contain."""
    text = CODE.sub(lambda code: re.sub(r"[^\n]", "x", code[0]), text)
    for quoted in QUOTED:
        text = text.replace(quoted, "x" * len(quoted))
    for match in RULED_OUT.finditer(text):
        yield text.count("\n", 0, match.start()), match[0].strip()


def strings_and_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield strings, docstrings and comments of Python code with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in DATA:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def variables(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of the parameter or variable that a node of the syntax tree sets, if it sets one."""
    match node:
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
            yield node.lineno, name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield node.lineno, name


def old_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield functions, classes, attributes, parameters and variables with an old word in their names."""
    for node in ast.walk(ast.parse(source)):
        names = variables(node)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = iter([(node.lineno, name)])
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names = iter([(node.lineno, name)])
        for line, name in names:
            if OLD_NAMES.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower()):
                yield line, name


def pronouns(source: str) -> Iterator[tuple[int, str]]:
    """Yield parameters and variables with a name that is a pronoun; fields of classes have the names of documents."""
    nodes = list(ast.walk(ast.parse(source)))
    bodies = [statement for node in nodes if isinstance(node, ast.ClassDef) for statement in node.body]
    fields = {child for statement in bodies for child in ast.iter_child_nodes(statement)}
    for node in nodes:
        if node not in fields:
            yield from ((line, name) for line, name in variables(node) if name in PRONOUNS)


def without_verb(source: str) -> Iterator[tuple[int, str]]:
    """Yield public functions with docstrings that do not begin with a verb."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first and first.split()[0].rstrip(",:") not in VERBS:
                yield node.lineno, f"{node.name}: {first}"


def task_names(document: object) -> Iterator[str]:
    if isinstance(document, list):
        for item in document:
            yield from task_names(item)
    elif isinstance(document, dict):
        name = document.get("name")
        if isinstance(name, str):
            yield name
        for block in ("block", "rescue", "always"):
            yield from task_names(document.get(block))


def prose(page: str) -> str:
    """Return a page with empty lines in place of its fenced blocks."""
    return re.sub(r"(?ms)^( *)(```|~~~).*?^\1\2", lambda block: "\n" * block[0].count("\n"), page)


def files(pattern: str) -> list[Path]:
    paths = sorted(ROOT.glob(pattern))
    assert paths, f"{pattern} matches no file"
    return paths


def lines_with(pattern: str, wrong: Callable[[str], Iterator[str]]) -> str:
    """Return a line for each problem that ``wrong`` finds in the text of a file."""
    paths = (path for path in files(pattern) if path not in WORD_LISTS)
    return "\n".join(f"{path.relative_to(ROOT)}:{problem}" for path in paths for problem in wrong(path.read_text()))


def in_lines(problems: Iterator[tuple[int, str]]) -> Iterator[str]:
    return (f"{line}: {text}" for line, text in problems)


def ruled_out_in_code(source: str) -> Iterator[tuple[int, str]]:
    for line, text in strings_and_comments(source):
        yield from ((line + offset, words) for offset, words in ruled_out(text))


@pytest.mark.parametrize("room", [*ROOMS, *TESTS])
def test_code_is_in_plain_english(room: str) -> None:
    wrong = lines_with(f"{room}/**/*.py", lambda source: in_lines(ruled_out_in_code(source)))
    assert not wrong, f"reword in plain technical English:\n{wrong}"


@pytest.mark.parametrize("room", TESTS)
def test_names_in_tests_are_in_plain_english(room: str) -> None:
    wrong = lines_with(f"{room}/**/*.py", lambda source: in_lines(old_names(source)))
    assert not wrong, f"rename (requested, expected, reported, foreign, malformed, pending …):\n{wrong}"


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_nouns(room: str) -> None:
    wrong = lines_with(f"{room}/**/*.py", lambda source: in_lines(pronouns(source)))
    assert not wrong, f"name what it holds (findings, gpu, path, installed …):\n{wrong}"


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_of_functions_begin_with_a_verb(room: str) -> None:
    wrong = lines_with(f"{room}/**/*.py", lambda source: in_lines(without_verb(source)))
    assert not wrong, f"begin with a verb (Return, Parse, Yield …):\n{wrong}"


@pytest.mark.parametrize("pattern", PAGES)
def test_pages_are_in_plain_english(pattern: str) -> None:
    wrong = lines_with(pattern, lambda page: in_lines((line + 1, words) for line, words in ruled_out(prose(page))))
    assert not wrong, f"reword in plain technical English:\n{wrong}"


@pytest.mark.parametrize("pattern", TASKS)
def test_task_names_are_in_plain_english(pattern: str) -> None:
    def wrong_names(text: str) -> Iterator[str]:
        return (f" {name}: {words}" for name in task_names(yaml.safe_load(text)) for _, words in ruled_out(name))

    wrong = lines_with(pattern, wrong_names)
    assert not wrong, f"reword in plain technical English:\n{wrong}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The node told us.", ["told"]),
        ("a path that is no folder", ["is no"]),
        ("None where there is none", []),
        ("there is no file, and it is no longer read", []),
        ("``wish`` of `said`", []),
        ("a row that is None", []),
        ("gives the file back, whose\nname is none", ["gives the file back", "whose", "is none"]),
    ],
)
def test_words_are_found(text: str, words: list[str]) -> None:
    assert [word for _, word in ruled_out(text)] == words


def test_old_names_are_found() -> None:
    source = "class WishList:\n    def f(self, *wanted, **told_at):\n        self.due = overdue = 1\nTAKEN: int\n"
    assert sorted(old_names(source)) == [(1, "WishList"), (2, "told_at"), (2, "wanted"), (3, "due"), (4, "TAKEN")]
    assert not [*old_names("f(wanted=1).due\n")], "names that the product publishes"


def test_pronouns_are_found() -> None:
    source = (
        "class A:\n    place: str\n    def f(self, one, *, own=1):\n        said, found = [what for what in one]\n"
        "        match said:\n            case {'a': came, **given}:\n                return lambda there: found\n"
    )
    assert sorted(pronouns(source)) == [
        *((3, "one"), (3, "own"), (4, "found"), (4, "said"), (4, "what")),
        *((6, "came"), (6, "given"), (7, "there")),
    ]


def test_a_docstring_without_a_verb_is_found() -> None:
    source = (
        'def a():\n    """The value."""\n\n\ndef b():\n    """Return the value."""\n\n\ndef _c():\n    """None."""\n'
    )
    assert [line for line, _ in without_verb(source)] == [1]


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
