"""stdout and stderr that are full or closed, and Ctrl-C before a verb has begun."""

import subprocess
import sys
from pathlib import Path

import pytest

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
REPLAY = ["validate", "--replay", str(BUNDLE)]
PRINTING = [
    ["--help"],
    ["--version"],
    ["checks"],
    ["checks", "--help"],
    ["schema", "report"],
    [*REPLAY, "--format", "console"],
    [*REPLAY, "--format", "json"],
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


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_full_disk_is_one_line_and_3(arguments: list[str]) -> None:
    ended = shell("> /dev/full", *arguments)
    assert ended.stderr == "gpunode: standard output cannot be written: No space left on device\n"
    assert ended.returncode == 3


@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_closed_stdout_is_one_line_and_3(arguments: list[str]) -> None:
    ended = shell(">&-", *arguments)
    assert ended.stderr == "gpunode: standard output cannot be written: it is closed\n"
    assert ended.returncode == 3


def test_who_writes_nothing_to_stdout_does_not_need_it(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    before = shell("", *REPLAY, "--format", "json").returncode
    ended = shell(">&-", *REPLAY, "--format", "json", "--output", str(target))
    assert (ended.returncode, ended.stderr) == (before, "")
    assert target.stat().st_size


@pytest.mark.parametrize("redirection", ["2>&-", "2> /dev/full"])
def test_messages_that_cannot_be_written_change_no_exit_code(redirection: str) -> None:
    assert shell(redirection, "chekcs").returncode == 2
    assert shell(redirection, "checks").returncode == 0


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
