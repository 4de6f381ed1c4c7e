"""The role accounts: admin users with their keys and sudo rules, the journal, and hardening settings of the kernel."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpunode.provisioning.context import Context
from gpunode.provisioning.due import file_reasons
from gpunode.provisioning.hardening_sysctl import SETTINGS, SYSCTL, owned, sysctl_file, sysctl_path
from gpunode.provisioning.manifest import ManagedFile, ManagedFolder, Manifest
from gpunode.provisioning.sections import completed
from gpunode.provisioning.ssh_keys import key_blob, key_problem
from gpunode.provisioning.ssh_state import SshState, effective_values
from gpunode.provisioning.state import Look, NodeState
from gpunode.tuning.kernel import in_container

ROLE = "accounts"
SUDO = "/etc/sudoers.d/zz-gpunode-admins"
"""If several files name one user, the last one is effective."""
JOURNAL = "/etc/systemd/journald.conf.d/gpunode.conf"
MEMORY = "/var/lib/gpunode/accounts"
BEFORE = f"{MEMORY}/values-before.json"
WAITING = "/var/lib/gpunode/guard/accounts/record.json"
USERADD = "/etc/default/useradd"
LOOK = Look(
    paths=(SUDO, JOURNAL, SYSCTL, MEMORY, BEFORE, WAITING),
    contents=(USERADD, *(sysctl_path(name) for name in SETTINGS)),
)
NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
SIZE = re.compile(r"[1-9][0-9]{0,6}[MGT]")
NO_FOLDER = {"link": "a symbolic link", "file": "a file", "other": "a pipe, a socket or a device"}
"""What can be at ``~/.ssh`` in place of a directory."""
RULES = {"passwordless": "ALL=(ALL:ALL) NOPASSWD: ALL", "password": "ALL=(ALL:ALL) ALL", "none": ""}


def plan(state: NodeState, settings: Mapping[str, Any], context: Context) -> Manifest:
    """Return the manifest of the role."""
    if settings["state"] == "keep":
        return Manifest(role=ROLE)
    ssh = state.ssh
    if ssh is None:
        return Manifest(role=ROLE, refusals=("the accounts of the node could not be determined",))
    kernel = owned(context.settings_of("kernel_tuning")["sysctl"])
    live = {} if in_container(state.facts) else {sysctl_path(name): value for name, value in kernel.items()}
    waits = state.files.get(WAITING)
    reasons = ["an earlier change waits for its confirmation"] if waits is not None and waits.kind == "file" else []
    if settings["state"] == "absent":
        return _absent(state, reasons)
    refusals = tuple(_bad_settings(settings))
    if refusals:
        return Manifest(role=ROLE, refusals=refusals)
    admins = [admin for admin in settings["admins"] if admin["state"] == "present"]
    refusals = tuple(f"accounts_admins: {name}: {why}" for name, why in _without_keys(ssh, settings, admins))
    sudo = _sudo_file(settings, admins)
    homes = {admin["name"]: _home(state, ssh, admin["name"]) for admin in admins}
    keys = [file for admin in admins for file in _key_file(ssh, settings, admin, homes[admin["name"]])]
    if reasons:
        # The revert of the earlier change, which comes before this one, replaces the files.
        keys = [file.model_copy(update={"expect_sha256": None}) for file in keys]
    create = [admin["name"] for admin in admins if ssh.account(admin["name"]) is None]
    lock = sorted(_to_lock(ssh, settings, admins))
    live = live if settings["sysctl"] else {}
    files = [
        ManagedFile(path=JOURNAL, content=_journal(settings) if settings["journal_max"] else None),
        ManagedFile(path=SYSCTL, content=sysctl_file(kernel) if settings["sysctl"] else None),
    ]
    guarded = [*([sudo] if any(True for _ in file_reasons(sudo, state)) else []), *keys]
    reasons += [f"{name} is not there" for name in create] + [f"the password of {name} is not locked" for name in lock]
    reasons += [f"{file.path} differs" for file in guarded]
    reasons += _live_reasons(state, live)
    journal = any(True for _ in file_reasons(files[0], state))
    return Manifest(
        role=ROLE,
        files=tuple(files),
        folders=(ManagedFolder(path=MEMORY),),
        refusals=refusals,
        due_reasons=tuple(reasons),
        notes=tuple(_notes(ssh)),
        values={
            "create": create,
            "homes": {name: homes[name] for name in create},
            "guarded": [file.model_dump(mode="json") for file in guarded],
            "lock": lock,
            "live": live,
            "memory": BEFORE,
            "journal": journal,
        },
    )


def _bad_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield invalid settings."""
    seen: set[str] = set()
    for admin in settings["admins"]:
        name = str(admin["name"])
        if not NAME.fullmatch(name):
            yield f"accounts_admins: {name!r} is not a valid user name (lower-case letters, digits, _ and -)"
        if name == "root":
            yield "accounts_admins: root cannot be an admin user: ssh_hardening_root decides whether root may log in"
        if name in seen:
            yield f"accounts_admins: {name} is listed twice"
        seen.add(name)
        for number, key in enumerate(admin["keys"], start=1):
            problem = key_problem(str(key))
            if problem:
                yield f"accounts_admins: key {number} of {name} {problem}"
    if settings["journal_max"] and not SIZE.fullmatch(str(settings["journal_max"])):
        yield f"accounts_journal_max: {settings['journal_max']!r} is not a size (examples: 500M, 2G)"


