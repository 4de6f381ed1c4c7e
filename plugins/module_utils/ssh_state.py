# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""Read the SSH daemon of this node: its settings, algorithms and keys, and the accounts with their keys."""

from __future__ import annotations

import base64
import glob
import grp
import os
import pwd
import stat
import time
from pathlib import Path
from typing import Any

from ansible_collections.gpunode.node.plugins.module_utils import commands, file_access
from ansible_collections.gpunode.node.plugins.module_utils.file_access import FileRefusedError
from ansible_collections.gpunode.node.plugins.module_utils.files_state import document, file_state, name_of
from ansible_collections.gpunode.node.plugins.module_utils.files_state import reason as reason_of
from ansible_collections.gpunode.node.plugins.module_utils.guard import last_line

COMMAND_S = 15
ACCOUNTS_S = 120
MOST_ACCOUNTS, MOST_KEYS, MOST_FILES = 500, 100, 100
OFFERS = ("kex", "cipher", "mac", "key", "key-sig")
LARGEST_DATABASE = 16 << 20
PASSWD, SHADOW = "/etc/passwd", "/etc/shadow"
MAIN, FOLDER = "/etc/ssh/sshd_config", "/etc/ssh/sshd_config.d"
NO_LOGIN = ("nologin", "false", "sync", "shutdown", "halt")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
WRITABLE_BY_OTHERS = 0o022


def query(*argv: str) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) of a command that only reads."""
    answer: tuple[int, str, str] = commands.run(list(argv), COMMAND_S, ENVIRONMENT)
    return answer


def daemon_settings() -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) of ``sshd -T``, also if ssh.socket left sshd without its folder."""
    try:
        answers: list[tuple[int, str, str]] = commands.run_with_files([], [["sshd", "-T"]])
    except commands.UnavailableError:
        return query("sshd", "-T")
    return answers[0]


def collected(users: list[str]) -> dict[str, Any]:
    """Return the state from which the roles ssh_hardening and accounts compute their plans; ``users`` may be remote."""
    status, effective, errors = daemon_settings()
    settings = values(effective)
    contents = {path: document_of(path) for path in [MAIN, *paths(f"{FOLDER}/*.conf")]}
    session = login()
    named = [*([session["user"]] if session else []), *users]
    return {
        "version": last_line(query("ssh", "-V")[2]),
        "effective": effective if status == 0 else None,
        "error": None if status == 0 else last_line(errors) or f"sshd -T: exit status {status}",
        "offered": {kind: query("ssh", "-Q", kind)[1].split() for kind in OFFERS},
        "contents": {path: text for path, (text, _) in contents.items()},
        "unreadable": {path: reason for path, (_, reason) in contents.items() if reason},
        "host_keys": host_keys(),
        "weak_moduli": weak_moduli(),
        "accounts": accounts(settings.get("authorizedkeysfile", [".ssh/authorized_keys"]), named),
        "login": session,
        "listening": listening(),
        "units": {name: unit(name) for name in ("ssh.service", "sshd.service", "ssh.socket", "sshd.socket")},
        "selinux": (document("/sys/fs/selinux/enforce") or "").strip() == "1",
    }


def paths(pattern: str) -> list[str]:
    """Return the paths that match a shell pattern, in sshd's order."""
    return sorted(glob.glob(pattern))[:MOST_FILES]  # noqa: PTH207 - names, not paths


def values(effective: str) -> dict[str, list[str]]:
    """Return the words of each setting that ``sshd -T`` prints; all words of a repeated setting."""
    settings: dict[str, list[str]] = {}
    for line in effective.splitlines():
        name, _, rest = line.partition(" ")
        settings.setdefault(name, []).extend(rest.split())
    return settings


def unit(name: str) -> dict[str, str]:
    """Return systemd's state of a unit: ``load``, ``active``, ``enabled``, ``listen``."""
    _, output, _ = query("systemctl", "show", "-p", "LoadState,ActiveState,UnitFileState,Listen", name)
    fields = dict(line.partition("=")[::2] for line in output.splitlines())
    listen = [line.partition("=")[2].split(" ")[0] for line in output.splitlines() if line.startswith("Listen=")]
    return {
        "load": fields.get("LoadState", ""),
        "active": fields.get("ActiveState", ""),
        "enabled": fields.get("UnitFileState", ""),
        "listen": " ".join(listen),
    }


