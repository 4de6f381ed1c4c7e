"""Shared parts of the demos: steps with their time on the screen and their output in a file, and the comparison of a
report with the expected one.

Runs before there is a virtual environment: the standard library alone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"
GPUNODE = str(BIN / "gpunode")
LOGS = ROOT / ".cache" / "demo"
FREE_GIB = 2
INTERRUPTED = 130
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 90
SHOWN_LINES = 30


class DemoError(Exception):
    """The demo cannot go on; the message is one line."""

    code = 3


class Command:
    """A running command with its output in a file and a process group of its own."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            output.write(f"$ {' '.join(argv)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def runs(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    @property
    def code(self) -> int:
        """Return its exit code."""
        return self._process.wait(timeout=GRACE_S)

    def tail(self) -> list[str]:
        """Return the last lines of its output."""
        return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]

    def end(self) -> None:
        """End it with all that it started: first as by Ctrl-C, so that it removes what it began."""
        if not self.runs:
            return
        for number, grace_s in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, 10)):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=grace_s)
                break
        # What a shell starts in the background ignores SIGINT, and outlives it.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)


class Demo:
    """One run of a demo: ``total`` steps of the lab ``lab``."""

    def __init__(self, lab: str, total: int) -> None:
        self.lab = lab
        self._total = total
        self._number = 0
        self._started = time.monotonic()
        self._live = sys.stdout.isatty()

    def step(self, title: str, *commands: Sequence[str], limit_s: float, fine: tuple[int, ...] = (0,)) -> int:
        """Run commands side by side with their output in files; return the first exit code that is not 0.

        Raises DemoError after the end of the output if a code is not one of ``fine``, or if the limit is reached; the
        other commands are ended then.
        """
        self._number += 1
        head = f"[{self._number}/{self._total}] {title} …"
        print(head, end="", flush=True)
        started = time.monotonic()
        running: list[Command] = []
        try:
            for argv in commands:
                with deferred():
                    running.append(Command(argv, LOGS / f"{self._number}-{Path(argv[0]).name}.log"))
            while True:
                active = [command for command in running if command.runs]
                late = time.monotonic() - started > limit_s
                wrong = [each for each in running if (late if each in active else each.code not in fine)]
                if wrong or not active:
                    break
                if self._live:
                    print(f"\r{head} {clock(time.monotonic() - started)}", end="", flush=True)
                time.sleep(0.2)
        finally:
            for command in running:
                command.end()
        print(f"{f'{chr(13)}{head}' if self._live else ''} {clock(time.monotonic() - started)}")
        for command in wrong:
            sys.stdout.writelines(f"  | {line}\n" for line in command.tail())
            why = f"no end within {limit_s:.0f} s" if late else f"exit {command.code}"
            raise DemoError(f"{title}: {why}; all of its output is in {shown(command.log)}")
        return next((command.code for command in running if command.code), 0)

    def gpunode(self, title: str, *words: str, limit_s: float, fine: tuple[int, ...] = (0,)) -> int:
        """Run a verb of gpunode as a step."""
        return self.step(title, [GPUNODE, *words], limit_s=limit_s, fine=fine)

    def prepare(self, title: str) -> None:
        """Start the Docker engine beside the making of as much of the virtual environment as `nodes` needs; remove an
        unfinished demo's nodes.
        """
        for folder in (ROOT, Path("/var")):
            free = shutil.disk_usage(folder).free / 2**30
            if free < FREE_GIB:
                raise DemoError(f"{folder}: {free:.1f} GiB free, the demo needs {FREE_GIB} GiB: free disk space there")
        self.step(title, [_script("docker-engine")], [_script("bootstrap"), "lab"], limit_s=1800)
        if self.marker.parent.exists() and not self.marker.exists():
            print("      the last demo did not end: its nodes are removed")
            quiet(GPUNODE, "lab", "down", "--name", self.lab, limit_s=300)

    def nodes(self, title: str, *words: str) -> None:
        """Make nodes, and their image, beside the rest of the virtual environment."""
        up = (GPUNODE, "lab", "up", "--name", self.lab, *words)
        self.step(title, up, [_script("bootstrap")], limit_s=1800)

    @property
    def inventory(self) -> str:
        """Return the path of the lab's inventory."""
        return quiet(GPUNODE, "lab", "inventory", "--path", "--name", self.lab, limit_s=60).strip()

    @property
    def marker(self) -> Path:
        """Return the file beside the inventory that a finished demo leaves."""
        home = os.environ.get("GPUNODE_LAB_HOME")
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        return (Path(home) if home else base / "gpunode" / "lab") / self.lab / "demo-finished"

    def verdict(self, title: str, *words: str) -> tuple[int, dict[str, Any]]:
        """Validate as a step, and print its report; return the exit code and the report."""
        target, console = LOGS / "report.json", LOGS / "report.txt"
        for old in (target, console):
            old.unlink(missing_ok=True)
        outputs = ("--format", "console", "--output", str(console), "--format", "json", "--output", str(target))
        rc = self.gpunode(title, "validate", *words, *outputs, limit_s=600, fine=(0, 1, 3))
        if not target.exists():
            raise DemoError(f"{title}: no report was written (exit {rc}, output: {shown(LOGS)})")
        sys.stdout.write(console.read_text(encoding="utf-8"))
        return rc, dict(json.loads(target.read_text(encoding="utf-8")))

    def finished(self, wrong: list[str]) -> int:
        """Print the total time and how the result differs; return the exit code."""
        print(f"\ntotal: {clock(time.monotonic() - self._started)}")
        if wrong:
            print("\nThe result differs from the expected one:", *wrong, sep="\n  ")
            return 1
        self.marker.touch()
        return 0


