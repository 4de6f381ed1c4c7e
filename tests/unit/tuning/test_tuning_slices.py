"""A slice has what it asks for, nobody else's, and no GPU that is in use."""

import copy
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.errors import UndeterminedError, UsageError
from gpunode.facts import NodeFacts, facts_from_bundle
from gpunode.facts.containers import CdiSpec, ContainerSettings, DockerDaemon
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.host import Cpu, CpuSets, Memory
from gpunode.facts.models.smi import Smi, SmiGpu
from gpunode.facts.pci import PciDevice
from gpunode.onnode.launcher import cpu_list
from gpunode.probe.bundle import Bundle
from gpunode.tuning import GpuRequest, SliceRefusedError, docker_args, shell, slice_of, systemd, tune
from gpunode.tuning.slices import threads_and_workers

sys.path.append(str(Path(__file__).parents[2] / "contract"))
from machine_measured import storage
from machines import HGX, PCIE_4, bundle

FACTS = {machine: facts_from_bundle(Bundle.model_validate(bundle(machine))) for machine in (HGX, PCIE_4)}


def node(**facts: Any) -> NodeFacts:
    return FACTS[HGX].model_copy(update=facts)


def used(*indices: int | None) -> tuple[GpuProcess, ...]:
    return tuple(
        GpuProcess(pid=4000, name="python3", type="C", user="alice", gpu=None if index is None else f"gpu{index}")
        for index in indices
    )


def with_gpus(**by_index: Any) -> NodeFacts:
    smi = FACTS[HGX].smi
    assert smi is not None
    assert smi.document is not None
    gpus = [gpu.model_copy(update=by_index.get(f"gpu{gpu.index}", {})) for gpu in smi.document.gpus]
    document = smi.document.model_copy(update={"gpus": tuple(gpus)})
    return node(smi=smi.model_copy(update={"document": document}))


def test_two_gpus_of_eight_get_a_quarter_near_them() -> None:
    part = slice_of(node(), GpuRequest.parse("0,1"))
    assert (part.gpus, part.of_gpus, part.cores, part.processors) == ((0, 1), 8, 28, 56)
    near = next(device.local_cpus for device in node().gpus_on_bus or ())
    assert set(cpu_list(part.cpus)) <= set(cpu_list(near or ""))
    assert (part.threads, part.workers, part.shm_gib) == (7, 7, 16)
    memory = node().memory
    assert memory is not None
    assert 0.88 < part.memory_gib * 4 * 1024 / memory.total_mib <= 0.9


def test_the_arguments_are_those_of_the_slice() -> None:
    part = slice_of(node(), GpuRequest.parse("2-3"))
    tuning = tune(node(), "pytorch", part=part)
    words = docker_args(tuning)
    assert shlex.split(" ".join(words)) == words
    assert [words[at + 1] for at, word in enumerate(words) if word == "--device"][:2] == [
        "nvidia.com/gpu=2",
        "nvidia.com/gpu=3",
    ]
    assert "nvidia.com/gpu=all" not in words
    named = dict(pairwise(words))
    assert named["--cpuset-cpus"] == part.cpus
    assert named["--cpus"] == "56"
    assert named["--memory"] == f"{part.memory_gib}g"
    assert "OMP_NUM_THREADS=7" in words
    assert f"CUDA_VISIBLE_DEVICES={','.join(part.uuids)}" in words
    assert [(setting.name, setting.value) for setting in tuning.program] == [("DataLoader(num_workers)", "7")]
    assert f"taskset --cpu-list {part.cpus}" in shell(tuning)
    assert f"CPUAffinity={part.cpus}\n" in systemd(tuning)
    assert f"MemoryMax={part.memory_gib}G\n" in systemd(tuning)
    whole = systemd(tune(node(), "pytorch"))
    assert "CPUAffinity" not in whole
    assert "MemoryMax" not in whole


SPEC = CdiSpec(
    path="/etc/cdi/nvidia.yaml", size_bytes=9, cdi_version="0.6.0", kind="nvidia.com/gpu", devices=("0", "1", "all"),
    driver_versions=("580.95.05",), missing=(),
)  # fmt: skip


def daemon(version: str) -> DockerDaemon:
    return DockerDaemon(
        version=version, runtimes=("nvidia",), default_runtime="runc", cgroup_driver="systemd", cgroup_version="2",
        storage_driver="overlay2", live_restore=True,
    )  # fmt: skip


CDI = {"docker": daemon("28.5.1"), "cdi_specs": (SPEC,)}
SETTINGS = ContainerSettings(
    docker={}, docker_runtimes=(), docker_default_runtime=None, toolkit_mode="cdi", toolkit_no_cgroups=None,
    containerd_has_nvidia=None,
)  # fmt: skip
CDI_MODE = {"docker": daemon("20.10.5"), "containers": SETTINGS}


