"""Mutants of the checks on SSH and on passwords."""

from bundles import Edit, guest, hgx, not_run, stdout, t4, timed_out
from machine_ssh import RECORDED
from mutant import Missing, Mutant, cut, garbled

from gpunode.checks import Status

WARN = Status.WARN
KEYS = RECORDED["private-keys"]["stdout"]


def setting(name: str, value: str, *more: tuple[str, str]) -> Edit:
    """sshd runs with other values, and takes any method."""
    text = RECORDED["sshd-settings"]["stdout"].replace("authenticationmethods publickey", "authenticationmethods any")
    for key, now in ((name, value), *more):
        lines = [f"{key} {now}" if line.partition(" ")[0] == key else line for line in text.splitlines()]
        text = "\n".join(lines) + "\n"
    return stdout("sshd-settings", None, text)


def key(path: str, mode: str, kind: str = "ssh-ed25519", bits: int = 256) -> Edit:
    """One more private key."""
    return stdout("private-keys", None, f"{KEYS}{path}\t{mode}\tada\t{kind}\t{bits}\t1795350872\n")


MUTANTS = [
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

MISSING: Missing = {
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
