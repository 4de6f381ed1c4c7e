"""The role ssh_hardening on what lab nodes of Debian 12 and 13 reported of their SSH daemons."""

import copy
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st
from node_samples import file, node
from plan_samples import Planned, context_of, settings_of

from gpunode.provisioning import ssh_hardening
from gpunode.provisioning.manifest import Manifest, RevertibleChange, compared
from gpunode.provisioning.ssh_hardening import MAIN, MODULI, PUBLISHED, WAITING
from gpunode.provisioning.ssh_settings import BANNER, DROP_IN, LAST, bad_options, with_options
from gpunode.provisioning.state import SshState
from gpunode.provisioning.templates import rendered

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=30)
FIXTURES = Path(__file__).parents[2] / "fixtures" / "ssh"
RSA = {"path": "/etc/ssh/ssh_host_rsa_key", "type": "ssh-rsa", "mode": "0600", "owner": "root", "group": "root"}
WEAK_RSA = {**RSA, "bits": 2048, "mtime": 0.0}
ECDSA = {**RSA, "path": "/etc/ssh/ssh_host_ecdsa_key", "type": "ecdsa-sha2-nistp256", "bits": 256, "mtime": 0.0}
SOCKET = {"load": "loaded", "active": "active", "enabled": "enabled", "listen": "[::]:22"}


def recorded(system: str = "debian-12", **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FIXTURES / f"{system}.json").read_text(encoding="utf-8"))
    return {**copy.deepcopy(document), **changes}


def plan(
    ssh: dict[str, Any],
    *,
    answers: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
    texts: dict[str, str] | None = None,
    days: int = 0,
    coming: tuple[str, ...] = (),
    **settings: Any,
) -> Manifest:
    state = node(files=files, texts=texts).model_copy(update={"ssh": SshState.model_validate(ssh)})
    run = context_of(answers=answers or {}, check=bool(coming), planned=Planned(users=coming))
    object.__setattr__(run, "today", run.today + timedelta(days=days))
    return compared(
        ssh_hardening.ROLE.plan(state, settings_of("ssh_hardening", **{"state": "present", **settings}), run), state
    )


def guarded(manifest: Manifest) -> RevertibleChange:
    assert manifest.guarded is not None
    return manifest.guarded


def login(ssh: dict[str, Any], effective: str | None = None, **texts: str) -> dict[str, Any]:
    """The node's answer to what sshd would run with: by default what it runs with, and the role's own settings."""
    manifest = plan(ssh)
    rows = [line.partition(" ") for line in drop_in(manifest).splitlines() if line and not line.startswith("#")]
    requested = {name.lower(): value for name, _, value in rows}
    kept = [line for line in ssh["effective"].splitlines() if line.partition(" ")[0] not in requested]
    whole = "\n".join([*kept, *(f"{name} {value}" for name, value in requested.items())])
    text = effective if effective is not None else whole
    return {"login": {"effective": text, "logins": {"admin": text, **texts}}}


def drop_in(manifest: Manifest) -> str:
    return next(file.content or "" for file in manifest.files if file.path == DROP_IN)


def setting(manifest: Manifest, name: str) -> list[str]:
    lines = [line.split(None, 1) for line in drop_in(manifest).splitlines()]
    return [line[1] for line in lines if line[0] == name]


def test_a_node_that_is_not_asked_for_is_left_alone() -> None:
    assert not plan(recorded(), state="keep").pending


@pytest.mark.parametrize(
    ("system", "first", "classic"),
    [("debian-12", "sntrup761x25519-sha512", True), ("debian-13", "mlkem768x25519-sha256", False)],
)
def test_algorithms_follow_what_openssh_offers(system: str, first: str, classic: bool) -> None:
    manifest = plan(recorded(system))
    kex = setting(manifest, "KexAlgorithms")[0].split(",")
    assert kex[0] == first
    assert ("curve25519-sha256" in kex) is classic
    offered = set(recorded(system)["offered"]["kex"])
    assert set(kex) <= offered
    assert "curve25519-sha256" in setting(plan(recorded(system), post_quantum="prefer"), "KexAlgorithms")[0]


def test_keys_are_the_only_way_in() -> None:
    manifest = plan(recorded())
    for name, value in {
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "PubkeyAuthentication": "yes",
        "AuthenticationMethods": "publickey",
        "PermitRootLogin": "no",
        "AllowTcpForwarding": "no",
    }.items():
        assert setting(manifest, name) == [value]
    assert setting(plan(recorded(), root="keys"), "PermitRootLogin") == ["prohibit-password"]


