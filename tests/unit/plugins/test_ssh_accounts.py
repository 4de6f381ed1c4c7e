"""Accounts of a directory service: NSS finds them by name, and no local file lists them."""

import grp
import os
import pwd
from pathlib import Path

import pytest
from ansible_collections.gpunode.node.plugins.module_utils import ssh_state

from gpunode.provisioning.ssh_login import obstacles
from gpunode.provisioning.state import Account

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
