"""The settings of a hardened SSH daemon, by the algorithms of the installed OpenSSH."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gpunode.provisioning.role import Settings, Value, option
from gpunode.provisioning.ssh_login import MAIN, setting_lines
from gpunode.provisioning.state import HostKey, SshState

# The lists of ssh-audit's guides for Debian 12 and 13, in their order. The daemon's algorithms decide between them: if
# it supports mlkem768x25519-sha256, only key exchanges that resist quantum computers stay.
QUANTUM_SAFE_KEX = ("mlkem768x25519-sha256", "sntrup761x25519-sha512", "sntrup761x25519-sha512@openssh.com")
CLASSIC_KEX = (
    "curve25519-sha256",
    "curve25519-sha256@libssh.org",
    "diffie-hellman-group16-sha512",
    "diffie-hellman-group18-sha512",
    "diffie-hellman-group-exchange-sha256",
)
CIPHERS = (
    "chacha20-poly1305@openssh.com",
    "aes256-gcm@openssh.com",
    "aes256-ctr",
    "aes192-ctr",
    "aes128-gcm@openssh.com",
    "aes128-ctr",
)
MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "umac-128-etm@openssh.com")
MACS_QUANTUM_SAFE = ("hmac-sha2-512-etm@openssh.com", "hmac-sha2-256-etm@openssh.com", "umac-128-etm@openssh.com")
SIGNATURES = (
    "sk-ssh-ed25519-cert-v01@openssh.com",
    "ssh-ed25519-cert-v01@openssh.com",
    "rsa-sha2-512-cert-v01@openssh.com",
    "rsa-sha2-256-cert-v01@openssh.com",
    "sk-ssh-ed25519@openssh.com",
    "ssh-ed25519",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
CA_SIGNATURES = ("sk-ssh-ed25519@openssh.com", "ssh-ed25519", "rsa-sha2-512", "rsa-sha2-256")
# Users' hardware keys of other vendors and users' clients have these; host keys of this kind are retired.
USER_SIGNATURES = (
    *SIGNATURES,
    "sk-ecdsa-sha2-nistp256@openssh.com",
    "ecdsa-sha2-nistp521",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp256",
)
LEAST_RSA_BITS = 3072
RSA_BITS = 4096
ED25519_PATH, RSA_PATH, NEW_RSA_PATH = (f"/etc/ssh/ssh_host_{name}_key" for name in ("ed25519", "rsa", "rsa4096"))
DROP_IN = "/etc/ssh/sshd_config.d/00-gpunode.conf"
LAST = "/etc/ssh/sshd_config.d/zz-gpunode.conf"
"""Host keys that have to follow those of other drop-ins: of HostKey every line counts, in the order of the files."""
OVERRIDES = {"kex": "kex", "ciphers": "cipher", "macs": "mac"}
"""Settings of the role that replace a list, to the kind of ``ssh -Q`` that has to list each of its values."""


class SshHardeningSettings(Settings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep", "V(keep): not changed. V(present): hardened. V(absent): the role's settings are removed."
    )
    admin_users: tuple[str, ...] = option(
        (),
        "Users who must be able to log in afterwards, with a key that the new settings accept; the login user of this "
        "run is always checked.",
    )
    allow_users: tuple[str, ...] = option(
        (), "Users or patterns that may log in (AllowUsers). Empty: all users with a key."
    )
    allow_groups: tuple[str, ...] = option((), "Groups or patterns with login permission (AllowGroups).")
    root: Literal["never", "keys"] = option("never", "Root's login: V(never), or V(keys) (with a key alone).")
    ports: tuple[int, ...] = option((), "Ports of the daemon or its socket. Empty: not changed.")
    forwarding_users: tuple[str, ...] = option((), "Users who may forward ports and sockets.")
    jump_host: bool = option(
        False, "This node is a jump host: all users may open connections through it (C(ProxyJump))."
    )
    trusted_networks: tuple[str, ...] = option(
        (),
        "Addresses or networks that OpenSSH 9.8 and later never penalizes for failed logins, such as the controller's.",
    )
    post_quantum: Literal["auto", "only", "prefer"] = option(
        "auto",
        "Key exchanges that resist quantum computers: V(auto) (alone where mlkem768x25519-sha256 is offered), V(only), "
        "or V(prefer) (first).",
    )
    kex: tuple[str, ...] = option((), "Key exchanges instead of the role's list.")
    ciphers: tuple[str, ...] = option((), "Ciphers instead of the role's list.")
    macs: tuple[str, ...] = option((), "Message authentication codes instead of the role's list.")
    least_rsa_bits: int = option(2048, "Minimum size of a user's RSA key.")
    max_auth_tries: int = option(6, "Keys that a connection may try: agents offer each of theirs.")
    max_startups: str = option(
        "30:50:200",
        "Connections before login, START:RATE:FULL of MaxStartups. A fleet's controller opens many at once.",
    )
    banner: str = option("", "Text that is shown before the login. Empty: none.")
    options: dict[str, Value] = option(
        {},
        "Settings of sshd that replace or extend the role's, such as { LogLevel: INFO, X11Forwarding: yes }; V(null) "
        "leaves one to other files and sshd's default. They are tested like the role's own.",
    )
    retire_days: int = option(
        30,
        "Days for which weak host keys are kept in addition to the new ones, so that clients learn the new ones "
        "(UpdateHostKeys).",
    )
    client: bool = option(
        False,
        "Deploy settings for SSH clients on the node too: the same algorithms, hashed known_hosts, UpdateHostKeys.",
    )
    add_include: bool = option(
        False, "Write C(Include /etc/ssh/sshd_config.d/*.conf) as the first line of a sshd_config that lacks it."
    )
    revert_s: int = option(
        60,
        "Seconds within which a new login must confirm the settings before the node restores the old ones. V(0): "
        "never, for image builds.",
    )


@dataclass(frozen=True, slots=True)
class DaemonHostKeys:
    """The host keys of the daemon in the target state."""

    served: tuple[str, ...]
    make: tuple[tuple[str, str], ...]
    """(path, type) of keys to generate."""
    weak: tuple[HostKey, ...]
    """Keys that are still offered, because the new ones are not known everywhere yet."""
    algorithms: tuple[str, ...]


def chosen(order: Iterable[str], offered: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``order`` that are in ``offered``, in their order."""
    available = set(offered)
    return tuple(name for name in order if name in available)


