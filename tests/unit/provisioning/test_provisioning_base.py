"""The role base: what it writes, which lines of others it keeps, and what it refuses."""

from typing import Any

import pytest
from node_samples import by_path, file, node
from plan_samples import context_of, settings_of

from gpunode.errors import UsageError
from gpunode.provisioning import base, base_files
from gpunode.provisioning.manifest import Manifest, compared
from gpunode.provisioning.state import NodeState

PEM = "-----BEGIN CERTIFICATE-----\n" + "QUFB" * 40 + "\n-----END CERTIFICATE-----\n"
HOSTS = "127.0.0.1 localhost gpu01 builder\n127.0.1.1 gpu01.example.com gpu01\n::1 localhost ip6-localhost\n"
CHRONY = "pool 2.debian.pool.ntp.org iburst\nsourcedir /etc/chrony/sources.d\ndriftfile /var/lib/chrony/chrony.drift\n"
NAME = {"own_name": {"name": "gpu01", "addresses": ["127.0.1.1"]}}


def unit(name: str, active: str = "active") -> dict[str, Any]:
    return {"name": name, "load": "loaded", "active": active, "sub": "running", "enabled": "enabled"}


def state(texts: dict[str, str] | None = None, facts: dict[str, Any] | None = None, **more: Any) -> NodeState:
    return node(texts=texts or {}, facts={"virtualization": "none", **NAME, **(facts or {})}, **more)


def plan(machine: NodeState | None = None, others: dict[str, Any] | None = None, **changes: Any) -> Manifest:
    known = machine if machine is not None else state()
    requested = settings_of("base", **{"state": "present", **changes})
    return compared(base.ROLE.plan(known, requested, context_of(others)), known)


def removal(machine: NodeState) -> Manifest:
    return base.ROLE.plan(machine, settings_of("base", state="absent"), context_of({"base": {"state": "absent"}}))


def text(manifest: Manifest, path: str) -> str:
    content = by_path(manifest, path).content
    assert content is not None
    return content


def test_a_site_that_sets_nothing_changes_nothing() -> None:
    manifest = plan(state({base.HOSTS: HOSTS, base.CHRONY["apt"]: CHRONY}))
    assert {file.path for file in manifest.files if file.content is not None} == set()
    assert manifest.packages is not None
    assert (manifest.packages.install, manifest.units, manifest.commands) == ((), (), ())


def test_the_name_leads_to_the_address_and_a_removal_restores_the_file() -> None:
    machine = state({base.HOSTS: HOSTS})
    hosts = text(plan(machine, address="10.0.0.7", hosts={"store": "10.0.0.9"}), base.HOSTS)
    lines = [line for line in hosts.split("\n") if line and not line.startswith("#")]
    # The other names of a loopback line stay on a loopback address.
    assert lines == ["::1 localhost ip6-localhost", "127.0.0.1 localhost builder", "10.0.0.7 gpu01", "10.0.0.9 store"]
    again = plan(state({base.HOSTS: hosts}), address="10.0.0.7", hosts={"store": "10.0.0.9"})
    assert text(again, base.HOSTS) == hosts
    assert text(removal(state({base.HOSTS: hosts})), base.HOSTS) == HOSTS
    # Nothing is set any more: the role's lines are removed.
    assert text(plan(state({base.HOSTS: hosts})), base.HOSTS) == HOSTS


def test_a_full_name_has_its_short_form() -> None:
    hosts = text(plan(state({base.HOSTS: HOSTS}), hostname="gpu01.example.com", address="10.0.0.7"), base.HOSTS)
    assert "10.0.0.7 gpu01.example.com gpu01\n" in hosts
    assert "#gpunode# 127.0.1.1 gpu01.example.com gpu01\n" in hosts


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "gpu01", "10.0.0"])  # noqa: S104
def test_an_address_that_no_other_node_reaches_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"^base_address: "):
        plan(address=address)


def test_variables_that_belong_together_are_named_alone() -> None:
    with pytest.raises(UsageError, match=r"^base_ldap_bind_dn and base_ldap_bind_password belong together$"):
        plan(ldap_uris=["ldaps://ldap"], ldap_search_base="dc=example", ldap_bind_password="x")  # noqa: S106


