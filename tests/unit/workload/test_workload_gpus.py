"""Which GPUs are handed in: never one that somebody computes on, unless that was asked for."""

from typing import Any

import pytest

from gpunode.facts import NodeFacts
from gpunode.facts.gpu import GpuProcess
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.pci import PciDevice
from gpunode.workload.devices import choose
from gpunode.workload.transport import LaunchFailure


def device(slot: str) -> PciDevice:
    values: dict[str, Any] = dict.fromkeys(PciDevice.model_fields)
    values |= {"slot": slot, "vendor_id": "10de", "device_id": "2330", "class_id": "030200"}
    return PciDevice.model_construct(**values)


def node(*processes: GpuProcess, gpus: int = 4, **changes: Any) -> NodeFacts:
    listed = [{"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100"} for index in range(gpus)]
    values: dict[str, Any] = {
        "host": "gpu-1",
        "collected_at": "2026-11-20T00:00:00Z",
        "simulated": False,
        "gaps": {},
        "pci": tuple(device(f"0000:{index:02x}:00.0") for index in range(gpus)),
        "smi": Smi[SmiLog](document={"gpus": listed}),
        "gpu_processes": processes,
    }
    return NodeFacts(**(values | changes))


TRAINING = GpuProcess(pid=4242, name="python3", type="C", user="alice", gpu="gpu3")


def test_idle_gpus_are_all_handed_in() -> None:
    use = choose(node(GpuProcess(pid=7, name="Xorg", type="G", gpu="gpu0")), force=False, without=False)
    assert (use.indices, use.all, use.busy, use.skipped) == ((0, 1, 2, 3), True, (), None)


def test_a_busy_gpu_is_left_out_with_process_and_user() -> None:
    use = choose(node(TRAINING), force=False, without=False)
    assert (use.indices, use.all) == ((0, 1, 2), False)
    assert use.uuids == ("GPU-0", "GPU-1", "GPU-2")
    assert use.busy == ("gpu3: python3 (pid 4242, alice)",)


def test_all_busy_is_skipped_not_broken() -> None:
    use = choose(node(TRAINING.model_copy(update={"gpu": "gpu0"}), gpus=1), force=False, without=False)
    assert use.indices == ()
    assert use.skipped == "all GPUs are in use: gpu0: python3 (pid 4242, alice); --force uses them"


def test_a_process_on_an_unknown_gpu_may_be_on_any() -> None:
    use = choose(node(TRAINING.model_copy(update={"gpu": None, "user": None})), force=False, without=False)
    assert use.indices == ()
    assert "a GPU: python3 (pid 4242, user unknown)" in str(use.skipped)


def test_force_takes_them_all() -> None:
    use = choose(node(TRAINING), force=True, without=False)
    assert (use.indices, use.all) == ((0, 1, 2, 3), True)


def test_a_node_without_a_gpu_runs_only_what_was_named() -> None:
    bare = node(gpus=0, pci=(), smi=None)
    assert "no NVIDIA GPU" in str(choose(bare, force=False, without=False).skipped)
    use = choose(bare, force=False, without=True)
    assert (use.indices, use.skipped) == ((), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pci": None, "gaps": {"pci": "no /sys/bus/pci"}}, "no /sys/bus/pci"),
        ({"smi": None, "gaps": {"smi": "no module is loaded"}}, "no module is loaded"),
        (
            {"smi": Smi[SmiLog](error_kind="driver-library-mismatch", error_message="Driver/library version mismatch")},
            "mismatch",
        ),
        ({"gpu_processes": None, "gaps": {"gpu_processes": "run the probe as root"}}, "run the probe as root"),
    ],
)
def test_what_was_not_seen_is_not_treated_as_idle(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchFailure, match=words) as caught:
        choose(node(**changes), force=False, without=False)
    assert "nothing was started" in str(caught.value)
