"""What the payload's parts decide by themselves: devices, transports, bytecode, packages of the user, TensorFlow."""

import ast
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from captured import FOLDER

from gpunode.workload.payload import image, main, nccl, tf
from gpunode.workload.payload.devices import computing
from gpunode.workload.payload.isolate import Outcome
from gpunode.workload.payload.tf import without_code


def nvml(*gpus: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": [{"index": index, "uuid": f"GPU-{index}", **gpu} for index, gpu in enumerate(gpus)]}


def test_a_divided_gpu_is_its_mig_devices() -> None:
    parts = [{"index": 0, "uuid": "MIG-a"}, {"index": 3, "uuid": "MIG-b"}]
    devices = computing(nvml({"mig_mode": True, "mig_devices": parts}, {}, {"mig_mode": True}), {}, {})
    assert [(device.component, device.environment["CUDA_VISIBLE_DEVICES"]) for device in devices] == [
        ("cuda:0:0", "MIG-a"),
        ("cuda:0:3", "MIG-b"),
        ("cuda:1", "GPU-1"),
    ]
    assert [device.gpu_uuid for device in devices] == ["GPU-0", "GPU-0", "GPU-1"]


def test_a_gpu_that_cannot_be_reached_is_no_device() -> None:
    lost = {"gpus": [{"index": 0, "result": 15}, {"index": 1, "uuid": "GPU-1"}]}
    assert [device.component for device in computing(lost, {}, {})] == ["cuda:1"]


@pytest.mark.parametrize(
    ("now", "before", "busy"), [(4, 4, False), (104, 4, False), (105, 4, True), (9000, None, False), (None, 4, False)]
)
def test_more_memory_in_use_is_somebody_else(now: int | None, before: int | None, busy: bool) -> None:
    (device,) = computing(nvml({"memory_used_mib": now}), {}, {"gpus": {"GPU-0": before}})
    assert (device.busy is not None) == busy


@pytest.mark.parametrize(
    ("log", "ways"),
    [
        (
            "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
            "NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n",
            {"P2P/CUMEM": 2},
        ),
        ("NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct\n", {"SHM/direct": 1}),
        ("NCCL INFO Connected all rings\n", {}),
    ],
)
def test_transports_are_read_from_the_log(log: str, ways: dict[str, int]) -> None:
    assert nccl.transports(log) == ways


@pytest.mark.captures("nccl/aws-p4d-eks-2node-tagged-old-error-col-ncclinfo.log")
def test_transports_of_a_recorded_log() -> None:
    text = (FOLDER / "nccl/aws-p4d-eks-2node-tagged-old-error-col-ncclinfo.log").read_text(errors="replace")
    counts = nccl.transports(text)
    assert set(counts) == {"NET/AWS", "P2P/IPC"}
    assert sum(counts.values()) == text.count(" via ")


def ran(**values: Any) -> Outcome:
    return Outcome(1.0, "cuda", {"wrong": 0, "seconds": 0.001, **values})


def test_the_group_is_right_where_every_rank_is() -> None:
    ways = {"transports": {"P2P/CUMEM": 2}, "warning": None, "nvls": True}
    outcome = nccl.together([ran(**ways)] * 2, "nccl", 2)
    assert (outcome.error, outcome.values["ranks"], outcome.values["transports"]) == (None, 2, {"P2P/CUMEM": 4})
    assert nccl.together([ran(), ran(wrong=3)], "nccl", 2).values["wrong"] == 3


def test_of_a_group_that_falls_the_first_rank_has_the_cause() -> None:
    fell = [Outcome(9.0, error="connection reset"), Outcome(2.0, error="CUDA error: ECC"), ran()]
    assert nccl.together(fell, "nccl", 3).error == "rank 1 of 3: CUDA error: ECC"
    late = [Outcome(5.0, undetermined="stopped after 5 s"), ran()]
    assert nccl.together(late, "nccl", 2).undetermined == "rank 0 of 2: stopped after 5 s"
    assert nccl.together([Outcome(0.1, skipped="no NCCL")] * 2, "nccl", 2).skipped == "no NCCL"


@pytest.mark.parametrize(
    ("architectures", "capability", "lacks"),
    [
        (["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"], (9, 0), True),
        (["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"], (8, 6), False),
        (["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), False),
        (["sm_86"], (8, 0), True),
        # The build does not report what it holds: nothing is known, and nothing left out.
        ([], (9, 0), False),
    ],
)
def test_a_tensorflow_that_would_compile_first_is_recognised(
    architectures: list[str], capability: tuple[int, int], lacks: bool
) -> None:
    assert (without_code(architectures, [capability]) == [capability]) == lacks


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (("12.8", "11.8", "11.5"), ("12.8", "11.8")),
        ((None, "11.8", "12.8"), ("11.8", "11.8")),
        ((None, None, "12.8"), ("12.8", None)),
        (("broken", "12.8", None), (None, "12.8")),
        (("hangs", None, None), (None, None)),
        ((None, None, None), (None, None)),
    ],
)
def test_the_toolkit_is_the_one_that_pytorch_would_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    versions: tuple[str | None, str | None, str | None],
    expected: tuple[str | None, str | None],
) -> None:
    """As torch.utils.cpp_extension: CUDA_HOME, then nvcc in PATH, then /usr/local/cuda."""
    home = versions[0]
    for folder, version in zip(("home", "path", "usr/local/cuda"), versions, strict=True):
        if version is not None:
            program = tmp_path / folder / "bin/nvcc"
            program.parent.mkdir(parents=True)
            line = {"broken": "exit 3", "hangs": "exec sleep 60"}.get(
                version, f"echo 'Cuda compilation tools, release {version}, V{version}.61'"
            )
            program.write_text(f"#!/bin/sh\n{line}\n")
            program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/path/bin:/nowhere")
    monkeypatch.setattr(image, "LIMIT_S", 0.3)
    monkeypatch.setenv("CUDA_HOME", f"{tmp_path}/home") if home else monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    (tmp_path / "usr/include").mkdir(parents=True)
    (tmp_path / "usr/include/libaio.h").touch()
    tools = image.build_tools({"libaio.so.1": "/lib/libaio.so.1"}, str(tmp_path))
    assert (tools["nvcc"], tools["nvcc_in_path"]) == expected
    assert (tools["compiler"], tools["ninja"], tools["libaio"]) == (None, False, True)


