"""What a run that did not come to the payload leaves: always one record, that the facts can read."""

import ast
import importlib
import json
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeWay, Stream
from test_workload_gpus import TRAINING, node

from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.models.workload import ContainerValues, Record, values_of
from gpunode.probe import Answer
from gpunode.workload import container
from gpunode.workload.container import Confinement, ContainerJob
from gpunode.workload.image import Image
from gpunode.workload.launch import WorkloadRequest, failed, launch
from gpunode.workload.output import BoundedOutput
from gpunode.workload.transport import LaunchFailure


@pytest.fixture
def way() -> Iterator[FakeWay]:
    server: ThreadingHTTPServer = FakeEngine(answers={"GET /containers/json": (200, [])}).start()
    yield FakeWay(server)
    server.shutdown()
    server.server_close()


launching = importlib.import_module("gpunode.workload.launch")  # the package's own name for it is the function


def only(records: list[dict[str, Any]]) -> tuple[Record, ContainerValues]:
    (document,) = records
    record = Record.model_validate(document)
    values = values_of(record, ContainerValues)
    assert isinstance(values, ContainerValues)
    assert record.record == "container"
    return record, values


def site_image(_: object) -> str:
    return "site/image:1"


def run(way: FakeWay, facts: Any, **changes: Any) -> list[dict[str, Any]]:
    return launch(way, facts, WorkloadRequest(image=site_image, **changes), time.monotonic() + 30, lambda _: None)


def test_busy_gpus_are_a_skip_and_the_engine_is_not_asked(way: FakeWay) -> None:
    facts = node(TRAINING.model_copy(update={"gpu": "gpu0"}), gpus=1)
    record, values = only(run(way, facts))
    assert record.skipped is not None
    assert (record.error, record.device, values.gpus) == (None, "cpu", 0)
    assert values.busy == ("gpu0: python3 (pid 4242, alice)",)
    assert way.opened == []


def test_an_image_that_is_not_to_be_had_is_an_error_with_image_and_engine(way: FakeWay) -> None:
    facts = node(TRAINING)
    record, values = only(run(way, facts))
    assert record.error is not None
    assert "site/image:1" in record.error
    assert record.container is not None
    assert (record.container.image, record.container.engine, record.container.gpus) == (
        "site/image:1",
        "docker 28.5.1",
        "runtime",
    )
    assert (record.device, values.gpus, values.complete) == ("cuda", 3, False)


def test_a_time_that_is_too_short_for_anything_is_reported(way: FakeWay) -> None:
    server_knows = {"GET /images/site/image:1/json": (200, {"Id": "sha256:1"}), "GET /containers/json": (200, [])}
    engine = FakeEngine(answers=dict(server_knows))
    server = engine.start()
    records = launch(FakeWay(server), node(), WorkloadRequest(image=site_image), time.monotonic() + 5, lambda _: None)
    server.shutdown()
    server.server_close()
    assert only(records)[0].error == "no time remained to run the payload (--workload-timeout S)"


class Host(FakeWay):
    """A node that is asked for its own Python."""

    program = ""
    arguments: tuple[str, ...] = ()

    def python(self, program: str, arguments: tuple[str, ...]) -> Stream:
        self.program, self.arguments = program, arguments
        raise LaunchFailure("no-python", "python3 is not on the node")


@pytest.mark.parametrize("force", [False, True])
def test_what_the_nodes_own_python_is_given_passes_any_login_shell(way: FakeWay, force: bool) -> None:
    host = Host(way.server)
    facts = node(TRAINING.model_copy(update={"gpu": "gpu0"}))
    assert only(run(host, facts, in_container=False, force=force))[0].error == "python3 is not on the node"
    assert len(host.program.splitlines()) == 1  # csh takes no text of several
    (call,) = ast.parse(host.program).body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    text = ast.literal_eval(call.value.args[0])
    compile(text, "start", "exec")
    assert ("CUDA_VISIBLE_DEVICES" in text) is not force


@pytest.mark.parametrize("force", [False, True])
def test_the_payload_gets_its_gpus_and_what_was_in_use_there(way: FakeWay, force: bool) -> None:
    host = Host(way.server)
    gpus = [{"index": index, "uuid": f"GPU-{index}", "memory_used_mib": index} for index in range(4)]
    facts = node(TRAINING, smi=Smi[SmiLog](document={"gpus": gpus}))
    _, values = only(run(host, facts, in_container=False, force=force, settings={"compile_min_capability": "7.0"}))
    handed = [0, 1, 2, 3] if force else [0, 1, 2]
    assert values.uuids == tuple(f"GPU-{index}" for index in handed)
    settings = json.loads(host.arguments[host.arguments.index("--settings") + 1])
    assert settings == {
        "compile_min_capability": "7.0",
        "gpus": {f"GPU-{index}": index for index in handed},
        "force": force,
        "level": "standard",
        "storage": None,
        "data": None,
        "model_rate": None,
        "burn_s": None,
        "user_site": True,
    }
    assert "gpus" in host.arguments[host.arguments.index("--tests") + 1].split(",")