def test_damaged_marks_are_refused() -> None:
    with pytest.raises(UsageError, match="expected one line"):
        plan(state({base.HOSTS: f"{base_files.BEGIN}\n10.0.0.7 gpu01\n"}), address="10.0.0.7")


def test_a_member_of_a_cluster_is_not_renamed() -> None:
    manifest = plan(state(facts={"units": [unit("slurmd.service")]}), hostname="gpu02")
    assert [line for line in manifest.refusals if "slurmd.service runs and has registered this node as gpu01" in line]
    assert plan(state(facts={"units": [unit("slurmd.service")]}), hostname="gpu01").refusals == ()


def test_the_sites_time_servers_replace_those_of_the_distribution() -> None:
    machine = state({base.CHRONY["apt"]: CHRONY}, installed={"chrony": "4.3-2", "systemd-timesyncd": "252"})
    manifest = plan(machine, ntp_servers=["ntp1.example.com", "pool ntp.example.com"])
    content = text(manifest, base.CHRONY["apt"])
    active = [line for line in content.split("\n") if line and not line.startswith("#")]
    assert active == [
        "sourcedir /etc/chrony/sources.d",
        "driftfile /var/lib/chrony/chrony.drift",
        "server ntp1.example.com iburst",
        "pool ntp.example.com iburst",
    ]
    assert [(unit.name, unit.enabled, unit.state) for unit in manifest.units] == [("chrony.service", True, "restarted")]
    assert isinstance(manifest.result, base.BaseResult)
    assert manifest.result.synchronized == ("chronyc", "waitsync", "60", "0.1", "0", "1")
    assert manifest.packages is not None
    assert "systemd-timesyncd" in manifest.packages.remove
    assert text(removal(state({base.CHRONY["apt"]: content})), base.CHRONY["apt"]) == CHRONY


def test_a_container_has_the_clock_of_its_host() -> None:
    machine = state({base.CHRONY["apt"]: CHRONY}, {"virtualization": "docker"}, installed={"chrony": "4.3-2"})
    manifest = plan(machine, ntp_servers=["ntp1.example.com"])
    assert manifest.units == ()
    assert isinstance(manifest.result, base.BaseResult)
    assert manifest.result.synchronized == ()


RESOLVER = "nameserver 192.0.2.1\noptions edns0\n"


@pytest.mark.parametrize(
    ("link", "units", "path", "expected"),
    [
        ({"kind": "link", "target": "../run/systemd/resolve/stub-resolv.conf"}, [], base.RESOLVED, "DNS=10.0.0.2"),
        (None, [unit("NetworkManager.service")], base.NETWORK_MANAGER, "servers=10.0.0.2"),
        (None, [], base.RESOLV, "nameserver 10.0.0.2"),
    ],
)
def test_the_program_that_owns_the_resolver_gets_the_servers(
    link: dict[str, Any] | None, units: list[dict[str, Any]], path: str, expected: str
) -> None:
    files = {base.RESOLV: link} if link else {}
    machine = state({} if link else {base.RESOLV: RESOLVER}, {"units": units}, files=files)
    manifest = plan(machine, dns_servers=["10.0.0.2"], dns_search=["example.com"])
    assert manifest.refusals == ()
    assert expected in text(manifest, path).split("\n")
    written = {file.path for file in manifest.files if file.content is not None}
    assert written & {base.RESOLVED, base.NETWORK_MANAGER, base.RESOLV} == {path}


def test_a_resolver_of_an_unknown_program_is_refused() -> None:
    machine = state(files={base.RESOLV: {"kind": "link", "target": "/run/resolvconf/resolv.conf"}})
    (refusal,) = plan(machine, dns_servers=["10.0.0.2"]).refusals
    assert "/run/resolvconf/resolv.conf" in refusal


