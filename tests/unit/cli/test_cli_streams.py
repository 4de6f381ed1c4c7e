"""stdout and stderr that are full or closed, Ctrl-C before a verb has begun, and tables for pipes and terminals."""

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from gpunode.cli.streams import table_lines
from gpunode.report import formats

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
REPLAY = ["validate", "--replay", str(BUNDLE)]
PRINTING = [
    ["--help"],
    ["--version"],
    ["checks"],
    ["checks", "--help"],
    ["schema", "report"],
    *([*REPLAY, "--format", name] for name in formats.NAMES),
    ["catalog", "list"],
]


def shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m gpunode "$@" {redirections}', sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


FULL = "gpunode: standard output cannot be written: No space left on device\n"
CLOSED = "gpunode: standard output cannot be written: it is closed\n"


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
@pytest.mark.parametrize(("stdout", "output"), [("/dev/full", FULL), (None, CLOSED)], ids=["full", "closed"])
def test_a_stdout_that_cannot_be_written_is_one_line_and_3(
    tmp_path: Path, arguments: list[str], stdout: str | None, output: str
) -> None:
    code = forked.run(arguments, stdout=stdout, stderr=tmp_path / "err")
    assert (code, (tmp_path / "err").read_text(encoding="utf-8")) == (3, output)


@pytest.mark.parametrize(("redirection", "output"), [("> /dev/full", FULL), (">&-", CLOSED)])
def test_it_is_so_where_the_program_itself_starts(redirection: str, output: str) -> None:
    ended = shell(redirection, "checks")
    assert (ended.returncode, ended.stderr) == (3, output)


def test_who_writes_nothing_to_stdout_does_not_need_it(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    errors = tmp_path / "err"
    before = forked.run([*REPLAY, "--format", "json"], stdout=tmp_path / "out", stderr=errors)
    code = forked.run([*REPLAY, "--format", "json", "--output", str(target)], stdout=None, stderr=errors)
    assert (code, errors.read_text(encoding="utf-8")) == (before, "")
    assert target.stat().st_size


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full"])
def test_messages_that_cannot_be_written_change_no_exit_code(redirection: str) -> None:
    assert shell(redirection, "chekcs").returncode == 2


@pytest.mark.parametrize("stderr", [None, "/dev/full"])
def test_messages_that_cannot_be_written_change_no_exit_code_of_a_verb(tmp_path: Path, stderr: str | None) -> None:
    assert forked.run(["checks"], stdout=tmp_path / "out", stderr=stderr) == 0


@pytest.mark.parametrize("module", ["click", "gpunode.cli.root", "gpunode.cli.checks", "pydantic"])
def test_ctrl_c_while_modules_are_loaded(module: str) -> None:
    code = f"""
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from gpunode.cli import main
main(["checks"])
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "gpunode: interrupted")


def test_a_locale_that_lacks_a_character_ends_no_report(tmp_path: Path) -> None:
    document = tmp_path / "node.json"
    document.write_text(BUNDLE.read_text(encoding="utf-8").replace('"host": "', '"host": "é', 1), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "gpunode", "validate", "--replay", str(document)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, "\\xe9" in ended.stdout) == (3, True), ended.stderr


LONG = "word " * 100
ROWS = [("gpu-node-with-a-long-name-1", LONG), ("n2", "[bold]as it is[/bold]")]


def test_a_row_is_one_line_in_a_pipe() -> None:
    head, first, second = table_lines(("NODE", "TEXT"), ROWS)
    assert head == f"{'NODE':<29}TEXT"
    assert first == f"gpu-node-with-a-long-name-1  {LONG.rstrip()}"
    assert second == f"{'n2':<29}[bold]as it is[/bold]"


def test_on_a_terminal_all_but_the_first_column_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = list(table_lines(("NODE", "TEXT"), ROWS))
    assert max(map(len, lines)) <= 60
    assert sum("gpu-node-with-a-long-name-1" in line for line in lines) == 1
    assert " ".join(lines).count("word") == 100
