"""Checks on logins: settings of sshd, its host keys, private keys that others can read, empty passwords."""

from collections.abc import Iterator
from datetime import datetime

from gpunode.checks.compare import at_most, failed
from gpunode.checks.declared import declare
from gpunode.checks.registry import CheckResult, Skip, Status, registry
from gpunode.checks.thresholds import Threshold
from gpunode.facts.node import NodeFacts
from gpunode.facts.ssh import KeyFile
from gpunode.text import counted, listed

HOST_KEY = "/etc/ssh/ssh_host_"
BROKEN = ("group1-sha1", "group14-sha1", "group-exchange-sha1", "-cbc", "arcfour", "hmac-md5", "-96")
"""Parts of the names of algorithms that OpenSSH itself no longer offers by default (its release notes, 6.7 to 8.2)."""
RSA_LEAST = Threshold(
    "host.ssh-host-keys.rsa-least",
    2048,
    "bits",
    "Smaller RSA keys warn.",
    source="NIST SP 800-57 part 1, table 2 (112 bits of strength)",
)
READ_BY_OTHERS, READ_BY_GROUP = 0o004, 0o040
DAY_S = 86400


@registry.check(
    "host.ssh-settings",
    needs=("ssh_daemon",),
    means="sshd accepts keys and no passwords, and offers no broken algorithm, according to its effective "
    "configuration (sshd -T).",
    remedy="Harden SSH: role ssh_hardening (ssh_hardening_state: present), tag ssh_hardening_configure. It "
    "reverts itself unless a new login succeeds.",
    state="observe",
    actions=("run_role:ssh_hardening:ssh_hardening_configure",),
)
def ssh_settings(node: NodeFacts) -> Iterator[CheckResult]:
    if node.ssh_daemon is None:
        raise Skip("the node has no OpenSSH server")
    values = node.ssh_daemon.settings
    if values.get("permitemptypasswords") == "yes":
        message = "sshd permits logins with empty passwords"
        yield failed(message, expected="no", measured="yes", source="sshd -T")
        return
    faults = []
    methods = values.get("authenticationmethods", "any").split()
    by_key = all(method.partition(",")[0] == "publickey" for method in methods)
    names = [name for name in ("passwordauthentication", "kbdinteractiveauthentication") if values.get(name) == "yes"]
    if names and not by_key:
        faults.append(f"passwords are accepted ({', '.join(names)})")
        if values.get("permitrootlogin") == "yes":
            faults.append("root's too (permitrootlogin)")
    offered = [word for name in ("kexalgorithms", "ciphers", "macs") for word in values.get(name, "").split(",")]
    broken = sorted({word for word in offered if any(part in word for part in BROKEN)})
    if broken:
        faults.append(f"broken algorithms are offered: {listed(broken)}")
    yield at_most(len(faults), 0, "sshd accepts only keys", "; ".join(faults), fault=Status.WARN, source="sshd -T")


@registry.check(
    "host.ssh-host-keys",
    needs=("private_keys", "ssh_daemon"),
    thresholds=(RSA_LEAST,),
    means="The host keys of sshd have a secure type and size, and only root can read them.",
    remedy="The role ssh_hardening, tag ssh_hardening_install, generates strong host keys and removes weak ones "
    "after clients learned the new ones. Replace a host key that others could read: remove it and its .pub file, "
    "then run the role.",
    state="observe",
    actions=("run_role:ssh_hardening:ssh_hardening_install",),
)
def ssh_host_keys(node: NodeFacts) -> Iterator[CheckResult]:
    keys = [key for key in node.private_keys or () if key.path.startswith(HOST_KEY)]
    if node.ssh_daemon is None or not keys:
        raise Skip("the node has no host keys of OpenSSH")
    exposed = [key.path for key in keys if int(key.mode, 8) & READ_BY_OTHERS]
    weak = [key for key in keys if key.type == "ssh-dss" or (key.type == "ssh-rsa" and key.bits < RSA_LEAST.value)]
    if exposed:
        yield failed(f"readable by all users: {listed(exposed)}", expected=0, measured=len(exposed))
        return
    names = listed([f"{key.path} ({key.type} of {key.bits} bits)" for key in weak])
    kinds = listed(sorted({key.type or "unknown kind" for key in keys}))
    good = f"{counted(len(keys), 'host key')} ({kinds}), the oldest of {_oldest_days(keys, node)} days"
    yield at_most(len(weak), 0, good, f"weak host keys: {names}", fault=Status.WARN, unit="keys")


def _oldest_days(keys: list[KeyFile], node: NodeFacts) -> int:
    now = datetime.fromisoformat(node.collected_at).timestamp()
    return max(0, int((now - min(key.modified_s for key in keys)) // DAY_S))


@registry.check(
    "host.private-keys",
    needs=("private_keys",),
    means="Only its owner can read the private key of a user.",
    remedy="chmod 600 FILE; replace a key that others could read on all machines that accept it.",
    state="observe",
    actions=("fix_configuration",),
)
def user_keys(node: NodeFacts) -> Iterator[CheckResult]:
    keys = [key for key in node.private_keys or () if not key.path.startswith(HOST_KEY)]
    exposed = [key.path for key in keys if int(key.mode, 8) & READ_BY_OTHERS]
    shared = [key.path for key in keys if int(key.mode, 8) & READ_BY_GROUP]
    if exposed:
        yield failed(f"readable by all users: {listed(exposed)}", expected=0, measured=len(exposed))
    else:
        good = f"{counted(len(keys), 'private key')} of users, readable only by their owners"
        yield at_most(len(shared), 0, good, f"a group can read {listed(shared)}", fault=Status.WARN)


declare(
    "host.empty-passwords",
    fact="empty_passwords[]",
    count=True,
    comparison="equals",
    value=0,
    good="every account has a password or is locked",
    message="{measured:account} without a password: {items}",
    unit="accounts",
    means="No account with a shell has an empty password, which su and the console accept.",
    remedy="Run passwd -l NAME to lock one, or the role accounts (accounts_lock_passwords), tag "
    "accounts_configure, to lock all.",
    state="observe",
    actions=("run_role:accounts:accounts_configure",),
)
