"""The tarball for Galaxy and execution environments: what it holds, and what it prints without its Python package."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PARTS = {"roles", "plugins", "playbooks", "docs", "meta"}
FILES = {
    *("README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md", "requirements.txt", "bindep.txt"),
    *("FILES.json", "MANIFEST.json"),
}
GALAXY = yaml.safe_load((ROOT / "galaxy.yml").read_text(encoding="utf-8"))


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ANSIBLE_NOCOLOR": "1", **environment}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collection as ``ansible-galaxy collection install`` leaves it, in a folder for collections; no network."""
    folder = tmp_path_factory.mktemp("galaxy")
    galaxy = str(BIN / "ansible-galaxy")
    done = run(galaxy, "collection", "build", str(ROOT), "--output-path", str(folder))
    assert done.returncode == 0, done.stderr
    (tarball,) = folder.glob("*.tar.gz")
    done = run(galaxy, "collection", "install", "--offline", "--force", str(tarball), "-p", str(folder))
    assert done.returncode == 0, done.stderr
    with tarfile.open(tarball) as archive:
        (folder / "names").write_text("\n".join(member.name for member in archive if member.isfile()))
    return folder


def test_the_tarball_has_the_collection_and_nothing_else(installed: Path) -> None:
    names = (installed / "names").read_text().split("\n")
    assert {name for name in names if "/" not in name} == FILES
    assert {name.partition("/")[0] for name in names if "/" in name} == PARTS
    tracked = run("git", "-C", str(ROOT), "ls-files", *sorted(PARTS)).stdout.split()
    if tracked:  # a checkout
        assert set(tracked) <= set(names)
    assert not [name for name in names if "/." in name or name.endswith(".pyc")]


def test_one_version_is_in_all_files() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert GALAXY["version"] == project
    assert f"gpunode=={project}\n" in (ROOT / "requirements.txt").read_text(encoding="utf-8")


def test_the_execution_environment_for_awx_has_this_version_and_its_ansible() -> None:
    environment = yaml.safe_load((ROOT / "contrib" / "awx" / "execution-environment.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert environment["dependencies"]["ansible_core"]["package_pip"] in project["dependencies"]
    names = [f"gpunode-node-{project['version']}.tar.gz", f"gpunode-{project['version']}-py3-none-any.whl"]
    assert [file["src"] for file in environment["additional_build_files"]] == names
    assert environment["dependencies"]["galaxy"]["collections"] == [{"name": f"collection/{names[0]}", "type": "file"}]


def test_ansible_builder_finds_what_an_execution_environment_needs() -> None:
    environment = yaml.safe_load((ROOT / "meta" / "execution-environment.yml").read_text(encoding="utf-8"))
    assert environment["version"] == 1
    assert all((ROOT / name).is_file() for name in environment["dependencies"].values())


def play(folder: Path, installed: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A play of one role with the installed collection alone."""
    (folder / "play.yml").write_text(
        "- hosts: all\n  gather_facts: false\n  roles: [{role: gpunode.node.accounts, accounts_state: present}]\n"
    )
    (folder / "ansible.cfg").touch()
    variables = {"ANSIBLE_CONFIG": f"{folder}/ansible.cfg", "ANSIBLE_COLLECTIONS_PATH": str(installed), **environment}
    argv = [str(BIN / "ansible-playbook"), "-i", "node1,", "-c", "local", "--check", *options, str(folder / "play.yml")]
    return run(*argv, **variables)


def test_the_task_that_a_page_begins_at_has_that_name(installed: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "roles.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"--start-at-task '([^']+)'", page)
    listed = play(tmp_path, installed, "--list-tasks")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert f" {name.replace('docker', 'accounts')}\t" in listed.stdout


def test_without_the_package_a_role_prints_in_one_line_what_to_install(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "gpunode").mkdir()
    (tmp_path / "gpunode" / "__init__.py").write_text("raise ImportError(\"No module named 'gpunode'\")\n")
    done = play(tmp_path, installed, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"pip install gpunode=={GALAXY['version']}" in done.stdout
    assert "the Python package gpunode is required on the controller" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "bug" not in done.stdout + done.stderr


def test_a_package_of_another_version_is_refused(installed: Path, tmp_path: Path) -> None:
    file = installed / "ansible_collections" / "gpunode" / "node" / "MANIFEST.json"
    before = file.read_text(encoding="utf-8")
    manifest = json.loads(before)
    manifest["collection_info"]["version"] = "9.9.9"
    file.write_text(json.dumps(manifest), encoding="utf-8")
    try:
        done = play(tmp_path, installed)
    finally:
        file.write_text(before, encoding="utf-8")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"the collection gpunode.node is 9.9.9, but the Python package gpunode is {GALAXY['version']}" in done.stdout
