"""Mutants of the checks on measurements."""

import json
from typing import Any

from bundles import Base, Edit, Missing, Mutant, hgx_measured, pcie_measured, result
from mutants_workload import broke, not_known, value

from gpunode.checks import Expectation, Status
from gpunode.facts.models.measured import COLLECTIVES, GEMM_TYPES

WARN, ERROR, SKIP = Status.WARN, Status.ERROR, Status.SKIP
SIBLINGS = "performance.siblings"


def all_of(base: Base, record: str, *keys: str | int, new: Any) -> list[Edit]:
    """Return edits that give every record of a name another value, so that no GPU is unlike its siblings."""
    document = base()
    return [
        Edit(("results", index, "values", *keys), None, new)
        for index, part in enumerate(document["results"])
        if part["record"] == record
    ]


def pair(base: Base, source: int, target: int, key: str, new: Any) -> list[Edit]:
    """Return the edit of one pair of the peer copies."""
    (record,) = [part for part in base()["results"] if part["record"] == "copy.peer"]
    places = [
        index
        for index, row in enumerate(record["values"]["pairs"])
        if (row["source"], row["target"]) == (source, target)
    ]
    return value(base, "copy.peer", "pairs", places[0], key, new=new)


def printed(base: Base, tool: str, old: str, new: str) -> list[Edit]:
    """Return the edit of what a tool printed."""
    document = base()
    index = [part["record"] for part in document["results"]].index(f"tools.{tool}")
    return [Edit(("results", index, "values", "stdout"), old, new)]


def values_of(base: Base, record: str) -> dict[str, Any]:
    """Return the values of the first record of a name."""
    values: dict[str, Any] = next(part["values"] for part in base()["results"] if part["record"] == record)
    return values