def run(main: Any, name: str) -> NoReturn:
    """Run a demo's main function and end the program; errors are one line, and a second run is refused."""
    for number in ENDING:
        signal.signal(number, _interrupt)
    try:
        LOGS.mkdir(parents=True, exist_ok=True)
        with alone(name):
            code = main()
    except KeyboardInterrupt:
        print(f"\nmake {name}: interrupted; the next one begins with new nodes", file=sys.stderr)
        code = INTERRUPTED
    except DemoError as err:
        print(f"make {name}: {err}", file=sys.stderr)
        code = err.code
    except OSError as err:
        print(f"make {name}: {err}", file=sys.stderr)
        code = DemoError.code
    sys.exit(code)


@contextmanager
def deferred() -> Iterator[None]:
    """Hold back what ends the demo until the block ends: a command that is being started is known only then."""
    held: list[int] = []
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Refuse a second run on this machine; the kernel ends the lock with the process."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0gpunode-make/{name}")
        except OSError:
            raise DemoError(f"another make {name} runs on this machine: wait for it") from None
        yield


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def shown(path: Path) -> str:
    """Return a path of the checkout relative to it."""
    return str(path.relative_to(ROOT)) if ROOT in path.parents else str(path)


def quiet(*argv: str, limit_s: float) -> str:
    """Return what a short command prints; DemoError with its last line if it fails."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=limit_s, check=False, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"{' '.join(argv)} did not end within {limit_s:.0f} s") from None
    if done.returncode:
        raise DemoError((done.stderr.strip().splitlines() or [f"{' '.join(argv)}: exit {done.returncode}"])[-1])
    return done.stdout


def statuses(report: dict[str, Any], host: str) -> dict[str, set[str]]:
    """Return check id to its statuses on one node of the report."""
    by_check: dict[str, set[str]] = {}
    node = next(node for node in report["nodes"] if node["host"] == host)
    for finding in node["findings"]:
        by_check.setdefault(finding["check"], set()).add(finding["status"])
    return by_check


def _script(name: str) -> str:
    return str(ROOT / "scripts" / name)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