def test_named_users_and_jump_hosts_may_forward() -> None:
    text = drop_in(plan(recorded(), forwarding_users=["operator"]))
    assert text.partition("Match User operator\n")[2].split("\n")[0].strip() == "AllowTcpForwarding yes"
    assert text.rstrip().endswith("Match all")
    assert setting(plan(recorded(), jump_host=True), "AllowTcpForwarding") == ["local"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ciphers": ["rot13"]}, "rot13"),
        ({"macs": ["hmac-sha2-256-etm@openssh.com,hmac-md5"]}, "ssh_hardening_macs"),
        ({"admin_users": ["ghost"]}, "ghost"),
        ({"allow_users": ["ghost"]}, "ghost"),
        ({"allow_users": ["admin ops"]}, "admin ops"),
        ({"ports": [22, 38223]}, "38223 is in use"),
        ({"ports": [2222]}, "port 22"),
        ({"ports": [22, 70000]}, "70000"),
        ({"max_startups": "many"}, "ssh_hardening_max_startups"),
        ({"least_rsa_bits": 99}, "ssh_hardening_least_rsa_bits"),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(settings: dict[str, Any], named: str) -> None:
    manifest = plan(recorded(listening=[22, 38223]), **settings)
    assert [reason for reason in manifest.refusals if named in reason]
    assert not manifest.files


def test_a_settled_node_is_asked_nothing() -> None:
    ssh = recorded(weak_moduli=0)
    first = plan(ssh)
    assert first.questions.keys() == {"login"}
    texts = {file.path: file.content for file in first.files if file.content is not None}
    files = {path: file(text, mode="0600" if path in (DROP_IN, LAST) else "0644") for path, text in texts.items()}
    folder = {"kind": "folder", "mode": "0755", "owner": "root", "group": "root", "entries": 1}
    files[ssh_hardening.MEMORY] = folder
    settled = plan(ssh, texts={PUBLISHED: texts[PUBLISHED]}, files=files)
    assert not settled.questions
    assert not settled.pending, settled.pending_reasons
    waits = plan(
        ssh, texts={PUBLISHED: texts[PUBLISHED]}, files={**files, ssh_hardening.MEMORY: folder, WAITING: file("")}
    )
    assert waits.pending


def test_settings_that_let_everybody_in_who_has_to_are_not_refused() -> None:
    ssh = recorded(weak_moduli=0)
    manifest = plan(ssh, answers=login(ssh), admin_users=["admin"])
    assert manifest.refusals == ()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("allowusers somebody", "AllowUsers"),
        ("denyusers admin", "DenyUsers"),
        ("allowgroups wheel", "AllowGroups"),
        ("forcecommand /bin/false", "/bin/false"),
        ("authenticationmethods publickey,password", "AuthenticationMethods"),
        ("pubkeyauthentication no", "PubkeyAuthentication"),
        ("pubkeyacceptedalgorithms rsa-sha2-512", "sshd would accept no key of admin"),
    ],
)
def test_a_controller_that_would_be_locked_out_is_refused(line: str, reason: str) -> None:
    ssh = recorded(weak_moduli=0)
    name = line.partition(" ")[0]
    fine = login(ssh)["login"]["effective"]
    changed = "\n".join([*(row for row in fine.splitlines() if row.partition(" ")[0] != name), line])
    refusals = plan(ssh, answers=login(ssh, admin=changed)).refusals
    assert [refusal for refusal in refusals if "locked out" in refusal and reason in refusal], refusals


@pytest.mark.parametrize("part", ["no key", "small key", "writable home", "no shell"])
def test_an_admin_user_needs_a_key_that_is_accepted(part: str) -> None:
    ssh = recorded(weak_moduli=0)
    operator = next(account for account in ssh["accounts"] if account["name"] == "operator")
    if part == "no key":
        operator["keys"] = []
    elif part == "small key":
        operator["keys"] = [{"type": "ssh-rsa", "bits": 1024, "blob": "x"}]
    elif part == "writable home":
        operator["keys_problem"] = "/home/operator can be written by others"
    else:
        operator["shell"] = "/usr/sbin/nologin"
    answers = login(ssh)
    answers["login"]["logins"]["operator"] = answers["login"]["effective"]
    assert plan(ssh, answers=answers, admin_users=["admin"]).refusals == ()
    assert [
        refusal for refusal in plan(ssh, answers=answers, admin_users=["operator"]).refusals if "operator" in refusal
    ]


def test_in_check_mode_users_that_accounts_would_create_are_not_missing() -> None:
    manifest = plan(recorded(), coming=("ada",), admin_users=["ada"], allow_users=["ada", "admin"])
    assert manifest.refusals == ()
    assert [login["user"] for login in manifest.questions["login"].body["logins"]] == ["admin"]


