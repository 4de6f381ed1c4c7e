"""Logs of nccl-tests: versions of the table, launchers, NCCL's lines between, runs that died or overlap."""

from pathlib import Path
from typing import Any

import pytest

from gpunode.facts.errors import ParseError
from gpunode.facts.parsers.kinds import parsed

SAMPLES = Path(__file__).parent / "samples"

HEAD = (
    "# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1\n"
)
PLACEMENT = "    time   algbw   busbw #wrong"
COLUMNS = f"#       size         count      type   redop    root {PLACEMENT} {PLACEMENT}\n"
CLOSING = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 12.5 \n#\n"


def device(rank: int, host: str = "node1", pci: str = "0000:17:00") -> str:
    return f"#  Rank {rank:2} Group  0 Pid   {1000 + rank} on {host} device  {rank} [{pci}] NVIDIA H100\n"


def row(size: int, busbw: float = 5.0, wrong: str = "0") -> str:
    figures = f"10.00    1.00  {busbw:6.2f}  {wrong:>5}"
    return f"{size:12}  {size // 4:12}     float     sum      -1    {figures}    {figures}\n"


def runs(text: str) -> list[dict[str, Any]]:
    all_runs: list[dict[str, Any]] = parsed("nccl-tests", text)["runs"]
    return all_runs


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


def test_an_mpi_run_with_wrong_values_and_cut_rows() -> None:
    (run,) = runs(sample("nccl-tests.mpi"))
    assert (run["version"], run["nccl_version"], run["collective"]) == ("2.17.1", "2.27.7", "all_reduce")
    assert (run["ranks"], run["nodes"], run["gpus_per_node"]) == (4, 2, 2)
    assert run["devices"][3] == {
        "rank": 3,
        "host": "nodea02",
        "device": 1,
        "pci_bus_id": "0000:3d:00.0",
        "name": "NVIDIA H100 TEST",
    }
    assert run["rows"][0] == {
        "size_bytes": 1048576,
        "count": 262144,
        "datatype": "float",
        "out_of_place": {"time_us": 61.02, "algbw_gb_per_s": 17.18, "busbw_gb_per_s": 25.78, "wrong": 0},
        "in_place": {"time_us": 60.11, "algbw_gb_per_s": 17.44, "busbw_gb_per_s": 26.17, "wrong": 0},
    }
    assert run["rows"][1]["out_of_place"]["wrong"] == 1048580
    assert run["rows"][2]["in_place"]["wrong"] is None
    assert (run["wrong_total"], run["out_of_bounds"]) == (1048583, 1048579)
    assert (run["avg_busbw_gb_per_s"], run["max_busbw_gb_per_s"]) == (43.7853, 63.84)
    assert (run["complete"], run["ok"]) == (True, False)
    assert run["messages"] == ["nodea02:2002:2040 [1] NCCL WARN Call to ibv_open_device failed"]


def test_the_old_error_column_is_a_magnitude() -> None:
    first, second = runs(sample("nccl-tests.old"))
    assert (first["collective"], second["collective"]) == ("alltoall", "all_gather")
    placement = first["rows"][1]["out_of_place"]
    assert (placement["wrong"], placement["error"], placement["busbw_gb_per_s"]) == (None, 2e-07, 0.04)
    assert (first["wrong_total"], first["ok"]) == (None, True)
    assert first["devices"][0]["pci_bus_id"] is None, "[0x17] is a bus alone"
    assert first["nccl_version"] == "2.8.4+cuda11.1"


def test_a_process_that_died_after_its_header() -> None:
    run = runs(sample("nccl-tests.old"))[1]
    assert (run["rows"], run["complete"], run["ok"]) == ([], False, False)
    assert run["messages"] == ["box: Test NCCL failure common.cu:891 'unhandled cuda error'"]


def test_a_cut_log_is_not_complete() -> None:
    (run,) = runs(HEAD + device(0) + device(1) + COLUMNS + row(8) + row(16)[:70])
    assert (len(run["rows"]), run["complete"], run["ok"]) == (1, False, False)
    assert run["messages"] == ["1 rows could not be read"]


