"""Inventories through Ansible's own programs: what they read, and one clear line for what they cannot."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpunode.content import ansible_environment, ansible_program
from gpunode.errors import UsageError
from gpunode.fleet import inventory
from gpunode.fleet.targets import SETTINGS, targets_from_inventory

HOSTS = """
all:
  vars: {ansible_ssh_args: -F none}
  hosts:
    login1: {}
  children:
    gpus:
      hosts:
        gpu1: {ansible_host: 192.0.2.1}
        gpu2: {ansible_host: 192.0.2.2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test with a good inventory, apart from the tester's settings."""
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_VAULT_PASSWORD_FILE", "ANSIBLE_INVENTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yml").write_text(HOSTS)
    return tmp_path


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changed Ansible's settings, and it is not asked, which takes a second."""
    monkeypatch.setattr(inventory, "settings", lambda _: {})


def refusal(source: str, limit: str | None = None) -> str:
    """The line for this inventory and pattern."""
    with pytest.raises(UsageError) as info:
        inventory.read([source], limit)
    line = str(info.value)
    assert "\n" not in line
    return line


def test_hosts_groups_and_variables(folder: Path) -> None:
    read = inventory.read(["hosts.yml"])
    assert sorted(read.hosts) == ["gpu1", "gpu2", "login1"]
    assert "gpus" in read.groups
    assert read.hosts["gpu1"]["ansible_host"] == "192.0.2.1"


def test_patterns(folder: Path) -> None:
    assert sorted(inventory.read(["hosts.yml"], "gpus:!gpu2").hosts) == ["gpu1"]


def test_a_list_of_hosts_and_several_inventories(folder: Path) -> None:
    assert sorted(inventory.read(["a,b"]).hosts) == ["a", "b"]
    assert sorted(inventory.read(["hosts.yml", "extra,"]).hosts) == ["extra", "gpu1", "gpu2", "login1"]


def test_a_script_is_an_inventory_too(folder: Path) -> None:
    script = folder / "dynamic"
    script.write_text(
        '#!/bin/sh\necho \'{"g": {"hosts": ["d1"]}, "_meta": {"hostvars": {"d1": {"ansible_port": 5}}}}\'\n'
    )
    script.chmod(0o755)
    assert inventory.read(["dynamic"]).hosts == {"d1": {"ansible_port": 5}}


def test_an_unknown_pattern_names_it_and_what_is_near(folder: Path) -> None:
    line = refusal("hosts.yml", "gpu9")
    assert line.startswith("--limit gpu9: inventory hosts.yml has no host or group gpu9; did you mean ")
    assert "gpu1" in line


def test_a_pattern_of_which_only_a_part_is_unknown_is_refused_too(folder: Path) -> None:
    assert "no host or group gup1" in refusal("hosts.yml", "gpu2,gup1")


def test_a_pattern_that_leaves_no_host(folder: Path) -> None:
    assert "no host of inventory hosts.yml is left" in refusal("hosts.yml", "gpu1:!gpus")


def test_a_missing_inventory(folder: Path) -> None:
    assert refusal("absent.yml") == (f"inventory {folder}/absent.yml: no such file, or not a valid inventory")


def test_an_empty_inventory(folder: Path) -> None:
    (folder / "empty").write_text("")
    (folder / "groups.yml").write_text("all:\n  children:\n    gpus: {}\n")
    assert refusal("empty").startswith("inventory empty has no hosts: ")
    assert refusal("groups.yml").startswith("inventory groups.yml has no hosts: ")


def test_yaml_that_is_broken_names_file_and_line(folder: Path) -> None:
    (folder / "bad.yml").write_text("all:\n  hosts:\n    gpu1: {ansible_host: 1\n")
    line = refusal("bad.yml")
    assert line.startswith(f"inventory {folder}/bad.yml: YAML parsing failed")
    assert "bad.yml:" in line.removeprefix(f"inventory {folder}/bad.yml:")


def test_ini_that_is_broken_is_refused_also_beside_a_good_one(folder: Path) -> None:
    (folder / "bad.ini").write_text("[gpus\ngpu1\n")
    with pytest.raises(UsageError, match=r"inventory .*/bad\.ini: "):
        inventory.read(["bad.ini", "hosts.yml"])


@pytest.mark.usefixtures("no_settings")
def test_templates_are_resolved_by_ansible(folder: Path) -> None:
    (folder / "t.yml").write_text(
        "all:\n  vars: {site: lab, ansible_host: '{{ inventory_hostname }}.{{ site }}', ansible_ssh_args: -F none}\n"
        "  hosts:\n    gpu1: {}\n    gpu2: {ansible_port: '{{ 2000 + 22 }}', note: '{{ undefined_one }}'}\n"
    )
    first, second = targets_from_inventory(["t.yml"])
    assert (first.address, second.address, second.port) == ("gpu1.lab", "gpu2.lab", 2022)


@pytest.mark.usefixtures("no_settings")
def test_a_template_that_fails_names_variable_and_host(folder: Path) -> None:
    (folder / "t.yml").write_text("all:\n  hosts:\n    gpu1: {ansible_user: '{{ nobody_set_this }}'}\n")
    with pytest.raises(UsageError, match=r"ansible_user \(host gpu1\) .*'nobody_set_this' is undefined") as info:
        targets_from_inventory(["t.yml"])
    assert "\n" not in str(info.value)


@pytest.mark.usefixtures("no_settings")
def test_vaulted_variables_are_used_and_not_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "password").write_text("vault password\n")
    encrypt = [ansible_program("ansible-vault"), "encrypt_string", "--vault-password-file", "password", "hunter2 horse"]
    done = subprocess.run(encrypt, check=True, timeout=60, capture_output=True, text=True)
    value = done.stdout.replace("\n", "\n        ")
    (folder / "v.yml").write_text(
        f"all:\n  hosts:\n    gpu1:\n      ansible_ssh_args: -F none\n      ansible_become_password: {value}\n"
    )
    (target,) = targets_from_inventory(["v.yml"], vault=["--vault-password-file", "password"])
    assert target.become_password == "hunter2 horse"  # noqa: S105
    with pytest.raises(UsageError, match="ansible_become_password is vaulted and no password decrypts") as info:
        targets_from_inventory(["v.yml"])
    (folder / "wrong").write_text("another\n")
    with pytest.raises(UsageError, match="no password decrypts"):
        targets_from_inventory(["v.yml"], vault=["--vault-password-file", "wrong"])
    captured = capfd.readouterr()
    assert "hunter2" not in captured.out + captured.err + str(info.value) + repr(target)