def test_what_sshd_refuses_is_refused_with_its_message() -> None:
    ssh = recorded(weak_moduli=0)
    refusals = plan(ssh, answers={"login": {"error": "line 3: Bad SSH2 cipher spec 'x'."}}).refusals
    assert "Bad SSH2 cipher spec" in refusals[0]
    assert plan(ssh, answers={"login": {}}).refusals


def test_a_line_that_is_read_first_is_named() -> None:
    ssh = recorded(weak_moduli=0)
    first = "/etc/ssh/sshd_config.d/00-admin.conf"
    ssh["contents"] = {first: "# ours\nPasswordAuthentication yes\n", **ssh["contents"]}
    fine = login(ssh)["login"]["effective"]
    effective = fine.replace("passwordauthentication no", "passwordauthentication yes")
    refusals = plan(ssh, answers=login(ssh, effective)).refusals
    assert any(f"{first} line 2" in refusal and "PasswordAuthentication no" in refusal for refusal in refusals)


def test_later_lines_and_match_blocks_are_explained() -> None:
    ssh = recorded(weak_moduli=0)
    ssh["contents"][MAIN] += "PasswordAuthentication yes\nMatch Group legacy\n  PasswordAuthentication yes\n"
    notes = " ".join(plan(ssh).notes)
    assert "has no effect any more" in notes
    assert "remains effective inside its Match block" in notes


def test_a_main_file_without_include_is_refused_or_gets_it() -> None:
    ssh = recorded(weak_moduli=0)
    ssh["contents"][MAIN] = ssh["contents"][MAIN].replace("Include", "#Include")
    assert "add_include" in plan(ssh).refusals[0]
    files = {file.path: file.content for file in plan(ssh, add_include=True).files}
    assert (files[MAIN] or "").splitlines()[0] == "Include /etc/ssh/sshd_config.d/*.conf"


def test_small_groups_go_and_what_was_there_is_kept() -> None:
    line = "2026 2 6 100 {} 2 ABC\n"
    text = "# Time Type\n" + line.format(2047) + line.format(4095)
    manifest = plan(recorded(), answers={"moduli": {MODULI: text}})
    files = {file.path: file.content for file in manifest.files}
    assert files[MODULI] == "# Time Type\n" + line.format(4095)
    assert files[ssh_hardening.MODULI_BEFORE] == text
    # Without a key exchange that reads them, they are left alone.
    assert "moduli" not in plan(recorded("debian-13")).questions


def test_weak_host_keys_are_retired_when_the_good_ones_were_published_long_enough() -> None:
    ssh = recorded()
    ed25519 = ssh["host_keys"][0]
    ssh["contents"] = {MAIN: ssh["contents"][MAIN]}
    ssh["host_keys"] = [ECDSA, ed25519, WEAK_RSA]
    manifest = plan(ssh)
    new = "/etc/ssh/ssh_host_rsa4096_key"
    assert [(command.creates, command.phase) for command in manifest.commands] == [(new, "before")]
    assert setting(manifest, "HostKey") == [ed25519["path"], ECDSA["path"], WEAK_RSA["path"], new]
    assert "ecdsa-sha2-nistp256" in setting(manifest, "HostKeyAlgorithms")[0].split(",")
    ssh["host_keys"].append({**RSA, "path": new, "bits": 4096, "mtime": 0.0})
    dates = {PUBLISHED: next(file.content or "" for file in manifest.files if file.path == PUBLISHED)}
    assert ECDSA["path"] in setting(plan(ssh, texts=dates, days=29), "HostKey")
    retired = plan(ssh, texts=dates, days=30)
    assert setting(retired, "HostKey") == [ed25519["path"], new]
    assert "ecdsa-sha2-nistp256" not in setting(retired, "HostKeyAlgorithms")[0].split(",")


def test_a_daemon_is_restarted_and_never_reloaded() -> None:
    """One that a socket started, which was stopped since, ends at a reload: seen with OpenSSH 10.0 of Debian 13."""
    for state in ("present", "absent"):
        commands = guarded(plan(recorded(), state=state)).activate
        assert commands == (("systemctl", "daemon-reload"), ("systemctl", "restart", "ssh.service"))


