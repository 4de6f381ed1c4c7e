"""Machines as the stub libraries give them, what real hardware is known to give, and what comes of it here.

``python tests/unit/workload/hardware.py`` writes the table of docs/workload-hardware.md again.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stub_driver import PART_MIB, Gpu, Machine, python_with_torch, run

from gpunode.checks import Expectation, Finding, judge
from gpunode.facts import NodeFacts
from gpunode.facts.models.smi import Smi, SmiLog
from gpunode.facts.models.workload import Record
from gpunode.facts.modules import LoadedDriver
from gpunode.facts.pci import PciDevice

PAGE = Path(__file__).parents[3] / "docs" / "workload-hardware.md"
START = "<!-- from here on written by tests/unit/workload/hardware.py -->\n"
CHECKS = ("container.gpus", "container.compute", "container.library", "container.forward-compat", "container.cuda")
IMAGE = {"image": "site/pytorch", "engine": "docker 28.5.1", "gpus": "cdi"}

MIG_GUIDE = "[MIG guide, CUDA device enumeration](https://docs.nvidia.com/datacenter/tesla/mig-user-guide/)"
NVML_H = "[nvml.h](https://docs.nvidia.com/deploy/nvml-api/)"
DRIVER_API = "[CUDA driver API](https://docs.nvidia.com/cuda/cuda-driver-api/)"
COMPAT = "[CUDA compatibility](https://docs.nvidia.com/deploy/cuda-compatibility/)"


@dataclass(frozen=True)
class Case:
    """One row."""

    name: str
    machine: Machine
    real: str
    """What real hardware gives, with its source."""
    handed: Sequence[str] | None = None
    """UUIDs that the launcher asked for; None: all of the machine."""
    used_before: int = 4
    settings: Mapping[str, Any] = field(default_factory=dict)
    expected: Mapping[str, str] = field(default_factory=dict)
    """Status by check; ``pass`` where it is not named."""


def of(number: int, **changes: Any) -> tuple[Gpu, ...]:
    return (Gpu(**changes),) * number


def with_one(index: int, **changes: Any) -> tuple[Gpu, ...]:
    """Eight H100, one of them otherwise."""
    return tuple(Gpu(**changes) if each == index else Gpu() for each in range(8))


CUDA_12 = {"GPUNODE_STUB_TORCH": "12.8 sm_70 sm_75 sm_80 sm_86 sm_90"}
WHOLE = Machine(of(8))
OLD = Machine(of(8), driver="535.183.01", cuda=12080, libcuda="570.124.06", environment=CUDA_12)
CASES = (
    Case(
        "8 x H100",
        WHOLE,
        f"NVML and CUDA count eight, the UUIDs agree ({DRIVER_API}: cuDeviceGetUuid)",
    ),
    Case(
        "8 x H100, each in seven MIG devices 1g.10gb",
        Machine(of(8, mig="on", parts=7)),
        f"NVML counts eight cards; CUDA gives a process one MIG device, the first unless CUDA_VISIBLE_DEVICES names "
        f"another; whole GPUs are not enumerated beside it ({MIG_GUIDE}). A 1g.10gb has {PART_MIB} MiB, the card 81559 "
        "(capture utku-h100-mig-590.48.01-q-idle.txt). PyTorch counts by NVML until CUDA starts, and by CUDA where the "
        "variable names a MIG device ([torch/cuda/__init__.py]"
        "(https://github.com/pytorch/pytorch/blob/main/torch/cuda/__init__.py), "
        "[pytorch 92315](https://github.com/pytorch/pytorch/pull/92315))",
    ),
    Case(
        "8 x H100, MIG on for one, without an instance",
        Machine(with_one(3, mig="on")),
        f"CUDA does not count that GPU; its handle and UUID are there for NVML ({NVML_H}: "
        "nvmlDeviceGetMigDeviceHandleByIndex gives NVML_ERROR_NOT_FOUND for every index)",
        handed=[WHOLE.uuid(index) for index in range(8) if index != 3],
        expected={"container.gpus": "pass"},
    ),
    Case(
        "8 x H100, one MIG device fewer inside than on the host",
        Machine(with_one(3, mig="on", parts=6)),
        f"MIG devices come and go while the node runs; a CDI specification names those of its day ({MIG_GUIDE})",
        settings={"host_parts": 7},
        expected={"container.gpus": "fail"},
    ),
    Case(
        "8 x H100, one that NVML counts and CUDA does not",
        Machine(with_one(3, state="nvml")),
        "nvidia-smi lists it, programs do not get it: device files or capabilities of that GPU are missing in the "
        f"container ({DRIVER_API}: cuDeviceGetCount counts what can be used)",
        expected={"container.gpus": "fail", "container.compute": "pass, skip"},
    ),
    Case(
        "8 x H100, one that is lost",
        Machine(with_one(3, state="lost")),
        f"counted, and its handle is refused with NVML_ERROR_GPU_IS_LOST ({NVML_H}: nvmlDeviceGetCount_v2 counts all)",
        expected={"container.gpus": "fail"},
    ),
    Case(
        "8 x H100, one that computes wrongly",
        Machine(with_one(5, state="wrong")),
        "no error code at all: the result alone shows it",
        expected={"container.compute": "fail, pass"},
    ),
    Case(
        "somebody else's GPU by a stale CDI specification",
        Machine(of(2), first=6),
        "names by index are those of the day on which the specification was written ([nvidia-ctk cdi generate]"
        "(https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html))",
        handed=[WHOLE.uuid(0), WHOLE.uuid(1)],
        expected={"container.gpus": "fail", "container.compute": "skip"},
    ),
    Case(
        "a GPU that somebody took since it was chosen",
        Machine(with_one(2, used=40213)),
        f"NVML shows the memory in use of all processes, also to a container ({NVML_H}: nvmlDeviceGetMemoryInfo)",
        expected={"container.compute": "error, pass"},
    ),
    Case(
        "8 x H100, fabric manager is not ready",
        Machine(of(8), cu_init=802),
        f"NVML counts them, cuInit gives CUDA_ERROR_SYSTEM_NOT_READY (802) ({DRIVER_API}: CUresult)",
        expected={"container.gpus": "fail", "container.compute": "skip"},
    ),
    Case(
        "cuda-compat, old style: mounted among the driver's libraries",
        OLD,
        "libcuda.so.1 leads to libcuda.so.570.124.06 in /usr/lib/x86_64-linux-gnu beside the driver's own "
        "([nvidia-container-toolkit 1055](https://github.com/NVIDIA/nvidia-container-toolkit/pull/1055)); the module "
        f"stays that of the host ({COMPAT})",
    ),
    Case(
        "cuda-compat, new style: its own folder, first for the linker",
        replace(OLD, folder="usr/local/cuda-12.8/compat"),
        "the hook enable-cuda-compat writes /usr/local/cuda/compat into ld.so.conf.d "
        "([nvidia-container-toolkit 906](https://github.com/NVIDIA/nvidia-container-toolkit/pull/906))",
    ),
    Case(
        "cuda-compat on a GPU that may not have it",
        Machine(
            of(1, name="NVIDIA GeForce RTX 4090", capability="8.9", mib=24564, mig="-"),
            driver="535.183.01",
            cuda=12080,
            libcuda="570.124.06",
            cu_init=804,
            environment=CUDA_12,
        ),
        f"cuInit gives CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804) ({COMPAT})",
        expected={
            "container.gpus": "skip",
            "container.forward-compat": "fail",
            "container.compute": "skip",
            "container.cuda": "warn",
        },
    ),
    Case(
        "the driver's packages updated, the old module loaded",
        Machine(of(8), libcuda="580.105.08", cu_init=803),
        f"cuInit gives CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803) ({DRIVER_API}: CUresult)",
        expected={"container.gpus": "skip", "container.library": "fail", "container.compute": "skip"},
    ),
    Case(
        "GH200",
        Machine(of(1, name="NVIDIA GH200 480GB", mib=97871), driver="570.124.06", cuda=12080, environment=CUDA_12),
        "one Hopper with 97871 MiB of its own (capture warpik-GH200-570.124.txt)",
    ),
    Case(
        "4 x V100",
        Machine(
            of(4, name="Tesla V100-SXM2-32GB", capability="7.0", mib=32768, mig="-"),
            driver="535.183.01",
            cuda=12020,
            environment=CUDA_12,
        ),
        f"nvmlDeviceGetMigMode gives NVML_ERROR_NOT_SUPPORTED ({NVML_H}); compute capability 7.0, "
        "for which builds of PyTorch for CUDA 13 hold no code",
        expected={"container.cuda": "warn"},
    ),
)


def bdf(index: int) -> str:
    return f"0000:{0x18 + index:02x}:00.0"


def outcome(case: Case, root: Path, python: str) -> tuple[list[Record], list[Finding]]:
    """The payload's records on the machine of a case, and what the checks report on them."""
    machine = case.machine
    every = [machine.uuid(index) for index in range(len(machine.gpus))]
    handed = list(case.handed) if case.handed is not None else every
    records = run(machine, root.resolve(), settings={"gpus": dict.fromkeys(handed, case.used_before)}, python=python)
    # Where the libraries lie is another folder each time.
    plain = [record.model_dump_json(by_alias=True).replace(str(root.resolve()), "") for record in records]
    kept = [Record.model_validate_json(text).model_copy(update={"container": container()}) for text in plain]
    values = {"complete": True, "gpus": len(handed), "busy": [], "uuids": handed}
    kept.append(
        Record.model_validate(
            {"record": "container", "device": "cuda", "seconds": 60.0, "values": values, "container": IMAGE}
        )
    )
    return kept, list(judge(node(case, kept), Expectation(), level="standard"))


