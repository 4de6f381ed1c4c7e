"""Which tests a change needs."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_tests.py"


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, its root a fresh repository with one commit."""
    spec = importlib.util.spec_from_file_location("run_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)
    spec.loader.exec_module(module)
    for argv in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *argv], check=True, timeout=30)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.delenv("GPUNODE_TEST_SINCE", raising=False)
    return module


def test_without_a_base_everything_runs(runner: ModuleType) -> None:
    assert runner.changed() is None
    assert runner.concerned("roles/dcgm/")


def test_a_clean_tree_at_its_base_runs_everything(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUNODE_TEST_SINCE", "HEAD")
    assert runner.changed() is None


@pytest.mark.parametrize(
    ("path", "dcgm", "docker"),
    [
        ("roles/dcgm/tasks/main.yml", True, False),
        ("gpunode/catalog/gpus.yml", True, True),
        ("docs/lab.md", False, False),
    ],
)
def test_a_change_runs_what_stands_on_it(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, path: str, dcgm: bool, docker: bool
) -> None:
    monkeypatch.setenv("GPUNODE_TEST_SINCE", "HEAD")
    target = runner.ROOT / path
    target.parent.mkdir(parents=True)
    target.write_text("changed\n", encoding="utf-8")
    assert runner.changed() == [path]
    assert runner.concerned("roles/dcgm/") is dcgm
    assert runner.concerned("roles/docker/") is docker
