"""The role accounts: admin users with their keys and sudo rules, the journal, and hardening settings of the kernel."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field

from gpunode.frozen import Frozen
from gpunode.provisioning.base import brings_users
from gpunode.provisioning.context import Context
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest, file_reasons
from gpunode.provisioning.role import Role, Settings, Texts, option
from gpunode.provisioning.ssh_login import keys_elsewhere
from gpunode.provisioning.state import Look, NodeState, SshState, effective_values, sysctl_path
from gpunode.provisioning.templates import completed
from gpunode.tuning.kernel import in_container

SUDO = "/etc/sudoers.d/zz-gpunode-admins"
"""If several files name one user, the last one is effective."""
JOURNAL_UNIT = "systemd-journald.service"
JOURNAL = "/etc/systemd/journald.conf.d/gpunode.conf"
WAITING = "/var/lib/gpunode/guard/accounts/record.json"
USERADD = "/etc/default/useradd"
NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
SIZE = re.compile(r"[1-9][0-9]{0,6}[MGT]")
NO_FOLDER = {"link": "a symbolic link", "file": "a file", "other": "a pipe, a socket or a device"}
"""What can be at ``~/.ssh`` in place of a directory."""
RULES = {"passwordless": "ALL=(ALL:ALL) NOPASSWD: ALL", "password": "ALL=(ALL:ALL) ALL", "none": ""}
KEY_TYPES = re.compile(r"(sk-)?(ssh-ed25519|ecdsa-sha2-nistp(256|384|521)|ssh-rsa)(@openssh\.com)?")
LEAST_RSA_BITS = 2048
SYSCTL = "/etc/sysctl.d/60-gpunode-accounts.conf"
HARDENING = {
    "fs.protected_fifos": "1",
    "fs.protected_hardlinks": "1",
    "fs.protected_regular": "2",
    "fs.protected_symlinks": "1",
    "fs.suid_dumpable": "0",
    "kernel.dmesg_restrict": "1",
    "kernel.kptr_restrict": "1",
    "kernel.randomize_va_space": "2",
    "net.ipv4.conf.all.accept_redirects": "0",
    "net.ipv4.conf.all.accept_source_route": "0",
    "net.ipv4.conf.all.send_redirects": "0",
    "net.ipv4.conf.default.accept_redirects": "0",
    "net.ipv4.conf.default.accept_source_route": "0",
    "net.ipv4.conf.default.send_redirects": "0",
    "net.ipv4.icmp_echo_ignore_broadcasts": "1",
    "net.ipv4.icmp_ignore_bogus_error_responses": "1",
    "net.ipv4.tcp_syncookies": "1",
    "net.ipv6.conf.all.accept_redirects": "0",
    "net.ipv6.conf.all.accept_source_route": "0",
    "net.ipv6.conf.default.accept_redirects": "0",
    "net.ipv6.conf.default.accept_source_route": "0",
}
"""Kernel settings of a hardened node."""
EXCEPTIONS = {
    "net.ipv4.ip_forward=0": "containers and CNI forward packets through the node",
    "net.ipv4.conf.*.rp_filter=1": "with several RDMA interfaces in one network, answers leave by another one",
    "net.ipv4.conf.*.arp_ignore": "multi-rail RoCE sets it by its own routing rules",
    "kernel.unprivileged_userns_clone=0, user.max_user_namespaces=0": "rootless Podman and Enroot need user namespaces",
    "kernel.yama.ptrace_scope=1": "py-spy attaches to running processes, and MPI copies between those of a user (CMA)",
    "kernel.perf_event_paranoid=3": "perf and Nsight sample programs of users",
    "kernel.modules_disabled=1": "the NVIDIA module is loaded, unloaded and built by DKMS while the node runs",
    "kernel.kexec_load_disabled=1": "kdump keeps a second kernel ready",
    "vm.overcommit_memory=2": "CUDA reserves more address space than the node has memory",
    "modprobe: squashfs, vfat, rds": "Enroot mounts squashfs, the EFI partition is vfat",
    "noexec on /tmp and /dev/shm": "compiled kernels are loaded from /tmp, and NCCL shares memory in /dev/shm",
}
"""Settings of other guides that a GPU node must not have, with the reason."""


class Admin(Frozen):
    """One admin user."""

    name: str = option(..., "User name; the user is created if missing.")
    keys: tuple[str, ...] = option((), "Public keys, one line each.", no_log=False)
    state: Literal["present", "absent"] = option("present", "V(absent) removes the user's sudo rule.")


class AccountsSettings(Settings):
    """Variables of the role."""

    state: Literal["keep", "present", "absent"] = option(
        "keep",
        "V(keep): accounts are not changed. V(present): managed. V(absent): sudo rules, journal and kernel settings of "
        "the role are removed; users and keys stay.",
    )
    admins: tuple[Admin, ...] = option(
        (),
        'Admin users, such as [{ name: ada, keys: ["ssh-ed25519 AAAA… ada"] }]. With state absent an entry loses the '
        "role's sudo rule.",
    )
    exclusive_keys: bool = option(False, "Whether other keys of admin users are removed.")
    sudo: Literal["passwordless", "password", "none"] = option(
        "passwordless",
        "What admin users may run as root: everything V(passwordless), everything with their V(password), or V(none) "
        "(no rule).",
    )
    lock_passwords: bool = option(True, "Lock empty passwords, and passwords of admin users with passwordless sudo.")
    journal_max: str = option("2G", "Maximum size of the journal on disk; empty: journald's settings are not changed.")
    sysctl: bool = option(True, "Apply kernel hardening settings, except those that conflict with GPU nodes.")
    revert_s: int = option(
        60,
        "Seconds within which a new login must confirm keys and sudo rules before the node restores the old; 0: never.",
    )


class AccountsResult(Frozen):
    """What can lock out whoever runs this, which the role's own tasks do."""

    create: tuple[str, ...] = ()
    homes: dict[str, str] = Field(default_factory=dict)
    guarded: tuple[ManagedFile, ...] = ()
    lock: tuple[str, ...] = ()
    """Users who lose their password."""