def test_the_proxy_reaches_apt_logins_and_services() -> None:
    machine = state({base.ENVIRONMENT: "EDITOR=vi\n"})
    manifest = plan(machine, proxy_http="http://proxy:3128", no_proxy=["localhost", ".example.com", "10.0.0.0/8"])
    assert "EDITOR=vi\n" in text(manifest, base.ENVIRONMENT)
    for name in ("http_proxy", "HTTPS_PROXY"):
        assert f'{name}="http://proxy:3128"\n' in text(manifest, base.ENVIRONMENT)
        assert f'DefaultEnvironment="{name}=http://proxy:3128"\n' in text(manifest, base.SYSTEMD)
    apt = text(manifest, base.APT_PROXY)
    assert 'Acquire::https::Proxy "http://proxy:3128";' in apt
    assert 'Acquire::http::Proxy::localhost "DIRECT";' in apt
    assert ".example.com" not in apt
    assert by_path(manifest, base.APT_PROXY).phase == "first"


def test_a_password_in_a_proxy_is_in_no_diff_and_no_message() -> None:
    manifest = plan(proxy_http="http://user:secret@proxy:3128")
    named = [file for file in manifest.files if "secret" in (file.content or "")]
    assert {file.path for file in named} == {base.ENVIRONMENT, base.SYSTEMD, base.APT_PROXY}
    assert all(file.private for file in named)
    assert [note for note in manifest.notes if "readable by all users" in note]
    with pytest.raises(UsageError) as caught:
        plan(proxy_http="user:secret@proxy")
    assert "secret" not in str(caught.value)


def docker(started: float, **info: Any) -> dict[str, Any]:
    return {"engine": {"started": started, "info": {"version": "28", **info}}}


def test_dockerd_is_restarted_for_a_new_proxy_only_if_no_container_ends() -> None:
    setting: dict[str, Any] = {"proxy_http": "http://proxy:3128"}
    idle = plan(state(**docker(10.0, running=0)), **setting)
    assert [(unit.name, unit.state) for unit in idle.units] == [("docker.service", "restarted")]
    kept = plan(state(**docker(10.0, running=2, live_restore=True)), **setting)
    assert [unit.name for unit in kept.units] == ["docker.service"]
    busy = plan(state(**docker(10.0, running=2)), **setting)
    assert busy.units == ()
    assert "containers would end" in busy.restarts["docker.service"]
    assert plan(state(), **setting).restarts == {}


def test_certificates_that_are_not_listed_any_more_are_removed_and_a_key_is_refused() -> None:
    old = base.ANCHORS["apt"].format("old")
    manifest = plan(state(files={old: file("x")}), ca_certificates={"site": PEM})
    assert text(manifest, base.ANCHORS["apt"].format("site")) == PEM
    assert by_path(manifest, old).content is None
    assert isinstance(manifest.result, base.BaseResult)
    assert manifest.result.trust == ("update-ca-certificates",)
    assert 'REQUESTS_CA_BUNDLE="/etc/ssl/certs/ca-certificates.crt"\n' in text(manifest, base.ENVIRONMENT)
    for wrong in ("-----BEGIN PRIVATE KEY-----", "/nowhere/site.pem", "text", PEM + PEM):
        with pytest.raises(UsageError, match=r"^base_ca_certificates: "):
            plan(ca_certificates={"site": wrong})


def test_name_time_zone_and_locale_are_set_only_if_they_differ() -> None:
    sync = {"synchronized": True, "service": None, "timezone": "Etc/UTC"}
    machine = state({"/etc/default/locale": 'LANG="C.UTF-8"\n'}, {"time_sync": sync})
    same = plan(machine, hostname="gpu01", timezone="Etc/UTC", locale="C.UTF-8")
    assert (same.commands, [reason for reason in same.pending_reasons if "not" in reason and "/" not in reason]) == (
        (),
        [],
    )
    other = plan(machine, hostname="gpu02", timezone="Europe/Berlin", locale="de_DE.UTF-8")
    assert [command.argv[0] for command in other.commands] == ["hostnamectl", "timedatectl", "locale-gen", "localectl"]
    assert "de_DE.UTF-8 UTF-8\n" in text(other, base.LOCALE_GEN)


