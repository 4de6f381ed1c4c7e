"""``--log KIND=FILE``: the saved output of a program, as the record that the payload would have written."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpunode.errors import UsageError
from gpunode.expectations import is_metric, tools
from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import decoded, parsed
from gpunode.judging.request import LOG_CHECKS
from gpunode.text import unknown

PROGRAMS = {"nvbandwidth": "nvbandwidth", "nccl-tests": "nccl-tests", "dcgm-diag": "dcgmi"}
MOST_BYTES = 48 * 1024
"""The part of an output that a record keeps (``ToolValues``)."""


def read_logs(logs: Sequence[str], *, replay: bool) -> list[dict[str, Any]]:
    """Return one record for each log. Raises UsageError with one line for one that cannot be judged."""
    if logs and not replay:
        raise UsageError("--log needs --replay BUNDLE: the bundle of the node that produced the output")
    return [_record(*_split(log)) for log in logs]


def must_be_judged(logs: Iterable[Mapping[str, Any]], selected: Iterable[str]) -> None:
    """Raise UsageError if --select or --skip excludes the check that judges a log."""
    left_out = sorted({LOG_CHECKS[log["record"]] for log in logs} - set(selected))
    if left_out:
        raise UsageError(f"--log: {left_out[0]} evaluates it, but --select or --skip excludes that check")


def _split(log: str) -> tuple[str, Path]:
    kind, sign, file = log.partition("=")
    if not sign or not file:
        raise UsageError(f"--log {log}: expected KIND=FILE, as nccl-tests=all_reduce.log")
    if kind not in PROGRAMS:
        raise UsageError(f"--log {log}: {unknown('kind', kind, PROGRAMS)}")
    return kind, Path(file)


def _record(kind: str, file: Path) -> dict[str, Any]:
    try:
        text = decoded(file.read_bytes())
    except OSError as err:
        raise UsageError(f"--log {file}: cannot be read: {err.strerror}") from None
    if len(text) > MOST_BYTES:
        raise UsageError(
            f"--log {file}: {len(text)} characters, at most {MOST_BYTES} are read: remove NCCL's debug log"
        )
    try:
        answer = parsed(kind, text)
    except ParseError as err:
        raise UsageError(f"--log {file}: not valid as {kind}: {err}") from None
    program = PROGRAMS[kind]
    if kind == "nccl-tests":
        program = _program(file, [run["collective"] for run in answer["runs"]])
    return {
        "record": f"tools.{kind}",
        "schema": "gpunode.record/1",
        "device": "cuda",
        "component": "node",
        "seconds": 0.0,
        "values": {"program": program, "arguments": [], "exit_code": 0, "stdout": text},
    }


def _program(file: Path, collectives: Sequence[str | None]) -> str:
    """Return the program of a log; if the log does not name it, the file does: ``all_reduce_perf.log``."""
    by_file = file.name.partition(".")[0].removesuffix("_perf")
    named = next((name for name in collectives if name is not None), by_file)
    if not is_metric(tools.metric_of(named)):
        raise UsageError(
            f"--log {file}: the log does not name its collective: include it in the file name (example: "
            "all_reduce_perf.log)"
        )
    return f"{named}_perf"
