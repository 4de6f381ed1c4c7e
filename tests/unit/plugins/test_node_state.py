"""Which program manages a node's packages, and over which connection the node is looked at."""

import os
from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.modules import node_state

ROCKY = 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n'
UBUNTU = "ID=ubuntu\nID_LIKE=debian\n"


@pytest.mark.parametrize(
    ("release", "files", "dnf"),
    [
        (ROCKY, ["usr/bin/rpm"], True),
        (ROCKY, ["usr/bin/rpm", "etc/debian_version"], True),  # the lab's look-alike
        (UBUNTU, ["usr/bin/rpm", "etc/debian_version"], False),
        ("ID=debian\n", ["usr/bin/rpm", "etc/debian_version"], False),
        ("ID=debian\n", ["etc/debian_version"], False),
        (None, ["usr/bin/rpm"], True),
        (None, ["usr/bin/rpm", "etc/debian_version"], False),
        (ROCKY, [], False),
    ],
)
def test_rpm_manages_packages_on_systems_other_than_debian(
    tmp_path: Path, release: str | None, files: list[str], dnf: bool
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if release is not None:
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc/os-release").write_text(release, encoding="utf-8")
    assert node_state.by_dnf(tmp_path) is dnf


def process(proc: Path, number: int, parent: int, environment: str) -> None:
    (proc / str(number)).mkdir()
    (proc / str(number) / "environ").write_bytes(environment.replace(" ", "\0").encode() + b"\0")
    (proc / str(number) / "stat").write_text(f"{number} (a ) b) S {parent} 0 0", encoding="ascii")


def test_the_connection_is_that_of_the_login_above_sudo(tmp_path: Path) -> None:
    process(tmp_path, os.getpid(), 41, "PATH=/bin SUDO_USER=admin")
    process(tmp_path, 41, 40, "PATH=/bin")
    (tmp_path / "40").mkdir()
    (tmp_path / "40/environ").write_bytes(b"A=b\0SSH_CONNECTION=192.0.2.7 50000 10.0.0.5 2222\0")
    (tmp_path / "40/stat").write_text("40 (sh) S 1 0 0", encoding="ascii")
    assert node_state.connection(tmp_path) == {"client": "192.0.2.7", "port": 2222}


def test_without_a_login_over_ssh_there_is_no_connection(tmp_path: Path) -> None:
    assert node_state.connection(tmp_path) is None
    process(tmp_path, os.getpid(), 41, "PATH=/bin")
    process(tmp_path, 41, 1, "SSH_CONNECTION=garbage")
    assert node_state.connection(tmp_path) is None
