"""nccl-tests over several nodes: their recorded output, beside what gpunode measured."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from captured import FOLDER, each

from gpunode.checks import Status
from gpunode.cli import run
from gpunode.fabric.records import has_nccl_tests, opinion_of
from gpunode.fabric.starters import NCCL_TESTS, StarterRequest, nccl_tests_command, text
from gpunode.judging.report import CollectiveReport, FabricReport

SAMPLES = Path(__file__).parents[1] / "facts" / "samples"
WRONG = (SAMPLES / "nccl-tests.mpi.txt").read_text(encoding="utf-8")
"""Four ranks on two nodes, tagged by mpirun, with wrong values and lines of NCCL within rows."""
REQUEST = StarterRequest(nodes=("gpu-01", "gpu-02"), ranks=2, backend="nccl", minutes=5)


def corrected(log: str) -> str:
    """The log of the same run without wrong values."""
    return log.replace("1.04858e+06", "0").replace("42.05      3", "42.05      0").replace("1048579 FAILED", "0 OK")


def own(busbw: float, size: int = 2**22) -> FabricReport:
    row = CollectiveReport(name="all-reduce", size_bytes=size, time_us=100.0, busbw_gb_per_s=busbw, wrong=0)
    return FabricReport(engine="mpi", backend="nccl", ranks=4, rounds=2, minutes=1.0, collectives=(row,))


@pytest.mark.parametrize(
    ("log", "report", "status", "words"),
    [
        (WRONG, own(63.0), Status.FAIL, ["all_reduce over 4 ranks", "1048579 wrong"]),
        (corrected(WRONG), own(63.0), Status.PASS, ["63.84 GB/s", "63 GB/s"]),
        (corrected(WRONG), own(30.0), Status.WARN, ["63.84 GB/s", "30 GB/s"]),
        # Another size is not comparable.
        (corrected(WRONG), own(30.0, 2**30), Status.PASS, ["63.84 GB/s at most"]),
        (corrected(WRONG), None, Status.PASS, ["no wrong element"]),
        (corrected(WRONG).partition("[1,0]<stdout>:# Out of bounds")[0], own(63.0), Status.ERROR, ["did not finish"]),
        ("", own(63.0), Status.SKIP, ["not installed"]),
        ("all_reduce_perf: error while loading shared libraries: libmpi.so.40\n", None, Status.ERROR, ["expected"]),
    ],
)
def test_the_opinion_on_a_log(log: str, report: FabricReport | None, status: Status, words: list[str]) -> None:
    opinion = opinion_of(log, report)
    assert (opinion.check, opinion.status) == ("nodes.nccl-tests", status), opinion.message
    assert all(word in opinion.message for word in words), opinion.message


def test_the_starters_failure_is_the_reason() -> None:
    opinion = opinion_of("", None, "mpirun ended with exit code 213: libmpi.so.40 not found")
    assert (opinion.status, "exit code 213" in opinion.message) == (Status.ERROR, True)


def test_processes_that_measured_alone_are_no_opinion() -> None:
    """Built without MPI: each process is rank 0 of its own run."""
    lines = [line.partition(">:")[2] for line in corrected(WRONG).splitlines() if line.startswith("[1,0]")]
    alone = [line for line in lines if "#  Rank  " not in line or "Rank  0" in line]
    for log in ("\n".join(alone), "\n".join([*alone, *alone])):
        assert opinion_of(log, own(63.0)).status is Status.SKIP


@pytest.mark.parametrize(
    ("name", "rate", "status"),
    each(
        [
            ("nccl/gcp-a3mega-h100-2node-16gpu-partial-hash.log", 331.0, Status.PASS),
            ("nccl/azure-aks-ndv4-nccl-gdr-headeronly.log", 185.0, Status.PASS),
            ("nccl/azure-aks-ndv4-nccl-slow-fallback.log", 185.0, Status.WARN),
            ("nccl/aws-p4d-eks-2node-tagged-old-error-col-ncclinfo.log", 43.0, Status.PASS),
        ]
    ),
)
def test_recorded_logs_of_several_nodes(name: str, rate: float, status: Status) -> None:
    log = (FOLDER / name).read_text(encoding="utf-8", errors="replace")
    size = 2**32 if "aws" in name else 2**33
    opinion = opinion_of(log, own(rate, size))
    assert opinion.status is status, opinion.message


def test_the_command_starts_one_process_for_each_gpu() -> None:
    slurm, mpi = (nccl_tests_command(starter, REQUEST) for starter in ("slurm", "mpi"))
    assert "--ntasks=4" in slurm
    assert mpi[mpi.index("-np") + 1] == "4"
    for words in (slurm, mpi):
        assert words[-3:] == ["/bin/sh", "-c", NCCL_TESTS]
    script = text("slurm", REQUEST)
    assert script.rstrip().splitlines()[-1].startswith("srun ")
    assert "all_reduce_perf" in script
    assert "all_reduce_perf" not in text("slurm", StarterRequest(("a", "b"), 1, "gloo", 5))


LINKS = {
    "record": "fabric.links",
    "values": {"backend": "nccl", "ranks": 4, "names": ["a", "b"], "rank_nodes": [0, 0, 1, 1], "rounds": 2},
}
RATES = {
    "record": "nccl.all-reduce",
    "values": {"backend": "nccl", "ranks": 4, "rows": [{"size_bytes": 2**22, "time_us": 9.0, "busbw_gb_per_s": 30.0}]},
}
MPIRUN = """\
#!/bin/sh
for last; do :; done
case "$last" in
  *all_reduce_perf*) exec /bin/sh -c "$last";;
