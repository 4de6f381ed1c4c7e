"""Library, nvidia-smi, the links that it reports, and the processes at the GPUs."""

import pytest
from facts_samples import SMI, VERSION, answer, gpu_facts_with

from gpunode.facts.errors import ParseError
from gpunode.facts.gpu import GpuProcess, parse_peer_access
from gpunode.facts.models.smi import Nvlink, PeerAccess
from gpunode.facts.parsers.kinds import parsed
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


MATRIX = " \tGPU0\tGPU1\n GPU0\tX\tNS\n GPU1\tNS\tX\n\nLegend:\n"


def test_the_gpu_node() -> None:
    facts = gpu_facts_with()
    assert facts.topology is not None
    assert facts.topology.document is not None
    assert facts.topology.document.links["GPU0"] == {"NIC0": "PHB"}
    assert facts.nvlink is not None
    assert facts.nvlink.document is not None
    (gpu,) = facts.nvlink.document.gpus
    assert [(link.link, link.active, link.speed_gb_per_s) for link in gpu.links] == [
        (0, True, 25),
        (1, False, None),
    ]
    assert facts.nvlink_errors is not None
    assert facts.nvlink_errors.document is not None
    assert facts.nvlink_errors.document.gpus[0].links[0].errors["recovery"] == 2
    assert facts.peer_access is not None
    assert facts.peer_access.document == PeerAccess(
        gpus=("GPU0", "GPU1"), links={"GPU0": {"GPU1": "OK"}, "GPU1": {"GPU0": "OK"}}
    )
    assert facts.gpu_virtualization == ("None",)


def test_a_node_without_a_module_has_no_answers_and_no_gaps() -> None:
    keys = ("nvidia-smi-xml", "nvidia-smi-topo", "nvidia-smi-p2p", "nvidia-smi-nvlink", "nvidia-smi-nvlink-errors")
    facts = gpu_facts_with(
        dict.fromkeys(keys),
        {"/proc/driver/nvidia/version": None, "/sys/module/nvidia/version": None, "/proc/modules": ""},
    )
    for field in ("topology", "peer_access", "nvlink", "nvlink_errors", "gpu_virtualization"):
        assert getattr(facts, field) is None
        assert field not in facts.gaps


def test_a_driver_that_reports_nothing_of_nvlink_has_no_links() -> None:
    facts = gpu_facts_with({"nvidia-smi-nvlink": answer("\n")})
    assert facts.nvlink is not None
    assert facts.nvlink.document == Nvlink(gpus=())


def test_an_exit_status_alone_is_an_answer_where_its_meaning_is_known() -> None:
    facts = gpu_facts_with({"nvidia-smi-nvlink": answer("", 9)})
    assert facts.nvlink is not None
    assert (facts.nvlink.error_kind, facts.nvlink.exit_status) == ("driver-not-loaded", 9)
    assert "exit status 250" in gpu_facts_with({"nvidia-smi-nvlink": answer("", 250)}).gaps["nvlink"]


@pytest.mark.parametrize(("status", "name"), [(139, "SIGSEGV"), (134, "SIGABRT"), (137, "SIGKILL")])
def test_a_signal_is_a_crash_whatever_was_printed(status: int, name: str) -> None:
    facts = gpu_facts_with({"nvidia-smi-nvlink": answer("GPU 0: X (UUID: GPU-1)\n\t Link 0: 25 GB/s\n", status)})
    assert (facts.nvlink, "crashed" in facts.gaps["nvlink"], name in facts.gaps["nvlink"]) == (None, True, True)
    assert [run.signal for run in facts.tool_runs or () if run.answers == "nvlink"] == [name]


@pytest.mark.parametrize("key", ["nvidia-smi-topo", "nvidia-smi-p2p", "nvidia-smi-nvlink"])
def test_a_refusal_is_kept_as_such(key: str) -> None:
    facts = gpu_facts_with({key: answer("Failed to initialize NVML: Driver/library version mismatch\n", 18)})
    smi = {"nvidia-smi-topo": facts.topology, "nvidia-smi-p2p": facts.peer_access, "nvidia-smi-nvlink": facts.nvlink}[
        key
    ]
    assert smi is not None
    assert (smi.document, smi.error_kind) == (None, "driver-library-mismatch")


def test_peer_access_with_colours() -> None:
    header = " \t\x1b[4mGPU0\tGPU1\x1b[0m\n"
    peer_access = parse_peer_access(header + MATRIX.split("\n", 1)[1])
    assert isinstance(peer_access, PeerAccess)
    assert peer_access.links["GPU0"] == {"GPU1": "NS"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        " \tGPU0\tGPU1\n GPU0\tX\tNS\n",
        " \tGPU0\tGPU1\n GPU0\tX\n GPU1\tNS\tX\n",
        " \tGPU0\tGPU1\n GPU0\tX\tPIX\n GPU1\tPIX\tX\n",
        " \tGPU0\tGPU0\n GPU0\tX\tOK\n GPU0\tOK\tX\n",
    ],
    ids=["empty", "rubbish", "row missing", "cell missing", "topology matrix", "twice"],
)
def test_what_is_no_peer_matrix_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_peer_access(text)


def test_a_virtualization_mode_for_each_gpu_or_none() -> None:
    node = gpu_facts_with()
    assert node.smi is not None
    without = gpu_facts_with(
        {"nvidia-smi-xml": answer('<nvidia_smi_log><gpu id="00000000:00:1E.0"/></nvidia_smi_log>')}
    )
    assert "virtualization mode" in without.gaps["gpu_virtualization"]


OF_TWO = "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-0)\n{}\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\n\t Link 0: {}\n"


@pytest.mark.parametrize(
    "below",
    [
        "Not Supported",
        "\tNot Supported",
        "NVML: Unable to retrieve NVLink information as all links are inActive\nplease check the fabric manager",
        "Nvlink queries are not supported for Devices in MIG mode",
    ],
)
def test_what_stands_in_place_of_one_gpus_links_leaves_the_others(below: str) -> None:
    gpus = parsed("nvidia-smi-nvlink", OF_TWO.format(below, "Replay Errors: 0"))["gpus"]
    assert [(len(gpu["links"]), bool(gpu["message"])) for gpu in gpus] == [(0, True), (1, False)]


def test_counters_as_drivers_of_390_to_470_print_them() -> None:
    text = OF_TWO.format("\t Link 0: 0 replay errors\n\t Link 0: 2 recovery errors", "3 CRC errors")
    assert [[link["errors"] for link in gpu["links"]] for gpu in parsed("nvidia-smi-nvlink", text)["gpus"]] == [
        [{"replay": 0, "recovery": 2}],
        [{"crc": 3}],
    ]
