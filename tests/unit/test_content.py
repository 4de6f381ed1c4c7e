"""Where the Ansible half is found, and whose settings win."""

import subprocess
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
    package = clean / "site-packages" / "gpunode"
    installed = lay_out(package / "ansible_collections" / "gpunode" / "node")
    monkeypatch.setattr(content, "_PACKAGE", package)
    monkeypatch.setattr(content, "_INSTALLED", installed)
    assert collection_root() == installed
    env = ansible_environment()
    assert env["ANSIBLE_CONFIG"] == str(installed / "ansible.cfg")
    assert env["ANSIBLE_COLLECTIONS_PATH"] == f"{package}:{DEFAULT_PATHS}"


def test_nothing_at_all_is_told(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_program_that_is_missing_is_told() -> None:
    with pytest.raises(UsageError, match="ansible-nothing is missing next to"):
        ansible_program("ansible-nothing")
