"""Options and configuration files as OpenSSH resolves them, and the refusal of what cannot be honoured."""

import shutil
from pathlib import Path

import paramiko
import pytest

from gpunode.errors import UsageError
from gpunode.fleet.ssh_config import HONOURED, NEWER_KEX, WITHOUT_EFFECT, SshSettings, home, resolve, split_destination

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh: apt-get install openssh-client")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An empty configuration file in place of the user's and the system's."""
    path = tmp_path / "ssh_config"
    path.write_text("")
    return path


def with_words(config: Path, *words: str, alias: str = "gpu1") -> SshSettings:
    """What comes of these arguments."""
    return resolve(alias, [("ansible_ssh_args", ["-F", str(config)]), ("ansible_ssh_common_args", list(words))])


def test_nothing_reported(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/elsewhere")  # which ssh does not look at
    settings = with_words(config)
    assert (settings.hostname, settings.port, settings.strict_host_key_checking) == ("gpu1", 22, "ask")
    assert settings.jumps == ()
    assert settings.proxy_command is None
    assert not {"3des-cbc", "aes128-cbc"} & set(dict(settings.algorithms)["ciphers"])
    assert "hmac-md5" not in dict(settings.algorithms)["macs"]
    assert settings.least_rsa_bits >= 1024
    assert f"{home()}/.ssh/id_ed25519" in settings.identity_files
    assert f"{home()}/.ssh/known_hosts" in settings.known_hosts_files
    assert "/etc/ssh/ssh_known_hosts" in settings.known_hosts_files


def test_arguments(config: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("any")
    words = f"-p 2222 -l admin -i {key} -o IdentitiesOnly=yes -o UserKnownHostsFile=/lab/kh -o HostKeyAlias=rack7"
    words += " -o StrictHostKeyChecking=accept-new -o ConnectTimeout=7 -4 -o GlobalKnownHostsFile=none"
    settings = with_words(config, *words.split())
    assert (settings.port, settings.user, settings.identity_files) == (2222, "admin", (str(key),))
    assert settings.identities_only
    assert settings.known_hosts_files == ("/lab/kh",)
    assert (settings.host_key_alias, settings.strict_host_key_checking) == ("rack7", "accept-new")
    assert (settings.connect_timeout_s, settings.address_family) == (7.0, "inet")


def test_the_first_of_an_option_counts_as_in_ssh(config: Path) -> None:
    assert with_words(config, "-p", "1111", "-o", "Port=2222").port == 1111


def test_a_configuration_file(config: Path, tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host gpu*\n  User inner\n  Port 2200\n")
    config.write_text(
        f"Include {tmp_path}/more\nHost gpu1\n  HostName %h.lab\nMatch host x\n  User no\nHost *\n  User o\n"
    )
    settings = with_words(config, alias="gpu1")
    assert (settings.hostname, settings.user, settings.port) == ("gpu1.lab", "inner", 2200)


def test_jump_hosts_with_settings_of_their_own(config: Path) -> None:
    config.write_text("Host bastion\n  HostName 192.0.2.1\n  User jumper\n  Port 2022\n  IdentityFile /keys/b\n")
    settings = with_words(config, "-o", "ProxyJump=ops@first:2211,bastion", "-i", "/keys/a", "-l", "admin")
    first, second = settings.jumps
    assert (first.hostname, first.user, first.port, first.jumps) == ("first", "ops", 2211, ())
    assert (second.hostname, second.user, second.port) == ("192.0.2.1", "jumper", 2022)
    # As with ssh: options of the target are none of the jump host's.
    assert second.identity_files == ("/keys/b",)


def test_a_jump_host_behind_a_jump_host_of_the_file(config: Path) -> None:
    config.write_text("Host gpu*\n  ProxyJump inner\nHost inner\n  ProxyJump outer\n")
    assert [hop.hostname for hop in with_words(config).jumps] == ["outer", "inner"]


def test_a_loop_of_jump_hosts_is_refused(config: Path) -> None:
    config.write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(UsageError, match="loop of ProxyJump"):
        with_words(config, alias="a")


def test_a_proxy_command_gets_its_tokens(config: Path) -> None:
    settings = with_words(config, "-p", "2222", "-o", "ProxyCommand=nc -x '%r' %h %p %%")
    assert settings.proxy_command == f"nc -x '{settings.user}' gpu1 2222 %"
    with pytest.raises(UsageError, match=r"host gpu1: .*token %C"):
        with_words(config, "-o", "ProxyCommand=nc %C")


def test_algorithms_that_the_user_chose(config: Path) -> None:
    config.write_text("Ciphers aes256-ctr,aes128-ctr\nKexAlgorithms curve25519-sha256\n")
    chosen = dict(with_words(config).algorithms)
    assert (chosen["ciphers"], chosen["kexalgorithms"]) == (("aes256-ctr", "aes128-ctr"), ("curve25519-sha256",))


def test_a_node_that_takes_quantum_safe_key_exchanges_alone_is_reached_with_an_older_ssh(config: Path) -> None:
    offered = dict(with_words(config).algorithms)["kexalgorithms"]
    assert set(NEWER_KEX) <= set(offered)
    assert set(offered) & set(vars(paramiko.Transport)["_preferred_kex"]) >= set(NEWER_KEX)
    config.write_text("KexAlgorithms curve25519-sha256\n")
    assert dict(with_words(config).algorithms)["kexalgorithms"] == ("curve25519-sha256",)


def test_ways_to_log_in_that_are_switched_off(config: Path) -> None:
    assert not with_words(config, "-o", "PasswordAuthentication=no").password_allowed
    assert not with_words(config, "-o", "PreferredAuthentications=publickey").password_allowed
    assert not with_words(config, "-o", "PubkeyAuthentication=no").public_key_allowed
    assert with_words(config, "-o", "IdentityAgent=none").identity_agent == "none"


def test_what_is_only_about_speed_or_a_terminal_is_accepted(config: Path) -> None:
    words = "-C -q -A -o ControlMaster=auto -o ControlPersist=60s -o ControlPath=/tmp/%C -o ServerAliveInterval=15"
    words += (
        " -o Compression=yes -o LogLevel=ERROR -o SendEnv=LANG -o GSSAPIAuthentication=yes -L 1:b:2 -o TCPKeepAlive=no"
    )
    assert with_words(config, *words.split()).hostname == "gpu1"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("BindAddress=192.0.2.9", "bindaddress"),
        ("LocalCommand=date", "localcommand"),
        ("PermitLocalCommand=yes", "permitlocalcommand"),
        ("KnownHostsCommand=/bin/k %H", "knownhostscommand"),
        ("PKCS11Provider=/lib/p.so", "pkcs11provider"),
        ("CertificateFile=/c", "certificatefile"),
        ("RevokedHostKeys=/r", "revokedhostkeys"),
        ("SetEnv=A=b", "setenv"),
        ("RemoteCommand=id", "remotecommand"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(config: Path, option: str, named: str) -> None:
    with pytest.raises(UsageError, match=f"host gpu1: .*SSH option {named} .*ansible_ssh_common_args"):
        with_words(config, "-o", option)
    key, _, value = option.partition("=")
    config.write_text(f"{key} {value}\n")
    with pytest.raises(UsageError, match=f"host gpu1: .*SSH option {named}"):
        with_words(config)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["-o", "Foo=1"], "[Bb]ad configuration option: foo"),
        (["-z"], "unknown option -- z|illegal option -- z"),
        (["-p", "abc"], "Bad port 'abc'"),
        (["stray"], "stray"),
        (["-o", "StrictHostKeyChecking=maybe"], "maybe"),
    ],
)
def test_what_ssh_does_not_accept_is_reported_with_its_place(config: Path, words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=f"^host gpu1: .*ansible_ssh_common_args.*({complaint})|{complaint}") as info:
        with_words(config, *words)
    assert "ansible_ssh_common_args" in str(info.value)
    assert "\n" not in str(info.value)


def test_the_name_in_messages_is_the_inventorys() -> None:
    with pytest.raises(UsageError, match=r"^host node-a: "):
        resolve("192.0.2.1", [("ansible_ssh_args", ["-o", "Foo=1"])], "node-a")


def test_no_option_is_both_honoured_and_ignored() -> None:
    assert not HONOURED & WITHOUT_EFFECT


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpu1", (None, "gpu1", None)),
        ("root@gpu1", ("root", "gpu1", None)),
        ("gpu1:2222", (None, "gpu1", 2222)),
        ("a@b@gpu1:22", ("a@b", "gpu1", 22)),
        ("[fe80::1]:22", (None, "fe80::1", 22)),
        ("root@[::1]", ("root", "::1", None)),
        ("fe80::1", (None, "fe80::1", None)),
        ("ssh://root@gpu1:22/", ("root", "gpu1", 22)),
    ],
)
def test_destinations(text: str, parts: tuple[str | None, str, int | None]) -> None:
    assert split_destination(text) == parts


@pytest.mark.parametrize("text", ["", "@gpu1", "gpu1:", "gpu1:x", "gpu1:0", "gpu1:70000", "-oProxyCommand=id", "a b"])
def test_what_is_no_destination_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        split_destination(text)