def test_ports_of_a_socket_are_set_where_systemd_reads_them() -> None:
    ssh = recorded()
    ssh["units"]["ssh.socket"] = SOCKET
    manifest = plan(ssh, ports=[22, 2222])
    path = ssh_hardening.SOCKET_DROP_INS["ssh.socket"]
    content = next(file.content or "" for file in manifest.files if file.path == path)
    streams = [f"ListenStream={address}" for address in ("", "0.0.0.0:22", "[::]:22", "0.0.0.0:2222", "[::]:2222")]
    assert content.splitlines()[-7:] == ["[Socket]", "BindIPv6Only=ipv6-only", *streams]
    assert ("systemctl", "start", "ssh.socket") in guarded(manifest).activate
    assert guarded(manifest).units == ("ssh.service", "ssh.socket")
    assert {file.phase for file in manifest.files} == {"guarded"}
    ssh["effective"] = ssh["effective"].replace("port 22\n", "port 2200\n")
    assert "which sshd ignores" in " ".join(plan(ssh).notes)
    # Ubuntu's generator writes Port into the socket.
    generated = plan(ssh, files={ssh_hardening.GENERATOR: file("")})
    assert "systemctl daemon-reload" in " ".join(generated.notes)
    assert "which sshd ignores" not in " ".join(generated.notes)


def test_selinux_and_a_new_port_are_refused_with_the_command() -> None:
    assert "semanage port -a -t ssh_port_t -p tcp 2222" in plan(recorded(selinux=True), ports=[22, 2222]).refusals[0]


def test_a_host_key_that_another_file_names_is_not_named_twice() -> None:
    ssh = recorded()
    assert any("HostKey" in (text or "") for path, text in ssh["contents"].items() if path != MAIN)
    assert setting(plan(ssh), "HostKey") == []
    assert last_keys(plan(ssh)) == ["/etc/ssh/ssh_host_rsa_key"]


def last_keys(manifest: Manifest) -> list[str]:
    text = next(file.content for file in manifest.files if file.path == LAST)
    return [line.partition(" ")[2] for line in (text or "").splitlines() if line.startswith("HostKey ")]


ED25519, RSA_4096 = "/etc/ssh/ssh_host_ed25519_key", RSA["path"]


@pytest.mark.parametrize("file_name", ["10-lab.conf", "50-site.conf", "99-vendor.conf"])
@pytest.mark.parametrize("named", [[], [ED25519], [RSA_4096], [ED25519, RSA_4096], [RSA_4096, ED25519]])
def test_host_keys_are_offered_in_one_order_whatever_other_drop_ins_name(named: list[str], file_name: str) -> None:
    """sshd adds each HostKey line, in the order of the files' names."""
    ssh = recorded()
    ssh["contents"] = {
        MAIN: ssh["contents"][MAIN],
        f"{MAIN}.d/{file_name}": "".join(f"HostKey {path}\n" for path in named),
    }
    manifest = plan(ssh)
    order = [*setting(manifest, "HostKey"), *named, *last_keys(manifest)]
    warned = any("HostKey" in note for note in manifest.notes)
    assert sorted(order) == [ED25519, RSA_4096]
    assert (order == [ED25519, RSA_4096]) is not warned
    assert warned is (named == [RSA_4096, ED25519])


def test_absent_removes_the_settings_and_restores_the_groups() -> None:
    before = {ssh_hardening.MODULI_BEFORE: file("old")}
    manifest = plan(recorded(), state="absent", files=before, answers={"moduli": {ssh_hardening.MODULI_BEFORE: "old"}})
    files = {file.path: file.content for file in manifest.files}
    assert files[DROP_IN] is None
    assert files[MODULI] == "old"
    assert not plan(recorded(), state="absent").pending


def test_a_node_without_a_daemon_is_refused() -> None:
    nothing = {name: {**unit, "load": "not-found"} for name, unit in recorded()["units"].items()}
    assert "no-sshd" in plan(recorded(effective=None, error="not found", units=nothing)).refusals[0]


SOCKET_STATE = {"ssh.socket": SOCKET}
ABSENT_UNIT = {"load": "not-found", "active": "inactive", "enabled": "", "listen": ""}


def with_units(**changes: Any) -> dict[str, Any]:
    """Debian 12 with other units, by their names without the dot."""
    ssh = recorded(**{name: value for name, value in changes.items() if name != "units"})
    ssh["units"] |= changes["units"]
    return ssh


def on(port: int, **changes: Any) -> dict[str, Any]:
    """Debian 12 with this port of daemon and login."""
    ssh = recorded(**{"listening": [port], **changes})
    ssh["effective"] = ssh["effective"].replace("port 22\n", f"port {port}\n")
    ssh["login"] |= {"port": port}
    return ssh


