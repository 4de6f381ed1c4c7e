"""Each setting follows from a fact, and what the facts do not report is left alone with that as the reason."""

import re
from typing import Any

import pytest

from gpunode.catalog import load
from gpunode.facts import NodeFacts
from gpunode.facts.containers import CdiSpec, ContainerSettings, DockerDaemon
from gpunode.facts.host import Cpu, Memory, NumaNode
from gpunode.facts.models.workload import Record
from gpunode.facts.network import IbDevice, IbPort, Nic
from gpunode.facts.pci import PciDevice
from gpunode.tuning import WORKLOADS, Tuning, payload_settings, tune

GPU = {"class_id": "0302", "vendor_id": "10de", "device_id": "2330", "subsystem_id": None, "driver": "nvidia"}
SPEC = CdiSpec(
    path="/var/run/cdi/nvidia.yaml",
    size_bytes=99,
    cdi_version="0.6.0",
    kind="nvidia.com/gpu",
    devices=("0", "all"),
    driver_versions=("580.95.05",),
    missing=(),
)


def gpus(number: int) -> tuple[PciDevice, ...]:
    return tuple(PciDevice.model_validate({**GPU, "slot": f"0000:{index + 16:02x}:00.0"}) for index in range(number))


def nic(name: str, speed: int | None = 10000, state: str = "up") -> Nic:
    return Nic(
        name=name, slot=None, driver=None, state=state, speed_mbit_per_s=speed, mtu=1500, numa_node=0, carrier_changes=1
    )


def hca(name: str, rate: float | None = 400.0, state: str = "ACTIVE", interfaces: tuple[str, ...] = ()) -> IbDevice:
    port = IbPort(
        port=1, state=state, physical_state="LinkUp", rate_gbit_per_s=rate, rate=None, link_layer="InfiniBand", lid=1,
        interfaces=interfaces,
    )  # fmt: skip
    return IbDevice(name=name, firmware=None, board_id=None, type=None, slot=None, numa_node=0, ports=(port,))


def daemon(version: str) -> DockerDaemon:
    return DockerDaemon(
        version=version, runtimes=("nvidia",), default_runtime="runc", cgroup_driver="systemd", cgroup_version="2",
        storage_driver="overlay2", live_restore=True,
    )  # fmt: skip


def configured(settings: dict[str, Any] | None, mode: str | None = None) -> ContainerSettings:
    return ContainerSettings(
        docker=settings, docker_runtimes=(), docker_default_runtime=None, toolkit_mode=mode, toolkit_no_cgroups=None,
        containerd_has_nvidia=None,
    )  # fmt: skip


def memory(gib: int) -> Memory:
    return Memory(
        total_mib=gib * 1024, available_mib=None, swap_total_mib=None, swap_free_mib=None, hugepages_total=None,
        hugepages_free=None, hugepage_size_kib=None,
    )  # fmt: skip


def node(**facts: Any) -> NodeFacts:
    known = {
        "pci": gpus(8),
        "docker": daemon("28.5.1"),
        "cdi_specs": (SPEC,),
        "nics": (nic("eth0"),),
        "addressed": ("eth0",),
        "infiniband": (),
        "memory": memory(2048),
        "cpu": Cpu(
            architecture="x86_64", model_name=None, cpus=224, sockets=2, cores_per_socket=56, threads_per_core=2
        ),
        "numa": (),
        **facts,
    }
    gaps = {name: "not seen today" for name, value in known.items() if value is None and name not in {"docker"}}
    return NodeFacts(host="gpu-01", collected_at="now", gaps=gaps, **known)


def environment(tuning: Tuning) -> dict[str, str]:
    return {setting.name: setting.value for setting in tuning.environment}


def docker(tuning: Tuning) -> list[str]:
    return [f"{setting.name} {setting.value}" for setting in tuning.docker]


def left(tuning: Tuning, name: str) -> str:
    return next(setting.reason for setting in tuning.left_alone if setting.name == name)


