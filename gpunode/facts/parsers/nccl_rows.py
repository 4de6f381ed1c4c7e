"""Rows of nccl-tests: columns from the header, halves that NCCL's log lines cut apart joined again."""

import itertools
import math
import re

from gpunode.facts.models.outputs import NcclRow, OldPlacement, Placement
from gpunode.facts.parsers.nccl_lines import split_at_nccl_log

_LEFT = re.compile(r"\s*(\d{1,20})\s+(\d{1,20})\s+([a-z][a-z0-9_]{1,20})(?=\s|$)")
_FLOAT = re.compile(r"[+-]?(?:\d{1,40}\.?\d{0,40}|\.\d{1,40})(?:[eE][+-]?\d{1,3})?")
_VALUE = re.compile(r"[+-]?(?:[\d.]{1,80}(?:[eE][+-]?\d{1,3})?|nan|inf)|N/A", re.I)
_KEYS = {
    "time": "time_us",
    "cputime": "time_us",
    "algbw": "algbw_gb_per_s",
    "busbw": "busbw_gb_per_s",
    "#wrong": "wrong",
    "error": "error",
    "res": "error",
}
_TIMES = frozenset({"time", "cputime"})
_ROOT = re.compile(r"-?\d{1,7}")
_GLUED_NUMBER = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)(?![\d.])")


class RowReader:
    """Reads the rows below one header; keeps the first half of a row until its second half comes."""

    def __init__(self, columns: list[str]) -> None:
        first = next((place for place, name in enumerate(columns) if name in _TIMES), len(columns))
        self._optional = columns[3:first]
        """``redop`` and ``root``: blank for some collectives, and no part of the answer."""
        self._right = columns[first:]
        self._joints = {place for place, name in enumerate(self._right) if name in _TIMES} | {len(self._right)}
        """How many values stand before a place where nccl-tests stops printing to measure."""
        self._pending: tuple[re.Match[str], list[str]] | None = None
        self.rows: list[NcclRow] = []
        self.lost = 0
        """Rows that were begun and could not be read."""

    @property
    def ascending(self) -> bool:
        """True where no size comes twice or after a larger one (0 may come twice): the rows of one process."""
        sizes = [row.size_bytes for row in self.rows if row.size_bytes]
        return all(before < after for before, after in itertools.pairwise(sizes))

    def take(self, text: str) -> bool:
        """Take a line that may be a row or a part of one; False where it is neither."""
        own, log = split_at_nccl_log(text)
        match = _LEFT.match(own)
        if match:
            self.close()
            self._finish_or_keep(match, self._with_glued(self._values(own[match.end() :].split()), log))
            return True
        words = own.split()
        if self._pending is None or not words or not all(_VALUE.fullmatch(word) for word in words):
            return False
        first, known = self._pending
        self._finish_or_keep(first, self._with_glued(known + words, log))
        return True

    def close(self) -> None:
        """Give up a half that waits for its other half."""
        if self._pending is not None:
            self.lost += 1
            self._pending = None

    def _values(self, words: list[str]) -> list[str]:
        """The words right of ``redop``, a word or blank, and of ``root``, a number wherever there is the column."""
        if words and self._optional[:1] in (["redop"], ["op"]) and words[0].isalpha():
            words = words[1:]
        if words and "root" in self._optional and _ROOT.fullmatch(words[0]):
            words = words[1:]
        return words

    def _with_glued(self, values: list[str], log: str | None) -> list[str]:
        """NCCL's line follows the last value without a blank: ``0node-1:25:25 [0] NCCL INFO``."""
        glued = _GLUED_NUMBER.match(log) if log else None
        return [*values, glued[1]] if glued and len(values) + 1 in self._joints else values

    def _finish_or_keep(self, match: re.Match[str], values: list[str]) -> None:
        right = self._right
        if not right:
            self.lost += 1
            return
        if "timestamp" in right[-1].lower() and len(values) == len(right) + 1:
            values = [*values[:-2], f"{values[-2]} {values[-1]}"]
        if len(values) < len(right):
            self._pending = (match, values)
            return
        self._pending = None
        named = right[:-1] if "timestamp" in right[-1].lower() else right
        if len(values) > len(right) or not all(_VALUE.fullmatch(value) for value in values[: len(named)]):
            self.lost += 1
            return
        self.rows.append(_row(match, right, values))


def _row(match: re.Match[str], columns: list[str], values: list[str]) -> NcclRow:
    groups: list[dict[str, float | None]] = []
    in_milliseconds = "res" in columns
    for name, value in zip(columns, values, strict=True):
        if name in _TIMES:
            groups.append({"time_us": None, "algbw_gb_per_s": None, "busbw_gb_per_s": None, "wrong": None})
        key = _KEYS.get(name)
        if key and groups and not (in_milliseconds and key == "time_us"):
            groups[-1][key] = count(value) if key == "wrong" else measure(value)
    placements = [(OldPlacement if "error" in group else Placement).model_validate(group) for group in groups]
    return NcclRow(
        size_bytes=int(match[1]),
        count=int(match[2]),
        datatype=match[3],
        out_of_place=placements[0] if placements else None,
        in_place=placements[1] if len(placements) > 1 else None,
    )


def measure(text: str) -> float | None:
    """A measured number; None for ``N/A``, ``nan`` and ``inf``."""
    if not _FLOAT.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None


def count(text: str) -> int | None:
    """A count; large ones are printed as ``1.04858e+06``."""
    value = measure(text)
    return int(value) if value is not None and value == int(value) else None