@pytest.mark.parametrize(
    ("ssh", "files", "settings", "expected"),
    [
        (recorded(), {}, {}, []),
        (recorded(), {}, {"ports": [22]}, []),
        (recorded(), {}, {"ports": [22, 2222]}, ["sshd does not listen on [22, 2222]"]),
        (with_units(units=SOCKET_STATE), {}, {"ports": [22, 2222]}, ["ssh.socket does not listen on [22, 2222]"]),
        (recorded(), {WAITING: file("")}, {}, ["an earlier change waits for its confirmation"]),
        (
            recorded(effective=None, error="line 3"),
            {},
            {},
            ["sshd's configuration could not be determined: line 3"],
        ),
        (
            recorded(host_keys=recorded()["host_keys"][:1]),
            {},
            {},
            ["/etc/ssh/ssh_host_rsa_key is missing: an rsa host key"],
        ),
    ],
)
def test_what_is_pending_besides_files_is_named(
    ssh: dict[str, Any], files: dict[str, Any], settings: dict[str, Any], expected: list[str]
) -> None:
    reasons = list(plan(ssh, files=files, **settings).pending_reasons)
    assert reasons[: reasons.index(f"{DROP_IN} is missing")] == expected


@pytest.mark.parametrize(
    ("ssh", "settings", "named"),
    [
        (recorded(), {"ports": [22, 65535]}, []),
        (recorded(), {"ports": [22, 65536, 0, -1, 1]}, ["65536 is not", "0 is not", "-1 is not"]),
        (recorded(listening=[22, 38223]), {"ports": [22, 2222, 38223]}, ["38223 is in use"]),
        (recorded(selinux=True), {"ports": [22, 2222]}, ["tcp 2222"]),
        (on(2222, selinux=True), {"ports": [2222, 22]}, []),
        (on(2222), {"ports": [22]}, ["port 2222, which"]),
        (recorded(login=None), {"ports": [2222]}, []),
        # A socket decides about the port, whatever sshd's files set.
        (
            with_units(units={"ssh.socket": {**SOCKET, "listen": "[::]:40585"}}),
            {"ports": [22, 40585]},
            ["22 is in use"],
        ),
        (recorded(), {"least_rsa_bits": 1023}, ["1023 is not from 1024 to 16384"]),
        (recorded(), {"least_rsa_bits": 1024}, []),
        (recorded(), {"least_rsa_bits": 16384}, []),
        (recorded(), {"least_rsa_bits": 16385}, ["16385 is not from"]),
        (recorded(offered={**recorded()["offered"], "mac": ["hmac-md5"]}), {}, ["_macs: OpenSSH_9.2p1"]),
        (recorded(), {"ciphers": ["aes256-ctr", "a", "b"]}, ["_ciphers: a, b is not offered"]),
        (
            recorded(),
            {"admin_users": ["ghost"], "forwarding_users": ["who", "admin"]},
            ["account ghost", "account who"],
        ),
        (recorded(), {"allow_users": ["gh*st", "ghost@192.0.2.*", "admin"]}, []),
        (recorded(), {"allow_users": ["ghost"], "allow_groups": ["a b"]}, ["_allow_groups: 'a b'", "account ghost"]),
        (recorded(), {"trusted_networks": ["192.0.2.0/24", "2001:db8::/32", "a\nb"]}, ["_trusted_networks: 'a\\nb'"]),
    ],
)
def test_every_bad_setting_is_named_and_no_good_one(
    ssh: dict[str, Any], settings: dict[str, Any], named: list[str]
) -> None:
    refusals = plan(ssh, **settings).refusals
    assert [words in line for words, line in zip(named, refusals, strict=True)] == [True] * len(named), refusals


@pytest.mark.parametrize(
    ("units", "ports", "content", "restarted", "commands"),
    [
        ({}, [], None, ["ssh.service"], [["restart", "ssh.service"]]),
        ({}, [22], None, ["ssh.service"], [["restart", "ssh.service"]]),
        ({"ssh.service": ABSENT_UNIT}, [], None, ["sshd.service"], [["restart", "sshd.service"]]),
        (
            {"ssh.service": ABSENT_UNIT, "sshd.service": ABSENT_UNIT},
            [],
            None,
            ["ssh.service"],
            [["restart", "ssh.service"]],
        ),
        (SOCKET_STATE, [], None, ["ssh.service", "ssh.socket"], [["try-restart", "ssh.service"]]),
        (
            SOCKET_STATE,
            [22],
            "ListenStream=0.0.0.0:22\nListenStream=[::]:22\n",
            ["ssh.service", "ssh.socket"],
            [["stop", "ssh.socket", "ssh.service"], ["start", "ssh.socket"]],
        ),
    ],
)
def test_the_unit_that_listens_is_the_one_that_changes(
    units: dict[str, Any], ports: list[int], content: str | None, restarted: list[str], commands: list[list[str]]
) -> None:
    manifest = plan(with_units(units=units), ports=ports)
    texts = {file.path: file.content for file in manifest.files}
    first, second = (texts[path] for path in ssh_hardening.SOCKET_DROP_INS.values())
    assert second is None
    head = rendered("ssh_hardening", "ssh.socket.conf.j2", ports=[])
    assert head.endswith("[Socket]\nBindIPv6Only=ipv6-only\nListenStream=\n")
    assert first == (f"{head}{content}" if content else None)
    assert guarded(manifest).units == tuple(restarted)
    assert guarded(manifest).activate == tuple(("systemctl", *command) for command in (["daemon-reload"], *commands))


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_socket_that_loses_its_ports_is_restarted(state: str) -> None:
    """systemd keeps its sockets: without one of IPv4 a restart of sshd alone locks out, in a revert too."""
    files = {ssh_hardening.SOCKET_DROP_INS["ssh.socket"]: file("[Socket]\n")}
    commands = guarded(plan(with_units(units=SOCKET_STATE), files=files, state=state)).activate
    assert commands[1:] == (("systemctl", "stop", "ssh.socket", "ssh.service"), ("systemctl", "start", "ssh.socket"))


