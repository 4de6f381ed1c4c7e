"""How GPUs are asked for: by CDI where the engine and the node have it, else by the runtime."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeWay
from test_workload_gpus import TRAINING
from test_workload_gpus import node as node_with

from gpunode.facts import NodeFacts
from gpunode.facts.containers import CdiSpec
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.models.workload import ContainerValues, Record, values_of
from gpunode.onnode.probe import CDI_TOKEN
from gpunode.workload.devices import Use, choose, without_empty_mig
from gpunode.workload.engine import Engine
from gpunode.workload.launch import WorkloadRequest, devices_for, launch
from gpunode.workload.transport import LaunchFailure

SPEC = (SimpleNamespace(kind="nvidia.com/gpu"),)
OTHER = (SimpleNamespace(kind="intel.com/gpu"),)
USE = Use((0, 1))
PATH = "/var/run/cdi/nvidia.yaml"
CDI = Engine(None, "28.5.1", "1.51", {"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, 0.0)
CDI_ALONE = Engine(None, "28.5.1", "1.51", {"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"runc": {}}}, 0.0)
OLD = Engine(None, "20.10.24", "1.41", {}, 0.0)


@pytest.mark.parametrize(
    ("info", "specs", "how"),
    [
        ({"CDISpecDirs": ["/etc/cdi"]}, SPEC, "cdi"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, SPEC, "cdi"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, (), "runtime"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"nvidia": {}}}, OTHER, "runtime"),
        ({"CDISpecDirs": ["/etc/cdi"], "Runtimes": {"runc": {}}}, (), "cdi"),
        ({"CDISpecDirs": []}, SPEC, "runtime"),
        ({"Runtimes": None}, None, "runtime"),
    ],
)
def test_the_way_that_both_sides_have(info: dict[str, Any], specs: Any, how: str) -> None:
    engine = Engine(None, "28.5.1", "1.51", info, 0.0)
    node: Any = SimpleNamespace(cdi_specs=specs, containers=None)
    assert devices_for(engine, USE, node).how == how
    assert devices_for(engine, Use(), node).how == "none"


@pytest.mark.parametrize(
    ("mode", "runtimes", "specs", "how"),
    [
        ("cdi", {"nvidia": {}}, (), "nvidia"),
        ("csv", {"nvidia": {}}, (), "nvidia"),
        ("auto", {"nvidia": {}}, (), "runtime"),
        ("legacy", {"nvidia": {}}, (), "runtime"),
        (None, {"nvidia": {}}, (), "runtime"),
        ("cdi", {"runc": {}}, (), "runtime"),
    ],
)
def test_the_runtime_is_asked_where_its_hook_takes_no_request(
    mode: str | None, runtimes: dict[str, Any], specs: Any, how: str
) -> None:
    engine = Engine(None, "20.10.24", "1.41", {"Runtimes": runtimes}, 0.0)
    node: Any = SimpleNamespace(cdi_specs=specs, containers=SimpleNamespace(toolkit_mode=mode))
    gpu_devices = devices_for(engine, USE, node)
    assert (gpu_devices.how, gpu_devices.recorded) == (how, "runtime")
    assert gpu_devices.requests == [] if how == "nvidia" else gpu_devices.requests
    assert gpu_devices.variables.get("NVIDIA_VISIBLE_DEVICES") == ("all" if how == "nvidia" else None)


@pytest.mark.parametrize(
    ("version", "able"),
    [("5.4.0", True), ("5.10.1", True), ("6.0.0", True), ("5.3.9", False), ("4.9.3", False), ("?", False)],
)
def test_podman_is_asked_by_cdi_or_refused_by_name(version: str, able: bool) -> None:
    """No request but by CDI is honoured by its Docker API, and that from 5.4 on (lablup/backend.ai issue 13820)."""
    podman = Engine(None, version, "1.41", {"Runtimes": {"nvidia": {}}}, 0.0, podman=True)
    node: Any = SimpleNamespace(cdi_specs=SPEC, containers=None)
    if able:
        assert devices_for(podman, USE, node).how == "cdi"
        with pytest.raises(LaunchFailure, match="only by CDI") as caught:
            devices_for(podman, USE, SimpleNamespace(cdi_specs=(), containers=None))  # type: ignore[arg-type]
    else:
        with pytest.raises(LaunchFailure, match=r"before Podman 5\.4") as caught:
            devices_for(podman, USE, node)
    assert caught.value.kind == "no-gpu-support"
    assert devices_for(podman, Use(), node).how == "none"


def spec(*devices: str, path: str = PATH, kind: str = "nvidia.com/gpu") -> CdiSpec:
    values: dict[str, Any] = dict.fromkeys(CdiSpec.model_fields)
    return CdiSpec.model_construct(**values | {"path": path, "kind": kind, "devices": devices})


def mig(gpu: int, *instances: int | None) -> dict[str, Any]:
    return {
        "index": gpu,
        "uuid": f"GPU-{gpu}",
        "mig_mode": True,
        "mig_devices": [{"index": index} for index in instances],
    }


def busy(*gpus: dict[str, Any], specs: tuple[CdiSpec, ...] | None = (), **changes: Any) -> tuple[Use, NodeFacts]:
    """A node with a foreign process on gpu3, and what a run may use of it."""
    if gpus:
        listed = [*gpus, {"index": 3, "uuid": "GPU-3"}]
        changes |= {"smi": Smi[SmiLog](document={"gpus": listed})}
    facts = node_with(TRAINING, **changes).model_copy(update={"cdi_specs": specs})
    return choose(facts, force=False, without=False), facts


def test_a_part_of_the_gpus_is_named_one_by_one() -> None:
    use, facts = busy()
    assert devices_for(OLD, USE, facts).names is None
    assert devices_for(OLD, use, facts).names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("names", "requested"),
    [
        (("0", "1", "2", "3", "all"), ("0", "1", "2")),
        (("gpu0", "gpu1", "gpu2", "gpu3", "all"), ("gpu0", "gpu1", "gpu2")),
        (("GPU-0", "GPU-1", "GPU-2", "GPU-3", "all"), ("GPU-0", "GPU-1", "GPU-2")),
        # By both, as the toolkit writes it by default: an index may be another GPU's since it was written.
        (("0", "1", "2", "3", "GPU-0", "GPU-1", "GPU-2", "GPU-3", "all"), ("GPU-0", "GPU-1", "GPU-2")),
    ],
)
def test_gpus_are_asked_for_by_the_names_that_the_specification_has(
    names: tuple[str, ...], requested: tuple[str, ...]
) -> None:
    use, facts = busy(specs=(spec("0", path="/etc/cdi/other.json", kind="example.org/fpga"), spec(*names)))
    gpu_devices = devices_for(CDI, use, facts)
    assert (gpu_devices.how, gpu_devices.names) == ("cdi", requested)
    (request,) = gpu_devices.requests
    assert request["DeviceIDs"] == [f"nvidia.com/gpu={name}" for name in requested]


def test_a_gpu_without_a_uuid_goes_by_its_index() -> None:
    use, facts = busy({"index": 0, "uuid": None}, specs=(spec("0", "3"),))
    assert devices_for(CDI, use, facts).names == ("0",)


def test_without_a_busy_gpu_all_are_asked_for_whatever_their_names() -> None:
    facts = node_with().model_copy(update={"cdi_specs": (spec("GPU-other", "all"),)})
    (request,) = devices_for(CDI, choose(facts, force=False, without=False), facts).requests
    assert request["DeviceIDs"] == ["nvidia.com/gpu=all"]


@pytest.mark.parametrize(
    ("names", "requested"),
    [
        (("0", "1", "1:0", "1:2", "3", "all"), ("0", "1:0", "1:2")),
        (("gpu0", "mig1:0", "mig1:2", "gpu3", "all"), ("gpu0", "mig1:0", "mig1:2")),
    ],
)
def test_a_gpu_in_mig_mode_is_asked_for_as_its_mig_devices(names: tuple[str, ...], requested: tuple[str, ...]) -> None:
    use, facts = busy({"index": 0, "uuid": "GPU-0", "mig_mode": False}, mig(1, 0, 2), specs=(spec(*names),))
    assert devices_for(CDI, use, facts).names == requested
    assert devices_for(OLD, use, facts).names == ("0", "1:0", "1:2")


@pytest.mark.parametrize(
    ("gpus", "specs", "reported"),
    [
        (
            ({"index": 0, "uuid": "GPU-0"}, {"index": 1, "uuid": "GPU-1"}),
            (spec("GPU-0", "GPU-9", "all"),),
            f"{PATH} has no device for gpu1: nvidia-ctk cdi generate --output={PATH} regenerates it. "
            "When gpu3 is idle, all GPUs are requested and no name is needed",
        ),
        (
            ({"index": 0, "uuid": "GPU-0"}, {"index": 1, "uuid": "GPU-1"}),
            (spec("5", path="/etc/cdi/nvidia.yaml"), spec("6")),
            f"/etc/cdi/nvidia.yaml and {PATH} have no device for gpu0, gpu1: nvidia-ctk cdi generate --output={PATH} ",
        ),
        ((mig(0, 0, 1),), (spec("0", "0:0", "3", "all"),), f"{PATH} has no device for MIG device 1 of gpu0: "),
        (
            (mig(0, 0),),
            (spec("MIG-5", "GPU-3", "all"),),
            "for MIG device 0 of gpu0: nvidia-ctk cdi generate --device-name-strategy=index --output=",
        ),
    ],
)
def test_a_gpu_that_the_specification_lacks_is_named_with_the_remedy(
    gpus: tuple[dict[str, Any], ...], specs: tuple[CdiSpec, ...], reported: str
) -> None:
    use, facts = busy(*gpus, specs=specs)
    with pytest.raises(LaunchFailure) as caught:
        devices_for(CDI, use, facts)
    assert reported in str(caught.value)
    assert (caught.value.kind, len(str(caught.value).splitlines())) == ("no-gpu-support", 1)


def test_a_mig_device_without_an_index_is_never_treated_as_the_whole_gpu() -> None:
    use, facts = busy(mig(0, 1, None), specs=(spec("0", "0:1"),))
    with pytest.raises(LaunchFailure, match="no index of a MIG device of gpu0"):
        devices_for(CDI, use, facts)


def test_where_there_is_no_specification_none_is_made_up() -> None:
    use, facts = busy(specs=())
    with pytest.raises(LaunchFailure, match=r"no CDI specification of nvidia\.com/gpu in .* lists gpu0, gpu1, gpu2"):
        devices_for(CDI_ALONE, use, facts)
    unknown = facts.model_copy(update={"cdi_specs": None, "gaps": {"cdi_specs": "/etc/cdi: permission denied"}})
    with pytest.raises(LaunchFailure, match="permission denied") as caught:
        devices_for(CDI_ALONE, use, unknown)
    assert caught.value.kind == "unknown"


def test_a_gpu_in_mig_mode_without_an_instance_is_left_out() -> None:
    use, facts = busy({"index": 0, "uuid": "GPU-0"}, mig(1), specs=(spec("0", "1", "3"),))
    left = without_empty_mig(use, facts)
    assert (left.indices, left.busy, left.skipped) == ((0,), use.busy, None)
    assert devices_for(CDI, left, facts).names == ("0",)
    every = choose(facts.model_copy(update={"gpu_processes": ()}), force=False, without=False)
    assert without_empty_mig(every, facts) == replace(every, indices=(0, 3))


def test_a_node_with_idle_gpus_without_an_instance_is_a_skip() -> None:
    _, facts = busy(mig(0), specs=(spec("0", "3"),))
    record = run(facts, {})
    assert record.error is None
    assert record.skipped == (
        "GPUs are in use: gpu3: python3 (pid 4242, alice); MIG is on and has no instance: gpu0; --force uses them all "
        "the same"
    )


def test_a_node_on_which_every_gpu_is_in_mig_mode_without_an_instance_starts_nothing() -> None:
    divided = {"gpu_processes": (), "smi": Smi[SmiLog](document={"gpus": [mig(0), mig(1)]})}
    record = run(busy()[1].model_copy(update=divided), {})
    assert (record.error, record.skipped) == (None, "MIG is on and has no instance: gpu0, gpu1")


def run(facts: NodeFacts, info: dict[str, Any]) -> Record:
    """The launcher's own record of a run on an engine without images."""
    engine = FakeEngine(answers={"GET /containers/json": (200, [])})
    engine.info |= info
    server = engine.start()
    try:
        requested = WorkloadRequest(image=lambda _: "site/image:1")
        *_, last = launch(FakeWay(server), facts, requested, time.monotonic() + 30, lambda _: None)
    finally:
        server.shutdown()
        server.server_close()
    return Record.model_validate(last)


