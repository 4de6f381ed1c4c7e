"""Tests of a node with a hardened SSH daemon, run on the node itself."""

from testinfra.host import Host


def effective(host: Host, *connection: str) -> dict[str, str]:
    """What sshd runs with; of repeated settings the last."""
    with host.sudo():
        shown = host.check_output(" ".join(["sshd", "-T", *connection]))
    return {name: value for name, _, value in (line.partition(" ") for line in str(shown).splitlines())}


def test_keys_are_the_only_way_in_whatever_the_main_file_has(host: Host) -> None:
    settings = effective(host)
    assert settings["passwordauthentication"] == "no"
    assert settings["authenticationmethods"] == "publickey"
    assert settings["permitrootlogin"] == "no"
    assert settings["kexalgorithms"].split(",")[0] == "mlkem768x25519-sha256"


def test_only_named_users_forward(host: Host) -> None:
    connection = "user={},host=localhost,addr=127.0.0.1,laddr=127.0.0.1,lport=22"
    assert effective(host, "-C", connection.format("operator"))["allowtcpforwarding"] == "yes"
    assert effective(host, "-C", connection.format("admin"))["allowtcpforwarding"] == "no"


def test_nothing_waits_for_a_confirmation(host: Host) -> None:
    with host.sudo():
        assert not host.file("/var/lib/gpunode/guard/ssh_hardening/record.json").exists
        # With exit status 1 where there is none.
        assert host.run("systemctl list-unit-files --no-legend 'gpunode-guard*'").stdout == ""


def test_no_unit_is_failed(host: Host) -> None:
    assert host.check_output("systemctl list-units --failed --plain --no-legend") == ""
