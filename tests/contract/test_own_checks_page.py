"""Own checks from scratch by docs/own-checks.md alone: its files in a new folder, its commands, the bench's nodes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from bench_machines import MACHINES, document
from bundles import hgx

PAGE = (Path(__file__).parents[2] / "docs" / "own-checks.md").read_text(encoding="utf-8")
FILES = {
    name: f"# {name}\n{text}"
    for name, text in re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, a bundle as node.json, and the package installed beside gpunode."""
    folder = tmp_path_factory.mktemp("site")
    assert set(FILES) == {"memory.yml", "site.yml", "pyproject.toml", "site_checks.py", "site-tests.yml"}
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "node.json").write_text(json.dumps(hgx()), encoding="utf-8")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(folder / "lib"), "."]
    done = subprocess.run(
        [sys.executable, "-I", *pip], cwd=folder, check=False, timeout=120, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-1000:]
    return folder


def gpunode(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / "lib"), "NO_COLOR": "1"}
    argv = [sys.executable, "-m", "gpunode", *words]
    return subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        check=False,
        timeout=300,
        capture_output=True,
        text=True,
        start_new_session=True,
    )


def test_the_checks_of_the_page_hold_the_contract(folder: Path) -> None:
    declared = gpunode(folder, "checks", "test", "-v", "memory.yml")
    assert (declared.returncode, declared.stderr) == (0, "")
    for line in re.findall(r"^ok    .*$", PAGE, re.MULTILINE):
        assert line in declared.stdout.splitlines()
    package = gpunode(folder, "checks", "test", "site-tests.yml")
    assert (package.returncode, package.stdout) == (0, "3 cases, 0 failed\n")


def test_they_judge_the_nodes_of_the_bench(folder: Path) -> None:
    """Both forms on every machine of the bench; the verdicts on the rest are what they are without them."""
    bundles = folder / "bundles"
    bundles.mkdir()
    for name in MACHINES:
        (bundles / f"{name}.json").write_text(json.dumps(document(name) | {"host": name}), encoding="utf-8")
    words = ["validate", "--replay", "bundles", "--level", "quick", "--format", "json"]
    with_own = json.loads(gpunode(folder, *words, "--policy", "site.yml").stdout)["nodes"]
    without = json.loads(gpunode(folder, *words, "--skip", "site.cores").stdout)["nodes"]
    assert len(with_own) == len(without) == len(MACHINES)
    for node, plain in zip(with_own, without, strict=True):
        statuses = {row["check"]: row["status"] for row in node["findings"] if row["check"].startswith("site.")}
        assert set(statuses) == {"site.memory", "site.scratch", "site.cores"}
        assert not {"skip", "error"} & set(statuses.values()), (node["host"], statuses)
        assert [row for row in node["findings"] if not row["check"].startswith("site.")] == plain["findings"]
