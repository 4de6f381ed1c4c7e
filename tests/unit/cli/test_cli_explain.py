"""``gpunode explain``: every row is found by a text as its program prints it, and facts of a node are compared."""

import re
import time
from pathlib import Path

import pytest

from gpunode.catalog import load
from gpunode.checks import Hardware, Identity, RunningStack, registry
from gpunode.cli import run
from gpunode.cli.explain import XID, about, capability_fact, cuda_fact, explanations
from gpunode.judging.report import NodeReport, judged, unreachable
from gpunode.workload.causes import CAUSES

BUNDLE = Path(__file__).parents[2] / "fixtures" / "bundles" / "debian-12-driver.json"
WARNING = (
    "Tesla V100 with CUDA capability sm_70 is not compatible with the current PyTorch installation.\n"
    "The current PyTorch install supports CUDA capabilities sm_75 sm_80 sm_86 sm_90 sm_100 sm_120."
)
PRINTED = {
    "no-kernel-image": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "insufficient-driver": "CUDA driver version is insufficient for CUDA runtime version",
    "system-not-ready": "Error 802: system not yet initialized",
    "system-driver-mismatch": "Error 803: system has unsupported display driver / cuda driver combination",
    "forward-compat-unsupported": "Error 804: forward compatibility was attempted on non supported HW",
    "driver-library-mismatch": "Failed to initialize NVML: Driver/library version mismatch",
    "nvml-unknown-error": "Failed to initialize NVML: Unknown Error",
    "cannot-communicate": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
    "no-device": "RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected",
    "shared-memory-of-nccl": "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-KWfVyt (size 5967872)",
    "shared-memory-of-loader": "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error.",
    "watchdog-timeout": "[Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580)",
    "memory-registration": "NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
    "illegal-address": "CUDA error: an illegal memory access was encountered",
    "ecc-uncorrectable": "CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
    "out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "tensorflow-libraries": "Cannot dlopen some GPU libraries. Please make sure the missing libraries are installed",
    "system-error-of-nccl": "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "completion-error-of-nccl": "NET/IB : Got completion from peer 7.6.13.83<36315> with status=12 opcode=1",
    "devices-unavailable": "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "adapter-not-started": "NVRM: GPU 0000:98:00.0: RmInitAdapter failed! (0x62:0x65:1792)",
}
"""Texts as the programs print them, from the sources of the rows."""


def node(model: str, cuda: str | None = None) -> NodeReport:
    identity = Identity(simulated=False, stack=RunningStack(cuda=cuda), gpus=(), hardware=Hardware(gpu_model=model))
    return judged("gpu-1", identity, (), None)


def test_every_row_has_a_text() -> None:
    assert set(PRINTED) == set(load().messages)


@pytest.mark.parametrize("row", PRINTED)
def test_a_printed_text_has_one_row_with_checks_and_sources(row: str) -> None:
    (explanation,) = explanations(PRINTED[row])
    assert explanation.title.endswith(f": {row}")
    assert set(explanation.checks) <= {check.id for check in registry}
    assert all(source.startswith("https://") for source in explanation.sources)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("NVRM: Xid (PCI:0000:1a:00): 79, pid=1, GPU has fallen off the bus.", ["79"]),
        ("Xid 48 and Xid: 63", ["48", "63"]),
        ("SXid 24007, Maxid 79", []),
    ],
)
def test_xids_are_read_from_a_text(text: str, numbers: list[str]) -> None:
    assert XID.findall(text) == numbers
    assert [explanation.title.split()[1] for explanation in explanations(text)] == numbers


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("v100-sxm2-32gb", "the build has sm_75 to sm_120, this GPU is 7.0: no code for it"),
        ("l40s", "this GPU is 8.9: it has code for it"),
        ("unheard-of", "unknown"),
    ],
)
def test_the_capability_of_a_gpu_is_compared_with_the_text(model: str, words: str) -> None:
    assert words in capability_fact(node(model), WARNING)


def test_code_for_the_newest_gpus_as_ptx_counts() -> None:
    assert "has code" in capability_fact(node("l40s"), "supports CUDA capabilities sm_70 compute_70.")


@pytest.mark.parametrize("model", ["t4", "l40s"])
def test_without_a_listing_wheels_of_the_catalog_are_named(model: str) -> None:
    """Code for 8.6 runs on 8.9."""
    text = capability_fact(node(model), PRINTED["no-kernel-image"])
    assert "CUDA 12.6" in text
    assert not re.search(r"PyTorch (\S+) to \1\)", text)


@pytest.mark.parametrize(("cuda", "words"), [("12.2", "too old"), ("12.10", "enough"), (None, "unknown")])
def test_the_cuda_of_the_driver_is_compared_as_a_version(cuda: str | None, words: str) -> None:
    assert words in cuda_fact(node("l40s", cuda), "requirement error: unsatisfied condition: cuda>=12.4")


def test_a_text_of_a_container_engine_has_the_cause_of_the_workload() -> None:
    (explanation,) = explanations("OCI runtime create failed: unresolvable CDI devices nvidia.com/gpu=all")
    assert "nvidia.com/gpu=all" in explanation.means


def test_the_cause_of_a_refused_image_is_a_sentence() -> None:
    (explanation,) = explanations("requirement error: unsatisfied condition: cuda>=12.4, please update your driver")
    assert explanation.means == "the image requires a driver with CUDA 12.4 or later"


def test_a_node_without_a_finding_has_a_line_that_reports_it() -> None:
    bare, unreached = node("l40s", "12.2"), unreachable("gpu-2", "no route", None)
    assert list(about(bare, (), "x", verbose=False)) == [
        "gpu-1: 0x L40S, no driver, CUDA 12.2",
        "  no finding of the read-only checks (-v lists their results)",
    ]
    assert next(about(unreached, (), "x", verbose=False)) == "gpu-2: not reached"


def test_no_text_takes_long() -> None:
    began = time.monotonic()
    for text in ("Xid (PCI:" * 4000, "cannot stat " * 4000, "sm_70 " * 8000, "API mismatch " * 4000, "cuda>=1." * 4000):
        explanations(text[-16384:])
        capability_fact(node("l40s"), "supports CUDA capabilities" + text)
    assert time.monotonic() - began < 10
    assert all(re.compile(cause.pattern) for cause in CAUSES)


def test_a_node_is_judged_by_the_checks_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", PRINTED["cannot-communicate"], "--replay", str(BUNDLE), "-v"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("driver.module-built" in line and line.startswith("  ") for line in lines)
    assert any(line.startswith("debian") or "SIMULATED" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["all is well"], 3, "the text is unknown"),
        (["Xid 79", "--replay"], 2, "--replay BUNDLE is missing"),
        (["Xid 79", "--replay", "/nowhere.json"], 2, "/nowhere.json"),
        ([], 2, "Missing argument"),
        ([" \n"], 2, "MESSAGE is empty"),
        (["Xid 79", "--replay", str(BUNDLE), "-l", "x"], 2, "cannot be combined"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
