"""What measurements decide by themselves: groups and who is missing, the state of a GPU, memory, storage, figures."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpunode.facts.models.measured import MEASURED, FioJob, FioValues, LoadState
from gpunode.workload.distributed import joined
from gpunode.workload.payload import copies, external, gemm, measuring, nvml, storage
from gpunode.workload.payload.devices import CudaDevice
from gpunode.workload.payload.group import Group, Seat, kinds_of, merged, seat_of
from gpunode.workload.payload.isolate import Clock, Outcome, SkipPart, Trouble, UndeterminedPart
from gpunode.workload.payload.measurements import MEASUREMENTS, Measurements, together

FIO = Path(__file__).with_name("fio-3.33-randread.json")
"""Printed by fio 3.33 of Debian 12, without its histograms."""
SEAT = Seat(0, 4, "file:/x", "nccl")


def missing(*ranks: int) -> Outcome:
    values = {"backend": "nccl", "ranks": 4, "nodes": 1, "missing": list(ranks)}
    return Outcome(30.0, "cuda", values, error=f"rank {ranks[0]} of 4 ended or did not answer within 30 s")


# --- one outcome of a group


def test_a_rank_that_crashed_is_named_with_how_it_ended() -> None:
    ranks = {0: missing(2), 1: missing(2), 2: Outcome(1.0, error="crashed with SIGKILL"), 3: missing(2)}
    outcome = together(ranks, SEAT)
    assert outcome.values["missing"] == [2]
    assert "rank 2 crashed with SIGKILL" in str(outcome.error)
    assert outcome.device == "cuda"


def test_a_rank_that_hangs_beside_others_that_name_nobody_is_the_missing_one() -> None:
    broke = Outcome(2.0, "cuda", {"backend": "nccl", "ranks": 4, "nodes": 1, "missing": []}, error="the group broke")
    outcome = together({0: broke, 1: broke, 2: Outcome(9.0, error="did not return within 9 s"), 3: broke}, SEAT)
    assert (outcome.values["missing"], "rank 2 of 4" in str(outcome.error)) == ([2], True)


def test_a_rank_without_memory_leaves_the_part_undetermined() -> None:
    ranks = {0: missing(1), 1: Outcome(0.1, undetermined="another process uses the GPU")}
    assert together(ranks, SEAT).undetermined == "rank 1: another process uses the GPU"


def test_a_group_that_ended_well_has_the_values_of_its_first_rank() -> None:
    outcome = together({1: Outcome(2.0, "cuda", {"rows": [1]}), 0: Outcome(1.0, "cuda", {"rows": [1]})}, SEAT)
    assert (outcome.error, outcome.values, outcome.seconds) == (None, {"rows": [1]}, 2.0)


def test_records_of_several_containers_are_one_each() -> None:
    good: dict[str, Any] = {"record": "nccl.all-reduce", "error": None, "undetermined": None, "values": {"missing": []}}
    lost = {**good, "record": "nccl.broadcast", "error": "rank 2 of 3 ended", "values": {"missing": [2]}}
    broken: dict[str, Any] = {**lost, "error": "the group broke", "values": {"missing": []}}
    later = {**good, "record": "ddp.sharded", "undetermined": "not run: rank 2 of 3 was missing"}
    records = joined({0: [good, broken, later], 1: [good, lost, later], 2: [good]}, {2: "killed by signal 9"})
    assert [record["record"] for record in records] == ["nccl.all-reduce", "nccl.broadcast", "ddp.sharded"]
    assert records[0] == good
    assert records[1]["values"] == {"missing": [2]}
    assert "killed by signal 9" in records[1]["error"]
    assert records[2]["undetermined"] is not None


@pytest.mark.parametrize("malformed", [{"missing": "2"}, {"missing": [None]}, None, []])
def test_a_record_of_a_hostile_member_breaks_nothing(malformed: Any) -> None:
    (record,) = joined({0: [{"record": "nccl.all-reduce", "error": "x", "values": malformed}], 1: []}, {1: "gone"})
    assert record["error"] == "x"


@pytest.mark.parametrize(
    "change", [{"meet": "tcp:host"}, {"meet": "tcp:host:99999"}, {"rank": 4}, {"rank": -1}, {"backend": "mpi"}]
)
def test_a_seat_that_is_none_is_refused(change: dict[str, Any]) -> None:
    good = {"rank": 0, "size": 4, "meet": "tcp:rank-0:29400", "backend": "gloo"}
    assert seat_of(good).rank == 0
    with pytest.raises(ValueError, match="expected"):
        seat_of(good | change)


@pytest.mark.parametrize(
    ("transports", "nvls", "kinds"),
    [
        (["P2P/CUMEM", "P2P/IPC"], True, ["NVLS", "P2P"]),
        (["SHM/direct", "NET/Socket"], False, ["SHM", "socket"]),
        (["NET/IB", "NET/IBext_v8", "NET/AWS"], False, ["IB", "other"]),
        ([], False, []),
    ],
)
def test_kinds_of_transports(transports: list[str], nvls: bool, kinds: list[str]) -> None:
    assert kinds_of(transports, nvls=nvls) == kinds
    (values,) = [merged([{"transports": dict.fromkeys(transports, 2), "nvls": nvls}, {}])]
    assert values["kinds"] == kinds


def test_fewer_gpus_than_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(is_available=lambda: True, init=lambda: None, device_count=lambda: 3)
    torch = SimpleNamespace(__version__="2", cuda=cuda, device=lambda name: SimpleNamespace(type=name))
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: True)
    monkeypatch.setattr("gpunode.workload.payload.group.torch_module", lambda: torch)
    monkeypatch.setattr("importlib.import_module", lambda _: distributed)
    with pytest.raises(Trouble, match="no GPU for rank 3: PyTorch finds 3 of 4"):
        Group(Seat(3, 4, "file:/x", "nccl", device=3), 0)


# --- the state of a GPU


class Sensor:
    """A GPU that answers one sample after the other, then no more."""

    def __init__(self, *samples: dict[str, Any], lost: bool = False) -> None:
        self.samples, self.lost = list(samples), lost

    def sample(self) -> dict[str, Any]:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]

    def temperature_c(self) -> int | None:
        temperature = self.sample()["temperature_c"]
        return None if temperature is None else int(temperature)


def sample(**changes: Any) -> dict[str, Any]:
    usual = {"sm_clock_mhz": 1980, "memory_clock_mhz": 2619, "power_w": 650.5, "temperature_c": 60, "reasons": 0}
    return usual | changes


def test_the_state_is_medians_the_least_clock_and_shares_of_reasons() -> None:
    samples = [sample(), sample(sm_clock_mhz=1500, reasons=0x24), sample(temperature_c=71, reasons=0x4), sample()]
    state = LoadState.model_validate(nvml.state_of(samples))
    assert (state.samples, state.sm_clock_mhz, state.sm_clock_min_mhz, state.temperature_c) == (4, 1980, 1500, 71)
    assert state.throttle_reasons == {"sw_power_cap": 0.5, "sw_thermal_slowdown": 0.25}


def test_what_nvml_does_not_report_is_none() -> None:
    nothing = dict.fromkeys(sample(), None)
    assert LoadState.model_validate(nvml.state_of([nothing])) == LoadState(samples=1)
    assert LoadState.model_validate(nvml.state_of([])) == LoadState()


def test_a_gpu_that_falls_off_while_it_is_measured_is_named() -> None:
    with pytest.raises(Trouble, match="was lost while it was measured"), nvml.Sampler(Sensor(sample(), lost=True)):
        raise RuntimeError("CUDA error: unspecified launch failure")
    with pytest.raises(RuntimeError, match="CUDA error"), nvml.Sampler(Sensor(sample())):
        raise RuntimeError("CUDA error: unspecified launch failure")


def test_a_load_begins_when_the_temperature_has_settled() -> None:
    cooling = Sensor(*(sample(temperature_c=degrees) for degrees in (70, 66, 62, 60, 59, 59, 58, 58, 58)))
    nvml.settle(cooling, 5.0, pause_s=0.0)
    # 59, 59, 58, 58, 58: what was left of the list is its last one.
    assert len(cooling.samples) == 1
    assert nvml.settle(Sensor(sample(temperature_c=None)), 5.0) < 1
    assert nvml.settle(None, 5.0) < 1


def test_the_slope_of_a_clock() -> None:
    falling = [(float(second), 1980.0 - second) for second in range(0, 60, 10)]
    assert gemm.slope_per_minute(falling) == -60
    assert gemm.slope_per_minute(falling[:4]) is None


# --- memory and figures


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""


@pytest.mark.parametrize(
    ("free", "reserved", "kind"), [(300, 100, UndeterminedPart), (300, 79000, Trouble)], ids=["others", "ours"]
)
def test_memory_that_others_have_is_no_fault_of_the_gpu(free: int, reserved: int, kind: type[Exception]) -> None:
    cuda = SimpleNamespace(
        OutOfMemoryError=OutOfMemoryError,
        mem_get_info=lambda _: (free << 20, 81559 << 20),
        memory_reserved=lambda _: reserved << 20,
    )
    needed = measuring.memory_needed(SimpleNamespace(cuda=cuda), None, "matrices")
    with pytest.raises(kind, match="300 of 81559 MiB are free"), needed:
        raise OutOfMemoryError("CUDA out of memory")


def test_figures_are_medians() -> None:
    assert measuring.bandwidth(10**9, [0.2, 0.1, 0.4]) == {
        "bandwidth_gb_per_s": 5.0,
        "repetitions": 3,
        "spread": 1.5,
    }
    assert measuring.significant(0.000123456) == 0.00012346


def test_numa_nodes_of_a_machine(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1,4"), (1, "9999"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (tmp_path / "node3").mkdir()
    allowed = os.sched_getaffinity(0)
    # Nodes of other processors than ours are left out.
    assert copies.numa_nodes(tmp_path) == ({0: {0, 1, 4} & allowed} if {0, 1, 4} & allowed else {})
    device = tmp_path / "0000:18:00.0"
    device.mkdir()
    (device / "numa_node").write_text("1\n")
    assert copies.node_of("0000:18:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert [copies.node_of(slot, tmp_path) for slot in ("0000:18:00.0", "../../etc", None)] == [None] * 3


# --- storage


def test_a_recorded_answer_of_fio() -> None:
    row = FioJob.model_validate(storage.fio_row(json.loads(FIO.read_text()), "randread", 4096, 2, 4))
    recorded = json.loads(FIO.read_text())["jobs"][0]["read"]
    assert row.iops == pytest.approx(recorded["iops"], rel=1e-4)
    assert row.bandwidth_gb_per_s == pytest.approx(recorded["bw_bytes"] / 1e9, rel=1e-4)
    assert row.latency_p99_us is not None
    assert row.latency_us is not None
    assert row.latency_p99_us >= row.latency_us


def _altered(**changes: Any) -> dict[str, Any]:
    document = json.loads(FIO.read_text())
    document["jobs"][0] |= changes
    return dict(document)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, "another shape"),
        ({"jobs": []}, "another shape"),
        (_altered(read={}), "another shape"),
        (_altered(error=errno.ENOSPC), "No space left"),
    ],
)
def test_an_answer_of_fio_that_is_none(answer: dict[str, Any], words: str) -> None:
    with pytest.raises(Trouble, match=words):
        storage.fio_row(answer, "randread", 4096, 2, 4)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Trouble, match="is not a directory"), storage.folder_in(str(tmp_path / "absent")):
        pass


def test_a_directory_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    refused = pytest.raises(Trouble, match=r"nothing can be written into .*Permission denied")
    with refused, storage.folder_in(str(tmp_path)):
        pass


def test_a_full_file_system_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(Trouble, match="0 MiB of free space"), storage.folder_in(str(tmp_path)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_space_that_runs_out_meanwhile_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    def fill() -> None:
        with storage.folder_in(str(tmp_path)) as (folder, _):
            (folder / "half").write_text("written")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Trouble, match="No space left"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_no_directory_and_a_read_only_one_are_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SkipPart, match="--storage DIR"):
        storage.fio(None, 1.0)

    def read_only(**_: Any) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(SkipPart, match="is mounted read-only"):
        storage.fio(str(tmp_path), 1.0)


# Printed by fio 3.33 of Debian 12 on a ramfs, and for an engine that it was built without.
NO_DIRECT = """echo 'fio: pid=27784, err=22/file:filesetup.c:805, func=open(g.0), error=Invalid argument'
echo 'fio: looks like your file system does not support direct=1/buffered=0' >&2
echo 'fio: destination does not support O_DIRECT' >&2; exit 1"""
NO_ENGINE = "echo 'fio: engine libaio not loadable' >&2; echo 'fio: failed to load engine' >&2; exit 1"


@pytest.mark.parametrize("program", [None, NO_DIRECT, NO_ENGINE])
@pytest.mark.parametrize("direct", [True, False])
def test_where_fio_cannot_measure_our_own_reader_and_writer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, direct: bool
) -> None:
    directory, programs = tmp_path / "data", tmp_path / "programs"
    directory.mkdir()
    programs.mkdir()
    if program is not None:
        _program(programs, "fio", program)
    monkeypatch.setenv("PATH", str(programs))
    opened = os.open

    def without_direct(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return opened(path, flags, *mode, **more)

    if not direct:
        monkeypatch.setattr("gpunode.workload.payload.storage.os.open", without_direct)
    monkeypatch.setattr(storage, "FILE_BYTES", 16 << 20)
    values = FioValues.model_validate(storage.fio(str(directory), 0.1))
    assert (values.fio_version, values.size_bytes) == (None, 16 << 20)
    assert direct or not values.direct
    assert [job.pattern for job in values.jobs] == [pattern for pattern, *_ in storage.PATTERNS]
    assert all(job.bandwidth_gb_per_s > 0 and job.iops > 0 and job.latency_us for job in values.jobs)
    assert list(directory.iterdir()) == []


def test_a_thread_that_starts_late_transfers_once(tmp_path: Path) -> None:
    storage.filled(tmp_path, 1, 1 << 20)
    values = storage.measured(storage.Access(tmp_path, "read", 1 << 16, 1 << 20, direct=False), 1, seconds=-1.0)
    assert values["iops"] > 0
    assert values["latency_us"]


def test_a_colon_in_the_directory_is_no_list_of_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fio reads --directory: the double stands for its run alone and prints what fio 3.33 printed, in any folder."""
    directory = tmp_path / "data:ssd"
    directory.mkdir()
    programs = tmp_path / "programs"
    programs.mkdir()
    _program(programs, "fio", f'case "$*" in *--directory=*:*) echo failed parsing >&2; exit 1;; esac; cat {FIO}')
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr(storage, "PATTERNS", (("randread", 4096, 2, 4),))
    values = storage.fio(str(directory), 1.0)
    assert (values["directory"], len(values["jobs"])) == (str(directory), 1)
    assert list(directory.iterdir()) == []