def container() -> Any:
    return Record.model_validate({"record": "container", "device": "cpu", "seconds": 0, "container": IMAGE}).container


def node(case: Case, records: Iterable[Record]) -> NodeFacts:
    """The node as the probe on the host saw it: its module, its GPUs, their MIG devices."""
    machine = case.machine
    first = case.handed is not None and machine.first != 0
    host = WHOLE if first else machine
    gpus = [
        {
            "index": index,
            "uuid": host.uuid(index),
            "pci_bus_id": bdf(index),
            "name": gpu.name,
            "mig_mode": gpu.mig == "on",
            "mig_devices": [
                {"index": part, "memory_total_mib": PART_MIB}
                for part in range(case.settings.get("host_parts", gpu.parts) if gpu.mig == "on" else 0)
            ],
            "memory_total_mib": gpu.mib,
        }
        for index, gpu in enumerate(host.gpus)
    ]
    devices = tuple(
        PciDevice.model_validate(
            {
                "slot": bdf(index),
                "class_id": "0302",
                "vendor_id": "10de",
                "device_id": "2330",
                "subsystem_id": "10de:16c1",
                "driver": "nvidia",
            }
        )
        for index in range(len(host.gpus))
    )
    native = {"580": "13.0", "570": "12.8", "535": "12.2"}[machine.driver.partition(".")[0]]
    return NodeFacts(
        host="n",
        collected_at="now",
        pci=devices,
        loaded_driver=LoadedDriver(version=machine.driver, flavour="open"),
        architecture="x86_64",
        smi=Smi[SmiLog](document={"gpus": gpus, "cuda_version": native}),
        records=tuple(records),
    )