def host_keys() -> list[dict[str, Any]]:
    """Return type, size, mode, owner and age of each private host key."""
    keys = []
    for path in paths("/etc/ssh/ssh_host_*_key"):
        row = public_key(document(f"{path}.pub") or "")
        status = os.lstat(path)
        keys.append(
            {
                "path": path,
                "type": row.get("type", ""),
                "bits": row.get("bits", 0),
                "mode": f"{stat.S_IMODE(status.st_mode):04o}",
                "owner": name_of(pwd.getpwuid, status.st_uid),
                "group": name_of(grp.getgrgid, status.st_gid),
                "mtime": status.st_mtime,
            }
        )
    return keys


def public_key(line: str) -> dict[str, Any]:
    """Parse a line of authorized_keys or of a public key: type, size, options. Return {} if it is not a key."""
    words = line.split()
    for index, word in enumerate(words[:-1]):
        if not word.startswith(("ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-")):
            continue
        try:
            blob = base64.b64decode(words[index + 1], validate=True)
        except ValueError:
            continue
        length = int.from_bytes(blob[:4], "big")
        if blob[4 : 4 + length].decode("ascii", "replace") != word:
            continue
        bits = {"ssh-ed25519": 256, "sk-ssh-ed25519@openssh.com": 256}.get(word, 0)
        if word == "ssh-rsa":
            rest = blob[4 + length :]
            exponent = int.from_bytes(rest[:4], "big")
            modulus = rest[4 + exponent :]
            bits = int.from_bytes(modulus[4:], "big").bit_length()
        elif word.startswith("ecdsa-sha2-nistp"):
            bits = int(word[len("ecdsa-sha2-nistp") :][:3])
        return {"type": word, "bits": bits, "blob": words[index + 1], "options": " ".join(words[:index])}
    return {}


def weak_moduli() -> int | None:
    """Return how many Diffie-Hellman groups below 3072 bits the daemon may use; None without the file."""
    text = document("/etc/ssh/moduli")
    if text is None:
        return None
    sizes = [line.split()[4] for line in text.splitlines() if line[:1].isdigit() and len(line.split()) > 5]
    return sum(1 for size in sizes if size.isdigit() and int(size) < 3071)


def accounts(patterns: list[str], named: list[str]) -> list[dict[str, Any]]:
    """Return the named accounts, root and all local accounts that can have a shell, with their keys.

    Those of a directory service are not listed anywhere: NSS finds them by their names alone.
    """
    local = [fields[0] for fields in rows(PASSWD) if len(fields) == 7]
    try:
        shadow = {fields[0]: fields[1] for fields in rows(SHADOW) if len(fields) > 2}
    except OSError:
        shadow = {}
    listing = []
    deadline = time.monotonic() + ACCOUNTS_S
    for name in dict.fromkeys([*named, *local]):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_shell.rpartition("/")[2] in NO_LOGIN:
            continue
        listing.append(account(entry, shadow.get(name), patterns, deadline))
    return listing[:MOST_ACCOUNTS]


def rows(path: str) -> list[list[str]]:
    """Return the fields of each line of a database of accounts. Raises OSError.

    With chfn, users write what is not ASCII into their lines, also bytes that are not UTF-8, and other line ends.
    """
    text = file_access.read(path, LARGEST_DATABASE).decode("utf-8", "replace")
    return [line.split(":") for line in text.split("\n")]


def account(
    entry: pwd.struct_passwd, hashed: str | None, patterns: list[str], deadline: float = float("inf")
) -> dict[str, Any]:
    """Return one account; its password only as a state (none, locked, closed, set, unknown)."""
    state = "unknown" if hashed is None else {"": "none", "!": "closed", "*": "locked"}.get(hashed[:1], "set")
    groups = {name_of(grp.getgrgid, gid) for gid in os.getgrouplist(entry.pw_name, entry.pw_gid)}
    return {
        "name": entry.pw_name,
        "uid": entry.pw_uid,
        "group": name_of(grp.getgrgid, entry.pw_gid),
        "home": entry.pw_dir,
        "shell": entry.pw_shell,
        "groups": sorted(groups)[:MOST_KEYS],
        "password": state,
        **keys_of(entry, patterns, deadline),
    }