ROLE = Role(
    name="accounts",
    title="Admin users with keys and sudo rules, the journal, and hardening settings of the kernel",
    about=(
        "Creates admin users and deploys their keys and sudo rules; the node reverts them unless a new login succeeds.",
        "Makes the journal persistent with a size limit, and applies kernel settings that are safe on a GPU node.",
    ),
    settings=AccountsSettings,
    reads=("ssh",),
    result=AccountsResult,
    files=(JOURNAL, SYSCTL),
    kernel=True,
    more=Look(paths=(SUDO, WAITING), contents=(USERADD, *(sysctl_path(name) for name in HARDENING))),
)


@ROLE.present
def present(state: NodeState, settings: AccountsSettings, context: Context) -> Manifest:
    """Return the manifest of the role."""
    ssh = state.ssh
    if ssh is None:
        return Manifest(role=ROLE.name, refusals=("the accounts of the node could not be determined",))
    refusals = tuple(_bad_settings(settings))
    if refusals:
        return Manifest(role=ROLE.name, refusals=refusals)
    kernel = _hardening(context.settings_of("kernel_tuning")["sysctl"]) if settings.sysctl else {}
    runtime = {} if in_container(state.facts) else {sysctl_path(name): value for name, value in kernel.items()}
    admins = [admin for admin in settings.admins if admin.state == "present"]
    if brings_users(state, context):
        # In check mode: an admin user without keys may be one of the directory.
        admins = [admin for admin in admins if admin.keys or ssh.account(admin.name) is not None]
    refusals = tuple(f"accounts_admins: {name}: {why}" for name, why in _without_keys(ssh, settings, admins))
    text = ROLE.texts(context)
    sudo = _sudo_file(settings, admins, text)
    homes = {admin.name: _home(state, ssh, admin.name) for admin in admins}
    keys = [file for admin in admins for file in _key_file(ssh, settings, admin, homes[admin.name])]
    reasons = _waiting(state)
    if reasons:
        # The revert of the earlier change, which comes before this one, replaces the files.
        keys = [file.model_copy(update={"expect_sha256": None}) for file in keys]
    create = tuple(admin.name for admin in admins if ssh.account(admin.name) is None)
    lock = tuple(sorted(_to_lock(ssh, settings, admins)))
    limit = text("journald.conf.j2", max=settings.journal_max) if settings.journal_max else None
    values = text("sysctl.conf.j2", values=kernel, exceptions=EXCEPTIONS) if settings.sysctl else None
    journal = ManagedFile(path=JOURNAL, content=limit, phase="after")
    sysctl = ManagedFile(path=SYSCTL, content=values, phase="after")
    guarded = (*([sudo] if any(True for _ in file_reasons(sudo, state)) else []), *keys)
    reasons += [f"{name} is not there" for name in create] + [f"the password of {name} is not locked" for name in lock]
    reasons += [f"{file.path} differs" for file in guarded]
    reasons += _runtime_reasons(state, runtime)
    return Manifest(
        role=ROLE.name,
        files=(journal, sysctl),
        folders=(ManagedFolder(path=ROLE.folder),),
        units=ROLE.restarted(state, JOURNAL_UNIT, journal),
        kernel_values=runtime,
        kernel_memory=ROLE.kernel_memory,
        refusals=refusals,
        pending_reasons=tuple(reasons),
        notes=tuple(_notes(ssh)),
        result=AccountsResult(create=create, homes={name: homes[name] for name in create}, guarded=guarded, lock=lock),
    )


