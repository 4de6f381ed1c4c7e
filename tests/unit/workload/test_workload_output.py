"""What the payload reports, and what it means when it reports less, more, or something else."""

import json

import pytest

from gpunode.workload.output import MAX_BYTES, BoundedOutput
from gpunode.workload.transport import LaunchFailure

RECORD = {"record": "versions.torch", "values": {"version": "2.13.0"}}


def reported(*lines: object, err: str = "") -> BoundedOutput:
    output = BoundedOutput()
    for line in lines:
        output.stdout((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n")
    output.stderr(err.encode())
    return output


def watchdog(ended: str = "exit", code: int | None = 0) -> dict[str, object]:
    return {"record": "watchdog", "ended": ended, "exit_code": code}


def test_records_come_one_a_line_however_they_are_cut() -> None:
    text = "\n".join(json.dumps(line) for line in (RECORD, {"record": "end"}, watchdog())) + "\n"
    output = BoundedOutput()
    for character in text.encode():
        output.stdout(bytes([character]))
    assert output.records == [RECORD]
    assert (output.complete, output.ended, output.exit_code) == (True, "exit", 0)
    output.judge(10)


def test_noise_of_an_image_is_no_record() -> None:
    end = {"record": "end", "records": 1}
    output = reported("Welcome to the image", "[1, 2]", '{"no": "record"}', RECORD, end, watchdog())
    assert output.records == [RECORD]
    output.judge(10)


def test_nothing_inside_speaks_for_the_launcher() -> None:
    assert reported({"record": "container", "values": {"complete": True}}, RECORD).records == [RECORD]


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        (reported(watchdog("exit", 1), err="Traceback\nMemoryError: no\n"), "payload", "exit code 1 (MemoryError: no)"),
        (reported(RECORD, watchdog("signal", 11)), "payload", "killed by signal 11"),
        (reported(RECORD, watchdog("time-limit", None)), "time-limit", "did not end within 10 s"),
        (reported(RECORD, watchdog("stopped", None)), "broke-off", "stopped on the node (stopped)"),
        (reported(RECORD), "broke-off", "out of memory, or the connection was lost"),
        (reported(RECORD, watchdog("exit", 0)), "payload", "exit code 0"),
        (
            reported(RECORD, '{"record": "vers', {"record": "end", "records": 2}, watchdog()),
            "broke-off",
            "1 of the payload's 2",
        ),
        (reported(err="python3 is 3.6, 3.8 or later is needed\n"), "no-python", "use another image"),
    ],
)
def test_an_end_too_early_is_named(output: BoundedOutput, kind: str, words: str) -> None:
    with pytest.raises(LaunchFailure) as caught:
        output.judge(10)
    assert caught.value.kind == kind
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_flood_is_stopped_where_no_payload_prints_as_much() -> None:
    output = BoundedOutput()
    output.stdout(b"x" * MAX_BYTES)
    with pytest.raises(LaunchFailure, match="more than 4 MiB on stdout"):
        output.stdout(b"x")
    output.stderr(b"y" * 64 * 2**20)
    with pytest.raises(LaunchFailure, match="more than 64 MiB on stderr"):
        output.stderr(b"y")


def test_control_codes_in_what_is_quoted_do_not_reach_a_terminal() -> None:
    with pytest.raises(LaunchFailure) as caught:
        reported(err="\x1b[31mred\x1b[0m\n").judge(1)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ({"doing": "measuring gemm (2 of 8)", "left_s": 540}, "measuring gemm (2 of 8), about 9 min left"),
        ({"doing": "measuring burn (8 of 8)", "left_s": 90}, "measuring burn (8 of 8), about 90 s left"),
        ({"doing": "x\x1b[2J" + "y" * 500, "left_s": -1}, "x?[2J" + "y" * 75),
        ({"left_s": True}, "None"),
    ],
)
def test_progress_is_reported_and_is_no_record(line: dict[str, object], reported: str) -> None:
    heard: list[str] = []
    output = BoundedOutput(heard.append)
    output.stdout(json.dumps({"record": "progress", **line}).encode() + b"\n")
    assert (heard, output.records) == ([reported], [])
