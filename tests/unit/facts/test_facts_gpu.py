"""Library, nvidia-smi and the processes at the GPUs."""

import pytest
from facts_samples import SMI, VERSION, answer, gpu_facts_with

from gpunode.facts.gpu import GpuProcess
from gpunode.probe import CommandResult

SMI_ARGV = ("nvidia-smi", "-q", "-x")
OTHERS = answer("", 1, "12 of 90 processes belong to others and could not be looked into")
NO_LIST = SMI[: SMI.index("<processes>")] + SMI[SMI.index("</processes>") + len("</processes>") :]


def test_the_library_is_known_by_its_file() -> None:
    assert gpu_facts_with().driver_library_version == VERSION
    link = answer("/usr/lib64/libnvidia-ml.so.570.86.15\n")
    assert gpu_facts_with({"readlink-libnvidia-ml": link}).driver_library_version == "570.86.15"


def test_no_library_is_seen_as_none() -> None:
    facts = gpu_facts_with({"ldconfig": answer("\tlibcuda.so.1 (libc6,x86-64) => /lib/libcuda.so.1\n")})
    assert facts.driver_library_version is None
    assert "driver_library_version" not in facts.gaps


@pytest.mark.parametrize(
    "link",
    [answer("", 1, "", "readlink"), answer("/usr/lib/libnvidia-ml.so.1\n"), None],
    ids=["dangling", "bare", "no"],
)
def test_a_library_without_a_version_is_a_gap(link: CommandResult | None) -> None:
    assert "driver_library_version" in gpu_facts_with({"readlink-libnvidia-ml": link}).gaps


def test_a_mismatch_is_understood() -> None:
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.261\n"
    smi = gpu_facts_with({"nvidia-smi-xml": answer(text, 18, "", *SMI_ARGV)}).smi
    assert smi is not None
    assert (smi.document, smi.error_kind, smi.error_nvml_version) == (None, "driver-library-mismatch", "535.261")


def test_an_error_on_stderr_is_understood() -> None:
    smi = gpu_facts_with({"nvidia-smi-xml": answer("", 6, "No devices were found\n", *SMI_ARGV)}).smi
    assert smi is not None
    assert smi.error_kind == "no-devices"


@pytest.mark.parametrize("text", [SMI[: len(SMI) // 2], "", "rubbish"], ids=["cut", "empty", "rubbish"])
def test_what_is_no_document_is_a_gap(text: str) -> None:
    facts = gpu_facts_with({"nvidia-smi-xml": answer(text, 0, "", *SMI_ARGV)})
    assert facts.smi is None
    assert "nvidia-smi -q -x" in facts.gaps["smi"]


def test_a_tool_that_was_held_back_reports_it() -> None:
    late = answer("", 124, "not run: x did not come back before it", *SMI_ARGV, timed_out=True)
    assert "not run: x did not come back" in gpu_facts_with({"nvidia-smi-xml": late}).gaps["smi"]


def test_no_nvidia_smi_is_seen_as_none() -> None:
    facts = gpu_facts_with({"nvidia-smi-xml": answer("", 127, "", *SMI_ARGV)})
    assert facts.smi is None
    assert "smi" not in facts.gaps


def test_processes_of_nvidia_smi_and_of_the_device_files_are_joined() -> None:
    processes = gpu_facts_with().gpu_processes
    assert processes == (
        GpuProcess(
            pid=4242,
            name="python",
            type="C",
            user="alice",
            gpu="gpu0",
            devices=("/dev/nvidia-uvm", "/dev/nvidia0"),
        ),
        GpuProcess(pid=900, name="nvidia-persiste", type=None, user="nvpd", devices=("/dev/nvidia0",)),
    )


def test_without_root_nvidia_smis_list_is_enough() -> None:
    processes = gpu_facts_with({"device-holders": OTHERS}).gpu_processes
    assert processes is not None
    assert [(process.pid, process.user, process.devices) for process in processes] == [(4242, "alice", ())]


@pytest.mark.parametrize("smi", [answer(NO_LIST, 0, "", *SMI_ARGV), answer("rubbish"), None])
def test_without_root_and_without_a_list_it_is_a_gap(smi: CommandResult | None) -> None:
    facts = gpu_facts_with({"device-holders": OTHERS, "nvidia-smi-xml": smi})
    assert facts.gpu_processes is None
    assert "12 of 90 processes" in facts.gaps["gpu_processes"]
    assert "as root" in facts.gaps["gpu_processes"]


def test_without_a_list_roots_look_is_enough() -> None:
    processes = gpu_facts_with({"nvidia-smi-xml": answer(NO_LIST, 0, "", *SMI_ARGV)}).gpu_processes
    assert processes is not None
    assert [(process.pid, process.computes) for process in processes] == [(900, False), (4242, True)]


def test_an_unknown_owner_is_none() -> None:
    holders = answer("4242\t?\t?\t/dev/nvidia0\n")
    processes = gpu_facts_with({"device-holders": holders, "nvidia-smi-xml": answer("", 127)}).gpu_processes
    assert processes == (GpuProcess(pid=4242, name=None, type=None, user=None, devices=("/dev/nvidia0",)),)


def test_without_a_driver_nobody_can_hold_a_gpu() -> None:
    files = {"/proc/driver/nvidia/version": None, "/proc/modules": ""}
    assert gpu_facts_with({"device-holders": OTHERS}, files).gpu_processes == ()


@pytest.mark.parametrize(("kind", "computes"), [("C", True), ("C+G", True), ("M+C", True), ("G", False)])
def test_what_computes(kind: str, computes: bool) -> None:
    assert GpuProcess(pid=1, name="x", type=kind).computes is computes
