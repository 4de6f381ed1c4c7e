"""Which key sshd accepts, and which line of its configuration counts."""

from typing import Any

import pytest

from gpunode.provisioning.ssh_login import (
    MAIN,
    accepted,
    contradictions,
    forced_command,
    has_include,
    obstacles,
    overridden,
    setting_lines,
)
from gpunode.provisioning.state import Account, PublicKey

OWN = "/etc/ssh/sshd_config.d/10-own.conf"
MODERN = {"pubkeyacceptedalgorithms": ("ssh-ed25519,rsa-sha2-512",), "requiredrsasize": ("3072",)}


@pytest.mark.parametrize(
    ("kind", "bits", "expected"),
    [
        ("ssh-rsa", 3072, True),
        ("ssh-rsa", 3071, False),
        ("ssh-ed25519", 256, True),
        ("ecdsa-sha2-nistp256", 256, False),
        ("ssh-ed448", 0, False),
    ],
)
def test_a_key_needs_an_accepted_algorithm_and_enough_bits(kind: str, bits: int, expected: bool) -> None:
    assert accepted(PublicKey(type=kind, bits=bits, blob="x"), MODERN) is expected


@pytest.mark.parametrize(
    ("line", "inside"),
    [
        ("Match Address 10.0.0.0/8", True),
        ("Match user eve", True),
        ("match all", False),
        ("Match ALL", False),
        ("# Match user eve", False),
        ("", False),
    ],
)
def test_a_match_block_begins_with_a_condition(line: str, inside: bool) -> None:
    assert list(setting_lines({"x": f"{line}\nPort=22\n"})) == [("x", 2, "port", "22", inside)]


def test_the_first_other_line_without_a_condition_is_named_and_what_it_sets() -> None:
    documents = {
        OWN: "AllowTcpForwarding no\n",
        "/a": "AddressFamily any\nX11Forwarding yes\nMatch user eve\nAllowTcpForwarding all\n",
        "/b": "AllowTcpForwarding local\n",
    }
    rows = [("AllowTcpForwarding", "no")]
    assert list(contradictions(rows, "allowtcpforwarding local\nallowtcpforwarding all\n", documents, OWN)) == [
        "AllowTcpForwarding no has no effect: /b line 1 is read first and sets local"
    ]
    alone = {OWN: documents[OWN]}
    (line,) = contradictions(rows, "allowtcpforwarding local\n", alone, OWN)
    assert "another file is read first" in line


def test_settings_without_a_value_of_their_own_are_no_contradiction() -> None:
    """A list in another order, sshd's other name for a value, one that is added to, and one that it does not know."""
    documents = {
        OWN: "Banner none\n",
        "/etc/ssh/a": "X11Forwarding yes\nUseDNS yes\nBanner /etc/issue\n",
        "/etc/ssh/z": "Banner /etc/motd\n",
    }
    rows = [
        ("Port", "22"),
        ("Macs", "hmac-sha2-256,hmac-sha2-512"),
        ("UseDNS", "NO"),
        ("PermitRootLogin", "prohibit-password"),
        ("NewInSshd", "yes"),
    ]
    effective = (
        "port 2222\nmacs hmac-sha2-512,hmac-sha2-256\nusedns no\nusedns yes\npermitrootlogin without-password\nbanner\n"
    )
    assert list(contradictions(rows, effective, documents, OWN)) == []
    assert list(contradictions([*rows, ("Banner", "none")], effective, documents, OWN)) == [
        "Banner none has no effect: /etc/ssh/a line 3 is read first and sets nothing"
    ]
    assert len([*contradictions([("PermitRootLogin", "no")], effective, documents, OWN)]) == 1
    assert len([*contradictions([("Macs", "hmac-sha2-512")], effective, documents, OWN)]) == 1
    assert len([*contradictions([("X11Forwarding", "no")], "x11forwarding yes\n", documents, OWN)]) == 1


