"""From an Ansible user's variables to targets; ansible itself is not asked here."""

import shutil
from typing import Any

import pytest

from gpunode.errors import UsageError
from gpunode.fleet.inventory import Inventory
from gpunode.fleet.targets import Target, local_target, targets, targets_from_hosts

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh: apt-get install openssh-client")
WITHOUT_FILES = "-F none"


def one(config: dict[str, Any] | None = None, **variables: Any) -> Target:
    """The target of a host with these variables, apart from the tester's own ssh configuration."""
    settings = {"ssh.ssh_args": WITHOUT_FILES, **(config or {})}
    (target,) = targets(Inventory(("hosts.yml",), {"gpu1": variables}, ("all",)), settings)
    return target


def test_a_bare_host() -> None:
    target = one()
    assert (target.name, target.connection, target.address, target.port) == ("gpu1", "ssh", "gpu1", 22)
    assert target.become is True
    assert target.python is None


def test_the_usual_variables() -> None:
    target = one(
        ansible_host="192.0.2.7",
        ansible_port=2222,
        ansible_user="admin",
        ansible_ssh_private_key_file="/keys/my key",
        ansible_ssh_common_args="-o UserKnownHostsFile=/lab/known_hosts -J ops@bastion",
        ansible_python_interpreter="/opt/python3",
        ansible_become=False,
        ansible_ssh_timeout=9,
    )
    assert (target.name, target.address, target.port, target.user) == ("gpu1", "192.0.2.7", 2222, "admin")
    assert target.ssh is not None
    assert target.ssh.identity_files == ("/keys/my key",)
    assert target.ssh.known_hosts_files[0] == "/lab/known_hosts"
    assert [hop.user for hop in target.ssh.jumps] == ["ops"]
    assert target.ssh.connect_timeout_s == 9.0
    assert (target.python, target.become) == ("/opt/python3", False)


def test_older_names_of_variables() -> None:
    target = one(ansible_ssh_host="192.0.2.8", ansible_ssh_port="2200", ansible_ssh_user="old", ansible_sudo_pass="s")  # noqa: S106
    assert (target.address, target.port, target.user, target.become_password) == ("192.0.2.8", 2200, "old", "s")


def test_settings_of_ansible_cfg_stand_behind_variables() -> None:
    config = {"ssh.remote_user": "from-cfg", "ssh.private_key_file": "/keys/cfg", "ssh.host_key_checking": False}
    target = one(config)
    assert target.ssh is not None
    assert (target.user, target.ssh.identity_files) == ("from-cfg", ("/keys/cfg",))
    assert target.ssh.strict_host_key_checking == "no"
    assert one(config, ansible_user="mine").user == "mine"
    checked = one(config, ansible_ssh_host_key_checking="yes")
    assert checked.ssh is not None
    assert checked.ssh.strict_host_key_checking == "ask"


def test_passwords_are_used_and_never_shown() -> None:
    words: dict[str, Any] = {
        "ansible_password": "a-pw",
        "ansible_become_password": "b-pw",
        "ansible_private_key_passphrase": "c-pw",
    }
    target = one(**words)
    assert (target.password, target.become_password, target.key_passphrase) == ("a-pw", "b-pw", "c-pw")
    assert "-pw" not in repr(target)


@pytest.mark.parametrize("connection", ["ssh", "smart", "ansible.builtin.ssh", "paramiko"])
def test_ways_that_are_ssh(connection: str) -> None:
    assert one(ansible_connection=connection).connection == "ssh"


def test_the_local_way() -> None:
    target = one(ansible_connection="local")
    assert (target.connection, target.ssh, target.address, target.port) == ("local", None, "localhost", None)


@pytest.mark.parametrize("interpreter", ["auto", "auto_silent", "auto_legacy"])
def test_looking_for_python_is_ours(interpreter: str) -> None:
    assert one(ansible_python_interpreter=interpreter).python is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ansible_connection": "community.docker.docker"}, "ansible_connection = 'community.docker.docker'"),
        ({"ansible_connection": "winrm"}, "ansible_connection = 'winrm'"),
        ({"ansible_become_method": "doas"}, "ansible_become_method = 'doas'"),
        ({"ansible_become_user": "oracle"}, "ansible_become_user = 'oracle'"),
        ({"ansible_become_flags": "-E"}, "ansible_become_flags"),
        ({"ansible_become_exe": "/opt/sudo"}, "ansible_become_exe"),
        ({"ansible_ssh_executable": "/opt/ssh"}, "ansible_ssh_executable"),
        ({"ansible_ssh_pkcs11_provider": "/p.so"}, "ansible_ssh_pkcs11_provider"),
        ({"ansible_paramiko_pty": True}, "ansible_paramiko_pty"),
        ({"ansible_become": "perhaps"}, "ansible_become must be true or false"),
        ({"ansible_user": ["a"]}, "ansible_user must be plain text"),
        ({"ansible_port": "abc"}, "ansible_port"),
        ({"ansible_ssh_common_args": "-o 'x"}, "ansible_ssh_common_args cannot be split"),
        ({"ansible_ssh_extra_args": "-o BindAddress=192.0.2.1"}, "ansible_ssh_extra_args"),
        ({"ansible_host": "a\nb"}, "ansible_host must be one line"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as info:
        one(**variables)
    assert str(info.value).startswith("host gpu1: ")
    assert message in str(info.value)
    assert "\n" not in str(info.value)


def test_a_key_in_a_variable_is_refused_without_its_text() -> None:
    with pytest.raises(UsageError) as info:
        one(ansible_ssh_private_key="SECRETKEY")
    assert "SECRETKEY" not in str(info.value)


def test_become_settings_do_not_matter_where_nobody_becomes() -> None:
    assert one(ansible_become=False, ansible_become_method="doas").become is False


def test_hosts_as_typed() -> None:
    node, local = targets_from_hosts(["root@gpu1:2222", "localhost"])
    assert (node.name, node.address, node.port, node.user) == ("root@gpu1:2222", "gpu1", 2222, "root")
    assert node.become is True
    assert local.connection == "local"
    with pytest.raises(UsageError, match="gpu1: listed more than once"):
        targets_from_hosts(["gpu1", "gpu2", "gpu1"])
    with pytest.raises(UsageError):
        targets_from_hosts(["gpu1:port"])


def test_this_machine() -> None:
    target = local_target()
    assert (target.connection, target.become) == ("local", None)
