"""Where root writes reports and bundles, while another user puts obstacles in the way and swaps them."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from effort import effort
from hostile_files import SECRET, USER, World, swapped, within, world

from gpunode.errors import UsageError
from gpunode.judging.saved import folder_for_bundles, write_bundle
from gpunode.whole import must_not_be_redirected, write_whole

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it is about what root does in another's folder")
BUNDLE = b"{}"
LIMIT_S = 15


def report(path: Path) -> None:
    """Write as ``--output`` does: verified before the first contact, and again when it is written."""
    must_not_be_redirected(path, "--output")
    write_whole(path, "report\n")


def bundle(path: Path) -> None:
    """Write as ``--save`` does."""
    write_bundle(folder_for_bundles(path.parent), path.stem, BUNDLE)


@pytest.fixture(name="machine")
def _machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("SUDO_UID", raising=False)
    with world() as made:
        yield made


def of_the_user(machine: World) -> set[tuple[str, int]]:
    """All that is in folders of the user."""
    folders = [path for path in machine.shared.rglob("*") if path.is_dir() and path.lstat().st_uid == USER.pw_uid]
    return {(str(path), path.lstat().st_ino) for folder in folders for path in folder.iterdir()}


@pytest.mark.parametrize("write", [report, bundle])
@pytest.mark.parametrize("names", [("node.json",), ("eve", "node.json"), ("eve", "link", "node.json")])
def test_no_obstacle_leads_root_away(machine: World, write: Callable[[Path], None], names: tuple[str, ...]) -> None:
    before = machine.snapshot()
    written = 0
    for way, path in machine.ways(machine.shared, *names):
        existing = of_the_user(machine)
        outcome = within(LIMIT_S, partial(write, path))
        assert outcome != "hangs", way
        assert SECRET not in outcome, way
        assert machine.snapshot() == before, way
        assert of_the_user(machine) == existing, way
        if outcome == "None":
            written += 1
            assert (path.stat().st_uid, path.parent.stat().st_uid, path.is_symlink()) == (0, 0, False), way
        else:
            assert outcome.startswith("UsageError: "), way
            assert str(machine.shared) in outcome, way
            assert "\n" not in outcome, way
    assert written, "where nothing is in the way, it is written"


@pytest.mark.parametrize("write", [report, bundle])
def test_no_swap_leads_root_away(machine: World, write: Callable[[Path], None]) -> None:
    before = machine.snapshot()
    path = machine.shared / "node.json"
    path.write_text("theirs\n")
    os.chown(path, USER.pw_uid, USER.pw_gid)
    with swapped(path, machine.precious / "secret", 3):
        for _ in range(effort(60, 600)):
            outcome = within(LIMIT_S, partial(write, path))
            assert outcome == "None" or outcome.startswith("UsageError: ")
    assert machine.snapshot() == before


def test_no_swap_of_a_folder_leads_root_away(machine: World) -> None:
    """A folder of root in a folder of the user, who exchanges it."""
    before = machine.snapshot()
    folder = machine.home / "reports"
    folder.mkdir()
    with swapped(folder, machine.precious / "folder", 4):
        for _ in range(effort(60, 600)):
            outcome = within(LIMIT_S, partial(write_whole, folder / "report.json", "report\n"))
            assert outcome == "None" or outcome.startswith("UsageError: ")
    assert machine.snapshot() == before


def test_who_called_sudo_is_no_other_user(machine: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.root / "link").symlink_to(machine.home)
    with pytest.raises(UsageError, match="belongs to another user"):
        report(machine.root / "link" / "report.json")
    monkeypatch.setenv("SUDO_UID", str(USER.pw_uid))
    report(machine.root / "link" / "report.json")
    assert (machine.home / "report.json").read_text() == "report\n"