def test_a_row_that_lost_its_last_column_is_not_shifted() -> None:
    (run,) = runs(HEAD + COLUMNS + row(8) + row(16).rsplit(maxsplit=1)[0] + "\n" + CLOSING)
    assert [entry["size_bytes"] for entry in run["rows"]] == [8]


def test_only_the_average_missing() -> None:
    (run,) = runs(HEAD + device(0) + device(1) + COLUMNS + row(8) + "# Out of bounds values : 0 OK\n")
    assert (run["complete"], run["ok"], run["avg_busbw_gb_per_s"]) == (True, True, None)


def test_a_single_rank_is_reported_as_one() -> None:
    (run,) = runs(HEAD + device(0) + COLUMNS + row(8, 900.0) + CLOSING)
    assert (run["ranks"], run["nodes"], run["gpus_per_node"], run["ok"]) == (1, 1, 1, True)


def test_no_list_of_ranks() -> None:
    (run,) = runs(COLUMNS + row(8) + CLOSING)
    assert (run["ranks"], run["nodes"], run["devices"]) == (None, None, [])


def test_a_list_of_ranks_with_gaps() -> None:
    (run,) = runs(HEAD + device(0) + "#  ...\n" + device(7) + COLUMNS + row(8) + CLOSING)
    assert (run["ranks"], run["nodes"], run["gpus_per_node"]) == (8, None, None)


def test_processes_that_mpi_did_not_wire() -> None:
    both = HEAD + "# Using devices\n" + HEAD + "# Using devices\n" + device(0, "node1") + device(0, "node2")
    text = both + COLUMNS + COLUMNS + row(8) + row(8) + row(16) + row(16) + CLOSING + CLOSING
    first, second = runs(text)
    assert (first["ranks"], second["ranks"]) == (1, 1)
    assert (first["devices"][0]["host"], second["devices"][0]["host"]) == ("node1", "node2")
    assert (first["rows"], second["rows"]) == ([], [])
    assert "cannot be attributed" in first["messages"][0]
    assert (first["complete"], first["avg_busbw_gb_per_s"]) == (True, 12.5), "both report the same"


def test_what_interleaved_runs_report_differently_is_reported_of_none() -> None:
    both = HEAD + HEAD + device(0, "node1") + device(0, "node2") + COLUMNS + COLUMNS + row(8) + row(8)
    first, second = runs(both + CLOSING + CLOSING.replace("12.5", "13.5").replace("0 OK", "2 FAILED"))
    assert (first["avg_busbw_gb_per_s"], second["avg_busbw_gb_per_s"]) == (None, None)
    assert (first["out_of_bounds"], first["ok"], second["ok"]) == (None, False, False)


def test_interleaved_runs_without_a_line_of_the_average_have_none() -> None:
    both = HEAD + HEAD + device(0, "node1") + device(0, "node2") + COLUMNS + COLUMNS + row(8) + row(8)
    bounds = CLOSING[: CLOSING.index("# Avg")]
    first, second = runs(both + bounds + bounds)
    assert (first["out_of_bounds"], second["out_of_bounds"]) == (0, 0)
    assert (first["avg_busbw_gb_per_s"], second["avg_busbw_gb_per_s"]) == (None, None)


def test_interleaved_runs_with_mpi_tags_are_distinguished() -> None:
    of_rank_0 = HEAD + device(0, "node1") + COLUMNS + row(8, 1.0) + CLOSING
    of_rank_1 = HEAD + device(0, "node2") + COLUMNS + row(8, 2.0) + CLOSING.replace("12.5", "13.5")
    mixed = "".join(
        f"[1,0]<stdout>:{line_0}\n[1,1]<stdout>:{line_1}\n"
        for line_0, line_1 in zip(of_rank_0.splitlines(), of_rank_1.splitlines(), strict=True)
    )
    first, second = runs(mixed)
    assert (first["max_busbw_gb_per_s"], second["max_busbw_gb_per_s"]) == (1.0, 2.0)
    assert (first["avg_busbw_gb_per_s"], second["avg_busbw_gb_per_s"]) == (12.5, 13.5)


