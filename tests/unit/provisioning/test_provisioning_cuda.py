"""CUDA toolkits on a host: which packages, pins and holds they come to."""

from datetime import date
from typing import Any

import pytest
from driver_samples import BUNDLE, DAY, facts_of

from gpunode.catalog import load
from gpunode.errors import UsageError
from gpunode.facts import NodeFacts
from gpunode.provisioning.cuda import DefaultToolkit, ToolkitPackages, toolkit_packages
from gpunode.stack import PlanHost, Request, Stack, picture_from_facts, plan


def bare(device: str) -> NodeFacts:
    """A Debian 12 node without a driver, with one GPU."""
    gpu = {"slot": "0000:01:00.0", "vendor_id": "10de", "device_id": device, "class_id": "030200"}
    nothing: dict[str, Any] = {"packages": [], "module_files": [], "dkms": [], "loaded_driver": None}
    return NodeFacts.model_validate(
        {**facts_of(BUNDLE), **nothing, "pci": [{**gpu, "subsystem_id": None, "driver": None}]}
    )


def resolved(node: NodeFacts, today: str = DAY, **request: Any) -> Stack:
    catalog = load()
    host = PlanHost(node.host, picture_from_facts(node, catalog), None, None)
    stack = plan([host], Request(**request), catalog, date.fromisoformat(today)).groups[0].stack
    assert stack is not None
    return stack


@pytest.fixture
def h100() -> tuple[NodeFacts, Stack]:
    """Facts and stack of a node with an H100 and driver 580."""
    facts = bare("2330")
    return facts, resolved(facts, source="nvidia", driver="580.95.05")


def test_nothing_is_requested_and_nothing_is_installed(h100: tuple[NodeFacts, Stack]) -> None:
    selection = toolkit_packages(*h100, [])
    assert selection == ToolkitPackages()


def test_toolkits_stand_side_by_side_with_one_configuration(h100: tuple[NodeFacts, Stack]) -> None:
    selection = toolkit_packages(*h100, ["13.0", "12.8", "12.9"])
    assert selection.problems == []
    assert {entry.partition("=")[0] for entry in selection.install} == {
        "cuda-toolkit-12-8",
        "cuda-toolkit-12-9",
        "cuda-toolkit-13-0",
        "cuda-toolkit-12-config-common",
        "cuda-toolkit-13-config-common",
        "cuda-toolkit-config-common",
    }
    pins = {pin.packages[0]: pin.version for pin in selection.pins}
    assert pins == {
        "cuda-toolkit-config-common": "13.0.*",
        "cuda-toolkit-12-config-common": "12.9.*",
        "cuda-toolkit-13-config-common": "13.0.*",
    }
    assert selection.default == DefaultToolkit("13.0", "/usr/local/cuda-13.0", newest=True)
    assert {"*-12-8", "*-12-9", "*-13-0"} <= set(selection.hold)


def test_the_default_may_be_an_older_one_and_its_libraries_follow(h100: tuple[NodeFacts, Stack]) -> None:
    selection = toolkit_packages(*h100, ["12.9", "13.0"], default="12.9", nccl=True, cudnn=True)
    assert selection.default == DefaultToolkit("12.9", "/usr/local/cuda-12.9", newest=False)
    nccl = next(entry for entry in selection.install if entry.startswith("libnccl2="))
    assert nccl.endswith("+cuda12.9")
    # Which releases of an open range the repository has the catalog cannot know.
    assert "cudnn9-cuda-12=9.*" in selection.install
    assert not any("cuda-13" in entry and entry.startswith("cudnn") for entry in selection.install)


def test_an_installed_library_of_the_right_build_keeps_its_version(h100: tuple[NodeFacts, Stack]) -> None:
    installed = {"libnccl2": "2.27.3-1+cuda12.9", "libnccl-dev": "2.27.3-1+cuda13.3", "cudnn9-cuda-12": "9.24.0.43-1"}
    selection = toolkit_packages(*h100, ["12.9"], installed, nccl=True, cudnn=True)
    requested = dict(entry.split("=") for entry in selection.install)
    assert requested["libnccl2"] == "2.27.3-*+cuda12.9"
    assert requested["libnccl-dev"] == "2.30.7-*+cuda12.9"
    assert requested["cudnn9-cuda-12"] == "9.24.0.43-*"


def test_configuration_is_not_older_than_an_installed_toolkit(h100: tuple[NodeFacts, Stack]) -> None:
    installed = {
        "cuda-toolkit-13-0": "13.0.2-1",
        "cuda-toolkit-12-8": "12.8.1-1",
        "cuda-toolkit-config-common": "13.0.96-1",
    }
    pins = {pin.packages[0]: pin.version for pin in toolkit_packages(*h100, ["12.9"], installed).pins}
    assert pins == {"cuda-toolkit-config-common": "13.0.*", "cuda-toolkit-12-config-common": "12.9.*"}


def test_an_exact_toolkit_is_asked_for_exactly(h100: tuple[NodeFacts, Stack]) -> None:
    selection = toolkit_packages(*h100, ["12.9.1"])
    assert "cuda-toolkit-12-9=12.9.1-*" in selection.install
    assert selection.default is not None
    assert selection.default.path == "/usr/local/cuda-12.9"


def test_a_toolkit_that_does_not_know_the_gpu_is_refused() -> None:
    facts = bare("1db1")  # V100: nothing of CUDA 13 knows it
    selection = toolkit_packages(facts, resolved(facts, source="nvidia", driver="580.95.05"), ["12.9", "13.0"])
    assert len(selection.problems) == 1
    assert selection.problems[0].startswith("toolkit 13.0: ")
    assert selection.install == []


def test_a_default_that_is_not_requested_is_refused(h100: tuple[NodeFacts, Stack]) -> None:
    selection = toolkit_packages(*h100, ["12.9"], default="13.0")
    assert selection.problems == ["cuda_default 13.0 is not among the requested toolkits (12.9)"]


def test_compat_comes_where_the_stack_has_it() -> None:
    facts = bare("20b5")
    stack = resolved(facts, "2026-01-15", source="nvidia", driver="570", toolkit="13.0")  # while branch 570 lived
    selection = toolkit_packages(facts, stack, [])
    assert (selection.install, selection.hold) == (["cuda-compat-13-0"], ["cuda-compat-13-0"])


def test_debians_own_toolkit_has_no_alternative() -> None:
    facts = bare("20b5")
    selection = toolkit_packages(facts, resolved(facts, source="debian"), ["11.8"])
    assert selection.problems == []
    assert selection.default is None
    assert selection.install[0].startswith("nvidia-cuda-toolkit=11.8")


@pytest.mark.parametrize("version", ["twelve", "12.x"])
def test_a_malformed_version_is_refused(h100: tuple[NodeFacts, Stack], version: str) -> None:
    with pytest.raises(UsageError, match=f"{version} is not a toolkit version"):
        toolkit_packages(*h100, [version])