def algorithms(ssh: SshState, settings: SshHardeningSettings) -> dict[str, tuple[str, ...]]:
    """Return KexAlgorithms, Ciphers and MACs."""
    kex = ssh.offered.get("kex", ())
    quantum_safe = "mlkem768x25519-sha256" in kex
    only = {"auto": quantum_safe, "only": True, "prefer": False}[settings.post_quantum]
    lists = {
        "kex": chosen((*QUANTUM_SAFE_KEX, *(() if only else CLASSIC_KEX)), kex),
        "ciphers": chosen(CIPHERS, ssh.offered.get("cipher", ())),
        "macs": chosen(MACS_QUANTUM_SAFE if quantum_safe else MACS, ssh.offered.get("mac", ())),
    }
    return {name: getattr(settings, name) or default for name, default in lists.items()}


def is_weak(key: HostKey) -> bool:
    """Return whether a host key is of a retired kind."""
    return key.type not in ("ssh-ed25519", "ssh-rsa") or (key.type == "ssh-rsa" and key.bits < LEAST_RSA_BITS)


def host_keys(ssh: SshState, days_published: int | None, retire_days: int) -> DaemonHostKeys:
    """Return which host keys to offer; weak ones until the good ones were published for ``retire_days``."""
    good = {key.type: key.path for key in ssh.host_keys if not is_weak(key)}
    paths = {key.path for key in ssh.host_keys}
    make = []
    if "ssh-ed25519" not in good:
        make.append((ED25519_PATH, "ed25519"))
    if "ssh-rsa" not in good:
        make.append((NEW_RSA_PATH if RSA_PATH in paths else RSA_PATH, "rsa"))
    names = {kind: path for path, kind in make}
    ed25519, rsa = good.get("ssh-ed25519") or names["ed25519"], good.get("ssh-rsa") or names["rsa"]
    retired = days_published is not None and days_published >= retire_days
    # Only keys of types that the daemon can offer are known to clients.
    weak = (
        ()
        if retired
        else tuple(key for key in ssh.host_keys if is_weak(key) and key.type.startswith(("ec", "ssh-rsa")))
    )
    extra = [key.type for key in weak if key.type != "ssh-rsa"]
    # Of two keys of one type the daemon signs with the first: with the one that clients know.
    order = (ed25519, *(key.path for key in weak), rsa)
    return DaemonHostKeys(order, tuple(make), weak, (*chosen(SIGNATURES, ssh.offered.get("key-sig", ())), *extra))


def foreign_host_keys(ssh: SshState) -> tuple[str, ...]:
    """Return the host keys that other files name, in sshd's order: drop-ins, then the file that includes them."""
    lines = [
        (path, value)
        for path, _, name, value, matching in setting_lines(ssh.contents)
        if name == "hostkey" and not matching and path not in (DROP_IN, LAST)
    ]
    return tuple(dict.fromkeys(value for _, value in sorted(lines, key=lambda line: (line[0] == MAIN, line[0]))))


def placed_host_keys(ssh: SshState, keys: DaemonHostKeys) -> tuple[list[str], list[str]]:
    """Return the host keys of the first and of the last drop-in, without those that other files name.

    A key that is listed twice is offered twice, so another file's line keeps its place, and the rest goes around it.
    """
    foreign = foreign_host_keys(ssh)
    positions = [number for number, path in enumerate(keys.served) if path in foreign]
    first = min(positions, default=len(keys.served))
    own_keys = [(number, path) for number, path in enumerate(keys.served) if path not in foreign]
    return [path for number, path in own_keys if number < first], [path for number, path in own_keys if number > first]


