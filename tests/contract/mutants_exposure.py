"""Mutants of the checks on what can be reached from outside, on SSH and on passwords."""

from bundles import Edit, Missing, Mutant, cut, garbled, guest, hgx, not_run, stdout, t4, text, timed_out
from machine_exposure import PENDING, RECORDED, SSH_DAEMON

from gpunode.checks import Status

WARN = Status.WARN
ADDRESS = next(
    line.split("inet ")[1].split("/")[0]
    for line in RECORDED["addresses"]["stdout"].splitlines()
    if "eth0" in line and "inet " in line
)
LISTENING = 'tcp   LISTEN 0      4096   {address} 0.0.0.0:* users:(("{process}",pid=99,fd=9))\n'
NO_ANSWER = [
    Edit(("commands", "nft-own", "rc"), None, 1),
    Edit(("commands", "nft-own", "stdout"), None, ""),
]


def listening(address: str, process: str) -> Edit:
    """One more socket."""
    return stdout("sockets", None, RECORDED["sockets"]["stdout"] + LISTENING.format(address=address, process=process))


MUTANTS = [
    Mutant("host.firewall", "its table was flushed", t4, NO_ANSWER),
    Mutant(
        "host.firewall", "input is accepted", hgx, [stdout("nft-ruleset", '"policy": "drop"', '"policy": "accept"')]
    ),
    Mutant(
        "host.firewall",
        "IPv6 comes in",
        t4,
        [
            stdout(
                "nft-ruleset",
                '{"chain": {"family": "inet", "table": "gpunode", "name": "input"',
                '{"chain": {"family": "ip", "table": "gpunode", "name": "input"',
            )
        ],
    ),
    Mutant(
        "host.exposed-services",
        "the exporter is public",
        guest,
        [stdout("addresses", ADDRESS, "8.8.4.9"), listening("*:9400", "dcgm-exporter")],
        becomes=WARN,
    ),
    Mutant(
        "host.exposed-services",
        "a host engine on the public address",
        guest,
        [stdout("addresses", ADDRESS, "8.8.4.9"), listening("8.8.4.9:5555", "nv-hostengine")],
        becomes=WARN,
    ),
    Mutant("container.docker-api", "without TLS", t4, [listening("*:2375", "dockerd")]),
    Mutant("container.docker-api", "at a port of its own", t4, [listening("0.0.0.0:4000", "dockerd")]),
    Mutant("container.docker-api", "with TLS", t4, [listening("[::]:2376", "dockerd")], becomes=WARN),
    Mutant("container.docker-api", "on loopback", t4, [listening("127.0.0.1:2375", "dockerd")], becomes=WARN),
    Mutant(
        "container.docker-group",
        "a user is root without a password",
        t4,
        [text("/etc/group", None, "sudo:x:27:admin\ndocker:x:999:admin,ada\n")],
        becomes=WARN,
    ),
    Mutant(
        "node.security-updates",
        "one waits for months",
        hgx,
        [
            text(
                PENDING,
                None,
                '{"pending": [{"package": "docker.io", "installed": "1", "version": "2", '
                '"since": "2026-01-02T03:04:05+00:00"}]}\n',
            )
        ],
        becomes=WARN,
    ),
]
MISSING: Missing = {
    "host.firewall": [
        (t4, timed_out("nft-ruleset")),
        (t4, garbled("nft-ruleset")),
        (hgx, [not_run("nft-own")]),
        (hgx, cut("nft-ruleset")),
    ],
    "host.exposed-services": [(t4, timed_out("sockets")), (guest, garbled("addresses")), (guest, [not_run("sockets")])],
    "container.docker-api": [(t4, garbled("sockets")), (t4, timed_out("sockets"))],
    "container.docker-group": [(t4, [text("/etc/group", None, "garbage\n")]), (t4, [text("/etc/group", None, None)])],
    "node.security-updates": [
        (t4, [text(PENDING, None, "{")]),
        (t4, [text(PENDING, None, '{"pending": [{"package": "a"}]}')]),
        (
            t4,
            [
                text(
                    PENDING,
                    None,
                    '{"pending": [{"package": "a", "installed": "1", "version": "2", "since": "once"}]}',
                )
            ],
        ),
    ],
}
KEYS = SSH_DAEMON["private-keys"]["stdout"]


def setting(name: str, value: str, *more: tuple[str, str]) -> Edit:
    """sshd runs with other values, and takes any method."""
    text = SSH_DAEMON["sshd-settings"]["stdout"].replace("authenticationmethods publickey", "authenticationmethods any")
    for key, now in ((name, value), *more):
        lines = [f"{key} {now}" if line.partition(" ")[0] == key else line for line in text.splitlines()]
        text = "\n".join(lines) + "\n"
    return stdout("sshd-settings", None, text)


def key(path: str, mode: str, kind: str = "ssh-ed25519", bits: int = 256) -> Edit:
    """One more private key."""
    return stdout("private-keys", None, f"{KEYS}{path}\t{mode}\tada\t{kind}\t{bits}\t1795350872\n")


MUTANTS += [
    Mutant("host.ssh-settings", "empty passwords log in", t4, [setting("permitemptypasswords", "yes")]),
    Mutant("host.ssh-settings", "passwords are accepted", t4, [setting("passwordauthentication", "yes")], becomes=WARN),
    Mutant(
        "host.ssh-settings",
        "PAM asks for passwords",
        hgx,
        [setting("kbdinteractiveauthentication", "yes", ("permitrootlogin", "yes"))],
        becomes=WARN,
    ),
    Mutant("host.ssh-settings", "a broken cipher", t4, [setting("ciphers", "aes256-ctr,3des-cbc")], becomes=WARN),
    Mutant(
        "host.ssh-settings",
        "a broken key exchange",
        guest,
        [setting("kexalgorithms", "diffie-hellman-group1-sha1")],
        becomes=WARN,
    ),
    Mutant("host.ssh-host-keys", "everybody reads one", t4, [key("/etc/ssh/ssh_host_ecdsa_key", "0644")]),
    Mutant(
        "host.ssh-host-keys", "small", hgx, [key("/etc/ssh/ssh_host_dsa_key", "0600", "ssh-dss", 1024)], becomes=WARN
    ),
    Mutant("host.private-keys", "everybody reads one", t4, [key("/home/ada/.ssh/id_ed25519", "0644")]),
    Mutant("host.private-keys", "a group reads one", t4, [key("/home/ada/.ssh/id_ed25519", "0640")], becomes=WARN),
    Mutant("host.empty-passwords", "one", t4, [stdout("empty-passwords", None, "careless\n")]),
]
MISSING |= {
    "host.ssh-settings": [
        (t4, timed_out("sshd-settings")),
        (t4, garbled("sshd-settings")),
        (hgx, cut("sshd-settings")),
        (guest, [not_run("sshd-settings")]),
        (t4, [stdout("sshd-settings", None, "port 22\n")]),
    ],
    "host.ssh-host-keys": [(t4, garbled("private-keys")), (t4, [not_run("private-keys")])],
    "host.private-keys": [
        (t4, garbled("private-keys")),
        (hgx, [Edit(("commands", "private-keys", "rc"), None, 1)]),
        (t4, [stdout("private-keys", None, "/etc/ssh/ssh_host_rsa_key\t9\troot\tssh-rsa\tmany\t0\n")]),
    ],
    "host.empty-passwords": [
        (t4, [not_run("empty-passwords")]),
        (t4, [Edit(("commands", "empty-passwords", "rc"), None, 1)]),
    ],
}