def keys_of(entry: pwd.struct_passwd, patterns: list[str], deadline: float) -> dict[str, Any]:
    """Return the keys of an account, read with the account's rights and within a time limit."""
    limit_s = min(file_access.LIMIT_S, deadline - time.monotonic())
    try:
        if limit_s <= 0:
            raise FileRefusedError(f"the homes before {entry.pw_dir} did not answer in {ACCOUNTS_S} s")
        answer: dict[str, Any] = file_access.limited(entry.pw_uid, lambda: _keys_of(entry, patterns), limit_s)
    except OSError as err:
        problem = f"the keys of {entry.pw_name} below {entry.pw_dir} could not be read: {err}"
        answer = {"keys": [], "keys_problem": problem, "document": None, "document_problem": problem}
    return {**answer, "keys": answer["keys"][:MOST_KEYS]}


def _keys_of(entry: pwd.struct_passwd, patterns: list[str]) -> dict[str, Any]:
    keys, problem = [], ""
    for pattern in patterns:
        path = pattern.replace("%h", entry.pw_dir).replace("%u", entry.pw_name).replace("%%", "%")
        path = path if path.startswith("/") else f"{entry.pw_dir}/{path}"
        text, reason = document_of(path)
        problem = problem or reason
        if text is None:
            continue
        problem = problem or strict_problem(path, entry)
        lines = [public_key(line) for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
        keys += [{name: row[name] for name in ("type", "bits", "blob", "options")} for row in lines if row]
        if any(not row for row in lines):
            problem = problem or f"{path} has lines that are not keys"
    text, reason = document_of(f"{entry.pw_dir}/.ssh/authorized_keys")
    return {
        "keys": keys,
        "keys_problem": problem,
        "document": text,
        "document_problem": reason,
        "folder": file_state(f"{entry.pw_dir}/.ssh")["kind"],
    }


def document_of(path: str) -> tuple[str | None, str]:
    """Return the text of a file, and why an existing one was not read."""
    try:
        return file_access.text(path), ""
    except (FileNotFoundError, NotADirectoryError) as err:
        # A link that leads nowhere is there.
        return None, "" if file_state(path)["kind"] == "absent" else reason_of(path, err)
    except OSError as err:
        return None, reason_of(path, err)


def strict_problem(path: str, entry: pwd.struct_passwd) -> str:
    """Return why sshd with StrictModes would ignore a file of keys; empty if it would read it."""
    real = Path(os.path.realpath(path))
    home = Path(os.path.realpath(entry.pw_dir))
    chain = [real, *(folder for folder in real.parents if folder == home or home in folder.parents)]
    for part in chain:
        status = part.stat()
        if status.st_uid not in (0, entry.pw_uid) or status.st_mode & WRITABLE_BY_OTHERS:
            return f"{part} belongs to another user or can be written by others, and sshd therefore ignores it"
    return ""


def login() -> dict[str, Any] | None:
    """Return user, client address and port of the SSH login that this process belongs to; None without one."""
    pid = os.getpid()
    for _ in range(50):
        try:
            data = Path(f"/proc/{pid}/environ").read_bytes()
            parent = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            return None
        fields = dict(variable.partition(b"=")[::2] for variable in data.split(b"\0"))
        words = fields.get(b"SSH_CONNECTION", b"").decode("ascii", "replace").split()
        if len(words) == 4 and b"SUDO_USER" not in fields:
            user = fields.get(b"LOGNAME", fields.get(b"USER", b"")).decode("utf-8", "replace")
            return {"user": user, "address": words[0], "port": int(words[3])}
        pid = int(parent)
        if pid <= 1:
            return None
    return None


def listening() -> list[int]:
    """Return the TCP ports in state LISTEN."""
    ports = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (document(path) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 3 and words[3] == "0A":
                ports.add(int(words[1].rpartition(":")[2], 16))
    return sorted(ports)


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """Return the effective sshd configuration, in general and for given logins, as if files were in place."""
    calls = [["sshd", "-t"], ["sshd", "-T"]]
    for row in question["logins"]:
        connection = f"user={row['user']},host={row['address']},addr={row['address']},laddr=0.0.0.0,lport={row['port']}"
        calls.append(["sshd", "-T", "-C", connection])
    try:
        judged, whole, *each = commands.run_with_files(question["files"], calls)
    except commands.UnavailableError as err:
        return {"unavailable": str(err)}
    if judged[0] or whole[0]:
        return {"error": last_line(judged[2] or whole[2]) or f"sshd -t: exit status {judged[0]}"}
    texts = {row["user"]: text for row, (_, text, _) in zip(question["logins"], each)}  # noqa: B905
    return {"effective": whole[1], "logins": texts}
