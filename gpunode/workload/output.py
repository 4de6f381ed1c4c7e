"""The payload's output, as it arrives: records, limited in number and size, and how it ended."""

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from gpunode.text import last_line, one_line
from gpunode.workload.transport import LaunchFailure

MAX_BYTES = 4 * 1024 * 1024
"""Limit of the records of one run; a node with sixteen GPUs results in about 100 KiB."""
MAX_STDERR_BYTES = 64 * 1024 * 1024
LAUNCHERS = "container"
"""The record of how a run ended: only the launcher may write it, not the payload."""
DEFAULTS = "defaults.limits"
"""The engine's default limits: written by the launcher as well."""
_KEPT_STDERR = 4 * 1024
_DOING = 80
"""Maximum length of a progress line."""
_MOST_DEPTH = 32


class BoundedOutput:
    """Reader of stdout and stderr in pieces. Raises LaunchFailure ``flood`` if there is more than a payload prints."""

    def __init__(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Set up an empty output; ``progress`` gets one line for each step that the payload reports."""
        self._report = progress
        self.records: list[dict[str, Any]] = []
        self.complete = False
        """The payload reported that it finished."""
        self.ended: str | None = None
        """How, as the watchdog reported it; None if it did not."""
        self.exit_code: int | None = None
        self.program: socket.socket | None = None
        """Stdin and stdout of the program that writes it, while it runs."""
        self._promised = 0
        self._rest = b""
        self._err = b""
        self._seen = {"stdout": 0, "stderr": 0}

    def stdout(self, data: bytes) -> None:
        """Read more of stdout."""
        self._count("stdout", data, MAX_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)

    def stderr(self, data: bytes) -> None:
        """Read more of stderr; its end is kept for messages."""
        self._count("stderr", data, MAX_STDERR_BYTES)
        self._err = (self._err + data)[-_KEPT_STDERR:]

    def stop(self) -> None:
        """End the program by the end of its stdin, from another thread: its watchdog then ends all that it started."""
        if self.program is not None:
            with contextlib.suppress(OSError):
                self.program.shutdown(socket.SHUT_WR)

    def _count(self, name: str, data: bytes, most: int) -> None:
        self._seen[name] += len(data)
        if self._seen[name] > most:
            raise LaunchFailure(
                "flood", f"the payload was stopped: more than {most >> 20} MiB on {name} (the image floods its output?)"
            )

    def _line(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            # An image may print before the payload does; such lines are kept with stderr and are not records.
            self._err = (self._err + line + b"\n")[-_KEPT_STDERR:]
            return
        if not isinstance(record, dict) or not isinstance(record.get("record"), str) or _too_deep(record):
            return
        if record["record"] == "end":
            self.complete = True
            promised = record.get("records")
            self._promised = promised if isinstance(promised, int) else 0
        elif record["record"] == "watchdog":
            self.ended = one_line(str(record.get("ended")), _DOING)
            code = record.get("exit_code")
            self.exit_code = code if isinstance(code, int) and abs(code) < 2**31 else None
        elif record["record"] == "progress":
            self._report(_progress(record))
        elif record["record"] not in (LAUNCHERS, DEFAULTS):
            self.records.append(record)

    @property
    def last_words(self) -> str:
        """Return the last line that was not a record, in brackets; empty if there is none."""
        text = last_line(self._err.decode(errors="replace"))
        return f" ({text})" if text else ""

    def judge(self, limit_s: float) -> None:
        """Raise LaunchFailure with the reason if the payload did not finish."""
        words = self.last_words
        if self.ended == "exit" and self.exit_code == 0 and self.complete:
            if len(self.records) < self._promised:
                raise LaunchFailure(
                    "broke-off", f"{len(self.records)} of the payload's {self._promised} records are complete{words}"
                )
            return
        if self.ended == "time-limit":
            raise LaunchFailure(
                "time-limit",
                f"the payload did not end within {limit_s:.0f} s and was stopped (--workload-timeout S){words}",
            )
        if self.ended == "signal":
            raise LaunchFailure("payload", f"the payload was killed by signal {self.exit_code}{words}")
        if self.ended == "exit":
            raise LaunchFailure("payload", f"the payload ended with exit code {self.exit_code}{words}")
        if "3.8 or later is needed" in words:
            raise LaunchFailure("no-python", f"the payload cannot run{words}: use another image with --image")
        if self.ended is not None:
            raise LaunchFailure("broke-off", f"the payload was stopped on the node ({self.ended}){words}")
        raise LaunchFailure(
            "broke-off", f"the payload's output ended early: out of memory, or the connection was lost{words}"
        )


def _too_deep(record: Any) -> bool:
    """Return whether a record is nested deeper than a payload's: what reads it later would end with RecursionError."""
    level: list[Any] = [record]
    for _ in range(_MOST_DEPTH):
        inner = (part.values() if isinstance(part, dict) else part if isinstance(part, list) else () for part in level)
        level = [part for parts in inner for part in parts]
    return bool(level)


def _progress(record: dict[str, Any]) -> str:
    """Return ``measuring gemm (2 of 8), about 9 min left``."""
    doing = one_line(str(record.get("doing")), _DOING)
    left_s = record.get("left_s")
    if not isinstance(left_s, int) or isinstance(left_s, bool) or not 0 < left_s < 10**6:
        return doing
    left = f"{left_s} s" if left_s < 2 * 60 else f"{round(left_s / 60)} min"
    return f"{doing}, about {left} left"