def test_messages_are_forwarded_with_a_queue() -> None:
    manifest = plan(syslog_server="logs.example.com:6514", syslog_protocol="tls")
    content = text(manifest, base.SYSLOG)
    assert 'target="logs.example.com" port="6514" protocol="tcp"' in content
    assert 'streamDriverPermittedPeers="logs.example.com"' in content
    assert "ForwardToSyslog=yes\n" in text(manifest, base.JOURNAL)
    assert manifest.packages is not None
    assert {"rsyslog", "rsyslog-gnutls"} <= set(manifest.packages.install)
    # Not installed yet: nothing could judge the file.
    assert by_path(manifest, base.SYSLOG).validate_with is None
    judged_by = by_path(plan(state(installed={"rsyslog": "8"}), syslog_server="logs"), base.SYSLOG).validate_with
    assert judged_by is not None


LDAP: dict[str, Any] = {"ldap_uris": ["ldaps://ldap.example.com"], "ldap_search_base": "dc=example,dc=com"}


def test_the_directory_is_a_change_that_a_new_login_confirms() -> None:
    manifest = plan(**LDAP, ldap_home="/nfs/home/%u", ldap_groups=["gpu"])
    rows = text(manifest, base.SSSD).split("\n")
    assert {"ldap_tls_reqcert = demand", "override_homedir = /nfs/home/%u", "simple_allow_groups = gpu"} <= {*rows}
    assert (by_path(manifest, base.SSSD).mode, by_path(manifest, base.SSSD).private) == ("0600", True)
    assert "AuthorizedKeysCommand /usr/bin/sss_ssh_authorizedkeys\n" in text(manifest, base.SSHD)
    assert manifest.guarded is not None
    assert {file.path for file in manifest.files if file.phase == "guarded"} == {base.SSSD, base.SSHD}
    assert [note for note in manifest.notes if "is on no mount of storage_mounts" in note]
    home = {"path": "/nfs/home", "type": "nfs", "source": "store:/home"}
    quiet = plan(others={"storage": {"mounts": [home]}}, **LDAP, ldap_home="/nfs/home/%u")
    assert not [note for note in quiet.notes if "storage_mounts" in note]
    done = state({path: text(manifest, path) for path in (base.SSSD, base.SSHD)})
    done.files[base.SSSD] = done.files[base.SSSD].model_copy(update={"mode": "0600"})
    assert plan(done, **LDAP, ldap_home="/nfs/home/%u", ldap_groups=["gpu"]).guarded is None


def test_an_option_of_the_site_replaces_the_roles() -> None:
    rows = text(plan(**LDAP, ldap_options={"ldap_tls_reqcert": "hard", "cache_credentials": None}), base.SSSD)
    assert "ldap_tls_reqcert = hard\n" in rows
    assert "cache_credentials" not in rows


def test_a_file_that_sssd_gave_to_its_group_is_left_so() -> None:
    machine = state({base.SSSD: "x"})
    machine.files[base.SSSD] = machine.files[base.SSSD].model_copy(update={"mode": "0640", "group": "sssd"})
    sssd = by_path(plan(machine, **LDAP), base.SSSD)
    assert (sssd.mode, sssd.group) == ("0640", "sssd")


@pytest.mark.parametrize(
    "wrong",
    [
        {"ldap_uris": ["ldaps://ldap"]},
        {"ldap_uris": ["http://ldap"], "ldap_search_base": "dc=a"},
        {"ldap_bind_dn": "cn=x"},
        {"ntp_servers": ["a b"]},
        {"dns_servers": ["dns"]},
        {"timezone": "Mars/Olympus"},
        {"locale": "a b"},
        {"journal_max": "much"},
        {"syslog_server": "a b"},
        {"hostname": "1.2.3.4"},
        {"proxy_https": "http://proxy"},
        {"ldap_options": {"ok": "a\nb"}},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        plan(**wrong)


def test_a_removal_is_confirmed_by_a_login_too_and_stops_sssd() -> None:
    machine = state({base.SSSD: "x", base.SSHD: "y"}, {"units": [unit("sssd.service")]})
    manifest = removal(machine)
    assert by_path(manifest, base.SSHD).phase == "guarded"
    assert manifest.guarded is not None
    # Its package is gone by then.
    assert "sssd.service" not in str(manifest.guarded.activate)
    assert [(unit.name, unit.state) for unit in manifest.units] == [("sssd.service", "stopped")]
