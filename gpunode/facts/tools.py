"""Exit statuses of NVIDIA's tools and their meanings."""

from collections.abc import Callable
from typing import Literal

from gpunode.facts.bundle_reader import NOT_RUN, BundleReader, UnknownFactError, first_line, shown, signal_of
from gpunode.facts.errors import ParseError
from gpunode.facts.models import Fact, FactArea, fact
from gpunode.facts.models.smi import DocumentT, Failure, Smi, ToolError
from gpunode.facts.parsers import smi_base
from gpunode.probe.bundle import CommandResult
from gpunode.text import last_line

ANSWERS = {
    "nvidia-smi-xml": "smi",
    "nvidia-smi-topo": "topology",
    "nvidia-smi-p2p": "peer_access",
    "nvidia-smi-nvlink": "nvlink",
    "nvidia-smi-nvlink-errors": "nvlink_errors",
    "version-nv-fabricmanager": "nvidia_tool_versions",
    "version-nv-hostengine": "nvidia_tool_versions",
    "version-dcgmi": "nvidia_tool_versions",
}
"""Commands of the probe, and the fact that is read from each."""
WHOLE_PROBE = "left of the time for the whole probe"
"""Part of the reason for ending a tool that had less time than its own limit."""
MEANINGS = {
    2: "a supplied argument or flag is invalid",
    3: "the requested operation is not available on target device",
    4: "the current user does not have permission",
    6: "a query to find an object was unsuccessful",
    8: "external power cables of a GPU are not properly attached",
    9: "the NVIDIA driver is not loaded",
    10: "the kernel detected an interrupt issue with a GPU",
    11: "the kernel detected an interrupt issue with a GPU",
    12: "the NVML library could not be found or loaded",
    13: "this version of NVML does not implement the function",
    14: "the infoROM of a GPU is corrupted",
    15: "a GPU has fallen off the bus or is inaccessible",
    16: "a GPU requires a reset",
    17: "the operating system or its cgroups block the GPU's control device",
    18: "driver and library have different versions",
    255: "internal driver error",
}
"""Meanings of nvidia-smi's exit statuses. Sources: nvidia-smi(1), RETURN VALUE, up to 15 and 255; nvmlReturn_t of
NVML's reference for 11 and from 16 on, which nvidia-smi passes on (18: recorded with a version mismatch)."""
_KINDS = {
    4: "permission",
    9: "driver-not-loaded",
    12: "library-missing",
    15: "gpu-lost",
    17: "permission",
    18: "driver-library-mismatch",
}
_MESSAGES_MOST = 64


class ToolRun(Fact):
    """How one of NVIDIA's tools ended on the node."""

    answers: str
    """The field of NodeFacts that is read from its output."""
    command: str
    """As messages name it: ``nvidia-smi -q -x``."""
    exit_status: int
    ended: Literal["exit", "signal", "timeout", "slow", "not-run", "missing"]
    """``slow``: ended when the time for the whole probe was used up, before its own limit."""
    signal: str | None = None
    """``SIGSEGV``; None if no signal ended the command."""
    reason: str = ""
    """The probe's reason for ending the command or for not running it."""

    @property
    def failure(self) -> str | None:
        """Return what is wrong with the run, apart from its exit status; None if the command ended by itself."""
        match self.ended:
            case "signal":
                return f"{self.command} crashed ({self.signal}, exit status {self.exit_status})"
            case "timeout" | "slow":
                return f"{self.command} did not answer{f' ({self.reason})' if self.reason else ''}"
            case "not-run":
                return f"{self.command} was not run{f' ({self.reason})' if self.reason else ''}"
        return None


def meaning_of(status: int) -> str:
    """Return the meaning of an exit status of nvidia-smi: ``exit status 14: the infoROM of a GPU is corrupted``."""
    meaning = MEANINGS.get(status)
    return f"exit status {status}: {meaning}" if meaning else f"exit status {status}"


def read_tool_runs(bundle: BundleReader) -> tuple[ToolRun, ...]:
    """Return NVIDIA's tools that the probe ran or left out, in its order; raise UnknownFactError if it ran no
    command."""
    if not bundle.ran_any():
        raise UnknownFactError("no command was run")
    return tuple(_run(field, result) for key, field in ANSWERS.items() if (result := bundle.raw(key)) is not None)


def _run(field: str, result: CommandResult) -> ToolRun:
    last = last_line(result.stderr)
    if last.startswith(NOT_RUN):
        ended = "not-run"
    elif result.timed_out:
        ended = "slow" if WHOLE_PROBE in last else "timeout"
    elif result.missing:
        ended = "missing"
    elif signal_of(result.rc) is not None:
        ended = "signal"
    else:
        ended = "exit"
    return ToolRun.model_validate(
        {
            "answers": field,
            "command": shown(result),
            "exit_status": result.rc,
            "ended": ended,
            "signal": signal_of(result.rc) if ended == "signal" else None,
            "reason": last.removeprefix(NOT_RUN).strip() if ended in ("not-run", "timeout", "slow") else "",
        }
    )


def answer(
    result: CommandResult, parse: Callable[[str], DocumentT | Failure], of: type[Smi[DocumentT]]
) -> Smi[DocumentT]:
    """Return nvidia-smi's answer with its exit status and the messages that it printed on either stream.

    Raise ParseError or UnknownFactError if it printed neither an answer nor an error message.
    """
    on_stdout = bool(result.stdout.strip())
    try:
        outcome = parse(result.stdout if on_stdout else result.stderr)
    except ParseError as err:
        outcome = _failure(result, err)
    beside = [*getattr(outcome, "messages", ()), *smi_base.remarks(result.stderr if on_stdout else "")]
    messages = tuple(dict.fromkeys(line[:200] for line in beside))[:_MESSAGES_MOST]
    if not isinstance(outcome, Failure):
        return of(document=outcome, exit_status=result.rc, messages=messages)
    return of(
        error_kind=outcome.error.kind,
        error_message=outcome.error.message,
        error_nvml_version=outcome.error.nvml_version,
        exit_status=result.rc,
        messages=messages,
    )


def _failure(result: CommandResult, refused: ParseError) -> Failure:
    """Return the error that a message or the exit status names; raise if neither explains the failure."""
    error = smi_base.find_error(result.stdout) or smi_base.find_error(result.stderr)
    if error is not None and result.rc != 0:
        return error
    if result.rc in _KINDS and not result.stdout.strip() and not result.stderr.strip():
        return Failure(error=ToolError(kind=_KINDS[result.rc], message=meaning_of(result.rc)))
    if result.rc != 0:
        message = first_line(result.stderr) or first_line(result.stdout)
        raise UnknownFactError(
            f"{shown(result)} failed with {meaning_of(result.rc)}{f' ({message})' if message else ''}"
        )
    raise refused


def read_tools(bundle: BundleReader) -> dict[str, str | None] | None:
    """Return the programs that the role gpu_tools recorded, and their paths; None if it recorded none."""
    if not bundle.ran("tools"):
        bundle.require_finished("tools")
        if not bundle.looked_for_records():
            raise bundle.not_collected()
        return None
    return {name: path or None for name, path in bundle.rows("tools", 2)}


class ToolsFacts(FactArea):
    """NVIDIA's tools, and those of roles."""

    tools: dict[str, str | None] | None = fact(read_tools, none_means="the role gpu_tools installed none")
    """Programs of the role gpu_tools and their paths."""
    tool_runs: tuple[ToolRun, ...] | None = fact(read_tool_runs, volatile=True)
    """Exit statuses of NVIDIA's tools; empty if none was run."""