@pytest.mark.parametrize(
    ("gpus", "facts", "arguments"),
    [
        ("0,1", CDI, ["--device nvidia.com/gpu=0", "--device nvidia.com/gpu=1"]),
        ("0,2", CDI, []),
        ("0", {"docker": daemon("20.10.5")}, ["--gpus device=UUID0"]),
        ("0,1", {"docker": daemon("20.10.5")}, ["--runtime nvidia", "--env NVIDIA_VISIBLE_DEVICES=UUID0,UUID1"]),
        ("0", {"docker": daemon("18.9.1")}, ["--runtime nvidia", "--env NVIDIA_VISIBLE_DEVICES=UUID0"]),
        ("1", CDI_MODE, ["--runtime nvidia", "--env NVIDIA_VISIBLE_DEVICES=UUID1"]),
        ("1", {"docker": None, "tool_versions": {}}, []),
    ],
)  # fmt: skip
def test_an_engine_passes_no_other_gpu(gpus: str, facts: dict[str, Any], arguments: list[str]) -> None:
    plain = node(containers=None, **facts) if "containers" not in facts else node(**facts)
    part = slice_of(plain, GpuRequest.parse(gpus))
    names = ("--gpus", "--runtime", "--env")
    shown = [
        f"{setting.name} {setting.value}"
        for setting in tune(plain, "pytorch", part=part).docker
        if setting.name in names or "nvidia" in setting.value
    ]
    for gpu in plain.smi_gpus:
        shown = [text.replace(gpu.uuid or "-", f"UUID{gpu.index}") for text in shown]
    assert shown == arguments


@pytest.mark.parametrize(
    ("request_", "facts", "error", "part"),
    [
        ("0,1", {"gpu_processes": used(1)}, SliceRefusedError, "gpu1 is in use: python3 (pid 4000, alice)"),
        ("0", {"gpu_processes": used(None)}, UndeterminedError, "the GPU of a process is unknown"),
        ("0", {"gpu_processes": None}, UndeterminedError, "the GPUs in use are unknown"),
        ("8", {}, UsageError, "has 0-7"),
        ("GPU-ffff0000", {}, UsageError, "has 0-7"),
        ("GPU-", {}, UsageError, "is not a GPU"),
        ("0", {"pci": None}, UndeterminedError, "PCI bus"),
        ("0", {"pci": ()}, SliceRefusedError, "no NVIDIA GPU"),
        ("0", {"smi": None}, UndeterminedError, "the driver reports no GPU"),
    ],
)
def test_what_a_slice_refuses(request_: str, facts: dict[str, Any], error: type[Exception], part: str) -> None:
    with pytest.raises(error) as caught:
        slice_of(node(**facts), GpuRequest.parse(request_))
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"mig_mode": True}, {"compute_mode": "Prohibited"}, {"reset_required": True}],
    ids=lambda change: next(iter(change)),
)
def test_a_gpu_on_which_nothing_runs_is_in_no_slice(change: dict[str, Any]) -> None:
    broken = with_gpus(gpu0=change)
    with pytest.raises(SliceRefusedError, match="gpu0"):
        slice_of(broken, GpuRequest.parse("0,1"))
    assert 0 not in slice_of(broken, GpuRequest(idle=7)).gpus
    with pytest.raises(SliceRefusedError, match="8 idle GPUs were requested, 7 of 8 are: gpu0"):
        slice_of(broken, GpuRequest(idle=8))


def test_idle_gpus_are_near_each_other() -> None:
    assert slice_of(node(gpu_processes=used(1, 2, 3)), GpuRequest(idle=2)).gpus == (4, 5)
    assert slice_of(node(gpu_processes=used(0, 1, 2, 5, 6, 7)), GpuRequest(idle=2)).gpus == (3, 4)
    assert slice_of(node(gpu_processes=used(1, 2)), GpuRequest(idle=2)).gpus == (0, 3)
    assert slice_of(FACTS[PCIE_4], GpuRequest(idle=2)).gpus == (0, 1)
    graphics = (GpuProcess(pid=1, name="Xorg", type="G", gpu="gpu0"),)
    assert slice_of(node(gpu_processes=graphics), GpuRequest(idle=8)).gpus == tuple(range(8))


@pytest.mark.parametrize(
    "text",
    ["", ",", "0,", "0,0", "0-2,1", "3-1", "0-999", "-1", "a", "0;ls", "\u0663", "GPU-x y", "0 1", "GPU-" + 99 * "a"],
)
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        GpuRequest.parse(text)


def test_a_gpu_has_two_names_and_one_place() -> None:
    uuid = node().smi_gpus[3].uuid
    assert uuid is not None
    assert slice_of(node(), GpuRequest.parse(f"{uuid},0")).gpus == (0, 3)
    with pytest.raises(UsageError, match="twice"):
        slice_of(node(), GpuRequest.parse(f"3,{uuid}"))


