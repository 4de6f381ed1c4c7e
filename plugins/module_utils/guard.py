# Copyright: The gpunode maintainers
# SPDX-License-Identifier: Apache-2.0
"""A change that reverts itself: the old state on disk, with a timer and a unit that restore it.

The module ``guarded_change`` imports this file. It also stores the file on the node as the program of the timer and
the unit, started as ``python3 -I``; therefore it uses only the standard library.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOME = Path("/var/lib/gpunode/guard")
UNITS = Path("/etc/systemd/system")
BEFORE = (
    "sysinit.target ssh.service sshd.service ssh.socket sshd.socket sockets.target network-pre.target nftables.service "
    "firewalld.service gpunode-firewall.service"
)
PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python")
COMMAND_LIMIT_S = 60
LOCK_LIMIT_S = 90
LARGEST = 1 << 20
"""Maximum size of a file of which the old content is saved, in bytes."""

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


def taken(lock: int) -> bool:
    """Take the lock of an open file if it is free; return whether it was free."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Guard:
    """One guarded change of a node, identified by its name."""

    def __init__(self, name: str, home: Path = HOME, units: Path = UNITS, runner: Runner = run) -> None:
        self.name = name
        self.folder = home / name
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
            while not taken(lock.fileno()):
                if time.monotonic() >= deadline:
                    if insist:
                        break
                    raise GuardError(f"another run has held the lock of {self.name} for {LOCK_LIMIT_S} s: try again")
                time.sleep(0.1)
            yield

    def read(self, document: str) -> dict[str, Any] | None:
        """Return one of the guard's documents; None if it is absent."""
        try:
            found: dict[str, Any] = json.loads((self.folder / document).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def write(self, document: str, content: dict[str, Any]) -> None:
        """Write a document so that it survives a power failure."""
        write_file(self.folder / document, json.dumps(content).encode(), 0o600, 0, 0)

    @property
    def armed(self) -> bool:
        """Return True while a change awaits its confirmation."""
        return (self.folder / "record.json").exists()

    def arm(self, record: dict[str, Any], program: str, limit_s: int) -> None:
        """Save the old state to disk, enable the unit for the next boot and start the timer."""
        document = {
            **record,
            "files": [kept(path) for path in record["paths"]],
            "units": [self.unit_state(unit) for unit in record["units"]],
            "armed_at": time.time(),
        }
        (self.folder / "outcome.json").unlink(missing_ok=True)
        (self.folder / "confirmed.json").unlink(missing_ok=True)
        path = self.folder / "program.py"
        write_file(path, program.encode(), 0o600, 0, 0)
        python = next((one for one in PYTHONS if Path(one).exists()), sys.executable)
        start = [python, "-I", str(path)]
        write_file(self.unit, self.unit_text([*start, "boot", self.name]).encode(), 0o644, 0, 0)
        self.write("record.json", document)
        os.sync()
        try:
            self.must("systemctl", "daemon-reload")
            self.must("systemctl", "enable", self.unit.name)
            self.must(
                "systemd-run",
                f"--unit={self.timer}",
                f"--on-active={limit_s}s",
                "--timer-property=AccuracySec=100ms",
                "--collect",
                f"--description=Revert {self.name} unless it is confirmed",
                *start,
                "timer",
                self.name,
            )
            self.must("systemctl", "is-active", f"{self.timer}.timer")
        except GuardError:
            self.disarm()
            raise
        os.sync()

    def unit_text(self, start: list[str]) -> str:
        """Return the unit that restores the old state at boot, before anything that depends on it starts."""
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
        """Stop the timer, remove the unit and the record."""
        self.run(["systemctl", "stop", f"{self.timer}.timer"])
        self.run(["systemctl", "disable", self.unit.name])
        self.unit.unlink(missing_ok=True)
        for document in ("record.json", "program.py"):
            (self.folder / document).unlink(missing_ok=True)
        self.run(["systemctl", "daemon-reload"])
        os.sync()

    def confirm(self, token: str) -> None:
        """Write the confirmation, then disarm. Raise GuardError if the change was already reverted."""
        record = self.read("record.json")
        if record is None or record["token"] != token:
            outcome = self.read("outcome.json")
            at = outcome["by"] if outcome and outcome["token"] == token else "its record is missing"
            raise GuardError(f"the change {self.name} was reverted before its confirmation: {at}")
        self.write("confirmed.json", {"token": token, "at": time.time()})
        self.disarm()

    def restore(self, by: str, booting: bool = False) -> dict[str, Any] | None:
        """Restore the old state unless the change is confirmed; return what was done, None if nothing was due."""
        record = self.read("record.json")
        if record is None:
            return None
        confirmed = self.read("confirmed.json")
        if confirmed is not None and confirmed["token"] == record["token"]:
            self.disarm()
            return None
        after_s = round(time.time() - record["armed_at"], 1)
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
        outcome = {
            "token": record["token"],
            "by": by,
            "at": time.time(),
            "after_s": after_s,
            "restored": restored,
            "failed": failed,
        }
        self.write("outcome.json", outcome)
        self.disarm()
        return outcome

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


def kept(path: str) -> dict[str, Any]:
    """Return the state of a path, for ``put_back`` to restore."""
    try:
        there = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"path": path, "kind": "absent"}
    entry = {"path": path, "mode": stat.S_IMODE(there.st_mode), "uid": there.st_uid, "gid": there.st_gid}
    if stat.S_ISLNK(there.st_mode):
        return {**entry, "kind": "link", "target": os.readlink(path)}  # noqa: PTH115
    if not stat.S_ISREG(there.st_mode) or there.st_size > LARGEST:
        raise GuardError(f"{path} is not a file of at most {LARGEST >> 20} MiB: its old state cannot be saved")
    return {**entry, "kind": "file", "data": base64.b64encode(Path(path).read_bytes()).decode("ascii")}


def put_back(entry: dict[str, Any]) -> bool:
    """Restore one path; return whether it differed."""
    path = Path(entry["path"])
    with contextlib.suppress(GuardError):
        if kept(entry["path"]) == entry:
            return False
    if entry["kind"] == "absent":
        path.unlink()
    elif entry["kind"] == "link":
        draft = path.with_name(f".{path.name}.gpunode")
        draft.unlink(missing_ok=True)
        draft.symlink_to(entry["target"])
        draft.replace(path)
    else:
        write_file(path, base64.b64decode(entry["data"]), entry["mode"], entry["uid"], entry["gid"])
    return True


def write_file(path: Path, data: bytes, mode: int, uid: int, gid: int) -> None:
    """Replace a file by one rename that survives a power failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".gpunode", dir=str(path.parent))
    try:
        with os.fdopen(number, "wb") as out:
            out.write(data)
            if os.geteuid() == 0:
                os.fchown(out.fileno(), uid, gid)
            os.fchmod(out.fileno(), mode)
            out.flush()
            os.fsync(out.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    folder = os.open(str(path.parent), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