def test_nothing_is_known_and_nothing_is_guessed() -> None:
    bare = NodeFacts(host="gpu-01", collected_at="now", gaps={"infiniband": "no root", "cpu": "no lscpu", "pci": "?"})
    for workload in WORKLOADS:
        tuning = tune(bare, workload, multi_node=True)
        of_this_node = {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"}
        assert not of_this_node & set(environment(tuning))
        assert not [argument for argument in docker(tuning) if "gpu" in argument or "infiniband" in argument]
        assert {"no root" in left(tuning, name) for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX")} == {True}
    assert left(tune(bare, "pytorch"), "NCCL_IB_HCA") == "RDMA devices could not be read: no root"
    assert left(tune(bare, "pytorch"), "OMP_NUM_THREADS") == "the processor's cores are unknown: no lscpu"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_value_has_a_reason_and_a_source_that_the_catalog_has(workload: Any) -> None:
    tuning = tune(node(infiniband=(hca("mlx5_0"),), numa=numa(2)), workload, multi_node=True)
    for setting in (*tuning.environment, *tuning.docker):
        assert setting.reason
        for key in re.findall(r"sources\.yml, (\w+)", setting.source):
            assert key in load().sources
        assert "catalog" in setting.source
    assert all(setting.reason for setting in tuning.left_alone)
    names = {setting.name for setting in tuning.environment}
    assert not names & {setting.name for setting in tuning.left_alone}


def numa(number: int) -> tuple[NumaNode, ...]:
    return tuple(
        NumaNode(node=index, cpus="0-1", memory_total_mib=1, memory_free_mib=1, distances=(10,))
        for index in range(number)
    )


def test_variables_for_debugging_are_never_set() -> None:
    names = {name for workload in WORKLOADS for name in environment(tune(node(), workload, multi_node=True))}
    assert not names & {"NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_ALGO", "CUDA_LAUNCH_BLOCKING"}


def test_active_rdma_comes_into_the_container() -> None:
    assert "--device /dev/infiniband" in docker(tune(node(infiniband=(hca("mlx5_0"),)), "pytorch"))
    assert "--device /dev/infiniband" not in docker(tune(node(), "pytorch"))


def test_a_container_of_one_node_has_interfaces_of_its_own() -> None:
    tuning = tune(node(), "pytorch")
    assert "NCCL_SOCKET_IFNAME" not in environment(tuning)
    assert "--network host" not in docker(tuning)
    assert "--network host" in docker(tune(node(), "pytorch", multi_node=True))


@pytest.mark.parametrize(("number", "value"), [(8, "14"), (1, "112"), (112, "1"), (200, None), (0, None)])
def test_threads_are_cores_for_each_gpu(number: int, value: str | None) -> None:
    assert environment(tune(node(pci=gpus(number)), "pytorch")).get("OMP_NUM_THREADS") == value


@pytest.mark.parametrize(
    ("facts", "argument"),
    [
        ({"docker": daemon("28.5.1")}, "--device nvidia.com/gpu=all"),
        ({"docker": daemon("26.1.5")}, "--gpus all"),
        (
            {"docker": daemon("26.1.5"), "containers": configured({"features": {"cdi": True}})},
            "--device nvidia.com/gpu=all",
        ),
        ({"docker": daemon("26.1.5"), "containers": configured({"features": {"cdi": "yes"}})}, "--gpus all"),
        ({"docker": daemon("20.10.24+dfsg1")}, "--gpus all"),
        ({"docker": daemon("19.03.15")}, "--gpus all"),
        ({"docker": daemon("18.09.1")}, "--runtime nvidia"),
        ({"docker": daemon("28.5.1"), "containers": configured({"features": {"cdi": False}})}, "--gpus all"),
        ({"docker": daemon("28.5.1"), "containers": configured({"cdi-spec-dirs": [""]})}, "--gpus all"),
        ({"docker": daemon("28.5.1"), "containers": configured({"features": {}})}, "--device nvidia.com/gpu=all"),
        ({"docker": daemon("26.1.5"), "containers": configured(None, "cdi")}, "--runtime nvidia"),
        ({"docker": daemon("26.1.5"), "containers": configured(None, "csv")}, "--runtime nvidia"),
        ({"docker": daemon("26.1.5"), "containers": configured(None, "auto")}, "--gpus all"),
        ({"docker": daemon("28.5.1"), "containers": configured(None, "cdi")}, "--device nvidia.com/gpu=all"),
        ({"docker": None, "tool_versions": {"docker": "28.5.1"}}, "--device nvidia.com/gpu=all"),
        ({"docker": None}, None),
        ({"cdi_specs": ()}, None),
        ({"cdi_specs": (SPEC.model_copy(update={"devices": ("0",)}),)}, None),
        ({"pci": ()}, None),
        ({"pci": None}, None),
    ],
)
def test_gpus_come_in_as_the_engine_has_it(facts: dict[str, Any], argument: str | None) -> None:
    arguments = [text for text in docker(tune(node(**facts), "pytorch")) if "gpu" in text or "nvidia" in text]
    assert arguments == ([argument] if argument else [])
    beside = "--env NVIDIA_VISIBLE_DEVICES=all" in docker(tune(node(**facts), "pytorch"))
    assert beside is (argument == "--runtime nvidia")


@pytest.mark.parametrize(
    ("gib", "number", "value"), [(2048, 8, "64g"), (64, 8, "32g"), (64, 1, "8g"), (1, 1, "1g"), (None, 8, "1g")]
)
def test_shared_memory_grows_with_gpus_and_leaves_half(gib: int | None, number: int, value: str) -> None:
    facts = node(memory=memory(gib) if gib else None, pci=gpus(number))
    assert f"--shm-size {value}" in docker(tune(facts, "pytorch"))


def test_the_stack_is_never_unlimited_and_memory_may_be_locked() -> None:
    arguments = docker(tune(node(), "nccl-tests"))
    assert "--ulimit memlock=-1" in arguments
    assert "--ulimit stack=67108864" in arguments
    assert "--cap-add SYS_NICE" not in arguments
    assert "--cap-add SYS_NICE" in docker(tune(node(numa=numa(2)), "nccl-tests"))


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.14.1+cu130", "PYTORCH_ALLOC_CONF"),
        ("2.10.0", "PYTORCH_ALLOC_CONF"),
        ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),
        ("not a version", "PYTORCH_CUDA_ALLOC_CONF"),
        (None, "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_expandable_segments_are_set_where_they_are_asked_for(version: str | None, name: str) -> None:
    values = {"version": version, "available": True, "count": 8}
    records = (Record(record="versions.torch", device="cuda", seconds=1.0, values=values),) if version else None
    facts = node(records=records)
    assert not [variable for variable in environment(tune(facts, "pytorch")) if variable.startswith("PYTORCH_")]
    assert "CUDA IPC" in left(tune(facts, "pytorch"), "PYTORCH_CUDA_ALLOC_CONF")
    variables = environment(tune(facts, "pytorch", expandable=True))
    assert variables[name] == "expandable_segments:True"
    assert len([variable for variable in variables if variable.startswith("PYTORCH_")]) == 1


@pytest.mark.parametrize(
    ("allowed", "value"), [(224, "14"), (112, "7"), (16, "1"), (1, None), (None, "14"), (448, "14")]
)
def test_threads_keep_to_the_processors_of_a_cpuset(allowed: int | None, value: str) -> None:
    tuning = tune(node(cpus_allowed=allowed), "pytorch")
    assert environment(tuning).get("OMP_NUM_THREADS") == value
    reasons = [setting.reason for setting in tuning.environment if setting.name == "OMP_NUM_THREADS"]
    assert [("cpuset" in reason) for reason in reasons] == ([] if value is None else [value != "14"])


def test_tensorflow_has_its_own() -> None:
    variables = environment(tune(node(), "tensorflow"))
    assert variables["TF_GPU_THREAD_MODE"] == "gpu_private"
    assert not [name for name in variables if name.startswith("PYTORCH_")]
    assert not [name for name in environment(tune(node(), "pytorch")) if name.startswith("TF_")]


def test_the_payload_gets_what_the_catalog_has() -> None:
    rows = load().frameworks.values()
    known = {row.compile_min_compute_capability for row in rows} - {None}
    assert payload_settings()["compile_min_capability"] in known