RECORDED_NAMES = Path(__file__).with_name("tensorflow-2.21-names.txt")


def test_every_name_of_tensorflow_that_the_payload_uses_exists() -> None:
    """Against the recorded interface; tests/integration/test_payload_tensorflow.py runs the payload on TensorFlow."""
    known = set(RECORDED_NAMES.read_text(encoding="utf-8").splitlines()[1:])
    used = set()
    sources = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (tf,)]
    for node in [node for source in sources for node in ast.walk(ast.parse(source))]:
        chain, inner = [], node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if chain and isinstance(inner, ast.Name) and inner.id == "tensorflow":
            used.add(".".join(reversed(chain)))
    assert {"config.list_physical_devices", "sysconfig.get_build_info", "random.Generator.from_seed"} <= used
    assert {
        name for name in used if name not in known and not any(recorded.startswith(f"{name}.") for recorded in known)
    } == set()


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What a test changes of Python itself is restored."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return monkeypatch


@pytest.mark.parametrize(("has_bytecode", "kept"), [(False, True), (True, False)])
def test_bytecode_is_kept_where_a_framework_came_without(
    tmp_path: Path, python: pytest.MonkeyPatch, has_bytecode: bool, kept: bool
) -> None:
    cached = tmp_path / "torch.pyc"
    if has_bytecode:
        cached.touch()
    spec = SimpleNamespace(cached=str(cached))
    python.setattr("importlib.util.find_spec", lambda name: spec if name == "torch" else None)
    main.keep_bytecode("/scratch")
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (("/scratch/bytecode", False) if kept else (None, True))


@pytest.mark.parametrize(("mode", "expected"), [(0o755, True), (0o775, False), (0o757, False)])
def test_packages_of_the_user_are_found_last(
    tmp_path: Path, python: pytest.MonkeyPatch, mode: int, expected: bool
) -> None:
    site = tmp_path / ".local" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    site.chmod(mode)
    python.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path)) if uid == os.getuid() else None)
    main.add_user_site()
    assert (sys.path[-1] == str(site)) == expected
