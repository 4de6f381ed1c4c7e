"""Where the Ansible half is found, and which settings win."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpunode import content
from gpunode.content import ansible_environment, ansible_program, collection_root
from gpunode.errors import UsageError

DEFAULT_PATHS = "~/.ansible/collections:/usr/share/ansible/collections"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No settings of the tester, and a current folder without ansible.cfg."""
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_COLLECTIONS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lay_out(folder: Path) -> Path:
    """The files by which a collection is known."""
    folder.mkdir(parents=True)
    (folder / "galaxy.yml").write_text("name: node\n")
    (folder / "ansible.cfg").write_text("[defaults]\n")
    return folder


def test_the_checkout_is_found() -> None:
    root = collection_root()
    assert (root / "galaxy.yml").is_file()
    assert (root / "roles").is_dir()
    assert root == Path(content.__file__).resolve().parents[1]


def test_an_installed_copy_is_found(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = clean / "site-packages"
    package, installed = packages / "gpunode", lay_out(packages / "ansible_collections" / "gpunode" / "node")
    monkeypatch.setattr(content, "_PACKAGE", package)
    monkeypatch.setattr(content, "_INSTALLED", installed)
    assert collection_root() == installed
    env = ansible_environment()
    assert env["ANSIBLE_CONFIG"] == str(installed / "ansible.cfg")
    assert env["ANSIBLE_COLLECTIONS_PATH"] == f"{packages}:{DEFAULT_PATHS}"


def test_nothing_at_all_is_reported(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_PACKAGE", clean / "gpunode")
    monkeypatch.setattr(content, "_INSTALLED", clean / "gpunode" / "nowhere")
    with pytest.raises(UsageError, match="reinstall gpunode"):
        collection_root()


def test_our_settings_are_the_default(clean: Path) -> None:
    env = ansible_environment()
    assert env["ANSIBLE_CONFIG"] == str(collection_root() / "ansible.cfg")
    assert env["ANSIBLE_COLLECTIONS_PATH"] == f"{collection_root()}/collections:{DEFAULT_PATHS}"


def test_the_users_settings_win(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (clean / "ansible.cfg").write_text("[defaults]\n")
    assert "ANSIBLE_CONFIG" not in ansible_environment()
    monkeypatch.setenv("ANSIBLE_CONFIG", "/etc/mine.cfg")
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", "/my/collections")
    env = ansible_environment()
    assert env["ANSIBLE_CONFIG"] == "/etc/mine.cfg"
    assert env["ANSIBLE_COLLECTIONS_PATH"].endswith("/collections:/my/collections")


def test_ansible_finds_the_collection(clean: Path) -> None:
    listing = subprocess.run(
        [ansible_program("ansible-config"), "dump", "--only-changed"],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
        env=ansible_environment(),
    ).stdout
    assert f"{collection_root()}/collections" in listing


def test_a_program_that_is_missing_is_reported() -> None:
    with pytest.raises(UsageError, match="ansible-nothing is missing next to"):
        ansible_program("ansible-nothing")


def test_ansible_finds_the_collection_of_a_wheel_without_settings(clean: Path) -> None:
    """pip puts the collection beside the package, where Ansible's programs search sys.path."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(clean)]
    subprocess.run(build, cwd=collection_root(), check=True, timeout=240, capture_output=True)
    (wheel,) = clean.glob("*.whl")
    packages = clean / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    env = {**os.environ, "PYTHONPATH": str(packages), "HOME": str(clean)}
    argv = [ansible_program("ansible-doc"), "--list", "gpunode.node"]
    listing = subprocess.run(argv, cwd=clean, check=True, timeout=120, capture_output=True, text=True, env=env).stdout
    assert "gpunode.node.node_state" in listing
    installed = packages / "ansible_collections" / "gpunode" / "node"
    assert (installed / "roles" / "preflight" / "tasks" / "main.yml").is_file()
    assert (installed / "inventory" / "examples" / "research" / "hosts.yml").is_file()
