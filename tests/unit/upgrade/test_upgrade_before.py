"""When a node is proven to be as good as before its change, and what a run keeps for that."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from upgrade_world import NEW, OLD, World

from gpunode.checks import Finding, RunningStack, Status
from gpunode.history.runs import SNAPSHOT
from gpunode.history.snapshot import FigureValue, GpuRecord, Snapshot, Verdict
from gpunode.judging.evaluator import JudgedNode
from gpunode.judging.report import NodeReport
from gpunode.upgrade.looks import LOOK, Connections, NodeLook, look_at, why_not_as_good, write_measured


def test_what_is_no_proof(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = world.one("gpu-1").snapshot
    assert before is not None
    world.nodes["gpu-1"] |= {"installed": NEW, "loaded": NEW}
    good = world.one("gpu-1")
    assert good.snapshot is not None
    assert why_not_as_good(before, good, NEW) == ""
    for wrong in (
        {"gpus": good.snapshot.gpus[:7]},
        {"unknown": {"smi": "nvidia-smi did not answer"}},
        {"verdicts": {"driver.library-matches-module": Verdict(status=Status.FAIL)}},
        {"stack": RunningStack(driver=OLD, driver_packages=NEW)},
        {"stack": RunningStack(driver=None, driver_packages=NEW)},
        {"gpus": tuple(gpu.model_copy(update={"uuid": f"GPU-{gpu.index}"}) for gpu in good.snapshot.gpus)},
    ):
        look = NodeLook("gpu-1", snapshot=good.snapshot.model_copy(update=wrong))
        assert why_not_as_good(before, look, NEW), wrong
    assert why_not_as_good(before, NodeLook("gpu-1", "unreachable"), NEW) == "unreachable"


def measured_gpus(indices: Sequence[int], **serials: str) -> Snapshot:
    """A node with a figure of each GPU but the last; the GPUs have these indices."""
    gpus = tuple(
        GpuRecord(
            index=index, name="H100", uuid=f"GPU-{serials.get(f'gpu{n}', n)}", serial=serials.get(f"gpu{n}", f"13{n}"),
            slot=f"0000:{n}b:00.0",
        )
        for n, index in enumerate(indices)
    )  # fmt: skip
    figures = tuple(
        FigureValue(metric="gemm", component=f"gpu{gpu.index}", value=700.0 + gpu.index) for gpu in gpus[:-1]
    )
    stack = RunningStack(driver=NEW, driver_packages=NEW)
    return Snapshot(host="gpu-1", level="standard", simulated=True, stack=stack, gpus=gpus, facts={}, figures=figures)


def test_a_gpu_with_another_index_is_the_same_gpu() -> None:
    """The last one was not measured before either, whatever its index is."""
    before, after = measured_gpus((0, 1, 2, 3)), measured_gpus((0, 3, 1, 2))
    assert why_not_as_good(before, NodeLook("gpu-1", snapshot=after), NEW) == ""
    fewer = after.model_copy(update={"figures": after.figures[:-1]})
    reported = why_not_as_good(before, NodeLook("gpu-1", snapshot=fewer), NEW)
    assert reported == "gemm of gpu1 was measured before, and is not any more"


def test_failed_checks_come_first_and_what_gpus_share_is_one_reason() -> None:
    good = Verdict(status=Status.PASS)
    before = measured_gpus((0, 1, 2, 3)).model_copy(update={"verdicts": {"fabric.state": good, "fabric.manager": good}})
    failed = {f"gpu{index}": Status.FAIL for index in range(4)}
    verdicts = {
        "fabric.state": Verdict(status=Status.FAIL, affected=failed),
        "fabric.manager": Verdict(status=Status.FAIL, affected={"node": Status.FAIL}),
    }
    after = before.model_copy(update={"verdicts": verdicts, "gpus": before.gpus[:3], "figures": before.figures[:2]})
    messages = {("fabric.manager", "node"): "nvidia-fabricmanager.service is failed"}
    assert why_not_as_good(before, NodeLook("gpu-1", snapshot=after, messages=messages), NEW) == (
        "fabric.manager: nvidia-fabricmanager.service is failed, gpu[0-3]: fabric.state: pass -> fail, "
        "gpu3: GPU: H100, serial 133, GPU-3, 0000:3b:00.0 removed, "
        "gemm of gpu2 was measured before, and is not any more"
    )


def test_an_exchanged_gpu_is_named_with_both_serial_numbers() -> None:
    before, after = measured_gpus((0, 1, 2, 3)), measured_gpus((0, 1, 2, 3), gpu2="4711")
    reported = why_not_as_good(before, NodeLook("gpu-1", snapshot=after), NEW)
    assert reported == (
        "gpu2: GPU replaced: H100, serial 132, GPU-2, 0000:2b:00.0 -> H100, serial 4711, GPU-4711, 0000:2b:00.0"
    )


def test_the_reason_why_nothing_was_measured_is_that_of_the_container(tmp_path: Path) -> None:
    finding = Finding(check="container.runs", status=Status.ERROR, component="node", message="no Docker engine")
    report = NodeReport(
        host="gpu-1", status=Status.ERROR, seconds=1, simulated=True, stack=RunningStack(), gpus=(), findings=(finding,)
    )
    look: dict[str, Any] = {"picture": {}, "undetermined": None, "busy": ""}
    node = JudgedNode(report, "standard", {SNAPSHOT: measured_gpus((0,)).model_dump(mode="json"), LOOK: look})

    class Judge:
        def judge_fleet(self, answers: object) -> list[JudgedNode]:  # noqa: ARG002
            return [node]

    seen: list[NodeLook] = []
    judge: Any = Judge()
    node_look = look_at(Connections({}, (), 1, 1), judge, (), each=seen.append)["gpu-1"]
    assert seen == [node_look]
    assert write_measured(tmp_path, node_look, "image") == {
        "gpu-1": "nothing was measured before the change: no Docker engine"
    }