@pytest.mark.parametrize(
    ("gpu", "architecture", "used"),
    [({}, "x86_64", 7), ({"addressing_mode": "ATS"}, "aarch64", None), ({"addressing_mode": "HMM"}, "aarch64", 7),
     ({}, "aarch64", None)],
)  # fmt: skip
def test_memory_that_the_system_uses_too_is_no_sign_of_a_process(
    way: FakeWay, gpu: dict[str, Any], architecture: str, used: int | None
) -> None:
    host = Host(way.server)
    document = {"gpus": [{"index": 0, "uuid": "GPU-0", "memory_used_mib": 7, **gpu}]}
    run(host, node(gpus=1, smi=Smi[SmiLog](document=document), architecture=architecture), in_container=False)
    settings = json.loads(host.arguments[host.arguments.index("--settings") + 1])
    assert settings["gpus"] == {"GPU-0": used}


def test_no_image_for_a_node_is_reported_before_the_engine_is_asked(way: FakeWay) -> None:
    def none(_: object) -> str:
        raise LaunchFailure("image", "no image is for it: --image IMAGE")

    records = launch(way, node(), WorkloadRequest(image=none), time.monotonic() + 30, lambda _: None)
    assert only(records)[0].error == "no image is for it: --image IMAGE"
    assert way.opened == []


def test_a_run_that_never_came_back_has_its_record_too() -> None:
    lost = failed("it did not end within 900 s and was given up", "deep")
    document = '{"schema": "gpunode.bundle/1", "host": "x", "simulated": true, "commands": {}, "files": {}, '
    text = document + '"collected_at": "2026-11-20T00:00:00Z"}'
    record, _ = only(Answer(text.encode(), records=tuple(lost)).bundle().results)
    assert record.values["level"] == "deep"
    assert (record.error, record.simulated) == ("it did not end within 900 s and was given up", True)


END = b'{"record": "end", "records": 1}\n{"record": "watchdog", "ended": "exit", "exit_code": 0}\n'
SMALL = b'{"record": "versions.limits", "values": {"shm_bytes": 67108864, "memlock_bytes": 8388608}}\n' + END
# A payload that writes the launcher's own records: they are not taken.
FORGED = b'{"record": "defaults.limits", "values": {"shm_bytes": 8589934592}}\n{"record": "versions.system"}\n' + END


@pytest.mark.parametrize(
    ("reported", "values", "undetermined"),
    [
        (SMALL, {"shm_bytes": 67108864, "memlock_bytes": 8388608}, False),
        (END, {}, True),
        (b"", {}, True),
        (b'{"record": "versions.limits", "values": 7}\n' + END, {}, False),
        (LaunchFailure("start", "the engine has enough"), {}, True),
    ],
)
def test_the_engines_own_limits_are_read_in_a_second_container(
    monkeypatch: pytest.MonkeyPatch, reported: bytes | LaunchFailure, values: dict[str, int], undetermined: bool
) -> None:
    jobs: list[ContainerJob] = []

    def run_one(_: object, job: ContainerJob, output: BoundedOutput, known: Confinement | None = None) -> Confinement:
        jobs.append(job)
        if not job.plain:
            output.stdout(FORGED)
            return Confinement(limits=False)
        assert known == Confinement(limits=False)  # what the first run found out is not tried again
        if isinstance(reported, LaunchFailure):
            raise reported
        output.stdout(reported)
        return known

    monkeypatch.setattr(container, "run", run_one)
    answers = {"GET /images/site/image:1/json": (200, {"Id": "sha256:1"}), "GET /containers/json": (200, [])}
    server = FakeEngine(answers=dict(answers)).start()
    try:
        records = run(FakeWay(server), node(gpus=0), named=True)
    finally:
        server.shutdown()
        server.server_close()
    assert [job.plain for job in jobs] == [False, True]
    (limits,) = [Record.model_validate(document) for document in records if document["record"] == "defaults.limits"]
    assert (limits.values, limits.undetermined is not None) == (values, undetermined)
    assert records[-1]["record"] == "container"
    assert (records[-1]["error"], records[-1]["values"]["kind"]) == (None, "done")


@pytest.mark.parametrize(
    ("stop_s", "undetermined", "kind"), [(9999, "x", "time-limit"), (0, "x", "done"), (9999, None, "done")]
)
def test_a_payload_that_left_parts_out_for_lack_of_time_did_not_come_to_its_end(
    monkeypatch: pytest.MonkeyPatch, way: FakeWay, stop_s: float, undetermined: str | None, kind: str
) -> None:
    reported = json.dumps({"record": "versions.torch", "undetermined": undetermined}).encode() + b"\n" + END

    def run_one(_: object, job: ContainerJob, output: BoundedOutput, known: Confinement | None = None) -> Confinement:
        output.stdout(SMALL if job.plain else reported)
        return Confinement()

    monkeypatch.setattr(container, "run", run_one)
    monkeypatch.setattr(launching, "provide", lambda *_: Image("site/image:1", "sha256:1", brought=False))
    monkeypatch.setattr(launching, "STOP_S", stop_s)
    *_, launcher = run(way, node(gpus=0), named=True)
    assert launcher["values"]["kind"] == kind
    assert ("versions.torch the first" in str(launcher["error"])) is (kind == "time-limit")
