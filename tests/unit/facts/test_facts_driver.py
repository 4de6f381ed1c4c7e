"""What the loaded module and its device files report."""

import pytest
from facts_samples import VERSION, answer, facts_with, gpu_facts_with

from gpunode.facts.driver import DeviceNode, DriverGpu
from gpunode.probe import CommandResult

INFORMATION = "/proc/driver/nvidia/gpus/0000:00:1e.0/information"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (answer("Version : 4.7.0\n\nHostengine build info:\nVersion : 4.4.1\nBuild ID : 26\n"), "4.4.1"),
        (
            answer(
                "Version : 4.7.0\n", 255, "Error: unable to establish a connection to the specified host: localhost"
            ),
            None,
        ),
        (answer("", 124, "not run: the time for the whole probe is used up"), None),
    ],
)
def test_the_running_host_engine(printed: CommandResult, expected: str | None) -> None:
    """Written after NVIDIA/DCGM issue 183."""
    facts = gpu_facts_with({"dcgmi-versions": printed})
    assert (facts.dcgm_engine, facts.gap("dcgm_engine")) == (expected, None)


def test_gpus_of_the_module() -> None:
    uuid = "GPU-11111111-2222-3333-4444-555555555555"
    gpu = DriverGpu(slot="0000:00:1e.0", model="Tesla T4", uuid=uuid, minor=0, excluded=False, firmware=VERSION)
    assert gpu_facts_with().driver_gpus == (gpu,)


def test_a_gpu_that_was_never_started_is_known_by_its_slot() -> None:
    unknown = "Model: \t Unknown\nGPU UUID: \t GPU-????????-????-????-????-????????????\n"
    text = unknown + "Device Minor: \t 3\nBlacklisted:\t Yes\n"
    (gpu,) = gpu_facts_with(files={INFORMATION: text}).driver_gpus or ()
    assert gpu == DriverGpu(slot="0000:00:1e.0", model=None, uuid=None, minor=3, excluded=True, firmware=None)


def test_a_gpu_without_its_information_is_a_gap() -> None:
    assert "driver_gpus" in gpu_facts_with(without=(INFORMATION,)).gaps
    log = answer("", 1, "/proc/driver/nvidia/gpus/: not finished within 20 s")
    assert "not finished" in gpu_facts_with({"probe-read": log}).gaps["driver_gpus"]


def test_device_nodes() -> None:
    folder, gpu, control = gpu_facts_with().device_nodes or ()
    user = {"mode": "0666", "user": "root", "group": "root"}
    assert gpu == DeviceNode(
        path="/dev/nvidia0", kind="character", **user, major=195, minor=0, created_s=20, linked=True
    )
    assert (folder.kind, folder.major) == ("folder", None)
    assert control.kind == "file"


def test_parameters() -> None:
    facts = gpu_facts_with()
    assert facts.driver_parameters == {"ModifyDeviceFiles": "1", "RegistryDwords": "RmX=1"}
    assert facts.module_parameters == {"nvidia": {}, "nvidia_uvm": {"uvm_debug_prints": "0"}}


def test_versions_of_nvidias_programs() -> None:
    assert gpu_facts_with().nvidia_tool_versions == {"nv-fabricmanager": VERSION, "nv-hostengine": "3.3.9"}
    gaps = gpu_facts_with({"version-nv-hostengine": answer("", 1, "cannot execute")}).gaps
    assert "cannot execute" in gaps["nvidia_tool_versions"]
    nothing = facts_with()
    assert nothing.nvidia_tool_versions is None
    assert "nvidia_tool_versions" not in nothing.gaps