@ROLE.absent
def absent(state: NodeState, manifest: Manifest, _context: Context) -> Manifest:
    """Return the removal with the sudo rules, which are removed as they were deployed; users and keys stay."""
    if state.ssh is None:
        return Manifest(role=ROLE.name, refusals=("the accounts of the node could not be determined",))
    sudo, journal = ManagedFile(path=SUDO, content=None), next(file for file in manifest.files if file.path == JOURNAL)
    guarded = (sudo,) if any(True for _ in file_reasons(sudo, state)) else ()
    reasons = (*_waiting(state), *(f"{file.path} must be removed" for file in guarded), *manifest.pending_reasons)
    more = {"units": ROLE.restarted(state, JOURNAL_UNIT, journal), "result": AccountsResult(guarded=guarded)}
    return manifest.updated(pending_reasons=reasons, **more)


def _waiting(state: NodeState) -> list[str]:
    return ["an earlier change waits for its confirmation"] if state.kind(WAITING) == "file" else []


def _bad_settings(settings: AccountsSettings) -> Iterator[str]:
    """Yield invalid settings."""
    seen: set[str] = set()
    for admin in settings.admins:
        name = admin.name
        if not NAME.fullmatch(name):
            yield f"accounts_admins: {name!r} is not a valid user name (lower-case letters, digits, _ and -)"
        if name == "root":
            yield "accounts_admins: root cannot be an admin user: ssh_hardening_root decides whether root may log in"
        if name in seen:
            yield f"accounts_admins: {name} is listed twice"
        seen.add(name)
        for number, key in enumerate(admin.keys, start=1):
            problem = key_problem(str(key))
            if problem:
                yield f"accounts_admins: key {number} of {name} {problem}"
    if settings.journal_max and not SIZE.fullmatch(settings.journal_max):
        yield f"accounts_journal_max: {settings.journal_max!r} is not a size (examples: 500M, 2G)"


def _without_keys(ssh: SshState, settings: AccountsSettings, admins: list[Admin]) -> Iterator[tuple[str, str]]:
    elsewhere = keys_elsewhere(effective_values(ssh.effective or ""))
    for admin in admins:
        account = ssh.account(admin.name)
        has_key = account is not None and (elsewhere or (bool(account.keys) and not settings.exclusive_keys))
        if not admin.keys and not has_key:
            yield admin.name, "the user has no key and could not log in: set keys"
        if account is not None and account.folder in NO_FOLDER:
            kind = NO_FOLDER[account.folder]
            yield admin.name, f"{account.home}/.ssh is {kind}: replace it with a directory of the user"
        elif account is not None and account.document_problem:
            yield (
                admin.name,
                f"{account.document_problem}: no key is lost or added: repair it, or move it away, then run this again",
            )


def _home(state: NodeState, ssh: SshState, name: str) -> str:
    """Return the home of a user; of a new one, as useradd would choose it."""
    account = ssh.account(name)
    if account is not None:
        return account.home
    lines = (state.contents.get(USERADD) or "").split("\n")
    bases = [line.removeprefix("HOME=").strip().strip('"') for line in lines if line.startswith("HOME=")]
    base = bases[-1] if bases and bases[-1].startswith("/") else "/home"
    return f"{base.rstrip('/')}/{name}"


def _key_file(ssh: SshState, settings: AccountsSettings, admin: Admin, home: str) -> Iterator[ManagedFile]:
    """Yield the file of keys of one admin user if it has to change."""
    account = ssh.account(admin.name)
    keys = [" ".join(str(key).split()) for key in admin.keys]
    text = account.document or "" if account is not None else ""
    if settings.exclusive_keys:
        content = "".join(f"{line}\n" for line in keys)
    else:
        existing = {key_blob(line) for line in text.split("\n") if not line.lstrip().startswith("#")}
        added = "".join(f"{key}\n" for key in keys if key_blob(key) not in existing)
        content = completed(text) + added if added else text
    if content != text:
        group = account.group if account is not None else admin.name
        path = f"{home}/.ssh/authorized_keys"
        expected = None
        if account is not None and not settings.exclusive_keys:
            # A key that the user adds meanwhile would be lost.
            expected = "absent" if account.document is None else hashlib.sha256(text.encode()).hexdigest()
        yield ManagedFile(
            path=path, content=content, mode="0600", owner=admin.name, group=group, expect_sha256=expected
        )


