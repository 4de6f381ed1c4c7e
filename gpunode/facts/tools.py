"""How NVIDIA's tools ended, whatever they printed, and what their exit status means."""

from collections.abc import Callable

from gpunode.facts.errors import ParseError
from gpunode.facts.models.gpu import ToolRun
from gpunode.facts.models.smi import DocumentT, Failure, Smi, ToolError
from gpunode.facts.parsers import smi_error
from gpunode.facts.seen import NOT_RUN, Seen, Unseen, first_line, last_line, shown, signal_of
from gpunode.probe.bundle import CommandResult

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
"""Commands of the probe and the fact that each of them answers."""
WHOLE_PROBE = "left of the time for the whole probe"
"""In the reason for ending a tool that had less time than its own limit."""
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
"""Of nvidia-smi's exit statuses. Sources: nvidia-smi(1), RETURN VALUE, up to 15 and 255; nvmlReturn_t of NVML's
reference for 11 and from 16 on, which nvidia-smi passes on (18: recorded with a version mismatch)."""
_KINDS = {
    4: "permission",
    9: "driver-not-loaded",
    12: "library-missing",
    15: "gpu-lost",
    17: "permission",
    18: "driver-library-mismatch",
}
_MESSAGES_MOST = 64


def meaning_of(status: int) -> str:
    """Return what an exit status of nvidia-smi stands for: ``exit status 14: the infoROM of a GPU is corrupted``."""
    meaning = MEANINGS.get(status)
    return f"exit status {status}: {meaning}" if meaning else f"exit status {status}"


def tool_runs(seen: Seen) -> tuple[ToolRun, ...]:
    """Return each of NVIDIA's tools that the probe ran or left out, in its order; raise Unseen where it ran nothing."""
    if not seen.ran_any():
        raise Unseen("no command was run")
    return tuple(_run(field, result) for key, field in ANSWERS.items() if (result := seen.raw(key)) is not None)


def _run(field: str, result: CommandResult) -> ToolRun:
    said = last_line(result.stderr)
    if said.startswith(NOT_RUN):
        ended = "not-run"
    elif result.timed_out:
        ended = "slow" if WHOLE_PROBE in said else "timeout"
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
            "reason": said.removeprefix(NOT_RUN).strip() if ended in ("not-run", "timeout", "slow") else "",
        }
    )


def answer(
    result: CommandResult, parse: Callable[[str], DocumentT | Failure], of: type[Smi[DocumentT]]
) -> Smi[DocumentT]:
    """Return nvidia-smi's answer with its exit status and the messages that it printed on either stream.

    Raise ParseError or Unseen where it printed neither an answer nor a message by which it fails.
    """
    on_stdout = bool(result.stdout.strip())
    try:
        found = parse(result.stdout if on_stdout else result.stderr)
    except ParseError as err:
        found = _failure(result, err)
    beside = [*getattr(found, "messages", ()), *smi_error.remarks(result.stderr if on_stdout else "")]
    messages = tuple(dict.fromkeys(line[:200] for line in beside))[:_MESSAGES_MOST]
    if not isinstance(found, Failure):
        return of(document=found, exit_status=result.rc, messages=messages)
    return of(
        error_kind=found.error.kind,
        error_message=found.error.message,
        error_nvml_version=found.error.nvml_version,
        exit_status=result.rc,
        messages=messages,
    )


def _failure(result: CommandResult, refused: ParseError) -> Failure:
    """Return the error that a message or the exit status alone names; raise for what neither explains."""
    error = smi_error.find(result.stdout) or smi_error.find(result.stderr)
    if error is not None and result.rc != 0:
        return error
    if result.rc in _KINDS and not result.stdout.strip() and not result.stderr.strip():
        return Failure(error=ToolError(kind=_KINDS[result.rc], message=meaning_of(result.rc)))
    if result.rc != 0:
        said = first_line(result.stderr) or first_line(result.stdout)
        raise Unseen(f"{shown(result)} failed with {meaning_of(result.rc)}{f' ({said})' if said else ''}")
    raise refused


def recorded(seen: Seen) -> dict[str, str | None] | None:
    """Return the programs that the role gpu_tools recorded, and where they are; None where it recorded none."""
    if not seen.ran("tools"):
        seen.require_finished("tools")
        if not seen.looked_for_records():
            raise Unseen("programs were not queried")
        return None
    return {name: path or None for name, path in seen.rows("tools", 2)}
