# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""A change that reverts itself: the old state on disk, with a timer and a unit that restore it.

The module ``guarded_change`` imports this file. It also stores the file on the node as the program of the timer and
the unit, started as ``python3 -I``; therefore it uses only the standard library and ``file_access``, stored beside it.

The old files are kept as copies in their own folders, ready to be renamed: a full disk does not stop a revert. A revert
that fails keeps everything that it needs, is tried again by the timer and at boot, and is reported at logins.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    from ansible_collections.gpunode.node.plugins.module_utils import file_access
except ImportError:
    # The program on the node: file_access.py is in its folder, to which only root writes.
    sys.path.insert(0, str(Path(__file__).parent))
    import file_access  # type: ignore[import-not-found]

HOME = Path("/var/lib/gpunode/guard")
UNITS = Path("/etc/systemd/system")
NOTICES = Path("/run")
SHADOW = "/etc/shadow"
BEFORE = (
    "sysinit.target ssh.service sshd.service ssh.socket sshd.socket sockets.target network-pre.target nftables.service "
    "firewalld.service gpunode-firewall.service"
)
PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python")
COMMAND_LIMIT_S = 60
LOCK_LIMIT_S = 90
RETRY_S = 60
"""Seconds between two attempts of a revert that failed."""
LARGEST = 1 << 20
"""Maximum size of a file of which the old content is saved, in bytes."""

NOT_BEGUN, BEGUN = "not-reverted", "reverting"
"""Name of an empty file before and since the begin of a revert."""

Runner = Callable[[list[str]], "tuple[int, str]"]


class GuardError(Exception):
    """The reason why a change was not made, not confirmed or not reverted, in one line."""


