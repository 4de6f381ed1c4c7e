"""Lines of a node's stream: those of real drivers, and hostile ones."""

import json
import random
import string
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
from effort import effort

from gpunode.top import samples
from gpunode.top.samples import GPU_FIELDS, ProcessOwner, SampledGpu

H100 = (
    "0, GPU-00000000-0000-0000-0000-000000000000, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, 100, 11, 70210, 81559, "
    "631.95, 700.00, 59, 1740, 1980, 0x0000000000000044, 5, 16, 0, 2"
)
"""The values of an H100 with driver 590 under load, in the order of the fields; slot and reasons are ours."""


def test_a_gpu() -> None:
    reading = samples.gpu_line(H100, 5.0)
    assert reading is not None
    identity, sample = reading
    assert identity == SampledGpu(0, "GPU-00000000-0000-0000-0000-000000000000", "0000:1b:00", "NVIDIA H100 80GB HBM3")
    assert (sample.at, sample.utilization_percent, sample.power_w, sample.power_limit_w) == (5.0, 100, 631.95, 700)
    assert (sample.memory_used_mib, sample.memory_total_mib, sample.temperature_c) == (70210, 81559, 59)
    assert (sample.sm_clock_mhz, sample.max_sm_clock_mhz) == (1740, 1980)
    assert sample.slowdowns == frozenset({"power-limit", "heat"})
    assert (sample.pcie_gen, sample.pcie_width, sample.corrected, sample.uncorrected) == (5, 16, 0, 2)
    assert not sample.lost


def test_the_fields_are_those_of_the_line() -> None:
    assert [len(fields.split(",")) for fields in GPU_FIELDS] == [len(H100.split(","))] * 2
    assert "clocks_throttle_reasons.active" in GPU_FIELDS[1]
    assert "clocks_event_reasons" not in GPU_FIELDS[1]


@pytest.mark.parametrize(
    "word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "", "nan", "inf", "1e9", "-3", "\u0663", "9" * 400]
)
def test_what_is_no_number_is_not_reported(word: str) -> None:
    identity, *rest = H100.split(", ", 4)[0], *H100.split(", ")[1:4]
    reading = samples.gpu_line(", ".join([identity, *rest, *[word] * 14]), 0.0)
    assert reading is not None
    assert reading[1] == samples.GpuSample(0.0)


def test_a_lost_gpu() -> None:
    reading = samples.gpu_line("3, GPU-x, 00000000:1B:00.0, NVIDIA H100" + ", [GPU is lost]" * 14, 0.0)
    assert reading is not None
    assert reading[1].lost


@pytest.mark.parametrize(
    ("group", "container", "job"),
    [
        (f"/system.slice/docker-{'a1' * 32}.scope", "a1a1a1a1a1a1", None),
        (f"/docker/{'b2' * 32}", "b2b2b2b2b2b2", None),
        (f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{'c3' * 32}.scope", "c3c3c3c3c3c3", None),
        (f"/kubepods/besteffort/pod7/{'d4' * 32}", "d4d4d4d4d4d4", None),
        ("/lxc.payload.train-1/user.slice", "train-1", None),
        ("/slurm/uid_1000/job_4711/step_0/task_0", None, "4711"),
        ("/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0", None, "42"),
        (f"/system.slice/slurmstepd.scope/job_42/step_0/docker-{'e5' * 32}.scope", "e5e5e5e5e5e5", "42"),
        ("/user.slice/user-1000.slice/session-3.scope", None, None),
    ],
)
def test_container_and_job_of_a_process(group: str, container: str | None, job: str | None) -> None:
    line = json.dumps({"pid": 7, "uid": 1000, "user": "ada", "name": "python3", "cgroup": group})
    assert samples.owner_line(line) == (7, ProcessOwner("ada", "python3", container, job))


def test_rates_processes_and_xids() -> None:
    assert samples.pcie_line("    0  21846   6849", 1.0) == (0, samples.PcieSample(1.0, 21.846, 6.849))
    for header in ("# gpu  rxpci  txpci", "# Idx   MB/s   MB/s", "    0      -      -", "0 1"):
        assert samples.pcie_line(header, 1.0) is None
    assert samples.app_line("GPU-x, 4711, 512") == ("GPU-x", 4711, 512)
    assert samples.app_line("GPU-x, 4711, [N/A]") == ("GPU-x", 4711, None)
    assert samples.app_line("No running processes found") is None
    line = (
        "<3>[  123.456789] NVRM: Xid (PCI:0000:1B:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    assert samples.xid_line(line) == ("0000:1b:00", 79)
    assert samples.xid_line(line.replace("] NVRM", "] python: NVRM")) is None


PARSERS = (
    lambda text: samples.gpu_line(text, 0.0),
    lambda text: samples.pcie_line(text, 0.0),
    samples.app_line,
    samples.xid_line,
    samples.owner_line,
    lambda text: samples.numbers_line(text, 3),
)
ALPHABET = string.printable + "\x1b\x9b\u202e\u0663\xe9\ud800\U0001f600"


def words_of(value: object) -> Iterator[str]:
    """Every text within a result."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from words_of(part)
    elif is_dataclass(value):
        yield from words_of(tuple(getattr(value, field.name) for field in fields(value)))


def test_damaged_lines_raise_nothing_and_print_safely() -> None:
    draw = random.Random(36)  # noqa: S311 (reproducible, not secret)
    whole = [
        H100,
        "GPU-x, 4711, 512",
        " 0 1 2",
        "<3>[ 1.5] NVRM: Xid (PCI:0000:1B:00): 79, x",
        json.dumps({"pid": 1, "user": "\x1b[2J", "name": "\u202ex", "cgroup": "/"}),
        "1,2,3",
        "[" * 1900,
    ]
    understood = 0
    for _ in range(effort(1500, 40000)):
        text = list(draw.choice(whole))
        for _ in range(draw.randint(0, 6)):
            index = draw.randrange(len(text) + 1)
            text[index : index + draw.randint(0, 3)] = draw.choices(ALPHABET, k=draw.randint(0, 5))
        for parse in PARSERS:
            reading = parse("".join(text))
            understood += reading is not None
            assert all(word.isprintable() and len(word) <= 64 for word in words_of(reading))
    assert understood > 200