def test_measured_workers_come_before_the_rule() -> None:
    (record,) = (row for row in storage() if row["record"] == "storage.dataloader")
    for advised, expected in ((3, (11, 3)), (200, (1, 13)), (0, (14, 0))):
        document = copy.deepcopy(bundle(HGX))
        changed = {**record, "values": {**record["values"], "advised_workers": advised}}
        document["results"] = [changed]
        part = slice_of(facts_from_bundle(Bundle.model_validate(document)), GpuRequest(idle=1))
        assert (part.threads, part.workers) == expected
    assert [threads_and_workers(cores, None) for cores in (0, 1, 2, 3, 14)] == [(0, 0), (1, 0), (1, 1), (2, 1), (7, 7)]


@st.composite
def machines(draw: st.DrawFn) -> NodeFacts:
    """Return a node of any shape: sockets, second threads, GPUs per socket, what firmware and session report."""
    sockets, cores, threads = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.sampled_from([1, 2, 8]))
    adjacent = draw(st.booleans())
    total = sockets * cores
    first = tuple(range(threads)) if adjacent or threads == 1 else tuple(total * index for index in range(threads))
    offline = draw(st.sets(st.integers(0, total * threads - 1), max_size=total * threads // 2))
    online = [cpu for cpu in range(total * threads) if cpu not in offline] or [0]
    of_core = [
        [core * threads + thread if adjacent else core + total * thread for thread in range(threads)]
        for core in range(total)
    ]
    gpus, smi = [], []
    for index in range(draw(st.integers(1, 12))):
        socket = draw(st.integers(0, sockets - 1))
        near = sorted(cpu for core in range(socket * cores, (socket + 1) * cores) for cpu in of_core[core])
        text = draw(st.sampled_from([",".join(map(str, near)), None, "", "0-3", "nonsense", "5-1", "0-99999"]))
        slot = f"0000:{index + 16:02x}:00.0"
        gpus.append(
            PciDevice(
                slot=slot, vendor_id="10de", device_id="2330", subsystem_id=None, class_id="030200", driver="nvidia",
                local_cpus=text, numa_node=draw(st.sampled_from([socket, None])),
            )
        )  # fmt: skip
        smi.append(SmiGpu(index=index, pci_bus_id=slot, uuid=f"GPU-{index:08x}"))
    document = FACTS[HGX].smi.document.model_copy(update={"gpus": tuple(smi)})  # type: ignore[union-attr]
    mib = draw(st.integers(0, 4 * 2**20))
    return node(
        pci=tuple(gpus),
        smi=Smi(document=document, error_message=None),
        gpu_processes=(),
        cpu_sets=CpuSets(
            online=tuple(online), present=tuple(online), possible=tuple(online), smt=None,
            first_core=draw(st.sampled_from([first, first, first, None])),
        ),
        cpu=Cpu(
            architecture="x86_64", model_name=None, cpus=len(online), sockets=sockets, cores_per_socket=cores,
            threads_per_core=threads,
        ),
        cpus_allowed=draw(st.sampled_from([None, len(online), len(online), 1])),
        memory=draw(st.sampled_from([FACTS[HGX].memory, None, _memory(mib)])),
        topology=draw(st.sampled_from([None, FACTS[HGX].topology])),
    )  # fmt: skip


def _memory(mib: int) -> Memory:
    known = FACTS[HGX].memory
    assert known is not None
    return known.model_copy(update={"total_mib": mib})


@settings(max_examples=effort(60, 3000), deadline=None)
@given(facts=machines(), data=st.data())
def test_slices_of_other_gpus_share_nothing(facts: NodeFacts, data: st.DataObject) -> None:
    """Together the slices have at most the node; each has whole cores, and threads and workers that fit them."""
    indices = [gpu.index for gpu in facts.smi_gpus]
    groups: dict[int, list[int]] = {}
    for index in indices:
        groups.setdefault(data.draw(st.integers(0, 2)), []).append(index)
    parts = [slice_of(facts, GpuRequest(names=tuple(map(str, group)))) for group in groups.values()]
    assert facts.cpu_sets is not None
    online, core_of = set(facts.cpu_sets.online), facts.cpu_sets.core_of
    seen: list[int] = []
    for part in parts:
        cpus = cpu_list(part.cpus)
        assert set(cpus) <= online
        assert len(cpus) == part.processors
        assert {cpu for cpu in online if core_of(cpu) in {core_of(slice_cpu) for slice_cpu in cpus}} == set(cpus)
        assert part.cores == len({core_of(cpu) for cpu in cpus})
        assert (part.threads + part.workers) * len(part.gpus) <= part.cores
        assert (part.threads > 0) == bool(cpus)
        assert part.shm_gib <= max(1, part.memory_gib // 2) if part.memory_gib else part.shm_gib == 1
        seen += cpus
        words = docker_args(tune(facts, data.draw(st.sampled_from(["pytorch", "tensorflow", "nccl-tests"])), part=part))
        assert shlex.split(" ".join(words)) == words
    assert len(seen) == len(set(seen))
    total = facts.memory.total_mib if facts.memory else 0
    assert sum(part.memory_gib for part in parts) * 1024 <= total
    idle = slice_of(facts, GpuRequest(idle=data.draw(st.integers(1, len(indices)))))
    assert set(idle.gpus) <= set(indices)
    assert len(set(idle.gpus)) == len(idle.gpus)
