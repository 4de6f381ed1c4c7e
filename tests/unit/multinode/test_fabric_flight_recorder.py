"""Dumps of PyTorch's flight recorder: three of a job over Gloo in which rank 2 ended (PyTorch 2.13), and others."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from gpunode.checks import Status
from gpunode.cli import run
from gpunode.errors import UsageError
from gpunode.fabric.records import Dump, findings_of, parse, read_dumps

DUMPS = Path(__file__).parent / "dumps"


def dump(rank: int, calls: list[str], done: int | None = None, size: int = 4, group: str = "0") -> Dump:
    done = len(calls) if done is None else done
    entries = [
        {
            "collective_seq_id": number,
            "profiling_name": f"nccl:{name}",
            "process_group": [group, "default_pg"],
            "state": "completed" if number <= done else "started",
        }
        for number, name in enumerate(calls, 1)
    ]
    document = {"version": "2.10", "entries": entries, "pg_config": {"0": {"ranks": str(list(range(size)))}}}
    return parse(json.dumps(document).encode(), rank, "d")


def stopped(dumps: list[Dump]) -> list[tuple[int | None, Status]]:
    return [(rank, finding.status) for rank, finding in findings_of(dumps)]


def test_the_rank_of_a_real_job_that_ended_is_named() -> None:
    ((rank, finding),) = findings_of(read_dumps(DUMPS))
    assert (rank, finding.status) == (2, Status.FAIL)
    assert all(word in finding.message for word in ("all_reduce 4", "ranks 0-1 wait"))


def test_the_rank_that_called_fewer_is_named() -> None:
    calls = ["all_reduce"] * 5
    assert stopped([dump(0, calls, 4), dump(1, calls[:4]), dump(2, calls, 4), dump(3, calls, 4)]) == [(1, Status.FAIL)]


def test_a_rank_without_a_dump_is_named() -> None:
    calls = ["all_reduce"] * 2
    assert stopped([dump(rank, calls) for rank in (0, 1, 3)]) == [(2, Status.FAIL)]


def test_another_collective_is_named() -> None:
    every = [dump(rank, ["all_reduce", "all_gather" if rank == 3 else "all_reduce"], 1) for rank in range(4)]
    assert stopped(every) == [(3, Status.FAIL)]


def test_a_rank_that_did_not_complete_is_named() -> None:
    assert stopped([dump(rank, ["all_reduce"], 0 if rank == 1 else 1) for rank in range(4)]) == [(1, Status.FAIL)]


def test_ranks_that_came_equally_far_pass() -> None:
    assert stopped([dump(rank, ["all_reduce"]) for rank in range(4)]) == [(None, Status.PASS)]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("false",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": Evil()}),
        pickle.dumps([1]),
        b"",
        b"{",
        b'{"entries": 7}',
        b'{"entries": [{"collective_seq_id": -1}]}',
        b"\x80\x04K\x01",
    ],
)
def test_other_files_are_refused_in_one_line(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("a pickle ran a command"))
    (tmp_path / "nccl_trace_rank_0").write_bytes(data)
    assert run(["validate", "--fabric", "--dumps", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a_rank_1", "b_rank_1"):
        (tmp_path / name).write_bytes((DUMPS / "nccl_trace_rank_1").read_bytes())
    with pytest.raises(UsageError, match="two dumps of rank 1"):
        read_dumps(tmp_path)


def test_dumps_are_judged_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "--fabric", "--dumps", str(DUMPS)]) == 1
    assert "rank 2 stopped first" in capsys.readouterr().out
    assert run(["validate", "--fabric", "--dumps", "/nonexistent"]) == 2
    assert run(["validate", "--fabric", "--dumps", str(DUMPS), "--records", "x"]) == 2
