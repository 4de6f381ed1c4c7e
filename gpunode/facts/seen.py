"""What a bundle holds, asked for with the reason at hand where it does not hold it."""

from gpunode.probe.bundle import Bundle, CommandResult

READ_LOG = "probe-read"
"""The command under which the probe says what it could not read, one ``PATH: REASON`` a line."""


class Unseen(Exception):  # noqa: N818
    """Something was not seen; the message is the reason and becomes a gap."""


class Seen:
    """A bundle as the fact readers ask it: an answer, "it is not there", or Unseen with the reason."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        log = bundle.commands.get(READ_LOG)
        self._problems = log.stderr.splitlines() if log else []

    def text(self, path: str) -> str | None:
        """The text of a file, None where there is none; raise Unseen where it could not be read."""
        if path not in self._bundle.files:
            raise Unseen(f"{path} was not read")
        text = self._bundle.files[path]
        if text is None:
            for problem in self._problems:
                if problem.startswith(f"{path}: "):
                    raise Unseen(f"could not be read: {first_line(problem)}")
        return text

    def asked(self, path: str) -> bool:
        """True where the probe asked for the path and kept the answer."""
        return path in self._bundle.files

    def folder(self, path: str) -> tuple[str, ...] | None:
        """The names in a folder (``path`` ends in ``/``), None where there is none; raise Unseen as ``text`` does."""
        text = self.text(path)
        return None if text is None else tuple(name for name in text.split("\n") if name)

    def ran(self, key: str) -> bool:
        """True where the probe ran the command, whatever came of it."""
        return key in self._bundle.commands

    def command(self, key: str) -> CommandResult:
        """A command's complete answer, whatever its exit status; raise Unseen where it is none."""
        result = self._bundle.commands.get(key)
        if result is None:
            raise Unseen(f"{key} was not run")
        if result.timed_out:
            raise Unseen(f"{shown(result)} did not answer in time: {last_line(result.stderr)}".rstrip(": "))
        if result.truncated:
            raise Unseen(f"{shown(result)} printed more than the probe keeps; its output was cut")
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