def test_a_run_that_died_and_one_after_it() -> None:
    died = HEAD + device(0) + device(1) + COLUMNS + row(8) + row(16)
    first, second = runs(died + HEAD + device(0) + device(1) + COLUMNS + row(8) + row(16) + row(32) + CLOSING)
    assert (first["complete"], len(first["rows"])) == (False, 2)
    assert (second["complete"], second["ok"], len(second["rows"])) == (True, True, 3)


def test_repeated_cycles_of_one_run() -> None:
    (run,) = runs(HEAD + device(0) + device(1) + COLUMNS + row(8) + row(16) + row(8) + row(16) + CLOSING)
    assert (len(run["rows"]), run["ok"]) == (4, True)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "    ",
        "[1,0]<stdout>:",
        "  [1,0]<stdout>:",
        "0: ",
        "node1: ",
        "[nccl-test-launcher] ",
        "2025-02-03T04:05:06.789012345Z ",
        "[17,0]<stdout>: ",
    ],
)
def test_prefixes(prefix: str) -> None:
    text = HEAD + device(0) + device(1) + COLUMNS + row(8) + row(16) + CLOSING
    (run,) = runs("".join(f"{prefix}{line}\n" for line in text.splitlines()))
    assert (run["ranks"], len(run["rows"]), run["avg_busbw_gb_per_s"], run["ok"]) == (2, 2, 12.5, True)


def test_without_hashes() -> None:
    text = (HEAD + device(0) + device(1) + COLUMNS + row(8) + CLOSING).replace("#wrong", "@").replace("#", "")
    (run,) = runs(text.replace("@", "#wrong"))
    assert (run["ranks"], len(run["rows"]), run["ok"]) == (2, 1, True)


def test_more_columns_of_later_versions() -> None:
    columns = COLUMNS.rstrip() + " #iters timestamp\n"
    (run,) = runs(HEAD + columns + row(8).rstrip() + "  20 2025-01-02 03:04:05\n" + CLOSING)
    assert run["rows"][0]["in_place"]["busbw_gb_per_s"] == 5.0


def test_the_first_version_measured_milliseconds() -> None:
    columns = (
        "#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res\n"
    )
    line = (
        "    10000000      10000000    char     sum    1.628   6.14  11.44    0e+00    1.932   5.18   9.65    0e+00\n"
    )
    (run,) = runs(columns + line + CLOSING)
    assert run["rows"][0]["in_place"] == {
        "time_us": None,
        "algbw_gb_per_s": 5.18,
        "busbw_gb_per_s": 9.65,
        "wrong": None,
        "error": 0.0,
    }


def test_in_place_that_does_not_exist() -> None:
    nothing = "    N/A     N/A     N/A    N/A"
    line = f"           8             2     float    none      -1    10.00    1.00    5.00      0  {nothing}\n"
    (run,) = runs(HEAD + COLUMNS + line + CLOSING)
    assert run["rows"][0]["in_place"] == {
        "time_us": None,
        "algbw_gb_per_s": None,
        "busbw_gb_per_s": None,
        "wrong": None,
    }
    assert run["max_busbw_gb_per_s"] == 5.0


@pytest.mark.parametrize(
    "closing",
    [
        CLOSING.replace("12.5", "12.5 FAILED"),
        CLOSING.replace("0 OK", "3 FAILED"),
        CLOSING + "node1: Test failure common.cu:1127\n",
        "mpirun noticed that process rank 1 exited on signal 9 (Killed).\n" + CLOSING,
    ],
)
def test_not_ok(closing: str) -> None:
    (run,) = runs(HEAD + device(0) + device(1) + COLUMNS + row(8) + closing)
    assert run["ok"] is False


def test_a_table_without_rows_is_not_ok() -> None:
    (run,) = runs(HEAD + device(0) + device(1) + COLUMNS + CLOSING)
    assert (run["complete"], run["ok"]) == (True, False)


def test_information_of_nccl_is_no_message() -> None:
    info = "node1:1000:1000 [0] NCCL INFO NET/Plugin: Failed to find symbol\n"
    (run,) = runs(HEAD + info + device(0) + device(1) + COLUMNS + row(8) + CLOSING)
    assert run["messages"] == []


@pytest.mark.parametrize("text", ["", "hello\n", "node1:1:1 [0] NCCL INFO Bootstrap\n", row(8)])
def test_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parsed("nccl-tests", text)