def _without_keys(
    ssh: SshState, settings: Mapping[str, Any], admins: list[Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    for admin in admins:
        account = ssh.account(admin["name"])
        there = account is not None and bool(account.keys) and not settings["exclusive_keys"]
        if not admin["keys"] and not there:
            yield admin["name"], "the user has no key and could not log in: set keys"
        if account is not None and account.folder in NO_FOLDER:
            found = NO_FOLDER[account.folder]
            yield admin["name"], f"{account.home}/.ssh is {found}: replace it with a directory of the user"
        elif account is not None and account.document_problem:
            yield (
                admin["name"],
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


def _key_file(ssh: SshState, settings: Mapping[str, Any], admin: Mapping[str, Any], home: str) -> Iterator[ManagedFile]:
    """Yield the file of keys of one admin user if it has to change."""
    account = ssh.account(admin["name"])
    given = [" ".join(str(key).split()) for key in admin["keys"]]
    text = account.document or "" if account is not None else ""
    if settings["exclusive_keys"]:
        content = "".join(f"{line}\n" for line in given)
    else:
        there = {key_blob(line) for line in text.split("\n") if not line.lstrip().startswith("#")}
        added = "".join(f"{key}\n" for key in given if key_blob(key) not in there)
        content = completed(text) + added if added else text
    if content != text:
        group = account.group if account is not None else str(admin["name"])
        path = f"{home}/.ssh/authorized_keys"
        expected = None
        if account is not None and not settings["exclusive_keys"]:
            # A key that the user adds meanwhile would be lost.
            expected = "absent" if account.document is None else hashlib.sha256(text.encode()).hexdigest()
        yield ManagedFile(
            path=path, content=content, mode="0600", owner=str(admin["name"]), group=group, expect_sha256=expected
        )


def _sudo_file(settings: Mapping[str, Any], admins: list[Mapping[str, Any]]) -> ManagedFile:
    rule = RULES[settings["sudo"]]
    lines = "".join(f"{admin['name']} {rule}\n" for admin in admins) if rule else ""
    content = f"# Managed by gpunode (role accounts).\n{lines}" if lines else None
    return ManagedFile(path=SUDO, content=content, mode="0440", validate_with=("visudo", "-cf", "%s"))


def _to_lock(ssh: SshState, settings: Mapping[str, Any], admins: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield accounts without a password, admin users who need none, and those who could not log in with a key.

    The user of this login keeps the password if there is no key to log in with.
    """
    names = {admin["name"] for admin in admins}
    own = ssh.login.user if ssh.login is not None else None
    without_pam = effective_values(ssh.effective or "").get("usepam") != ("yes",)
    for account in ssh.accounts:
        admin = account.name in names
        keyless = account.name == own and not account.keys and not admin
        states = {"none", "set"} if admin and settings["sudo"] == "passwordless" else {"none"}
        needless = settings["lock_passwords"] and account.password in states and not keyless
        if needless or (admin and without_pam and account.password == "closed"):  # noqa: S105
            yield account.name


def _notes(ssh: SshState) -> Iterator[str]:
    others = [account.name for account in ssh.accounts if account.uid == 0 and account.name != "root"]
    if others:
        yield f"{', '.join(others)} has the user id 0 and is therefore root under another name: run usermod -u ID NAME"


def _journal(settings: Mapping[str, Any]) -> str:
    return (
        "# Managed by gpunode (role accounts): the journal survives reboots and does not fill the disk.\n"
        f"[Journal]\nStorage=persistent\nSystemMaxUse={settings['journal_max']}\n"
    )


def _live_reasons(state: NodeState, live: Mapping[str, str]) -> Iterator[str]:
    for path, value in live.items():
        text = state.contents.get(path)
        # Not set on a kernel without the setting.
        if text is not None and text.strip() != value:
            yield f"{path} is {text.strip()[:50]}, not {value}"


def _absent(state: NodeState, reasons: list[str]) -> Manifest:
    sudo = ManagedFile(path=SUDO, content=None)
    there = state.files.get(BEFORE)
    restored = there is not None and there.kind == "file"
    journal = state.files.get(JOURNAL)
    guarded = [sudo] if any(True for _ in file_reasons(sudo, state)) else []
    reasons = [*reasons, *(f"{file.path} must be removed" for file in guarded)]
    return Manifest(
        role=ROLE,
        files=(ManagedFile(path=JOURNAL, content=None), ManagedFile(path=SYSCTL, content=None)),
        folders=(ManagedFolder(path=MEMORY, state="absent_if_empty"),),
        due_reasons=(*reasons, *(["the kernel's settings have to be restored"] if restored else [])),
        values={
            "create": [],
            "guarded": [file.model_dump(mode="json") for file in guarded],
            "lock": [],
            "live": {},
            "memory": BEFORE,
            "journal": journal is not None and journal.kind == "file",
        },
    )
