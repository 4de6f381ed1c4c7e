"""The project alone, with no folder beside it and an empty home: its tests are collected, and pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT_TIER = ("tests/unit", "tests/property", "tests/captures")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lone")
    archive = folder / "archive.tar"
    command = ["git", "-C", str(ROOT), "archive", "-o", str(archive), "HEAD"]
    subprocess.run(command, check=True, timeout=120, start_new_session=True)
    clone = folder / "beside-nothing" / "clone"
    clone.mkdir(parents=True)
    # Not by tarfile: its filters came with Python 3.11.4, and Debian 12 has 3.11.2.
    subprocess.run(["tar", "-xf", archive, "-C", clone], check=True, timeout=120, start_new_session=True)
    archive.unlink()
    return clone


def started(clone: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start pytest in the clone, with the clone's gpunode and nothing of this user's."""
    home = clone.parents[1] / "home"
    home.mkdir(exist_ok=True)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=clone, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def fast_files(clone: Path) -> list[str]:
    """The shortest file of each folder of the unit tier, and of the contracts."""
    shortest: dict[Path, Path] = {}
    folders = (*UNIT_TIER, "tests/contract")
    paths = [path for folder in folders for path in (clone / folder).rglob("test_*.py")]
    for path in sorted(paths, key=lambda path: (path.stat().st_size, path.name)):
        shortest.setdefault(path.parent, path)
    return sorted(str(path.relative_to(clone)) for path in shortest.values())


def test_a_lone_clone_collects_the_unit_tier_and_passes_a_file_of_each_folder(clone: Path) -> None:
    files = fast_files(clone)
    assert len(files) > 18
    collecting, running = started(clone, "--collect-only", *UNIT_TIER), started(clone, *files)
    try:
        collected, _ = collecting.communicate(timeout=300)
        ran, _ = running.communicate(timeout=300)
    finally:
        for process in (collecting, running):
            process.kill()
            process.wait(timeout=10)
    assert collecting.returncode == 0, collected[-3000:]
    count = re.search(r"(\d+)/\d+ tests collected \((\d+) deselected\)", collected)
    assert count is not None, collected[-3000:]
    assert int(count[1]) > 7000
    assert f"captures: not fetched (make captures): {count[2]} tests not selected" in collected
    assert "skipped" not in collected[count.start() - 200 :]
    assert running.returncode == 0, ran[-3000:]
    assert re.search(r"^\d+ passed", ran, re.MULTILINE), ran[-3000:]
    assert not re.search(r"\d+ skipped", ran), ran[-3000:]


OWN_PATH = re.compile(r"Path\(__file__\)(?:\.(?:resolve|absolute)\(\))?((?:\.parents\[\d+\]|\.parent\b)*)")


def outside(path: str, text: str) -> list[str]:
    """The expressions of a file that start at its own path and lead out of the project."""
    expressions = []
    for match in OWN_PATH.finditer(text):
        steps = re.findall(r"parents\[(\d+)\]|parent\b", match[1])
        if sum(int(step) + 1 if step else 1 for step in steps) > len(Path(path).parts):
            expressions.append(f"{path}: {match[0]}")
    return expressions + [f"{path}: {match}" for match in re.findall(r"\bROOT\.parent\b", text)]


def test_nothing_starts_at_its_own_path_and_leads_out_of_the_project() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "tests", "scripts", "benchmarks", "molecule"]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, start_new_session=True)
    paths = [path for path in done.stdout.splitlines() if path.endswith(".py") and (ROOT / path).is_file()]
    assert len(paths) > 400
    this_file = str(Path(__file__).relative_to(ROOT))
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in paths if path != this_file}
    assert [line for path, text in texts.items() for line in outside(path, text)] == []


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        ("Path(__file__).parents[3] / 'x'", False),
        ("Path(__file__).parents[4] / 'shared'", True),
        ("Path(__file__).resolve().parents[3].parent / 'shared'", True),
        ("Path(__file__).resolve().parent.parent.parent.parent", False),
        ("ROOT.parent / 'shared'", True),
    ],
)
def test_a_path_out_of_the_project_is_found(text: str, leaves: bool) -> None:
    assert bool(outside("tests/unit/facts/test_x.py", text)) is leaves