def run(argv: list[str]) -> tuple[int, str]:
    """Return (exit status, output) of a command in its own process group; 124 at the time limit, 127 if missing."""
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as err:
        return 127, str(err)
    try:
        output, _ = child.communicate(timeout=COMMAND_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return 124, f"it exceeded {COMMAND_LIMIT_S} s"
    return child.returncode, output.decode("utf-8", "replace")


def try_lock(lock: int) -> bool:
    """Take the lock of an open file if it is free; return whether it was free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Guard:
    """One guarded change of a node, identified by its name."""

    def __init__(
        self, name: str, home: Path = HOME, units: Path = UNITS, runner: Runner = run, notices: Path = NOTICES
    ) -> None:
        self.name = name
        self.folder = home / name
        self.notices = {
            "motd": notices / "motd.d" / f"gpunode-guard-{name}",
            "issue": notices / "issue.d" / f"gpunode-guard-{name}.issue",
            "validate": notices / "gpunode" / f"revert-{name}.json",
        }
        self.unit = units / f"gpunode-guard-{name}.service"
        self.timer = f"gpunode-guard-{name}-revert"
        self.run = runner

    @contextlib.contextmanager
    def locked(self, *, insist: bool = False) -> Iterator[None]:
        """Hold the guard's lock. A timer that fires during a confirmation waits and then finds the change confirmed.

        Raise GuardError if another process holds the lock past the limit. With ``insist``, which the timer uses,
        continue without the lock: a process that hangs with the lock must not keep the node locked out.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline = time.monotonic() + LOCK_LIMIT_S
        with (self.folder / "lock").open("w", encoding="ascii") as lock:
            while not try_lock(lock.fileno()):
                if time.monotonic() >= deadline:
                    if insist:
                        break
                    raise GuardError(f"another run has held the lock of {self.name} for {LOCK_LIMIT_S} s: try again")
                time.sleep(0.1)
            yield

    def read(self, document: str) -> dict[str, Any] | None:
        """Return one of the guard's documents; None if it is absent."""
        try:
            content: dict[str, Any] = json.loads((self.folder / document).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return content

    def write(self, document: str, content: dict[str, Any]) -> None:
        """Write a document so that it survives a power failure."""
        write_file(self.folder / document, json.dumps(content).encode(), 0o600)

    @property
    def armed(self) -> bool:
        """Return True while a change awaits its confirmation, or its revert has not succeeded."""
        return (self.folder / "record.json").exists()

    def waits(self, token: str) -> bool:
        """Return whether a change may still be confirmed: a revert of it has not begun."""
        record = self.read("record.json")
        marks = (self.folder / "outcome.json", self.folder / BEGUN, self.notices["validate"])
        begun = any(mark.exists() for mark in marks)
        return record is not None and record["token"] == token and not begun

    @property
    def start(self) -> list[str]:
        """Return the command that starts the program."""
        python = next((path for path in PYTHONS if Path(path).exists()), sys.executable)
        return [python, "-I", str(self.folder / "program.py")]

    def arm(self, record: dict[str, Any], programs: dict[str, str], limit_s: int) -> None:
        """Save the old state to disk, enable the unit for the next boot and start the timer.

        ``record``: ``paths``, and ``owners`` of those that are not root's (path to user id).
        """
        owners = record.get("owners", {})
        document = {
            **record,
            "files": [
                self.ready(kept(path, owners.get(path, 0)), record.get("locked", [])) for path in record["paths"]
            ],
            "units": [self.unit_state(unit) for unit in record["units"]],
            "armed_at": time.time(),
        }
        for name in ("outcome.json", "confirmed.json", BEGUN):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.notices.values():
            path.unlink(missing_ok=True)
        write_file(self.folder / NOT_BEGUN, b"", 0o600)
        for name, text in programs.items():
            write_file(self.folder / name, text.encode(), 0o600)
        write_file(self.unit, self.unit_text([*self.start, "boot", self.name]).encode(), 0o644)
        self.write("record.json", document)
        os.sync()
        try:
            self.must("systemctl", "daemon-reload")
            self.must("systemctl", "enable", self.unit.name)
            self.must(*self.schedule(limit_s))
            self.must("systemctl", "is-active", f"{self.timer}.timer")
        except GuardError:
            self.disarm()
            raise
        os.sync()

    def ready(self, entry: dict[str, Any], locked: list[str]) -> dict[str, Any]:
        """Write a copy of an old file beside it, ready to be renamed; return the entry with the name of the copy."""
        path = Path(entry["path"])
        copy = path.with_name(f".{path.name}.gpunode-{self.name}")
        if entry["kind"] == "file":
            owner = (entry["uid"], entry["gid"])
            file_access.write(str(copy), base64.b64decode(entry["data"]), entry["mode"], owner)
            file_access.copy_attributes(str(path), str(copy), entry["uid"])
        elif entry["kind"] == "link":
            copy.unlink(missing_ok=True)
            copy.symlink_to(entry["target"])
        else:
            return entry
        return {**entry, "copy": str(copy), **({"locked": locked} if entry["path"] == SHADOW else {})}

    def schedule(self, limit_s: int) -> list[str]:
        """Return the command that starts the timer: it fires again until the change is confirmed or reverted."""
        return [
            "systemd-run",
            f"--unit={self.timer}",
            f"--on-active={limit_s}s",
            f"--on-unit-inactive={RETRY_S}s",
            "--timer-property=AccuracySec=100ms",
            "--collect",
            f"--description=Revert {self.name} unless it is confirmed",
            *self.start,
            "timer",
            self.name,
        ]

    def unit_text(self, start: list[str]) -> str:
        """Return the unit that restores the old state at boot, before anything that depends on it starts."""
        # Not a template: no text of a site may replace the way back, and nodes have no Jinja2.
        return (
            "# Managed by gpunode (guarded_change): removed when the change is confirmed.\n"
            f"[Unit]\nDescription=Restore the state before the unconfirmed change {self.name}\n"
            "DefaultDependencies=no\nAfter=local-fs.target systemd-remount-fs.service\n"
            f"Before={BEFORE}\nRequiresMountsFor={self.folder} /etc\nConflicts=shutdown.target\n"
            f"ConditionPathExists={self.folder}/record.json\n\n"
            f"[Service]\nType=oneshot\nExecStart={' '.join(start)}\nTimeoutStartSec=300\n\n"
            "[Install]\nWantedBy=sysinit.target\n"
        )

    def must(self, *argv: str) -> None:
        """Run a command. Raise GuardError if it fails."""
        status, output = self.run(list(argv))
        if status != 0:
            raise GuardError(f"{' '.join(argv[:3])}: exit status {status}: {last_line(output)}")

    def unit_state(self, unit: str) -> dict[str, str]:
        """Return the ``enabled`` and ``active`` states of a unit, in the terms of systemctl."""
        return {
            "name": unit,
            "enabled": last_line(self.run(["systemctl", "is-enabled", unit])[1]),
            "active": last_line(self.run(["systemctl", "is-active", unit])[1]),
        }

    def disarm(self) -> None:
        """Remove the copies and the record, then the timer and the unit, which do nothing without the record."""
        for entry in (self.read("record.json") or {"files": []})["files"]:
            if "copy" in entry:
                with contextlib.suppress(OSError):
                    file_access.remove(entry["copy"], entry["uid"])
        (self.folder / "record.json").unlink(missing_ok=True)
        os.sync()
        self.run(["systemctl", "stop", f"{self.timer}.timer"])
        self.run(["systemctl", "disable", self.unit.name])
        for name in ("program.py", "file_access.py", NOT_BEGUN, BEGUN):
            (self.folder / name).unlink(missing_ok=True)
        for path in (self.unit, *self.notices.values()):
            path.unlink(missing_ok=True)
        self.run(["systemctl", "daemon-reload"])
        os.sync()

    def confirm(self, token: str) -> None:
        """Write the confirmation, then disarm. Raise GuardError if the change was already reverted, also in part."""
        if not self.waits(token):
            outcome = self.read("outcome.json")
            missing = "its revert has begun" if self.armed else "its record is missing"
            at = outcome["by"] if outcome and outcome["token"] == token else missing
            raise GuardError(f"the change {self.name} was reverted before its confirmation: {at}")
        self.write("confirmed.json", {"token": token, "at": time.time()})
        self.disarm()

    def restore(self, by: str, booting: bool = False) -> dict[str, Any] | None:
        """Restore the old state unless the change is confirmed; return what was done, None if nothing was pending.

        What failed is tried again: the record, the copies, the program and the unit stay.
        """
        record = self.read("record.json")
        if record is None:
            return None
        confirmed = self.read("confirmed.json")
        if confirmed is not None and confirmed["token"] == record["token"]:
            self.disarm()
            return None
        after_s = round(time.time() - record["armed_at"], 1)
        # From here on the change cannot be confirmed. A rename needs no space.
        with contextlib.suppress(OSError):
            (self.folder / NOT_BEGUN).rename(self.folder / BEGUN)
        self.report("validate", ["it was interrupted"])
        restored, failed = [], []
        for entry in record["files"]:
            try:
                if put_back(entry):
                    restored.append(entry["path"])
            except OSError as err:
                failed.append(f"{entry['path']}: {err}")
        failed += self.restore_units(record["units"], booting)
        if not booting:
            failed += [message for argv in record["restore"] for message in self.failure(argv)]
        before = self.read("outcome.json")
        outcome = {
            "token": record["token"],
            "by": by,
            "at": time.time(),
            "after_s": after_s,
            # Of all attempts.
            "restored": [*(before["restored"] if before is not None else []), *restored],
            "failed": failed,
        }
        try:
            self.write("outcome.json", outcome)
        except OSError as err:
            outcome["failed"] = failed = [*failed, f"{self.folder}: {err}"]
        if failed:
            for kind in self.notices:
                self.report(kind, failed)
            self.run(self.schedule(RETRY_S))  # it fails if the timer is still there
        else:
            self.disarm()
        return outcome

    def report(self, kind: str, failed: list[str]) -> None:
        """Write why a revert failed, for logins or for ``gpunode validate``. These files are in memory."""
        reasons = "".join(char if char.isprintable() else "?" for char in "; ".join(failed))[:1000]
        text = (
            f"gpunode: the change {self.name} could not be reverted: {reasons}. This is tried again every {RETRY_S} s "
            f"and at boot. The attempts are listed by: journalctl -u 'gpunode-guard-{self.name}*'\n"
        )
        if kind == "validate":
            text = json.dumps({"change": self.name, "at": time.time(), "failed": failed[:100]}) + "\n"
        with contextlib.suppress(OSError):
            write_file(self.notices[kind], text.encode(), 0o644)

    def restore_units(self, units: list[dict[str, str]], booting: bool) -> list[str]:
        """Enable, disable, mask, start and stop units as they were; return what failed."""
        self.run(["systemctl", "daemon-reload"])
        failed = []
        now = {unit["name"]: self.unit_state(unit["name"]) for unit in units}
        for unit in units:
            name, was = unit["name"], unit["enabled"]
            verb = {"enabled": "enable", "disabled": "disable", "masked": "mask"}.get(was)
            if now[name]["enabled"] == "masked" and was != "masked":
                failed += self.failure(["systemctl", "unmask", name])
            if verb is not None and now[name]["enabled"] != was:
                failed += self.failure(["systemctl", verb, name])
        # At boot the services start after this unit: waiting for them here would never end.
        block = ["--no-block"] if booting else []
        going = [unit["name"] for unit in units if unit["active"] in ("inactive", "failed")]
        coming = [unit["name"] for unit in units if unit["active"] == "active" and unit["enabled"] != "unknown"]
        for verb, names in (("stop", going), ("start", coming)):
            for name in names:
                active = now[name]["active"] in ("active", "activating", "reloading")
                if booting or active != (verb == "start"):
                    failed += self.failure(["systemctl", *block, verb, name])
        return failed

    def failure(self, argv: list[str]) -> list[str]:
        """Run a command; return why it failed, empty on success."""
        status, output = self.run(argv)
        return [f"{' '.join(argv)}: exit status {status}: {last_line(output)}"] if status else []


def last_line(output: str) -> str:
    """Return the last line of an output that is not blank; empty without one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def kept(path: str, uid: int = 0) -> dict[str, Any]:
    """Return the state of a path, for ``put_back`` to restore; ``uid``: the owner of its folder."""
    try:
        state = file_access.path_state(path, uid, LARGEST)
    except OSError as err:
        raise GuardError(f"{path}: {err}: its old state cannot be saved") from None
    if state is None:
        return {"path": path, "kind": "absent", "uid": uid}
    owner = (state.uid, state.gid)
    if uid not in (0, state.uid) and file_access.in_folder_of(path, uid):
        # In the user's own folder root writes that user's files only, also in place of a file of root.
        owner = (uid, pwd.getpwuid(uid).pw_gid)
    entry = {"path": path, "mode": state.mode, "uid": owner[0], "gid": owner[1]}
    if state.kind == "a symbolic link" and not state.shared:
        return {**entry, "kind": "link", "target": os.readlink(path)}  # noqa: PTH115
    if state.data is None:
        raise GuardError(f"{path} is not a file of at most {LARGEST >> 20} MiB: its old state cannot be saved")
    return {**entry, "kind": "file", "data": base64.b64encode(state.data).decode("ascii")}


def put_back(entry: dict[str, Any]) -> bool:
    """Restore one path; return whether it differed."""
    path, uid, copy = entry["path"], entry.get("uid", 0), entry.get("copy")
    old = {key: value for key, value in entry.items() if key not in ("copy", "locked")}
    if _is(path, old):
        return False
    if entry.get("locked"):
        return unlocked(entry)
    if entry["kind"] == "absent":
        file_access.remove(path, uid)
    elif copy is not None and _is(copy, {**old, "path": copy}):
        file_access.rename(copy, Path(path).name, uid)
    elif entry["kind"] == "link":
        file_access.remove(path, uid)
        Path(path).symlink_to(entry["target"])
    else:
        file_access.write(path, base64.b64decode(entry["data"]), entry["mode"], (uid, entry["gid"]))
    return True


def _is(path: str, entry: dict[str, Any]) -> bool:
    """Return whether a path has a saved state."""
    with contextlib.suppress(GuardError):
        return kept(path, entry.get("uid", 0)) == entry
    return False


@contextlib.contextmanager
def passwords_locked() -> Iterator[None]:
    """Hold the lock of the password files, for which programs such as passwd wait. Without it if it is not free."""
    libc = ctypes.CDLL(None)
    held = libc.lckpwdf() == 0
    try:
        yield
    finally:
        if held:
            libc.ulckpwdf()


def without_passwords(data: bytes, names: list[str]) -> bytes:
    """Return the content of /etc/shadow with passwords of users that nothing matches.

    ``*`` before the hash, not ``!``: with ``UsePAM no``, sshd refuses also the keys of an account with ``!``.
    """
    lines = data.split(b"\n")
    for number, line in enumerate(lines):
        fields = line.split(b":")
        if len(fields) > 1 and fields[0].decode("utf-8", "replace") in names:
            fields[1] = b"*" + fields[1].lstrip(b"!*")
            lines[number] = b":".join(fields)
    return b"\n".join(lines)


def to_lock(data: bytes, names: list[str]) -> list[str]:
    """Return the users among ``names`` with a password, with none, or with an account that is locked as a whole."""
    return [name for name in names if without_passwords(data, [name]) != data]


def lock_passwords(names: list[str]) -> None:
    """Write ``*`` before the passwords of users. Raises OSError."""
    with passwords_locked():
        shadow = file_access.path_state(SHADOW, 0, LARGEST)
        if shadow is None or shadow.data is None:
            raise FileNotFoundError(f"{SHADOW} is missing or too large")
        replace_shadow(without_passwords(shadow.data, names), shadow.mode, (shadow.uid, shadow.gid))


def replace_shadow(data: bytes, mode: int, owner: tuple[int, int]) -> None:
    """Replace /etc/shadow by one rename, with its label and attributes. Raises OSError."""
    draft = f"{SHADOW}.gpunode"
    file_access.write(draft, data, mode, owner)
    file_access.copy_attributes(SHADOW, draft, 0)
    file_access.rename(draft, Path(SHADOW).name, 0)


def unlocked(entry: dict[str, Any]) -> bool:
    """Restore the passwords that ``lock_passwords`` locked; changes of other programs since then stay."""
    before = base64.b64decode(entry["data"])
    with passwords_locked():
        shadow = file_access.path_state(SHADOW, 0, LARGEST)
        data = b"" if shadow is None or shadow.data is None else shadow.data
        copy = file_access.path_state(entry["copy"], 0, LARGEST)
        if data in (b"", without_passwords(before, entry["locked"])) and copy is not None and copy.data == before:
            file_access.rename(entry["copy"], Path(SHADOW).name, 0)
            return True
        fields = {line.split(b":")[0]: line.split(b":")[1] for line in before.split(b"\n") if b":" in line}
        lines = (data or before).split(b"\n")
        for number, line in enumerate(lines):
            parts = line.split(b":")
            if parts[0].decode("utf-8", "replace") in entry["locked"] and parts[0] in fields and len(parts) > 1:
                parts[1] = fields[parts[0]] if parts[1] == b"*" + fields[parts[0]].lstrip(b"!*") else parts[1]
                lines[number] = b":".join(parts)
        if b"\n".join(lines) == data:
            return False
        replace_shadow(b"\n".join(lines), entry["mode"], (entry["uid"], entry["gid"]))
        return True


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a file of root by one rename that survives a power failure."""
    me = os.geteuid()
    file_access.write(str(path), data, mode, (me, os.getegid()))


def main(argv: list[str]) -> int:
    """Restore on behalf of the timer or the unit: ``timer NAME`` or ``boot NAME``."""
    by, name = argv
    guard = Guard(name)
    phrases = {"timer": "by the timer on the node", "boot": "at boot"}
    with guard.locked(insist=True):
        outcome = guard.restore(phrases[by], booting=by == "boot")
    if outcome is not None:
        # For the journal of the unit.
        restored, failed = (", ".join(outcome[key]) or "nothing" for key in ("restored", "failed"))
        sys.stdout.write(f"reverted {name}: {restored}; failed: {failed}\n")
    return 1 if outcome and outcome["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