def test_the_fewest_workers_that_are_enough() -> None:
    rates = {0: 900.0, 1: 850.0, 2: 1700.0, 4: 3210.0, 8: 3300.0, 16: 2900.0}
    rows = [{"workers": workers, "samples_per_second": rate} for workers, rate in rates.items()]
    assert storage.advised(rows) == 4
    assert storage.worker_counts(6) == [0, 1, 2, 4]


# --- external programs


def _program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_what_a_program_prints_is_kept_with_its_exit_code(programs: Path) -> None:
    _program(programs, "nvbandwidth", 'echo "$@"; echo why >&2; exit 3')
    output = external.nvbandwidth(10.0)
    assert (output["stdout"], output["stderr"], output["exit_code"], output["cut"]) == ("-j\n", "why\n", 3, False)
    _program(programs, "all_reduce_perf", "head -c 100000 /dev/zero | tr '\\0' x")
    output = external.nccl_tests(8, 10.0)
    assert (len(output["stdout"]), output["cut"]) == (external.MAX_STDOUT_BYTES, True)


def test_a_program_that_hangs_is_ended(programs: Path) -> None:
    _program(programs, "dcgmi", "exec sleep 60")
    with pytest.raises(Trouble, match=r"within 0\.2 s"):
        external.dcgm_diag(1, 0.2)