def statuses(findings: Iterable[Finding], check: str) -> str:
    """``fail, pass``: the statuses that a check gives on a node, each once."""
    return ", ".join(sorted({finding.status.value for finding in findings if finding.check == check}))


def row(case: Case, records: list[Record], findings: list[Finding]) -> str:
    """A line of the table: what the payload recorded, and the verdicts that are no pass with their first message."""
    cells = [case.name, case.real, recorded(records), verdicts(findings)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def recorded(records: list[Record]) -> str:
    """What the records report in short."""
    by = {record.record: record for record in records}
    nvml, cuda, torch = (by[f"versions.{name}"] for name in ("nvml", "cuda", "torch"))
    words = [f"NVML {nvml.values.get('count', nvml.error)}"]
    cuda_words = f"CUDA {cuda.values.get('count')}" if cuda.values.get("result") == 0 else None
    words.append(cuda_words or f"cuInit {cuda.values.get('result')}")
    words.append(f"PyTorch {torch.values.get('count')}" if torch.values.get("available") else "PyTorch: none")
    kernels = [record for record in records if record.record == "gpus.kernel"]
    ends = Counter(end_of(record) for record in kernels if record.skipped is None)
    words.append("kernels: " + (", ".join(f"{number} {end}" for end, number in sorted(ends.items())) or "none"))
    if cuda.values.get("forward_compat"):
        words.append(f"forward compatibility by libcuda {cuda.values.get('version')}")
    return "; ".join(words)


def end_of(kernel: Record) -> str:
    """How the kernel of one device ended."""
    if kernel.undetermined is not None:
        return "not tried"
    if kernel.error is not None:
        return "broke"
    return "wrong" if kernel.values["wrong"] else "right"


def verdicts(findings: list[Finding]) -> str:
    """Every check of CHECKS: its status, with the message of the first finding that does not pass."""
    cells = []
    for check in CHECKS:
        matches = [finding for finding in findings if finding.check == check]
        # Devices are worked on side by side: their order is another one each time.
        odd = sorted(
            (finding for finding in matches if finding.status.value != "pass"), key=lambda finding: finding.component
        )
        if not odd:
            cells.append(f"`{check}` pass" + (f" ({len(matches)})" if len(matches) > 1 else ""))
            continue
        where = f"{odd[0].component}: " if odd[0].component != "node" else ""
        cells.append(f"`{check}` **{odd[0].status.value}**: {where}{odd[0].message}")
    return "<br>".join(cells)


def page(results: Iterable[tuple[Case, list[Record], list[Finding]]]) -> str:
    """The page with the table as it is now."""
    head, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    title = "| machine | what real hardware gives | what the payload records | verdicts |\n|---|---|---|---|\n"
    return head + start + "\n" + title + "".join(row(*result) for result in results)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch = python_with_torch(Path(folder, "python"))
        results = [(case, *outcome(case, Path(folder, str(number)), torch)) for number, case in enumerate(CASES)]
    PAGE.write_text(page(results), encoding="utf-8")