esac
cat > /dev/null
cat "$(dirname "$0")/records"
"""


@pytest.mark.parametrize(("installed", "status"), [(True, "warn"), (False, "skip")])
def test_mpirun_runs_them_where_they_are_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: bool,
    status: str,
) -> None:
    """Stand-ins: mpirun prints records for the payload, and runs the other command; nccl-tests print a log."""
    (tmp_path / "log").write_text(corrected(WRONG), encoding="utf-8")
    rates: dict[str, Any] = copy.deepcopy(RATES)
    rates["values"]["rows"][0]["wrong"] = 0
    rows = [{**row, "device": "cuda", "seconds": 1.0} for row in (LINKS, rates)]
    (tmp_path / "records").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    programs = {"mpirun": MPIRUN}
    if installed:
        check = 'test "$*" = "-b 8 -e 1G -f 2 -g 1 -c 1" || exit 2\n'
        programs["all_reduce_perf"] = f'#!/bin/sh\n{check}cat "$(dirname "$0")/log"\n'
    for name, program in programs.items():
        (tmp_path / name).write_text(program, encoding="ascii")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = ["validate", "--fabric", "--engine", "mpi", "--ranks", "2", "--no-history", "--format", "json", "a", "b"]
    run(words)
    report = json.loads(capsys.readouterr().out)
    opinions = [
        finding for node in report["nodes"] for finding in node["findings"] if finding["check"] == "nodes.nccl-tests"
    ]
    assert [opinion["status"] for opinion in opinions] == [status, status], opinions


def test_a_printed_scripts_output_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = tmp_path / "slurm-7.out"
    both.write_text(f"{json.dumps(LINKS)}\n{json.dumps(RATES)}\n{WRONG}", encoding="utf-8")
    assert has_nccl_tests(both.read_text(encoding="utf-8"))
    assert not has_nccl_tests(f"{json.dumps(LINKS)}\n{json.dumps(RATES)}\n")
    assert run(["validate", "--fabric", "--records", str(both), "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    statuses = {
        finding["status"]
        for node in report["nodes"]
        for finding in node["findings"]
        if "nccl-tests" in finding["check"]
    }
    assert statuses == {"fail"}