def daemon_settings(ssh: SshState, settings: SshHardeningSettings, keys: DaemonHostKeys) -> list[tuple[str, str]]:
    """Return the settings for all users, in the order in which they are written."""
    lists = algorithms(ssh, settings)
    known = ssh.effective or ""
    signatures = chosen(USER_SIGNATURES, ssh.offered.get("key-sig", ()))
    jump = settings.jump_host
    rows: list[tuple[str, str]] = [("Port", str(port)) for port in settings.ports]
    rows += [("HostKey", path) for path in placed_host_keys(ssh, keys)[0]]
    rows += [
        ("KexAlgorithms", ",".join(lists["kex"])),
        ("Ciphers", ",".join(lists["ciphers"])),
        ("MACs", ",".join(lists["macs"])),
        ("HostKeyAlgorithms", ",".join(keys.algorithms)),
        ("PubkeyAcceptedAlgorithms", ",".join(signatures)),
        ("CASignatureAlgorithms", ",".join(chosen(CA_SIGNATURES, ssh.offered.get("key-sig", ())))),
        ("PubkeyAuthentication", "yes"),
        ("PasswordAuthentication", "no"),
        ("KbdInteractiveAuthentication", "no"),
        ("AuthenticationMethods", "publickey"),
        ("PermitEmptyPasswords", "no"),
        ("HostbasedAuthentication", "no"),
        ("IgnoreRhosts", "yes"),
        ("StrictModes", "yes"),
        ("PermitUserEnvironment", "no"),
        ("PermitRootLogin", {"never": "no", "keys": "prohibit-password"}[settings.root]),
    ]
    rows += [("AllowUsers", " ".join(settings.allow_users))] if settings.allow_users else []
    rows += [("AllowGroups", " ".join(settings.allow_groups))] if settings.allow_groups else []
    rows += [
        ("LoginGraceTime", "30"),
        ("MaxAuthTries", str(settings.max_auth_tries)),
        ("MaxStartups", settings.max_startups),
        ("ClientAliveInterval", "300"),
        ("ClientAliveCountMax", "3"),
        ("AllowTcpForwarding", "local" if jump else "no"),
        ("AllowStreamLocalForwarding", "no"),
        ("AllowAgentForwarding", "no"),
        ("X11Forwarding", "no"),
        ("GatewayPorts", "no"),
        ("PermitTunnel", "no"),
        ("LogLevel", "VERBOSE"),
        ("UseDNS", "no"),
    ]
    optional = {
        "requiredrsasize": ("RequiredRSASize", str(settings.least_rsa_bits)),
        "debianbanner": ("DebianBanner", "no"),
    }
    rows += [row for name, row in optional.items() if f"\n{name} " in f"\n{known}"]
    if settings.trusted_networks and "\npersourcepenaltyexemptlist " in known:
        rows.append(("PerSourcePenaltyExemptList", ",".join(settings.trusted_networks)))
    if settings.banner:
        rows.append(("Banner", BANNER))
    return with_options(rows, settings.options)


NOT_OPTIONS = {
    "port": "set ssh_hardening_ports, which the socket obeys too",
    "hostkey": "the role orders the host keys, and retires weak ones",
    "match": "write a file of its own in /etc/ssh/sshd_config.d",
    "include": "write a file of its own in /etc/ssh/sshd_config.d",
}
"""Names in lower case that are no settings of one line, with what to do instead."""
OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{1,63}")
LONGEST_OPTION = 2000


def bad_options(options: Mapping[str, Value]) -> Iterator[str]:
    """Yield what is wrong in the site's settings; whether sshd knows a setting, it answers itself."""
    seen = set[str]()
    for name, value in options.items():
        text = option_text(value)
        if OPTION_NAME.fullmatch(name) is None:
            yield f"ssh_hardening_options: {name!r} is not the name of a setting (example: LogLevel)"
        elif name.lower() in NOT_OPTIONS:
            yield f"ssh_hardening_options: {name}: {NOT_OPTIONS[name.lower()]}"
        elif name.lower() in seen:
            yield f"ssh_hardening_options: {name} is listed twice"
        elif text is not None and not (text.strip() and text.isprintable() and len(text) <= LONGEST_OPTION):
            yield f"ssh_hardening_options: the value of {name} is not one line of text (null leaves it to sshd)"
        seen.add(name.lower())


def option_text(value: Value) -> str | None:
    """Return a value as sshd reads it; None for null."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else None if value is None else str(value)


def with_options(rows: Iterable[tuple[str, str]], options: Mapping[str, Value]) -> list[tuple[str, str]]:
    """Return settings with those of the site: a value replaces the role's, null removes it, others are added."""
    requested = {name.lower(): (name, option_text(value)) for name, value in options.items()}
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for name, value in rows:
        groups.setdefault(name.lower(), []).append((name, value))
    for key, (name, text) in requested.items():
        groups[key] = [(groups[key][0][0] if key in groups else name, text)]
    return [(name, text) for group in groups.values() for name, text in group if text is not None]


BANNER = "/etc/ssh/gpunode-banner"
