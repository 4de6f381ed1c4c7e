"""Tests of a node with managed accounts, run on the node itself."""

from testinfra.host import Host


def test_both_admins_have_their_rule_and_no_password(host: Host) -> None:
    with host.sudo():
        for name in ("ada", "operator"):
            assert "NOPASSWD: ALL" in host.check_output(f"sudo -l -U {name}")
        states = host.check_output("passwd -S ada; passwd -S operator; passwd -S careless").splitlines()
        assert [line.split()[1] for line in states] == ["L", "L", "L"]


def test_the_new_user_has_a_key_that_sshd_reads(host: Host) -> None:
    with host.sudo():
        keys, folder = host.file("/home/ada/.ssh/authorized_keys"), host.file("/home/ada/.ssh")
        assert (keys.user, keys.mode, folder.user, folder.mode) == ("ada", 0o600, "ada", 0o700)
        assert keys.content_string.startswith("ssh-ed25519 ")


def test_the_journal_is_on_disk_and_bounded(host: Host) -> None:
    with host.sudo():
        assert host.file("/var/log/journal").is_directory
        assert "SystemMaxUse=2G" in host.check_output("systemd-analyze cat-config systemd/journald.conf")


def test_no_unit_is_failed(host: Host) -> None:
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