@pytest.mark.parametrize(
    ("listen", "effective", "ports", "noted"),
    [
        ("[::]:22", "port 22\nport 2200\n", [], True),
        ("[::]:22", "port 22\n", [], False),
        ("[::]:22", "port 2200\n", [22, 2200], False),
        ("", "port 2200\n", [], False),
        ("[::]:22", "usedns no\n", [], False),
    ],
)
@pytest.mark.parametrize("generator", ["absent", "file", "link"])
def test_a_port_that_the_socket_does_not_have_is_noted(
    listen: str, effective: str, ports: list[int], generator: str, *, noted: bool
) -> None:
    ssh = with_units(units={"ssh.socket": {**SOCKET, "listen": listen}}, effective=effective, listening=[22])
    ignored, unread = "which sshd ignores behind a socket", "which is not loaded yet (systemctl daemon-reload)"
    why = ignored if generator == "absent" else unread
    notes = plan(ssh, ports=ports, files={ssh_hardening.GENERATOR: {"kind": generator}}).notes
    assert [note for note in notes if " listens on " in note] == (
        [
            f"ssh.socket listens on [22] while sshd_config sets Port [22, 2200], {why}: set ssh_hardening_ports to the "
            "intended ports"
        ]
        if noted
        else []
    )


def test_weak_host_keys_and_users_who_cannot_log_in_any_more_are_noted() -> None:
    ssh = recorded()
    ssh["contents"] = {MAIN: ssh["contents"][MAIN]}
    ssh["host_keys"] = [ECDSA, ssh["host_keys"][0], WEAK_RSA]
    account = {**recorded()["accounts"][2], "keys": []}
    others: dict[str, dict[str, Any]] = {
        "first": {"uid": 1000},
        "later": {"uid": 1001},
        "daemon": {"uid": 999},
        "locked": {"password": "locked"},
        "keyed": {"keys": recorded()["accounts"][2]["keys"]},
    }
    ssh["accounts"] = [{**account, "name": name, **changes} for name, changes in others.items()]
    until = "is still offered: clients learn the new host keys for 30 days first"
    assert plan(ssh).notes[-4:] == (
        f"{ECDSA['path']} (ecdsa-sha2-nistp256) {until}",
        f"{WEAK_RSA['path']} (ssh-rsa of 2048 bits) {until}",
        "first has a password and no key, and cannot log in over SSH any more",
        "later has a password and no key, and cannot log in over SSH any more",
    )
    assert plan(ssh).commands[0].argv[2:7] == ("-t", "rsa", "-b", "4096", "-N")
    ssh["host_keys"] = []
    assert plan(ssh).commands[0].argv[2:5] == ("-t", "ed25519", "-N")


@pytest.mark.parametrize("text", ["{", "[]", '{"/etc/ssh/ssh_host_ed25519_key": 5}', '{"x": "soon"}', ""])
def test_good_host_keys_count_as_published_from_today_where_no_date_is_readable(text: str) -> None:
    ssh = recorded()
    today = context_of().today.isoformat()
    ssh["host_keys"] = [ssh["host_keys"][0], ECDSA]
    manifest = plan(ssh, texts={PUBLISHED: text})
    dates = json.loads(next(file.content or "" for file in manifest.files if file.path == PUBLISHED))
    assert dates == dict.fromkeys([ssh["host_keys"][0]["path"], "/etc/ssh/ssh_host_rsa_key"], today)


