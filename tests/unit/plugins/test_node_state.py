"""What the module node_state reports: who manages packages, the connection, the key of modules, dockerd, accounts."""

import grp
import json
import os
import pwd
import time
from pathlib import Path
from types import ModuleType

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import module_key, ssh_state
from ansible_collections.gpunode.node.plugins.modules import node_state
from apt_scripts import fresh

from gpunode.errors import UndeterminedError
from gpunode.provisioning.answers import DockerState, docker_of
from gpunode.provisioning.ssh_login import obstacles
from gpunode.provisioning.state import Account, NodeState

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


# The output of mokutil 0.6.0 of Debian 12 for a key in each of these states.
@pytest.mark.parametrize(
    ("output", "enrolled", "waits"),
    [
        ("KEY is not enrolled", False, False),
        ("KEY is already in the enrollment request", None, True),
        ("KEY is already enrolled", True, False),
        ("KEY is already in db", True, False),
        ("KEY is already in the built-in trusted keyring", True, False),
        ("KEY is blocked in MokListXRT", None, False),
        ("EFI variables are not supported on this system", None, False),
    ],
)
def test_what_the_firmware_knows_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, enrolled: bool | None, waits: bool
) -> None:
    key = tmp_path / "mok.pub"
    monkeypatch.setattr(module_key, "DKMS_SETTINGS", tmp_path / "absent")
    monkeypatch.setattr(module_key, "MACHINE_OWNER_KEYS", (str(tmp_path / "absent"), str(key)))
    assert module_key.key() is None
    key.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module_key.key() == {"path": str(key), "enrolled": None, "waits": False, "fresh": False}
    tool = tmp_path / "mokutil"
    tool.write_text(f"#!/bin/sh\necho '{output}' >&{2 if 'built-in' in output or 'EFI' in output else 1}\nexit 1\n")
    tool.chmod(0o755)
    assert module_key.key() == {"path": str(key), "enrolled": enrolled, "waits": waits, "fresh": False}
    for name, boot in (("STAGED_IN", "first"), ("BOOT", "second")):
        (tmp_path / name).write_text(boot)
        monkeypatch.setattr(module_key, name, tmp_path / name)
    assert module_key.key()["fresh"] is False
    (tmp_path / "BOOT").write_text("first")
    assert module_key.key()["fresh"] is True


