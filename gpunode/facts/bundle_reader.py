"""Access to a bundle for the readers of facts, with the reason for everything that it does not contain."""

import re
import signal
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import Any

from gpunode.facts.errors import ParseError
from gpunode.probe.bundle import Bundle, CommandResult
from gpunode.text import last_line

READ_LOG = "probe-read"
"""The command under which the probe records what it could not read, one ``PATH: REASON`` per line."""
NOT_COLLECTED = "did not read it: collect it again with this gpunode"
"""End of the reason for a fact that the bundle's probe does not read."""
NOT_RUN = "not run:"
"""Prefix of the probe's reason for not running a command."""
# The probe's script holds these three lists too, since it runs alone on a node; importing it here would compile all its
# patterns at every start. A test compares both.
SYSCTLS = (
    "fs.file-max",
    "kernel.hung_task_timeout_secs",
    "kernel.numa_balancing",
    "kernel.panic",
    "kernel.pid_max",
    "kernel.randomize_va_space",
    "net.core.default_qdisc",
    "net.core.rmem_max",
    "net.core.somaxconn",
    "net.core.wmem_max",
    "net.ipv4.neigh.default.gc_thresh1",
    "net.ipv4.neigh.default.gc_thresh2",
    "net.ipv4.neigh.default.gc_thresh3",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "vm.dirty_background_ratio",
    "vm.dirty_ratio",
    "vm.max_map_count",
    "vm.min_free_kbytes",
    "vm.nr_hugepages",
    "vm.overcommit_memory",
    "vm.swappiness",
    "vm.zone_reclaim_mode",
)
MODPROBE_FOLDERS = (
    "/etc/modprobe.d/",
    "/run/modprobe.d/",
    "/usr/local/lib/modprobe.d/",
    "/usr/lib/modprobe.d/",
    "/lib/modprobe.d/",
)
GPU_MODULE = re.compile(r"/nvidia([-_](current|tesla|legacy|open|srv|server|\d+(xx)?))*\.ko(\.(gz|xz|zst))?$")

_CHOSEN = re.compile(r"\[([a-z]{1,20})\]")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_WORD = re.compile(r"[\w.+~:^-]{1,255}", re.ASCII)


class UnknownFactError(Exception):
    """A fact that could not be read; the message is the reason and becomes a gap."""