def test_who_logs_in_is_asked_for_once_and_what_each_would_meet_is_distinguished() -> None:
    ssh = recorded(weak_moduli=0)
    ssh["login"] = {"user": "admin", "address": "192.0.2.7", "port": 2200}
    users: dict[str, Any] = {"admin_users": ["operator", "admin", "root"]}
    body = plan(ssh, **users).questions["login"].body
    assert body["logins"] == [
        {"user": user, "address": "192.0.2.7", "port": 2200} for user in ("admin", "operator", "root")
    ]
    assert [file["path"] for file in body["files"]] == [DROP_IN, LAST, BANNER]
    assert plan(recorded(login=None), **users).questions["login"].body["logins"][0] == {
        "user": "operator",
        "address": "127.0.0.1",
        "port": 22,
    }
    answers = login(ssh)
    fine = answers["login"]["effective"]
    forced = fine.replace("forcecommand none", "forcecommand /bin/menu")
    answers["login"]["logins"] = {"admin": "", "operator": f"{forced}\ndenyusers operator", "root": forced}
    assert plan(ssh, answers=answers, **users).refusals == (
        "the login of this run, admin: sshd -T -C user=admin failed",
        "an admin user would be locked out: operator is in DenyUsers",
        "an admin user would be locked out: root may not log in (ssh_hardening_root)",
        "an admin user would be locked out: root has no key in authorized_keys",
    )
    answers["login"]["logins"] = dict.fromkeys(("admin", "operator"), forced)
    assert plan(ssh, answers=answers, admin_users=["operator"]).refusals == (
        "the login of this run would be locked out: a Match block forces the command /bin/menu on admin",
    )


@pytest.mark.parametrize(
    ("answer", "refusals"),
    [
        ({"unavailable": "no sshd -T"}, ()),
        ({"effective": "", "logins": []}, ("sshd's resulting configuration could not be determined",)),
        ({"effective": 5, "logins": {}}, ("sshd's resulting configuration could not be determined",)),
        ({"error": "line 3", "effective": "", "logins": {}}, ("sshd refuses the settings: line 3",)),
    ],
)
def test_an_answer_without_a_result_is_no_consent(answer: dict[str, Any], refusals: tuple[str, ...]) -> None:
    manifest = plan(recorded(weak_moduli=0), answers={"login": answer})
    assert manifest.refusals == refusals
    untested = "the settings could not be tested in advance: no sshd -T"
    assert (untested in manifest.notes) is ("unavailable" in answer)


def test_only_small_groups_of_whole_lines_go_and_the_first_text_is_kept() -> None:
    line = "2026 2 6 100 {} 2 ABC\n"
    stay = [line.format(3071), line.format("x"), "2026 2 6 100 2047\n", f"# {line.format(2047)}"]
    text = "".join([line.format(3070), *stay[:2], "2026 2 6 100 1 2\n", *stay[2:]])
    answers = {"moduli": {MODULI: text}}
    manifest = plan(recorded(), answers=answers, files={ssh_hardening.MODULI_BEFORE: file(text)})
    files = {file.path: file.content for file in manifest.files}
    assert files[MODULI] == "".join(stay)
    assert ssh_hardening.MODULI_BEFORE not in files
    first = plan(recorded())
    assert first.questions["moduli"].body == {"paths": [MODULI]}
    assert MODULI not in {file.path for file in first.files}
    assert "moduli" not in plan(recorded(weak_moduli=0), answers=answers).questions
    # What is there in the place of the earlier text is not a text of ours.
    folder = {ssh_hardening.MODULI_BEFORE: {"kind": "folder"}}
    assert ssh_hardening.MODULI_BEFORE in {file.path for file in plan(recorded(), answers=answers, files=folder).files}


def test_optional_files_are_there_where_they_are_requested() -> None:
    ssh = recorded()
    files = {file.path: file.content for file in plan(ssh).files}
    assert (files[BANNER], files[ssh_hardening.CLIENT]) == (None, None)
    assert MAIN not in files
    more = {file.path: file.content for file in plan(ssh, banner="ours\n\n", client=True, add_include=True).files}
    assert more[BANNER] == "ours\n"
    assert "Host *" in (more[ssh_hardening.CLIENT] or "")
    assert MAIN not in more
    del ssh["contents"][MAIN]
    bare = {file.path: file.content for file in plan(ssh, add_include=True).files}
    assert bare[MAIN] == f"{ssh_hardening.INCLUDE}\n"


