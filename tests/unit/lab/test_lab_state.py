"""A lab's folder: names, modes, and what SSH and Ansible read from it."""

import stat
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from gpunode.errors import UndeterminedError, UsageError
from gpunode.lab.state import HOME_VARIABLE, LabState, checked_name, make_key


@dataclass(frozen=True)
class Node:
    name: str
    port: int
    host_key: str = "ssh-ed25519 AAAA"
    address: str = "127.0.0.1"
    os: str = "debian-12"
    hardware: str | None = None


NODES = [Node("deb12-1", 22000), Node("deb13-1", 22001, "ssh-ed25519 BBBB")]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LabState:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "labs"))
    return LabState.of("one")


@pytest.mark.parametrize("name", ["a", "lab-1", "0", "x" * 40])
def test_names(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a_b", "../x", "a/b", "a b", "x" * 41, "a\n", "ü"])
def test_an_invalid_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        checked_name(name)


def test_the_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert LabState.of("one").folder == tmp_path / "gpunode/lab/one"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert LabState.of("one").folder == tmp_path / "home/.local/state/gpunode/lab/one"


def test_a_folder_that_ssh_would_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in ("/tmp/my labs", "/tmp/100%", '/tmp/"x"'):
        monkeypatch.setenv(HOME_VARIABLE, home)
        with pytest.raises(UsageError, match=HOME_VARIABLE):
            LabState.of("one")


def test_all_files_are_the_owners_alone(state: LabState) -> None:
    state.prepare()
    state.write(NODES)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in state.folder.iterdir()}
    assert stat.S_IMODE(state.folder.stat().st_mode) == 0o700
    assert modes.pop("id_ed25519.pub") == 0o644
    assert set(modes) == {"id_ed25519", "known_hosts", "ssh_config", "inventory.yml", "operator-password"}
    assert set(modes.values()) == {0o600}


def test_a_second_time_keeps_key_and_password(state: LabState) -> None:
    state.prepare()
    before = (state.key.read_bytes(), state.password.read_bytes())
    state.prepare()
    assert (state.key.read_bytes(), state.password.read_bytes()) == before
    assert len(before[1].strip()) >= 24


def test_known_hosts_name_address_and_port(state: LabState) -> None:
    state.prepare()
    state.write(NODES)
    assert state.known_hosts.read_text() == "[127.0.0.1]:22000 ssh-ed25519 AAAA\n[127.0.0.1]:22001 ssh-ed25519 BBBB\n"


def test_the_inventory_checks_host_keys(state: LabState) -> None:
    state.prepare()
    state.write(NODES)
    group = yaml.safe_load(state.inventory.read_text())["gpu_nodes"]
    own_archive = {
        "docker_source": "distribution",
        "nvidia_driver_source": "debian",
        "nvidia_container_toolkit_version": "none",
        "preflight_require_gpu": False,
    }
    assert group["hosts"] == {
        "deb12-1": {"ansible_host": "127.0.0.1", "ansible_port": 22000, **own_archive},
        "deb13-1": {"ansible_host": "127.0.0.1", "ansible_port": 22001, **own_archive},
    }
    variables = group["vars"]
    assert (variables["ansible_user"], variables["gpunode_lab"]) == ("admin", True)
    assert variables["ansible_ssh_private_key_file"] == str(state.key)
    options = set(variables["ansible_ssh_common_args"].removeprefix("-o ").split(" -o "))
    assert options == {
        f"UserKnownHostsFile={state.known_hosts}",
        "GlobalKnownHostsFile=/dev/null",
        "StrictHostKeyChecking=yes",
        "IdentitiesOnly=yes",
    }


def test_nodes_with_hardware_know_their_repositories(state: LabState) -> None:
    state.prepare()
    state.write_vendor_keys({"nvidia": "KEY\n", "container-toolkit": "OTHER\n"})
    state.write([Node("l40s-4-1", 22000, hardware="l40s-4")])
    host = yaml.safe_load(state.inventory.read_text())["gpu_nodes"]["hosts"]["l40s-4-1"]
    assert "nvidia_driver_source" not in host
    assert host["nvidia_repository_url"] == "http://vendor/compute/cuda/repos"
    assert Path(host["nvidia_repository_key"]).read_text() == "KEY\n"
    assert Path(host["nvidia_container_toolkit_key"]).read_text() == "OTHER\n"
    state.prepare()  # the keys are no foreign files
    assert state.remove()
    assert not state.folder.exists()


def test_docker_comes_from_where_the_system_has_it(state: LabState) -> None:
    state.prepare()
    state.write_vendor_keys(dict.fromkeys(("rpm", "rpm-rhel10", "container-toolkit", "docker"), "KEY\n"))
    systems = ("ubuntu-24.04", "rocky-9", "rocky-10")
    state.write([Node(system, 22000, os=system) for system in systems])
    hosts = yaml.safe_load(state.inventory.read_text())["gpu_nodes"]["hosts"]
    assert hosts["ubuntu-24.04"]["docker_source"] == "distribution"
    assert hosts["rocky-9"]["docker_source"] == "docker"
    assert hosts["rocky-9"]["docker_repository_url"] == "http://vendor/linux"
    assert Path(hosts["rocky-9"]["docker_repository_key"]).read_text() == "KEY\n"
    assert hosts["rocky-10"]["docker_state"] == "absent"


def test_a_lab_without_nodes_has_an_empty_group(state: LabState) -> None:
    state.prepare()
    state.write([])
    assert yaml.safe_load(state.inventory.read_text())["gpu_nodes"]["hosts"] == {}
    assert state.known_hosts.read_text() == ""


def test_removing_takes_what_is_ours_and_no_more(state: LabState) -> None:
    assert not state.remove()
    state.prepare()
    state.write(NODES)
    (state.folder / "notes").write_text("mine")
    assert state.remove()
    assert [path.name for path in state.folder.iterdir()] == ["notes"]
    (state.folder / "notes").unlink()
    state.prepare()
    assert state.remove()
    assert not state.folder.exists()


def test_what_a_killed_lab_left_is_not_a_foreign_file(state: LabState) -> None:
    state.folder.mkdir(parents=True)
    (state.folder / ".inventory.yml.new").write_text("half")
    state.key.write_text("half a key")  # ssh-keygen writes the public one after it
    state.prepare()
    assert "PRIVATE KEY" in state.key.read_text()
    (state.folder / ".vendor-nvidia.asc.new").write_text("half")
    assert state.remove()
    assert not state.folder.exists()


def test_a_folder_of_another_user_is_refused(state: LabState) -> None:
    state.folder.mkdir(parents=True)
    (state.folder / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"contains thesis\.tex"):
        state.prepare()
    assert [path.name for path in state.folder.iterdir()] == ["thesis.tex"]


def test_a_home_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UndeterminedError, match=r"Not a directory.*GPUNODE_LAB_HOME"):
        LabState.of("one").prepare()


def test_a_key_is_ed25519_without_comment(tmp_path: Path) -> None:
    kind, key = make_key(tmp_path / "key", "comment").split(" ")
    assert kind == "ssh-ed25519"
    assert len(key) == 68
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_without_ssh_keygen_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UndeterminedError, match="apt-get install openssh-client"):
        make_key(tmp_path / "key", "x")