def test_a_key_of_the_dkms_configuration_precedes_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "framework.conf"
    monkeypatch.setattr(module_key, "DKMS_SETTINGS", settings)
    monkeypatch.setattr(module_key, "MACHINE_OWNER_KEYS", ("/own",))
    assert module_key.certificates() == ["/own"]
    settings.write_text("# mok_certificate=/example\nmok_certificate=/etc/keys/first.der\n")
    (tmp_path / "framework.conf.d").mkdir()
    (tmp_path / "framework.conf.d" / "site.conf").write_text('mok_signing_key="/s.key"\nmok_certificate="/s.der"\n')
    assert module_key.certificates() == ["/s.der", "/etc/keys/first.der", "/own"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module on a node with scripts as programs, and with a running daemon."""
    module = fresh("engine_state")
    info = {"version": "20.10.24", "running": 2, "live_restore": True, "swarm": "inactive", "cgroup_driver": "systemd"}
    program(tmp_path, "docker", f"echo '{json.dumps(info)}'")
    program(tmp_path, "dockerd", "echo '  --live-restore  x'; echo '  --log-opt map'")
    program(tmp_path, "systemctl", "echo 'ExecStart=dockerd -H fd://'")
    (tmp_path / "pid").write_text("7")
    settings = tmp_path / "default"
    settings.write_text("# tcp://10.0.0.1\nDOCKER_OPTS='-H tcp://10.0.0.2 --log-opt splunk-token=s3cret'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module, "PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setattr(module, "HOOK", str(tmp_path / "hook"))
    monkeypatch.setattr(module, "SETTINGS", settings)
    return module


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_running_daemon_is_reported_as_the_plans_read_it(engine: ModuleType) -> None:
    docker = DockerState.model_validate(engine.collected())
    assert docker.info is not None
    assert (docker.info.running, docker.info.live_restore, docker.info.in_swarm) == (2, True, False)
    assert docker.options == ("live-restore", "log-opt")
    assert "fd://" in docker.command
    assert "tcp://10.0.0.2" in docker.command
    assert "tcp://10.0.0.1" not in docker.command
    assert "--log-opt" in docker.command
    assert "s3cret" not in docker.command
    assert docker.in_use == "2 containers run: stop them"


@pytest.mark.parametrize("script", ["exit 1", "echo no JSON", "echo '[]'", "sleep 60"])
def test_a_daemon_that_does_not_answer_is_silent(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(engine, "LIMIT_S", 1)
    program(tmp_path, "docker", script)
    began = time.monotonic()
    docker = DockerState.model_validate(engine.collected())
    assert docker.silent
    assert "does not answer" in (docker.in_use or "")
    assert time.monotonic() - began < 20


def test_nothing_is_asked_where_no_daemon_runs(engine: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pid").unlink()
    program(tmp_path, "docker", f"touch {tmp_path}/asked")
    docker = DockerState.model_validate(engine.collected())
    assert (docker.started, docker.info, docker.silent) == (None, None, False)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("answer", [{"info": {"running": "many"}}, {"options": "x"}, {"command": "x" * (1 << 18)}])
def test_an_answer_that_cannot_be_read_is_refused(answer: dict[str, object]) -> None:
    state = NodeState.model_construct(facts=None, apt=None, dnf=None, engine=answer)  # type: ignore[arg-type]
    with pytest.raises(UndeterminedError, match="the container engine's answer cannot be read"):
        docker_of(state)


# As `getent passwd` and `id` print them on a member of a domain: SSSD does not enumerate.
REMOTE = pwd.struct_passwd(("ada", "*", 1712001105, 1712000513, "Ada", "/home/corp/ada", "/bin/bash"))
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFlMQ4QIoLa0nhzL10xJLycLZUvclZ1U9Ui9YZwHN8u3 ada"
GROUPS = {1712000513: "domain users", 1712001200: "gpu-admins"}


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> None:
    local, group, groups = pwd.getpwnam, grp.getgrgid, os.getgrouplist
    monkeypatch.setattr(pwd, "getpwnam", lambda name: REMOTE if name == "ada" else local(name))
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, *GROUPS] if name == "ada" else groups(name, gid))
    monkeypatch.setattr(
        grp, "getgrgid", lambda gid: grp.struct_group((GROUPS[gid], "*", gid, [])) if gid in GROUPS else group(gid)
    )


@pytest.mark.usefixtures("directory")
def test_a_user_of_a_directory_service_has_an_account_and_groups() -> None:
    accounts = {account["name"]: account for account in ssh_state.accounts([".ssh/authorized_keys"], ["ada", "ghost"])}
    assert accounts["ada"]["groups"] == ["domain users", "gpu-admins"]
    assert (accounts["ada"]["password"], accounts["ada"]["home"]) == ("unknown", "/home/corp/ada")
    assert "ghost" not in accounts
    assert "root" in accounts
    assert "ada" not in {account["name"] for account in ssh_state.accounts([".ssh/authorized_keys"], [])}


@pytest.mark.usefixtures("directory")
@pytest.mark.parametrize(("allowed", "reasons"), [("gpu-admins", 0), ("wheel", 1)])
def test_allow_groups_is_judged_by_membership_and_keys_may_come_from_a_command(allowed: str, reasons: int) -> None:
    (row,) = (account for account in ssh_state.accounts([".ssh/authorized_keys"], ["ada"]) if account["name"] == "ada")
    effective = f"authorizedkeyscommand /usr/bin/sss_ssh_authorizedkeys\nallowgroups {allowed}\n"
    lines = list(obstacles(Account.model_validate(row), "ada", "192.0.2.1", effective))
    assert len(lines) == reasons, lines


@pytest.mark.parametrize("name", [b"\xff", "\u2028".encode(), "\x85".encode(), b"\xc3\x28"])
def test_what_users_write_with_chfn_hides_no_account(
    name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded: `chfn -r $'\\377'` of an unprivileged user on Debian 12 warns, and writes the byte."""
    passwd = tmp_path / "passwd"
    passwd.write_bytes(b"ghost:x:1001:1001:,%b,,:/home/ghost:/bin/sh\nroot:x:0:0:%b:/root:/bin/bash\n" % (name, name))
    monkeypatch.setattr(ssh_state, "PASSWD", str(passwd))
    assert [account["name"] for account in ssh_state.accounts([".ssh/authorized_keys"], [])] == ["root"]
    passwd.unlink()
    with pytest.raises(FileNotFoundError):
        ssh_state.accounts([".ssh/authorized_keys"], [])


@pytest.mark.usefixtures("directory")
def test_a_line_that_is_no_key_hides_no_key_of_its_file(tmp_path: Path) -> None:
    """sshd skips such a line."""
    keys = tmp_path / ".ssh" / "authorized_keys"
    keys.parent.mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    entry = pwd.struct_passwd(("ada", "*", os.getuid(), os.getgid(), "Ada", str(tmp_path), "/bin/bash"))
    outcomes = []
    for text, mode in ((f"{KEY}\n", 0o600), (f"damaged\n{KEY}\n", 0o600), (f"{KEY}\n", 0o666)):
        keys.write_text(text, encoding="utf-8")
        keys.chmod(mode)
        row = ssh_state.account(entry, None, [".ssh/authorized_keys"])
        effective = "pubkeyacceptedalgorithms ssh-ed25519\npermitrootlogin yes\n"
        outcomes.append([*obstacles(Account.model_validate(row), "ada", "192.0.2.1", effective)])
    assert outcomes[:2] == [[], []]
    assert "can be written by others" in outcomes[2][0]
