"""Tests of a node with a base, run on the node itself."""

import time

from testinfra.host import Host

LOGIN = (
    "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile=/root/known "
    "-i /root/site/{0} {0}@127.0.0.1 {1}"
)
LISTEN = (
    "import socket; s = socket.create_server(('127.0.0.1', 5140)); s.settimeout(60); c = s.accept()[0]; "
    "c.settimeout(60); [print(text, flush=True) for text in iter(lambda: c.recv(65536), b'')]"
)
CONNECTED = "journalctl -u tinyproxy --output=cat --no-pager | grep -c Established || true"


def output(host: Host, command: str) -> str:
    """Return the standard output of a command run as root; it must succeed."""
    with host.sudo():
        return str(host.check_output(command))


def test_the_name_leads_to_an_address_that_others_reach(host: Host) -> None:
    address = output(host, "hostname -I").split()[0]
    assert output(host, "hostname") == "gpu01"
    assert output(host, "getent ahostsv4 gpu01").split()[0] == address
    assert output(host, "getent hosts ldap.site.test").split()[0] == address
    assert "search site.test" in output(host, "cat /etc/resolv.conf")


def test_a_user_of_the_directory_logs_in_with_the_directorys_key(host: Host) -> None:
    assert output(host, "getent passwd lena").split(":")[2:6:3] == ["20001", "/nfs/home/lena"]
    assert output(host, "sss_ssh_authorizedkeys lena").startswith("ssh-ed25519 ")
    assert "uid=20001(lena)" in output(host, LOGIN.format("lena", "id"))


def test_a_user_outside_of_the_groups_does_not(host: Host) -> None:
    assert output(host, "getent passwd max").startswith("max:")
    output(host, f"! {LOGIN.format('max', 'id')}")


def test_the_whole_node_trusts_the_sites_authority(host: Host) -> None:
    connect = "openssl s_client -connect ldap.site.test:636 -verify_return_error -verify_hostname ldap.site.test"
    output(host, f"{connect} < /dev/null")
    output(host, "openssl verify -CApath /etc/ssl/certs /root/site/ldap.pem")


def test_apt_logins_and_services_use_the_proxy(host: Host) -> None:
    output(host, "systemctl is-active tinyproxy")
    before = int(output(host, CONNECTED))
    output(host, "apt-get update -q")
    assert int(output(host, CONNECTED)) > before
    assert "http://127.0.0.1:8888" in output(host, "systemd-run -q --wait --pipe printenv http_proxy")
    assert "http://127.0.0.1:8888" in output(host, LOGIN.format("lena", "printenv HTTPS_PROXY"))


def test_time_zone_locale_and_time_servers(host: Host) -> None:
    assert output(host, "timedatectl show -p Timezone --value") == "Europe/Berlin"
    assert "LANG=de_DE.UTF-8" in output(host, "localectl status")
    assert "de_DE.utf8" in output(host, "locale -a")
    lines = output(host, "chronyd -p").splitlines()
    sources = [line for line in lines if line.split()[:1] in (["server"], ["pool"])]
    assert sources == ["server ntp1.site.test iburst", "pool ntp.site.test iburst"]


def test_the_log_is_bounded_and_goes_to_the_sites_server(host: Host) -> None:
    assert "SystemMaxUse=1G" in output(host, "systemd-analyze cat-config systemd/journald.conf")
    output(
        host, f'systemd-run -q --unit=receiver --collect -p StandardOutput=file:/root/received python3 -I -c "{LISTEN}"'
    )
    end = time.monotonic() + 60
    while "a message of the test" not in (text := output(host, "logger a message of the test; cat /root/received")):
        assert time.monotonic() < end, text
        time.sleep(1)


def test_no_unit_is_failed(host: Host) -> None:
    assert output(host, "systemctl list-units --failed --plain --no-legend") == ""