def test_lines_with_another_value_are_named_and_whether_they_still_count() -> None:
    copied = "".join(list(OWN))  # as from the node's answer: another object
    documents = {
        copied: "Banner /old\n",
        "/etc/ssh/a": "Port 23\nSetEnv=A=b\nBanner /a\nUseDNS No\n",
        "/etc/ssh/z": "UseDNS yes\nMatch user eve\nUseDNS delayed\n",
    }
    assert list(overridden([("Port", "22"), ("Banner", "none"), ("UseDNS", "no")], documents, OWN)) == [
        "/etc/ssh/a line 3: banner /a has no effect any more, the role sets none",
        "/etc/ssh/z line 1: usedns yes has no effect any more, the role sets no",
        "/etc/ssh/z line 3: usedns delayed remains effective inside its Match block",
    ]
    assert ("/etc/ssh/a", 2, "setenv", "A=b", False) in setting_lines(documents)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (MAIN, "Port 22\nInclude /etc/ssh/sshd_config.d/*.conf\n", True),
        (MAIN, "Match user eve\nInclude /etc/ssh/sshd_config.d/*.conf\n", False),
        (MAIN, "Include /etc/ssh/other/*.conf\n", False),
        (MAIN, "Banner /etc/ssh/sshd_config.d/banner\n", False),
        ("/etc/ssh/moved", "Include /etc/ssh/sshd_config.d/*.conf\n", False),
        ("/etc/ssh/sshd_config.d/1.conf", "Include /etc/ssh/sshd_config.d/*.conf\n", False),
    ],
)
def test_drop_ins_are_read_through_a_line_of_the_main_file(path: str, text: str, expected: bool) -> None:
    assert has_include({path: text}) is expected


@pytest.mark.parametrize(
    ("effective", "command"),
    [("", None), ("forcecommand none\n", None), ("forcecommand /bin/menu -x\nforcecommand none\n", "/bin/menu -x")],
)
def test_a_forced_command_is_the_first_that_is_set(effective: str, command: str | None) -> None:
    assert forced_command(effective) == command


KEY = PublicKey(type="ssh-ed25519", bits=256, blob="x")
ADA = Account.model_validate(
    {
        "name": "ada",
        "uid": 1000,
        "group": "staff",
        "home": "/home/ada",
        "shell": "/bin/bash",
        "groups": ("users", "ops"),
        "password": "none",
        "keys": (KEY,),
    }
)
EFFECTIVE = {
    "permitrootlogin": "no",
    "pubkeyauthentication": "yes",
    "authenticationmethods": "publickey",
    "pubkeyacceptedalgorithms": "ssh-ed25519,rsa-sha2-256",
    "requiredrsasize": "3072",
    "authorizedkeyscommand": "none",
    "trustedusercakeys": "none",
}
SMALL = PublicKey(type="ssh-rsa", bits=2048, blob="x")
SECURITY_KEY = PublicKey(type="sk-ssh-ed25519@openssh.com", bits=0, blob="x")
NO_ROOT = "root may not log in (ssh_hardening_root)"


