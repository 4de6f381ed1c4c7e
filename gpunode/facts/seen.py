"""What a bundle holds, asked for with the reason at hand where it does not hold it."""

import re
import signal
from collections.abc import Callable
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.probe.bundle import Bundle, CommandResult

READ_LOG = "probe-read"
"""The command under which the probe says what it could not read, one ``PATH: REASON`` a line."""
NOT_RUN = "not run:"
"""How the probe begins the reason for a command that it left out."""

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_WORD = re.compile(r"[\w.+~:^-]{1,255}", re.ASCII)


class Unseen(Exception):  # noqa: N818
    """Something was not seen; the message is the reason and becomes a gap."""


class Seen:
    """A bundle as the fact readers ask it: an answer, "it is not there", or Unseen with the reason."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        log = bundle.commands.get(READ_LOG)
        self._problems = log.stderr.splitlines() if log else []
        self._unreadable: dict[str, str] = {}
        for problem in self._problems:
            self._unreadable.setdefault(problem.partition(": ")[0], problem)
        self._parsed: dict[str, Any] = {}

    @property
    def results(self) -> list[dict[str, Any]]:
        """What workloads recorded, as it came."""
        return self._bundle.results

    def text(self, path: str) -> str | None:
        """The text of a file, None where there is none; raise Unseen where it could not be read."""
        if path not in self._bundle.files:
            raise Unseen(f"{path} was not read")
        text = self._bundle.files[path]
        if text is None and path in self._unreadable:
            raise Unseen(f"could not be read: {first_line(self._unreadable[path])}")
        return text

    def asked(self, path: str) -> bool:
        """True where the probe asked for the path and kept the answer."""
        return path in self._bundle.files

    def folder(self, path: str) -> tuple[str, ...] | None:
        """The names in a folder (``path`` ends in ``/``), None where there is none; raise Unseen as ``text`` does."""
        text = self.text(path)
        return None if text is None else tuple(name for name in text.split("\n") if name)

    def value(self, path: str) -> str | None:
        """One of the kernel's small files, stripped; None where it is not there, has no value or may not be read."""
        return (self._bundle.files.get(path) or "").strip() or None

    def number(self, path: str) -> int | None:
        """As ``value``, where that is a whole number."""
        return whole(self.value(path))

    def under(self, folder: str) -> tuple[str, ...]:
        """All paths below ``folder`` that the probe kept, sorted."""
        return tuple(sorted(path for path in self._bundle.files if path.startswith(folder) and path != folder))

    def entries(self, folder: str) -> tuple[str, ...] | None:
        """Names of the entries of one of the probe's TREES of which something was kept; None where the folder is not.

        Raise Unseen where the folder was not read to the end, so that what is missing is not taken for absent.
        """
        names = self.folder(folder)
        self.require_finished(folder)
        if names is None:
            return None
        kept = {path[len(folder) :].partition("/")[0] for path in self.under(folder)}
        return tuple(name for name in names if name in kept)

    def require_finished(self, source: str) -> None:
        """Raise Unseen where a source of the probe did not come to its end."""
        for problem in self._problems:
            if problem.startswith(f"{source}: not finished"):
                raise Unseen(f"could not be read: {first_line(problem)}")

    def look(self, key: str) -> tuple[str, ...]:
        """Lines of what the probe saw by itself; raise Unseen where it could not see all."""
        result = self.command(key)
        if result.rc != 0:
            raise Unseen(first_line(result.stderr) or f"{shown(result)} failed")
        return tuple(line for line in result.stdout.split("\n") if line)

    def rows(self, key: str, width: int) -> list[list[str]]:
        """As ``look``, each line cut at its tabs; raise ParseError for one with another number of fields."""
        rows = [line.split("\t") for line in self.look(key)]
        for row in rows:
            if len(row) != width:
                raise ParseError(f"expected {width} fields of {key}, found {len(row)}: '{first_line(row[0])}'")
        return rows

    def once(self, what: str, parse: Callable[[], Any]) -> Any:
        """What ``parse`` returns, asked once however many facts want it; what it raises, each time."""
        if what not in self._parsed:
            self._parsed[what] = parse()
        return self._parsed[what]

    def unanswered(self) -> tuple[str, ...]:
        """Commands that were run and did not come back in time; raise Unseen where none was run at all."""
        if not self.ran_any():
            raise Unseen("no command was run")
        return tuple(
            shown(result)
            for _, result in sorted(self._bundle.commands.items())
            if result.timed_out and result.argv[:1] != ["(probe)"] and not result.stderr.startswith(NOT_RUN)
        )

    def ran_any(self) -> bool:
        """True where the probe ran a command at all."""
        return bool(self._bundle.commands)

    def ran(self, key: str) -> bool:
        """True where the probe ran the command, whatever came of it."""
        return key in self._bundle.commands

    def looked_for_records(self) -> bool:
        """True where the probe's own looks are in the bundle, among which a record that is not there has no line."""
        return self.ran("signs") or self.ran("repository-files")

    def raw(self, key: str) -> CommandResult | None:
        """What the probe recorded of a command, complete or not; None where it did not ask for it."""
        return self._bundle.commands.get(key)

    def command(self, key: str) -> CommandResult:
        """A command's complete answer, whatever its exit status; raise Unseen where it is none.

        A command that a signal ended (exit status 128 and its number) crashed: what it printed may be a part.
        """
        result = self._bundle.commands.get(key)
        if result is None:
            raise Unseen(f"{key} was not run")
        if last_line(result.stderr).startswith(NOT_RUN):
            raise Unseen(f"{shown(result)} was {last_line(result.stderr)}")
        ended_by = signal_of(result.rc)
        if ended_by is not None and not result.timed_out:
            raise Unseen(f"{shown(result)} crashed ({ended_by}, exit status {result.rc})")
        if result.timed_out:
            raise Unseen(f"{shown(result)} did not answer in time: {last_line(result.stderr)}".rstrip(": "))
        if result.truncated:
            raise Unseen(f"{shown(result)} printed more than the probe's limit; its output was truncated")
        return result

    def output(self, key: str, good: tuple[int, ...] = (0,)) -> str:
        """A command's stdout; raise Unseen as ``command`` does, and where its exit status is not a ``good`` one."""
        result = self.command(key)
        if result.missing:
            raise Unseen(f"{result.argv[0] if result.argv else key} is not installed")
        if result.rc not in good:
            said = first_line(result.stderr) or first_line(result.stdout)
            raise Unseen(f"{shown(result)} failed with exit status {result.rc}: {said}".rstrip(": "))
        return result.stdout


def signal_of(status: int) -> str | None:
    """The signal that ended a command (``SIGSEGV``), by its exit status of 128 and more; None for other statuses."""
    if not 128 < status < 160:
        return None
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"signal {status - 128}"


def whole(text: str | None) -> int | None:
    """A whole number of at most 18 digits; None for anything else."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else None


def is_word(text: str) -> bool:
    """True for what a kernel release, a package name and a version consist of; ``^`` is RPM's, ``~`` is both's."""
    return _WORD.fullmatch(text) is not None


def word(text: str, what: str) -> str:
    """Return the text; raise ParseError where it is no such word: roles and locks take it for a name."""
    if not is_word(text):
        raise ParseError(f"expected {what} of letters, digits and .+~:^_-, found '{first_line(text)}'")
    return text


def shown(result: CommandResult) -> str:
    """A command as a message names it: without its long tail of arguments."""
    words = result.argv[:3]
    return " ".join(words) + (" ..." if len(result.argv) > 3 else "")


def first_line(text: str) -> str:
    """The first line with something on it, short enough for a message."""
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "")


def last_line(text: str) -> str:
    """The last line with something on it, short enough for a message."""
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "")