def test_a_program_that_is_not_there_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SkipPart, match="nvbandwidth is not installed"):
        external.nvbandwidth(1.0)


# --- the whole


def run(
    *,
    devices: list[CudaDevice],
    no_torch: str | None,
    report: Callable[[str, float], None] = lambda *_: None,
    **settings: Any,
) -> list[dict[str, Any]]:
    measurements = Measurements(
        devices=devices if no_torch is None else [],
        idle=devices,
        environment={},
        settings=settings,
        clock=Clock(60),
        folder=None,
        no_torch=no_torch,
        progress=report,
    )
    return list(measurements.records(set(MEASUREMENTS)))


def test_without_pytorch_each_record_reports_why() -> None:
    reported: list[tuple[str, float]] = []
    records = run(
        devices=[], no_torch="PyTorch is not in the image", report=lambda *line: reported.append(line), level="deep"
    )
    reasons = {record["record"]: record["skipped"] for record in records}
    assert len(reasons) == len(records)
    assert set(reasons) == MEASURED
    assert reasons["gemm.bf16"] == reasons["nccl.pairs"] == "PyTorch is not in the image"
    assert "--storage" in str(reasons["storage.fio"])
    left = [seconds for _, seconds in reported]
    assert [doing.split()[1] for doing, _ in reported] == list(MEASUREMENTS)
    assert left == sorted(left, reverse=True)