class BundleReader:
    """The content of a bundle: an answer, None if it does not exist, or UnknownFactError with the reason."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        log = bundle.commands.get(READ_LOG)
        self._problems = log.stderr.splitlines() if log else []
        self._unreadable: dict[str, str] = {}
        for problem in self._problems:
            self._unreadable.setdefault(problem.partition(": ")[0], problem)
        self._parsed: dict[str, Any] = {}

    def not_collected(self) -> UnknownFactError:
        """Return the error for data that the bundle's probe does not read, the same for all: of another version."""
        day = self._bundle.collected_at.partition("T")[0]
        return UnknownFactError(f"the probe of this bundle ({day}) {NOT_COLLECTED}")

    @property
    def results(self) -> list[dict[str, Any]]:
        """Return the results of workloads, not validated."""
        return self._bundle.results

    def text(self, path: str) -> str | None:
        """Return the text of a file, None if it does not exist; raise UnknownFactError if it could not be read."""
        if path not in self._bundle.files:
            raise self.not_collected()
        text = self._bundle.files[path]
        if text is None and path in self._unreadable:
            raise UnknownFactError(f"could not be read: {first_line(self._unreadable[path])}")
        return text

    def chosen(self, path: str) -> str | None:
        """Return the word in brackets of a kernel's file that lists the choices; None without the file; raise as
        ``text`` does.
        """
        text = self.text(path)
        if text is None:
            return None
        match = _CHOSEN.search(text)
        if not match:
            raise ParseError(f"expected a word in brackets in {path}, found '{first_line(text)}'")
        return match[1]

    def has_file(self, path: str) -> bool:
        """Return True if the probe read the path and kept the answer."""
        return path in self._bundle.files

    def folder(self, path: str) -> tuple[str, ...] | None:
        """Return the names in a folder (``path`` ends in ``/``), None if it does not exist; raise as ``text`` does."""
        text = self.text(path)
        return None if text is None else tuple(name for name in text.split("\n") if name)

    def value(self, path: str) -> str | None:
        """Return a small file of the kernel, stripped; None if it does not exist, is empty or is not readable."""
        return (self._bundle.files.get(path) or "").strip() or None

    def number(self, path: str) -> int | None:
        """Return ``value`` as an integer; None for other text."""
        return whole(self.value(path))

    def under(self, folder: str) -> tuple[str, ...]:
        """Return all paths below ``folder`` that the probe kept, sorted."""
        paths = self._sorted_paths
        first = last = bisect_right(paths, folder)
        while last < len(paths) and paths[last].startswith(folder):
            last += 1
        return tuple(paths[first:last])

    @cached_property
    def _sorted_paths(self) -> list[str]:
        return sorted(self._bundle.files)

    def entries(self, folder: str) -> tuple[str, ...] | None:
        """Return names in one of the probe's TREES with content that was kept; None if the folder does not exist.

        Raise UnknownFactError if the folder was not read completely, so that missing entries are not treated as absent.
        """
        names = self.folder(folder)
        self.require_finished(folder)
        if names is None:
            return None
        kept = {path[len(folder) :].partition("/")[0] for path in self.under(folder)}
        return tuple(name for name in names if name in kept)

    def require_finished(self, source: str) -> None:
        """Raise UnknownFactError if the probe did not finish a source."""
        for problem in self._problems:
            if problem.startswith(f"{source}: not finished"):
                raise UnknownFactError(f"could not be read: {first_line(problem)}")

    def look(self, key: str) -> tuple[str, ...]:
        """Return the lines of one of the probe's own readings; raise UnknownFactError if they are incomplete."""
        result = self.command(key)
        if result.rc != 0:
            raise UnknownFactError(first_line(result.stderr) or f"{shown(result)} failed")
        return tuple(line for line in result.stdout.split("\n") if line)

    def rows(self, key: str, width: int) -> list[list[str]]:
        """Return ``look`` split at tabs; raise ParseError for a line with another number of fields."""
        rows = [line.split("\t") for line in self.look(key)]
        for row in rows:
            if len(row) != width:
                reading = f"the probe's reading of {key.replace('-', ' ')}"
                raise ParseError(f"expected {width} fields in {reading}, found {len(row)}: '{first_line(row[0])}'")
        return rows

    def once(self, key: str, parse: Callable[[], Any]) -> Any:
        """Return the result of ``parse``, computed once for all facts; an exception is raised each time."""
        if key not in self._parsed:
            self._parsed[key] = parse()
        return self._parsed[key]

    def unanswered(self) -> tuple[str, ...]:
        """Return the commands that did not end in time; raise UnknownFactError if no command was run."""
        if not self.ran_any():
            raise UnknownFactError("no command was run")
        return tuple(
            shown(result)
            for _, result in sorted(self._bundle.commands.items())
            if result.timed_out and result.argv[:1] != ["(probe)"] and not result.stderr.startswith(NOT_RUN)
        )

    def ran_any(self) -> bool:
        """Return True if the probe ran any command."""
        return bool(self._bundle.commands)

    def ran(self, key: str) -> bool:
        """Return True if the probe ran the command, with whatever result."""
        return key in self._bundle.commands

    def looked_for_records(self) -> bool:
        """Return True if the bundle has the probe's own readings; a record that does not exist has no line among
        them."""
        return self.ran("signs") or self.ran("repository-files")

    def raw(self, key: str) -> CommandResult | None:
        """Return the recorded result of a command, complete or not; None if the probe did not run it."""
        return self._bundle.commands.get(key)

    def command(self, key: str) -> CommandResult:
        """Return a command's complete answer, whatever its exit status; raise UnknownFactError if it is incomplete.

        A command that a signal ended (exit status 128 plus its number) crashed: its output may be incomplete.
        """
        result = self._bundle.commands.get(key)
        if result is None:
            self.require_finished(key)
            raise self.not_collected()
        if last_line(result.stderr).startswith(NOT_RUN):
            raise UnknownFactError(f"{shown(result)} was {last_line(result.stderr)}")
        ended_by = signal_of(result.rc)
        if ended_by is not None and not result.timed_out:
            raise UnknownFactError(f"{shown(result)} crashed ({ended_by}, exit status {result.rc})")
        if result.timed_out:
            raise UnknownFactError(f"{shown(result)} did not answer in time: {last_line(result.stderr)}".rstrip(": "))
        if result.truncated:
            raise UnknownFactError(f"{shown(result)} printed more than the probe's limit; its output was truncated")
        return result

    def output(self, key: str, good: tuple[int, ...] = (0,)) -> str:
        """Return a command's stdout; raise UnknownFactError as ``command`` does, and for an exit status not in
        ``good``."""
        result = self.command(key)
        if result.missing:
            raise UnknownFactError(f"{result.argv[0] if result.argv else key} is not installed")
        if result.rc not in good:
            message = first_line(result.stderr) or first_line(result.stdout)
            raise UnknownFactError(f"{shown(result)} failed with exit status {result.rc}: {message}".rstrip(": "))
        return result.stdout


def signal_of(status: int) -> str | None:
    """Return the signal that ended a command (``SIGSEGV``), from its exit status above 128; None for other statuses."""
    if not 128 < status < 160:
        return None
    try:
        return signal.Signals(status - 128).name
    except ValueError:
        return f"signal {status - 128}"


def whole(text: str | None) -> int | None:
    """Return an integer of at most 18 digits; None for other text."""
    return int(text) if text is not None and _WHOLE.fullmatch(text) else None


def is_word(text: str) -> bool:
    """Return True for the characters of kernel releases, package names and versions (RPM uses ``^``, RPM and dpkg
    ``~``)."""
    return _WORD.fullmatch(text) is not None


def word(text: str, kind: str) -> str:
    """Return the text; raise ParseError for other characters than ``is_word`` allows: roles and locks use it as a
    name."""
    if not is_word(text):
        raise ParseError(f"expected {kind} of letters, digits and .+~:^_-, found '{first_line(text)}'")
    return text


def shown(result: CommandResult) -> str:
    """Return a command for a message, without its arguments after the second."""
    words = result.argv[:3]
    return " ".join(words) + (" ..." if len(result.argv) > 3 else "")


def first_line(text: str) -> str:
    """Return the first line that is not blank, at most 200 characters."""
    return next((line.strip()[:200] for line in text.splitlines() if line.strip()), "")