def test_absent_asks_for_the_earlier_groups_and_moves_a_port_back() -> None:
    before = {ssh_hardening.MODULI_BEFORE: file("old")}
    first = plan(recorded(), state="absent", files=before)
    assert first.questions["moduli"].body == {"paths": [ssh_hardening.MODULI_BEFORE]}
    assert MODULI not in {file.path for file in first.files}
    manifest = plan(recorded(), state="absent", files=before, answers={"moduli": {ssh_hardening.MODULI_BEFORE: "old"}})
    assert {file.path: file.content for file in manifest.files}[ssh_hardening.MODULI_BEFORE] is None
    assert plan(recorded(), state="absent").questions == {}
    ssh, path = with_units(units=SOCKET_STATE), ssh_hardening.SOCKET_DROP_INS["ssh.socket"]
    assert ("systemctl", "try-restart", "ssh.service") in guarded(plan(ssh, state="absent")).activate
    moved = guarded(plan(ssh, state="absent", files={path: file("")})).activate
    assert moved[1:] == (("systemctl", "stop", "ssh.socket", "ssh.service"), ("systemctl", "start", "ssh.socket"))
    waits = plan(recorded(), state="absent", files={WAITING: file("")})
    assert waits.pending_reasons == ("an earlier change waits for its confirmation",)


def test_a_daemon_that_answers_or_has_a_unit_is_there() -> None:
    nothing = dict.fromkeys(recorded()["units"], ABSENT_UNIT)
    assert plan(recorded(units=nothing)).refusals == ()
    assert plan(recorded(effective=None, error="line 3")).refusals == ()
    assert ssh_hardening.ROLE.plan(node(), settings_of("ssh_hardening", state="present"), context_of()).refusals


def test_settings_of_the_site_replace_extend_and_remove_those_of_the_role() -> None:
    manifest = plan(recorded(), options={"loglevel": "INFO", "X11Forwarding": True, "UseDNS": None, "PrintMotd": "no"})
    assert not manifest.refusals
    values = {name: setting(manifest, name) for name in ("LogLevel", "X11Forwarding", "UseDNS", "PrintMotd")}
    assert values == {"LogLevel": ["INFO"], "X11Forwarding": ["yes"], "UseDNS": [], "PrintMotd": ["no"]}
    assert setting(manifest, "PermitRootLogin") == ["no"]
    # Users with port forwarding have a block at the end: settings for all come before it.
    text = drop_in(plan(recorded(), options={"PrintMotd": "no"}, forwarding_users=["admin"]))
    assert text.index("PrintMotd") < text.index("Match User")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"Port": 2222}, "ssh_hardening_ports"),
        ({"hostkey": "/x"}, "host keys"),
        ({"Match": "all"}, "sshd_config.d"),
        ({"Include": "/x"}, "sshd_config.d"),
        ({"Log Level": "INFO"}, "'Log Level' is not the name"),
        ({"Banner": "x\nMatch all"}, "value of Banner is not one line"),
        ({"Banner": " "}, "null leaves it"),
        ({"UseDNS": "no", "usedns": "yes"}, "usedns is listed twice"),
    ],
)
def test_a_bad_setting_of_the_site_is_refused(options: dict[str, Any], named: str) -> None:
    (line,) = plan(recorded(), options=options).refusals
    assert line.startswith("ssh_hardening_options: ")
    assert named in line


@given(st.dictionaries(st.text(max_size=20) | st.sampled_from(["LogLevel", "Match", "Port\n"]), VALUES, max_size=4))
@settings(max_examples=effort(60, 5000), deadline=None)
def test_a_setting_of_the_site_is_one_line_or_refused(options: dict[str, Any]) -> None:
    if list(bad_options(options)):
        return
    rows = with_options([("LogLevel", "VERBOSE"), ("UseDNS", "no")], options)
    text = rendered("ssh_hardening", "sshd.conf.j2", rows=rows, forwarding_users=())
    assert len(text.splitlines()) == 1 + len(rows)
    assert not [
        line for line in text.splitlines() if line.lower().split()[0] in ("match", "include", "port", "hostkey")
    ]


def test_a_value_that_sshd_prints_in_another_form_has_effect() -> None:
    ssh = recorded()
    answers = login(ssh)
    effective = answers["login"]["effective"].replace("logingracetime 30", "logingracetime 120")
    assert "logingracetime 120" in effective
    answers = login(ssh, effective)
    assert not plan(ssh, answers=answers, options={"LoginGraceTime": "2m"}).refusals
    first = {**ssh["contents"], MAIN: f"LoginGraceTime 120\n{ssh['contents'][MAIN]}"}
    (line,) = plan({**ssh, "contents": first}, answers=answers, options={"LoginGraceTime": "1m"}).refusals
    assert "LoginGraceTime 1m has no effect" in line
    # The proof of a login holds for them as for the role's own.
    closed = login(ssh, effective.replace("pubkeyauthentication yes", "pubkeyauthentication no"))
    refused = plan(ssh, answers=closed, options={"LoginGraceTime": "2m", "PubkeyAuthentication": False}).refusals
    assert any("would be locked out" in refusal for refusal in refused)