def test_a_whole_gpu_is_not_needed_for_what_mig_devices_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    part = CudaDevice(0, "MIG-a", "GPU-0", 0)
    ran: list[str] = []

    def started(jobs: Any, *_: Any) -> Any:
        for job in jobs:
            for task in job.tasks:
                ran.append(task.name)
                yield job, task, Outcome(0.0, "cuda", {})

    monkeypatch.setattr("gpunode.workload.payload.measurements.run_jobs", started)
    records = run(devices=[part], no_torch=None, level="deep")
    skipped = {record["record"] for record in records if record["skipped"]}
    assert {"copy.peer", "nccl.all-reduce", "nccl.pairs", "ddp.replicated", "tools.nvbandwidth"} <= skipped
    assert {"copy.host", "memory.stream", "gemm.fp8", "burn.gemm"} <= set(ran)


# --- a GPU that does not come back


class Event:
    """A CUDA event that is reached, or never."""

    def __init__(self, *, reached: bool, at_ms: float = 0.0) -> None:
        self.reached, self.at_ms = reached, at_ms

    def record(self) -> None:
        return None

    def query(self) -> bool:
        return self.reached

    synchronize = record

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


class Shared(dict[str, str]):
    """A store that all ranks of a test share."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set_timeout(self, _: object) -> None:
        """Nothing waits in it."""


def hanging_group(monkeypatch: pytest.MonkeyPatch, store: Shared) -> Group:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        init=lambda: None,
        device_count=lambda: 2,
        set_device=lambda _: None,
        Event=lambda **_: Event(reached=False),
    )
    torch = SimpleNamespace(__version__="2", cuda=cuda, device=lambda _: SimpleNamespace(type="cuda"))
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_nccl_available=lambda: True,
        FileStore=lambda *_: store,
        PrefixStore=lambda _, inner: inner,
        init_process_group=lambda *_, **__: None,
        # It would wait for ever, and nobody would be named.
        destroy_process_group=lambda: pytest.fail("NCCL was asked to end while it hangs"),
    )
    monkeypatch.setattr("gpunode.workload.payload.group.torch_module", lambda: torch)
    monkeypatch.setattr("gpunode.workload.payload.group.GRACE_S", 0.1)
    monkeypatch.setattr("importlib.import_module", lambda _: distributed)
    return Group(Seat(0, 2, "file:/x", "nccl", limit_s=0.2), 0)


def test_a_collective_that_hangs_in_nccl_is_an_error_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Shared({"here-1/1": "null", "lost/1": "1"})
    group = hanging_group(monkeypatch, store)
    with pytest.raises(Trouble, match=r"NCCL did not return within 0\.1 s") as trouble, group:
        group.seconds(lambda: None, 3)
    assert trouble.value.values["missing"] == []
    assert store["lost/0"] == "1"


def test_a_rank_that_does_not_report_after_a_hang_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = hanging_group(monkeypatch, Shared({"here-1/1": "null"}))
    with pytest.raises(Trouble, match="rank 1 of 2") as trouble, group:
        group.finish()
    assert trouble.value.values == {"device": "cuda", "backend": "nccl", "ranks": 2, "nodes": 1, "missing": [1]}


def test_a_rank_that_never_comes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Trouble, match="rank 1 of 2"), hanging_group(monkeypatch, Shared()):
        pass


def test_times_on_a_gpu_are_those_of_its_events() -> None:
    marks = [Event(reached=True, at_ms=10.0), Event(reached=True, at_ms=12.5)]
    torch = SimpleNamespace(cuda=SimpleNamespace(Event=lambda **_: marks.pop(0)))
    assert measuring.once(torch, SimpleNamespace(type="cuda"), lambda: None) == 0.0025


def test_external_programs_need_no_pytorch(programs: Path) -> None:
    _program(programs, "nvbandwidth", "echo {}")
    whole = CudaDevice(0, "GPU-0", "GPU-0")
    records = {
        record["record"]: record
        for record in run(devices=[whole], no_torch="PyTorch is not in the image", level="deep")
    }
    assert records["tools.nvbandwidth"]["values"]["stdout"] == "{}\n"
    assert records["gemm.bf16"]["skipped"] == "PyTorch is not in the image"
