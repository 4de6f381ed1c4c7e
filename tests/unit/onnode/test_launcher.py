"""gpunode-run: threads, binding, names by version, and its command line as a program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpunode.onnode import launcher, program_text


def machine(root: Path, cores: int, nodes: int, gpus: int, threads: int = 2) -> list[int]:
    """A /sys with cores, their second threads behind all first ones, and GPUs spread over NUMA nodes."""
    per_node = cores // nodes
    for cpu in range(cores * threads):
        core = cpu % cores
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        siblings = ",".join(str(core + cores * number) for number in range(threads))
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    for gpu in range(gpus):
        near = gpu * nodes // gpus
        folder = root / f"bus/pci/devices/0000:{gpu + 16:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        first = near * per_node
        parts = [f"{first + cores * number}-{first + cores * number + per_node - 1}" for number in range(threads)]
        (folder / "local_cpulist").write_text(",".join(parts) + "\n")
    return list(range(cores * threads))


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(112, 8, 14), (8, 8, 1), (4, 8, 1), (7, 2, 3), (8, 0, 8)])
def test_threads_are_cores_for_each_rank(cores: int, ranks: int, expected: int) -> None:
    assert launcher.threads_per_rank(cores, ranks) == expected


@pytest.mark.parametrize(("gpus", "nodes"), [(8, 2), (8, 8), (4, 1), (8, 1), (2, 2), (1, 1), (3, 1)])
def test_ranks_share_the_cores_near_their_gpus_and_none_twice(tmp_path: Path, gpus: int, nodes: int) -> None:
    allowed = machine(tmp_path, 16, nodes, gpus)
    bound = [launcher.binding(rank, gpus, allowed, str(tmp_path)) for rank in range(gpus)]
    assert sorted(cpu for cpus in bound for cpu in cpus) == allowed
    for rank, cpus in enumerate(bound):
        near = launcher.cpu_list((tmp_path / f"bus/pci/devices/0000:{rank + 16:02x}:00.0/local_cpulist").read_text())
        assert set(cpus) <= set(near)
        # Whole cores: a core's second thread goes to the same rank.
        assert {cpu % 16 for cpu in cpus} == {cpu for cpu in cpus if cpu < 16}


@pytest.mark.parametrize(
    ("variable", "chosen"),
    [
        (None, [0, 1, 2]),
        ("2,0", [2, 0]),
        ("GPU-bb,0", [1, 0]),
        ("GPU-cc11-22, GPU-aa", [2, 0]),
        ("GPU-dd", [0, 1, 2]),
        ("GPU-", [0, 1, 2]),
        ("3", [0, 1, 2]),
        ("MIG-aa", [0, 1, 2]),
        ("", [0, 1, 2]),
    ],
)
def test_gpus_are_chosen_by_index_or_uuid(tmp_path: Path, variable: str | None, chosen: list[int]) -> None:
    slots = ["0000:10:00.0", "0000:11:00.0", "0000:12:00.0"]
    for slot, uuid in zip(slots, ("aa", "bb", "cc11-22"), strict=True):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "information").write_text(
            f"Model: \t\t NVIDIA A30\nGPU UUID: \t GPU-{uuid}\nBus Type: PCIe\n"
        )
    assert launcher.visible(slots, variable, str(tmp_path)) == [slots[index] for index in chosen]


def test_a_cpuset_and_chosen_gpus_are_kept(tmp_path: Path) -> None:
    machine(tmp_path, 16, 2, 8)
    allowed = [*range(8, 16), *range(24, 32)]
    assert set(launcher.binding(0, 2, allowed, str(tmp_path), chosen="6,7")) == {8, 9, 10, 11, 24, 25, 26, 27}
    # The GPU is near processors that the session may not use.
    assert set(launcher.binding(0, 2, allowed, str(tmp_path), chosen="0,1")) <= set(allowed)
    # Fewer cores than ranks: each may use all.
    assert launcher.binding(5, 8, [0, 1], str(tmp_path)) == [0, 1]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.10.0", "PYTORCH_ALLOC_CONF"),
        ("2.9.1+cu130", "PYTORCH_CUDA_ALLOC_CONF"),
        (None, "PYTORCH_CUDA_ALLOC_CONF"),
        ("?", "PYTORCH_CUDA_ALLOC_CONF"),
    ],
)
def test_the_allocators_name_follows_the_version(version: str | None, name: str) -> None:
    assert launcher.allocator(version) == (name, "expandable_segments:True")


@pytest.mark.parametrize(("text", "cpus"), [("0-2,5\n", [0, 1, 2, 5]), ("", []), ("x", []), ("3", [3]), ("9-1", [])])
def test_lists_of_the_kernel(text: str, cpus: list[int]) -> None:
    assert launcher.cpu_list(text) == cpus


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "gpunode-run"
    path.write_text(program_text("launcher"), encoding="utf-8")
    path.with_name("job.json").write_text("{}", encoding="utf-8")
    return path


def run(program: Path, *argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    config = program.with_name("job.json")
    return subprocess.run(
        [sys.executable, "-I", str(program), "--config", str(config), *argv],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], **environment},
    )


def test_a_job_gets_the_nodes_settings_and_keeps_its_own(program: Path) -> None:
    document = {
        "environment": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "WARN"},
        "docker": ["--shm-size", "8g"],
    }
    program.with_name("job.json").write_text(json.dumps(document), encoding="utf-8")
    done = run(program, "--ranks", "1", "env", NCCL_DEBUG="INFO", OMP_NUM_THREADS="3")
    lines = done.stdout.splitlines()
    assert {"CUDA_DEVICE_ORDER=PCI_BUS_ID", "NCCL_DEBUG=INFO", "OMP_NUM_THREADS=3"} <= set(lines)
    shown = run(program, "--print", "docker", "--ranks", "1", "--xla")
    assert shown.stdout.startswith("--shm-size 8g --env CUDA_DEVICE_ORDER=PCI_BUS_ID")
    assert "XLA_FLAGS=--xla_gpu" in shown.stdout
    assert "LD_PRELOAD" not in shown.stdout


def test_a_rank_is_bound_and_has_its_own_threads(program: Path) -> None:
    """On this machine: the ranks share its processors, and each has a thread for each of its cores."""
    code = "import os; print(os.environ['OMP_NUM_THREADS'], *sorted(os.sched_getaffinity(0)))"
    allowed = sorted(os.sched_getaffinity(0))
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    cores = {cpu: Path(siblings.format(cpu)).read_text() for cpu in allowed}
    ranks = min(2, len(set(cores.values())))
    bound: list[int] = []
    for rank in range(ranks):
        seat = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        done = run(program, sys.executable, "-c", code, **seat)
        assert done.returncode == 0, done.stderr
        threads, *cpus = map(int, done.stdout.split())
        assert threads == len({cores[cpu] for cpu in cpus})
        bound += cpus
        left = run(program, "--no-bind", sys.executable, "-c", code, **seat)
        assert [int(cpu) for cpu in left.stdout.split()[1:]] == allowed
    assert sorted(bound) == allowed


def test_the_single_thread_of_torchrun_is_nobodys_choice(program: Path) -> None:
    rank = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    shown = ("--print", "env", "--threads", "7")
    assert "OMP_NUM_THREADS=7" in run(program, *shown, TORCHELASTIC_RUN_ID="none", **rank).stdout
    assert "OMP_NUM_THREADS=7" not in run(program, *shown, **rank).stdout


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        ((), 2, "a program is required"),
        (("--ranks", "0", "true"), 2, "--ranks"),
        (("--ranks", "many", "true"), 2, "--ranks"),
        (("no-such-program-here",), 127, "no-such-program-here"),
        (("false",), 1, ""),
        (("true",), 0, ""),
    ],
)
def test_wrong_usage_is_one_line(program: Path, argv: tuple[str, ...], code: int, word: str) -> None:
    done = run(program, *argv)
    assert done.returncode == code
    assert word in done.stderr


def test_a_malformed_file_and_a_missing_library_are_named(program: Path) -> None:
    for text in ("[1]", '{"environment": []}', '{"docker": "--rm"}', "{", ""):
        program.with_name("job.json").write_text(text, encoding="utf-8")
        done = run(program, "true")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert "job.json" in line
    program.with_name("job.json").unlink()
    assert "unreadable" in run(program, "true").stderr
    program.with_name("job.json").write_text("{}", encoding="utf-8")
    done = run(program, "--malloc", "tcmalloc", "true")
    assert done.returncode in (0, 2)
    if done.returncode:
        assert "ml_environment_malloc" in done.stderr
    done = run(program, "true", LOCAL_RANK="4", LOCAL_WORLD_SIZE="2")
    assert done.returncode == 2
    assert "rank 4" in done.stderr


def test_the_version_is_asked_of_the_programs_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3.99"
    fake.write_text("#!/bin/sh\necho 2.11.0\n", encoding="utf-8")
    fake.chmod(0o755)
    assert launcher.torch_version([str(fake), "train.py"]) == "2.11.0"
    script = tmp_path / "torchrun"
    script.write_text(f"#!{fake}\n", encoding="utf-8")
    script.chmod(0o755)
    assert launcher.torch_version([str(script)]) == "2.11.0"
    assert launcher.torch_version(["/bin/true"]) is None
    monkeypatch.setattr(launcher, "read", lambda _: "")
    assert launcher.torch_version([str(script)]) is None
    assert launcher.torch_version([]) is None