def test_vaulted_files(folder: Path) -> None:
    (folder / "password").write_text("vault password\n")
    variables = folder / "group_vars" / "all.yml"
    variables.parent.mkdir()
    variables.write_text("ansible_port: 2244\n")
    encrypt = [ansible_program("ansible-vault"), "encrypt", "--vault-password-file", "password", str(variables)]
    subprocess.run(encrypt, check=True, timeout=60, capture_output=True)
    vault = ["--vault-password-file", "password"]
    assert inventory.read(["hosts.yml"], vault=vault).hosts["gpu1"]["ansible_port"] == 2244
    assert "vaulted files and no password decrypts them" in refusal("hosts.yml")


def test_settings_of_an_ansible_cfg_are_read(folder: Path) -> None:
    (folder / "ansible.cfg").write_text(
        "[defaults]\nremote_user = cfg-user\nhost_key_checking = False\n[ssh_connection]\nssh_args = -F none -p 2211\n"
        "[privilege_escalation]\nbecome_method = doas\n"
    )
    settings = inventory.settings(SETTINGS)
    assert settings["ssh.remote_user"] == "cfg-user"
    assert settings["ssh.host_key_checking"] is False
    assert settings["ssh.ssh_args"] == "-F none -p 2211"
    assert settings["base.DEFAULT_BECOME_METHOD"] == "doas"
    with pytest.raises(UsageError, match=r"host gpu1: .*DEFAULT_BECOME_METHOD of Ansible's configuration = 'doas'"):
        targets_from_inventory(["hosts.yml"], "gpu1")


def dumped(kind: str) -> dict[str, Any]:
    """Return what ``ansible-config`` itself reports as changed, by name."""
    program = ansible_program("ansible-config")
    argv = [program, "dump", "--only-changed", "--format", "json", "--type", *kind.split()]
    entries = json.loads(
        subprocess.run(argv, capture_output=True, timeout=60, check=True, env=ansible_environment()).stdout
    )
    if kind != "base":
        entries = [entry for plugin in entries for rows in plugin.values() for entry in rows]
    return {entry["name"]: entry["value"] for entry in entries if "name" in entry}


def test_settings_are_those_that_ansible_config_reports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "key").touch()
    (folder / "ansible.cfg").write_text(
        "[defaults]\nremote_user = cfg-user\nremote_port = 2022\nprivate_key_file = key\ntimeout = 30\n"
        "interpreter_python = {{ DEFAULT_TRANSPORT }}\ntransport = smart\n"
        "[ssh_connection]\nssh_args = -F none\nssh_common_args = -o Compression=yes\nscp_if_ssh = smart\n"
        "[privilege_escalation]\nbecome_user = admin\n[sudo_become_plugin]\nflags = -n\n"
    )
    monkeypatch.setenv("ANSIBLE_SSH_EXTRA_ARGS", "-4")
    monkeypatch.setenv("ANSIBLE_BECOME_EXE", "doas")
    expected = {
        f"{section}.{name}": value
        for section, kind in (("base", "base"), ("ssh", "connection ssh"), ("sudo", "become sudo"))
        for name, value in dumped(kind).items()
        if name in SETTINGS[section]
    }
    assert len(expected) > 9
    assert inventory.settings(SETTINGS) == expected
    assert inventory.read_with_settings(["hosts.yml"], None, SETTINGS)[1] == expected


@pytest.mark.parametrize("variable", ["ANSIBLE_VERBOSITY", "ANSIBLE_DEBUG"])
def test_further_output_of_ansible_does_not_damage_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    before = inventory.read_with_settings(["hosts.yml"], None, SETTINGS)
    monkeypatch.setenv(variable, "1")
    assert inventory.read_with_settings(["hosts.yml"], None, SETTINGS) == before


def test_a_setting_of_another_type_is_refused_in_one_line(folder: Path) -> None:
    (folder / "ansible.cfg").write_text("[ssh_connection]\nretries = many\n")
    with pytest.raises(UsageError, match=r"Ansible's configuration: .*integer") as caught:
        targets_from_inventory(["hosts.yml"], "gpu1")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh: apt-get install openssh-client")
def test_targets_from_an_inventory(folder: Path) -> None:
    first, second = targets_from_inventory(["hosts.yml"], "gpus")
    assert [(target.name, target.address, target.become) for target in (first, second)] == [
        ("gpu1", "192.0.2.1", True),
        ("gpu2", "192.0.2.2", True),
    ]