def test_a_launch_that_cannot_name_a_gpu_ends_in_a_record_that_reports_it() -> None:
    _, facts = busy({"index": 0, "uuid": "GPU-0"}, specs=(spec("GPU-9"),))
    record = run(facts, {"CDISpecDirs": ["/etc/cdi"]})
    assert record.error is not None
    assert "has no device for gpu0: nvidia-ctk cdi generate" in record.error
    assert record.values["kind"] == "no-gpu-support"


def test_what_was_handed_in_is_counted_without_what_was_left_out() -> None:
    other = GpuProcess(pid=7, name="Xorg", type="G", gpu="gpu0")
    _, facts = busy({"index": 0, "uuid": "GPU-0"}, mig(1), specs=(spec("0"),), gpu_processes=(TRAINING, other))
    values = values_of(run(facts, {"CDISpecDirs": ["/etc/cdi"]}), ContainerValues)
    assert isinstance(values, ContainerValues)
    assert (values.gpus, values.busy) == (1, ("gpu3: python3 (pid 4242, alice)",))


@pytest.mark.parametrize("name", ["0", "0:1", "gpu0", "mig0:1", "GPU-4cf8db2d-06c0", "MIG-4cf8db2d-06c0", "all"])
@pytest.mark.parametrize("form", ['- name: "{}"\n', "- name: {}\n", '{{"name":"{}","containerEdits":{{}}}}'])
def test_the_probe_reads_a_device_by_any_of_the_toolkits_names(name: str, form: str) -> None:
    assert CDI_TOKEN.findall(form.format(name)) == [("name", name)]