@pytest.mark.parametrize(
    ("account", "settings", "expected"),
    [
        ({}, {}, []),
        ({"shell": "/usr/sbin/nologin"}, {}, ["ada has the shell /usr/sbin/nologin"]),
        ({"shell": "/bin/false"}, {}, ["ada has the shell /bin/false"]),
        ({}, {"allowusers": "eve\nallowusers a*"}, []),
        ({}, {"allowusers": "eve ada@10.0.0.*"}, []),
        ({}, {"allowusers": "ada@192.0.2.0/24"}, []),  # not compared here: sshd does
        ({}, {"allowusers": "eve@10.0.0.5 ada@10.1.*"}, ["ada is not in AllowUsers (eve@10.0.0.5 ada@10.1.*)"]),
        ({}, {"denyusers": "eve ada@10.1.*"}, []),
        ({}, {"denyusers": "eve ada"}, ["ada is in DenyUsers"]),
        ({}, {"allowgroups": "wheel op*"}, []),
        ({}, {"allowgroups": "staff"}, []),
        ({}, {"allowgroups": "wheel"}, ["ada is in no group of AllowGroups (wheel)"]),
        ({}, {"denygroups": "wheel"}, []),
        ({}, {"denygroups": "wheel users"}, ["ada is in a group of DenyGroups"]),
        *(({"uid": 0}, {"permitrootlogin": value}, []) for value in ("yes", "without-password", "prohibit-password")),
        ({"uid": 0}, {"permitrootlogin": "forced-commands-only"}, [NO_ROOT]),
        ({"uid": 0}, {"permitrootlogin": "no\npermitrootlogin yes"}, [NO_ROOT]),
        ({"uid": 0}, {"permitrootlogin": None}, [NO_ROOT]),
        ({}, {"pubkeyauthentication": "no"}, ["PubkeyAuthentication is off for ada"]),
        ({}, {"authenticationmethods": None}, []),
        ({}, {"authenticationmethods": "any"}, []),
        ({}, {"authenticationmethods": "publickey,password publickey"}, []),
        (
            {},
            {"authenticationmethods": "publickey,password hostbased"},
            ["ada needs more than a key (AuthenticationMethods publickey,password hostbased)"],
        ),
        ({"keys": ()}, {}, ["ada has no key in authorized_keys"]),
        ({"keys": ()}, {"authorizedkeyscommand": "/bin/keys\nauthorizedkeyscommand none"}, []),
        ({"keys": ()}, {"trustedusercakeys": "/etc/ssh/ca.pub", "authorizedkeyscommand": None}, []),
        ({"keys_problem": "/home/ada can be written by others"}, {}, ["/home/ada can be written by others"]),
        ({"keys": (SMALL, KEY)}, {}, []),
        ({"keys": (SMALL,)}, {"requiredrsasize": "none"}, []),
        ({"keys": (SMALL,)}, {"requiredrsasize": None}, []),
        ({"keys": (SMALL,)}, {"requiredrsasize": "1024\nrequiredrsasize 4096"}, []),
        (
            {"keys": (SMALL, SMALL, SECURITY_KEY)},
            {},
            ["sshd would accept no key of ada (sk-ssh-ed25519@openssh.com, ssh-rsa of 2048 bits)"],
        ),
    ],
)
def test_what_keeps_a_user_out_is_named(
    account: dict[str, Any], settings: dict[str, str | None], expected: list[str]
) -> None:
    text = "".join(f"{name} {value}\n" for name, value in {**EFFECTIVE, **settings}.items() if value is not None)
    assert list(obstacles(ADA.model_copy(update=account), "ada", "10.0.0.5", text)) == expected


def test_a_user_without_an_account_is_kept_out_by_that_alone() -> None:
    assert list(obstacles(None, "ada", "10.0.0.5", "pubkeyauthentication no\n")) == [
        "the node has no account ada with a login shell"
    ]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("passwordauthentication yes", []),
        ("kbdinteractiveauthentication yes\nauthenticationmethods keyboard-interactive", []),
        ("gssapiauthentication yes\nauthenticationmethods gssapi-with-mic", []),
        ("passwordauthentication yes\nauthenticationmethods publickey", ["key"]),
        ("passwordauthentication no\nkbdinteractiveauthentication no", ["key"]),
        ("passwordauthentication yes\nusepam no", ["key"]),
        ("passwordauthentication no\nauthorizedkeyscommand /usr/bin/sss_ssh_authorizedkeys", []),
    ],
)
def test_a_user_of_a_directory_may_log_in_without_a_key_in_a_file(lines: str, expected: list[str]) -> None:
    """Keys of the directory, or its password where sshd asks PAM for it."""
    lena = ADA.model_copy(update={"name": "lena", "password": "unknown", "keys": ()})
    pam = "" if "usepam" in lines else "usepam yes\n"
    reasons = list(obstacles(lena, "lena", "10.0.0.5", f"pubkeyauthentication yes\n{pam}{lines}\n"))
    assert [word for reason in reasons for word in expected if word in reason] == expected
    assert bool(reasons) is bool(expected)
    # A local user with a password is judged by the keys: the controller logs in with one.
    local = lena.model_copy(update={"password": "set"})
    command = "authorizedkeyscommand" in lines
    assert (
        bool(list(obstacles(local, "lena", "10.0.0.5", f"{pam}passwordauthentication yes\n{lines}\n"))) is not command
    )