def _sudo_file(settings: AccountsSettings, admins: list[Admin], text: Texts) -> ManagedFile:
    rule, names = RULES[settings.sudo], [admin.name for admin in admins]
    content = text("sudoers.j2", names=names, rule=rule) if rule and names else None
    return ManagedFile(path=SUDO, content=content, mode="0440", validate_with=("visudo", "-cf", "%s"))


def _to_lock(ssh: SshState, settings: AccountsSettings, admins: list[Admin]) -> Iterator[str]:
    """Yield accounts without a password, admin users who need none, and those who could not log in with a key.

    The user of this login keeps the password if there is no key to log in with.
    """
    names = {admin.name for admin in admins}
    user = ssh.login.user if ssh.login is not None else None
    without_pam = effective_values(ssh.effective or "").get("usepam") != ("yes",)
    for account in ssh.accounts:
        admin = account.name in names
        keyless = account.name == user and not account.keys and not admin
        states = {"none", "set"} if admin and settings.sudo == "passwordless" else {"none"}
        needless = settings.lock_passwords and account.password in states and not keyless
        if needless or (admin and without_pam and account.password == "closed"):  # noqa: S105
            yield account.name


def _notes(ssh: SshState) -> Iterator[str]:
    others = [account.name for account in ssh.accounts if account.uid == 0 and account.name != "root"]
    if others:
        yield f"{', '.join(others)} has the user id 0 and is therefore root under another name: run usermod -u ID NAME"


def _runtime_reasons(state: NodeState, runtime: Mapping[str, str]) -> Iterator[str]:
    for path, value in runtime.items():
        text = state.contents.get(path)
        # Not set on a kernel without the setting.
        if text is not None and text.strip() != value:
            yield f"{path} is {text.strip()[:50]}, not {value}"


def key_problem(text: str) -> str | None:
    """Return the error in one public key in one line, without repeating a secret; None if there is none."""
    if "PRIVATE KEY" in text:
        return "is a private key: use the public key (the .pub file), and replace a private key that was shared"
    if "PuTTY-User-Key-File" in text or "SSH2 PUBLIC KEY" in text:
        return "has the format of another program: convert it with ssh-keygen -i -f FILE"
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        return f"has {len(lines)} lines: list one key each"
    fields = lines[0].split()
    key = next(((kind, fields[at + 1]) for at, kind in enumerate(fields[:-1]) if KEY_TYPES.fullmatch(kind)), None)
    if key is None:
        return f"starts with {fields[0][:20]!r}, which is not a key type (example: ssh-ed25519 AAAA… name)"
    kind, blob = key
    try:
        data = b64decode(blob, validate=True)
    except ValueError:
        return f"({kind}) is damaged: its base64 does not decode"
    parts = _parts(data)
    if not parts or parts[0].decode("ascii", "replace") != kind:
        return f"({kind}) is damaged: its content is not a key of this type"
    if kind == "ssh-rsa":
        bits = int.from_bytes(parts[2], "big").bit_length() if len(parts) == 3 else 0
        if bits < LEAST_RSA_BITS:
            return f"is an RSA key of {bits} bits: use at least {LEAST_RSA_BITS}, or ssh-ed25519"
    elif kind == "ssh-ed25519" and [len(part) for part in parts[1:]] != [32]:
        return f"({kind}) is damaged: it is cut off"
    return None


def key_blob(text: str) -> str:
    """Return the part that two lines of one key have in common."""
    fields = text.split()
    return next((fields[at + 1] for at, kind in enumerate(fields[:-1]) if KEY_TYPES.fullmatch(kind)), text)


def _parts(data: bytes) -> list[bytes]:
    """Return the length-prefixed parts of a key; empty if it is truncated."""
    parts = []
    while data:
        length = int.from_bytes(data[:4], "big")
        if len(data) < 4 + length:
            return []
        parts.append(data[4 : 4 + length])
        data = data[4 + length :]
    return parts


def _hardening(requested: Iterable[str]) -> dict[str, str]:
    """Return the settings without those that a user requests with kernel_tuning_sysctl: a name, or a pattern of names.

    Each key has one owner, and the user's is the role kernel_tuning, also with null, which leaves the kernel's value.
    """
    keys = tuple(requested)
    return {name: value for name, value in HARDENING.items() if not any(fnmatchcase(name, pattern) for pattern in keys)}
