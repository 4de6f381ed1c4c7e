"""gpunode as it is installed: built twice to the same bytes, and used with nothing but its wheel."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from programs import run_program

from gpunode.cli.verbs import VERBS
from gpunode.cli.zipapp import locked, needed

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "tests" / "fixtures" / "bundles" / "debian-12-driver.json"
LIMIT_S = 600
Ran = subprocess.CompletedProcess[str]


def copy_of_the_tree(target: Path, mode: int) -> Path:
    """Copy the files that git knows, or would add, with another mode and time than they have here."""
    listed = run_program(["git", "ls-files", "-coz", "--exclude-standard"], limit_s=60, cwd=ROOT)
    names = [name for name in listed.stdout.split("\0") if name]
    assert len(names) > 500
    for name in names:
        if (ROOT / name).is_file():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, path)
            executable = os.access(ROOT / name, os.X_OK)
            path.chmod(mode | (0o111 if executable else 0))
            os.utime(path, (mode, mode))
    return target


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders with a wheel and the sources, built from two copies of the tree."""
    folders = []
    for number, mode in enumerate((0o644, 0o600)):
        tree = copy_of_the_tree(tmp_path_factory.mktemp(f"tree{number}") / "x" / ("y" * number), mode)
        out = tree / "dist"
        done = run_program([sys.executable, "-m", "hatchling", "build", "-d", out], limit_s=LIMIT_S, cwd=tree)
        assert done.returncode == 0, done.stderr[-2000:]
        folders.append(out)
    return folders


@pytest.fixture(scope="module")
def wheel(builds: list[Path]) -> Path:
    (path,) = builds[0].glob("*.whl")
    return path


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_two_builds_are_the_same_bytes(builds: list[Path]) -> None:
    first, other = map(hashes, builds)
    assert {name.rpartition(".")[2] for name in first} == {"whl", "gz"}
    assert first == other


def test_the_wheel_carries_its_bill_of_materials(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if "/sboms/" in name)
        document = json.loads(archive.read(name))
        assert b"Apache License" in archive.read(name.partition("/")[0] + "/licenses/LICENSE")
    assert document["bomFormat"] == "CycloneDX"
    assert document["metadata"]["component"]["name"] == "gpunode"


class Installed:
    """A fresh environment with the wheel and its locked dependencies, in a folder that is also its user's home."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()
        requirements = folder / "requirements.txt"
        requirements.write_text(locked(needed(left_out=frozenset())), encoding="utf-8")
        self.bin = folder / "env" / "bin"
        for words in (
            [sys.executable, "-I", "-m", "venv", folder / "env"],
            [*self._pip(), "--no-deps", "--require-hashes", "-r", requirements],
            [*self._pip(), "--no-deps", "--no-index", wheel],
        ):
            done = run_program(words, limit_s=LIMIT_S)
            assert done.returncode == 0, done.stderr[-2000:]

    def _pip(self) -> list[object]:
        return [self.bin / "python", "-I", "-m", "pip", "install", "--quiet", "--no-compile"]

    def run(self, *words: str | Path, program: str = "gpunode", rc: int = 0, limit_s: float = 120) -> Ran:
        """Run a program of the environment with no setting of the tester."""
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8"}
        done = run_program([self.bin / program, *words], limit_s=limit_s, env=env, cwd=self.home)
        assert done.returncode == rc, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)


def test_every_verb_has_its_help_and_its_man_page(installed: Installed) -> None:
    # One process for all: each would import the whole program.
    each = f"from gpunode.cli import run\nfor verb in {sorted(VERBS)}: run([verb, '--help'])"
    assert installed.run("-I", "-c", each, program="python").stdout.count("Exit codes:") == len(VERBS)
    installed.run("man", "--save", "man1")
    pages = {path.stem for path in (installed.home / "man1").iterdir()}
    assert {"gpunode", *(f"gpunode-{verb}" for verb in VERBS)} <= pages


def test_saved_nodes_are_judged(installed: Installed) -> None:
    done = installed.run("validate", "--replay", BUNDLE, "--format", "json", rc=3)
    assert json.loads(done.stdout)["nodes"]


def test_ansible_finds_the_collection_and_its_playbooks(installed: Installed) -> None:
    listing = installed.run("--list", "gpunode.node", program="ansible-doc").stdout
    assert "gpunode.node.node_state" in listing
    installed.run(
        "--syntax-check", "-i", "localhost,", "-e", "gpunode_hosts=all", "gpunode.node.site", program="ansible-playbook"
    )


def test_an_example_is_written_and_read(installed: Installed) -> None:
    installed.run("init", "site", "--example", "research", "--no-look", "gpu-01", "gpu-02")
    # Names that do not exist: the inventory and its variables were accepted, no node answered.
    done = installed.run("plan", "-i", "site/hosts.yml", "--timeout", "5", rc=3)
    assert "gpu-01" in done.stdout


def test_the_wheel_builds_the_zipapp(installed: Installed) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    installed.run("zipapp", "gpunode.pyz", "--python", version, limit_s=LIMIT_S)
    bare = [sys.executable, "-I", "-S", installed.home / "gpunode.pyz", "--version"]
    env = {"PATH": "/usr/bin:/bin", "GPUNODE_UNPACK_DIR": str(installed.folder / "unpacked")}
    assert run_program(bare, limit_s=120, env=env, cwd="/").stdout == installed.run("--version").stdout