def cut_short(base: Base, tool: str) -> list[Edit]:
    """Return the edit by which a record keeps the first half alone of what a tool printed."""
    values = values_of(base, f"tools.{tool}")
    half = values["stdout"][: len(values["stdout"]) // 2]
    return [result(base(), f"tools.{tool}", "values", new=values | {"stdout": half, "cut": True})]


def uncompared(base: Base, record: str) -> list[Edit]:
    """Return the edit by which no result of a collective was compared."""
    rows = [row | {"wrong": None} for row in values_of(base, record)["rows"]]
    return value(base, record, "rows", new=rows)


def diag(base: Base, gpu: int, status: str, warning: str) -> list[Edit]:
    """Return the edit by which ``dcgmi diag`` reports one GPU."""
    document = base()
    index = [part["record"] for part in document["results"]].index("tools.dcgm-diag")
    answer = json.loads(document["results"][index]["values"]["stdout"])
    bad = answer["DCGM Diagnostic"]["test_categories"][1]["tests"][0]["results"][gpu]
    bad |= {"status": status, "warnings": [{"warning": warning, "error_id": 7}]}
    return [Edit(("results", index, "values", "stdout"), None, json.dumps(answer))]


CORRUPT = {
    "round": 3,
    "row": 1024,
    "column": 512,
    "rows": 128,
    "columns": 128,
    "wrong": 1,
    "first_row": 1031,
    "first_column": 515,
}
BAD_LINK = {"ranks": [2, 5], "verdict": "slow", "bandwidth_gb_per_s": 4.0}
MUTANTS = [
    Mutant(
        "performance.host-copy",
        "below the pass mark of the model",
        hgx_measured,
        all_of(hgx_measured, "copy.host", "copies", 0, "bandwidth_gb_per_s", new=44.0),
        everywhere=True,
    ),
    Mutant(
        "performance.host-copy",
        "below the share of the PCIe limit that is usual",
        pcie_measured,
        all_of(pcie_measured, "copy.host", "copies", 3, "bandwidth_gb_per_s", new=20.0),
        becomes=WARN,
        everywhere=True,
    ),
    Mutant(
        "performance.host-copy",
        "a third of the PCIe limit",
        pcie_measured,
        all_of(pcie_measured, "copy.host", "copies", 3, "bandwidth_gb_per_s", new=9.0),
        everywhere=True,
    ),
    Mutant(
        "performance.host-copy",
        "below what the site asks for",
        hgx_measured,
        all_of(hgx_measured, "copy.host", "copies", 0, "bandwidth_gb_per_s", new=53.9),
        expect=Expectation(figures={"host_to_device": 54}),
        everywhere=True,
    ),
    Mutant(
        "performance.host-copy",
        "arrived wrong",
        hgx_measured,
        value(hgx_measured, "copy.host", "copies", 2, "wrong", new=1),
    ),
    Mutant(
        "performance.host-copy", "breaks", hgx_measured, broke(hgx_measured, "copy.host", "CUDA error: unknown error")
    ),
    Mutant(
        "performance.device-copy",
        "a third of the memory's bandwidth",
        hgx_measured,
        all_of(hgx_measured, "copy.device", "bandwidth_gb_per_s", new=1000.0),
        everywhere=True,
    ),
    Mutant("performance.device-copy", "wrong", hgx_measured, value(hgx_measured, "copy.device", "wrong", new=4)),
    Mutant(
        "performance.peer-copy",
        "one pair is slow",
        hgx_measured,
        pair(hgx_measured, 2, 5, "bandwidth_gb_per_s", 120.0),
    ),
    Mutant("performance.peer-copy", "through the host", hgx_measured, pair(hgx_measured, 2, 5, "direct", new=False)),
    Mutant("performance.peer-copy", "arrived wrong", hgx_measured, pair(hgx_measured, 7, 0, "wrong", 12)),
    Mutant(
        "performance.memory",
        "below DCGM's mark",
        hgx_measured,
        all_of(hgx_measured, "memory.stream", "kernels", 1, "bandwidth_gb_per_s", new=1850.0),
        everywhere=True,
    ),
    Mutant(
        "performance.memory",
        "below what others measure",
        hgx_measured,
        all_of(hgx_measured, "memory.stream", "kernels", 1, "bandwidth_gb_per_s", new=2500.0),
        becomes=WARN,
        everywhere=True,
    ),
    Mutant(
        "performance.memory",
        "another content",
        hgx_measured,
        value(hgx_measured, "memory.stream", "kernels", 0, "wrong", new=1),
    ),
    Mutant(
        "performance.gemm",
        "one element of one block is wrong",
        hgx_measured,
        [
            *value(hgx_measured, "gemm.bf16", "wrong", new=1),
            *value(hgx_measured, "gemm.bf16", "corrupted", new=[CORRUPT]),
        ],
    ),
    Mutant(
        "performance.gemm",
        "a third of the peak at its clock",
        hgx_measured,
        all_of(hgx_measured, "gemm.fp16", "tflops", new=300.0),
        everywhere=True,
    ),
    Mutant(
        "performance.gemm",
        "below what others measure",
        hgx_measured,
        all_of(hgx_measured, "gemm.fp8", "tflops", new=1000.0),
        becomes=WARN,
        everywhere=True,
    ),
    Mutant(
        "performance.gemm",
        "slow on a model without a published figure",
        pcie_measured,
        all_of(pcie_measured, "gemm.bf16", "tflops", new=100.0),
        everywhere=True,
    ),
    Mutant(
        "performance.clocks",
        "the power brake",
        hgx_measured,
        value(hgx_measured, "gemm.bf16", "load", "throttle_reasons", new={"hw_power_brake_slowdown": 0.5}),
    ),
    Mutant(
        "performance.clocks",
        "clocks that are locked low",
        hgx_measured,
        [
            *value(hgx_measured, "gemm.bf16", "load", "throttle_reasons", new={}),
            *value(hgx_measured, "gemm.bf16", "load", "sm_clock_mhz", new=700.0),
        ],
        becomes=Status.FAIL,
    ),
    Mutant(
        "performance.clocks",
        "a power limit that leaves little",
        hgx_measured,
        value(hgx_measured, "gemm.fp64", "load", "sm_clock_mhz", new=600.0),
        becomes=WARN,
    ),
    Mutant(
        "performance.clocks",
        "heat that software reacts to",
        hgx_measured,
        value(hgx_measured, "burn.gemm", "load", "throttle_reasons", new={"sw_thermal_slowdown": 0.5}),
        becomes=WARN,
    ),
    Mutant(
        "performance.burn",
        "the clock falls",
        hgx_measured,
        value(hgx_measured, "burn.gemm", "tflops_slope_percent_per_minute", new=-9.0),
    ),
    Mutant(
        "performance.burn",
        "the clock falls a little",
        hgx_measured,
        value(hgx_measured, "burn.gemm", "tflops_slope_percent_per_minute", new=-4.0),
        becomes=WARN,
    ),
    Mutant("performance.burn", "corruption", hgx_measured, value(hgx_measured, "burn.gemm", "wrong", new=1)),
    Mutant(
        "performance.collectives",
        "below the pass mark of eight",
        hgx_measured,
        value(hgx_measured, "nccl.all-reduce", "rows", 2, "busbw_gb_per_s", new=440.0),
    ),
    Mutant(
        "performance.collectives",
        "a third of NVLink",
        hgx_measured,
        value(hgx_measured, "nccl.all-to-all", "rows", 2, "busbw_gb_per_s", new=140.0),
    ),
    Mutant(
        "performance.collectives",
        "half of what PCIe carries",
        pcie_measured,
        value(pcie_measured, "nccl.broadcast", "rows", 2, "busbw_gb_per_s", new=10.0),
        becomes=WARN,
    ),
    Mutant(
        "performance.collectives",
        "wrong",
        hgx_measured,
        value(hgx_measured, "nccl.broadcast", "rows", 1, "wrong", new=3),
    ),
    Mutant(
        "performance.collectives",
        "a rank is missing",
        hgx_measured,
        value(hgx_measured, "nccl.all-gather", "missing", new=[2]),
    ),
    Mutant(
        "performance.transport",
        "sockets within a node",
        hgx_measured,
        value(hgx_measured, "nccl.all-gather", "kinds", new=["socket"]),
    ),
    Mutant(
        "performance.transport",
        "shared memory beside NVLink",
        hgx_measured,
        value(hgx_measured, "nccl.all-gather", "kinds", new=["SHM"]),
    ),
    Mutant(
        "performance.transport",
        "the switches do not reduce",
        hgx_measured,
        value(hgx_measured, "nccl.all-reduce", "kinds", new=["P2P"]),
        becomes=WARN,
    ),
    Mutant(
        "performance.transport",
        "sockets over PCIe",
        pcie_measured,
        value(pcie_measured, "nccl.send-recv", "kinds", new=["SHM", "socket"]),
    ),
    Mutant(
        "performance.bad-links",
        "one link",
        hgx_measured,
        [
            *value(hgx_measured, "nccl.pairs", "bad", new=[BAD_LINK]),
            *value(hgx_measured, "nccl.pairs", "cleared", new=27),
        ],
    ),
    Mutant(
        "performance.bad-links",
        "a whole GPU",
        hgx_measured,
        value(hgx_measured, "nccl.pairs", "bad_ranks", new=[3]),
    ),
    Mutant(
        "performance.bad-links",
        "no time for all",
        hgx_measured,
        value(hgx_measured, "nccl.pairs", "cleared", new=20),
        becomes=ERROR,
    ),
    Mutant("performance.training", "wrong gradients", hgx_measured, value(hgx_measured, "ddp.sharded", "wrong", new=9)),
    Mutant(
        "performance.training",
        "slow",
        hgx_measured,
        value(hgx_measured, "ddp.replicated", "ratio", new=0.3),
        becomes=WARN,
    ),
    Mutant("performance.training", "a rank", hgx_measured, value(hgx_measured, "ddp.replicated", "missing", new=[1])),
    Mutant(
        SIBLINGS,
        "one GPU copies slower, and reaches its mark",
        hgx_measured,
        value(hgx_measured, "copy.host", "copies", 0, "bandwidth_gb_per_s", new=48.5),
        becomes=WARN,
    ),
    Mutant(SIBLINGS, "one GPU computes slower", hgx_measured, value(hgx_measured, "gemm.fp64", "tflops", new=30.0)),
    Mutant("performance.nvbandwidth", "slow", hgx_measured, printed(hgx_measured, "nvbandwidth", "55.00", "41.00")),
    Mutant(
        "performance.nvbandwidth",
        "a test failed",
        hgx_measured,
        printed(hgx_measured, "nvbandwidth", '"status": "Passed"', '"status": "Error"'),
    ),
    Mutant(
        "performance.nccl-tests",
        "slow",
        hgx_measured,
        printed(hgx_measured, "nccl-tests", "471.00  471.00", "300.00  300.00")
        + printed(hgx_measured, "nccl-tests", "471.00  471.00", "300.00  300.00"),
    ),
    Mutant(
        "performance.nccl-tests",
        "cut off",
        hgx_measured,
        printed(hgx_measured, "nccl-tests", "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 471.0000\n", ""),
    ),
    Mutant(
        "performance.nccl-tests",
        "values out of bounds",
        hgx_measured,
        printed(hgx_measured, "nccl-tests", "bounds values : 0 OK", "bounds values : 2 FAILED"),
    ),
    Mutant("performance.diagnostics", "a GPU fails", hgx_measured, diag(hgx_measured, 3, "Fail", "row remap failed")),
    Mutant(
        "performance.diagnostics",
        "a GPU warns",
        hgx_measured,
        diag(hgx_measured, 3, "Warn", "thermal violations"),
        becomes=WARN,
    ),
    Mutant(
        "performance.storage",
        "nothing is written",
        hgx_measured,
        value(hgx_measured, "storage.fio", "jobs", 1, "bandwidth_gb_per_s", new=0.0),
    ),
    Mutant(
        "performance.storage",
        "slower than the site asks for",
        hgx_measured,
        value(hgx_measured, "storage.fio", "jobs", 0, "bandwidth_gb_per_s", new=3.0),
        expect=Expectation(figures={"storage_read": 5}),
    ),
    Mutant(
        "performance.storage",
        "slower than the site asks for, by our own reader",
        hgx_measured,
        value(hgx_measured, "storage.fio", "jobs", 0, "bandwidth_gb_per_s", new=3.0)
        + value(hgx_measured, "storage.fio", "fio_version", new=None),
        expect=Expectation(figures={"storage_read": 5}),
        becomes=WARN,
    ),
    Mutant(
        "performance.storage",
        "through the page cache",
        hgx_measured,
        value(hgx_measured, "storage.fio", "direct", new=False),
        becomes=WARN,
    ),
    Mutant(
        "performance.dataloader",
        "more workers than processors",
        hgx_measured,
        value(hgx_measured, "storage.dataloader", "advised_workers", new=32),
        becomes=WARN,
    ),
    Mutant(
        "performance.dataloader",
        "nobody knows",
        hgx_measured,
        not_known(hgx_measured, "storage.dataloader", "no time was left"),
        becomes=ERROR,
    ),
    Mutant(
        "performance.input",
        "the disk is too slow for a cold epoch",
        hgx_measured,
        value(hgx_measured, "input.pipeline", "loaders", 1, "samples_per_second", new=3000.0),
        becomes=WARN,
    ),
    Mutant(
        "performance.input",
        "the user's model needs more",
        hgx_measured,
        value(hgx_measured, "input.pipeline", "model_rate", new=9000.0),
        becomes=WARN,
    ),
    Mutant(
        "performance.input",
        "the directory cannot be read",
        hgx_measured,
        broke(hgx_measured, "input.pipeline", "/data/train cannot be read: Permission denied (uid 65534)"),
    ),
    Mutant(
        "performance.input",
        "no loader",
        hgx_measured,
        value(hgx_measured, "input.pipeline", "loaders", new=[]),
        becomes=ERROR,
    ),
    Mutant(
        "performance.steps",
        "launches are slow",
        hgx_measured,
        value(hgx_measured, "steps.device", "launch_us", new=90.0),
        becomes=WARN,
    ),
    Mutant(
        "performance.steps",
        "mixed precision gains nothing",
        hgx_measured,
        value(hgx_measured, "steps.device", "mixed_step_seconds", new=0.03),
        becomes=WARN,
    ),
]

GEMM = tuple(f"gemm.{dtype}" for dtype in GEMM_TYPES)
NCCL = tuple(f"nccl.{name}" for name in COLLECTIVES)
RECORDS: dict[str, tuple[str, ...]] = {
    "performance.host-copy": ("copy.host",),
    "performance.device-copy": ("copy.device",),
    "performance.peer-copy": ("copy.peer",),
    "performance.memory": ("memory.stream",),
    "performance.gemm": GEMM,
    "performance.clocks": (*GEMM, "burn.gemm"),
    "performance.burn": ("burn.gemm",),
    "performance.collectives": NCCL,
    "performance.transport": NCCL,
    "performance.bad-links": ("nccl.pairs",),
    "performance.training": ("ddp.replicated", "ddp.sharded"),
    SIBLINGS: ("copy.host", "copy.device", "memory.stream", *GEMM),
    "performance.nvbandwidth": ("tools.nvbandwidth",),
    "performance.nccl-tests": ("tools.nccl-tests",),
    "performance.diagnostics": ("tools.dcgm-diag",),
    "performance.storage": ("storage.fio",),
    "performance.dataloader": ("storage.dataloader",),
    "performance.input": ("input.pipeline",),
    "performance.steps": ("steps.device",),
}
MISSING: Missing = {
    check: [
        # No workload was run; the records are not there; one is of no kind; its values are rubbish.
        (hgx_measured, [Edit(("results",), None, [])]),
        (
            hgx_measured,
            [Edit(("results",), None, [part for part in hgx_measured()["results"] if part["record"] not in names])],
        ),
        (hgx_measured, [result(hgx_measured(), names[0], new={"record": names[0]})]),
        (hgx_measured, [result(hgx_measured(), names[0], "values", new={"gpus": "many"})]),
    ]
    for check, names in RECORDS.items()
}
MISSING["performance.clocks"].append(
    (hgx_measured, value(hgx_measured, "gemm.bf16", "load", "throttle_reasons", new=None))
)
MISSING["performance.transport"].append((hgx_measured, value(hgx_measured, "nccl.broadcast", "kinds", new=[])))
MISSING["performance.burn"].append(
    (hgx_measured, value(hgx_measured, "burn.gemm", "tflops_slope_percent_per_minute", new=None))
)
MISSING["performance.input"].append((hgx_measured, value(hgx_measured, "input.pipeline", "decoders", new=[])))
for tool, check in (("nvbandwidth", "nvbandwidth"), ("nccl-tests", "nccl-tests"), ("dcgm-diag", "diagnostics")):
    MISSING[f"performance.{check}"].append(
        (hgx_measured, value(hgx_measured, f"tools.{tool}", "stdout", new="garbage\n"))
    )
    # Good so far, and then a crash.
    MISSING[f"performance.{check}"].append((hgx_measured, value(hgx_measured, f"tools.{tool}", "exit_code", new=-11)))
MISSING["performance.nccl-tests"].append((hgx_measured, cut_short(hgx_measured, "nccl-tests")))
MISSING["performance.collectives"].append((hgx_measured, uncompared(hgx_measured, "nccl.broadcast")))
